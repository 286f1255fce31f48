//! Pods of a daemon whose machine processes are stand-ins (`tests/programs/stand_in.rs`), which
//! reliably do what those of guests rarely do: this needs no guest.

#[path = "../support/mod.rs"]
mod support;

mod cdi;
mod containers;
mod ends;
mod logs;
mod newest;
mod starts;
mod status;
mod volumes;
