//! Patches that grow without end, and ordinary ones.

use serde_json::{Value, json};

use super::*;

fn patched(mut value: Value, patches: &[Value]) -> Result<Value, RestoreError> {
    let patches: Vec<_> = patches.iter().map(Value::to_string).collect();
    apply(&mut value, &patches).map(|()| value)
}

fn is_too_large(result: &Result<Value, RestoreError>) -> bool {
    matches!(result, Err(RestoreError::TooLarge { .. }))
}

#[test]
fn ordinary_patches_are_applied_in_their_order() {
    let made = patched(
        json!({"spec": {"a": [1, 2], "b": {"c": "d"}}}),
        &[
            json!({"op": "add", "path": "/spec/a/-", "value": {"e": "f".repeat(100_000)}}),
            json!({"op": "remove", "path": "/spec/a/0"}),
            json!({"op": "copy", "from": "/spec/b/c", "path": "/spec/g"}),
            json!({"op": "move", "from": "/spec/b", "path": "/spec/h"}),
            json!({"op": "test", "path": "/spec/g", "value": "d"}),
            json!({"op": "replace", "path": "/spec/a/1", "value": 3}),
        ],
    );
    let made = made.unwrap();
    assert_eq!(
        made,
        json!({"spec": {"a": [2, 3], "g": "d", "h": {"c": "d"}}})
    );
}

#[test]
fn copies_of_copies_do_not_grow_without_end() {
    // Twice as much with every patch: a gigabyte after thirty.
    let copy = json!({"op": "copy", "from": "/spec", "path": "/spec/a/-"});
    let made = patched(json!({"spec": {"a": []}}), &vec![copy; 64]);
    assert!(is_too_large(&made), "{made:?}");
    let text = json!({"spec": {"a": "x".repeat(1000), "b": []}});
    let copy = json!({"op": "copy", "from": "/spec/a", "path": "/spec/b/-"});
    let made = patched(text, &vec![copy; 100_000]);
    assert!(is_too_large(&made), "{made:?}");
}

#[test]
fn patches_do_not_nest_without_end() {
    let add = |depth: usize| {
        let path = format!("/spec{}", "/a".repeat(depth));
        json!({"op": "add", "path": path, "value": {}})
    };
    let adds: Vec<_> = (1..1000).map(add).collect();
    assert!(is_too_large(&patched(json!({"spec": {}}), &adds)));
    // Each puts all that is there one level deeper.
    let deeper: Vec<_> = (0..1000)
        .flat_map(|_| {
            [
                json!({"op": "add", "path": "/spec/b", "value": {}}),
                json!({"op": "move", "from": "/spec/a", "path": "/spec/b/a"}),
                json!({"op": "move", "from": "/spec/b", "path": "/spec/a"}),
            ]
        })
        .collect();
    assert!(is_too_large(&patched(json!({"spec": {"a": {}}}), &deeper)));
}

#[test]
fn what_does_not_fit_is_refused_as_before() {
    let missing = json!({"op": "copy", "from": "/spec/none", "path": "/spec/a"});
    let made = patched(json!({"spec": {}}), &[missing]);
    assert!(
        matches!(made, Err(RestoreError::Patch { index: 0, .. })),
        "{made:?}"
    );
    let mut value = json!({});
    let made = apply(&mut value, &["nonsense".to_owned()]);
    assert!(
        matches!(made, Err(RestoreError::Malformed { index: 0, .. })),
        "{made:?}"
    );
}
