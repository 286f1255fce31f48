//! Every rule of a VMI's specification, by the path that its cause names.
//!
//! A row is a change to a specification that is right, and the paths that must be refused for
//! it, in this order and no others.

mod disks;
mod machine;
mod networks;
mod volumes;

use podvisor_cluster_types::{
    Cause, CauseReason, ClusterConfig, ClusterDefaults, FieldPath, vmi::VmiSpec,
};
use serde_json::{Value, json};

/// A specification that is right: two disks, a masqueraded card, a file system.
fn right() -> Value {
    json!({
        "domain": {
            "cpu": { "cores": 2 },
            "memory": { "guest": "1Gi" },
            "devices": {
                "disks": [
                    { "name": "root", "disk": { "bus": "virtio" }, "bootOrder": 1 },
                    { "name": "seed", "cdrom": {} }
                ],
                "filesystems": [{ "name": "share", "virtiofs": {} }],
                "interfaces": [{ "name": "default", "masquerade": {} }]
            }
        },
        "networks": [{ "name": "default", "pod": {} }],
        "volumes": [
            { "name": "root", "containerDisk": { "image": "registry.example/debian:13" } },
            { "name": "seed", "cloudInitNoCloud": { "userData": "#cloud-config\n" } },
            { "name": "share", "configMap": { "name": "settings" } }
        ]
    })
}

/// Sets the value at a JSON pointer; missing objects on the way are made, `-` appends.
fn set(spec: &mut Value, pointer: &str, value: Value) {
    let mut place = spec;
    for step in pointer.trim_start_matches('/').split('/') {
        place = match (step.parse::<usize>(), place) {
            (Ok(index), Value::Array(list)) => {
                while list.len() <= index {
                    list.push(json!({}));
                }
                &mut list[index]
            }
            (Ok(index), place) => {
                *place = json!([]);
                let list = place.as_array_mut().unwrap();
                list.resize(index + 1, json!({}));
                &mut list[index]
            }
            (Err(_), place) => {
                if !place.is_object() {
                    *place = json!({});
                }
                place
                    .as_object_mut()
                    .unwrap()
                    .entry(step)
                    .or_insert(Value::Null)
            }
        };
    }
    *place = value;
}

fn causes_of(spec: Value, config: &ClusterConfig) -> Vec<Cause> {
    let mut spec: VmiSpec = serde_json::from_value(spec).expect("the types take it");
    spec.apply_defaults(&ClusterDefaults::default());
    spec.validate(config, &FieldPath::new("spec"))
}

/// Asserts that the changes are refused at these paths below `spec`.
#[track_caller]
fn refused(changes: &[(&str, Value)], paths: &[&str]) -> Vec<Cause> {
    let mut spec = right();
    for (pointer, value) in changes {
        set(&mut spec, pointer, value.clone());
    }
    let causes = causes_of(spec, &ClusterConfig::default());
    let found: Vec<&str> = causes
        .iter()
        .map(|cause| cause.field.trim_start_matches("spec."))
        .collect();
    assert_eq!(found, paths, "for {changes:?}: {causes:#?}");
    for cause in &causes {
        assert!(
            cause.message.starts_with(&cause.field),
            "the message names the path: {cause:?}"
        );
        assert!(
            cause.message.len() < 600 && !cause.message.contains('\n'),
            "{cause:?}"
        );
    }
    causes
}

#[track_caller]
fn accepted(changes: &[(&str, Value)]) {
    refused(changes, &[]);
}

const DISK: &str = "/domain/devices/disks/0";
const CARD: &str = "/domain/devices/interfaces/0";

fn at(base: &str, rest: &str) -> String {
    format!("{base}/{rest}")
}

#[test]
fn what_is_right_is_accepted() {
    accepted(&[]);
    accepted(&[("/hostname", json!("web-1")), ("/subdomain", json!("a.b"))]);
    accepted(&[("/domain/machine/type", json!("pc-q35-rhel9.4.0"))]);
}

#[test]
fn names_are_dns_names() {
    for name in ["Web", "a.b", "..", "a\nb", &"x".repeat(64)] {
        refused(&[("/hostname", json!(name))], &["hostname"]);
    }
    refused(&[("/subdomain", json!("a..b"))], &["subdomain"]);
}

