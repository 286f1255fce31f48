//! The DataSource (`cdi.kubevirt.io`): a name for what DataVolumes are copies of.

use super::ObjectSource;
use crate::{Cause, Causes, FieldPath, cause::shown, names::is_dns_subdomain};

object! {
    /// What a name stands for (`spec`).
    pub struct DataSourceSpec {
        /// Exactly one.
        pub source: Option<DataSourceSource>,
    }

    /// A claim, a snapshot of one, or another name.
    pub struct DataSourceSource {
        /// A claim.
        pub pvc: Option<ObjectSource>,
        /// A VolumeSnapshot.
        pub snapshot: Option<ObjectSource>,
        /// Another DataSource.
        pub data_source: Option<ObjectSource>,
    }
}

impl DataSourceSpec {
    /// Every cause to refuse this specification in a namespace, below `path` (`spec`).
    #[must_use]
    pub fn validate_in(&self, namespace: &str, path: &FieldPath) -> Vec<Cause> {
        let mut causes = Causes::default();
        let none = DataSourceSource::default();
        let source = self.source.as_ref().unwrap_or(&none);
        let path = path.child("source");
        let all = [
            ("pvc", &source.pvc),
            ("snapshot", &source.snapshot),
            ("dataSource", &source.data_source),
        ];
        // One that names nothing yet waits for whoever fills it in.
        if all.iter().filter(|(_, given)| given.is_some()).count() > 1 {
            causes.invalid(&path, "must have one of pvc, snapshot and dataSource");
        }
        for (name, given) in all {
            if let Some(given) = given {
                given.validate_in(namespace, &path.child(name), &mut causes);
            }
        }
        causes.into_vec()
    }
}

impl ObjectSource {
    /// Adds causes unless this names an object of a namespace.
    pub(super) fn validate_in(&self, namespace: &str, path: &FieldPath, causes: &mut Causes) {
        self.validate_name(path, causes);
        if !self.is_in(namespace) {
            let message = "is another namespace, from which nothing is copied: leave it out";
            causes.not_supported(&path.child("namespace"), message);
        }
    }

    /// Adds causes unless this has a name.
    pub(super) fn validate_name(&self, path: &FieldPath, causes: &mut Causes) {
        let field = path.child("name");
        if self.name.is_empty() {
            causes.required(&field, "is required");
        } else if !is_dns_subdomain(&self.name) {
            let given = shown(&self.name);
            causes.invalid(
                &field,
                format_args!("is {given}, not the name of an object"),
            );
        }
    }

    /// Whether the object is in a namespace; without a namespace it is.
    #[must_use]
    pub fn is_in(&self, namespace: &str) -> bool {
        let given = self.namespace.as_deref().filter(|text| !text.is_empty());
        given.is_none_or(|given| given == namespace)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn fields(source: Value) -> Vec<String> {
        let spec: DataSourceSpec = serde_json::from_value(json!({ "source": source })).unwrap();
        let causes = spec.validate_in("n", &FieldPath::new("spec"));
        causes.into_iter().map(|cause| cause.field).collect()
    }

    #[test]
    fn a_data_source_names_one_object_of_its_namespace() {
        let none: [&str; 0] = [];
        assert_eq!(fields(json!({})), none);
        assert_eq!(fields(json!({ "pvc": { "name": "a" } })), none);
        assert_eq!(
            fields(json!({ "snapshot": { "name": "a", "namespace": "n" } })),
            none
        );
        assert_eq!(
            fields(json!({ "dataSource": {} })),
            ["spec.source.dataSource.name"]
        );
        let other = json!({ "pvc": { "name": "a", "namespace": "m" } });
        assert_eq!(fields(other), ["spec.source.pvc.namespace"]);
        let two = json!({ "pvc": { "name": "a" }, "snapshot": { "name": "b" } });
        assert_eq!(fields(two), ["spec.source"]);
    }
}
