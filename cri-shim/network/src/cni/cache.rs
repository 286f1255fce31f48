//! The requests to plugins and their results, in one file per pod: DEL uses it to undo an ADD even
//! if the configuration has changed or the daemon was killed in between.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tracing::warn;

use super::config::List;
use super::error::CniError;
use super::pod::{Capabilities, PodIdentity};

/// Version of the files' format.
const VERSION: u32 = 1;

/// Extensions of the files of a pod.
const RECORD: &str = "json";
const TEMPORARY: &str = "tmp";
const INPUT: &str = "input";

/// The version of a file that may be of any.
#[derive(Debug, Deserialize)]
struct Version {
    version: u32,
}

/// One pod's attachment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Cached {
    version: u32,
    pub(super) pod: PodIdentity,
    pub(super) list: List,
    pub(super) netns: PathBuf,
    pub(super) capabilities: Capabilities,
    /// `None` before the first plugin has answered; before all have, the result of the last one
    /// that did.
    pub(super) result: Option<Value>,
}

impl Cached {
    pub(super) fn new(
        pod: PodIdentity,
        list: &List,
        netns: PathBuf,
        mut capabilities: Capabilities,
    ) -> Self {
        // What no plugin asks for is not kept: a pod's annotations may be long.
        capabilities.retain(|name, _| list.plugins.iter().any(|plugin| plugin.wants(name)));
        Self {
            version: VERSION,
            pod,
            list: list.clone(),
            netns,
            capabilities,
            result: None,
        }
    }

    /// Whether the pod's identity can be passed to plugins.
    pub(super) fn check(&self) -> Result<(), CniError> {
        for (field, value) in [
            ("id", &self.pod.id),
            ("name", &self.pod.name),
            ("namespace", &self.pod.namespace),
            ("uid", &self.pod.uid),
        ] {
            if value.contains([';', '=', '\0']) {
                return Err(CniError::InvalidIdentity {
                    field,
                    value: value.chars().take(256).collect(),
                });
            }
        }
        Ok(())
    }
}

/// The directory of these files.
#[derive(Debug)]
pub(super) struct Cache {
    dir: PathBuf,
}

impl Cache {
    pub(super) fn open(dir: &Path) -> Result<Self, CniError> {
        let cache = Self {
            dir: dir.to_owned(),
        };
        cache.create_dir()?;
        Ok(cache)
    }

    /// Creates the directory again if it was removed.
    pub(super) fn create_dir(&self) -> Result<(), CniError> {
        let created = fs::create_dir_all(&self.dir);
        created.map_err(CniError::io("create the directory", &self.dir))
    }

    pub(super) fn put(&self, cached: &Cached) -> Result<(), CniError> {
        let written = self
            .write(cached)
            .and_then(|()| File::open(&self.dir)?.sync_all());
        written.map_err(CniError::io("write", self.path(&cached.pod.id)))
    }

    /// As [`Self::put`], but a power failure of the host may bring the previous contents back.
    pub(super) fn note(&self, cached: &Cached) -> Result<(), CniError> {
        let written = self.write(cached);
        written.map_err(CniError::io("write", self.path(&cached.pod.id)))
    }

    fn write(&self, cached: &Cached) -> io::Result<()> {
        let temporary = self.temporary(&cached.pod.id);
        let written = self.write_by(&temporary, cached);
        if written.is_err() {
            // It may not exist; and if it stays, `remove` finds it.
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    fn write_by(&self, temporary: &Path, cached: &Cached) -> io::Result<()> {
        // The directory may have been removed since it was made.
        let mut file = match File::create(temporary) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(&self.dir)?;
                File::create(temporary)?
            }
            created => created?,
        };
        file.write_all(&serde_json::to_vec(cached)?)?;
        // The rename replaces an existing record: the new contents must reach the disk before it
        // does.
        file.sync_data()?;
        fs::rename(temporary, self.path(&cached.pod.id))
    }

