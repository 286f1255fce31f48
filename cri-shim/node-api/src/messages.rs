//! The messages. A field that a peer does not know is skipped, and a field that it does not send
//! has its default: later versions only add fields.

mod boot;
mod dump;
mod links;
mod migration;
mod plug;
mod size;
mod usage;

use bytes::Bytes;
use prost::{Enumeration, Message, Oneof};

pub use boot::{BootInfo, BootPhase};
pub use dump::{DumpMemoryAnswer, DumpMemoryRequest, DumpState};
pub use links::SetLinksRequest;
pub use migration::{
    CancelMigrationRequest, MigrationDirection, MigrationState, ReceiveMigrationInput,
    ReceiveMigrationMessage, ReceiveMigrationOpen, ResolveMigrationRequest, SendMigrationInput,
    SendMigrationMessage, SendMigrationOpen, VmMigration,
};
pub use plug::{PlugDiskRequest, UnplugDiskAnswer, UnplugDiskRequest};
pub use size::{ResizeVmAnswer, ResizeVmRequest};
pub use usage::{CardUsage, Traffic, VmUsage, VmUsageList, VmUsageRequest};

/// Which VM is meant.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct VmName {
    /// Namespace of the instance or pod.
    #[prost(string, tag = "1")]
    pub namespace: String,
    /// Name of the VirtualMachineInstance, or of a pod that was made of none.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Unique id of the same object. In a request, an empty one means any.
    #[prost(string, tag = "3")]
    pub uid: String,
}

/// What a VM does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum VmPhase {
    /// The node is newer than its client.
    Unknown = 0,
    /// The pod is there, and its machine does not run yet.
    Starting = 1,
    /// The machine runs.
    Running = 2,
    /// The machine is paused.
    Paused = 3,
    /// The machine has ended.
    Ended = 4,
    /// The pod is there, and waits for a machine that comes from another node.
    Incoming = 5,
}

/// A VM of the node.
#[derive(Clone, PartialEq, Message)]
pub struct Vm {
    /// Its name.
    #[prost(message, optional, tag = "1")]
    pub vm: Option<VmName>,
    /// Name of its pod, which is in the same namespace.
    #[prost(string, tag = "2")]
    pub pod_name: String,
    /// Unique id of its pod.
    #[prost(string, tag = "3")]
    pub pod_uid: String,
    /// Id of the pod's sandbox at the runtime.
    #[prost(string, tag = "4")]
    pub sandbox_id: String,
    /// Id of the container that is the machine; empty while there is none.
    #[prost(string, tag = "5")]
    pub container_id: String,
    /// What it does.
    #[prost(enumeration = "VmPhase", tag = "6")]
    pub phase: i32,
    /// When that began, in nanoseconds since 1970.
    #[prost(int64, tag = "7")]
    pub since_ns: i64,
    /// The addresses of the pod.
    #[prost(string, repeated, tag = "8")]
    pub addresses: Vec<String>,
    /// How the machine ended.
    #[prost(message, optional, tag = "9")]
    pub exit: Option<VmExit>,
    /// Its latest migration, from this node or to it.
    #[prost(message, optional, boxed, tag = "10")]
    pub migration: Option<Box<VmMigration>>,
}

/// How a machine ended.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct VmExit {
    /// The container's exit code: 0 if the guest powered itself off.
    #[prost(int32, tag = "1")]
    pub code: i32,
    /// One word: `Completed`, `Error`, `OOMKilled`, `Moved`.
    #[prost(string, tag = "2")]
    pub reason: String,
    /// The same for people.
    #[prost(string, tag = "3")]
    pub message: String,
}

/// Asks for all VMs.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct ListVmsRequest {}

/// All VMs, ordered by namespace and name.
#[derive(Clone, PartialEq, Message)]
pub struct VmList {
    /// They.
    #[prost(message, repeated, tag = "1")]
    pub vms: Vec<Vm>,
}

/// Asks for all VMs now, and for every change from then on.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct WatchVmsRequest {}

/// A change, or all that there is.
#[derive(Clone, PartialEq, Message)]
pub struct VmEvent {
    /// Which one.
    #[prost(oneof = "VmChange", tags = "1, 2, 3")]
    pub change: Option<VmChange>,
}

/// What has changed.
#[derive(Clone, PartialEq, Oneof)]
pub enum VmChange {
    /// All VMs: the first event, and any later one after which the client forgets what it knew,
    /// because it was too slow to be told each change.
    #[prost(message, tag = "1")]
    All(VmList),
    /// A VM is new, or is not as it was.
    #[prost(message, tag = "2")]
    Changed(Vm),
    /// A VM is gone.
    #[prost(message, tag = "3")]
    Removed(VmName),
}

/// A call about one VM that needs nothing else.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct VmRequest {
    /// Which.
    #[prost(message, optional, tag = "1")]
    pub vm: Option<VmName>,
}

