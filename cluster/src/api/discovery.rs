//! What the group has: the lists that `kubectl` and `virtctl` read first.

use http::{HeaderValue, StatusCode};
use serde_json::{Value, json};

use super::{
    GROUP, VERSIONS, expand, openapi,
    subresources::{SUBRESOURCES, VM},
    upload,
};
use crate::{
    discovery,
    https::{self, Answer},
    status::Failure,
};

/// The answer where the path is one of discovery.
pub(super) fn answer(path: &str, accept: Option<&HeaderValue>) -> Option<Answer> {
    let path = path.strip_suffix('/').unwrap_or(path);
    let value = match path {
        "/apis" => return Some(discovery::groups(&[group(), upload::group()], accept)),
        "/openapi/v2" => openapi::v2(),
        "/openapi/v3" => openapi::v3_list(),
        _ if path.starts_with("/openapi/v3/") => openapi::v3(path)?,
        _ if path.starts_with("/apis/upload.") => upload::discovery(path)?,
        _ => {
            let rest = path.strip_prefix("/apis/")?.strip_prefix(GROUP)?;
            match rest.strip_prefix('/') {
                None if rest.is_empty() => group(),
                None => return None,
                Some(rest)
                    if rest
                        .split_once('/')
                        .is_some_and(|(_, rest)| rest == "guestfs") =>
                {
                    return Some(no_guestfs());
                }
                Some(rest) => of_version(rest)?,
            }
        }
    };
    Some(https::json(StatusCode::OK, &value))
}

fn group() -> Value {
    discovery::group(GROUP, &VERSIONS)
}

/// `virtctl guestfs` asks for the image of a pod with libguestfs: there is none.
fn no_guestfs() -> Answer {
    Failure::not_found("image", "libguestfs").answer()
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
            "gitVersion": crate::served::VERSION,
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
    let subresources = SUBRESOURCES.iter().map(|subresource| {
        let kind = match subresource.resource {
            VM => "VirtualMachine",
            _ => "VirtualMachineInstance",
        };
        json!({
            "name": format!("{}/{}", subresource.resource, subresource.name),
            "singularName": "",
            "namespaced": true,
            "kind": kind,
            "verbs": [subresource.verb],
        })
    });
    let expand = json!({
        "name": expand::RESOURCE,
        "singularName": expand::RESOURCE,
        "namespaced": true,
        "kind": "VirtualMachine",
        "verbs": ["update"],
    });
    let resources: Vec<Value> = [expand].into_iter().chain(subresources).collect();
    discovery::resources(GROUP, version, &resources)
}
