//! Pods that need the node's own namespaces, in another runtime.
//!
//! A kubelet has one runtime, and some pods of most nodes cannot be virtual machines: kube-proxy
//! and the agents of networks work in the node's network. If the daemon has the socket of another
//! CRI runtime, such as containerd, those pods are created there. The kubelet sees the pods and
//! images of both as those of one runtime: calls about a pod go to the runtime that has it, and
//! lists have the items of both.
//!
//! Messages are passed on as bytes, so that fields of newer versions of the interface are kept. A
//! call is only decoded to find out where it belongs, and answers only where two become one.
//! [`service`] decides where calls go, with those about images in `images`; `missing_image` fetches
//! what only one of the runtimes has, and `features` refuses what the other one would ignore.
//! `merge` joins lists, and `last_lists` has the last ones for the time when the other runtime is
//! away.

mod client;
mod events;
mod features;
mod images;
mod last_lists;
mod merge;
mod message;
mod missing_image;
mod service;

pub(super) use client::HostRuntime;
pub(super) use events::forward as forward_events;
pub(super) use service::WithHost;
