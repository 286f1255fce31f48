//! Pod sandboxes: creation, status, stopping and removal.

mod bounds;
mod cgroup;
mod grow;
mod importance;
mod kill;
mod late_start;
mod pressure;
mod quantity;
mod recover;
mod run;
mod stop;
mod view;

pub(super) use bounds::{Bound, PodBounds, memory_limit, milli_cpus};
pub(super) use grow::NewLimits;
pub(super) use quantity::parse as parse_quantity;
pub(super) use view::matches_labels;
