//! The DataVolume (`cdi.kubevirt.io`): a claim, and what it is filled with.

mod source;
mod validate;

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{Cause, Causes, FieldPath, Quantity, cause::shown, names::is_dns_label};

pub use source::{DataSourceSource, DataSourceSpec};

/// The group of DataVolumes.
pub const GROUP: &str = "cdi.kubevirt.io";

/// The version that is served.
pub const VERSION: &str = "v1beta1";

/// Of a volume with a file system, this many thousandths are left for the file system itself.
const OVERHEAD_THOUSANDTHS: u64 = 55;

/// Sizes of claims and disks are rounded to this.
const MIB: u64 = 1 << 20;

object! {
    /// What a DataVolume should be (`spec`).
    pub struct DataVolumeSpec {
        /// What the claim is filled with.
        pub source: Option<DataVolumeSource>,
        /// A source that another object names.
        pub source_ref: Option<SourceRef>,
        /// The claim, taken as it is.
        pub pvc: Option<ClaimTemplate>,
        /// The claim, of which what is left out is filled in.
        pub storage: Option<ClaimTemplate>,
        /// `kubevirt` (a disk) or `archive`.
        pub content_type: Option<String>,
        /// Space for the whole disk is allocated at once.
        pub preallocation: Option<bool>,
        /// Priority class of the importer's pod.
        pub priority_class_name: Option<String>,
        /// Service account of the importer's pod.
        pub service_account_name: Option<String>,
        /// Steps of an import in several stages.
        pub checkpoints: Vec<Value>,
        /// Whether the last of them is given.
        pub final_checkpoint: Option<bool>,
    }

    /// What a claim is filled with: exactly one.
    pub struct DataVolumeSource {
        /// A file of a web server.
        pub http: Option<HttpSource>,
        /// A disk in an image of a registry.
        pub registry: Option<RegistrySource>,
        /// A copy of another claim.
        pub pvc: Option<ObjectSource>,
        /// A VolumeSnapshot.
        pub snapshot: Option<ObjectSource>,
        /// What a user uploads.
        pub upload: Option<Value>,
        /// An empty disk.
        pub blank: Option<Value>,
        /// An object of an S3 server.
        pub s3: Option<Value>,
        /// An object of Google's cloud storage.
        pub gcs: Option<Value>,
        /// A disk of oVirt.
        pub imageio: Option<Value>,
        /// A disk of VMware.
        pub vddk: Option<Value>,
    }

    /// A file of a web server.
    pub struct HttpSource {
        /// Its URL.
        pub url: String,
        /// A Secret with `accessKeyId` and `secretKey`: user and password.
        pub secret_ref: Option<String>,
        /// A ConfigMap with certificates of authorities to trust.
        pub cert_config_map: Option<String>,
        /// Headers to send.
        pub extra_headers: Vec<String>,
        /// Secrets whose values are headers to send.
        pub secret_extra_headers: Vec<String>,
        /// The file's checksum.
        pub checksum: Option<String>,
        /// Trust whoever answers.
        pub insecure_skip_verify: Option<bool>,
    }

    /// A disk in an image of a registry.
    pub struct RegistrySource {
        /// `docker://HOST/NAME:TAG`.
        pub url: Option<String>,
        /// An image stream of OpenShift.
        pub image_stream: Option<String>,
        /// Who pulls it: `pod` or `node`.
        pub pull_method: Option<String>,
        /// A Secret with `accessKeyId` and `secretKey`: user and password.
        pub secret_ref: Option<String>,
        /// A ConfigMap with certificates of authorities to trust.
        pub cert_config_map: Option<String>,
        /// Which of an index's images.
        pub platform: Option<Value>,
    }

    /// Another object.
    pub struct ObjectSource {
        /// Its namespace; the DataVolume's, if it is missing.
        pub namespace: Option<String>,
        /// Its name.
        pub name: String,
    }

    /// An object that names a source.
    pub struct SourceRef {
        /// Its kind.
        pub kind: String,
        /// Its namespace.
        pub namespace: Option<String>,
        /// Its name.
        pub name: String,
    }

