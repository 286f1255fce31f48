//! Disks and file systems.

use podvisor_cluster_types::{CauseReason, ClusterConfig, FieldPath, vmi::VmiSpec};
use serde_json::{Value, json};

use super::{CARD, DISK, accepted, at, causes_of, refused, right, set};

#[test]
fn disks_and_volumes_belong_together() {
    refused(
        &[(&at(DISK, "name"), json!("other"))],
        &["domain.devices.disks[0].name"],
    );
    refused(
        &[(&at(DISK, "name"), json!("seed"))],
        &["domain.devices.disks[1].name"],
    );
    // A volume that nothing shows gets a disk by default; without defaults it is refused.
    let mut spec = right();
    set(&mut spec, "/domain/devices/filesystems", json!([]));
    let spec: VmiSpec = serde_json::from_value(spec).unwrap();
    let causes = spec.validate(&ClusterConfig::default(), &FieldPath::new("spec"));
    assert_eq!(causes[0].field, "spec.volumes[2].name");
}

#[test]
fn a_disk_is_one_kind() {
    refused(
        &[(&at(DISK, "cdrom"), json!({}))],
        &["domain.devices.disks[0]"],
    );
    refused(
        &[
            (&at(DISK, "disk"), Value::Null),
            (&at(DISK, "lun"), json!({ "bus": "scsi" })),
        ],
        &["domain.devices.disks[0].lun", "domain.devices.disks[0].lun"],
    );
}

#[test]
fn an_order_of_boot_stands_once_over_disks_and_cards() {
    let order = "domain.devices.disks[1].bootOrder";
    refused(&[("/domain/devices/disks/1/bootOrder", json!(1))], &[order]);
    refused(&[("/domain/devices/disks/1/bootOrder", json!(0))], &[order]);
    refused(
        &[(&at(CARD, "bootOrder"), json!(1))],
        &["domain.devices.interfaces[0].bootOrder"],
    );
}

#[test]
fn every_disk_is_on_virtio() {
    for bus in ["sata", "scsi", "usb", "ide"] {
        let causes = refused(
            &[(&at(DISK, "disk/bus"), json!(bus))],
            &["domain.devices.disks[0].disk.bus"],
        );
        assert_eq!(causes[0].reason, CauseReason::NotSupported);
        assert!(causes[0].message.contains("leave the bus out"));
    }
    refused(
        &[("/domain/devices/disks/1/cdrom/bus", json!("scsi"))],
        &["domain.devices.disks[1].cdrom.bus"],
    );
    refused(
        &[("/domain/devices/disks/1/cdrom/readonly", json!(false))],
        &["domain.devices.disks[1].cdrom.readonly"],
    );
}

#[test]
fn a_cdrom_on_sata_is_accepted_with_a_warning() {
    let mut spec = right();
    set(
        &mut spec,
        "/domain/devices/disks/1/cdrom/bus",
        json!("sata"),
    );
    assert_eq!(causes_of(spec.clone(), &ClusterConfig::default()), []);
    let spec: VmiSpec = serde_json::from_value(spec).unwrap();
    let warnings = spec.warnings(&FieldPath::new("spec"));
    assert_eq!(warnings.len(), 1);
    assert!(
        warnings[0].starts_with("spec.domain.devices.disks[1].cdrom.bus"),
        "{warnings:?}"
    );
}

#[test]
fn what_changes_nothing_is_told() {
    let mut spec = right();
    let disk: VmiSpec = serde_json::from_value(spec.clone()).unwrap();
    assert_eq!(disk.warnings(&FieldPath::new("spec")), [""; 0]);
    set(&mut spec, &at(DISK, "cache"), json!("none"));
    set(&mut spec, &at(DISK, "errorPolicy"), json!("report"));
    set(&mut spec, &at(DISK, "tag"), json!("first"));
    let devices = "/domain/devices/networkInterfaceMultiqueue";
    set(&mut spec, devices, json!(true));
    set(
        &mut spec,
        "/domain/devices/interfaces/0/bootOrder",
        json!(2),
    );
    assert_eq!(causes_of(spec.clone(), &ClusterConfig::default()), []);
    let spec: VmiSpec = serde_json::from_value(spec).unwrap();
    let warnings = spec.warnings(&FieldPath::new("spec"));
    let fields = warnings.iter().map(|warning| {
        let (field, why) = warning.split_once(" is not applied: ").unwrap();
        assert!(!why.is_empty(), "{field}");
        field.strip_prefix("spec.domain.devices.").unwrap()
    });
    assert_eq!(
        fields.collect::<Vec<_>>(),
        [
            "networkInterfaceMultiqueue",
            "disks[0].cache",
            "disks[0].tag",
            "interfaces[0].bootOrder",
        ]
    );
}

