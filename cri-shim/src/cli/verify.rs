//! Flags for required signatures of images.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use podvisor_images::{PolicyError, SignaturePolicy};

#[derive(Debug, Args)]
pub(super) struct VerifyArgs {
    /// Take only images that are signed by this public key (cosign's, PEM); may be given several
    /// times, any of them will do
    #[arg(long, value_name = "FILE", conflicts_with = "signature_policy")]
    verify_key: Vec<PathBuf>,

    /// Take only images that this policy allows (containers-policy.json(5))
    #[arg(long, value_name = "FILE")]
    signature_policy: Option<PathBuf>,
}

impl VerifyArgs {
    pub(super) fn is_given(&self) -> bool {
        self.signature_policy.is_some() || !self.verify_key.is_empty()
    }

    /// Returns the policy of the flags; `None` without flags.
    pub(super) fn policy(&self) -> Result<Option<Arc<SignaturePolicy>>, PolicyError> {
        let policy = match &self.signature_policy {
            Some(file) => SignaturePolicy::read(file)?,
            None if self.verify_key.is_empty() => return Ok(None),
            None => SignaturePolicy::keys(&self.verify_key)?,
        };
        Ok(Some(Arc::new(policy)))
    }
}
