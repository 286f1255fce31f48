//! Pod sandboxes: creation, status, stopping and removal.

mod grow;
mod importance;
mod kill;
mod late_start;
mod pressure;
mod recover;
mod run;
mod share_users;
mod stop;
mod view;

pub(crate) use share_users::place_without_mapped_users;
