//! The event log of the containers of a root: a file that commands and sandboxes append to, and
//! `podvisor events` shows.
//!
//! `log` is the file; `read` reads it while others write; `end` records what nobody has recorded.

mod end;
mod log;
mod read;
#[cfg(test)]
mod tests;

pub(super) use end::note_end;
pub(in crate::cli) use log::{Events, event, note};
pub(super) use read::Reader;
