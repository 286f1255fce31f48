//! Containers of pods: how they come, run, end and go.

mod create;
mod end;
mod exec;
mod resources;
mod start;
mod view;

pub(super) use create::CreateRequest;
pub(super) use resources::in_time;
