//! Certificates of the aggregated groups and of other servers, made and replaced by ourselves.
//!
//! A Secret holds the authority: its key, and a bundle of certificates, the newest first. Each
//! process issues its own short-lived certificate from it and keeps it in memory. Before it serves
//! a certificate it publishes the bundle to whoever calls it, so that a new authority is trusted
//! before it is used; the old one stays in the bundle until it has expired.

mod authority;
pub(crate) mod files;

use std::{
    fmt,
    sync::{Arc, RwLock},
    time::Duration,
};

use k8s_openapi::{ByteString, api::core::v1::ConfigMap};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use rcgen::ExtendedKeyUsagePurpose;
use serde_json::json;
use tokio_rustls::rustls::{
    self, ServerConfig, SignatureScheme,
    client::ResolvesClientCert,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer},
    server::{ClientHello, ResolvesServerCert, danger::ClientCertVerifier},
    sign::CertifiedKey,
};

pub(crate) use authority::{Authority, AuthorityStore, Issued};

/// The Secret that holds the authority, and the ConfigMap with its certificates.
pub(crate) const SECRET: &str = "podvisor-cluster-authority";

/// The key of the certificates in both.
pub(crate) const BUNDLE: &str = "ca.crt";

/// How long a server's certificate lives, and how often it is replaced.
const SERVER_LIFE: Duration = Duration::from_secs(7 * 24 * 3600);
const RENEW_EVERY: Duration = Duration::from_secs(6 * 3600);

/// How often two processes may make the Secret at the same time before it is an error.
const ATTEMPTS: usize = 5;

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum CertificateError {
    /// The Secret cannot be read or written.
    #[error("failed to {action} secret {namespace}/{SECRET}: check the account's role")]
    Secret {
        action: &'static str,
        namespace: String,
        #[source]
        source: kube::Error,
    },
    /// The Secret is not ours, or was damaged.
    #[error("secret {namespace}/{SECRET} has no valid {what}: delete it, and it is made again")]
    Damaged {
        namespace: String,
        what: &'static str,
    },
    /// Other processes write the Secret all the time.
    #[error("secret {namespace}/{SECRET} changed at each of {ATTEMPTS} attempts to write it")]
    Contended { namespace: String },
    /// The bundle cannot be handed to who calls us.
    #[error("failed to publish the authority in {target}: check the account's role")]
    Publish {
        target: String,
        #[source]
        source: kube::Error,
    },
    /// A key or a certificate cannot be made.
    #[error("failed to make a certificate")]
    Make(#[from] rcgen::Error),
    /// The TLS library does not take the key.
    #[error("failed to use a certificate")]
    Use(#[from] rustls::Error),
}

/// Who must trust the authority.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Publish {
    /// The APIServices of these names.
    ApiServices(&'static [&'static str]),
    /// The same, and the nodes, by a ConfigMap.
    Subresources(&'static [&'static str]),
    /// Nobody: it is shown to nodes, which know the authority already.
    Nobody,
    /// Nobody: clients of uploads are told by people, and the targets of uploads know it already.
    People,
}

impl Publish {
    /// What the certificate is for.
    fn usages(self) -> Vec<ExtendedKeyUsagePurpose> {
        match self {
            Self::ApiServices(_) => vec![ExtendedKeyUsagePurpose::ServerAuth],
            Self::Subresources(_) | Self::People => vec![
                ExtendedKeyUsagePurpose::ServerAuth,
                ExtendedKeyUsagePurpose::ClientAuth,
            ],
            Self::Nobody => vec![ExtendedKeyUsagePurpose::ClientAuth],
        }
    }
}

/// Certificates of one server, which are replaced while it runs.
pub(crate) struct Certificates {
    client: Client,
    namespace: String,
    store: AuthorityStore,
    service: String,
    names: Vec<String>,
    publish: Publish,
    current: Arc<Current>,
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificates")
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

/// The certificate that new connections get.
#[derive(Debug)]
struct Current(RwLock<Option<Arc<CertifiedKey>>>);

impl ResolvesServerCert for Current {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.read().ok()?.clone()
    }
}

