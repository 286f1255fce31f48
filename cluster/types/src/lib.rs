//! KubeVirt's objects as plain types, with their defaults and their validation.
//!
//! Everything in here is a pure function of its input: the admission webhooks, the controllers,
//! the command line and the node read the same specification in the same way. The crate knows
//! no client of Kubernetes and no VM.
//!
//! A specification goes through two steps. [`vmi::VmiSpec::apply_defaults`] fills in what a user
//! left out, and [`vmi::VmiSpec::validate`] lists every [`Cause`] to refuse it by the path of its
//! field. Words and numbers stay as the user wrote them until then: a wrong word is a cause with
//! a path, not an error of the JSON decoder.

#[macro_use]
mod object;

pub mod cause;
pub mod clone;
pub mod config;
pub mod datavolume;
pub mod duration;
pub mod export;
pub mod instancetype;
pub mod kubevirt;
pub mod memory_dump;
pub mod meta;
pub mod migration;
pub mod names;
pub mod quantity;
pub mod replica_set;
pub mod snapshot;
pub mod vm;
pub mod vmi;

pub use cause::{Cause, CauseReason, Causes, FieldPath};
pub use config::{ClusterConfig, ClusterDefaults};
pub use quantity::{Quantity, QuantityError};
