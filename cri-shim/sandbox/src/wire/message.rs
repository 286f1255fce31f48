//! The requests and answers of the control socket.

use oci_spec::runtime::{LinuxResources, Process};
use serde::{Deserialize, Serialize};

use super::boot::BootHeader;

use crate::types::{
    AfterSave, BootReport, ContainerInfo, ContainerStats, ContainerUser, DumpInfo,
    GuestAgentAnswer, GuestAgentCall, GuestContainer, HealthCheck, MigrationInfo, ProcessExit,
    RefusalKind, RestartPolicy, SandboxExit, SendMachine, Started, SupplementalGroups,
    TerminalSize, Unplugged,
};

/// The control socket in a sandbox's directory.
pub(crate) const CONTROL_SOCKET: &str = "control.sock";

/// Version of the control protocol.
pub(crate) const CONTROL_VERSION: u32 = 2;

/// A request, with a number that the client chooses and that comes back with the answer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) number: u64,
    pub(crate) call: Call,
    /// The number in the client's log of the request that it works for.
    #[serde(default)]
    pub(crate) request: Option<u64>,
}

/// The answer to the request of the same number.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Reply {
    pub(crate) number: u64,
    pub(crate) answer: Result<Answer, Refusal>,
}

/// What is known of a request or a reply of another podvisor's whose rest is not.
#[derive(Debug, Deserialize)]
pub(crate) struct Numbered {
    pub(crate) number: u64,
}

impl Numbered {
    /// The number in a frame that is no known message, which failed to decode with `error`.
    ///
    /// # Errors
    /// `error`, where the frame has no number.
    pub(crate) fn of(
        frame: &[u8],
        error: serde_json::Error,
    ) -> Result<(u64, serde_json::Error), serde_json::Error> {
        match serde_json::from_slice::<Self>(frame) {
            Ok(Self { number }) => Ok((number, error)),
            Err(_) => Err(error),
        }
    }
}

