//! Commands in containers, and the streams of exec, attach and port-forward.

use prost::Message;

/// Request of [`RuntimeService::exec_sync`](crate::RuntimeService::exec_sync).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct ExecSyncRequest {
    /// The id of the container.
    #[prost(string, tag = "1")]
    pub container_id: String,
    /// The command and its arguments.
    #[prost(string, repeated, tag = "2")]
    pub cmd: Vec<String>,
    /// How long it may take, in seconds; 0 for ever.
    #[prost(int64, tag = "3")]
    pub timeout: i64,
}

/// Answer of [`RuntimeService::exec_sync`](crate::RuntimeService::exec_sync).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct ExecSyncResponse {
    /// What it wrote to stdout.
    #[prost(bytes = "vec", tag = "1")]
    pub stdout: Vec<u8>,
    /// What it wrote to stderr.
    #[prost(bytes = "vec", tag = "2")]
    pub stderr: Vec<u8>,
    /// The exit code; only once it has ended.
    #[prost(int32, tag = "3")]
    pub exit_code: i32,
}

/// Request of [`RuntimeService::exec`](crate::RuntimeService::exec).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct ExecRequest {
    /// The id of the container.
    #[prost(string, tag = "1")]
    pub container_id: String,
    /// The command and its arguments.
    #[prost(string, repeated, tag = "2")]
    pub cmd: Vec<String>,
    /// Whether it has a terminal.
    #[prost(bool, tag = "3")]
    pub tty: bool,
    /// Whether stdin is wanted.
    #[prost(bool, tag = "4")]
    pub stdin: bool,
    /// Whether stdout is wanted.
    #[prost(bool, tag = "5")]
    pub stdout: bool,
    /// Whether stderr is wanted.
    #[prost(bool, tag = "6")]
    pub stderr: bool,
}

/// Answer of [`RuntimeService::exec`](crate::RuntimeService::exec).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct ExecResponse {
    /// Where to connect to.
    #[prost(string, tag = "1")]
    pub url: String,
}

/// Request of [`RuntimeService::attach`](crate::RuntimeService::attach).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct AttachRequest {
    /// The id of the container.
    #[prost(string, tag = "1")]
    pub container_id: String,
    /// Whether stdin is wanted.
    #[prost(bool, tag = "2")]
    pub stdin: bool,
    /// Whether it has a terminal.
    #[prost(bool, tag = "3")]
    pub tty: bool,
    /// Whether stdout is wanted.
    #[prost(bool, tag = "4")]
    pub stdout: bool,
    /// Whether stderr is wanted.
    #[prost(bool, tag = "5")]
    pub stderr: bool,
}

/// Answer of [`RuntimeService::attach`](crate::RuntimeService::attach).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct AttachResponse {
    /// Where to connect to.
    #[prost(string, tag = "1")]
    pub url: String,
}

/// Request of [`RuntimeService::port_forward`](crate::RuntimeService::port_forward).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct PortForwardRequest {
    /// The id of the pod.
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
    /// The ports.
    #[prost(int32, repeated, tag = "2")]
    pub port: Vec<i32>,
}

/// Answer of [`RuntimeService::port_forward`](crate::RuntimeService::port_forward).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct PortForwardResponse {
    /// Where to connect to.
    #[prost(string, tag = "1")]
    pub url: String,
}
