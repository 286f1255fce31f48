//! The stored description of a container: a directory with its record, log and sandbox.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail, ensure};
use oci_spec::runtime::Process;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::claim::Claim;
use super::ports::{self, Port};
use super::{NetworkMode, RestartArg, Volume, network};
use crate::cli::format::SHORT_ID;
use crate::sandbox::{DIR_MAX, HealthCheck, IoLimit};

/// Parent of all containers' directories, within the root. Short, because socket paths are below
/// it.
pub(super) const CONTAINERS: &str = "c";

/// Parent of all VMs' directories.
const VMS: &str = "v";

const RECORD: &str = "container.json";

/// The container's output, in the format of the Container Runtime Interface.
const LOG: &str = "container.log";

/// The second log file, if the log is rotated.
const OTHER_LOG: &str = "container.log.1";

/// Files that the container shares with the host.
const SHARED: &str = "shared";

/// Maximum length of a name.
const NAME_MAX: usize = 128;

/// A container as it was requested.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::cli) struct Record {
    /// 64 hexadecimal digits.
    pub(in crate::cli) id: String,
    pub(in crate::cli) name: String,
    /// The image as it was requested, and its id.
    pub(in crate::cli) image: String,
    pub(in crate::cli) image_id: String,
    /// Seconds since 1970.
    pub(in crate::cli) created: u64,
    /// Nanoseconds since that second.
    #[serde(default)]
    pub(in crate::cli) created_nanos: u32,
    pub(in crate::cli) labels: BTreeMap<String, String>,
    /// To be removed once it has ended.
    pub(in crate::cli) remove: bool,
    #[serde(default)]
    pub(in crate::cli) restart: RestartArg,
    pub(in crate::cli) hostname: String,
    pub(in crate::cli) cpus: u8,
    /// Thousandths of a CPU that it may use of them, if not all.
    #[serde(default)]
    pub(in crate::cli) cpu_limit: Option<u32>,
    pub(in crate::cli) memory: u64,
    #[serde(default)]
    pub(in crate::cli) io_limits: Vec<IoLimit>,
    pub(in crate::cli) interactive: bool,
    /// The signal that asks the program to end.
    pub(in crate::cli) stop_signal: u8,
    /// Seconds that it has for that, unless `stop` overrides them.
    #[serde(default)]
    pub(in crate::cli) stop_timeout: Option<u32>,
    pub(in crate::cli) volumes: Vec<Volume>,
    #[serde(default)]
    pub(in crate::cli) network: NetworkMode,
    #[serde(default)]
    pub(in crate::cli) ports: Vec<Port>,
    pub(in crate::cli) jailed: bool,
    /// The id of the pod in whose machine it is; `None` if it has its own machine.
    #[serde(default)]
    pub(in crate::cli) pod: Option<String>,
    /// It is a pod: a machine for containers.
    #[serde(default)]
    pub(in crate::cli) is_pod: bool,
    /// `user[:group]`; processes of `exec` run as it, too.
    pub(in crate::cli) user: String,
    pub(in crate::cli) process: Process,
    /// How its health is checked.
    #[serde(default)]
    pub(in crate::cli) health: Option<HealthCheck>,
    /// It is a VM: its guest has an operating system of its own.
    #[serde(default)]
    pub(in crate::cli) vm: Option<VmRecord>,
}

/// What is stored of a VM besides.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::cli) struct VmRecord {
    /// Bytes of its disk.
    pub(in crate::cli) disk_size: u64,
    /// The port of the host's loopback that leads to its SSH server, where its network has no
    /// address that the host reaches.
    pub(in crate::cli) ssh_port: Option<u16>,
    /// The public keys that its users are logged in by.
    pub(in crate::cli) ssh_keys: Vec<String>,
    /// Whether its console is logged in by itself.
    pub(in crate::cli) has_autologin: bool,
}

impl Record {
    /// Returns what it is called in messages.
    pub(in crate::cli) fn what(&self) -> &'static str {
        match (self.is_pod, &self.vm) {
            (true, _) => "pod",
            (false, Some(_)) => "VM",
            (false, None) => "container",
        }
    }

    /// Returns what commands for it begin with, after `podvisor`.
    pub(in crate::cli) fn command_prefix(&self) -> &'static str {
        match (self.is_pod, &self.vm) {
            (true, _) => "pod ",
            (false, Some(_)) => "vm ",
            (false, None) => "",
        }
    }

    pub(in crate::cli) fn short_id(&self) -> &str {
        self.id.get(..SHORT_ID).unwrap_or(&self.id)
    }

    pub(in crate::cli) fn created_at(&self) -> SystemTime {
        UNIX_EPOCH + Duration::new(self.created, self.created_nanos)
    }

    pub(in crate::cli) fn command(&self) -> String {
        self.process.args().as_deref().unwrap_or_default().join(" ")
    }

    pub(in crate::cli) fn has_terminal(&self) -> bool {
        self.process.terminal().unwrap_or(false)
    }
}

/// A container's directory.
#[derive(Debug, Clone)]
pub(in crate::cli) struct Entry {
    pub(in crate::cli) dir: PathBuf,
    pub(in crate::cli) record: Record,
}

impl Entry {
    pub(in crate::cli) fn log(&self) -> PathBuf {
        self.dir.join(LOG)
    }

