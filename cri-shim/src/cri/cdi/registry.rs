//! The devices that the files of some directories define.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use tracing::warn;

use super::document::{Device, Document, Format};
use super::error::{CdiError, MAX_FILES};

/// Maximum size of a file, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Maximum number of unusable files that an error names.
const MAX_HINTS: usize = 3;

/// A file and its document.
#[derive(Debug)]
pub(super) struct SpecFile {
    pub(super) path: PathBuf,
    pub(super) document: Document,
}

/// Where a device is defined: indices of its file, and of the device in it.
#[derive(Debug)]
enum Definition {
    One {
        file: usize,
        device: usize,
    },
    /// Files of one directory, by their indices.
    Several(Vec<usize>),
}

/// All devices.
#[derive(Debug, Default)]
pub(super) struct Registry {
    files: Vec<SpecFile>,
    /// By their qualified names.
    devices: BTreeMap<String, Definition>,
    /// Files that cannot be used, and why.
    unusable: Vec<(PathBuf, String)>,
}

impl Registry {
    /// Reads the files of directories, of which later ones go before earlier ones. A file that
    /// cannot be used is logged, and defines nothing.
    pub(super) fn read(directories: &[PathBuf]) -> Result<Self, CdiError> {
        let mut registry = Self::default();
        for directory in directories {
            registry.add_directory(directory)?;
        }
        Ok(registry)
    }

    fn add_directory(&mut self, directory: &Path) -> Result<(), CdiError> {
        let mut devices: BTreeMap<String, Definition> = BTreeMap::new();
        for (path, format) in files(directory)? {
            let document = match load(&path, format) {
                Ok(Some(document)) => document,
                Ok(None) => continue,
                Err(reason) => {
                    warn!(file = %path.display(), reason, "skipping a CDI specification");
                    self.unusable.push((path, reason));
                    continue;
                }
            };
            let file = self.files.len();
            for (device, entry) in document.devices.iter().enumerate() {
                let name = format!("{}={}", document.kind, entry.name);
                let defined = devices.entry(name);
                defined
                    .and_modify(|definition| definition.add(file))
                    .or_insert(Definition::One { file, device });
            }
            self.files.push(SpecFile { path, document });
        }
        self.devices.extend(devices);
        Ok(())
    }

    /// Returns a device by its qualified name, with its file; `None` if it is not defined, or by
    /// several files of a directory.
    pub(super) fn device(&self, name: &str) -> Option<(&SpecFile, &Device)> {
        let Definition::One { file, device } = self.devices.get(name)? else {
            return None;
        };
        let file = self.files.get(*file)?;
        Some((file, file.document.devices.get(*device)?))
    }

    /// Says why devices cannot be resolved, for an error.
    pub(super) fn hints(&self, directories: &[PathBuf], names: &[&str]) -> String {
        let mut hints = String::new();
        for name in names {
            if let Some(Definition::Several(files)) = self.devices.get(*name) {
                let paths = files.iter().filter_map(|file| self.files.get(*file));
                let paths: Vec<_> = paths.map(|file| file.path.display().to_string()).collect();
                let paths = paths.join(" and ");
                let _ = write!(hints, "; {paths} both define {name}: remove one of them");
            }
        }
        if hints.is_empty() {
            let directories = directories.iter().map(|path| path.display().to_string());
            let directories: Vec<_> = directories.collect();
            let directories = directories.join(" or ");
            let _ = write!(hints, ": no specification in {directories} defines them");
        }
        for (path, reason) in self.unusable.iter().take(MAX_HINTS) {
            let _ = write!(hints, "; {} is not used: {reason}", path.display());
        }
        hints
    }
}

impl Definition {
    /// Notes another file of the directory that defines the device.
    fn add(&mut self, file: usize) {
        match self {
            Self::One { file: first, .. } => *self = Self::Several(vec![*first, file]),
            Self::Several(files) => files.push(file),
        }
    }
}

/// Returns the files of a directory by name; none if it is missing.
fn files(directory: &Path) -> Result<Vec<(PathBuf, Format)>, CdiError> {
    let failed = |source| CdiError::Io {
        path: directory.to_owned(),
        source,
    };
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let format = match path.extension().and_then(|name| name.to_str()) {
            Some("json") => Format::Json,
            Some("yaml") => Format::Yaml,
            _ => continue,
        };
        if files.len() == MAX_FILES {
            let directory = directory.to_owned();
            return Err(CdiError::TooManyFiles { directory });
        }
        files.push((path, format));
    }
    files.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
    Ok(files)
}

/// Reads a document; `None` if the path is a directory, or is gone. The error says why it cannot be
/// used.
fn load(path: &Path, format: Format) -> Result<Option<Document>, String> {
    let flags = (OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY).bits();
    let mut options = OpenOptions::new();
    let opened = options
        .read(true)
        .custom_flags(flags.cast_signed())
        .open(path);
    let file = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(|error| error.to_string())?,
    };
    let meta = file.metadata().map_err(|error| error.to_string())?;
    if meta.is_dir() {
        return Ok(None);
    }
    if !meta.is_file() {
        return Err("it is not a file".to_owned());
    }
    let mut bytes = Vec::new();
    let read = file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|error| error.to_string())?;
    if u64::try_from(bytes.len()).is_ok_and(|length| length > MAX_FILE_BYTES) {
        return Err(format!("it has more than {MAX_FILE_BYTES} bytes"));
    }
    let document = Document::parse(&bytes, format).map_err(|fault| {
        let source = std::error::Error::source(&fault);
        match source {
            Some(source) => format!("{fault}: {source}"),
            None => fault.to_string(),
        }
    })?;
    Ok(Some(document))
}
