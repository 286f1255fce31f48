//! Exports of volumes: the group `export.kubevirt.io`.

use std::time::Duration;

use crate::{
    Cause, Causes, FieldPath,
    cause::shown,
    duration,
    names::is_dns_subdomain,
    snapshot::{self, ObjectReference, immutable},
};

/// The group.
pub const GROUP: &str = "export.kubevirt.io";

/// The served versions, the stored one first; they differ in nothing.
pub const VERSIONS: [&str; 2] = ["v1beta1", "v1alpha1"];

/// How long an export lives that says nothing of it.
pub const TTL: Duration = Duration::from_secs(2 * 3600);

/// The longest life of an export: a hundred years.
const MAX_TTL: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

object! {
    /// What is exported (`spec`).
    pub struct ExportSpec {
        /// A claim, a virtual machine or a snapshot of one.
        pub source: Option<ObjectReference>,
        /// The Secret with the token that downloads are allowed by; one is made where it is
        /// missing.
        pub token_secret_ref: Option<String>,
        /// How long after its creation it is deleted, such as `2h`.
        pub ttl_duration: Option<String>,
    }
}

/// What can be exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportSource<'a> {
    /// The claim of this name.
    Claim(&'a str),
    /// The claims of the virtual machine of this name.
    Machine(&'a str),
    /// The volumes of the snapshot of this name.
    Snapshot(&'a str),
}

/// The kinds of sources, each with its group.
const KINDS: [(&str, &str); 3] = [
    ("", "PersistentVolumeClaim"),
    ("kubevirt.io", "VirtualMachine"),
    (snapshot::GROUP, "VirtualMachineSnapshot"),
];

impl ExportSpec {
    /// What is exported; `None` if it is nothing that can be.
    #[must_use]
    pub fn source(&self) -> Option<ExportSource<'_>> {
        let source = self.source.as_ref()?;
        let group = source.api_group.as_deref().unwrap_or_default();
        let name = source.name.as_str();
        match KINDS.iter().position(|kind| *kind == (group, &source.kind)) {
            Some(0) => Some(ExportSource::Claim(name)),
            Some(1) => Some(ExportSource::Machine(name)),
            Some(2) => Some(ExportSource::Snapshot(name)),
            _ => None,
        }
    }

    /// How long it lives.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        let given = self.ttl_duration.as_deref().and_then(duration::parse);
        given.unwrap_or(TTL).min(MAX_TTL)
    }

    /// Every cause to refuse this specification, below `path` (`spec`).
    #[must_use]
    pub fn validate(&self, path: &FieldPath) -> Vec<Cause> {
        let mut causes = Causes::default();
        let none = ObjectReference::default();
        let source = self.source.as_ref().unwrap_or(&none);
        validate_source(source, &path.child("source"), &mut causes);
        if let Some(name) = &self.token_secret_ref
            && !is_dns_subdomain(name)
        {
            let given = shown(name);
            causes.invalid(
                &path.child("tokenSecretRef"),
                format_args!("is {given}, not the name of a Secret"),
            );
        }
        if let Some(text) = &self.ttl_duration {
            let field = path.child("ttlDuration");
            match duration::parse(text) {
                None => {
                    let given = shown(text);
                    causes.invalid(
                        &field,
                        format_args!("is {given}, not a duration such as 2h"),
                    );
                }
                Some(ttl) if ttl > MAX_TTL => {
                    causes.invalid(&field, "is longer than 100 years");
                }
                Some(_) => {}
            }
        }
        causes.into_vec()
    }

    /// Every cause to refuse a change, below `path` (`spec`).
    #[must_use]
    pub fn validate_update(&self, old: &Self, path: &FieldPath) -> Vec<Cause> {
        immutable(self == old, path)
    }
}

