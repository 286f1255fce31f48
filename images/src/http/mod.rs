//! HTTP as images are fetched by it: bounded, impatient with silence, and wary of where a server
//! sends us.
//!
//! An [`Http`] belongs to one host and its settings. It sends requests, follows redirects under
//! rules (few hops, never from HTTPS to HTTP, never from a public address to a private one) and
//! sorts out what goes wrong with connections. What a status or a body means is for the rooms
//! above: `registry` and `disk`.

mod address;
mod client;
mod config;
mod error;
mod hosts;
mod tls;

pub(crate) use address::is_loopback;
pub(crate) use client::{Http, Origin, pause, resumes_at, retry_after};
pub use config::{ClientCertificate, Mirror, RegistryConfig, RegistryHost, RegistryProtocol};
pub(crate) use error::HttpError;
pub use hosts::HostsError;
