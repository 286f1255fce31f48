//! In what a disk travels, to an importer or from an exporter.
//!
//! | module | what it reads |
//! | --- | --- |
//! | [`form`] | the field `file` of a form, which a user uploads |
//! | [`blocks`] | a disk's data with their places, which the pod beside another claim sends |
//! | [`range`] | which bytes of a disk a request asks for |
//!
//! Disks are read front to back, as they arrive, in bounded memory, and whoever sends them is taken
//! for hostile. Nothing in here knows of connections, claims or clusters.

pub mod blocks;
pub mod form;
pub mod range;
#[cfg(any(test, feature = "test-utils"))]
pub mod testing;