/// Asks a VM to end.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StopRequest {
    /// Which.
    #[prost(message, optional, tag = "1")]
    pub vm: Option<VmName>,
    /// Seconds that the guest has to power itself off; it is killed after them, with 0 at once.
    #[prost(uint32, tag = "2")]
    pub grace_seconds: u32,
}

/// Nothing but that it was done.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Done {}

/// What a client sends on a console.
#[derive(Clone, PartialEq, Message)]
pub struct ConsoleInput {
    /// The first message opens it; the others are typed.
    #[prost(oneof = "ConsoleMessage", tags = "1, 2")]
    pub message: Option<ConsoleMessage>,
}

/// What a client sends on a console.
#[derive(Clone, PartialEq, Eq, Oneof)]
pub enum ConsoleMessage {
    /// Whose console. Who had it before gets ABORTED.
    #[prost(message, tag = "1")]
    Open(VmName),
    /// Bytes for the guest.
    #[prost(bytes, tag = "2")]
    Data(Bytes),
}

/// What a client sends on a connection.
#[derive(Clone, PartialEq, Message)]
pub struct PortForwardInput {
    /// The first message opens it; the others are its bytes. The end of the stream is the end of
    /// the client's direction alone.
    #[prost(oneof = "PortForwardMessage", tags = "1, 2")]
    pub message: Option<PortForwardMessage>,
}

/// What a client sends on a connection.
#[derive(Clone, PartialEq, Eq, Oneof)]
pub enum PortForwardMessage {
    /// Where to.
    #[prost(message, tag = "1")]
    Open(PortForwardOpen),
    /// Bytes for the guest; with UDP, each message is a datagram.
    #[prost(bytes, tag = "2")]
    Data(Bytes),
}

/// Opens a connection to a port of a guest.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PortForwardOpen {
    /// Whose port.
    #[prost(message, optional, tag = "1")]
    pub vm: Option<VmName>,
    /// The port, 1 to 65535.
    #[prost(uint32, tag = "2")]
    pub port: u32,
    /// TCP by default.
    #[prost(enumeration = "PortProtocol", tag = "3")]
    pub protocol: i32,
}

/// Protocols with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum PortProtocol {
    /// TCP.
    Tcp = 0,
    /// UDP.
    Udp = 1,
}

/// What a client sends on a connection to a vsock port.
#[derive(Clone, PartialEq, Message)]
pub struct VsockInput {
    /// The first message opens it; the others are its bytes.
    #[prost(oneof = "VsockMessage", tags = "1, 2")]
    pub message: Option<VsockMessage>,
}

/// What a client sends on a connection to a vsock port.
#[derive(Clone, PartialEq, Eq, Oneof)]
pub enum VsockMessage {
    /// Where to.
    #[prost(message, tag = "1")]
    Open(VsockOpen),
    /// Bytes for the guest.
    #[prost(bytes, tag = "2")]
    Data(Bytes),
}

/// Opens a connection to a vsock port of a guest.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct VsockOpen {
    /// Whose port.
    #[prost(message, optional, tag = "1")]
    pub vm: Option<VmName>,
    /// The port.
    #[prost(uint32, tag = "2")]
    pub port: u32,
}

/// Bytes from the guest.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Data {
    /// They; empty in the first message of a stream, which says that it is open.
    #[prost(bytes = "bytes", tag = "1")]
    pub data: Bytes,
}

/// What a guest's agent says of its system.
#[derive(Clone, PartialEq, Message)]
pub struct GuestInfo {
    /// The agent's version.
    #[prost(string, tag = "1")]
    pub agent_version: String,
    /// The operating system.
    #[prost(message, optional, tag = "2")]
    pub os: Option<GuestOs>,
    /// The system's host name.
    #[prost(string, tag = "3")]
    pub host_name: String,
    /// Name of the time zone, such as `UTC`.
    #[prost(string, tag = "4")]
    pub time_zone: String,
    /// The time zone's offset from UTC in seconds.
    #[prost(int32, tag = "5")]
    pub time_zone_offset: i32,
    /// Users that are logged in.
    #[prost(message, repeated, tag = "6")]
    pub users: Vec<GuestUser>,
    /// Mounted file systems.
    #[prost(message, repeated, tag = "7")]
    pub file_systems: Vec<GuestFileSystem>,
    /// Network interfaces.
    #[prost(message, repeated, tag = "8")]
    pub interfaces: Vec<GuestInterface>,
    /// `thawed` or `frozen`.
    #[prost(string, tag = "9")]
    pub freeze_status: String,
}

