//! Volumes (`spec.volumes`).

use std::collections::BTreeSet;

use serde_json::Value;

use super::{
    CloudInit, VmiSpec, cloud_init, count, references::validate_name, resources::read_quantity,
};
use crate::{
    Causes, FieldPath, Quantity,
    cause::shown,
    names::{is_clean_absolute_path, is_dns_label},
};

object! {
    /// A volume: exactly one source.
    pub struct Volume {
        /// Its name, which a disk or a file system refers to.
        pub name: String,
        /// A disk in an OCI image, with an overlay for what is written.
        pub container_disk: Option<ContainerDisk>,
        /// A claim.
        pub persistent_volume_claim: Option<ClaimSource>,
        /// A claim that a DataVolume fills.
        pub data_volume: Option<DataVolumeSource>,
        /// An overlay over a claim that is never written.
        pub ephemeral: Option<EphemeralVolume>,
        /// An empty disk that lives as long as the pod.
        pub empty_disk: Option<EmptyDisk>,
        /// Refused.
        pub host_disk: Option<Value>,
        /// cloud-init's data, labelled `cidata`.
        pub cloud_init_no_cloud: Option<CloudInit>,
        /// cloud-init's data, labelled `config-2`.
        pub cloud_init_config_drive: Option<CloudInit>,
        /// A ConfigMap.
        pub config_map: Option<ConfigMapVolume>,
        /// A Secret.
        pub secret: Option<SecretVolume>,
        /// Fields of the pod.
        #[serde(rename = "downwardAPI")]
        pub downward_api: Option<DownwardApiVolume>,
        /// The token of a service account.
        pub service_account: Option<ServiceAccountVolume>,
        /// Refused.
        pub sysprep: Option<Value>,
        /// Refused.
        pub downward_metrics: Option<Value>,
        /// A claim to which the memory is dumped.
        pub memory_dump: Option<MemoryDumpVolume>,
        /// Refused.
        pub container_path: Option<Value>,
    }

    /// A disk in an OCI image.
    pub struct ContainerDisk {
        /// The image.
        pub image: String,
        /// Secret for the registry.
        pub image_pull_secret: Option<String>,
        /// When the image is pulled.
        pub image_pull_policy: Option<String>,
        /// The disk's path in the image.
        pub path: Option<String>,
    }

    /// A claim.
    pub struct ClaimSource {
        /// Its name.
        pub claim_name: String,
        /// The guest cannot write.
        pub read_only: Option<bool>,
        /// It was plugged in.
        pub hotpluggable: Option<bool>,
    }

    /// A DataVolume.
    pub struct DataVolumeSource {
        /// Its name.
        pub name: String,
        /// It was plugged in.
        pub hotpluggable: Option<bool>,
    }

    /// A claim to which the guest's memory is dumped, and which is no disk.
    pub struct MemoryDumpVolume {
        /// Its name.
        pub claim_name: String,
        /// It cannot be written, and takes no dump.
        pub read_only: Option<bool>,
        /// It comes while the guest runs, as all of them do.
        pub hotpluggable: Option<bool>,
    }

    /// An overlay over a claim.
    pub struct EphemeralVolume {
        /// The claim.
        pub persistent_volume_claim: Option<ClaimSource>,
    }

    /// An empty disk.
    pub struct EmptyDisk {
        /// Its size.
        pub capacity: Option<Quantity>,
    }

    /// A ConfigMap.
    pub struct ConfigMapVolume {
        /// Its name.
        pub name: Option<String>,
        /// It may be missing.
        pub optional: Option<bool>,
        /// Label of the file system on the disk.
        pub volume_label: Option<String>,
    }

    /// A Secret.
    pub struct SecretVolume {
        /// Its name.
        pub secret_name: Option<String>,
        /// It may be missing.
        pub optional: Option<bool>,
        /// Label of the file system on the disk.
        pub volume_label: Option<String>,
    }

