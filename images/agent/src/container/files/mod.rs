//! The files of a container: its root filesystem, made of an image, its device nodes, and its
//! volumes.

pub mod disk;
pub mod memory;
pub mod nodes;
pub mod rootfs;

pub(super) mod directory;
pub(super) mod fill;
pub(super) mod submounts;
