//! Disks (`spec.domain.devices.disks`).

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{VmiSpec, count};
use crate::{Causes, FieldPath, cause::shown};

const MAX_SERIAL: usize = 256;

const VIRTIO: &str = "virtio";

/// The bus that a CD-ROM may name as well: guests find its data on virtio too.
const SATA: &str = "sata";

/// The bus that a disk that is plugged in may name as well: clients write it where nobody chose.
const SCSI: &str = "scsi";

object! {
    /// A disk; exactly one of `disk`, `cdrom` and `lun`.
    pub struct Disk {
        /// Name of the disk and of the volume that it shows.
        pub name: String,
        /// An ordinary disk.
        pub disk: Option<DiskTarget>,
        /// A read-only disk.
        pub cdrom: Option<CdromTarget>,
        /// Refused.
        pub lun: Option<Value>,
        /// Where in the order of boot it stands.
        pub boot_order: Option<i64>,
        /// Serial number that the guest sees.
        pub serial: Option<String>,
        /// An I/O thread of its own.
        #[serde(rename = "dedicatedIOThread")]
        pub dedicated_io_thread: Option<bool>,
        /// `none`, `writethrough` or `writeback`.
        pub cache: Option<String>,
        /// `native` or `threads`.
        pub io: Option<String>,
        /// Sizes of blocks that the guest sees.
        pub block_size: Option<BlockSize>,
        /// Several VMs may write to it.
        pub shareable: Option<bool>,
        /// What an I/O error does.
        pub error_policy: Option<String>,
        /// A tag in cloud-init's data.
        pub tag: Option<String>,
        /// Refused.
        pub changed_block_tracking: Option<Value>,
    }

    /// How an ordinary disk is attached.
    pub struct DiskTarget {
        /// `virtio`.
        pub bus: Option<String>,
        /// The guest cannot write.
        pub readonly: Option<bool>,
        /// Refused.
        pub pci_address: Option<Value>,
    }

    /// How a CD-ROM is attached.
    pub struct CdromTarget {
        /// `virtio`; `sata` is read as `virtio`.
        pub bus: Option<String>,
        /// Always true.
        pub readonly: Option<bool>,
        /// `closed` or `open`.
        pub tray: Option<String>,
    }

    /// Sizes of blocks that the guest sees.
    pub struct BlockSize {
        /// These.
        pub custom: Option<CustomBlockSize>,
        /// Those of the volume.
        pub match_volume: Option<MatchVolume>,
    }

    /// Sizes of blocks in bytes.
    pub struct CustomBlockSize {
        /// Smallest unit of addressing.
        pub logical: Option<i64>,
        /// Smallest unit that is written at once.
        pub physical: Option<i64>,
        /// Smallest unit that is discarded.
        pub discard_granularity: Option<i64>,
    }

    /// The volume's sizes of blocks.
    pub struct MatchVolume {
        /// On unless it says false.
        pub enabled: Option<bool>,
    }
}

impl Disk {
    /// Whether the guest cannot write to it.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.cdrom.is_some()
            || self
                .disk
                .as_ref()
                .is_some_and(|disk| disk.readonly == Some(true))
    }
}

pub(super) fn apply_defaults(disks: &mut [Disk]) {
    let virtio = |bus: &mut Option<String>| {
        if bus.as_ref().is_none_or(String::is_empty) {
            *bus = Some(VIRTIO.to_owned());
        }
    };
    for disk in disks {
        if disk.disk.is_none() && disk.cdrom.is_none() && disk.lun.is_none() {
            disk.disk = Some(DiskTarget::default());
        }
        if let Some(cdrom) = &mut disk.cdrom {
            cdrom.readonly.get_or_insert(true);
            cdrom.tray.get_or_insert_with(|| "closed".to_owned());
            virtio(&mut cdrom.bus);
        }
        if let Some(disk) = &mut disk.disk {
            virtio(&mut disk.bus);
        }
    }
}

pub(super) fn validate(spec: &VmiSpec, path: &FieldPath, causes: &mut Causes) {
    let volumes: BTreeMap<&str, _> = spec
        .volumes
        .iter()
        .map(|volume| (volume.name.as_str(), volume))
        .collect();
    let mut names = BTreeSet::new();
    for (index, disk) in spec.domain.devices.disks.iter().enumerate() {
        let path = path.index(index);
        let name = path.child("name");
        let volume = volumes.get(disk.name.as_str());
        if volume.is_none() {
            let message = format!("is {}, but no volume has this name", shown(&disk.name));
            causes.invalid(&name, message);
        }
        if !names.insert(disk.name.as_str()) {
            causes.duplicate(&name, &disk.name);
        }
        if count(&[
            disk.disk.is_some(),
            disk.cdrom.is_some(),
            disk.lun.is_some(),
        ]) != 1
        {
            causes.invalid(&path, "must have exactly one of disk, cdrom and lun");
        }
        if disk.lun.is_some()
            && volume.is_some_and(|volume| {
                volume.persistent_volume_claim.is_none() && volume.data_volume.is_none()
            })
        {
            causes.invalid(
                &path.child("lun"),
                "needs a persistentVolumeClaim or a dataVolume",
            );
        }
        let is_plugged = volume.is_some_and(|volume| volume.is_hotpluggable());
        validate_target(disk, is_plugged, &path, causes);
        validate_words(disk, &path, causes);
        if let Some(size) = &disk.block_size {
            validate_block_size(size, &path.child("blockSize"), causes);
        }
    }
    validate_boot_order(spec, path, causes);
}

