use serde_json::json;

use super::*;

fn vmi(spec: Value) -> VirtualMachineInstance {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {
            "name": "web", "namespace": "n", "uid": "6f3c", "resourceVersion": "7",
            "labels": {"app": "web"},
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "long"},
        },
        "spec": spec,
    }))
    .unwrap()
}

fn guest() -> Value {
    json!({"domain": {"memory": {"guest": "1Gi"}}})
}

fn make(spec: Value) -> Value {
    let pod = pod(&vmi(spec), &|claim| match claim {
        "block" => Some(VolumeMode::Block),
        "files" => Some(VolumeMode::Filesystem),
        _ => None,
    });
    serde_json::to_value(pod.unwrap()).unwrap()
}

fn error(spec: Value) -> PodError {
    pod(&vmi(spec), &|_| None).unwrap_err()
}

#[test]
fn the_pod_is_the_instances_and_runs_as_a_vm() {
    let pod = make(guest());
    assert_eq!(pod["spec"]["runtimeClassName"], "podvisor-vm");
    assert_eq!(pod["spec"]["restartPolicy"], "Never");
    assert_eq!(pod["spec"]["hostname"], "web");
    assert_eq!(pod["spec"]["automountServiceAccountToken"], false);
    let meta = &pod["metadata"];
    assert_eq!(meta["labels"]["kubevirt.io"], "virt-launcher");
    assert_eq!(meta["labels"]["kubevirt.io/created-by"], "6f3c");
    assert_eq!(meta["labels"]["vm.kubevirt.io/name"], "web");
    assert_eq!(meta["labels"]["vmi.kubevirt.io/id"], "web");
    assert_eq!(meta["labels"]["app"], "web");
    assert_eq!(meta["ownerReferences"][0]["uid"], "6f3c");
    assert_eq!(meta["ownerReferences"][0]["controller"], true);
}

#[test]
fn a_long_name_makes_a_label_that_ends_with_a_letter_or_digit() {
    use crate::objects::name_label;
    let longest = "a".repeat(63);
    assert_eq!(name_label(&longest), longest);
    assert_eq!(
        name_label(&format!("{}-.bc", "a".repeat(61))),
        "a".repeat(61)
    );
}

