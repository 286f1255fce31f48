//! What aggregated groups say of themselves, as all of them do.

use http::{HeaderValue, StatusCode};
use serde_json::{Value, json};

use crate::https::{self, Answer};

/// A group, as lists of groups have it; the first version is the preferred one.
pub(crate) fn group(name: &str, versions: &[&str]) -> Value {
    let version =
        |version: &&str| json!({ "groupVersion": format!("{name}/{version}"), "version": version });
    let versions: Vec<Value> = versions.iter().map(version).collect();
    json!({
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": name,
        "preferredVersion": versions.first(),
        "versions": versions,
    })
}

/// The list of a version's resources.
pub(crate) fn resources(group: &str, version: &str, resources: &[Value]) -> Value {
    json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": format!("{group}/{version}"),
        "resources": resources,
    })
}

/// The list of all groups. Discovery of everything at once is not served; whoever asked for that
/// alone asks again for each version.
pub(crate) fn groups(groups: &[Value], accept: Option<&HeaderValue>) -> Answer {
    if accept.is_some_and(wants_aggregated) {
        return https::text(StatusCode::NOT_ACCEPTABLE, "not served");
    }
    let list = json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": groups });
    https::json(StatusCode::OK, &list)
}

fn wants_aggregated(accept: &HeaderValue) -> bool {
    accept.to_str().is_ok_and(|accept| {
        accept
            .split(',')
            .all(|kind| kind.contains("as=APIGroupDiscoveryList"))
    })
}
