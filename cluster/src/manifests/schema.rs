//! Schemas of the types as CustomResourceDefinitions want them: structural, nothing referred to.

use schemars::{JsonSchema, generate::SchemaSettings};
use serde_json::{Map, Value, json};

/// What of a generated schema a structural schema has no use for.
const DROPPED: [&str; 4] = ["$schema", "title", "default", "definitions"];

/// Formats that the API server knows.
const FORMATS: [&str; 2] = ["int32", "int64"];

/// Any value, kept as it is.
pub(super) fn anything() -> Value {
    json!({ "x-kubernetes-preserve-unknown-fields": true })
}

/// The structural schema of a type.
pub(super) fn structural<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::openapi3().with(|settings| settings.inline_subschemas = true);
    let mut schema = settings
        .into_generator()
        .into_root_schema_for::<T>()
        .to_value();
    polish(&mut schema);
    schema
}

fn polish(schema: &mut Value) {
    if schema.as_bool() == Some(true) || schema.as_object().is_some_and(is_open) {
        let description = schema.get("description").cloned();
        *schema = anything();
        if let Some(description) = description {
            schema["description"] = description;
        }
        return;
    }
    let Some(object) = schema.as_object_mut() else {
        return;
    };
    for name in DROPPED {
        object.remove(name);
    }
    if object
        .get("format")
        .and_then(Value::as_str)
        .is_some_and(|f| !FORMATS.contains(&f))
    {
        object.remove("format");
    }
    if is_quantity(object) {
        let description = object.remove("description");
        object.clear();
        object.insert(
            "anyOf".into(),
            json!([{ "type": "integer" }, { "type": "string" }]),
        );
        object.insert("x-kubernetes-int-or-string".into(), json!(true));
        object.insert("nullable".into(), json!(true));
        if let Some(description) = description {
            object.insert("description".into(), description);
        }
        return;
    }
    for name in ["properties", "patternProperties"] {
        let Some(Value::Object(fields)) = object.get_mut(name) else {
            continue;
        };
        fields.values_mut().for_each(polish);
    }
    for name in ["items", "additionalProperties"] {
        if let Some(inner) = object
            .get_mut(name)
            .filter(|inner| !inner.is_boolean() || name == "items")
        {
            polish(inner);
        }
    }
}

/// Whether the schema says nothing but, at most, a description.
fn is_open(object: &Map<String, Value>) -> bool {
    object
        .keys()
        .all(|key| matches!(key.as_str(), "description" | "nullable" | "default"))
}

/// Whether this is a quantity, alone or as one of two possibilities with null.
fn is_quantity(object: &Map<String, Value>) -> bool {
    const MARK: &str = "x-kubernetes-int-or-string";
    let possibilities = object.get("anyOf").and_then(Value::as_array);
    object.contains_key(MARK)
        || possibilities.is_some_and(|list| list.iter().any(|item| item.get(MARK).is_some()))
}

#[cfg(test)]
mod tests {
    use podvisor_cluster_types::{vm::VmSpec, vmi::VmiSpec};

    use super::*;

    /// What makes a schema structural, checked at every place of it.
    fn assert_structural(schema: &Value, path: &str) {
        let object = schema
            .as_object()
            .unwrap_or_else(|| panic!("{path}: {schema}"));
        for name in ["$ref", "oneOf", "allOf", "const", "$schema", "default"] {
            assert!(!object.contains_key(name), "{path} has {name}: {schema}");
        }
        let marked = object.contains_key("x-kubernetes-int-or-string")
            || object.contains_key("x-kubernetes-preserve-unknown-fields");
        assert!(
            marked || object.get("type").is_some_and(Value::is_string),
            "{path}: {schema}"
        );
        assert!(marked || !object.contains_key("anyOf"), "{path}: {schema}");
        for (name, field) in object
            .get("properties")
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
        {
            assert_structural(field, &format!("{path}.{name}"));
        }
        for name in ["items", "additionalProperties"] {
            if let Some(inner) = object.get(name).filter(|inner| inner.is_object()) {
                assert_structural(inner, &format!("{path}.{name}"));
            }
        }
    }

    #[test]
    fn schemas_are_structural() {
        assert_structural(&structural::<VmiSpec>(), "vmi");
        assert_structural(&structural::<VmSpec>(), "vm");
    }

    #[test]
    fn fields_keep_their_type_and_their_description() {
        let schema = structural::<VmiSpec>();
        let cores = &schema["properties"]["domain"]["properties"]["cpu"]["properties"]["cores"];
        assert_eq!(cores["type"], "integer");
        assert_eq!(cores["description"], "Cores of a socket.");
        let guest = &schema["properties"]["domain"]["properties"]["memory"]["properties"]["guest"];
        assert_eq!(guest["x-kubernetes-int-or-string"], true);
        let affinity = &schema["properties"]["affinity"];
        assert_eq!(affinity["x-kubernetes-preserve-unknown-fields"], true);
        let request = &schema["properties"]["domain"]["properties"]["resources"]["properties"]["requests"]
            ["additionalProperties"];
        assert_eq!(request["x-kubernetes-int-or-string"], true);
    }
}
