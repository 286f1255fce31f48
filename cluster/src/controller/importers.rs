//! What importers and exporters are made with: their image, the certificates of those that are
//! connected to, and the keys that say whether a copy was allowed.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::PostParams;
use kube::{Api, Resource};

use super::error::{Error, code};
use crate::certificates::{Authority, AuthorityStore, BUNDLE, CertificateError, Issued};
use crate::objects::VirtualMachineExport;
use crate::token::KeyStore;

/// What importers are made with.
#[derive(Debug, Clone)]
pub(super) struct Importers {
    image: String,
    authority: AuthorityStore,
    pub(super) keys: Arc<KeyStore>,
}

impl Importers {
    pub(super) fn new(image: String, authority: AuthorityStore, keys: KeyStore) -> Self {
        Self {
            image,
            authority,
            keys: Arc::new(keys),
        }
    }

    /// Returns their image.
    pub(super) fn image(&self) -> &str {
        &self.image
    }

    /// Makes the Secret that a pod serves an export with, which goes with that pod and has its
    /// name: a server's certificate for the names of the export's Service.
    pub(super) async fn make_exporter_credentials(
        &self,
        export: &VirtualMachineExport,
        service: &str,
        pod: &Pod,
        secrets: &Api<Secret>,
    ) -> Result<(), Error> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let issue = |authority: &Authority| authority.issue_exporter(service, namespace);
        let name = pod.metadata.name.clone().unwrap_or_default();
        self.make(export, &issue, (name, pod_owner(pod)), secrets)
            .await
    }

    /// Returns the authorities by which pods are known, as PEM.
    pub(super) async fn authorities(&self, export: &VirtualMachineExport) -> Result<String, Error> {
        let authority = self.authority.authority().await;
        let authority = authority.map_err(|source| Error::credentials(export, source))?;
        Ok(authority.bundle)
    }

    /// Makes a Secret with a name and an owner, for an object, with a certificate.
    pub(super) async fn make<K: Resource>(
        &self,
        object: &K,
        issue: &(dyn Fn(&Authority) -> Result<Issued, CertificateError> + Sync),
        (name, owner): (String, OwnerReference),
        secrets: &Api<Secret>,
    ) -> Result<(), Error> {
        let data = self.issue(issue).await;
        let data = data.map_err(|source| Error::credentials(object, source))?;
        create(object, &secret(name, owner, data), secrets).await
    }

    async fn issue(
        &self,
        issue: &(dyn Fn(&Authority) -> Result<Issued, CertificateError> + Sync),
    ) -> Result<BTreeMap<String, ByteString>, CertificateError> {
        let authority = self.authority.authority().await?;
        let issued = issue(&authority)?;
        let data = [
            ("tls.crt", issued.certificate),
            ("tls.key", issued.key),
            (BUNDLE, authority.bundle),
        ];
        let data = data.map(|(name, text)| (name.to_owned(), ByteString(text.into())));
        Ok(data.into())
    }
}

/// Returns a reference to the pod that something goes with.
pub(super) fn pod_owner(pod: &Pod) -> OwnerReference {
    OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Pod".to_owned(),
        name: pod.metadata.name.clone().unwrap_or_default(),
        uid: pod.metadata.uid.clone().unwrap_or_default(),
        ..OwnerReference::default()
    }
}

fn secret(name: String, owner: OwnerReference, data: BTreeMap<String, ByteString>) -> Secret {
    Secret {
        metadata: ObjectMeta {
            name: Some(name),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        type_: Some("kubernetes.io/tls".to_owned()),
        data: Some(data),
        ..Secret::default()
    }
}

async fn create<K: Resource>(
    object: &K,
    secret: &Secret,
    secrets: &Api<Secret>,
) -> Result<(), Error> {
    match secrets.create(&PostParams::default(), secret).await {
        Ok(_) => Ok(()),
        // Made before this controller was killed, or for a pod before this one.
        Err(error) if code(&error) == Some(409) => Ok(()),
        Err(error) => Err(Error::request("make the certificate of", object, error)),
    }
}
