//! The signatures that a registry stores along with an image.

use super::{Client, RegistryError};
use crate::Digest;
use crate::signature::{Attached, Form, Pointer, bundle_of, bundles_of, simple_of, tag_of};

impl Client {
    /// Fetches everything that the registry lists as signatures of a manifest or index, of one
    /// form; there may be none.
    pub(crate) async fn signatures(
        &self,
        manifest: &Digest,
        form: Form,
    ) -> Result<Vec<Attached>, RegistryError> {
        let tag = tag_of(manifest, form);
        let pointers = match form {
            Form::Simple => match self.optional("manifests", &tag, None).await? {
                Some(document) => simple_of(&document),
                None => Vec::new(),
            },
            Form::Bundle => {
                let referrers = self
                    .optional("referrers", &manifest.to_string(), None)
                    .await?;
                // A registry without that list has it under a tag (distribution-spec, "Backwards
                // compatibility").
                let index = match referrers {
                    Some(index) => Some(index),
                    None => self.optional("manifests", &tag, None).await?,
                };
                let mut pointers = Vec::new();
                for artifact in index.as_deref().map_or_else(Vec::new, bundles_of) {
                    let document = self
                        .optional("manifests", &artifact.to_string(), Some(artifact))
                        .await?;
                    pointers.extend(document.as_deref().and_then(bundle_of));
                }
                pointers
            }
        };
        let mut signatures = Vec::new();
        for pointer in pointers {
            let Pointer { blob, limit, .. } = &pointer;
            let content = self.document(blob, "a signature", *limit).await?;
            signatures.push(pointer.with(content));
        }
        Ok(signatures)
    }

    /// Fetches a document that may be missing.
    async fn optional(
        &self,
        kind: &'static str,
        name: &str,
        wanted: Option<Digest>,
    ) -> Result<Option<Vec<u8>>, RegistryError> {
        match self.fetch_document(kind, name, wanted).await {
            Ok((_, bytes, _)) => Ok(Some(bytes)),
            Err(RegistryError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
