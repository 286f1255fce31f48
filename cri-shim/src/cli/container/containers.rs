//! All containers of a root, or all of its VMs: their directories, by names and ids.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use rustix::fs::{FlockOperation, flock};

use super::claim::Claim;
use super::ports::{self, Port};
use super::record::{CONTAINERS, Entry, Record, read, write};
use crate::cli::format::SHORT_ID;
use crate::cli::globals::{Globals, unwritable};
use crate::cli::kept::Kept;
use crate::sandbox::DIR_MAX;

/// Parent of all VMs' directories.
const VMS: &str = "v";

/// Maximum length of a name.
const NAME_MAX: usize = 128;

impl Globals {
    /// Opens the records of containers, or of VMs for their commands.
    pub(in crate::cli) fn containers(&self) -> anyhow::Result<Containers> {
        Containers::of(&self.root()?, self.kept)
    }
}

/// All containers of a root, or all of its VMs.
#[derive(Debug, Clone)]
pub(in crate::cli) struct Containers {
    dir: PathBuf,
    kept: Kept,
}

impl Containers {
    /// Returns those of this root, which may not exist yet.
    pub(in crate::cli) fn open(root: &Path) -> anyhow::Result<Self> {
        Self::of(root, Kept::Containers)
    }

    /// Like [`Self::open`], for what is named.
    pub(in crate::cli) fn of(root: &Path, kept: Kept) -> anyhow::Result<Self> {
        let root = std::path::absolute(root).context("cannot find the root's absolute path")?;
        let dir = root.join(match kept {
            Kept::Containers => CONTAINERS,
            Kept::Vms => VMS,
        });
        Ok(Self { dir, kept })
    }

