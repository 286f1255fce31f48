//! The Container Runtime Interface, version 1, as of Kubernetes 1.37: its messages, and its services
//! for those who serve and who call.
//!
//! The messages are written by hand: names and numbers are those of the interface, which a test
//! compares with what another implementation encodes. So nothing is compiled when the crate is built,
//! and a new field is a line here. An optional message that is absent is `None`; numbers, strings and
//! lists that are absent are 0 and empty, as the interface has no difference there. Fields that are
//! unknown are dropped when a message is decoded: who passes a message on has to keep its bytes.
//!
//! The crate knows nothing of what serves the interface.

mod checkpoints;
mod containers;
mod events;
mod image_service;
mod images;
mod metrics;
mod node;
mod pods;
mod runtime_service;
mod security;
mod service;
mod signal;
mod stats;
mod streams;
mod values;
mod windows;

pub use checkpoints::*;
pub use containers::*;
pub use events::*;
pub use image_service::{ImageService, ImageServiceClient, ImageServiceServer};
pub use images::*;
pub use metrics::*;
pub use node::*;
pub use pods::*;
pub use runtime_service::{RuntimeService, RuntimeServiceClient, RuntimeServiceServer};
pub use security::*;
pub use service::Messages;
pub use signal::*;
pub use stats::*;
pub use streams::*;
pub use values::*;
pub use windows::*;