    /// Fields of the pod.
    pub struct DownwardApiVolume {
        /// The fields, as a pod's volume has them.
        pub fields: Vec<Value>,
        /// Label of the file system on the disk.
        pub volume_label: Option<String>,
    }

    /// The token of a service account.
    pub struct ServiceAccountVolume {
        /// Its name.
        pub service_account_name: Option<String>,
    }
}

impl Volume {
    /// Whether it comes while the guest runs, and goes: as a disk, or for a dump.
    #[must_use]
    pub fn is_hotpluggable(&self) -> bool {
        let claim = self.persistent_volume_claim.as_ref();
        let data = self.data_volume.as_ref();
        claim.and_then(|claim| claim.hotpluggable) == Some(true)
            || data.and_then(|data| data.hotpluggable) == Some(true)
            || self.is_memory_dump()
    }

    /// Whether it is a claim for dumps of the memory, which no disk shows.
    #[must_use]
    pub fn is_memory_dump(&self) -> bool {
        self.memory_dump.is_some()
    }

    fn sources(&self) -> [bool; 16] {
        [
            self.container_disk.is_some(),
            self.persistent_volume_claim.is_some(),
            self.data_volume.is_some(),
            self.ephemeral.is_some(),
            self.empty_disk.is_some(),
            self.host_disk.is_some(),
            self.cloud_init_no_cloud.is_some(),
            self.cloud_init_config_drive.is_some(),
            self.config_map.is_some(),
            self.secret.is_some(),
            self.downward_api.is_some(),
            self.service_account.is_some(),
            self.sysprep.is_some(),
            self.downward_metrics.is_some(),
            self.memory_dump.is_some(),
            self.container_path.is_some(),
        ]
    }

    /// Whether the volume was plugged into a VM.
    #[must_use]
    pub fn is_hot_plugged(&self) -> bool {
        let claim = self
            .persistent_volume_claim
            .as_ref()
            .and_then(|claim| claim.hotpluggable);
        let data = self.data_volume.as_ref().and_then(|data| data.hotpluggable);
        claim.or(data) == Some(true)
    }
}

/// Whether an image's name can mean another image tomorrow.
fn is_moving(image: &str) -> bool {
    if image.contains('@') {
        return false;
    }
    let name = image.rsplit('/').next().unwrap_or(image);
    name.split_once(':').is_none_or(|(_, tag)| tag == "latest")
}

pub(super) fn apply_defaults(volumes: &mut [Volume]) {
    for disk in volumes
        .iter_mut()
        .filter_map(|volume| volume.container_disk.as_mut())
    {
        if disk.image_pull_policy.as_ref().is_none_or(String::is_empty) {
            let policy = if is_moving(&disk.image) {
                "Always"
            } else {
                "IfNotPresent"
            };
            disk.image_pull_policy = Some(policy.to_owned());
        }
    }
}

