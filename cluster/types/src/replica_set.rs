//! The VirtualMachineInstanceReplicaSet: as many equal VMIs as wanted.

use std::collections::BTreeMap;

use crate::{
    Cause, Causes, ClusterConfig, ClusterDefaults, FieldPath, vm::VmiTemplate, vmi::Condition,
};

object! {
    /// How many VMIs of which template (`spec`).
    pub struct ReplicaSetSpec {
        /// How many; one where it is missing.
        pub replicas: Option<i32>,
        /// Which VMIs count.
        pub selector: LabelSelector,
        /// What is made.
        pub template: Option<VmiTemplate>,
        /// Nothing is made and nothing deleted.
        pub paused: bool,
    }

    /// Which objects are meant.
    pub struct LabelSelector {
        /// Labels that must be equal.
        pub match_labels: BTreeMap<String, String>,
        /// Further requirements.
        pub match_expressions: Vec<LabelRequirement>,
    }

    /// A requirement of a label.
    pub struct LabelRequirement {
        /// The label.
        pub key: String,
        /// `In`, `NotIn`, `Exists` or `DoesNotExist`.
        pub operator: String,
        /// Values.
        pub values: Vec<String>,
    }

    /// What is reported of it (`status`).
    pub struct ReplicaSetStatus {
        /// How many exist.
        pub replicas: Option<i32>,
        /// How many are ready.
        pub ready_replicas: Option<i32>,
        /// Conditions.
        pub conditions: Vec<Condition>,
        /// The selector as text, for the scale subresource.
        pub label_selector: Option<String>,
    }
}

impl LabelSelector {
    /// Whether the labels are meant; a selector that is empty or malformed means none.
    #[must_use]
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        let is_empty = self.match_labels.is_empty() && self.match_expressions.is_empty();
        !is_empty
            && self
                .match_labels
                .iter()
                .all(|(key, value)| labels.get(key) == Some(value))
            && self.match_expressions.iter().all(|requirement| {
                let value = labels.get(&requirement.key);
                match requirement.operator.as_str() {
                    "In" => value.is_some_and(|value| requirement.values.contains(value)),
                    "NotIn" => value.is_none_or(|value| !requirement.values.contains(value)),
                    "Exists" => value.is_some(),
                    "DoesNotExist" => value.is_none(),
                    _ => false,
                }
            })
    }
}

impl ReplicaSetSpec {
    /// Every cause to refuse this specification, below `path` (`spec`).
    #[must_use]
    pub fn validate(
        &self,
        defaults: &ClusterDefaults,
        config: &ClusterConfig,
        path: &FieldPath,
    ) -> Vec<Cause> {
        let mut causes = Causes::default();
        if self.replicas.is_some_and(|replicas| replicas < 0) {
            causes.invalid(&path.child("replicas"), "must not be negative");
        }
        let Some(template) = &self.template else {
            causes.required(&path.child("template"), "is required");
            return causes.into_vec();
        };
        let none = BTreeMap::new();
        let labels = template
            .metadata
            .as_ref()
            .map_or(&none, |metadata| &metadata.labels);
        if !self.selector.matches(labels) {
            causes.invalid(
                &path.child("selector"),
                "does not match the template's labels",
            );
        }
        template.validate_meta(&path.child("template.metadata"), &mut causes);
        let mut causes = causes.into_vec();
        let mut spec = template.spec.clone();
        spec.apply_defaults(defaults);
        causes.extend(spec.validate(config, &path.child("template.spec")));
        causes
    }
}