    /// A damaged file counts as none: nothing can be undone by it. One of a newer version is left
    /// to the podvisor that can.
    pub(super) fn get(&self, id: &str) -> Result<Option<Cached>, CniError> {
        let path = self.path(id);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(CniError::io("read", path)(error)),
        };
        if let Ok(Version { version }) = serde_json::from_slice(&text)
            && version > VERSION
        {
            return Err(CniError::NewerRecord {
                path,
                version,
                known: VERSION,
            });
        }
        match serde_json::from_slice(&text) {
            Ok(cached) => Ok(Some(cached)),
            Err(error) => {
                warn!(path = %path.display(), %error, "the network's record is damaged");
                Ok(None)
            }
        }
    }

    pub(super) fn remove(&self, id: &str) -> Result<(), CniError> {
        // The record comes last: it shows that there is something to remove.
        for path in [self.temporary(id), self.input(id), self.path(id)] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(CniError::io("remove", path)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the ids of pods with a file here, also those without a record: of a write that a
    /// kill of the daemon interrupted, the temporary file may be all that is left. The same id may
    /// come more than once.
    pub(super) fn ids(&self) -> Result<Vec<String>, CniError> {
        let failed = || CniError::io("read the directory", &self.dir);
        let mut ids = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(failed())? {
            let path = entry.map_err(failed())?.path();
            let stem = path.file_stem().and_then(|stem| stem.to_str());
            if let Some(stem) = stem
                && let Some(extension) = path.extension()
                && [RECORD, TEMPORARY, INPUT]
                    .iter()
                    .any(|known| extension == *known)
            {
                ids.push(stem.to_owned());
            }
        }
        Ok(ids)
    }

    /// The path of the file that is the input of plugins that work on the pod.
    pub(super) fn input(&self, id: &str) -> PathBuf {
        self.dir.join(format!("{id}.{INPUT}"))
    }

    /// The path of the record.
    fn path(&self, id: &str) -> PathBuf {
        self.dir.join(format!("{id}.{RECORD}"))
    }

    /// The path of a record that is being written.
    fn temporary(&self, id: &str) -> PathBuf {
        self.dir.join(format!("{id}.{TEMPORARY}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use podvisor_host::small_disk::SmallDisk;

    fn cached(id: &str) -> Cached {
        let pod = PodIdentity {
            id: id.to_owned(),
            name: "web".to_owned(),
            namespace: "default".to_owned(),
            uid: "uid".to_owned(),
        };
        let list = serde_json::json!({
            "name": "test", "version": "1.0.0", "disable_check": false, "plugins": [],
        });
        let list = serde_json::from_value(list).unwrap();
        Cached::new(pod, &list, PathBuf::from("/none"), Capabilities::new())
    }

    #[test]
    fn a_record_of_a_newer_version_is_kept_and_told() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path()).unwrap();
        let put = |id: &str, text: &str| fs::write(cache.path(id), text).unwrap();
        put("newer", r#"{"version": 2, "networks": []}"#);
        for _ in 0..2 {
            let told = cache.get("newer").unwrap_err();
            assert!(
                matches!(told, CniError::NewerRecord { version: 2, .. }),
                "{told}"
            );
        }
        for damaged in ["", "{}", r#"{"version": 1}"#, r#"{"version": "2"}"#] {
            put("damaged", damaged);
            assert_eq!(cache.get("damaged").unwrap(), None, "{damaged}");
        }
        assert_eq!(cache.get("none").unwrap(), None);
    }

    #[test]
    fn a_directory_that_was_removed_is_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cni");
        let cache = Cache::open(&path).unwrap();
        fs::remove_dir(&path).unwrap();
        assert_eq!(cache.get("pod0").unwrap(), None);
        let cached = cached("pod0");
        cache.put(&cached).unwrap();
        assert_eq!(cache.get("pod0").unwrap(), Some(cached));
    }

    #[test]
    fn of_a_record_that_cannot_be_written_nothing_is_left() {
        let disk = SmallDisk::new();
        let cache = Cache::open(&disk.path().join("cni")).unwrap();
        let kept = cached("kept");
        cache.put(&kept).unwrap();
        disk.fill();
        for id in ["pod0", "kept"] {
            let error = cache.put(&cached(id)).unwrap_err();
            let CniError::Io { source, .. } = error else {
                panic!("{error}");
            };
            assert_eq!(source.kind(), io::ErrorKind::StorageFull);
            assert!(!cache.temporary(id).exists(), "{id}");
        }
        assert_eq!(cache.ids().unwrap(), ["kept"]);
        assert_eq!(cache.get("kept").unwrap(), Some(kept));
    }

    #[test]
    fn what_an_interrupted_write_left_is_found_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path()).unwrap();
        cache.put(&cached("pod0")).unwrap();
        let lefts = [
            cache.temporary("pod0"),
            cache.temporary("pod1"),
            cache.input("pod2"),
        ];
        for left in lefts {
            fs::write(left, "{").unwrap();
        }
        let mut ids = cache.ids().unwrap();
        ids.sort();
        ids.dedup();
        assert_eq!(ids, ["pod0", "pod1", "pod2"]);
        for id in ids {
            cache.remove(&id).unwrap();
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
