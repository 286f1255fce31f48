//! Applies a tenant's JSON patches: what they add and copy is bounded.

use json_patch::PatchOperation;
use json_patch::jsonptr::Pointer;
use serde_json::Value;

use super::RestoreError;

/// How much patches may put somewhere altogether, as [`take`] counts it. Copies of copies would
/// double an object again and again.
const MOST: usize = 1 << 20;

/// How deep a patched value may lie, and how deep its own values: what is nested deeper could not
/// be read again, and each level takes a frame of the stack.
const DEPTH: usize = 100;

/// What a value counts beside the bytes of its text.
const PER_VALUE: usize = 128;

/// Applies `patches`, one after the other.
///
/// # Errors
///
/// A patch is malformed, does not fit, or makes the object too large or too deep.
pub(super) fn apply(value: &mut Value, patches: &[String]) -> Result<(), RestoreError> {
    let mut left = MOST;
    for (index, text) in patches.iter().enumerate() {
        let patch: PatchOperation = serde_json::from_str(text)
            .map_err(|source| RestoreError::Malformed { index, source })?;
        let put = match &patch {
            PatchOperation::Add(add) => Some(&add.value),
            PatchOperation::Replace(replace) => Some(&replace.value),
            // What is not there is refused below.
            PatchOperation::Copy(copy) => value.pointer(copy.from.as_str()),
            PatchOperation::Move(from) => value.pointer(from.from.as_str()),
            PatchOperation::Remove(_) | PatchOperation::Test(_) => None,
        };
        if let Some(put) = put {
            DEPTH
                .checked_sub(steps(patch.path()))
                .and_then(|depth| take(put, depth, &mut left))
                .ok_or(RestoreError::TooLarge { index })?;
        }
        json_patch::patch(value, &[patch])
            .map_err(|source| RestoreError::Patch { index, source })?;
    }
    Ok(())
}

fn steps(path: &Pointer) -> usize {
    path.as_str().bytes().filter(|byte| *byte == b'/').count()
}

/// Takes about how much memory a value needs from `left`; `None` if that is more than is left, or
/// its values lie deeper than `depth`.
fn take(value: &Value, depth: usize, left: &mut usize) -> Option<()> {
    *left = left.checked_sub(PER_VALUE)?;
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
        Value::String(text) => *left = left.checked_sub(text.len())?,
        Value::Array(values) => {
            let depth = depth.checked_sub(1)?;
            for value in values {
                take(value, depth, left)?;
            }
        }
        Value::Object(fields) => {
            let depth = depth.checked_sub(1)?;
            for (name, value) in fields {
                *left = left.checked_sub(name.len())?;
                take(value, depth, left)?;
            }
        }
    }
    Some(())
}

#[cfg(test)]
#[path = "patches_tests.rs"]
mod tests;