fn validate_source(source: &ObjectReference, path: &FieldPath, causes: &mut Causes) {
    let group = source.api_group.as_deref().unwrap_or_default();
    let kind = path.child("kind");
    match KINDS.iter().find(|(_, kind)| *kind == source.kind) {
        _ if source.kind.is_empty() => causes.required(&kind, "is required"),
        None => {
            let given = shown(&source.kind);
            let known = KINDS.map(|(_, kind)| kind).join(", ");
            causes.invalid(&kind, format_args!("is {given}, not one of {known}"));
        }
        Some((of_kind, _)) if *of_kind != group => {
            let (given, wanted) = (shown(group), shown(of_kind));
            causes.invalid(
                &path.child("apiGroup"),
                format_args!("is {given}: the group of {} is {wanted}", source.kind),
            );
        }
        Some(_) => {}
    }
    let name = path.child("name");
    if source.name.is_empty() {
        causes.required(&name, "is required");
    } else if !is_dns_subdomain(&source.name) {
        let given = shown(&source.name);
        causes.invalid(&name, format_args!("is {given}, not the name of an object"));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn spec(spec: Value) -> ExportSpec {
        serde_json::from_value(spec).unwrap()
    }

    fn fields(given: Value) -> Vec<String> {
        let causes = spec(given).validate(&FieldPath::new("spec"));
        causes.into_iter().map(|cause| cause.field).collect()
    }

    fn of(group: Value, kind: &str) -> Value {
        json!({ "source": { "apiGroup": group, "kind": kind, "name": "a" } })
    }

    #[test]
    fn claims_machines_and_snapshots_are_exported() {
        let snapshots = json!("snapshot.kubevirt.io");
        for (given, source) in [
            (
                of(json!(""), "PersistentVolumeClaim"),
                ExportSource::Claim("a"),
            ),
            (
                of(Value::Null, "PersistentVolumeClaim"),
                ExportSource::Claim("a"),
            ),
            (
                of(json!("kubevirt.io"), "VirtualMachine"),
                ExportSource::Machine("a"),
            ),
            (
                of(snapshots, "VirtualMachineSnapshot"),
                ExportSource::Snapshot("a"),
            ),
        ] {
            assert_eq!(spec(given.clone()).source(), Some(source), "{given}");
            assert_eq!(fields(given), [""; 0]);
        }
    }

    #[test]
    fn what_cannot_be_exported_is_refused_by_its_path() {
        for (given, field) in [
            (of(json!(""), "Pod"), "spec.source.kind"),
            (of(json!(""), ""), "spec.source.kind"),
            (of(json!(""), "VirtualMachine"), "spec.source.apiGroup"),
            (
                of(json!("kubevirt.io"), "PersistentVolumeClaim"),
                "spec.source.apiGroup",
            ),
        ] {
            assert_eq!(spec(given.clone()).source(), None, "{given}");
            assert_eq!(fields(given), [field]);
        }
        assert_eq!(fields(json!({})), ["spec.source.kind", "spec.source.name"]);
        let wrong = json!({
            "source": { "kind": "PersistentVolumeClaim", "name": "../a" },
            "tokenSecretRef": "A b", "ttlDuration": "soon",
        });
        let expected = [
            "spec.source.name",
            "spec.tokenSecretRef",
            "spec.ttlDuration",
        ];
        assert_eq!(fields(wrong), expected);
    }

    #[test]
    fn an_export_lives_for_two_hours_unless_it_says_how_long() {
        let ttl = |text: &str| spec(json!({ "ttlDuration": text })).ttl();
        assert_eq!(spec(json!({})).ttl(), Duration::from_secs(7200));
        assert_eq!(ttl("1m30s"), Duration::from_secs(90));
        assert_eq!(ttl("never"), TTL);
        assert_eq!(ttl("900000h"), MAX_TTL);
        let mut long = of(json!(""), "PersistentVolumeClaim");
        long["ttlDuration"] = json!("900000h");
        assert_eq!(fields(long), ["spec.ttlDuration"]);
    }

    #[test]
    fn an_export_is_of_one_source_for_all_its_life() {
        let old = spec(of(json!(""), "PersistentVolumeClaim"));
        let path = FieldPath::new("spec");
        assert!(old.validate_update(&old, &path).is_empty());
        let mut new = old.clone();
        new.token_secret_ref = Some("other".to_owned());
        assert_eq!(new.validate_update(&old, &path)[0].field, "spec");
    }
}