#[test]
fn a_disk_that_is_plugged_in_may_name_the_bus_that_clients_write() {
    let mut spec = right();
    set(&mut spec, &at(DISK, "disk/bus"), json!("scsi"));
    let name = spec["domain"]["devices"]["disks"][0]["name"].clone();
    let volumes = spec["volumes"].as_array_mut().unwrap();
    let shown = volumes.iter_mut().find(|one| one["name"] == name).unwrap();
    let claim = json!({ "claimName": "c", "hotpluggable": true });
    *shown = json!({ "name": name, "persistentVolumeClaim": claim });
    assert_eq!(causes_of(spec.clone(), &ClusterConfig::default()), []);
    let spec: VmiSpec = serde_json::from_value(spec).unwrap();
    let warnings = spec.warnings(&FieldPath::new("spec"));
    let path = "spec.domain.devices.disks[0].disk.bus: scsi";
    assert!(warnings[0].starts_with(path), "{warnings:?}");
}

#[test]
fn serials_and_words_of_disks_are_known() {
    accepted(&[(&at(DISK, "serial"), json!("a_B.1+-"))]);
    for serial in ["a b", "a\n", &"x".repeat(300)] {
        refused(
            &[(&at(DISK, "serial"), json!(serial))],
            &["domain.devices.disks[0].serial"],
        );
    }
    for word in ["cache", "io", "errorPolicy"] {
        let path = format!("domain.devices.disks[0].{word}");
        refused(&[(&at(DISK, word), json!("sometimes"))], &[&path]);
    }
}

#[test]
fn block_sizes_are_powers_of_two() {
    let custom = |logical: i64, physical: i64| json!({ "custom": { "logical": logical, "physical": physical } });
    let path = |name: &str| format!("domain.devices.disks[0].blockSize.custom.{name}");
    accepted(&[(&at(DISK, "blockSize"), custom(512, 4096))]);
    refused(
        &[(&at(DISK, "blockSize"), custom(4096, 512))],
        &[&path("logical")],
    );
    refused(
        &[(&at(DISK, "blockSize"), custom(513, 4096))],
        &[&path("logical")],
    );
    refused(
        &[(&at(DISK, "blockSize"), custom(512, 4 << 20))],
        &[&path("physical")],
    );
    let mut both = custom(512, 512);
    both["matchVolume"] = json!({});
    refused(
        &[(&at(DISK, "blockSize"), both)],
        &["domain.devices.disks[0].blockSize"],
    );
}

#[test]
fn a_file_system_shows_a_volume_once() {
    let list = "/domain/devices/filesystems/1";
    refused(
        &[(list, json!({ "name": "share", "virtiofs": {} }))],
        &["domain.devices.filesystems[1].name"],
    );
    refused(
        &[(list, json!({ "name": "none", "virtiofs": {} }))],
        &["domain.devices.filesystems[1].name"],
    );
}

#[test]
fn io_threads_have_a_known_policy() {
    accepted(&[("/domain/ioThreadsPolicy", json!("auto"))]);
    refused(
        &[("/domain/ioThreadsPolicy", json!("many"))],
        &["domain.ioThreadsPolicy"],
    );
    refused(
        &[("/domain/ioThreadsPolicy", json!("supplementalPool"))],
        &["domain.ioThreads.count"],
    );
    accepted(&[
        ("/domain/ioThreadsPolicy", json!("supplementalPool")),
        ("/domain/ioThreads/supplementalPoolThreadCount", json!(4)),
    ]);
}
