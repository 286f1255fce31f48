//! Pod sandboxes: how they come, end and go.

mod cgroup;
mod grow;
mod quantity;
mod recover;
mod run;
mod stop;
mod view;

pub(super) use grow::NewLimits;
pub(super) use view::matches_labels;