/// A guest's operating system, in the words of its `os-release`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct GuestOs {
    /// `ID`.
    #[prost(string, tag = "1")]
    pub id: String,
    /// `NAME`.
    #[prost(string, tag = "2")]
    pub name: String,
    /// `PRETTY_NAME`.
    #[prost(string, tag = "3")]
    pub pretty_name: String,
    /// `VERSION`.
    #[prost(string, tag = "4")]
    pub version: String,
    /// `VERSION_ID`.
    #[prost(string, tag = "5")]
    pub version_id: String,
    /// Release of the kernel.
    #[prost(string, tag = "6")]
    pub kernel_release: String,
    /// Version of the kernel.
    #[prost(string, tag = "7")]
    pub kernel_version: String,
    /// Architecture.
    #[prost(string, tag = "8")]
    pub machine: String,
}

/// A user that is logged in.
#[derive(Clone, PartialEq, Message)]
pub struct GuestUser {
    /// Name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Domain, on systems that have them.
    #[prost(string, tag = "2")]
    pub domain: String,
    /// When the login was, in seconds since 1970.
    #[prost(double, tag = "3")]
    pub login_time: f64,
}

/// A mounted file system.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct GuestFileSystem {
    /// Name of its device.
    #[prost(string, tag = "1")]
    pub disk: String,
    /// Where it is mounted.
    #[prost(string, tag = "2")]
    pub mount_point: String,
    /// Its kind, such as `ext4`.
    #[prost(string, tag = "3")]
    pub kind: String,
    /// Size in bytes.
    #[prost(uint64, tag = "4")]
    pub total_bytes: u64,
    /// Used bytes.
    #[prost(uint64, tag = "5")]
    pub used_bytes: u64,
}

/// A network interface.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct GuestInterface {
    /// Name in the guest.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Hardware address.
    #[prost(string, tag = "2")]
    pub mac: String,
    /// Addresses with the length of their prefix, such as `10.0.0.2/24`.
    #[prost(string, repeated, tag = "3")]
    pub addresses: Vec<String>,
}

/// Freezes the file systems of a guest.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct FreezeRequest {
    /// Whose.
    #[prost(message, optional, tag = "1")]
    pub vm: Option<VmName>,
    /// Seconds after which the node thaws them by itself; 0 means the node's own limit.
    #[prost(uint32, tag = "2")]
    pub timeout_seconds: u32,
}

/// Runs a program in a guest.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct AgentExecRequest {
    /// In which.
    #[prost(message, optional, tag = "1")]
    pub vm: Option<VmName>,
    /// Path of the program and its arguments.
    #[prost(string, repeated, tag = "2")]
    pub command: Vec<String>,
    /// Seconds that it may take; 0 means the node's own limit.
    #[prost(uint32, tag = "3")]
    pub timeout_seconds: u32,
}

/// How a program in a guest ended.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct AgentExecAnswer {
    /// Its exit code.
    #[prost(int32, tag = "1")]
    pub exit_code: i32,
    /// The beginning of its output.
    #[prost(bytes = "bytes", tag = "2")]
    pub stdout: Bytes,
    /// The beginning of its errors.
    #[prost(bytes = "bytes", tag = "3")]
    pub stderr: Bytes,
    /// It wrote more than that.
    #[prost(bool, tag = "4")]
    pub is_truncated: bool,
}

impl VmName {
    /// Names a VM by the namespace, name and unique id of its object.
    #[must_use]
    pub fn new(
        namespace: impl Into<String>,
        name: impl Into<String>,
        uid: impl Into<String>,
    ) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
            uid: uid.into(),
        }
    }

    /// Whether this, in a request, means that VM.
    #[must_use]
    pub fn matches(&self, vm: &VmName) -> bool {
        self.namespace == vm.namespace
            && self.name == vm.name
            && (self.uid.is_empty() || self.uid == vm.uid)
    }
}

impl From<VmName> for VmRequest {
    fn from(vm: VmName) -> Self {
        Self { vm: Some(vm) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_a_unique_id_means_any_instance_of_that_name() {
        let vm = VmName::new("n", "web", "1");
        assert!(VmName::new("n", "web", "").matches(&vm));
        assert!(VmName::new("n", "web", "1").matches(&vm));
        assert!(!VmName::new("n", "web", "2").matches(&vm));
        assert!(!VmName::new("m", "web", "1").matches(&vm));
        assert!(!VmName::new("n", "we", "").matches(&vm));
    }

    #[test]
    fn messages_of_a_later_version_are_read() {
        // Field 15 is unknown, phase 9 too.
        let later = [0x30, 9, 0x7a, 1, b'x'];
        let vm = Vm::decode(&later[..]).unwrap();
        assert_eq!((vm.phase, vm.phase()), (9, VmPhase::Unknown));
    }

    #[test]
    fn a_stream_begins_with_what_it_is_for() {
        let open = ConsoleInput {
            message: Some(ConsoleMessage::Open(VmName::new("n", "web", ""))),
        };
        let read = ConsoleInput::decode(open.encode_to_vec().as_slice()).unwrap();
        assert_eq!(read, open);
    }
}
