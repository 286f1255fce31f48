use crate::api::subresources::VMI;
use podvisor_cluster_types::vmi::Condition;
use serde_json::{Value, json};

use super::*;

fn instance(phase: &str, conditions: &[&str], devices: Value) -> (VmiSpec, VmiStatus) {
    let spec = serde_json::from_value(json!({ "domain": { "devices": devices } })).unwrap();
    let yes = |kind: &&str| Condition {
        kind: (*kind).to_owned(),
        status: "True".to_owned(),
        ..Default::default()
    };
    let status = VmiStatus {
        phase: Some(phase.to_owned()),
        conditions: conditions.iter().map(yes).collect(),
        ..Default::default()
    };
    (spec, status)
}

/// What a request leads to: the path of the node and the body, or the code of the failure.
fn decided(
    verb: &'static str,
    path: &str,
    body: &str,
    (spec, status): &(VmiSpec, VmiStatus),
) -> Result<String, u16> {
    let (path, query) = path
        .split_once('?')
        .map_or((path, None), |(p, q)| (p, Some(q)));
    let mut steps = path.split('/');
    let target = Target {
        version: "v1",
        namespace: "a",
        resource: VMI,
        name: "b",
        subresource: steps.next().unwrap(),
        rest: steps.collect(),
        verb,
    };
    let instance = Instance {
        spec,
        status,
        snapshot: None,
    };
    match decide(&target, query, body.as_bytes(), &instance) {
        Ok(None) => Ok("nothing".to_owned()),
        Ok(Some(Call::Put(path, body))) => Ok(format!("{path} {}", String::from_utf8_lossy(&body))
            .trim()
            .to_owned()),
        Ok(Some(call)) => Ok(call.path()),
        Err(failure) => Err(failure.code()),
    }
}

#[test]
fn a_state_decides_what_can_be_asked() {
    let of = |phase, conditions| instance(phase, conditions, json!({}));
    let running = of("Running", &[]);
    let paused = of("Running", &["Paused"]);
    let agent = of("Running", &["AgentConnected"]);
    let done = of("Succeeded", &[]);
    let yes = |path: &str| Ok(path.to_owned());
    for (sub, when_running, when_paused, when_done) in [
        ("pause", yes("pause"), Err(409), Err(409)),
        ("unpause", Err(409), yes("unpause"), Err(409)),
        ("softreboot", yes("softreboot"), Err(409), Err(409)),
        ("reset", yes("reset"), yes("reset"), Err(500)),
        ("unfreeze", yes("unfreeze"), yes("unfreeze"), Err(409)),
        ("explode", Err(404), Err(404), Err(404)),
    ] {
        assert_eq!(decided("update", sub, "", &running), when_running, "{sub}");
        assert_eq!(decided("update", sub, "", &paused), when_paused, "{sub}");
        assert_eq!(decided("update", sub, "", &done), when_done, "{sub}");
    }
    for (sub, when_running, when_paused, when_done) in [
        ("console", yes("console"), yes("console"), Err(400)),
        (
            "portforward/22",
            yes("portforward/22/tcp"),
            Err(409),
            Err(400),
        ),
        (
            "portforward/53/udp",
            yes("portforward/53/udp"),
            Err(409),
            Err(400),
        ),
        ("guestosinfo", Err(409), Err(409), Err(409)),
        ("vnc", Err(400), Err(400), Err(400)),
        ("vnc/screenshot", Err(400), Err(400), Err(400)),
        ("usbredir", Err(400), Err(400), Err(400)),
        ("sev/fetchcertchain", Err(400), Err(400), Err(400)),
        ("pause", Err(404), Err(404), Err(404)),
    ] {
        assert_eq!(decided("get", sub, "", &running), when_running, "{sub}");
        assert_eq!(decided("get", sub, "", &paused), when_paused, "{sub}");
        assert_eq!(decided("get", sub, "", &done), when_done, "{sub}");
    }
    for sub in ["guestosinfo", "userlist", "filesystemlist"] {
        assert_eq!(decided("get", sub, "", &agent), yes(sub));
    }
}

#[test]
fn a_dry_run_reaches_no_node_and_tells_the_same_conflicts() {
    let running = instance("Running", &[], json!({}));
    let dry = r#"{"dryRun":["All"]}"#;
    assert_eq!(
        decided("update", "pause", dry, &running),
        Ok("nothing".into())
    );
    assert_eq!(decided("update", "unpause", dry, &running), Err(409));
    let other = r#"{"dryRun":["Some"]}"#;
    assert_eq!(decided("update", "pause", other, &running), Err(400));
    assert_eq!(decided("update", "pause", "{", &running), Err(400));
}

