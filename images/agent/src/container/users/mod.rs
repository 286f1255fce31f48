//! Who a container's processes are: their user, and the user namespace that maps it.

pub mod namespace;
pub mod own;
pub mod user;
