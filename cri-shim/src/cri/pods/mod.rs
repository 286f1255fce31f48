//! Pod sandboxes: creation, status, stopping and removal.

mod cgroup;
mod grow;
mod importance;
mod kill;
mod late_start;
mod limits;
mod pressure;
mod quantity;
mod recover;
mod run;
mod share_users;
mod stop;
mod view;

pub(super) use grow::NewLimits;
pub(super) use limits::{Bound, PodBounds, memory_limit, milli_cpus};
pub(super) use quantity::parse as parse_quantity;
pub(super) use share_users::HostUsers;
pub(crate) use share_users::place_without_mapped_users;
pub(super) use view::matches_labels;
