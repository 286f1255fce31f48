//! Configures a VM: every mistake is found before anything is created, and all are reported
//! together.
//!
//! A [`VmBuilder`] has what every VM needs of its owner (`settings.rs`), and where its state comes
//! from: a kernel ([`Boot`], `boot.rs`) or a snapshot ([`Restore`], `restore.rs`). `validate.rs`
//! checks both, `hardware.rs` creates the machine, `saved_state.rs` sets a snapshot's state in it,
//! and `assemble.rs` makes a [`Vm`](crate::Vm) of what was created.

mod assemble;
mod boot;
mod early;
mod hardware;
mod restore;
mod saved_state;
mod settings;
#[cfg(test)]
mod tests;
mod validate;

pub use early::EarlyVm;
pub use restore::{Restore, RestoreBuilder};
pub use settings::{Boot, VmBuilder};
