//! Why an object is refused: a reason, a message and the path of the field.

use std::fmt;

use serde::{Deserialize, Serialize};

/// At most so many causes are listed for one object: an answer stays readable and bounded.
const MAX_CAUSES: usize = 64;

/// At most so many characters of a user's value are shown in a message.
const MAX_SHOWN: usize = 80;

/// The kinds of causes, as `Status.details.causes[].reason` names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CauseReason {
    /// The value breaks a rule.
    #[serde(rename = "FieldValueInvalid")]
    Invalid,
    /// The value is missing.
    #[serde(rename = "FieldValueRequired")]
    Required,
    /// The value is missing, and what it names cannot be looked up.
    #[serde(rename = "FieldValueNotFound")]
    NotFound,
    /// The value is right elsewhere, and not here.
    #[serde(rename = "FieldValueNotSupported")]
    NotSupported,
    /// The value stands twice.
    #[serde(rename = "FieldValueDuplicate")]
    Duplicate,
    /// This user may not set the value.
    #[serde(rename = "FieldValueForbidden")]
    Forbidden,
}

/// One cause for which an object is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cause {
    /// Its kind.
    pub reason: CauseReason,
    /// What is wrong, and what would be right.
    pub message: String,
    /// The path of the field, such as `spec.domain.cpu.cores`.
    pub field: String,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// The path of a field, from the object's root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldPath(String);

impl FieldPath {
    /// A path that begins with `root`, such as `spec`.
    #[must_use]
    pub fn new(root: &str) -> Self {
        Self(root.to_owned())
    }

    /// The path of a field below this one; `name` may have several steps (`cpu.cores`).
    #[must_use]
    pub fn child(&self, name: &str) -> Self {
        if self.0.is_empty() {
            Self(name.to_owned())
        } else {
            Self(format!("{}.{name}", self.0))
        }
    }

    /// The path of an element of this list.
    #[must_use]
    pub fn index(&self, index: usize) -> Self {
        Self(format!("{}[{index}]", self.0))
    }
}

impl fmt::Display for FieldPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Collects causes while an object is validated.
#[derive(Debug, Default)]
pub struct Causes {
    list: Vec<Cause>,
}

impl Causes {
    /// Adds a cause; its message begins with the path.
    pub fn add(&mut self, reason: CauseReason, field: &FieldPath, message: impl fmt::Display) {
        if self.list.len() < MAX_CAUSES {
            let (field, message) = (field.to_string(), format!("{field} {message}"));
            self.list.push(Cause {
                reason,
                message,
                field,
            });
        }
    }

    /// Adds a cause: the value breaks a rule.
    pub fn invalid(&mut self, field: &FieldPath, message: impl fmt::Display) {
        self.add(CauseReason::Invalid, field, message);
    }

    /// Adds a cause: the value is missing.
    pub fn required(&mut self, field: &FieldPath, message: impl fmt::Display) {
        self.add(CauseReason::Required, field, message);
    }

    /// Adds a cause: the value is not supported here.
    pub fn not_supported(&mut self, field: &FieldPath, message: impl fmt::Display) {
        self.add(CauseReason::NotSupported, field, message);
    }

    /// Adds a cause: the value stands twice.
    pub fn duplicate(&mut self, field: &FieldPath, value: &str) {
        let message = format_args!("{} is used more than once", shown(value)).to_string();
        self.add(CauseReason::Duplicate, field, message);
    }

    /// Adds a cause: this user may not do this.
    pub fn forbidden(&mut self, field: &FieldPath, message: impl fmt::Display) {
        self.add(CauseReason::Forbidden, field, message);
    }

    /// Adds a cause unless `value` is one of `words`.
    pub fn one_of(&mut self, field: &FieldPath, value: &str, words: &[&str]) {
        if !words.contains(&value) {
            let message = format!(
                "is {}, but must be one of: {}",
                shown(value),
                words.join(", ")
            );
            self.add(CauseReason::NotSupported, field, message);
        }
    }

    /// Adds causes that were found elsewhere.
    pub fn extend(&mut self, causes: Vec<Cause>) {
        let room = MAX_CAUSES.saturating_sub(self.list.len());
        self.list.extend(causes.into_iter().take(room));
    }

    /// Whether nothing is wrong so far.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The causes, in the order of the rules.
    #[must_use]
    pub fn into_vec(self) -> Vec<Cause> {
        self.list
    }
}

/// A user's value as it is shown in a message: quoted, escaped and cut.
#[must_use]
pub fn shown(value: &str) -> String {
    match value.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{:?}…", value.get(..end).unwrap_or_default()),
        None => format!("{value:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_lists_by_index() {
        let path = FieldPath::new("spec")
            .child("domain.devices.disks")
            .index(3)
            .child("name");
        assert_eq!(path.to_string(), "spec.domain.devices.disks[3].name");
    }

    #[test]
    fn causes_are_bounded() {
        let mut causes = Causes::default();
        for index in 0..100_000 {
            causes.invalid(&FieldPath::new("spec.volumes").index(index), "is wrong");
        }
        assert_eq!(causes.into_vec().len(), MAX_CAUSES);
    }

    #[test]
    fn a_shown_value_has_no_line_breaks_and_is_cut() {
        assert_eq!(shown("a\nb"), r#""a\nb""#);
        assert!(shown(&"é".repeat(1_000_000)).chars().count() < MAX_SHOWN + 10);
    }

    #[test]
    fn a_cause_is_written_as_kubernetes_names_it() {
        let mut causes = Causes::default();
        causes.one_of(
            &FieldPath::new("spec.dnsPolicy"),
            "dns",
            &["Default", "None"],
        );
        let json = serde_json::to_value(causes.into_vec()).unwrap();
        assert_eq!(
            json,
            serde_json::json!([{
                "reason": "FieldValueNotSupported",
                "message": "spec.dnsPolicy is \"dns\", but must be one of: Default, None",
                "field": "spec.dnsPolicy",
            }])
        );
    }
}
