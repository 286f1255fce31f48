//! Changing JSON by its type, without losing what the type does not know.

use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

/// Reads `value` as a `T`, changes that, and carries what differs into `value`.
///
/// # Errors
///
/// It cannot be read.
pub(crate) fn change<T: Serialize + DeserializeOwned>(
    value: &mut Value,
    change: impl FnOnce(&mut T),
) -> Result<(), serde_json::Error> {
    if value.is_null() {
        *value = json!({});
    }
    let mut typed: T = serde_json::from_value(value.clone())?;
    let before = serde_json::to_value(&typed)?;
    change(&mut typed);
    let after = serde_json::to_value(&typed)?;
    merge(value, &before, &after);
    Ok(())
}

/// Carries what changed from `before` to `after` into `target`.
fn merge(target: &mut Value, before: &Value, after: &Value) {
    if before == after {
        return;
    }
    match (after, before, &mut *target) {
        (Value::Object(after), Value::Object(before), Value::Object(target)) => {
            for (name, value) in after {
                let old = before.get(name).unwrap_or(&Value::Null);
                merge(
                    target.entry(name.clone()).or_insert(Value::Null),
                    old,
                    value,
                );
            }
        }
        (Value::Array(after), Value::Array(before), Value::Array(target))
            if before.len() == target.len() && after.len() >= before.len() =>
        {
            for (index, value) in after.iter().enumerate() {
                match (before.get(index), target.get_mut(index)) {
                    (Some(old), Some(target)) => merge(target, old, value),
                    _ => target.push(value.clone()),
                }
            }
        }
        // What was empty in the types may hold an empty object in the target.
        (Value::Object(after), Value::Null, Value::Object(target)) => {
            for (name, value) in after {
                merge(
                    target.entry(name.clone()).or_insert(Value::Null),
                    &Value::Null,
                    value,
                );
            }
        }
        _ => *target = after.clone(),
    }
}
