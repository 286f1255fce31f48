//! Writes that cannot undo what somebody else wrote meanwhile.

use std::fmt::Debug;

use kube::api::{Patch, PatchParams};
use kube::{Api, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::Error;

/// Returns the JSON merge patch that makes `to` of `from`; `None` if they are equal.
#[must_use]
pub(super) fn difference(from: &Value, to: &Value) -> Option<Value> {
    let (Value::Object(from), Value::Object(to)) = (from, to) else {
        return (from != to).then(|| to.clone());
    };
    let mut patch = Map::new();
    for (name, value) in to {
        let before = from.get(name).unwrap_or(&Value::Null);
        if let Some(value) = difference(before, value) {
            patch.insert(name.clone(), value);
        }
    }
    for name in from.keys().filter(|name| !to.contains_key(*name)) {
        patch.insert(name.clone(), Value::Null);
    }
    (!patch.is_empty()).then_some(Value::Object(patch))
}

/// Writes an object's status if it differs; refused by the API server if the object is another
/// than the observed one. Returns what it is then, if anything was written.
///
/// # Errors
///
/// The API server cannot be asked, or the object has changed.
pub(super) async fn status<K, S>(
    api: &Api<K>,
    object: &K,
    from: &S,
    to: &S,
) -> Result<Option<K>, Error>
where
    K: Resource + Clone + DeserializeOwned + Debug,
    S: Serialize,
{
    let value = |status: &S| {
        serde_json::to_value(status).map_err(|source| Error::Serialize {
            what: "status",
            source,
        })
    };
    let Some(difference) = difference(&value(from)?, &value(to)?) else {
        return Ok(None);
    };
    let patch = json!({
        "metadata": {"resourceVersion": object.meta().resource_version},
        "status": difference,
    });
    api.patch_status(name(object), &PatchParams::default(), &Patch::Merge(patch))
        .await
        .map(Some)
        .map_err(|source| Error::request("write the status of", object, source))
}

/// Changes an object's metadata or specification; refused by the API server if the object is
/// another than the observed one.
///
/// # Errors
///
/// The API server cannot be asked, or the object has changed.
pub(super) async fn object<K>(api: &Api<K>, object: &K, mut patch: Value) -> Result<K, Error>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    patch["metadata"]["resourceVersion"] = json!(object.meta().resource_version);
    api.patch(name(object), &PatchParams::default(), &Patch::Merge(patch))
        .await
        .map_err(|source| Error::request("change", object, source))
}

/// Returns the merge patch that adds a finalizer to an object, or removes it.
pub(super) fn finalizer<K: Resource>(object: &K, finalizer: &str, wanted: bool) -> Value {
    let mut finalizers = object.meta().finalizers.clone().unwrap_or_default();
    finalizers.retain(|name| name != finalizer);
    if wanted {
        finalizers.push(finalizer.to_owned());
    }
    json!({"metadata": {"finalizers": finalizers}})
}

fn name<K: Resource>(object: &K) -> &str {
    object.meta().name.as_deref().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_has_what_was_changed_added_and_removed() {
        let from = json!({"a": 1, "b": {"c": 1, "d": 2}, "e": [1], "f": 1});
        let to = json!({"a": 1, "b": {"c": 1, "d": 3}, "e": [1, 2], "g": {"h": 1}});
        assert_eq!(
            difference(&from, &to),
            Some(json!({"b": {"d": 3}, "e": [1, 2], "f": null, "g": {"h": 1}}))
        );
        assert_eq!(difference(&from, &from), None);
    }

    #[test]
    fn a_finalizer_is_there_once_or_not_at_all() {
        let mut vm = crate::objects::VirtualMachine::default();
        vm.metadata.finalizers = Some(vec!["a".into(), "b".into()]);
        let list = |wanted| finalizer(&vm, "a", wanted)["metadata"]["finalizers"].clone();
        assert_eq!(list(true), json!(["b", "a"]));
        assert_eq!(list(false), json!(["b"]));
    }
}