#[test]
fn volumes_that_come_later_are_neither_the_pods_nor_the_nodes() {
    let mut spec = guest();
    spec["domain"]["devices"] = json!({"disks": [{"name": "root"}, {"name": "late"}]});
    spec["volumes"] = json!([
        {"name": "root", "persistentVolumeClaim": {"claimName": "block"}},
        {"name": "late", "dataVolume": {"name": "missing", "hotpluggable": true}},
    ]);
    let pod = make(spec);
    let text = pod["metadata"]["annotations"][VMI_ANNOTATION]
        .as_str()
        .unwrap();
    let read: Value = serde_json::from_str(text).unwrap();
    let names = |list: &Value| -> Vec<String> {
        let list = list.as_array().unwrap().iter();
        list.map(|one| one["name"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(names(&read["spec"]["volumes"]), ["root"]);
    assert_eq!(names(&read["spec"]["domain"]["devices"]["disks"]), ["root"]);
    assert_eq!(names(&pod["spec"]["volumes"]), ["root"]);
}

#[test]
fn a_specification_is_the_same_when_what_came_later_has_gone() {
    let claim = json!({"claimName": "c", "hotpluggable": true});
    let mut with = guest();
    with["domain"]["devices"] = json!({"disks": [{"name": "late"}]});
    with["volumes"] = json!([{"name": "late", "persistentVolumeClaim": claim}]);
    let mut gone = guest();
    gone["domain"]["devices"] = json!({"disks": []});
    gone["volumes"] = json!([]);
    for spec in [with, gone, guest()] {
        assert_eq!(without_plugged(spec), guest());
    }
}

#[test]
fn the_node_gets_the_specification() {
    let pod = make(guest());
    let text = pod["metadata"]["annotations"][VMI_ANNOTATION]
        .as_str()
        .unwrap();
    let read: Value = serde_json::from_str(text).unwrap();
    assert_eq!(read["spec"], guest());
    assert_eq!(read["metadata"]["name"], "web");
    assert_eq!(read["metadata"]["labels"]["app"], "web");
    assert!(!text.contains("last-applied"), "{text}");
    assert!(!text.contains("resourceVersion"), "{text}");
}

#[test]
fn a_name_is_given_by_the_instance_and_fits() {
    let mut long = vmi(guest());
    let first = name(&long);
    assert!(first.starts_with("virt-launcher-web-"), "{first}");
    assert_eq!(name(&long), first);
    long.metadata.uid = Some("6f3d".into());
    assert_ne!(name(&long), first);
    long.metadata.name = Some("a-".repeat(100));
    let name = name(&long);
    assert!(name.len() <= 63, "{name}");
    assert!(podvisor_cluster_types::names::is_dns_label(&name), "{name}");
}

#[test]
fn the_first_container_disk_is_the_image_and_others_are_volumes() {
    let mut spec = guest();
    spec["volumes"] = json!([
        {"name": "root", "containerDisk": {"image": "r/debian:12", "imagePullPolicy": "Always",
                                           "imagePullSecret": "s"}},
        {"name": "tools", "containerDisk": {"image": "r/tools:1"}},
    ]);
    let pod = make(spec);
    let container = &pod["spec"]["containers"][0];
    assert_eq!(container["image"], "r/debian:12");
    assert_eq!(container["imagePullPolicy"], "Always");
    assert_eq!(pod["spec"]["imagePullSecrets"], json!([{"name": "s"}]));
    assert_eq!(
        pod["spec"]["volumes"],
        json!([{"name": "tools", "image": {"reference": "r/tools:1"}}])
    );
    assert_eq!(
        container["volumeMounts"],
        json!([{"name": "tools", "mountPath": "/podvisor/volumes/tools", "readOnly": true}])
    );
}

#[test]
fn an_instance_without_an_image_says_so() {
    let mut spec = guest();
    spec["volumes"] = json!([{"name": "root", "persistentVolumeClaim": {"claimName": "block"}}]);
    let pod = make(spec);
    let container = &pod["spec"]["containers"][0];
    assert_eq!(container["image"], NO_IMAGE);
    assert_eq!(
        container["volumeDevices"],
        json!([{"name": "root", "devicePath": "/podvisor/devices/root"}])
    );
}

#[test]
fn volumes_are_those_of_a_pod() {
    let mut spec = guest();
    spec["volumes"] = json!([
        {"name": "data", "dataVolume": {"name": "files"}},
        {"name": "scratch", "emptyDisk": {"capacity": "2Gi"}},
        {"name": "base", "ephemeral": {"persistentVolumeClaim": {"claimName": "files"}}},
        {"name": "map", "configMap": {"name": "m"}},
        {"name": "key", "secret": {"secretName": "k"}},
        {"name": "me", "downwardAPI": {"fields": [
            {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
        {"name": "seed", "cloudInitNoCloud": {"secretRef": {"name": "u"},
                                             "networkDataSecretRef": {"name": "w"}}},
        {"name": "inline", "cloudInitConfigDrive": {"userData": "#cloud-config"}},
        {"name": "token", "serviceAccount": {"serviceAccountName": "robot"}},
    ]);
    let pod = make(spec);
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    let source = |name: &str| {
        let mut volume = volumes.iter().find(|v| v["name"] == name).unwrap().clone();
        volume.as_object_mut().unwrap().remove("name");
        volume
    };
    let claim = |read_only: bool| {
        let mut claim = json!({"claimName": "files"});
        claim["readOnly"] = read_only.into();
        json!({ "persistentVolumeClaim": claim })
    };
    assert_eq!(source("data"), claim(false));
    assert_eq!(source("base"), claim(true));
    assert_eq!(source("scratch"), json!({"emptyDir": {"sizeLimit": "2Gi"}}));
    assert_eq!(source("map"), json!({"configMap": {"name": "m"}}));
    assert_eq!(source("key"), json!({"secret": {"secretName": "k"}}));
    assert_eq!(source("me")["downwardAPI"]["items"][0]["path"], "labels");
    assert_eq!(
        source("seed-userdata"),
        json!({"secret": {"secretName": "u"}})
    );
    assert_eq!(
        source("seed-networkdata"),
        json!({"secret": {"secretName": "w"}})
    );
    assert!(volumes.iter().all(|volume| volume["name"] != "inline"));
    assert!(source("token")["projected"]["sources"].is_array());
    assert_eq!(pod["spec"]["serviceAccountName"], "robot");
}

#[test]
fn what_is_asked_for_is_the_guest_and_what_it_costs() {
    let resources = |domain: Value| {
        make(json!({ "domain": domain }))["spec"]["containers"][0]["resources"].clone()
    };
    let cost = |guest: u64| (32 << 20) + guest / 256;
    let gib = 1_u64 << 30;
    let one = resources(json!({"memory": {"guest": "1Gi"}, "cpu": {"cores": 2, "sockets": 2}}));
    assert_eq!(one["requests"]["memory"], (gib + cost(gib)).to_string());
    assert_eq!(one["requests"]["cpu"], "400m");
    let limits = resources(json!({
        "memory": {"guest": "1Gi"},
        "resources": {"requests": {"memory": "512Mi"}, "limits": {"memory": "1Gi", "cpu": "2"}},
    }));
    assert_eq!(
        limits["requests"]["memory"],
        (gib / 2 + cost(gib)).to_string()
    );
    assert_eq!(limits["limits"]["memory"], (gib + cost(gib)).to_string());
    assert_eq!(limits["requests"]["cpu"], "2");
    let huge = resources(json!({"memory": {"guest": "1Gi", "hugepages": {"pageSize": "2Mi"}}}));
    assert_eq!(huge["limits"]["hugepages-2Mi"], gib.to_string());
    assert_eq!(huge["requests"]["memory"], cost(gib).to_string());
}

#[test]
fn what_cannot_be_is_refused_by_its_field() {
    let with = |volume: Value| {
        let mut spec = guest();
        spec["volumes"] = json!([volume]);
        spec
    };
    let missing = error(with(
        json!({"name": "d", "persistentVolumeClaim": {"claimName": "x"}}),
    ));
    assert_eq!(missing.reason(), "FailedPvcNotFound");
    assert!(
        missing
            .to_string()
            .contains("PersistentVolumeClaim x of volume d"),
        "{missing}"
    );
    // A pod whose maker may write to any namespace must not show what its user may not see.
    let host = error(with(
        json!({"name": "h", "hostDisk": {"path": "/etc", "type": "Disk"}}),
    ));
    assert!(
        host.to_string().contains("volume h is not supported"),
        "{host}"
    );
    for memory in [
        json!({}),
        json!({"guest": "lots"}),
        json!({"guest": "-1Gi"}),
        json!({"guest": "1"}),
    ] {
        let wrong = error(json!({"domain": {"memory": memory}}));
        assert!(wrong.to_string().contains("memory.guest"), "{wrong}");
    }
    assert_eq!(error(json!({"domain": 3})).reason(), "FailedCreate");
    let mut affinity = guest();
    affinity["affinity"] = json!("near");
    assert!(matches!(error(affinity), PodError::Malformed { .. }));
}

#[test]
fn placement_and_names_are_passed_on() {
    let mut spec = guest();
    spec["nodeSelector"] = json!({"disk": "fast"});
    spec["tolerations"] = json!([{"key": "k", "operator": "Exists"}]);
    spec["terminationGracePeriodSeconds"] = 0.into();
    spec["hostname"] = "h".into();
    spec["subdomain"] = "s".into();
    spec["readinessProbe"] = json!({"guestAgentPing": {}, "periodSeconds": 3});
    spec["networks"] = json!([
        {"name": "default", "pod": {}},
        {"name": "lan", "multus": {"networkName": "infra/lan"}},
    ]);
    let pod = make(spec);
    assert_eq!(pod["spec"]["nodeSelector"]["disk"], "fast");
    assert_eq!(pod["spec"]["tolerations"][0]["key"], "k");
    assert_eq!(pod["spec"]["hostname"], "h");
    assert_eq!(pod["spec"]["subdomain"], "s");
    assert_eq!(pod["spec"]["terminationGracePeriodSeconds"], 1);
    let probe = &pod["spec"]["containers"][0]["readinessProbe"];
    assert_eq!(probe["exec"]["command"], json!(["true"]));
    assert_eq!(probe["periodSeconds"], 3);
    let networks = pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"].as_str();
    let networks: Value = serde_json::from_str(networks.unwrap()).unwrap();
    assert_eq!(
        networks,
        json!([{"name": "lan", "namespace": "infra", "interface": "net1"}])
    );
}

#[test]
fn a_long_name_is_a_label_as_kubevirts_clients_compute_it() {
    let short = "a".repeat(63);
    assert_eq!(instance_id(&short), short);
    // printf 'a%.0s' {1..64} | sha1sum
    let id = format!("{}-0098ba82", "a".repeat(54));
    assert_eq!(instance_id(&"a".repeat(64)), id);
}
