//! The disks and file systems of the machine that an object describes.

use std::collections::BTreeSet;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use podvisor_cloud_init::Form;
use podvisor_cluster_types::Quantity;
use podvisor_cluster_types::vmi::{AccessCredential, CloudInit, Disk, Volume};
use podvisor_sandbox::BootMachine;

use super::machine::{
    DiskSource, MAX_SERIAL, MAX_TAG, Reader, SPEC, SeedText, VmiDisk, VmiSeed, VmiShare,
};

/// The label of a disk with files, as KubeVirt gives it.
const FILES_LABEL: &str = "cfgdata";

impl Reader {
    /// Its disks, in the guest's order.
    pub(super) fn disks(&mut self) -> Vec<VmiDisk> {
        let listed = self.spec.domain.devices.disks.clone();
        if listed.len() > BootMachine::MAX_DISKS {
            let most = BootMachine::MAX_DISKS;
            let problem = format!(
                "has {} disks, but a machine has at most {most}",
                listed.len()
            );
            self.wrong("domain.devices.disks", problem);
            return Vec::new();
        }
        let volumes = self.spec.volumes.clone();
        // The container's image is the first one, whatever disk shows it.
        let image = volumes
            .iter()
            .find(|volume| volume.container_disk.is_some())
            .map(|volume| volume.name.clone());
        let mut disks: Vec<VmiDisk> = Vec::new();
        let mut serials = BTreeSet::new();
        for (index, disk) in listed.iter().enumerate() {
            let found = volumes
                .iter()
                .enumerate()
                .find(|(_, volume)| volume.name == disk.name);
            // What names no volume was refused by the rules.
            let Some((number, volume)) = found else {
                continue;
            };
            let path = format!("volumes[{number}]");
            let Some(source) = self.source(&path, volume, image.as_deref()) else {
                continue;
            };
            let is_claimed_read_only = volume
                .persistent_volume_claim
                .as_ref()
                .is_some_and(|claim| claim.read_only == Some(true));
            let made = matches!(source, DiskSource::Files(_) | DiskSource::Seed(_));
            let serial = self.serial(index, disk, &mut serials);
            disks.push(VmiDisk {
                path: format!("{SPEC}.{path}"),
                name: volume.name.clone(),
                serial,
                is_read_only: disk.is_read_only() || is_claimed_read_only || made,
                source,
            });
        }
        disks
    }

    /// The volumes that its guest mounts.
    pub(super) fn shares(&mut self) -> Vec<VmiShare> {
        const LIST: &str = "domain.devices.filesystems";
        let listed = self.spec.domain.devices.filesystems.clone();
        let most = BootMachine::MAX_SHARES;
        if listed.len() > most {
            let problem = format!(
                "has {} entries, but a machine has at most {most}",
                listed.len()
            );
            self.wrong(LIST, problem);
            return Vec::new();
        }
        let volumes = self.spec.volumes.clone();
        let mut shares = Vec::new();
        for (index, listed) in listed.iter().enumerate() {
            let found = volumes.iter().enumerate();
            let mut found = found.filter(|(_, volume)| volume.name == listed.name);
            // What names no volume was refused by the rules.
            let Some((number, volume)) = found.next() else {
                continue;
            };
            if listed.name.len() > MAX_TAG {
                let problem = format!("is the guest's tag, which has at most {MAX_TAG} bytes");
                self.wrong(&format!("{LIST}[{index}].name"), problem);
            }
            let claim = volume.persistent_volume_claim.as_ref();
            let is_claim = claim.is_some() || volume.data_volume.is_some();
            let has_files = volume.config_map.is_some()
                || volume.secret.is_some()
                || volume.downward_api.is_some()
                || volume.service_account.is_some();
            if !is_claim && !has_files {
                let problem = "cannot be a file system of the guest: take a claim, a DataVolume, \
                               a ConfigMap, a Secret, a downwardAPI or a serviceAccount";
                self.wrong(&format!("volumes[{number}]"), problem);
            }
            let is_claimed_read_only = claim.is_some_and(|claim| claim.read_only == Some(true));
            shares.push(VmiShare {
                path: format!("{SPEC}.volumes[{number}]"),
                name: listed.name.clone(),
                is_read_only: has_files || is_claimed_read_only,
            });
        }
        shares
    }

