//! What importers are made with: their image, and the certificates of those that take uploads.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::PostParams;

use super::object::DataVolume;
use super::{claim, pod};
use crate::certificates::{AuthorityStore, BUNDLE, CertificateError};
use crate::controller::error::{Error, code};
use crate::upload::server_name;

/// What importers are made with.
#[derive(Debug, Clone)]
pub(in crate::controller) struct Importers {
    image: String,
    authority: AuthorityStore,
}

impl Importers {
    pub(in crate::controller) fn new(image: String, authority: AuthorityStore) -> Self {
        Self { image, authority }
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
        let data = self.issue(uid).await;
        let data = data.map_err(|source| Error::credentials(volume, source))?;
        let secret = Secret {
            metadata: ObjectMeta {
                name: Some(pod::credentials_name(uid)),
                owner_references: Some(vec![claim::owner(volume)]),
                ..ObjectMeta::default()
            },
            type_: Some("kubernetes.io/tls".to_owned()),
            data: Some(data),
            ..Secret::default()
        };
        match secrets.create(&PostParams::default(), &secret).await {
            Ok(_) => Ok(()),
            // Made before this controller was killed, or for a pod before this one.
            Err(error) if code(&error) == Some(409) => Ok(()),
            Err(error) => Err(Error::request("make the certificate of", volume, error)),
        }
    }

    async fn issue(&self, uid: &str) -> Result<BTreeMap<String, ByteString>, CertificateError> {
        let authority = self.authority.authority().await?;
        let issued = authority.issue_target(&server_name(uid))?;
        let data = [
            ("tls.crt", issued.certificate),
            ("tls.key", issued.key),
            (BUNDLE, authority.bundle),
        ];
        let data = data.map(|(name, text)| (name.to_owned(), ByteString(text.into())));
        Ok(data.into())
    }
}
