//! The volumes of an instance in its pod's terms.
//!
//! The first container disk is the container's image, the others are image volumes. A volume is
//! at `/podvisor/volumes/NAME` of the container, or a device `/podvisor/devices/NAME`: the node
//! finds the sources of the specification's disks and file systems there by their names.

use podvisor_cluster_types::vmi::{CloudInit, VmiSpec, Volume};
use serde_json::{Value, json};

use super::pod_error::PodError;
use crate::controller::claims::VolumeMode;

/// Where directories of volumes are.
pub const MOUNTS: &str = "/podvisor/volumes";

/// Where block devices of volumes are.
pub const DEVICES: &str = "/podvisor/devices";

/// The volumes of a pod.
#[derive(Debug, Default)]
pub(super) struct PodVolumes {
    /// The container's image.
    pub(super) image: Option<String>,
    /// When that image is pulled.
    pub(super) pull_policy: Option<String>,
    /// Secrets for registries.
    pub(super) pull_secrets: Vec<String>,
    /// The pod's volumes.
    pub(super) volumes: Vec<Value>,
    /// The container's mounts.
    pub(super) mounts: Vec<Value>,
    /// The container's devices.
    pub(super) devices: Vec<Value>,
    /// The account of a volume with its token.
    pub(super) service_account: Option<String>,
}

/// Returns the volumes of a pod.
pub(super) fn of(
    spec: &VmiSpec,
    claim: &dyn Fn(&str) -> Option<VolumeMode>,
) -> Result<PodVolumes, PodError> {
    let mut pod = PodVolumes::default();
    if let Some(container) = spec
        .domain
        .firmware
        .as_ref()
        .and_then(|firmware| firmware.kernel_boot.as_ref()?.container.as_ref())
        && !container.image.is_empty()
    {
        let source = image(&container.image, container.image_pull_policy.as_deref());
        pod.mount("kernel-boot".to_owned(), source, true);
        pod.pull_secrets.extend(container.image_pull_secret.clone());
    }
    // The others come when the VM runs.
    for volume in spec
        .volumes
        .iter()
        .filter(|volume| !volume.is_hotpluggable())
    {
        pod.add(volume, claim)?;
    }
    for (index, credential) in spec.access_credentials.iter().enumerate() {
        let sources = [
            credential.ssh_public_key.as_ref().map(|key| &key.source),
            credential.user_password.as_ref().map(|user| &user.source),
        ];
        for source in sources.into_iter().flatten() {
            if let Some(secret) = &source.secret {
                let name = format!("access-credential-{index}");
                pod.mount(
                    name,
                    json!({"secret": {"secretName": secret.secret_name}}),
                    true,
                );
            }
        }
    }
    pod.pull_secrets.sort();
    pod.pull_secrets.dedup();
    Ok(pod)
}

fn image(reference: &str, policy: Option<&str>) -> Value {
    let mut image = json!({"reference": reference});
    if let Some(policy) = policy {
        image["pullPolicy"] = policy.into();
    }
    json!({ "image": image })
}

impl PodVolumes {
    fn add(
        &mut self,
        volume: &Volume,
        claim: &dyn Fn(&str) -> Option<VolumeMode>,
    ) -> Result<(), PodError> {
        let name = volume.name.clone();
        if let Some(disk) = &volume.container_disk {
            self.pull_secrets.extend(disk.image_pull_secret.clone());
            if self.image.is_none() {
                self.image = Some(disk.image.clone());
                self.pull_policy.clone_from(&disk.image_pull_policy);
            } else {
                let source = image(&disk.image, disk.image_pull_policy.as_deref());
                self.mount(name, source, true);
            }
        } else if let Some(source) = &volume.persistent_volume_claim {
            let read_only = source.read_only == Some(true);
            self.claim(name, &source.claim_name, read_only, claim)?;
        } else if let Some(source) = &volume.data_volume {
            // A DataVolume's claim has its name.
            self.claim(name, &source.name, false, claim)?;
        } else if let Some(source) = volume
            .ephemeral
            .as_ref()
            .and_then(|source| source.persistent_volume_claim.as_ref())
        {
            self.claim(name, &source.claim_name, true, claim)?;
        } else if let Some(disk) = &volume.empty_disk {
            let mut source = json!({"emptyDir": {}});
            if let Some(capacity) = &disk.capacity {
                source["emptyDir"]["sizeLimit"] = capacity.as_str().into();
            }
            self.mount(name, source, false);
        } else if let Some(source) = &volume.config_map {
            self.mount(
                name,
                json!({"configMap": {"name": source.name, "optional": source.optional}}),
                true,
            );
        } else if let Some(source) = &volume.secret {
            self.mount(
                name,
                json!({"secret": {"secretName": source.secret_name, "optional": source.optional}}),
                true,
            );
        } else if let Some(source) = &volume.downward_api {
            self.mount(name, json!({"downwardAPI": {"items": source.fields}}), true);
        } else if let Some(source) = &volume.service_account {
            self.service_account
                .clone_from(&source.service_account_name);
            self.mount(name, token(), true);
        } else if let Some(data) = volume
            .cloud_init_no_cloud
            .as_ref()
            .or(volume.cloud_init_config_drive.as_ref())
        {
            // Inline data is in the annotation.
            for (name, secret) in cloud_init_secrets(volume, data) {
                self.mount(name, json!({"secret": {"secretName": secret}}), true);
            }
        } else {
            // Admission lets no other pass; a directory of the node least of all.
            return Err(PodError::Unsupported {
                field: format!("the source of volume {name}"),
            });
        }
        Ok(())
    }

    fn claim(
        &mut self,
        name: String,
        claim_name: &str,
        read_only: bool,
        claim: &dyn Fn(&str) -> Option<VolumeMode>,
    ) -> Result<(), PodError> {
        let source = json!({
            "persistentVolumeClaim": {"claimName": claim_name, "readOnly": read_only},
        });
        match claim(claim_name) {
            Some(VolumeMode::Filesystem) => self.mount(name, source, read_only),
            Some(VolumeMode::Block) => {
                self.devices
                    .push(json!({"name": name, "devicePath": format!("{DEVICES}/{name}")}));
                self.push(name, source);
            }
            None => {
                return Err(PodError::NoClaim {
                    claim: claim_name.to_owned(),
                    volume: name,
                });
            }
        }
        Ok(())
    }

    fn mount(&mut self, name: String, source: Value, read_only: bool) {
        self.mounts.push(json!({
            "name": name,
            "mountPath": format!("{MOUNTS}/{name}"),
            "readOnly": read_only,
        }));
        self.push(name, source);
    }

    fn push(&mut self, name: String, mut source: Value) {
        source["name"] = name.into();
        self.volumes.push(source);
    }
}

/// Returns what a pod's own token consists of.
fn token() -> Value {
    json!({"projected": {"sources": [
        {"serviceAccountToken": {"path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [
            {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}},
        ]}},
    ]}})
}

/// Returns the secrets of cloud-init's data, each with the name of the volume that shows it.
fn cloud_init_secrets<'a>(
    volume: &'a Volume,
    data: &'a CloudInit,
) -> impl Iterator<Item = (String, &'a str)> {
    let user = data.secret_ref.as_ref().map(|secret| ("userdata", secret));
    let network = data
        .network_data_secret_ref
        .as_ref()
        .map(|secret| ("networkdata", secret));
    user.into_iter()
        .chain(network)
        .map(move |(kind, secret)| (format!("{}-{kind}", volume.name), secret.name.as_str()))
}
