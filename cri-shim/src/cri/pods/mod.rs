//! Pod sandboxes: how they come, end and go.

mod recover;
mod run;
mod stop;
mod view;

pub(super) use view::matches_labels;
