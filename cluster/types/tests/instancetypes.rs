//! What instance types and preferences make of a VM, and what they refuse.

use podvisor_cluster_types::FieldPath;
use podvisor_cluster_types::instancetype::{InstancetypeSpec, PreferenceSpec, apply};
use podvisor_cluster_types::vmi::VmiSpec;
use serde_json::{Value, json};

/// The specification afterwards, or the fields of the causes.
fn applied(spec: Value, instancetype: Value, preference: Value) -> Result<Value, Vec<String>> {
    let mut spec: VmiSpec = serde_json::from_value(spec).unwrap();
    let instancetype: Option<InstancetypeSpec> = serde_json::from_value(instancetype).unwrap();
    let preference: Option<PreferenceSpec> = serde_json::from_value(preference).unwrap();
    let path = FieldPath::new("spec.template.spec");
    let causes = apply(&mut spec, instancetype.as_ref(), preference.as_ref(), &path);
    if causes.is_empty() {
        return Ok(serde_json::to_value(&spec).unwrap());
    }
    let field = |cause: podvisor_cluster_types::Cause| {
        cause
            .field
            .trim_start_matches("spec.template.spec.")
            .to_owned()
    };
    Err(causes.into_iter().map(field).collect())
}

fn of(cpus: i64) -> Value {
    json!({ "cpu": { "guest": cpus }, "memory": { "guest": "1Gi" } })
}

#[test]
fn an_instance_type_sets_cpus_and_memory() {
    let spec = applied(json!({}), of(4), Value::Null).unwrap();
    let cpu = json!({ "sockets": 4, "cores": 1, "threads": 1 });
    assert_eq!(spec["domain"]["cpu"], cpu);
    assert_eq!(spec["domain"]["memory"], json!({ "guest": "1Gi" }));
}

#[test]
fn memory_without_a_size_is_no_conflict() {
    let spec = json!({ "domain": { "memory": { "maxGuest": "4Gi" } } });
    let spec = applied(spec, of(1), Value::Null).unwrap();
    let memory = json!({ "guest": "1Gi", "maxGuest": "4Gi" });
    assert_eq!(spec["domain"]["memory"], memory);
    assert!(applied(json!({ "domain": { "memory": {} } }), of(1), Value::Null).is_ok());
}

#[test]
fn memory_is_overcommitted_by_a_smaller_request() {
    let mut instancetype = of(1);
    instancetype["memory"]["overcommitPercent"] = json!(25);
    let spec = applied(json!({}), instancetype.clone(), Value::Null).unwrap();
    let requests = &spec["domain"]["resources"]["requests"];
    assert_eq!(requests["memory"], "768Mi");
    for percent in [100, -1] {
        instancetype["memory"]["overcommitPercent"] = json!(percent);
        let refused = applied(json!({}), instancetype.clone(), Value::Null);
        assert_eq!(refused.unwrap_err(), ["domain.memory"]);
    }
}

#[test]
fn a_preference_shapes_the_cpus() {
    let shaped = |cpus: i64, cpu: Value| {
        applied(json!({}), of(cpus), json!({ "cpu": cpu })).map(|spec| {
            let cpu = &spec["domain"]["cpu"];
            ["sockets", "cores", "threads"].map(|name| cpu[name].as_i64().unwrap())
        })
    };
    let topology = |name: &str| json!({ "preferredCPUTopology": name });
    for (name, expected) in [
        ("sockets", [4, 1, 1]),
        ("any", [4, 1, 1]),
        ("cores", [1, 4, 1]),
        ("preferCores", [1, 4, 1]),
        ("threads", [1, 1, 4]),
        ("spread", [2, 2, 1]),
    ] {
        assert_eq!(shaped(4, topology(name)), Ok(expected), "{name}");
    }
    let spread = |across: &str, ratio: i64| {
        let mut cpu = topology("spread");
        cpu["spreadOptions"] = json!({ "across": across, "ratio": ratio });
        cpu
    };
    assert_eq!(shaped(8, spread("SocketsCores", 4)), Ok([2, 4, 1]));
    assert_eq!(shaped(8, spread("CoresThreads", 2)), Ok([1, 4, 2]));
    assert_eq!(shaped(8, spread("SocketsCoresThreads", 2)), Ok([2, 2, 2]));
    for wrong in [
        spread("SocketsCores", 3),
        spread("SocketsCores", 0),
        spread("Moons", 2),
        topology("round"),
    ] {
        assert_eq!(
            shaped(8, wrong.clone()),
            Err(vec!["domain.cpu".into()]),
            "{wrong}"
        );
    }
}

