//! TLS settings of one registry.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

use super::{HttpError, RegistryHost};

/// Trusts the system's authorities and the host's own; presents its client certificate if it has
/// one.
pub(super) fn config(host: &RegistryHost) -> Result<ClientConfig, HttpError> {
    let mut roots = RootCertStore::empty();
    // Some of the system's certificates are often unusable; only a registry that needs one of those
    // fails.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    for path in &host.authorities {
        for certificate in certificates(path)? {
            roots
                .add(certificate)
                .map_err(|error| unusable(path, error))?;
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(Path::new("TLS"), error))?
        .with_root_certificates(roots);
    let Some(own) = &host.client_certificate else {
        return Ok(builder.with_no_client_auth());
    };
    let chain = certificates(&own.chain)?;
    let key = PrivateKeyDer::from_pem_file(&own.key).map_err(|error| unusable(&own.key, error))?;
    builder
        .with_client_auth_cert(chain, key)
        .map_err(|error| unusable(&own.key, error))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, HttpError> {
    let found: Vec<_> = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|error| unusable(path, error))?;
    if found.is_empty() {
        Err(unusable(path, "it holds no certificate"))
    } else {
        Ok(found)
    }
}

fn unusable(path: &Path, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> HttpError {
    HttpError::Certificate {
        path: path.to_owned(),
        source: source.into(),
    }
}