    /// Returns the serial number of a disk: its own, or the beginning of its name.
    fn serial(&mut self, index: usize, disk: &Disk, taken: &mut BTreeSet<String>) -> String {
        let given = disk.serial.as_deref().filter(|serial| !serial.is_empty());
        let wanted: String = given
            .unwrap_or(&disk.name)
            .chars()
            .take(MAX_SERIAL)
            .collect();
        if taken.insert(wanted.clone()) {
            return wanted;
        }
        if given.is_some() {
            let path = format!("domain.devices.disks[{index}].serial");
            let problem = format!("begins with the {MAX_SERIAL} characters of another disk's");
            self.wrong(&path, problem);
        }
        let serial = format!("disk{index}");
        taken.insert(serial.clone());
        serial
    }

    fn source(&mut self, path: &str, volume: &Volume, image: Option<&str>) -> Option<DiskSource> {
        if let Some(disk) = &volume.container_disk {
            let inner = disk.path.as_deref().filter(|inner| !inner.is_empty());
            if inner.is_some_and(|inner| !is_in_disk_directory(inner)) {
                let problem = "must be a file in /disk, where this node looks for it";
                self.wrong(&format!("{path}.containerDisk.path"), problem);
            }
            return Some(match image == Some(volume.name.as_str()) {
                true => DiskSource::Image,
                false => DiskSource::ImageVolume,
            });
        }
        if volume.persistent_volume_claim.is_some() || volume.data_volume.is_some() {
            return Some(DiskSource::Claim);
        }
        if volume.ephemeral.is_some() {
            return Some(DiskSource::Ephemeral);
        }
        if let Some(disk) = &volume.empty_disk {
            let bytes = disk.capacity.as_ref().and_then(Quantity::bytes);
            return Some(DiskSource::Empty(bytes.unwrap_or(0)));
        }
        if let Some(data) = &volume.cloud_init_no_cloud {
            return Some(self.seed(path, "cloudInitNoCloud", Form::NoCloud, data));
        }
        if let Some(data) = &volume.cloud_init_config_drive {
            return Some(self.seed(path, "cloudInitConfigDrive", Form::ConfigDrive, data));
        }
        let label = if let Some(source) = &volume.config_map {
            &source.volume_label
        } else if let Some(source) = &volume.secret {
            &source.volume_label
        } else if let Some(source) = &volume.downward_api {
            &source.volume_label
        } else if volume.service_account.is_some() {
            &None
        } else {
            // The rules refuse volumes without a source, and those of kinds that there are not.
            self.wrong(path, "has no source that this node knows");
            return None;
        };
        let label = label.clone().filter(|label| !label.is_empty());
        Some(DiskSource::Files(
            label.unwrap_or_else(|| FILES_LABEL.to_owned()),
        ))
    }

    fn seed(&mut self, path: &str, kind: &str, form: Form, data: &CloudInit) -> DiskSource {
        let path = format!("{path}.{kind}");
        let user_data = self.text(
            &format!("{path}.userDataBase64"),
            data.secret_ref.is_some(),
            data.user_data.as_deref(),
            data.user_data_base64.as_deref(),
        );
        let network_data = self.text(
            &format!("{path}.networkDataBase64"),
            data.network_data_secret_ref.is_some(),
            data.network_data.as_deref(),
            data.network_data_base64.as_deref(),
        );
        let credentials = self.spec.access_credentials.iter().enumerate();
        let credentials = credentials.filter(|(_, credential)| is_told(credential, form));
        DiskSource::Seed(VmiSeed {
            form,
            user_data,
            network_data,
            credentials: credentials.map(|(index, _)| index).collect(),
        })
    }

    fn text(
        &mut self,
        path: &str,
        is_secret: bool,
        plain: Option<&str>,
        base64: Option<&str>,
    ) -> SeedText {
        if is_secret {
            return SeedText::Secret;
        }
        if let Some(plain) = plain.filter(|text| !text.is_empty()) {
            return SeedText::Inline(plain.as_bytes().to_vec());
        }
        let Some(base64) = base64.filter(|text| !text.is_empty()) else {
            return SeedText::None;
        };
        let symbols: String = base64.split_ascii_whitespace().collect();
        match STANDARD.decode(symbols) {
            Ok(bytes) => SeedText::Inline(bytes),
            Err(_) => {
                self.wrong(path, "is not base64");
                SeedText::None
            }
        }
    }
}

/// Whether keys reach the guest by cloud-init in this form.
fn is_told(credential: &AccessCredential, form: Form) -> bool {
    let Some(key) = &credential.ssh_public_key else {
        return false;
    };
    match form {
        Form::NoCloud => key.propagation_method.no_cloud.is_some(),
        Form::ConfigDrive => key.propagation_method.config_drive.is_some(),
    }
}

fn is_in_disk_directory(path: &str) -> bool {
    let name = path.strip_prefix("/disk/");
    name.is_some_and(|name| !name.is_empty() && !name.contains('/'))
}
