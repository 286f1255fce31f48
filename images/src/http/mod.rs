//! HTTP client for fetching images: bounded answers, timeouts for silent servers, and restricted
//! redirects.
//!
//! An [`Http`] belongs to one host and its settings. It sends requests, follows redirects under
//! rules (few hops, never from HTTPS to HTTP, never from a public address to a private one) and
//! classifies connection errors. The meaning of a status or a body is left to its users: `registry`
//! and `disk`.

mod address;
mod client;
mod config;
mod error;
mod hosts;
mod tls;

pub(crate) use address::is_loopback;
pub(crate) use client::{Authorizations, Http, Origin, origin_of, pause, resumes_at, retry_after};
pub use config::{ClientCertificate, Mirror, RegistryConfig, RegistryHost, RegistryProtocol};
pub(crate) use error::HttpError;
pub use hosts::HostsError;
