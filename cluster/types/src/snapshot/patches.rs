//! JSON patches of objects that are made.

use serde_json::Value;

use crate::{Causes, FieldPath, cause::shown};

/// Where a patch may change a virtual machine.
const ROOTS: [&str; 3] = ["/metadata/labels/", "/metadata/annotations/", "/spec/"];

const OPERATIONS: [&str; 6] = ["add", "remove", "replace", "move", "copy", "test"];

/// At most so many patches are applied to one object.
const MOST: usize = 1000;

/// Adds causes for patches that are malformed, or that change anything but labels, annotations
/// and the specification; `path` is the list's.
pub fn validate_patches(patches: &[String], path: &FieldPath, causes: &mut Causes) {
    if patches.len() > MOST {
        return causes.invalid(path, format_args!("has more than {MOST} patches"));
    }
    for (index, patch) in patches.iter().enumerate() {
        let path = path.index(index);
        let Ok(Value::Object(patch)) = serde_json::from_str::<Value>(patch) else {
            let example = r#"{"op": "replace", "path": "/spec/runStrategy", "value": "Manual"}"#;
            causes.invalid(&path, format_args!("is no JSON patch, such as {example}"));
            continue;
        };
        let text = |name: &str| patch.get(name).and_then(Value::as_str);
        let operation = text("op").unwrap_or_default();
        causes.one_of(&path.child("op"), operation, &OPERATIONS);
        let from = matches!(operation, "move" | "copy").then_some("from");
        for name in ["path"].into_iter().chain(from) {
            let place = text(name).unwrap_or_default();
            if !ROOTS.iter().any(|root| place.starts_with(root)) {
                let message = format!(
                    "is {}, but only elements under /spec/, /metadata/labels/ and \
                     /metadata/annotations/ can be patched",
                    shown(place)
                );
                causes.invalid(&path.child(name), message);
            }
        }
        if matches!(operation, "add" | "replace" | "test") && !patch.contains_key("value") {
            causes.required(&path.child("value"), "is required");
        }
    }
}
