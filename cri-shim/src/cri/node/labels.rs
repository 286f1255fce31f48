//! Labels of pods and containers.

use std::collections::HashMap;

/// Returns whether `labels` contains all of `selector`.
pub(in crate::cri) fn matches_labels(
    labels: &HashMap<String, String>,
    selector: &HashMap<String, String>,
) -> bool {
    selector
        .iter()
        .all(|(name, value)| labels.get(name) == Some(value))
}