#[test]
fn a_vm_that_is_probed_is_not_paused() {
    let mut running = instance("Running", &[], json!({}));
    running.0.liveness_probe = serde_json::from_value(json!({ "tcpSocket": { "port": 1 } })).ok();
    assert_eq!(decided("update", "pause", "", &running), Err(403));
    running.0.liveness_probe = serde_json::from_value(json!({ "guestAgentPing": {} })).ok();
    assert_eq!(decided("update", "pause", "", &running), Ok("pause".into()));
}

#[test]
fn a_freeze_ends_by_itself() {
    let running = instance("Running", &[], json!({}));
    for (body, seconds) in [
        ("", 300),
        ("{}", 300),
        (r#"{"unfreezeTimeout":"1m30s"}"#, 90),
        (r#"{"unfreezeTimeout":"0s"}"#, 300),
        (r#"{"unfreezeTimeout":60000000000}"#, 60),
    ] {
        let expected = format!(r#"freeze {{"seconds":{seconds}}}"#);
        assert_eq!(decided("update", "freeze", body, &running), Ok(expected));
    }
    for body in [
        r#"{"unfreezeTimeout":"5"}"#,
        r#"{"unfreezeTimeout":"h"}"#,
        r#"{"unfreezeTimeout":"99999999999999999999s"}"#,
        r#"{"unfreezeTimeout":"2h"}"#,
        r#"{"unfreezeTimeout":-1}"#,
        r#"{"unfreezeTimeout":[]}"#,
        r#"{"unfreezeTimeout":"5m€"}"#,
    ] {
        assert_eq!(
            decided("update", "freeze", body, &running),
            Err(400),
            "{body}"
        );
    }
}

#[test]
fn a_stream_needs_its_device_and_a_valid_port() {
    let running = instance("Running", &[], json!({}));
    for sub in [
        "portforward",
        "portforward/22/tcp/x",
        "console/x",
        "vsock/22",
    ] {
        assert_eq!(decided("get", sub, "", &running), Err(404), "{sub}");
    }
    for sub in [
        "portforward/0",
        "portforward/65536",
        "portforward/x",
        "portforward/1/sctp",
    ] {
        assert_eq!(decided("get", sub, "", &running), Err(400), "{sub}");
    }
    assert_eq!(
        decided("get", "vsock?port=1&tls=false", "", &running),
        Err(400)
    );
    let devices = json!({ "autoattachVSOCK": true, "autoattachSerialConsole": false });
    let other = instance("Running", &[], devices);
    assert_eq!(decided("get", "console", "", &other), Err(400));
    for (phase, code) in [("Scheduled", 400), ("Succeeded", 400), ("Failed", 409)] {
        let ended = instance(phase, &[], json!({}));
        assert_eq!(decided("get", "console", "", &ended), Err(code), "{phase}");
        assert_eq!(
            decided("get", "portforward/22", "", &ended),
            Err(code),
            "{phase}"
        );
    }
    let vsock = |query: &str| decided("get", &format!("vsock?{query}"), "", &other);
    assert_eq!(vsock("port=1024&tls=false"), Ok("vsock/1024".into()));
    assert_eq!(vsock("port=4294967295&tls=false"), Err(400));
    assert_eq!(vsock("port=1024"), Err(400));
    assert_eq!(vsock("tls=false"), Err(400));
}

#[test]
fn a_vm_stands_still_while_its_disks_are_taken() {
    let path = "/apis/subresources.kubevirt.io/v1/namespaces/n/virtualmachineinstances/a/unpause";
    let target = Target::parse(path, "update").unwrap();
    let paused = json!({ "type": "Paused", "status": "True" });
    let status = json!({ "phase": "Running", "conditions": [paused] });
    let status: VmiStatus = serde_json::from_value(status).unwrap();
    let code = |snapshot: Option<&str>| {
        let instance = Instance {
            spec: &VmiSpec::default(),
            status: &status,
            snapshot,
        };
        let decided = decide(&target, None, b"", &instance);
        decided.map(drop).map_err(|failure| failure.code())
    };
    assert_eq!(code(Some("s")), Err(409));
    assert_eq!(code(None), Ok(()));
}
