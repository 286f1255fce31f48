//! Registries: manifests and blobs by HTTP (OCI distribution-spec; Docker registry v2), verified.
//!
//! A [`Client`] serves one pull. It knows the registry and its mirrors, authenticates if asked to,
//! and returns only bytes whose length and digest are right. Connections and redirects are handled
//! by `http`.

mod auth;
mod blob;
mod challenge;
mod client;
mod credentials;
mod docker_config;
mod endpoint;
mod error;
mod manifest;
mod signatures;

pub(crate) use blob::BlobError;
#[cfg(any(test, feature = "test-utils"))]
pub(crate) use challenge::Challenge;
pub(crate) use client::{Client, Known, Resolved};
pub use credentials::Credentials;
pub use error::RegistryError;
pub use manifest::ManifestError;
pub(crate) use manifest::{Descriptor, Fitness, Manifest, Parsed, Platform, is_amd64};