    /// A claim to be made.
    pub struct ClaimTemplate {
        /// How many nodes may use it, and how.
        pub access_modes: Vec<String>,
        /// `Filesystem` or `Block`.
        pub volume_mode: Option<String>,
        /// Its size.
        pub resources: Option<ClaimResources>,
        /// Its class.
        pub storage_class_name: Option<String>,
        /// Labels of the volume to bind.
        pub selector: Option<Value>,
        /// What fills it, if that is not this DataVolume.
        pub data_source: Option<Value>,
        /// What fills it, if that is not this DataVolume.
        pub data_source_ref: Option<Value>,
        /// The volume to bind.
        pub volume_name: Option<String>,
        /// Class of what may change of the volume.
        pub volume_attributes_class_name: Option<String>,
    }

    /// The size of a claim.
    pub struct ClaimResources {
        /// `storage`: its size.
        pub requests: BTreeMap<String, Quantity>,
        /// `storage`: its largest size.
        pub limits: BTreeMap<String, Quantity>,
    }
}

/// What is copied from another namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignSource {
    /// Its namespace.
    pub namespace: String,
    /// What it is.
    pub kind: SourceKind,
    /// Its name.
    pub name: String,
}

/// What a copy can be of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceKind {
    /// A claim.
    Claim,
    /// What a DataSource names, now or later.
    DataSource,
}

impl SourceKind {
    /// The kind's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Claim => "PersistentVolumeClaim",
            Self::DataSource => "DataSource",
        }
    }
}

impl ClaimTemplate {
    /// The size that is asked for, as it was written.
    #[must_use]
    pub fn request(&self) -> Option<&Quantity> {
        self.resources.as_ref()?.requests.get("storage")
    }

    /// Whether the claim is a block device.
    #[must_use]
    pub fn is_block(&self) -> bool {
        self.volume_mode.as_deref() == Some("Block")
    }
}

impl DataVolumeSpec {
    /// The claim, whichever way it is written.
    #[must_use]
    pub fn claim(&self) -> Option<&ClaimTemplate> {
        self.pvc.as_ref().or(self.storage.as_ref())
    }

    /// The claim that is copied: its namespace, if one is given, and its name.
    #[must_use]
    pub fn cloned_claim(&self) -> Option<(Option<&str>, &str)> {
        let source = self.source.as_ref()?.pvc.as_ref()?;
        let namespace = source.namespace.as_deref().filter(|text| !text.is_empty());
        Some((namespace, source.name.as_str()))
    }

    /// Asks for a size, if none is asked for: a copy is as large as what is copied.
    pub fn default_size(&mut self, size: &Quantity) {
        let claim = self.pvc.as_mut().or(self.storage.as_mut());
        if let Some(claim) = claim {
            let resources = claim.resources.get_or_insert_default();
            let requests = &mut resources.requests;
            requests
                .entry("storage".to_owned())
                .or_insert_with(|| size.clone());
        }
    }

    /// Every cause to refuse this specification in a namespace, below `path` (`spec`).
    #[must_use]
    pub fn validate_in(&self, namespace: &str, path: &FieldPath) -> Vec<Cause> {
        let mut causes = self.validate(path);
        causes.extend(self.validate_source_namespace(namespace, path));
        causes
    }

    /// Whether a user uploads what the claim is filled with.
    #[must_use]
    pub fn is_upload(&self) -> bool {
        let source = self.source.as_ref();
        source.is_some_and(|source| source.upload.is_some())
    }

    /// The snapshot that the claim is made of.
    #[must_use]
    pub fn restored_snapshot(&self) -> Option<&ObjectSource> {
        self.source.as_ref()?.snapshot.as_ref()
    }

