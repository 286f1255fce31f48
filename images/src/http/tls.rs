//! TLS settings of one registry.

use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};

use super::{HttpError, RegistryHost};

/// Trusts the system's authorities and the host's own; presents its client certificate if it has
/// one.
pub(super) fn config(host: &RegistryHost) -> Result<ClientConfig, HttpError> {
    let mut roots = RootCertStore::empty();
    // Some of the system's certificates are often unusable; only a registry that needs one of those
    // fails.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let mut configured = Vec::new();
    for path in &host.authorities {
        for certificate in certificates(path)? {
            roots
                .add(certificate.clone())
                .map_err(|error| unusable(path, error))?;
            configured.push(certificate);
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(Path::new("TLS"), error))?;
    let builder = match host.authorities.first() {
        None => builder.with_root_certificates(roots),
        Some(path) => {
            let usual = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|error| unusable(path, error))?;
            let verifier = Arc::new(Verifier { usual, configured });
            builder
                .dangerous()
                .with_custom_certificate_verifier(verifier)
        }
    };
    let Some(own) = &host.client_certificate else {
        return Ok(builder.with_no_client_auth());
    };
    let chain = certificates(&own.chain)?;
    let key = PrivateKeyDer::from_pem_file(&own.key).map_err(|error| unusable(&own.key, error))?;
    builder
        .with_client_auth_cert(chain, key)
        .map_err(|error| unusable(&own.key, error))
}

/// Verifies as usual, but lets a server show a configured authority's certificate as its own: what
/// `openssl req -x509` makes is such a one (CA:TRUE), and is copied to its clients as it is.
#[derive(Debug)]
struct Verifier {
    usual: Arc<WebPkiServerVerifier>,
    configured: Vec<CertificateDer<'static>>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let usual = &self.usual;
        match usual.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            // Its dates have been checked before this.
            Err(error) if is_authority(&error) && self.configured.contains(end_entity) => {
                verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
                Ok(ServerCertVerified::assertion())
            }
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.usual
            .verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.usual
            .verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.usual.supported_verify_schemes()
    }
}

/// Whether a server was refused for showing an authority's certificate.
fn is_authority(error: &Error) -> bool {
    let Error::InvalidCertificate(CertificateError::Other(cause)) = error else {
        return false;
    };
    matches!(
        cause.0.downcast_ref(),
        Some(webpki::Error::CaUsedAsEndEntity)
    )
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