    /// Creates their directory, and the root with it.
    pub(super) fn make_dir(&self) -> anyhow::Result<()> {
        let made = DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.dir);
        made.with_context(|| format!("cannot create the directory {}", self.dir.display()))
            .map_err(unwritable)
    }

    /// Returns an error if a container of this name cannot be created, as far as that is known
    /// before its image is pulled.
    pub(in crate::cli) fn check(&self, name: Option<&str>) -> anyhow::Result<()> {
        name.map_or(Ok(()), check_name)?;
        let room = DIR_MAX.saturating_sub(CONTAINERS.len() + SHORT_ID + 2);
        let root = self.dir.parent().unwrap_or(&self.dir);
        ensure!(
            root.as_os_str().len() <= room,
            "the path of the root, {}, is too long for the sockets below it: choose one of at most \
             {room} bytes by --root or PODVISOR_ROOT",
            root.display()
        );
        Ok(())
    }

    /// Returns every container's directory, with its record if it has one. One without is being
    /// created, or its creator was killed. Other files are ignored.
    pub(super) fn dirs(&self) -> anyhow::Result<Vec<(PathBuf, io::Result<Option<Record>>)>> {
        let entries = match fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries
                .with_context(|| format!("cannot read the directory {}", self.dir.display()))
                .map_err(unwritable)?,
        };
        let mut dirs = Vec::new();
        for entry in entries {
            let entry = entry?;
            let path = entry.path();
            if is_short_id(&entry.file_name()) && path.is_dir() {
                let record = read(&path);
                dirs.push((path, record));
            }
        }
        Ok(dirs)
    }

    /// Locks the creation of containers.
    fn lock(&self) -> anyhow::Result<File> {
        let lock = File::open(&self.dir)?;
        flock(&lock, FlockOperation::LockExclusive).context("cannot lock the containers")?;
        Ok(lock)
    }

    /// Returns whether a container's creator was killed before it wrote the record: one that is
    /// being created has a record or is claimed whenever the lock is free.
    pub(super) fn is_abandoned(&self, dir: &Path) -> anyhow::Result<bool> {
        let _lock = self.lock()?;
        Ok(matches!(read(dir), Ok(None)) && !Claim::is_taken(dir))
    }

    /// Returns all containers, the newest first.
    pub(in crate::cli) fn list(&self) -> anyhow::Result<Vec<Entry>> {
        let mut list = self.entries()?;
        list.retain(|entry| !entry.record.is_pod);
        Ok(list)
    }

    /// Returns all pods, the newest first.
    pub(in crate::cli) fn pods(&self) -> anyhow::Result<Vec<Entry>> {
        let mut list = self.entries()?;
        list.retain(|entry| entry.record.is_pod);
        Ok(list)
    }

    /// Returns the containers of a pod.
    pub(in crate::cli) fn of_pod(&self, pod: &Entry) -> anyhow::Result<Vec<Entry>> {
        let mut list = self.list()?;
        list.retain(|entry| entry.record.pod.as_ref() == Some(&pod.record.id));
        Ok(list)
    }

    /// Returns containers and pods, the newest first, without those whose record cannot be read:
    /// the sweep before each command reports them.
    fn entries(&self) -> anyhow::Result<Vec<Entry>> {
        let dirs = self.dirs()?.into_iter();
        let known = dirs.filter_map(|(dir, record)| {
            let record = record.ok()??;
            Some(Entry { dir, record })
        });
        let mut list: Vec<Entry> = known.collect();
        list.sort_by_key(|entry| {
            std::cmp::Reverse((entry.record.created_at(), entry.record.id.clone()))
        });
        Ok(list)
    }

    /// Returns the container of this name, id or prefix of an id.
    pub(in crate::cli) fn find(&self, name: &str) -> anyhow::Result<Entry> {
        let found = self.find_if_there(name)?;
        found.with_context(|| {
            let (one, list) = self.kept.named();
            format!("no {one} `{name}`; `podvisor {list}` lists them")
        })
    }

    /// Like [`Self::find`]; `None` if there is no such container.
    pub(super) fn find_if_there(&self, name: &str) -> anyhow::Result<Option<Entry>> {
        match one_of(self.list()?, name) {
            NameLookup::Found(entry) => Ok(Some(*entry)),
            NameLookup::Several => {
                let (one, _) = self.kept.named();
                bail!("several {one}s' ids begin with `{name}`; write more of it")
            }
            NameLookup::None => Ok(None),
        }
    }

    /// Returns the pod of this name, id or prefix of an id.
    pub(in crate::cli) fn find_pod(&self, name: &str) -> anyhow::Result<Entry> {
        let found = self.find_pod_if_there(name)?;
        found.with_context(|| format!("no pod `{name}`; `podvisor pod ls` lists them"))
    }

    /// Like [`Self::find_pod`]; `None` if there is no such pod.
    pub(in crate::cli) fn find_pod_if_there(&self, name: &str) -> anyhow::Result<Option<Entry>> {
        match one_of(self.pods()?, name) {
            NameLookup::Found(entry) => Ok(Some(*entry)),
            NameLookup::Several => bail!("several pods' ids begin with `{name}`; write more of it"),
            NameLookup::None => Ok(None),
        }
    }

    /// Returns an error if a container has this name, before anything is fetched for another one.
    /// Only [`Self::create`] reserves it.
    pub(in crate::cli) fn check_is_free(&self, name: &str) -> anyhow::Result<()> {
        let others = self.entries()?;
        match others.iter().find(|other| other.record.name == name) {
            Some(other) => Err(in_use(name, &other.record)),
            None => Ok(()),
        }
    }

    /// Creates a container's directory and reserves its name. The caller owns it until the claim is
    /// dropped.
    pub(in crate::cli) fn create(&self, mut record: Record) -> anyhow::Result<(Entry, Claim)> {
        self.check(Some(&record.name))?;
        self.make_dir()?;
        let dir = self.dir.join(record.short_id());
        // Of two that request the same name at the same time, the second finds the first's record.
        let _lock = self.lock()?;
        let others = self.entries()?;
        let holders: Vec<_> = others.iter().filter(|other| other.holds_ports()).collect();
        let held: Vec<Port> = (holders.iter())
            .flat_map(|other| other.record.ports.iter().copied())
            .collect();
        ports::choose_free(&mut record.ports, &held)?;
        for other in holders {
            if let Some(port) = ports::conflict(&record.ports, &other.record.ports) {
                bail!(
                    "--publish: {}/{} leads to {} {}; choose another port, or stop that one",
                    port.host(),
                    port.protocol,
                    other.record.what(),
                    other.record.name
                );
            }
        }
        let taken = |entry: &Entry| entry.record.name == record.name || entry.dir == dir;
        if let Some(other) = others.into_iter().find(taken) {
            return Err(in_use(&record.name, &other.record));
        }
        let made = DirBuilder::new().mode(0o700).create(&dir);
        made.with_context(|| format!("cannot create the directory {}", dir.display()))?;
        let claim = Claim::take(&dir).context("cannot lock the container's directory")?;
        let entry = Entry { dir, record };
        write(&entry).inspect_err(|_| {
            // The next attempt should find the cause, not the directory.
            let _ = fs::remove_dir_all(&entry.dir);
        })?;
        Ok((entry, claim))
    }
}

