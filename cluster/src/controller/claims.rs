//! What is known of claims by those who use them.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use crate::objects::annotation;
use crate::upload;

/// Annotation of a claim: how far the pod is that fills it. That it succeeded is written here
/// before anywhere else, and for ever: what a VM wrote is never overwritten.
pub(super) const POD_PHASE: &str = "storage.pod.phase";

/// How a claim can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeMode {
    /// As a block device.
    Block,
    /// As a file system.
    Filesystem,
}

/// What is known of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// How it can be used.
    pub mode: VolumeMode,
    /// Several nodes may write it at the same time.
    pub is_shared: bool,
}

/// Returns whether a claim was filled for a DataVolume, which may be gone.
pub(super) fn is_filled(claim: &PersistentVolumeClaim) -> bool {
    annotation(&claim.metadata, POD_PHASE) == Some("Succeeded")
}

/// Returns whether a claim is marked as the target of an upload.
pub(super) fn takes_upload(claim: &PersistentVolumeClaim) -> bool {
    let annotations = claim.metadata.annotations.as_ref();
    annotations.is_some_and(|annotations| annotations.contains_key(upload::TARGET))
}

/// Returns whether a user wants an upload to a claim. Of a DataVolume's claim it is known.
pub(super) fn awaits_upload(claim: &PersistentVolumeClaim) -> bool {
    let owners = claim.metadata.owner_references.iter().flatten();
    let is_owned = owners.into_iter().any(|owner| owner.kind == "DataVolume");
    takes_upload(claim)
        && !is_owned
        && !is_filled(claim)
        && claim.metadata.deletion_timestamp.is_none()
}
