//! Protocol between the podvisor host and its guest agent.
//!
//! The agent is PID 1 of a guest and the host is the VMM's process; both link this crate. All
//! communication is over virtio-vsock:
//!
//! 1. The agent listens on [`RPC_PORT`] and [`STDIO_PORT`], then connects to the host
//!    ([`HOST_CID`], [`READY_PORT`]) and sends the [`ready_line`]. The host waits for that line;
//!    nothing polls. The connection is then closed.
//! 2. The host connects to [`RPC_PORT`] and speaks ttrpc: service `podvisor.agent.v1.Agent`
//!    ([`api`]). Several connections may be open at the same time; closing one abandons its calls,
//!    not the containers. Each message is at most 4 MiB, ttrpc's own limit; the fields have the
//!    smaller limits of [`limits`].
//! 3. For each standard stream of a process the host chooses a random [`StreamId`], puts it into
//!    the request ([`api::Stdio`]), connects to [`STDIO_PORT`] and sends those 16 bytes. From then
//!    on the connection carries only the stream's bytes. Half-close means end of file, in either
//!    direction. The order of connection and request is free, but a connection whose id is not
//!    named by a request within [`limits::STREAM_CLAIM_TIMEOUT`] is closed. A process is started
//!    whether its streams are connected or not; output waits (the pipe fills, as with any slow
//!    reader), and it is discarded only when the container is deleted.
//!
//! Neither side trusts the other: the host because a container may have taken over the guest, the
//! agent because a bug in the host should cause an error and not kill the pod. Checks that both
//! need are here: [`validate_id`], [`StreamId`], [`parse_ready_line`], [`ExitStatus`], and
//! [`ClockBracket`], with which either side compares its clock with the other's.
//!
//! Errors are sent as [`AgentError`], which converts to and from [`ttrpc::Error`].

mod clock;
mod dev;
mod error;
mod id;
mod names;
mod ready;
mod status;

pub use clock::ClockBracket;
pub use dev::{GUEST_DEVICES, is_containers_own};
pub use error::{AgentError, ErrorKind};
pub use id::{InvalidId, InvalidStreamId, StreamId, validate_id};
pub use names::{FILL, MountSource, PidNamespace, SHARED_DIR, SHARED_MEMORY};
pub use ready::{InvalidReadyLine, parse_ready_line, ready_line};
pub use status::{ExitStatus, MissingExitStatus};

/// Context ID of the host on every guest's vsock (Linux `VMADDR_CID_HOST`).
pub const HOST_CID: u32 = 2;
/// Port on the host to which the agent sends its ready line.
pub const READY_PORT: u32 = 1024;
/// Port in the guest where the agent serves ttrpc.
pub const RPC_PORT: u32 = 1025;
/// Port in the guest where the agent accepts the standard streams of processes.
pub const STDIO_PORT: u32 = 1026;

/// The key of a call's metadata in which the host may name the request that caused the call; the
/// value is only written to the guest's log.
pub const REQUEST_METADATA: &str = "request";

/// Version of this protocol. It is raised with each change that an older peer would misread; new
/// fields and methods do not raise it.
pub const PROTOCOL_VERSION: u32 = 1;

/// Limits on what either side accepts.
pub mod limits {
    use std::time::Duration;

    /// Longest container or exec id, in bytes.
    pub const ID_BYTES: usize = 128;
    /// Longest virtio-blk serial, in bytes (virtio 1.3 §5.2.6.1).
    pub const SERIAL_BYTES: usize = 20;
    /// Largest OCI specification, in bytes of JSON.
    pub const SPEC_BYTES: usize = 3 << 20;
    /// Largest generated file such as /etc/hosts, in bytes.
    pub const ETC_FILE_BYTES: usize = 64 << 10;
    /// Longest host name, in bytes (Linux `__NEW_UTS_LEN`).
    pub const HOSTNAME_BYTES: usize = 64;
    /// Largest seed that [`Configure`](crate::api::ConfigureRequest) takes, in bytes.
    pub const ENTROPY_BYTES: usize = 512;
    /// Maximum network interfaces of a guest.
    pub const INTERFACES: usize = 16;
    /// Longest name of a network interface, in bytes (Linux `IFNAMSIZ` without the terminator).
    pub const INTERFACE_NAME_BYTES: usize = 15;
    /// Maximum addresses of one interface.
    pub const ADDRESSES: usize = 32;
    /// Maximum routes of a guest.
    pub const ROUTES: usize = 1024;
    /// Maximum static neighbours of a guest.
    pub const NEIGHBOURS: usize = 256;
    /// Maximum virtio-fs devices that a guest can mount.
    pub const SHARES: usize = 16;
    /// Longest tag of a virtio-fs device, in bytes (virtio 1.3 §5.11.4).
    pub const TAG_BYTES: usize = 36;
    /// Maximum kernel parameters of a request.
    pub const SYSCTLS: usize = 256;
    /// Longest value of a kernel parameter, in bytes.
    pub const SYSCTL_BYTES: usize = 4 << 10;
    /// Maximum forwarded connections of a guest at the same time.
    pub const PORT_FORWARDS: usize = 256;
    /// Longest `user[:group]`, in bytes.
    pub const USER_BYTES: usize = 256;
    /// Maximum containers of a guest at the same time.
    pub const CONTAINERS: usize = 256;
    /// Maximum user namespaces of a guest: containers with the same mappings share one.
    pub const USER_NAMESPACES: usize = 16;
    /// Maximum volumes in memory of a guest.
    pub const MEMORY_VOLUMES: usize = 512;
    /// Maximum processes started by exec in a container at the same time, including ended ones that
    /// were not waited for.
    pub const EXECS: usize = 256;
    /// Maximum stdio connections that wait for the request that names them.
    pub const UNCLAIMED_STREAMS: usize = 1024;
    /// How long such a connection is kept.
    pub const STREAM_CLAIM_TIMEOUT: Duration = Duration::from_secs(60);
    /// Longest error message, in bytes.
    pub const ERROR_BYTES: usize = 4 << 10;
}

/// Messages, client and server of the service `podvisor.agent.v1.Agent`, generated from
/// `proto/agent.proto`, whose comments describe each of them.
pub mod api {
    pub use crate::generated::agent::*;
    pub use crate::generated::agent_ttrpc::{Agent, AgentClient, create_agent};
}

// Generated code does not follow this workspace's lints.
#[allow(
    clippy::all,
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    unused
)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/generated.rs"));
}
