//! What the group has: the lists that `kubectl` and `virtctl` read first.

use http::StatusCode;
use serde_json::{Value, json};

use super::{GROUP, VERSIONS};
use crate::https::{self, Answer};

/// Subresources of a VM, all of them PUT.
const VM: [&str; 4] = ["migrate", "restart", "start", "stop"];

/// The answer where the path is one of discovery.
pub(super) fn answer(path: &str) -> Option<Answer> {
    let path = path.strip_suffix('/').unwrap_or(path);
    let value = match path {
        "/apis" => json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": [group()] }),
        "/openapi/v2" => openapi_v2(),
        "/openapi/v3" => json!({ "paths": {} }),
        _ => {
            let rest = path.strip_prefix("/apis/")?.strip_prefix(GROUP)?;
            if rest.is_empty() {
                group()
            } else {
                of_version(rest.strip_prefix('/')?)?
            }
        }
    };
    Some(https::json(StatusCode::OK, &value))
}

fn group() -> Value {
    let version =
        |version: &str| json!({ "groupVersion": format!("{GROUP}/{version}"), "version": version });
    let versions: Vec<Value> = VERSIONS.iter().map(|name| version(name)).collect();
    json!({
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": GROUP,
        "preferredVersion": versions.first(),
        "versions": versions,
    })
}

fn of_version(rest: &str) -> Option<Value> {
    let (version, rest) = rest
        .split_once('/')
        .map_or((rest, None), |(v, rest)| (v, Some(rest)));
    if !VERSIONS.contains(&version) {
        return None;
    }
    match rest {
        None => Some(resources(version)),
        Some("version") => Some(json!({
            "gitVersion": concat!("v", env!("CARGO_PKG_VERSION")),
            "gitCommit": "",
            "gitTreeState": "",
            "buildDate": "",
            "goVersion": "",
            "compiler": "rustc",
            "platform": "linux/amd64",
        })),
        Some("healthz") => Some(json!({ "apiserver": { "connectivity": "ok" } })),
        _ => None,
    }
}

fn resources(version: &str) -> Value {
    let resources: Vec<Value> = VM
        .iter()
        .map(|name| {
            json!({
                "name": format!("virtualmachines/{name}"),
                "singularName": "",
                "namespaced": true,
                "kind": "VirtualMachine",
                "verbs": ["update"],
            })
        })
        .collect();
    json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": format!("{GROUP}/{version}"),
        "resources": resources,
    })
}

fn openapi_v2() -> Value {
    json!({
        "swagger": "2.0",
        "info": { "title": GROUP, "version": env!("CARGO_PKG_VERSION") },
        "paths": {},
    })
}
