//! What importers and exporters are made with: their image, the certificates of those that are
//! connected to, and what says whether a copy was allowed.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::PostParams;
use kube::{Api, Resource};
use podvisor_cluster_types::datavolume::ForeignSource;

use super::{claim, foreign, pod};
use crate::certificates::{Authority, AuthorityStore, BUNDLE, CertificateError, Issued};
use crate::controller::error::{Error, code};
use crate::controller::objects::{DataVolume, VirtualMachineExport};
use crate::copy::{Grant, TOKEN, sender_name};
use crate::token::{KeyError, KeyStore};
use crate::upload::server_name;

/// What importers are made with.
#[derive(Debug, Clone)]
pub(in crate::controller) struct Importers {
    image: String,
    authority: AuthorityStore,
    keys: Arc<KeyStore>,
}

impl Importers {
    pub(in crate::controller) fn new(
        image: String,
        authority: AuthorityStore,
        keys: KeyStore,
    ) -> Self {
        Self {
            image,
            authority,
            keys: Arc::new(keys),
        }
    }

    /// Returns whether the webhook allowed this DataVolume to copy a source of another namespace,
    /// when it was created.
    pub(super) async fn is_granted(
        &self,
        volume: &DataVolume,
        source: &ForeignSource,
    ) -> Result<bool, Error> {
        let meta = &volume.metadata;
        let token = meta.annotations.as_ref().and_then(|all| all.get(TOKEN));
        let created = meta.creation_timestamp.as_ref();
        let (Some(token), Some(created)) = (token, created) else {
            return Ok(false);
        };
        let key = match self.keys.key().await {
            Ok(key) => key,
            // Nobody has signed anything.
            Err(KeyError::NoKey { .. }) => return Ok(false),
            Err(source) => return Err(Error::token(volume, source)),
        };
        let wanted = Grant {
            namespace: meta.namespace.clone().unwrap_or_default(),
            name: meta.name.clone().unwrap_or_default(),
            source_namespace: source.namespace.clone(),
            source_kind: source.kind.name().to_owned(),
            source_name: source.name.clone(),
        };
        let granted: Option<Grant> = key.verify(token, created.0.into());
        Ok(granted == Some(wanted))
    }

    /// Returns their image.
    pub(in crate::controller) fn image(&self) -> &str {
        &self.image
    }

    /// Makes the Secret that the pod takes the upload of a claim with. What it has is good for this
    /// claim alone: a server's certificate for a name that nobody else has.
    pub(super) async fn make_credentials(
        &self,
        volume: &DataVolume,
        claim: &PersistentVolumeClaim,
        secrets: &Api<Secret>,
    ) -> Result<(), Error> {
        let uid = claim.metadata.uid.as_deref().unwrap_or_default();
        let issue = |authority: &Authority| authority.issue_target(&server_name(uid));
        let data = self.issue(&issue).await;
        let data = data.map_err(|source| Error::credentials(volume, source))?;
        let secret = secret(pod::credentials_name(uid), claim::owner(volume), data);
        create(volume, &secret, secrets).await
    }

    /// Makes the Secret that a pod sends the data for a claim with, which goes with that pod. What
    /// it has is good for this claim alone.
    pub(super) async fn make_sender_credentials(
        &self,
        volume: &DataVolume,
        claim: &PersistentVolumeClaim,
        sender: &Pod,
        secrets: &Api<Secret>,
    ) -> Result<(), Error> {
        let uid = claim.metadata.uid.as_deref().unwrap_or_default();
        let issue = |authority: &Authority| authority.issue_sender(&sender_name(uid));
        let data = self.issue(&issue).await;
        let data = data.map_err(|source| Error::credentials(volume, source))?;
        let secret = secret(foreign::credentials_name(sender), pod_owner(sender), data);
        create(volume, &secret, secrets).await
    }

    /// Makes the Secret that a pod serves an export with, which goes with that pod and has its
    /// name: a server's certificate for the names of the export's Service.
    pub(in crate::controller) async fn make_exporter_credentials(
        &self,
        export: &VirtualMachineExport,
        service: &str,
        pod: &Pod,
        secrets: &Api<Secret>,
    ) -> Result<(), Error> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let issue = |authority: &Authority| authority.issue_exporter(service, namespace);
        let data = self.issue(&issue).await;
        let data = data.map_err(|source| Error::credentials(export, source))?;
        let name = pod.metadata.name.clone().unwrap_or_default();
        create(export, &secret(name, pod_owner(pod), data), secrets).await
    }

    /// Returns the authorities by which pods are known, as PEM.
    pub(in crate::controller) async fn authorities(
        &self,
        export: &VirtualMachineExport,
    ) -> Result<String, Error> {
        let authority = self.authority.authority().await;
        let authority = authority.map_err(|source| Error::credentials(export, source))?;
        Ok(authority.bundle)
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

fn pod_owner(pod: &Pod) -> OwnerReference {
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
