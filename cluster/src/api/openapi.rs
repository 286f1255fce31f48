//! OpenAPI descriptions of the subresources: version 2 of all, version 3 of each version.

use serde_json::{Map, Value, json};

use super::{
    GROUP, VERSIONS, expand,
    subresources::{SUBRESOURCES, Subresource},
    upload,
};

use crate::upload::{GROUP as UPLOAD, VERSION as UPLOAD_VERSION};

/// Parameters in paths, by the subresources that have them.
const PORT: [&str; 2] = ["{port}", "{port}/{protocol}"];

/// One operation.
struct Operation {
    path: String,
    verb: &'static str,
    id: String,
    parameters: Vec<&'static str>,
}

fn operations(version: &str) -> Vec<Operation> {
    let base = format!("/apis/{GROUP}/{version}/namespaces/{{namespace}}");
    let mut operations = vec![Operation {
        path: format!("{base}/{}", expand::RESOURCE),
        verb: "put",
        id: format!("{version}ExpandVmSpec"),
        parameters: vec!["namespace"],
    }];
    for subresource in &SUBRESOURCES {
        let ends: Vec<String> = match subresource.name {
            "portforward" => PORT
                .iter()
                .map(|end| format!("{}/{end}", subresource.name))
                .collect(),
            name => vec![name.to_owned()],
        };
        for end in ends {
            operations.push(operation(&base, version, subresource, &end));
        }
    }
    operations
}

fn operation(base: &str, version: &str, subresource: &Subresource, end: &str) -> Operation {
    let mut parameters = vec!["namespace", "name"];
    for name in ["port", "protocol"] {
        if end.contains(&format!("{{{name}}}")) {
            parameters.push(name);
        }
    }
    let words = end
        .split(['/', '{', '}', '-'])
        .filter(|word| !word.is_empty());
    let words: String = words.map(capitalized).collect();
    Operation {
        path: format!("{base}/{}/{{name}}/{end}", subresource.resource),
        verb: if subresource.verb == "get" {
            "get"
        } else {
            "put"
        },
        id: format!("{version}{}{words}", capitalized(subresource.resource)),
        parameters,
    }
}

fn capitalized(word: &str) -> String {
    let mut letters = word.chars();
    let first = letters.next().map(|letter| letter.to_ascii_uppercase());
    first.into_iter().chain(letters).collect()
}

fn paths(version: &str, parameter: impl Fn(&str) -> Value, answer: &Value) -> Map<String, Value> {
    operations(version)
        .into_iter()
        .map(|operation| {
            let parameters: Vec<Value> = operation
                .parameters
                .iter()
                .map(|name| parameter(name))
                .collect();
            let verb = json!({
                "operationId": operation.id,
                "parameters": parameters,
                "responses": { "200": answer, "401": { "description": "Unauthorized" } },
            });
            (operation.path, json!({ operation.verb: verb }))
        })
        .collect()
}

fn info() -> Value {
    json!({ "title": GROUP, "version": env!("CARGO_PKG_VERSION") })
}

/// The description of all versions, as Swagger has it.
pub(super) fn v2() -> Value {
    let parameter =
        |name: &str| json!({ "name": name, "in": "path", "required": true, "type": "string" });
    let answer = json!({ "description": "OK", "schema": { "type": "string" } });
    let all = VERSIONS
        .iter()
        .flat_map(|version| paths(version, parameter, &answer));
    let token = upload::openapi(&parameter("namespace"), &answer);
    let paths: Map<String, Value> = all.chain([token]).collect();
    json!({ "swagger": "2.0", "info": info(), "paths": paths })
}

/// Where the descriptions of the versions are.
pub(super) fn v3_list() -> Value {
    let paths: Map<String, Value> = VERSIONS
        .iter()
        .map(|version| format!("apis/{GROUP}/{version}"))
        .chain([format!("apis/{UPLOAD}/{UPLOAD_VERSION}")])
        .map(|name| {
            // What they say changes with the program alone.
            let hash = env!("CARGO_PKG_VERSION");
            let url = format!("/openapi/v3/{name}?hash={hash}");
            (name, json!({ "serverRelativeURL": url }))
        })
        .collect();
    json!({ "paths": paths })
}

/// The description of one version.
pub(super) fn v3(path: &str) -> Option<Value> {
    let path = path.strip_prefix("/openapi/v3/apis/")?;
    let version = path
        .strip_prefix(GROUP)
        .and_then(|rest| rest.strip_prefix('/'));
    let is_upload = path
        .strip_prefix(UPLOAD)
        .and_then(|rest| rest.strip_prefix('/'))
        == Some(UPLOAD_VERSION);
    if !is_upload && !version.is_some_and(|version| VERSIONS.contains(&version)) {
        return None;
    }
    let parameter = |name: &str| json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } });
    let content = json!({ "application/json": { "schema": { "type": "string" } } });
    let answer = json!({ "description": "OK", "content": content });
    let paths = match version {
        Some(version) => paths(version, parameter, &answer),
        None => Map::from_iter([upload::openapi(&parameter("namespace"), &answer)]),
    };
    Some(json!({ "openapi": "3.0.0", "info": info(), "paths": paths }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_has_a_path_and_an_id_of_its_own() {
        let mut ids = std::collections::BTreeSet::new();
        for version in VERSIONS {
            for operation in operations(version) {
                assert!(ids.insert(operation.id.clone()), "{}", operation.id);
                for name in operation.parameters {
                    assert!(operation.path.contains(&format!("{{{name}}}")));
                }
            }
        }
        assert_eq!(ids.len(), 2 * (SUBRESOURCES.len() + 3));
    }

    #[test]
    fn a_description_exists_for_each_version_that_is_listed() {
        let list = v3_list();
        for (_, entry) in list["paths"].as_object().unwrap() {
            let url = entry["serverRelativeURL"].as_str().unwrap();
            let path = url.split('?').next().unwrap();
            assert_eq!(v3(path).unwrap()["openapi"], "3.0.0");
        }
        assert_eq!(v3("/openapi/v3/apis/subresources.kubevirt.io/v9"), None);
    }
}
