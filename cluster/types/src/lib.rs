//! KubeVirt's objects as plain types, with their defaults and their validation.
//!
//! Everything in here is a pure function of its input: the admission webhooks, the controllers,
//! the command line and the node read the same specification in the same way. The crate knows
//! no client of Kubernetes and no VM.
//!

#[macro_use]
mod object;

pub mod cause;
pub mod meta;
pub mod names;
pub mod quantity;

pub use cause::{Cause, CauseReason, Causes, FieldPath};
pub use quantity::{Quantity, QuantityError};
