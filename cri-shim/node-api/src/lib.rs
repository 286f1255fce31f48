//! What a node says of its virtual machines and does to them, over gRPC: `podvisor.node.v1.Node`.
//!
//! A VM pod is a pod to the kubelet, which knows no pause, no console that is typed on from
//! elsewhere and no reset. `podvisor serve` therefore answers these calls on a socket of its own,
//! [`SOCKET`], for root only: the node's part of a control plane is its client.
//!
//! | module | contents |
//! | --- | --- |
//! | [`messages`] | the messages, each a `prost::Message` |
//! | [`NodeClient`] | the client |
//! | [`Node`], [`NodeServer`] | what a server implements, and the gRPC service over it |
//!
//! A VM is named by [`VmName`](messages::VmName): by the VirtualMachineInstance that its pod was
//! made of, or by the pod itself where it was made of none.
//!
//! # Errors
//! | status | when |
//! | --- | --- |
//! | `NOT_FOUND` | the node has no such VM |
//! | `FAILED_PRECONDITION` | its state forbids the call; the message says which |
//! | `INVALID_ARGUMENT` | a field of the request; the message names it |
//! | `ABORTED` | another client took the stream over |
//! | `UNIMPLEMENTED` | this node's version does not know the call |
//!
//! This crate knows nothing of machines, sandboxes, the CRI or Kubernetes' API, and has no `.proto`
//! file: the messages are Rust, and the paths of the calls are in one table.

mod client;
mod limits;
pub mod messages;
mod paths;
mod server;

pub use client::NodeClient;
pub use limits::{MAX_CHUNK_BYTES, MAX_MESSAGE_BYTES};
pub use server::{AnswerStream, Node, NodeServer};

/// Where a node serves by default.
pub const SOCKET: &str = "/run/podvisor/node.sock";
