//! The defaults of KubeVirt's objects, in its order.

use podvisor_cluster_types::{
    ClusterConfig, ClusterDefaults, FieldPath, Quantity, config::DefaultBinding, vm::VmSpec,
    vmi::VmiSpec,
};
use serde_json::{Value, json};

fn defaulted_with(spec: Value, defaults: &ClusterDefaults) -> Value {
    let mut spec: VmiSpec = serde_json::from_value(spec).unwrap();
    spec.apply_defaults(defaults);
    let once = spec.clone();
    spec.apply_defaults(defaults);
    assert_eq!(spec, once, "defaults are applied once");
    serde_json::to_value(spec).unwrap()
}

fn defaulted(spec: Value) -> Value {
    defaulted_with(spec, &ClusterDefaults::default())
}

#[track_caller]
fn assert_at(spec: &Value, pointer: &str, expected: Value) {
    assert_eq!(
        spec.pointer(pointer).unwrap_or(&Value::Null),
        &expected,
        "{pointer} in {spec:#}"
    );
}

#[test]
fn the_least_specification_becomes_one_that_is_right() {
    let json = defaulted(json!({
        "domain": { "resources": { "requests": { "memory": "128Mi" } } },
        "volumes": [{ "name": "root", "containerDisk": { "image": "a" } }],
    }));
    let spec: VmiSpec = serde_json::from_value(json).unwrap();
    assert_eq!(
        spec.validate(&ClusterConfig::default(), &FieldPath::new("spec")),
        []
    );
}

#[test]
fn architecture_and_machine() {
    let spec = defaulted(json!({}));
    assert_at(&spec, "/architecture", json!("amd64"));
    assert_at(&spec, "/domain/machine/type", json!("podvisor"));
    let spec = defaulted(json!({ "domain": { "machine": { "type": "q35" } } }));
    assert_at(&spec, "/domain/machine/type", json!("q35"));
}

#[test]
fn a_cpu_request_comes_from_the_limit_or_the_cluster() {
    let request = "/domain/resources/requests/cpu";
    let limit = json!({ "domain": { "resources": { "limits": { "cpu": "2" } } } });
    assert_at(&defaulted(limit), request, json!("2"));
    let mut defaults = ClusterDefaults::default();
    for (cluster, expected) in [("100m", Value::Null), ("50m", json!("50m"))] {
        defaults.cpu_request = Some(Quantity::new(cluster));
        assert_at(&defaulted_with(json!({}), &defaults), request, expected);
    }
}

#[test]
fn memory_comes_from_request_limit_or_page_size() {
    let guest = "/domain/memory/guest";
    for (domain, expected) in [
        (
            json!({ "resources": { "requests": { "memory": "1Gi" }, "limits": { "memory": "2Gi" } } }),
            json!("1Gi"),
        ),
        (
            json!({ "resources": { "limits": { "memory": "2Gi" } } }),
            json!("2Gi"),
        ),
        (
            json!({ "memory": { "hugepages": { "pageSize": "2Mi" } } }),
            json!("2Mi"),
        ),
        (json!({ "memory": { "guest": "3Gi" } }), json!("3Gi")),
        (json!({}), Value::Null),
    ] {
        assert_at(&defaulted(json!({ "domain": domain })), guest, expected);
    }
}

#[test]
fn sockets_come_from_limit_or_request_rounded_up() {
    for (resources, sockets) in [
        (
            json!({ "limits": { "cpu": "2500m" }, "requests": { "cpu": "1" } }),
            3,
        ),
        (json!({ "requests": { "cpu": "1100m" } }), 2),
        (json!({ "requests": { "cpu": "10m" } }), 1),
        (json!({ "requests": { "cpu": "nonsense" } }), 1),
        (json!({}), 1),
    ] {
        let spec = defaulted(json!({ "domain": { "resources": resources } }));
        assert_at(&spec, "/domain/cpu/sockets", json!(sockets));
        assert_at(&spec, "/domain/cpu/cores", json!(1));
        assert_at(&spec, "/domain/cpu/threads", json!(1));
    }
    let spec = defaulted(json!({ "domain": { "cpu": { "cores": 4 } } }));
    assert_at(&spec, "/domain/cpu/sockets", Value::Null);
}

#[test]
fn an_image_that_may_move_is_always_pulled() {
    for (image, policy) in [
        ("a", "Always"),
        ("registry:5000/a", "Always"),
        ("a:latest", "Always"),
        ("registry:5000/a:1", "IfNotPresent"),
        ("a@sha256:00", "IfNotPresent"),
    ] {
        let volume = json!([{ "name": "r", "containerDisk": { "image": image } }]);
        let spec = defaulted(json!({ "volumes": volume }));
        assert_at(
            &spec,
            "/volumes/0/containerDisk/imagePullPolicy",
            json!(policy),
        );
    }
}

#[test]
fn the_eviction_strategy_is_the_clusters() {
    let mut defaults = ClusterDefaults::default();
    defaults.eviction_strategy = Some("LiveMigrate".to_owned());
    let spec = defaulted_with(json!({}), &defaults);
    assert_at(&spec, "/evictionStrategy", json!("LiveMigrate"));
    let spec = defaulted_with(json!({ "evictionStrategy": "None" }), &defaults);
    assert_at(&spec, "/evictionStrategy", json!("None"));
}

