//! Registries: manifests and blobs by HTTP (OCI distribution-spec; Docker registry v2), verified.
//!
//! A [`Client`] serves one pull. It knows the registry and its mirrors, authenticates when asked to, and returns only
//! bytes whose length and digest are right. Redirects and token servers are chosen by the registry, so they are hostile
//! input too: few hops, never from HTTPS to HTTP, never from a public address to a private one.

mod address;
mod auth;
mod blob;
mod challenge;
mod client;
mod config;
mod docker_config;
mod error;
mod http;
mod manifest;
mod tls;

pub use auth::Credentials;
pub(crate) use blob::BlobError;
#[cfg(any(test, feature = "test-utils"))]
pub(crate) use challenge::Challenge;
pub(crate) use client::{Client, Resolved};
pub use config::{ClientCertificate, Host, Protocol, RegistryConfig};
pub use error::RegistryError;
pub use manifest::ManifestError;
pub(crate) use manifest::{Descriptor, Manifest, Parsed};