    /// What this copies from another namespace than its own: a claim, or what a DataSource names.
    #[must_use]
    pub fn foreign_source(&self, own: &str) -> Option<ForeignSource> {
        let is_foreign = |given: &&str| !given.is_empty() && *given != own;
        if let Some(reference) = &self.source_ref {
            let namespace = reference.namespace.as_deref().filter(is_foreign)?;
            return Some(ForeignSource {
                namespace: namespace.to_owned(),
                kind: SourceKind::DataSource,
                name: reference.name.clone(),
            });
        }
        let (namespace, name) = self.cloned_claim()?;
        Some(ForeignSource {
            namespace: namespace.filter(is_foreign)?.to_owned(),
            kind: SourceKind::Claim,
            name: name.to_owned(),
        })
    }

    /// Causes to refuse a source that cannot be used from this namespace, below `path` (`spec`).
    #[must_use]
    pub fn validate_source_namespace(&self, namespace: &str, path: &FieldPath) -> Vec<Cause> {
        let mut causes = Causes::default();
        if let Some(source) = self.foreign_source(namespace)
            && !is_dns_label(&source.namespace)
        {
            let field = match source.kind {
                SourceKind::Claim => path.child("source.pvc.namespace"),
                SourceKind::DataSource => path.child("sourceRef.namespace"),
            };
            let given = shown(&source.namespace);
            causes.invalid(
                &field,
                format_args!("is {given}, not the name of a namespace"),
            );
        }
        if let Some(snapshot) = self.restored_snapshot()
            && !snapshot.is_in(namespace)
        {
            let field = path.child("source.snapshot.namespace");
            let message = "is another namespace, whose snapshots cannot be used: leave it out";
            causes.not_supported(&field, message);
        }
        causes.into_vec()
    }

    /// Bytes that the disk has at most: what was asked for.
    #[must_use]
    pub fn disk_size(&self) -> Option<u64> {
        self.claim()?.request()?.bytes()
    }

    /// Bytes that the claim asks for: with `storage`, more than the disk's by what a file system
    /// takes.
    #[must_use]
    pub fn claim_size(&self) -> Option<u64> {
        let size = self.disk_size()?;
        match (&self.pvc, &self.storage) {
            (None, Some(storage)) if !storage.is_block() => {
                let all = u128::from(size) * 1000;
                let rest = u128::from(1000 - OVERHEAD_THOUSANDTHS);
                let bytes = u64::try_from(all.div_ceil(rest)).ok()?;
                bytes.checked_next_multiple_of(MIB)
            }
            _ => Some(size),
        }
    }
}

/// Bytes that a disk may have on a file system with so many free ones: of a claim that was taken
/// as it is, a part is left for the file system.
#[must_use]
pub fn usable(free: u64, is_reduced: bool) -> u64 {
    let usable = if is_reduced {
        let rest = u128::from(free) * u128::from(1000 - OVERHEAD_THOUSANDTHS) / 1000;
        u64::try_from(rest).unwrap_or(free)
    } else {
        free
    };
    usable / MIB * MIB
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_claim_of_storage_has_room_for_its_file_system() {
        let size = |spec: Value| {
            let spec: DataVolumeSpec = serde_json::from_value(spec).unwrap();
            (spec.disk_size(), spec.claim_size())
        };
        let request = json!({ "requests": { "storage": "1Gi" } });
        let exact = (Some(1 << 30), Some(1 << 30));
        assert_eq!(size(json!({ "pvc": { "resources": request } })), exact);
        let block = json!({ "storage": { "resources": request, "volumeMode": "Block" } });
        assert_eq!(size(block), exact);
        let (disk, claim) = size(json!({ "storage": { "resources": request } }));
        let (disk, claim) = (disk.unwrap(), claim.unwrap());
        assert_eq!((disk, claim), (1 << 30, 1084 << 20));
        assert!(usable(claim, true) >= disk - MIB);
        let huge = json!({ "requests": { "storage": "9223372036854775807" } });
        assert!(
            size(json!({ "storage": { "resources": huge } }))
                .1
                .is_some()
        );
    }

    #[test]
    fn what_can_be_used_is_never_more_than_what_is_free() {
        for free in [0, 1, MIB, MIB + 1, u64::MAX] {
            assert!(usable(free, true) <= usable(free, false));
            assert!(usable(free, false) <= free);
        }
    }
}
