//! The Container Runtime Interface: pods and containers of a node, for its kubelet.
//!
//! gRPC requests come in through [`server`] to `runtime` and `images`, which pass them to the
//! [`node`]: its state of pods and containers, stored in the database of [`state`]. `pods` and
//! `containers` do the work and record each step before and after it, using the sandbox's process
//! (`crate::sandbox`), the network (`crate::cni`), `volumes`, `memory_volumes` and the OCI
//! specification of `spec`. Work that a caller asked for continues when the caller goes away, and
//! partly completed work is undone. Nothing here knows virtual machines or the command line.

mod backoff;
mod call_layer;
mod cdi;
mod config;
mod containers;
mod devices;
mod error;
mod events;
mod flights;
mod health;
mod host_runtime;
mod image_names;
mod image_volumes;
mod images;
mod limits;
mod memory_volumes;
mod metrics;
mod node;
mod node_api;
mod pods;
mod resolver;
mod retry_writer;
mod runtime;
mod server;
mod spec;
mod state;
mod state_lock;
mod streaming_backend;
mod unimplemented;
mod vm;
mod vm_spec;
mod volume_users;
mod volumes;

pub(crate) use cdi::DIRECTORIES as CDI_SPEC_DIRS;
#[cfg(test)]
pub(crate) use config::{DEFAULT_CPU_GROWTH, DEFAULT_GROWTH, DEFAULT_MEMORY};
pub(crate) use config::{
    GuestSettings, HANDLER, HOST_HANDLER, HostSettings, POD_IMAGE_SLOTS, ServeConfig, Sizes,
    VM_HANDLER, VmSettings,
};
pub(crate) use image_names::ImageNames;
pub(crate) use pods::place_without_mapped_users;
pub(crate) use server::serve;