fn validate_target(disk: &Disk, is_plugged: bool, path: &FieldPath, causes: &mut Causes) {
    if let Some(target) = &disk.disk {
        let others: &[&str] = if is_plugged { &[SCSI] } else { &[] };
        let bus = target.bus.as_deref();
        validate_bus(bus, others, &path.child("disk.bus"), causes);
    }
    if let Some(cdrom) = &disk.cdrom {
        let path = path.child("cdrom");
        validate_bus(cdrom.bus.as_deref(), &[SATA], &path.child("bus"), causes);
        if cdrom.readonly == Some(false) {
            causes.invalid(&path.child("readonly"), "cannot be false");
        }
        if let Some(tray) = &cdrom.tray {
            causes.one_of(&path.child("tray"), tray, &["closed", "open"]);
        }
    }
}

fn validate_bus(bus: Option<&str>, others: &[&str], path: &FieldPath, causes: &mut Causes) {
    let Some(bus) = bus.filter(|bus| !bus.is_empty() && *bus != VIRTIO) else {
        return;
    };
    if !others.contains(&bus) {
        causes.not_supported(
            path,
            format_args!(
                "is {}, but every disk is on virtio: leave the bus out",
                shown(bus)
            ),
        );
    }
}

fn validate_words(disk: &Disk, path: &FieldPath, causes: &mut Causes) {
    if let Some(serial) = disk.serial.as_deref() {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"_.+-".contains(&byte);
        if serial.len() > MAX_SERIAL || !serial.bytes().all(known) {
            causes.invalid(
                &path.child("serial"),
                format_args!(
                    "is {}, but must have at most {MAX_SERIAL} letters, digits and _ . + -",
                    shown(serial)
                ),
            );
        }
    }
    let words: [(&str, &Option<String>, &[&str]); 3] = [
        ("cache", &disk.cache, &["none", "writethrough", "writeback"]),
        ("io", &disk.io, &["native", "threads"]),
        (
            "errorPolicy",
            &disk.error_policy,
            &["stop", "ignore", "report", "enospace"],
        ),
    ];
    for (name, word, known) in words {
        if let Some(word) = word.as_deref().filter(|word| !word.is_empty()) {
            causes.one_of(&path.child(name), word, known);
        }
    }
}

fn validate_block_size(size: &BlockSize, path: &FieldPath, causes: &mut Causes) {
    let matches = size
        .match_volume
        .as_ref()
        .is_some_and(|m| m.enabled != Some(false));
    let Some(custom) = &size.custom else { return };
    if matches {
        causes.invalid(path, "must not have both custom and matchVolume");
    }
    let path = path.child("custom");
    let numbers = [("logical", custom.logical), ("physical", custom.physical)];
    for (name, number) in numbers {
        let number = number.unwrap_or(0);
        let power_of_two = u64::try_from(number).is_ok_and(u64::is_power_of_two);
        if !power_of_two || !(512..=2 << 20).contains(&number) {
            causes.invalid(
                &path.child(name),
                format_args!("is {number}, but must be a power of two from 512 to 2097152"),
            );
        }
    }
    if custom.logical > custom.physical {
        causes.invalid(
            &path.child("logical"),
            "must not be greater than the physical size",
        );
    }
}

/// An order of boot counts over disks and interfaces.
fn validate_boot_order(spec: &VmiSpec, path: &FieldPath, causes: &mut Causes) {
    let devices = &spec.domain.devices;
    let cards =
        FieldPath::new(path.to_string().strip_suffix("disks").unwrap_or_default()).to_string();
    let disks = devices
        .disks
        .iter()
        .enumerate()
        .map(|(i, disk)| (path.index(i), disk.boot_order));
    let interfaces = devices.interfaces.iter().enumerate().map(|(i, interface)| {
        (
            FieldPath::new(&format!("{cards}interfaces")).index(i),
            interface.boot_order,
        )
    });
    let mut orders = BTreeSet::new();
    for (path, order) in disks.chain(interfaces) {
        let Some(order) = order else { continue };
        let path = path.child("bootOrder");
        if order < 1 {
            causes.invalid(&path, format_args!("is {order}, but must be at least 1"));
        } else if !orders.insert(order) {
            causes.duplicate(&path, &order.to_string());
        }
    }
}

/// CD-ROMs that name SATA are on virtio all the same.
pub(super) fn warnings(spec: &VmiSpec, path: &FieldPath) -> Vec<String> {
    let on_sata = |disk: &Disk| {
        disk.cdrom
            .as_ref()
            .is_some_and(|cdrom| cdrom.bus.as_deref() == Some(SATA))
    };
    let on_scsi = |disk: &Disk| {
        let target = disk.disk.as_ref();
        target.is_some_and(|target| target.bus.as_deref() == Some(SCSI))
    };
    let disks = spec.domain.devices.disks.iter().enumerate();
    disks
        .filter_map(|(index, disk)| {
            let bus = match disk {
                disk if on_sata(disk) => "cdrom.bus: sata",
                disk if on_scsi(disk) => "disk.bus: scsi",
                _ => return None,
            };
            let path = path.index(index);
            Some(format!(
                "{path}.{bus} is read as virtio; the guest sees /dev/vdX"
            ))
        })
        .take(8)
        .collect()
}
