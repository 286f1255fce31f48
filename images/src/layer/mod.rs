//! Layers: a verified blob becomes entries of the image's tree.
//!
//! A blob is decompressed, its uncompressed digest is checked against the image configuration, and
//! its tar entries are read under [`Limits`](crate::Limits) and applied to the tree; file data goes
//! directly to the file system writer. Nothing here opens a file on the host by a name from a
//! layer.

mod ahead;
mod apply;
mod error;
mod header;
mod path;
mod pax;
mod sparse;
mod tar;

pub use apply::LayerError;
pub(crate) use apply::Unpacker;
pub use error::TarError;
pub use path::PathFault;
pub(crate) use path::components;
pub(crate) use tar::{EntryKind, TarReader};
