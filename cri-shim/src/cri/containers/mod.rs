//! Containers of pods: creation, start, execution, status, stopping and removal.

mod create;
mod end;
mod exec;
mod request;
mod resources;
mod start;
mod stats;
mod stop_signal;
mod view;

pub(super) use request::log_path;
pub(super) use start::{ExitFacts, exit_of};
pub(super) use stats::in_time;