#[test]
fn the_pod_network_is_attached_unless_it_is_not_wanted() {
    let cards = "/domain/devices/interfaces";
    let spec = defaulted(json!({}));
    assert_at(&spec, cards, json!([{ "name": "default", "bridge": {} }]));
    assert_at(
        &spec,
        "/networks",
        json!([{ "name": "default", "pod": {} }]),
    );
    let mut defaults = ClusterDefaults::default();
    defaults.binding = DefaultBinding::Masquerade;
    let spec = defaulted_with(json!({}), &defaults);
    assert_at(
        &spec,
        cards,
        json!([{ "name": "default", "masquerade": {} }]),
    );
    let none = json!({ "domain": { "devices": { "autoattachPodInterface": false } } });
    assert_at(&defaulted(none), cards, Value::Null);
}

#[test]
fn a_volume_that_nothing_shows_gets_a_disk() {
    let spec = defaulted(json!({
        "domain": { "devices": { "filesystems": [{ "name": "fs", "virtiofs": {} }] } },
        "volumes": [{ "name": "fs" }, { "name": "root" }],
    }));
    let disk = json!([{ "name": "root", "disk": { "bus": "virtio" } }]);
    assert_at(&spec, "/domain/devices/disks", disk);
}

#[test]
fn disks_probes_features_and_timers_are_complete() {
    let spec = defaulted(json!({
        "domain": {
            "clock": { "timer": { "kvm": {} } },
            "features": { "apic": {} },
            "devices": { "disks": [{ "name": "a" }, { "name": "b", "cdrom": {} }] },
        },
        "readinessProbe": { "tcpSocket": { "port": 22 }, "periodSeconds": 3 },
    }));
    assert_at(
        &spec,
        "/domain/devices/disks/0/disk",
        json!({ "bus": "virtio" }),
    );
    let cdrom = json!({ "bus": "virtio", "readonly": true, "tray": "closed" });
    assert_at(&spec, "/domain/devices/disks/1/cdrom", cdrom);
    assert_at(&spec, "/domain/features/acpi/enabled", json!(true));
    assert_at(&spec, "/domain/features/apic/enabled", json!(true));
    assert_at(&spec, "/domain/clock/timer/kvm/present", json!(true));
    let probe = json!({
        "tcpSocket": { "port": 22 },
        "periodSeconds": 3,
        "timeoutSeconds": 1,
        "successThreshold": 1,
        "failureThreshold": 3,
    });
    assert_at(&spec, "/readinessProbe", probe);
}

#[test]
fn a_given_uuid_is_kept() {
    let mut spec = VmiSpec::default();
    spec.set_firmware_uuid(|| "one".to_owned());
    spec.set_firmware_uuid(|| "two".to_owned());
    assert_eq!(spec.domain.firmware.unwrap().uuid.as_deref(), Some("one"));
}

#[test]
fn the_cpu_model_is_the_clusters_or_the_hosts() {
    assert_at(
        &defaulted(json!({})),
        "/domain/cpu/model",
        json!("host-model"),
    );
    let mut defaults = ClusterDefaults::default();
    defaults.cpu_model = Some("host-passthrough".to_owned());
    assert_at(
        &defaulted_with(json!({}), &defaults),
        "/domain/cpu/model",
        json!("host-passthrough"),
    );
}

#[test]
fn what_may_grow_is_bounded_where_updates_are_live() {
    let mut live = ClusterDefaults::default();
    live.live_update = true;
    for (domain, sockets, memory) in [
        (
            json!({ "memory": { "guest": "1Gi" } }),
            json!(4),
            json!("4Gi"),
        ),
        (
            json!({ "memory": { "guest": "512Mi" } }),
            json!(4),
            Value::Null,
        ),
        (
            json!({ "cpu": { "cores": 100, "sockets": 2 } }),
            json!(5),
            Value::Null,
        ),
        (
            json!({ "cpu": { "cores": 400, "sockets": 2 } }),
            json!(2),
            Value::Null,
        ),
        (json!({ "cpu": { "maxSockets": 9 } }), json!(9), Value::Null),
    ] {
        let spec = defaulted_with(json!({ "domain": domain }), &live);
        assert_at(&spec, "/domain/cpu/maxSockets", sockets);
        assert_at(&spec, "/domain/memory/maxGuest", memory);
    }
    assert_at(&defaulted(json!({})), "/domain/cpu/maxSockets", Value::Null);
    live.max_sockets = Some(6);
    live.max_guest = Some(Quantity::new("8Gi"));
    let spec = defaulted_with(json!({ "domain": { "memory": { "guest": "1Gi" } } }), &live);
    assert_at(&spec, "/domain/cpu/maxSockets", json!(6));
    assert_at(&spec, "/domain/memory/maxGuest", json!("8Gi"));
}

#[test]
fn a_vm_keeps_its_uuid_and_leaves_the_rest_to_its_vmi() {
    let json = json!({ "runStrategy": "Always", "template": { "spec": { "domain": {} } } });
    let mut spec: VmSpec = serde_json::from_value(json).unwrap();
    spec.apply_defaults(&ClusterDefaults::default(), || "one".to_owned());
    spec.apply_defaults(&ClusterDefaults::default(), || "two".to_owned());
    let json = serde_json::to_value(spec).unwrap();
    assert_at(&json, "/template/spec/domain/firmware/uuid", json!("one"));
    assert_at(
        &json,
        "/template/spec/domain/machine/type",
        json!("podvisor"),
    );
    assert_at(&json, "/template/spec/networks", Value::Null);
}