    /// Writes the record anew, by whoever has the claim.
    pub(in crate::cli) fn store(&self) -> anyhow::Result<()> {
        write(self)
    }

    /// Returns the directory that the machine's guest shares with the host.
    pub(in crate::cli) fn shared(&self) -> PathBuf {
        self.sandbox_dir().join(SHARED)
    }

    /// Returns the directory of its machine.
    pub(in crate::cli) fn sandbox_dir(&self) -> PathBuf {
        sandbox_dir(&self.dir, &self.record)
    }

    /// Returns the pod that contains it.
    pub(in crate::cli) fn pod(&self) -> Option<Self> {
        self.record.pod.as_ref()?;
        let dir = self.sandbox_dir();
        let record = read(&dir).ok()??;
        Some(Self { dir, record })
    }

    /// Returns whether its ports are in use, or about to be.
    fn holds_ports(&self) -> bool {
        !self.record.ports.is_empty()
            && (Claim::is_taken(&self.dir) || network::is_attached(&self.dir))
    }

    /// Returns the log files: one, or two if the log is rotated.
    pub(super) fn logs(&self) -> Vec<PathBuf> {
        let mut logs = vec![self.log(), self.dir.join(OTHER_LOG)];
        logs.retain(|log| log.exists());
        logs
    }

    /// Opens the log for appending.
    pub(in crate::cli) fn open_log(&self) -> anyhow::Result<File> {
        open_log(&self.log())
    }

    /// Opens the second log file for appending.
    pub(in crate::cli) fn open_other_log(&self) -> anyhow::Result<File> {
        open_log(&self.dir.join(OTHER_LOG))
    }
}

fn open_log(log: &Path) -> anyhow::Result<File> {
    let mut options = File::options();
    options.create(true).append(true).mode(0o600);
    let file = options.open(log);
    file.with_context(|| format!("cannot open {}", log.display()))
}

/// Returns the directory of the machine of the container with this directory.
pub(super) fn sandbox_dir(dir: &Path, record: &Record) -> PathBuf {
    let short = record.pod.as_ref().and_then(|pod| pod.get(..SHORT_ID));
    match (short, dir.parent()) {
        (Some(short), Some(all)) => all.join(short),
        _ => dir.to_owned(),
    }
}

/// What is found by its name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::cli) enum Kept {
    #[default]
    Containers,
    Vms,
}

impl Kept {
    /// Returns what one is called, and the command that lists all.
    fn named(self) -> (&'static str, &'static str) {
        match self {
            Self::Containers => ("container", "ps -a"),
            Self::Vms => ("VM", "vm ps"),
        }
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
            .map_err(crate::cli::unwritable)
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
                .map_err(crate::cli::unwritable)?,
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
    pub(super) fn find_pod_if_there(&self, name: &str) -> anyhow::Result<Option<Entry>> {
        match one_of(self.pods()?, name) {
            NameLookup::Found(entry) => Ok(Some(*entry)),
            NameLookup::Several => bail!("several pods' ids begin with `{name}`; write more of it"),
            NameLookup::None => Ok(None),
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
            bail!(
                "the name `{}` is in use by {} {}; remove that one by `podvisor {}`, or choose another name",
                record.name,
                other.record.what(),
                other.record.short_id(),
                format_args!("{}rm", other.record.command_prefix()),
            );
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

/// Writes the record atomically, even if the host loses power.
fn write(entry: &Entry) -> anyhow::Result<()> {
    let new = entry.dir.join("container.json.new");
    let text = serde_json::to_vec_pretty(&entry.record).context("cannot write JSON")?;
    let write = || -> io::Result<()> {
        let mut file = File::create(&new)?;
        file.write_all(&text)?;
        // Otherwise the rename may reach the disk before the data.
        file.sync_all()?;
        fs::rename(&new, entry.dir.join(RECORD))
    };
    write().with_context(|| format!("cannot write {}", new.display()))
}

/// Returns the record in a container's directory; `None` if it has none. A record that cannot be
/// read or parsed is an error: its container may be running.
pub(super) fn read(dir: &Path) -> io::Result<Option<Record>> {
    let text = match fs::read(dir.join(RECORD)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text?,
    };
    serde_json::from_slice(&text)
        .map(Some)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
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

/// A container for tests.
#[cfg(test)]
pub(in crate::cli) fn sample(id: &str, name: &str) -> Record {
    Record {
        id: id.repeat(64),
        name: name.to_owned(),
        image: "busybox".to_owned(),
        image_id: String::new(),
        created: 1,
        created_nanos: 0,
        labels: BTreeMap::new(),
        remove: false,
        restart: RestartArg::No,
        hostname: "h".to_owned(),
        cpus: 1,
        cpu_limit: None,
        memory: 1 << 28,
        io_limits: Vec::new(),
        interactive: false,
        stop_signal: 15,
        stop_timeout: None,
        volumes: Vec::new(),
        network: NetworkMode::None,
        ports: Vec::new(),
        jailed: true,
        pod: None,
        is_pod: false,
        user: String::new(),
        process: Process::default(),
        health: None,
        vm: None,
    }
}

#[cfg(test)]
mod tests {
    use super::sample as record;
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
