//! Conformance to the Container Runtime Interface, v1: tests for what a kubelet expects of every
//! runtime, written from the interface's documentation and run over its socket.
//!
//! The runtime is `podvisor serve`, or the one that `PODVISOR_CONFORMANCE_AGAINST` names:
//! `containerd` (with runc), which proves that the suite is right, or the path of a served socket.
//! All tests share the runtime and its images; those that only run a container share a pod, too,
//! since a pod is a virtual machine.

mod client;
mod containers;
mod devices;
mod fixture;
mod images;
mod limits;
mod logs;
mod many;
mod network;
mod pod;
mod pressure;
mod sandboxes;
mod security;
mod streaming;
#[path = "../support/mod.rs"]
mod support;
mod users;
mod volume_users;
mod volumes;