impl ResolvesClientCert for Current {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.0.read().ok()?.clone()
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl Certificates {
    /// Certificates of the service `service`; the first is made at once.
    pub(crate) async fn new(
        client: Client,
        namespace: &str,
        service: &str,
        publish: Publish,
    ) -> Result<Self, CertificateError> {
        let names = [
            service.to_owned(),
            format!("{service}.{namespace}"),
            format!("{service}.{namespace}.svc"),
            format!("{service}.{namespace}.svc.cluster.local"),
            "localhost".to_owned(),
            "127.0.0.1".to_owned(),
        ];
        let certificates = Self {
            store: AuthorityStore::new(client.clone(), namespace),
            client,
            namespace: namespace.to_owned(),
            service: service.to_owned(),
            names: names.to_vec(),
            publish,
            current: Arc::new(Current(RwLock::new(None))),
        };
        certificates.renew().await?;
        Ok(certificates)
    }

    /// What the TLS listener takes; certificates of clients are checked where there is a verifier.
    pub(crate) fn server_config(
        &self,
        clients: Option<Arc<dyn ClientCertVerifier>>,
    ) -> Result<ServerConfig, CertificateError> {
        let builder = ServerConfig::builder_with_provider(Arc::new(provider()))
            .with_safe_default_protocol_versions()?;
        let builder = match clients {
            Some(verifier) => builder.with_client_cert_verifier(verifier),
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_cert_resolver(Arc::clone(&self.current) as _);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }

    /// What connections to others show.
    pub(crate) fn for_clients(&self) -> Arc<dyn ResolvesClientCert> {
        Arc::clone(&self.current) as _
    }

    /// Replaces the certificate for ever; a failure is logged and tried again.
    pub(crate) async fn keep_fresh(self) {
        let mut timer = tokio::time::interval(RENEW_EVERY);
        timer.tick().await;
        loop {
            timer.tick().await;
            match self.renew().await {
                Ok(()) => tracing::info!("renewed the certificate"),
                Err(error) => tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "failed to renew the certificate"
                ),
            }
        }
    }

    async fn renew(&self) -> Result<(), CertificateError> {
        let authority = self.store.authority().await?;
        self.publish(&authority.bundle).await?;
        let key = issue(
            &authority,
            &self.service,
            &self.names,
            self.publish.usages(),
        )?;
        if let Ok(mut current) = self.current.0.write() {
            *current = Some(Arc::new(key));
        }
        Ok(())
    }

    async fn publish(&self, bundle: &str) -> Result<(), CertificateError> {
        match self.publish {
            Publish::ApiServices(names) => self.publish_in(names, bundle).await,
            Publish::Subresources(names) => {
                self.publish_in(names, bundle).await?;
                self.publish_to_nodes(bundle).await
            }
            Publish::Nobody | Publish::People => Ok(()),
        }
    }

    /// Nodes trust who shows a certificate of the authority: they may read the bundle, and not the
    /// Secret.
    async fn publish_to_nodes(&self, bundle: &str) -> Result<(), CertificateError> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.namespace);
        let patch = Patch::Merge(json!({ "data": { BUNDLE: bundle } }));
        let patched = api.patch(SECRET, &PatchParams::default(), &patch).await;
        patched
            .map(drop)
            .map_err(|source| CertificateError::Publish {
                target: format!("ConfigMap/{SECRET}"),
                source,
            })
    }

    async fn publish_in(&self, names: &[&str], bundle: &str) -> Result<(), CertificateError> {
        let gvk = GroupVersionKind::gvk("apiregistration.k8s.io", "v1", "APIService");
        let api: Api<DynamicObject> =
            Api::all_with(self.client.clone(), &ApiResource::from_gvk(&gvk));
        for name in names {
            let patch = json!({ "spec": { "caBundle": ByteString(bundle.into()) } });
            let patched = api
                .patch(name, &PatchParams::default(), &Patch::Merge(patch))
                .await;
            patched.map_err(|source| CertificateError::Publish {
                target: format!("APIService/{name}"),
                source,
            })?;
        }
        Ok(())
    }
}

fn provider() -> CryptoProvider {
    rustls::crypto::ring::default_provider()
}

fn issue(
    authority: &Authority,
    service: &str,
    names: &[String],
    usages: Vec<ExtendedKeyUsagePurpose>,
) -> Result<CertifiedKey, CertificateError> {
    let (certificate, key) = authority.issue(service, names, usages, SERVER_LIFE)?;
    let private = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let signing = provider().key_provider.load_private_key(private)?;
    Ok(CertifiedKey::new(
        vec![CertificateDer::from(certificate.der().to_vec())],
        signing,
    ))
}
