//! What a node cannot do for a VirtualMachineInstance, each by the path of its field.

use super::*;
use crate::cri::vm_spec::MAX_VMI_BYTES;

#[test]
fn mounts_and_devices_that_are_no_volumes_are_refused() {
    let mount = |path: &str, host: &str| Mount {
        container_path: path.to_owned(),
        host_path: host.to_owned(),
        ..Mount::default()
    };
    let mut config = ContainerConfig::default();
    let token = "/pods/u/volumes/kubernetes.io~projected/kube-api-access";
    config.mounts = vec![mount(
        "/var/run/secrets/kubernetes.io/serviceaccount",
        token,
    )];
    check_container(&config).unwrap();
    config.mounts.push(mount("/data", "/etc"));
    let error = check_container(&config).unwrap_err().to_string();
    assert!(error.contains("\"/data\""), "{error}");
    config.mounts.clear();
    config.devices.push(Device {
        container_path: "/dev/sda".to_owned(),
        ..Device::default()
    });
    let error = check_container(&config).unwrap_err().to_string();
    assert!(error.contains("\"/dev/sda\""), "{error}");
}

#[test]
fn an_annotation_that_is_no_object_or_too_long_is_refused() {
    let of = |text: String| {
        let annotations = [(ANNOTATION.to_owned(), text)].into();
        VmiMachine::of_annotations(&annotations)
            .unwrap_err()
            .to_string()
    };
    assert!(of("{".to_owned()).contains("failed to read"));
    assert!(of("{\"spec\": {\"domain\": 3}}".to_owned()).contains("failed to read"));
    let deep = "[".repeat(100_000);
    assert!(of(deep).contains("failed to read"));
    let long = of(" ".repeat(MAX_VMI_BYTES + 1));
    assert!(long.contains("262145 bytes"), "{long}");
}

#[test]
fn what_cannot_be_done_is_refused_by_the_path_of_its_field() {
    let memory = json!({"guest": "1Gi"});
    let volume = |volume: Value| json!({"domain": {"memory": memory}, "volumes": [volume]});
    let claim = json!({"name": "a", "persistentVolumeClaim": {"claimName": "c"}});
    for (spec, path) in [
        (
            json!({"domain": {"memory": memory}}),
            "spec.domain.devices.disks",
        ),
        (
            volume(json!({"name": "a", "hostDisk": {"path": "/etc", "type": "Disk"}})),
            "spec.volumes[0]",
        ),
        (
            volume(json!({"name": "a", "containerDisk": {"image": "i", "path": "/x/y"}})),
            "spec.volumes[0].containerDisk.path",
        ),
        (
            json!({"domain": {"memory": memory, "cpu": {"sockets": 300}}, "volumes": [claim]}),
            "spec.domain.cpu",
        ),
        (
            json!({"domain": {"memory": {"guest": "1Ki"}}, "volumes": [claim]}),
            "spec.domain.memory.guest",
        ),
        (
            json!({"domain": {"memory": memory, "firmware": {"uuid": "x"}}, "volumes": [claim]}),
            "spec.domain.firmware.uuid",
        ),
        (
            json!({
                "domain": {"memory": memory, "devices": {"filesystems": [
                    {"name": "a", "virtiofs": {}},
                ]}},
                "volumes": [{"name": "a", "emptyDisk": {"capacity": "1Mi"}}],
            }),
            "spec.volumes[0]",
        ),
        (
            json!({
                "domain": {"memory": memory, "devices": {"filesystems": [
                    {"name": "a-name-of-a-volume-that-is-rather-long", "virtiofs": {}},
                ]}},
                "volumes": [{"name": "a-name-of-a-volume-that-is-rather-long",
                    "configMap": {"name": "c"}}],
            }),
            "spec.domain.devices.filesystems[0].name",
        ),
    ] {
        let error = refused(spec);
        assert!(error.contains(path), "{path}: {error}");
    }
    let many: Vec<Value> = (0..21)
        .map(|index| json!({"name": format!("d{index}"), "emptyDisk": {"capacity": "1Mi"}}))
        .collect();
    let error = refused(json!({"domain": {"memory": memory}, "volumes": many}));
    assert!(error.contains("at most 20"), "{error}");
}
