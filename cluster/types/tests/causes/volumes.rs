//! Volumes, cloud-init and credentials.

use serde_json::{Value, json};

use super::{DISK, accepted, at, refused};

#[test]
fn a_volume_has_a_name_and_one_source() {
    for name in ["../a", "a\nb", "Root", ""] {
        refused(
            &[
                ("/volumes/0/name", json!(name)),
                (&at(DISK, "name"), json!(name)),
            ],
            &["volumes[0].name"],
        );
    }
    refused(
        &[("/volumes/0/emptyDisk", json!({ "capacity": "1Gi" }))],
        &["volumes[0]"],
    );
    refused(
        &[("/volumes/0/containerDisk", Value::Null)],
        &["volumes[0]"],
    );
    let same = json!({ "name": "root", "emptyDisk": { "capacity": "1Gi" } });
    refused(&[("/volumes/3", same)], &["volumes[3].name"]);
}

#[test]
fn a_volume_for_memory_dumps_is_no_disk() {
    let dump = json!({
        "name": "dumps", "memoryDump": { "claimName": "dumps", "hotpluggable": true },
    });
    accepted(&[("/volumes/3", dump.clone())]);
    let named = |claim: &str| json!({ "name": "dumps", "memoryDump": { "claimName": claim } });
    for claim in ["", "../x"] {
        refused(
            &[("/volumes/3", named(claim))],
            &["volumes[3].memoryDump.claimName"],
        );
    }
    let mut root = dump;
    root["name"] = json!("root");
    refused(&[("/volumes/0", root)], &["volumes[0].name"]);
}

#[test]
fn cloud_init_has_one_source_of_each_data() {
    let path = "volumes[1].cloudInitNoCloud";
    let pointer = "/volumes/1/cloudInitNoCloud";
    refused(&[(pointer, json!({}))], &[path]);
    refused(
        &[(
            pointer,
            json!({ "userData": "a", "userDataBase64": "YQ==" }),
        )],
        &[path],
    );
    refused(
        &[(
            pointer,
            json!({ "networkData": "a", "networkDataSecretRef": { "name": "s" } }),
        )],
        &[path],
    );
    for text in ["YQ=", "Y Q=", "Y===", "é==="] {
        refused(
            &[(pointer, json!({ "userDataBase64": text }))],
            &[&format!("{path}.userDataBase64")],
        );
    }
    accepted(&[(pointer, json!({ "userData": "x".repeat(2048) }))]);
    refused(
        &[(pointer, json!({ "userData": "x".repeat(2049) }))],
        &[&format!("{path}.userData")],
    );
}

#[test]
fn sources_name_what_they_come_from() {
    for (source, path) in [
        (json!({ "configMap": {} }), "configMap.name"),
        (json!({ "secret": {} }), "secret.secretName"),
        (
            json!({ "serviceAccount": {} }),
            "serviceAccount.serviceAccountName",
        ),
        (json!({ "dataVolume": {} }), "dataVolume.name"),
        (
            json!({ "persistentVolumeClaim": {} }),
            "persistentVolumeClaim.claimName",
        ),
        (
            json!({ "ephemeral": {} }),
            "ephemeral.persistentVolumeClaim.claimName",
        ),
        (json!({ "containerDisk": {} }), "containerDisk.image"),
        (json!({ "emptyDisk": {} }), "emptyDisk.capacity"),
        (
            json!({ "persistentVolumeClaim": { "claimName": "../x" } }),
            "persistentVolumeClaim.claimName",
        ),
        (
            json!({ "containerDisk": { "image": "a", "path": "/disk/../etc" } }),
            "containerDisk.path",
        ),
        (
            json!({ "containerDisk": { "image": "a", "path": "disk/a" } }),
            "containerDisk.path",
        ),
    ] {
        let mut volume = source;
        volume["name"] = json!("root");
        refused(&[("/volumes/0", volume)], &[&format!("volumes[0].{path}")]);
    }
    let account =
        |name: &str| json!({ "name": name, "serviceAccount": { "serviceAccountName": "s" } });
    refused(
        &[("/volumes/3", account("a")), ("/volumes/4", account("b"))],
        &["volumes"],
    );
}

#[test]
fn credentials_have_one_kind_source_and_way() {
    let source = json!({ "secret": { "secretName": "keys" } });
    let key = |method: Value| {
        json!([{ "sshPublicKey": {
        "source": source, "propagationMethod": method,
    } }])
    };
    accepted(&[("/accessCredentials", key(json!({ "noCloud": {} })))]);
    let path = "accessCredentials[0].sshPublicKey.propagationMethod";
    for (method, paths) in [
        (json!({}), vec![path.to_owned()]),
        (
            json!({ "configDrive": {} }),
            vec![format!("{path}.configDrive")],
        ),
        (
            json!({ "qemuGuestAgent": {} }),
            vec![format!("{path}.qemuGuestAgent.users")],
        ),
    ] {
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        refused(&[("/accessCredentials", key(method))], &paths);
    }
    refused(
        &[("/accessCredentials", json!([{}]))],
        &["accessCredentials[0]"],
    );
    refused(
        &[("/accessCredentials", json!([{ "userPassword": {} }]))],
        &[
            "accessCredentials[0].userPassword.source",
            "accessCredentials[0].userPassword.propagationMethod",
        ],
    );
}