/// What is asked.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Call {
    /// The first request on each connection.
    Hello {
        version: u32,
    },
    /// With the files of [`BootHeader`]. Only for a guest with an operating system of its own.
    BootMachine(Box<BootHeader>),
    /// With the loader's kernel and initramfs, the image, and the file that is written. Only for a
    /// guest with an operating system of its own.
    ReadKernel {
        cmdline: String,
        memory: u64,
    },
    /// With the image, the images of volumes, the log if there is one, and the disks.
    Create(Box<CreateHeader>),
    Start {
        id: String,
    },
    Signal {
        id: String,
        exec_id: Option<String>,
        signal: u32,
        all: bool,
    },
    /// Answered when the process has ended and its output is written.
    Wait {
        id: String,
        exec_id: Option<String>,
    },
    Delete {
        id: String,
    },
    /// With the files of its streams.
    Exec(Box<ExecHeader>),
    /// With the files of its streams.
    Attach {
        id: String,
        stdio: StdioHeader,
        /// The process waits for this reader.
        #[serde(default)]
        is_whole: bool,
    },
    /// The sandbox is shut down when this container's process has ended.
    EndWith {
        id: String,
    },
    /// Sends a signal, and SIGKILL to all of the container if it still runs after the grace period.
    /// Answered immediately.
    Stop {
        id: String,
        signal: u32,
        grace_ms: u64,
    },
    /// Disables restarts of the container's process.
    EndRestarts {
        id: String,
    },
    Pause,
    Resume,
    IsPaused,
    Resize {
        id: String,
        exec_id: Option<String>,
        size: TerminalSize,
    },
    /// With the new log.
    ReopenLog {
        id: String,
    },
    /// With a file for alternating with the present log: lines go to the other file when one has
    /// `max_bytes`.
    LimitLog {
        id: String,
        max_bytes: u64,
    },
    /// The container's health is checked from its start on.
    CheckHealth {
        id: String,
        check: Box<HealthCheck>,
    },
    Stats {
        id: String,
        /// Older processes do not know this.
        #[serde(default)]
        brief: bool,
    },
    List,
    UpdateResources {
        id: String,
        resources: Box<LinuxResources>,
    },
    /// Answered when the guest has `bytes` more than at first, or the time is over.
    Grow {
        bytes: u64,
        patience_ms: u64,
    },
    /// Answered when the guest's containers run short of memory.
    AwaitPressure,
    /// Answered when the guest uses exactly `count` CPUs.
    SetCpus {
        count: u8,
    },
    /// Only for a guest with an operating system of its own. The cards of these interfaces have no
    /// link from then on, all others have one.
    SetLinks {
        id: String,
        down: Vec<String>,
    },
    PortForward {
        port: u16,
    },
    /// Only for a guest with an operating system of its own. The answer comes with a socket that is
    /// connected to the vsock port.
    Vsock {
        port: u32,
    },
    /// Only for a guest with an operating system of its own. Without a time limit, it is waited for
    /// as long as the agent takes.
    GuestAgent {
        id: String,
        ask: Box<GuestAgentCall>,
        limit_ms: u64,
    },
    /// With a stream: a file of a guest with an operating system of its own is read into it, or is
    /// written from it and gets the mode.
    CopyFile {
        id: String,
        path: String,
        write: Option<u32>,
    },
    /// Starts a guest with an operating system of its own again: on request, or at once.
    Reboot {
        id: String,
        is_reset: bool,
    },
    /// With the files for the state, the memory, and copies of `disks` disks: saves a guest with an
    /// operating system of its own that has just these plugged disks. Answered when all is written.
    SaveMachine {
        id: String,
        disks: usize,
        #[serde(default)]
        plugged: Vec<String>,
        then: AfterSave,
    },
    /// With an empty file: dumps the memory of a guest with an operating system of its own there.
    /// Answered when that has begun; a second one of the same name changes nothing.
    DumpMemory {
        id: String,
        name: String,
        limit_ms: u64,
    },
    /// Answered at once, or when no dump is being written any more.
    Dump {
        id: String,
        is_end: bool,
    },
    /// Makes a disk of a guest with an operating system of its own larger.
    GrowDisk {
        id: String,
        serial: String,
        bytes: u64,
    },
    /// With a file or block device: the running guest with an operating system of its own gets it
    /// as a disk. A second one of the same number and file changes nothing.
    PlugDisk {
        id: String,
        serial: String,
        is_read_only: bool,
    },
    /// Answered when the guest has released the disk and it is closed; it is taken away when the
    /// time is over.
    UnplugDisk {
        id: String,
        serial: String,
        limit_ms: u64,
    },
    /// With a connected stream: a machine with an operating system of its own is sent over it.
    /// Answered when that has begun.
    SendMachine {
        id: String,
        send: Box<SendMachine>,
    },
    /// With a connected stream, over which a machine comes that is waited for.
    ReceiveMachine {
        id: String,
        migration: String,
    },
    /// Answered when it has ended.
    CancelMigration {
        id: String,
        migration: String,
    },
    /// Whether a machine that was given away goes on here.
    ResolveMigration {
        id: String,
        migration: String,
        run: bool,
    },
    /// Answered at once, or when the machine's migration is newer than this version of it.
    Migration {
        id: String,
        seen: Option<u64>,
    },
    /// How the latest machine was booted. Answered at once, or when the report is newer than this
    /// version of it.
    BootReport {
        id: String,
        seen: Option<u64>,
    },
    /// The answer comes with a socket that is connected to the serial console.
    Console,
    /// Answered immediately; the client waits for the end.
    Shutdown {
        grace_ms: u64,
    },
    /// Answered when the machine has ended.
    Ended,
    /// Cancels the wait of the request with this number, which is not answered then; nor is this
    /// request. Only for processes that report support for it.
    Abandon {
        number: u64,
    },
}

impl Call {
    /// Whether it is answered when an event happens, and changes nothing.
    pub(crate) fn is_wait(&self) -> bool {
        matches!(
            self,
            Self::Wait { .. }
                | Self::Ended
                | Self::AwaitPressure
                | Self::Migration { seen: Some(_), .. }
                | Self::BootReport { seen: Some(_), .. }
                | Self::Dump { is_end: true, .. }
        )
    }

