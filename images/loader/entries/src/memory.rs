//! [`Volumes`] in memory, for tests.
#![allow(clippy::missing_panics_doc, clippy::expect_used)]

use std::collections::BTreeMap;

use crate::signature::Kind;
use crate::volumes::{FileError, FileKind, FileStat, Volume, VolumeId, Volumes};

/// File systems of a few files.
#[derive(Clone, Debug, Default)]
pub struct MemoryVolumes {
    volumes: Vec<Volume>,
    files: Vec<BTreeMap<String, Vec<u8>>>,
}

impl MemoryVolumes {
    /// No file system at all.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a volume with files, by path from the root.
    #[must_use]
    pub fn volume(mut self, volume: Volume, files: &[(&str, &[u8])]) -> Self {
        self.volumes.push(volume);
        self.files.push(
            files
                .iter()
                .map(|(path, bytes)| (path.trim_start_matches('/').to_owned(), bytes.to_vec()))
                .collect(),
        );
        self
    }

    /// Adds ext4 as the next partition of the first disk.
    #[must_use]
    pub fn ext4(self, uuid: &str, files: &[(&str, &[u8])]) -> Self {
        let number = u32::try_from(self.volumes.len() + 1).unwrap_or(u32::MAX);
        let volume = Volume {
            disk: 0,
            partition: Some(number),
            device: format!("vda{number}"),
            kind: Kind::Ext4,
            uuid: Some(uuid.to_owned()),
            label: None,
            root: None,
        };
        self.volume(volume, files)
    }

    /// The volume that was added last.
    pub fn last(&mut self) -> &mut Volume {
        self.volumes.last_mut().expect("a volume was added")
    }

    fn files(&self, volume: VolumeId) -> Result<&BTreeMap<String, Vec<u8>>, FileError> {
        self.files.get(volume.0).ok_or_else(|| FileError {
            path: String::new(),
            reason: "no such volume".to_owned(),
        })
    }
}

impl Volumes for MemoryVolumes {
    fn volumes(&self) -> &[Volume] {
        &self.volumes
    }

    fn stat(&self, volume: VolumeId, path: &str) -> Result<Option<FileStat>, FileError> {
        let files = self.files(volume)?;
        if let Some(bytes) = files.get(path) {
            return Ok(Some(FileStat {
                kind: FileKind::Regular,
                size: bytes.len() as u64,
            }));
        }
        let below = format!("{path}/");
        let is_directory = path.is_empty() || files.keys().any(|name| name.starts_with(&below));
        Ok(is_directory.then_some(FileStat {
            kind: FileKind::Directory,
            size: 0,
        }))
    }

    fn read_at(
        &self,
        volume: VolumeId,
        path: &str,
        offset: u64,
        len: usize,
    ) -> Result<Vec<u8>, FileError> {
        let bytes = self.files(volume)?.get(path).ok_or_else(|| FileError {
            path: path.to_owned(),
            reason: "no such file".to_owned(),
        })?;
        let start = usize::try_from(offset)
            .unwrap_or(usize::MAX)
            .min(bytes.len());
        let rest = bytes.get(start..).unwrap_or_default();
        Ok(rest.iter().copied().take(len).collect())
    }

    fn list(
        &self,
        volume: VolumeId,
        directory: &str,
        max: usize,
    ) -> Result<Vec<String>, FileError> {
        let prefix = if directory.is_empty() {
            String::new()
        } else {
            format!("{directory}/")
        };
        let mut names: Vec<String> = self
            .files(volume)?
            .keys()
            .filter_map(|path| path.strip_prefix(&prefix))
            .filter_map(|rest| rest.split('/').next())
            .map(str::to_owned)
            .collect();
        names.dedup();
        names.truncate(max);
        Ok(names)
    }
}