/// The error for a name that another container has.
fn in_use(name: &str, other: &Record) -> anyhow::Error {
    anyhow::anyhow!(
        "the name `{name}` is in use by {} {}; remove that one by `podvisor {}rm`, or choose \
         another name",
        other.what(),
        other.short_id(),
        other.command_prefix(),
    )
}

/// The result of looking up a name.
enum NameLookup {
    Found(Box<Entry>),
    Several,
    None,
}

fn one_of(list: Vec<Entry>, name: &str) -> NameLookup {
    let exact = |entry: &&Entry| entry.record.name == name || entry.record.id == name;
    if let Some(entry) = list.iter().find(exact) {
        return NameLookup::Found(Box::new(entry.clone()));
    }
    let begins = |entry: &&Entry| !name.is_empty() && entry.record.id.starts_with(name);
    let mut begun = list.iter().filter(begins);
    match (begun.next(), begun.next()) {
        (Some(entry), None) => NameLookup::Found(Box::new(entry.clone())),
        (Some(_), Some(_)) => NameLookup::Several,
        (None, _) => NameLookup::None,
    }
}

/// Returns whether a directory has the name of a container's: the prefix of an id.
fn is_short_id(name: &OsStr) -> bool {
    let is_hex = |b: &u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
    name.len() == SHORT_ID && name.as_encoded_bytes().iter().all(is_hex)
}