    /// What it requests, as errors name it.
    pub(crate) fn action(&self) -> &'static str {
        match self {
            Self::BootMachine(_) => "boot a machine",
            Self::ReadKernel { .. } => "read the kernel of an image",
            Self::Create(_) => "create a container",
            Self::Start { .. } => "start a container",
            Self::Signal { .. } => "send a signal",
            Self::Wait { .. } => "wait for a process",
            Self::Delete { .. } => "delete a container",
            Self::Exec(_) => "run a program in the guest",
            Self::Attach { .. } => "attach to a container",
            Self::Stop { .. } => "stop a container",
            Self::EndRestarts { .. } => "disable restarts",
            Self::Resize { .. } => "resize a terminal",
            Self::ReopenLog { .. } | Self::LimitLog { .. } => "change a container's log",
            Self::CheckHealth { .. } => "check a container's health",
            Self::Stats { .. } => "measure a container",
            Self::UpdateResources { .. } => "change a container's resources",
            Self::Grow { .. } => "change the guest's memory",
            Self::AwaitPressure => "wait for memory pressure",
            Self::SetCpus { .. } => "change the guest's CPUs",
            Self::SetLinks { .. } => "change the links of the machine's cards",
            Self::PortForward { .. } => "forward a port",
            Self::Vsock { .. } => "connect to a vsock port",
            Self::GuestAgent { .. } => "ask the guest's agent",
            Self::CopyFile { .. } => "copy a file of the guest",
            Self::Reboot { .. } => "reboot the guest",
            Self::SaveMachine { .. } => "save the machine",
            Self::DumpMemory { .. } => "dump the memory of the machine",
            Self::Dump { .. } => "look at a dump",
            Self::GrowDisk { .. } => "grow a disk of the machine",
            Self::PlugDisk { .. } => "plug a disk into the machine",
            Self::UnplugDisk { .. } => "unplug a disk of the machine",
            Self::SendMachine { .. } => "send the machine to another host",
            Self::ReceiveMachine { .. } => "receive the machine of another host",
            Self::CancelMigration { .. } => "cancel a migration",
            Self::ResolveMigration { .. } => "resolve a migration",
            Self::Migration { .. } => "look at a migration",
            Self::BootReport { .. } => "tell how the machine was booted",
            Self::Pause => "pause the guest",
            Self::Resume | Self::IsPaused => "resume the guest",
            Self::Console => "open the console",
            Self::Hello { .. }
            | Self::List
            | Self::EndWith { .. }
            | Self::Shutdown { .. }
            | Self::Ended
            | Self::Abandon { .. } => "look after the sandbox",
        }
    }

    /// Whether it ends something or sends a signal.
    pub(crate) fn ends_something(&self) -> bool {
        matches!(
            self,
            Self::Shutdown { .. } | Self::Stop { .. } | Self::Signal { .. }
        )
    }
}

/// A container to be created.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct CreateHeader {
    #[serde(flatten)]
    pub(crate) config: GuestContainer,
    pub(crate) image_digest: String,
    /// Digests of the images of volumes.
    #[serde(default)]
    pub(crate) volumes: Vec<String>,
    pub(crate) has_log: bool,
    pub(crate) tty: bool,
    pub(crate) stdin: bool,
    pub(crate) stdin_once: bool,
    #[serde(default)]
    pub(crate) restart: RestartPolicy,
    #[serde(default)]
    pub(crate) devices: Vec<DeviceHeader>,
}

/// A device of a container.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct DeviceHeader {
    pub(crate) path: String,
    pub(crate) access: String,
    pub(crate) source: DeviceKind,
}

/// The device itself; a disk's file comes with the frame.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum DeviceKind {
    Disk {
        serial: String,
        is_read_only: bool,
        mode: u32,
        uid: u32,
        gid: u32,
    },
    Guest {
        path: String,
    },
}

/// An additional process of a container.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ExecHeader {
    pub(crate) id: String,
    pub(crate) exec_id: String,
    pub(crate) process: Process,
    pub(crate) user: String,
    #[serde(default)]
    pub(crate) supplemental_groups: SupplementalGroups,
    pub(crate) tty: Option<TerminalSize>,
    pub(crate) stdio: StdioHeader,
}

/// Which of a process's streams come with the frame, in this order.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct StdioHeader {
    pub(crate) stdin: bool,
    pub(crate) stdout: bool,
    pub(crate) stderr: bool,
}

