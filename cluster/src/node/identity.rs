//! Whom the node is known as, and whom it trusts.
//!
//! Its certificate is made by itself when it starts and signed by nobody: what makes it the
//! node's is its digest in the Node object. So no node has a key by which it could pass for another
//! or for the API.

use std::{
    fmt,
    sync::{Arc, PoisonError, RwLock},
};

use anyhow::Context as _;
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair};
use serde_json::json;
use tokio_rustls::rustls::{
    self, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, ServerConfig,
    SignatureScheme,
    client::{ResolvesClientCert, danger::HandshakeSignatureValid},
    crypto::{ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, UnixTime, pem::PemObject},
    server::{
        WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::{CertifiedKey, SingleCertAndKey},
};

use super::expected::Expected;
use crate::{
    certificates::{BUNDLE, SECRET},
    contact::{ANNOTATION, Contact, digest},
    https::Peer,
};

/// A certificate with its key.
pub(super) struct Identity {
    certificate: CertificateDer<'static>,
    key: KeyPair,
}

impl Identity {
    pub(super) fn new() -> Result<Self, rcgen::Error> {
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, "podvisor-node");
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = KeyPair::generate()?;
        let certificate = CertificateDer::from(params.self_signed(&key)?.der().to_vec());
        Ok(Self { certificate, key })
    }

    pub(super) fn digest(&self) -> String {
        digest(&self.certificate)
    }

    /// What the TLS listener takes.
    pub(super) fn server_config(
        &self,
        clients: Arc<dyn ClientCertVerifier>,
    ) -> Result<ServerConfig, rustls::Error> {
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(self.key.serialize_der()));
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(clients)
            .with_single_cert(vec![self.certificate.clone()], key)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }
}

impl Identity {
    /// What connections to other nodes show.
    pub(super) fn for_clients(&self) -> Result<Arc<dyn ResolvesClientCert>, rustls::Error> {
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(self.key.serialize_der()));
        let provider = ring::default_provider();
        let key = provider.key_provider.load_private_key(key)?;
        let certified = CertifiedKey::new(vec![self.certificate.clone()], key);
        Ok(Arc::new(SingleCertAndKey::from(certified)))
    }
}

/// The authority of clients, which is replaced while the server runs. Until it is known, nobody is
/// trusted, but for nodes that are expected.
#[derive(Default)]
pub(super) struct Trust {
    authority: RwLock<Option<Arc<dyn ClientCertVerifier>>>,
    expected: Arc<Expected>,
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trust").finish_non_exhaustive()
    }
}

impl Trust {
    /// Trusts these certificates, and no others.
    pub(super) fn set(&self, bundle: &str) -> anyhow::Result<()> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
            let certificate = certificate.context("the authority's certificates are no PEM")?;
            roots
                .add(certificate)
                .context("the authority's certificates are invalid")?;
        }
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .context("the authority's certificates are unusable")?;
        let authority = self.authority.write();
        *authority.unwrap_or_else(PoisonError::into_inner) = Some(verifier);
        Ok(())
    }

    /// Trusts these other nodes besides, by their certificates.
    pub(super) fn new(expected: Arc<Expected>) -> Self {
        Self {
            authority: RwLock::default(),
            expected,
        }
    }

    /// Whether who is at the other end has a certificate of the authority, with this name in it.
    pub(super) fn is(&self, peer: &Peer, name: &str) -> bool {
        // A node chooses the names in its own certificate.
        let verified = peer
            .certificates
            .split_first()
            .is_some_and(|(first, others)| self.verify(first, others, UnixTime::now()).is_ok());
        let is_named = verified && peer.common_name().as_deref() == Some(name);
        if is_named {
            peer.recognize();
        }
        is_named
    }

    fn verify(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let authority = self.authority.read();
        let verifier = authority.unwrap_or_else(PoisonError::into_inner).clone();
        verifier
            .ok_or_else(|| Error::General("the cluster's authority is not known yet".to_owned()))?
            .verify_client_cert(end_entity, intermediates, now)
    }
}

impl ClientCertVerifier for Trust {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        if self.expected.has_certificate(&digest(end_entity)) {
            return Ok(ClientCertVerified::assertion());
        }
        self.verify(end_entity, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = ring::default_provider().signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, &algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = ring::default_provider().signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, &algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}

/// The certificates of the cluster's authority.
pub(super) async fn bundle(client: &Client, namespace: &str) -> anyhow::Result<String> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let map = maps
        .get(SECRET)
        .await
        .with_context(|| format!("failed to read config map {namespace}/{SECRET}"))?;
    map.data
        .and_then(|mut data| data.remove(BUNDLE))
        .with_context(|| format!("config map {namespace}/{SECRET} is empty: is the API running?"))
}

/// Writes into the Node how it is reached, unless that is there.
pub(super) async fn announce(client: &Client, name: &str, contact: &Contact) -> anyhow::Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let node = nodes
        .get(name)
        .await
        .with_context(|| format!("failed to read node {name}"))?;
    let wanted = serde_json::to_string(contact)?;
    let written = node.metadata.annotations.unwrap_or_default();
    if written.get(ANNOTATION) == Some(&wanted) {
        return Ok(());
    }
    let patch = json!({ "metadata": { "annotations": { ANNOTATION: wanted } } });
    nodes
        .patch(name, &PatchParams::default(), &Patch::Merge(patch))
        .await
        .with_context(|| format!("failed to annotate node {name}"))?;
    tracing::info!(node = name, "told the cluster how the node is reached");
    Ok(())
}