fn check_name(name: &str) -> anyhow::Result<()> {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    let is_name = name.len() <= NAME_MAX
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(inner);
    ensure!(
        is_name,
        "`{name}` is not a container's name: write at most {NAME_MAX} letters, digits, `_`, `.` and `-`"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::record::{RECORD, sample as record};
    use super::*;
    use crate::small_disk::SmallDisk;

    #[test]
    fn containers_are_found_by_name_id_and_the_beginning_of_one() {
        let root = tempfile::tempdir().unwrap();
        let containers = Containers::open(root.path()).unwrap();
        let (one, _claim) = containers.create(record("a", "one")).unwrap();
        let (_two, _claim) = containers.create(record("b", "two")).unwrap();
        for name in ["one", "aaaa", &one.record.id] {
            assert_eq!(containers.find(name).unwrap().record.name, "one");
        }
        for name in ["", "c", "on"] {
            assert!(containers.find(name).is_err(), "{name}");
        }
    }

    #[test]
    fn the_newest_container_is_listed_first_also_within_a_second() {
        let root = tempfile::tempdir().unwrap();
        let containers = Containers::open(root.path()).unwrap();
        for (id, name, created_nanos) in [("b", "second", 2), ("c", "first", 1), ("a", "third", 3)]
        {
            let record = Record {
                created_nanos,
                ..record(id, name)
            };
            containers.create(record).unwrap();
        }
        // Older versions recorded only seconds.
        let (entry, _claim) = containers.create(record("d", "old")).unwrap();
        let mut older = serde_json::to_value(&entry.record).unwrap();
        older
            .as_object_mut()
            .unwrap()
            .remove("createdNanos")
            .unwrap();
        fs::write(entry.dir.join(RECORD), older.to_string()).unwrap();
        let list = containers.list().unwrap();
        let names: Vec<&str> = list.iter().map(|entry| &*entry.record.name).collect();
        assert_eq!(names, ["third", "second", "first", "old"]);
    }

    #[test]
    fn a_container_that_finds_no_room_leaves_nothing_and_says_why() {
        let disk = SmallDisk::new();
        let containers = Containers::open(disk.path()).unwrap();
        disk.fill();
        for _ in 0..2 {
            let error = containers.create(record("a", "one")).unwrap_err();
            let error = error.downcast::<io::Error>().unwrap();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        }
        disk.clear();
        containers.create(record("a", "one")).unwrap();
    }

    #[test]
    fn a_name_is_taken_once_and_has_no_odd_characters() {
        let root = tempfile::tempdir().unwrap();
        let containers = Containers::open(root.path()).unwrap();
        let _kept = containers.create(record("a", "one")).unwrap();
        let error = containers.create(record("b", "one")).unwrap_err();
        assert!(error.to_string().contains("in use"), "{error}");
        for bad in ["", "-x", "a/b", "..", "a b", &"x".repeat(129)] {
            assert!(containers.create(record("c", bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_port_leads_to_one_container_while_that_has_it() {
        let root = tempfile::tempdir().unwrap();
        let containers = Containers::open(root.path()).unwrap();
        let with_port = |id, name| Record {
            ports: ports::parse("80:8080").unwrap().0,
            ..record(id, name)
        };
        let (_one, claim) = containers.create(with_port("a", "one")).unwrap();
        let error = containers.create(with_port("b", "two")).unwrap_err();
        assert!(error.to_string().contains("container one"), "{error}");
        // Nothing was created for it, and no process is about to.
        drop(claim);
        containers.create(with_port("b", "two")).unwrap();
    }

    #[test]
    fn a_container_that_is_being_made_is_not_abandoned() {
        let root = tempfile::tempdir().unwrap();
        let containers = Containers::open(root.path()).unwrap();
        let (entry, claim) = containers.create(record("a", "one")).unwrap();
        fs::remove_file(entry.dir.join(RECORD)).unwrap();
        assert!(!containers.is_abandoned(&entry.dir).unwrap());
        drop(claim);
        assert!(containers.is_abandoned(&entry.dir).unwrap());
        // A process that looked before the record was written looks again.
        write(&entry).unwrap();
        assert!(!containers.is_abandoned(&entry.dir).unwrap());
    }

    #[test]
    fn what_is_no_containers_directory_is_not_told_of() {
        let root = tempfile::tempdir().unwrap();
        let containers = Containers::open(root.path()).unwrap();
        for other in ["my-notes", "ABCDEF012345", "0123456789abc", "0123456789a"] {
            fs::create_dir_all(root.path().join(CONTAINERS).join(other)).unwrap();
        }
        let (entry, _claim) = containers.create(record("a", "one")).unwrap();
        let dirs: Vec<PathBuf> = containers
            .dirs()
            .unwrap()
            .into_iter()
            .map(|d| d.0)
            .collect();
        assert_eq!(dirs, [entry.dir]);
    }

    #[test]
    fn a_record_that_is_not_understood_is_not_a_missing_one() {
        let root = tempfile::tempdir().unwrap();
        let containers = Containers::open(root.path()).unwrap();
        let (entry, claim) = containers.create(record("a", "one")).unwrap();
        drop(claim);
        let path = entry.dir.join(RECORD);
        for bad in ["", "{}", "{\"id\":"] {
            fs::write(&path, bad).unwrap();
            let error = read(&entry.dir).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{bad}");
            assert!(!containers.is_abandoned(&entry.dir).unwrap(), "{bad}");
            assert!(containers.list().unwrap().is_empty());
        }
        fs::remove_file(&path).unwrap();
        assert!(read(&entry.dir).unwrap().is_none());
    }
}