/// A process's first answer, about itself.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Greeting {
    pub(crate) version: u32,
    /// Containers can have devices; an older process would ignore them.
    #[serde(default)]
    pub(crate) takes_devices: bool,
    /// The names of the jail's layers that the host does not have.
    #[serde(default)]
    pub(crate) missing_layers: Vec<String>,
    /// It reports when the guest runs short of memory.
    #[serde(default)]
    pub(crate) tells_pressure: bool,
    /// It supports `Abandon`.
    #[serde(default)]
    pub(crate) drops_waits: bool,
}

/// The result of a request.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Hello(Greeting),
    Done,
    Created(ContainerUser),
    Started(Started),
    Exit(ProcessExit),
    Stats(Box<ContainerStats>),
    List(Vec<ContainerInfo>),
    /// With a connected socket.
    Stream,
    Ended(SandboxExit),
    IsPaused(bool),
    /// The growth in bytes.
    Grown(u64),
    GuestAgent(GuestAgentAnswer),
    /// If there was one.
    Migration(Option<Box<MigrationInfo>>),
    /// The bytes of a file.
    Copied(u64),
    Unplugged(Unplugged),
    BootReport(Box<BootReport>),
    /// If there was one.
    Dump(Option<Box<DumpInfo>>),
}

/// The reason why a request was refused.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Refusal {
    pub(crate) kind: RefusalKind,
    pub(crate) message: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::ContainerState;

    #[test]
    fn what_a_newer_sandbox_says_is_read_as_far_as_it_is_known() {
        let refusal = r#"{"kind": "Unheard", "message": "no", "more": 1}"#;
        let refusal: Refusal = serde_json::from_str(refusal).unwrap();
        assert_eq!(refusal.kind, RefusalKind::Internal);
        let info = r#"{"id": "a", "state": "Sleeping", "pid": 7, "started_at_ns": 1,
                       "exit": null, "restarts": 0, "more": {}}"#;
        let info: ContainerInfo = serde_json::from_str(info).unwrap();
        assert_eq!(info.state, ContainerState::Unknown);
        let known = [
            ContainerState::Created,
            ContainerState::Running,
            ContainerState::Restarting,
            ContainerState::Exited,
        ];
        for state in known {
            let json = serde_json::to_string(&state).unwrap();
            let read: ContainerState = serde_json::from_str(&json).unwrap();
            assert_eq!(read, state);
        }
    }

    #[test]
    fn the_documentation_has_every_call_and_the_version() {
        let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/sandbox.md");
        let docs = std::fs::read_to_string(docs).unwrap();
        let (_, docs) = docs.split_once("## Control protocol").unwrap();
        let (docs, _) = docs.split_once("\n## ").unwrap();
        let version = format!("`Hello` with the protocol's version, {CONTROL_VERSION}.");
        assert!(docs.contains(&version), "{version}");
        let (_, calls) = include_str!("message.rs")
            .split_once("enum Call {\n")
            .unwrap();
        let (calls, _) = calls.split_once("\n}").unwrap();
        let names = calls.lines().filter_map(|line| line.strip_prefix("    "));
        let names = names.filter(|line| line.starts_with(|c: char| c.is_ascii_uppercase()));
        let names = names.map(|line| line.split([' ', '(', ',']).next().unwrap());
        assert!(names.clone().count() > 20);
        for name in names {
            assert!(docs.contains(&format!("`{name}`")), "{name}");
        }
    }

    #[test]
    fn a_container_keeps_its_place_in_the_message() {
        let container = GuestContainer {
            id: "c".to_owned(),
            user: "7:8".to_owned(),
            etc_hostname: b"h".to_vec(),
            ..GuestContainer::default()
        };
        let header = CreateHeader {
            config: container,
            image_digest: "0".to_owned(),
            volumes: Vec::new(),
            has_log: false,
            tty: true,
            stdin: false,
            stdin_once: false,
            restart: RestartPolicy::Never,
            devices: Vec::new(),
        };
        let json = serde_json::to_value(header).unwrap();
        // Daemons and sandboxes of other versions find the fields side by side.
        assert_eq!((&json["id"], &json["tty"]), (&"c".into(), &true.into()));
        let read: CreateHeader = serde_json::from_value(json).unwrap();
        assert_eq!(
            (&*read.config.user, &*read.config.etc_hostname),
            ("7:8", &b"h"[..])
        );
    }
}