#[test]
fn what_the_vm_sets_as_well_is_refused_by_its_path() {
    let mut instancetype = of(1);
    instancetype["cpu"]["model"] = json!("host-model");
    instancetype["cpu"]["maxSockets"] = json!(4);
    instancetype["ioThreadsPolicy"] = json!("auto");
    instancetype["nodeSelector"] = json!({ "a": "b" });
    instancetype["schedulerName"] = json!("s");
    let spec = json!({
        "domain": {
            "cpu": { "cores": 1, "sockets": 1, "threads": 1, "model": "m", "maxSockets": 2 },
            "memory": { "guest": "1Gi" },
            "resources": {
                "requests": { "cpu": "1", "memory": "1Gi" },
                "limits": { "cpu": "1", "memory": "1Gi" },
            },
            "ioThreadsPolicy": "shared",
        },
        "nodeSelector": { "a": "c", "other": "x" },
        "schedulerName": "t",
    });
    let expected = [
        "domain.cpu.cores",
        "domain.cpu.sockets",
        "domain.cpu.threads",
        "domain.cpu.model",
        "domain.cpu.maxSockets",
        "domain.memory.guest",
        "domain.resources.requests.cpu",
        "domain.resources.requests.memory",
        "domain.resources.limits.cpu",
        "domain.resources.limits.memory",
        "domain.ioThreadsPolicy",
        "nodeSelector.a",
        "schedulerName",
    ];
    assert_eq!(
        applied(spec, instancetype, Value::Null).unwrap_err(),
        expected
    );
}

#[test]
fn an_instance_type_without_a_size_is_refused() {
    for (instancetype, field) in [
        (json!({ "memory": { "guest": "1Gi" } }), "domain.cpu"),
        (of(0), "domain.cpu"),
        (of(-1), "domain.cpu"),
        (of(i64::MAX), "domain.cpu"),
        (json!({ "cpu": { "guest": 1 } }), "domain.memory"),
    ] {
        let refused = applied(json!({}), instancetype, Value::Null);
        assert_eq!(refused.unwrap_err(), [field]);
    }
}

#[test]
fn a_preference_fills_in_what_is_missing_and_changes_nothing() {
    let preference = json!({
        "devices": {
            "preferredAutoattachMemBalloon": false,
            "preferredBlockMultiQueue": true,
            "preferredRng": {},
            "preferredDiskBus": "sata",
        },
        "firmware": { "preferredEfi": {} },
        "preferredSubdomain": "sub",
        "preferredTerminationGracePeriodSeconds": 7,
    });
    let own = json!({
        "domain": { "devices": { "autoattachMemBalloon": true } },
        "terminationGracePeriodSeconds": 1,
    });
    let spec = applied(own, Value::Null, preference).unwrap();
    let devices = &spec["domain"]["devices"];
    assert_eq!(devices["autoattachMemBalloon"], true);
    assert_eq!(devices["blockMultiQueue"], true);
    assert!(devices.get("disks").is_none());
    assert_eq!(
        (&spec["subdomain"], &spec["terminationGracePeriodSeconds"]),
        (&json!("sub"), &json!(1))
    );
}

#[test]
fn a_vm_that_is_too_small_for_its_guest_is_refused() {
    let preference = json!({
        "requirements": { "cpu": { "guest": 2 }, "memory": { "guest": "2Gi" } },
    });
    let refused = applied(json!({}), of(1), preference.clone());
    assert_eq!(refused.unwrap_err(), ["domain.cpu", "domain.memory"]);
    let mut large = of(2);
    large["memory"]["guest"] = json!("2048Mi");
    applied(json!({}), large, preference.clone()).unwrap();
    let own = json!({ "domain": { "cpu": { "cores": 2 }, "memory": { "guest": "2Gi" } } });
    applied(own, Value::Null, preference).unwrap();
}
