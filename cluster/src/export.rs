//! Exports of volumes: what says where they are, and the program that serves them.
//!
//! A pod beside the claims reads them and serves them by HTTPS (`serve`) to who has the export's
//! token. The controller makes the pod, its certificate and its Service (`controller`).
//! docs/exports.md says what is served.

mod archive;
mod body;
mod error;
mod files;
mod format;
mod serve;

pub use error::ExportError;
pub use files::Volume;
pub(crate) use format::Format;
pub use serve::{Options, run};

/// The port that the pod listens on.
pub(crate) const PORT: u16 = 8443;

/// The key of the token in its Secret.
pub(crate) const TOKEN: &str = "token";
