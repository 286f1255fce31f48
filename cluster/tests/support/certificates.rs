//! The certificates of a server and of its clients, all of one authority.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};
use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::{
    CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject,
};
use tokio_rustls::rustls::{
    self, ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme,
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// The authority, and the directory of everything that it issued.
pub struct Authority {
    directory: PathBuf,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// The files of a certificate and of its key.
#[derive(Debug, Clone)]
pub struct Files {
    /// The certificate.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

impl Files {
    fn read(&self) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let certificates = CertificateDer::pem_file_iter(&self.certificate);
        let certificates = certificates.expect("a file").map(|item| item.expect("PEM"));
        let key = PrivateKeyDer::from_pem_file(&self.key).expect("a key");
        (certificates.collect(), key)
    }
}

impl Authority {
    /// Makes an authority that puts its files into `directory`.
    pub fn new(directory: &Path) -> Result<Self> {
        let mut params = CertificateParams::new(Vec::<String>::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params
            .distinguished_name
            .push(DnType::CommonName, "authority of the tests");
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        std::fs::write(directory.join("ca.crt"), issuer.pem())?;
        Ok(Self {
            directory: directory.to_owned(),
            issuer,
        })
    }

    /// Returns the authority's own certificate.
    pub fn certificate(&self) -> PathBuf {
        self.directory.join("ca.crt")
    }

    /// Returns the authority's own certificate, in DER.
    pub fn der(&self) -> Vec<u8> {
        self.issuer.der().to_vec()
    }

    /// Issues the certificate of a server that is reached by `names`.
    pub fn server(&self, file: &str, names: &[&str]) -> Result<Files> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names)?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.issue(file, params)
    }

    /// Issues the certificate of a client: a user of some groups.
    pub fn client(&self, file: &str, user: &str, groups: &[&str]) -> Result<Files> {
        let mut params = CertificateParams::new(Vec::<String>::new())?;
        params.distinguished_name.push(DnType::CommonName, user);
        for group in groups {
            params
                .distinguished_name
                .push(DnType::OrganizationName, *group);
        }
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.issue(file, params)
    }

    /// Returns what connects by TLS to a server of this authority, as a client.
    pub fn tls(&self, client: &Files) -> TlsConnector {
        let mut roots = RootCertStore::empty();
        roots.add(self.der().into()).expect("a certificate");
        let (certificates, key) = client.read();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots)
            .with_client_auth_cert(certificates, key)
            .expect("a certificate and its key");
        TlsConnector::from(Arc::new(config))
    }

    /// Makes a key that signs tokens of service accounts; returns the private and public key.
    pub fn token_key(&self) -> Result<(PathBuf, PathBuf)> {
        let key = KeyPair::generate()?;
        let private = self.directory.join("tokens.key");
        let public = self.directory.join("tokens.pub");
        std::fs::write(&private, key.serialize_pem())?;
        std::fs::write(&public, key.public_key_pem())?;
        Ok((private, public))
    }

    fn issue(&self, file: &str, mut params: CertificateParams) -> Result<Files> {
        params.key_usages = vec![
            KeyUsagePurpose::DigitalSignature,
            KeyUsagePurpose::KeyEncipherment,
        ];
        let key = KeyPair::generate()?;
        let certificate = params
            .signed_by(&key, &self.issuer)
            .with_context(|| format!("failed to issue {file}"))?;
        let files = Files {
            certificate: self.directory.join(format!("{file}.crt")),
            key: self.directory.join(format!("{file}.key")),
        };
        std::fs::write(&files.certificate, certificate.pem())?;
        std::fs::write(&files.key, key.serialize_pem())?;
        Ok(files)
    }
}

/// Returns a server of TLS that has a certificate of an authority for `localhost`.
pub fn tls_server(authority: &Authority) -> TlsAcceptor {
    let files = authority.server("stranger", &["localhost"]);
    let (certificates, key) = files.expect("the certificate is issued").read();
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(certificates, key)
        .expect("a certificate and its key");
    TlsAcceptor::from(Arc::new(config))
}

/// Returns what connects by TLS to whoever is there, and may show a certificate.
pub fn trusting(client: Option<&Files>) -> TlsConnector {
    let provider = Arc::new(ring::default_provider());
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody(provider)));
    let config = match client {
        None => config.with_no_client_auth(),
        Some(files) => {
            let (certificates, key) = files.read();
            config
                .with_client_auth_cert(certificates, key)
                .expect("a certificate and its key")
        }
    };
    TlsConnector::from(Arc::new(config))
}

#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