pub(super) fn validate(spec: &VmiSpec, path: &FieldPath, causes: &mut Causes) {
    let devices = &spec.domain.devices;
    let shows: BTreeSet<&str> = devices
        .disks
        .iter()
        .map(|disk| disk.name.as_str())
        .chain(
            devices
                .filesystems
                .iter()
                .map(|filesystem| filesystem.name.as_str()),
        )
        .collect();
    let mut names = BTreeSet::new();
    let mut service_accounts = 0;
    for (index, volume) in spec.volumes.iter().enumerate() {
        let path = path.index(index);
        let name = path.child("name");
        if !is_dns_label(&volume.name) {
            let message = format!("is {}, but must be a DNS label", shown(&volume.name));
            causes.invalid(&name, message);
        }
        if !names.insert(volume.name.as_str()) {
            causes.duplicate(&name, &volume.name);
        }
        let is_shown = shows.contains(volume.name.as_str());
        if volume.is_memory_dump() && is_shown {
            let message = format!(
                "is {}, a volume for memory dumps, which a disk or a file system cannot show",
                shown(&volume.name)
            );
            causes.invalid(&name, message);
        } else if !volume.is_memory_dump() && !is_shown {
            let message = format!(
                "is {}, but no disk or file system has this name",
                shown(&volume.name)
            );
            causes.invalid(&name, message);
        }
        if count(&volume.sources()) != 1 {
            causes.invalid(&path, "must have exactly one source");
        }
        service_accounts += usize::from(volume.service_account.is_some());
        validate_references(volume, &path, causes);
        validate_disks(volume, &path, causes);
        for (name, cloud_init) in [
            ("cloudInitNoCloud", &volume.cloud_init_no_cloud),
            ("cloudInitConfigDrive", &volume.cloud_init_config_drive),
        ] {
            if let Some(cloud_init) = cloud_init {
                cloud_init::validate(cloud_init, &path.child(name), causes);
            }
        }
    }
    if service_accounts > 1 {
        causes.invalid(path, "must not have more than one serviceAccount volume");
    }
}

/// References to other objects name them.
fn validate_references(volume: &Volume, path: &FieldPath, causes: &mut Causes) {
    let optional = |name: &Option<String>| name.clone().unwrap_or_default();
    let ephemeral = volume.ephemeral.as_ref().map(|ephemeral| {
        ephemeral
            .persistent_volume_claim
            .as_ref()
            .map_or("", |claim| &claim.claim_name)
            .to_owned()
    });
    let references = [
        (
            "persistentVolumeClaim.claimName",
            volume
                .persistent_volume_claim
                .as_ref()
                .map(|claim| claim.claim_name.clone()),
        ),
        (
            "dataVolume.name",
            volume.data_volume.as_ref().map(|data| data.name.clone()),
        ),
        ("ephemeral.persistentVolumeClaim.claimName", ephemeral),
        (
            "memoryDump.claimName",
            volume
                .memory_dump
                .as_ref()
                .map(|dump| dump.claim_name.clone()),
        ),
        (
            "configMap.name",
            volume.config_map.as_ref().map(|map| optional(&map.name)),
        ),
        (
            "secret.secretName",
            volume
                .secret
                .as_ref()
                .map(|secret| optional(&secret.secret_name)),
        ),
        (
            "serviceAccount.serviceAccountName",
            volume
                .service_account
                .as_ref()
                .map(|account| optional(&account.service_account_name)),
        ),
    ];
    for (name, reference) in references {
        if let Some(reference) = reference {
            validate_name(&reference, &path.child(name), causes);
        }
    }
}

/// A name of an object in the VM's namespace.
fn validate_disks(volume: &Volume, path: &FieldPath, causes: &mut Causes) {
    if let Some(disk) = &volume.container_disk {
        let path = path.child("containerDisk");
        if disk.image.is_empty() {
            causes.required(&path.child("image"), "is required");
        }
        if let Some(inner) = disk.path.as_deref().filter(|inner| !inner.is_empty())
            && !is_clean_absolute_path(inner)
        {
            causes.invalid(
                &path.child("path"),
                format_args!(
                    "is {}, but must be an absolute path without `..`",
                    shown(inner)
                ),
            );
        }
        let policy = disk.image_pull_policy.as_deref().unwrap_or("");
        causes.one_of(
            &path.child("imagePullPolicy"),
            policy,
            &["", "Always", "IfNotPresent", "Never"],
        );
    }
    if let Some(disk) = &volume.empty_disk {
        let path = path.child("emptyDisk.capacity");
        match &disk.capacity {
            None => causes.required(&path, "is required"),
            Some(capacity) => {
                let amount = read_quantity(capacity, &path, causes);
                if amount.is_some_and(|amount| amount.ceil() == 0) {
                    causes.invalid(&path, "is zero, but a disk has a size");
                }
            }
        }
    }
}
