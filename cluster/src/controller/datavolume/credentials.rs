//! The certificates of importers and of those that send to them, and whether a copy was allowed.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret};
use kube::Api;
use podvisor_cluster_types::datavolume::ForeignSource;

use super::{claim, foreign, pod};
use crate::certificates::Authority;
use crate::controller::error::Error;
use crate::controller::importers::{Importers, pod_owner};
use crate::copy::{Grant, TOKEN, sender_name};
use crate::objects::DataVolume;
use crate::token::KeyError;
use crate::upload::server_name;

impl Importers {
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
        let named = (pod::credentials_name(uid), claim::owner(volume));
        self.make(volume, &issue, named, secrets).await
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
        let named = (foreign::credentials_name(sender), pod_owner(sender));
        self.make(volume, &issue, named, secrets).await
    }
}
