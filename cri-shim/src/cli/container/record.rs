//! The stored description of a container: a directory with its record, log and sandbox.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use oci_spec::runtime::Process;
use serde::{Deserialize, Serialize};

use super::claim::Claim;
use super::network_mode::NetworkMode;
use super::ports::Port;
use super::restart::RestartArg;
use crate::cli::format::SHORT_ID;
use crate::sandbox::{HealthCheck, IoLimit};

/// Parent of all containers' directories, within the root. Short, because socket paths are below
/// it.
pub(super) const CONTAINERS: &str = "c";

pub(super) const RECORD: &str = "container.json";

/// The container's output, in the format of the Container Runtime Interface.
const LOG: &str = "container.log";

/// The second log file, if the log is rotated.
const OTHER_LOG: &str = "container.log.1";

/// Files that the container shares with the host.
const SHARED: &str = "shared";

/// CNI's record, in a container's directory. It exists until everything is undone.
const CNI: &str = "cni";

/// Returns CNI's record for the container of this directory.
pub(super) fn cni_records(dir: &Path) -> PathBuf {
    dir.join(CNI)
}

/// Returns whether plugins may have created something for the container of this directory.
pub(super) fn is_attached(dir: &Path) -> bool {
    cni_records(dir).exists()
}

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

/// A file or directory of the host in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::cli) struct Volume {
    pub(in crate::cli) source: PathBuf,
    pub(in crate::cli) destination: String,
    pub(in crate::cli) read_only: bool,
    /// What the host mounts below it later appears in the container.
    #[serde(default)]
    pub(in crate::cli) follows: bool,
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
    /// cloud-init installs podvisor's guest agent.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(in crate::cli) installs_agent: bool,
    /// The firmware that it boots by, in place of the loader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::cli) firmware: Option<PathBuf>,
    /// Most CPUs that it may have while it runs; 0 is those that it has.
    #[serde(default)]
    pub(in crate::cli) max_cpus: u8,
    /// Bytes of memory that it may get while it runs.
    #[serde(default)]
    pub(in crate::cli) growth: u64,
    /// Bytes of them that it has.
    #[serde(default)]
    pub(in crate::cli) grown: u64,
    /// The address of its card, if it came from another host with it.
    #[serde(default)]
    pub(in crate::cli) mac: Option<[u8; 6]>,
    /// It comes from another host, and nobody has seen yet that it runs here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(in crate::cli) arriving: bool,
    /// Disks besides its own, in the order in which the guest got them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(in crate::cli) attached: Vec<AttachedDisk>,
}

/// A disk that was attached to a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::cli) struct AttachedDisk {
    /// The serial number by which the guest finds it.
    pub(in crate::cli) serial: String,
    /// The file or device that somebody named; without one, it is podvisor's in the VM's directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::cli) path: Option<PathBuf>,
    /// The guest may only read it.
    #[serde(default)]
    pub(in crate::cli) is_read_only: bool,
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
    pub(super) fn holds_ports(&self) -> bool {
        !self.record.ports.is_empty() && (Claim::is_taken(&self.dir) || is_attached(&self.dir))
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

/// Writes the record atomically, even if the host loses power.
pub(super) fn write(entry: &Entry) -> anyhow::Result<()> {
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