#[test]
fn strategies_and_accounts_are_known() {
    accepted(&[("/evictionStrategy", json!("LiveMigrateIfPossible"))]);
    refused(
        &[("/evictionStrategy", json!("Kill"))],
        &["evictionStrategy"],
    );
    refused(
        &[("/serviceAccountName", json!("A b"))],
        &["serviceAccountName"],
    );
    let volume = json!({ "name": "a", "serviceAccount": { "serviceAccountName": "other" } });
    refused(
        &[
            ("/serviceAccountName", json!("mine")),
            ("/volumes/3", volume),
        ],
        &["serviceAccountName"],
    );
    refused(
        &[("/domain/rebootPolicy", json!("Halt"))],
        &["domain.rebootPolicy"],
    );
    refused(
        &[("/terminationGracePeriodSeconds", json!(-1))],
        &["terminationGracePeriodSeconds"],
    );
}

#[test]
fn what_podvisor_does_not_have_is_refused_by_its_path() {
    let rows = [
        ("domain.cpu.isolateEmulatorThread", json!(true)),
        ("domain.cpu.realtime", json!({})),
        ("domain.cpu.numa", json!({ "guestMappingPassthrough": {} })),
        ("domain.memory.reservedOverhead", json!({})),
        ("domain.firmware.acpi", json!({ "slicNameRef": "a" })),
        ("domain.features.smm", json!({})),
        ("domain.features.hyperv", json!({ "relaxed": {} })),
        (
            "domain.features.hypervPassthrough",
            json!({ "enabled": true }),
        ),
        ("domain.features.kvm.hidden", json!(true)),
        ("domain.launchSecurity", json!({ "sev": {} })),
        ("domain.devices.autoattachGraphicsDevice", json!(true)),
        ("domain.devices.autoattachInputDevice", json!(true)),
        ("domain.devices.useVirtioTransitional", json!(true)),
        (
            "domain.devices.watchdog",
            json!({ "name": "w", "i6300esb": {} }),
        ),
        (
            "domain.devices.panicDevices",
            json!([{ "model": "pvpanic" }]),
        ),
        (
            "domain.devices.inputs",
            json!([{ "type": "tablet", "bus": "usb" }]),
        ),
        ("domain.devices.sound", json!({ "name": "s" })),
        ("domain.devices.video", json!({ "type": "vga" })),
        ("domain.devices.tpm", json!({})),
        ("domain.devices.gpus", json!([{}])),
        ("domain.devices.hostDevices", json!([{}])),
        ("domain.devices.clientPassthrough", json!({})),
        ("domain.devices.downwardMetrics", json!({})),
        ("domain.clock.timer.hpet.present", json!(true)),
        ("domain.clock.timezone", json!("Europe/Paris")),
        ("resourceClaims", json!([{}])),
        ("utilityVolumes", json!([{}])),
    ];
    for (path, value) in rows {
        let causes = refused(&[(&format!("/{}", path.replace('.', "/")), value)], &[path]);
        assert_eq!(causes[0].reason, CauseReason::NotSupported, "{path}");
    }
    for source in ["hostDisk", "sysprep", "downwardMetrics", "containerPath"] {
        let volume = json!({ "name": "root", source: {} });
        refused(
            &[("/volumes/0", volume)],
            &[&format!("volumes[0].{source}")],
        );
    }
}

#[test]
fn what_asks_for_nothing_is_accepted() {
    accepted(&[
        ("/domain/devices/autoattachGraphicsDevice", json!(false)),
        ("/domain/devices/inputs", json!([])),
        ("/domain/features/smm", json!({ "enabled": false })),
        (
            "/domain/clock/timer",
            json!({ "hpet": { "present": false }, "kvm": {} }),
        ),
        ("/domain/clock/utc", json!({})),
        ("/domain/cpu/isolateEmulatorThread", json!(false)),
    ]);
}

#[test]
fn all_causes_are_told_at_once() {
    refused(
        &[
            ("/hostname", json!("A")),
            ("/domain/cpu/cores", json!(-3)),
            (&at(DISK, "serial"), json!(" ")),
            ("/dnsPolicy", json!("x")),
            ("/volumes/1/cloudInitNoCloud", json!({})),
            ("/domain/devices/tpm", json!({})),
        ],
        &[
            "hostname",
            "domain.cpu.cores",
            "domain.devices.disks[0].serial",
            "dnsPolicy",
            "volumes[1].cloudInitNoCloud",
            "domain.devices.tpm",
        ],
    );
}

#[test]
fn a_hostile_specification_ends_in_few_causes() {
    let mut spec = right();
    let volumes: Vec<_> = (0..20_000)
        .map(|_| json!({ "name": "a\n".repeat(20) }))
        .collect();
    set(&mut spec, "/volumes", volumes.into());
    let causes = causes_of(spec, &ClusterConfig::default());
    assert!(!causes.is_empty() && causes.len() <= 64);
}
