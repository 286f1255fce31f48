//! Copies of virtual machines: the group `clone.kubevirt.io`.

use std::collections::BTreeMap;

use crate::{
    Cause, Causes, FieldPath,
    cause::shown,
    snapshot::{ObjectReference, immutable, validate_patches},
};

/// The group.
pub const GROUP: &str = "clone.kubevirt.io";

/// The served versions, the stored one first; they differ in nothing.
pub const VERSIONS: [&str; 2] = ["v1beta1", "v1alpha1"];

object! {
    /// What is copied, and what differs in the copy (`spec`).
    pub struct CloneSpec {
        /// A VirtualMachine, or a VirtualMachineSnapshot.
        pub source: Option<ObjectReference>,
        /// The virtual machine that is made; its name is chosen where it is missing.
        pub target: Option<ObjectReference>,
        /// Which annotations the copy has; all without a filter.
        pub annotation_filters: Vec<String>,
        /// Which labels the copy has; all without a filter.
        pub label_filters: Vec<String>,
        /// The same of its template.
        pub template: Option<CloneFilters>,
        /// MAC addresses of the copy, by the names of its interfaces.
        pub new_mac_addresses: BTreeMap<String, String>,
        /// The serial number of the copy's firmware.
        #[serde(rename = "newSMBiosSerial")]
        pub new_sm_bios_serial: Option<String>,
        /// JSON patches of the copy.
        pub patches: Vec<String>,
        /// How the copy's claims are called: `RandomizeNames` or `PrefixTargetName`.
        pub volume_name_policy: Option<String>,
    }

    /// Which labels and annotations a template has.
    pub struct CloneFilters {
        /// Annotations.
        pub annotation_filters: Vec<String>,
        /// Labels.
        pub label_filters: Vec<String>,
    }
}

/// What is copied.
const SOURCES: [(&str, &str); 2] = [
    ("kubevirt.io", "VirtualMachine"),
    (crate::snapshot::GROUP, "VirtualMachineSnapshot"),
];

impl CloneSpec {
    /// Every cause to refuse this specification, below `path` (`spec`).
    #[must_use]
    pub fn validate(&self, path: &FieldPath) -> Vec<Cause> {
        let mut causes = Causes::default();
        let source = self.source.clone().unwrap_or_default();
        source.validate(&path.child("source"), &SOURCES, &mut causes);
        if let Some(target) = &self.target {
            let path = path.child("target");
            target.validate(&path, &SOURCES[..1], &mut causes);
            if source.is_vm()
                && target.is_vm()
                && target.name == source.name
                && !target.name.is_empty()
            {
                causes.invalid(&path.child("name"), "is the source's: choose another");
            }
        }
        let none = CloneFilters::default();
        let template = self.template.as_ref().unwrap_or(&none);
        for (field, filters) in [
            ("annotationFilters", &self.annotation_filters),
            ("labelFilters", &self.label_filters),
            ("template.annotationFilters", &template.annotation_filters),
            ("template.labelFilters", &template.label_filters),
        ] {
            let path = path.child(field);
            for (index, filter) in filters.iter().enumerate() {
                if !is_filter(filter) {
                    let given = shown(filter);
                    let path = path.index(index);
                    let rule = "a name, in which * stands for any text, with ! before it at most";
                    causes.invalid(&path, format_args!("is {given}, not {rule}"));
                }
            }
        }
        for (name, address) in &self.new_mac_addresses {
            if !is_mac(address) {
                let given = shown(address);
                let path = path.child("newMacAddresses").child(name);
                causes.invalid(&path, format_args!("is {given}, not a MAC address"));
            }
        }
        validate_patches(&self.patches, &path.child("patches"), &mut causes);
        if let Some(policy) = &self.volume_name_policy {
            let known = ["RandomizeNames", "PrefixTargetName"];
            causes.one_of(&path.child("volumeNamePolicy"), policy, &known);
        }
        causes.into_vec()
    }

    /// Every cause to refuse a change, below `path` (`spec`).
    #[must_use]
    pub fn validate_update(&self, old: &Self, path: &FieldPath) -> Vec<Cause> {
        immutable(self == old, path)
    }
}

/// No key is longer: a subdomain, a slash and a name.
const MAX_FILTER: usize = 253 + 1 + 63;

fn is_filter(filter: &str) -> bool {
    let name = filter.strip_prefix('!').unwrap_or(filter);
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./*".contains(c);
    (1..=MAX_FILTER).contains(&name.len()) && name.chars().all(is_plain)
}

fn is_mac(address: &str) -> bool {
    let separator = if address.contains('-') { '-' } else { ':' };
    let parts: Vec<&str> = address.split(separator).collect();
    let is_byte = |part: &&str| part.len() == 2 && part.chars().all(|c| c.is_ascii_hexdigit());
    parts.len() == 6 && parts.iter().all(is_byte)
}

/// Whether a key is what a filter says, in which `*` stands for any text.
fn fits(filter: &str, key: &str) -> bool {
    let Some((first, rest)) = filter.split_once('*') else {
        return key == filter;
    };
    let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    let left = key.strip_prefix(first);
    let Some(mut left) = left.and_then(|left| left.strip_suffix(last)) else {
        return false;
    };
    // The first place that fits leaves the most for the others.
    middle.split('*').all(|part| match left.split_once(part) {
        Some((_, after)) => {
            left = after;
            true
        }
        None => false,
    })
}

/// Whether filters let a key pass: one has to, and none that begins with `!`. Without any filter
/// all pass.
#[must_use]
pub fn passes(filters: &[String], key: &str) -> bool {
    let fits = |filter: &str| fits(filter, key);
    let refused = filters.iter().filter_map(|filter| filter.strip_prefix('!'));
    let mut taken = filters.iter().filter(|filter| !filter.starts_with('!'));
    filters.is_empty() || taken.any(|filter| fits(filter)) && !refused.into_iter().any(fits)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn fields(spec: Value) -> Vec<String> {
        let spec: CloneSpec = serde_json::from_value(spec).unwrap();
        let causes = spec.validate(&FieldPath::new("spec"));
        causes.into_iter().map(|cause| cause.field).collect()
    }

    fn vm(name: &str) -> Value {
        json!({ "apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": name })
    }

    #[test]
    fn machines_and_snapshots_are_copied_to_other_machines() {
        let none: [&str; 0] = [];
        assert_eq!(fields(json!({ "source": vm("a") })), none);
        assert_eq!(
            fields(json!({ "source": vm("a"), "target": vm("b") })),
            none
        );
        let snapshot = json!({
            "apiGroup": "snapshot.kubevirt.io", "kind": "VirtualMachineSnapshot", "name": "a",
        });
        assert_eq!(
            fields(json!({ "source": snapshot, "target": vm("a") })),
            none
        );
        let same = json!({ "source": vm("a"), "target": vm("a") });
        assert_eq!(fields(same), ["spec.target.name"]);
        let wrong = json!({ "source": vm("a"), "target": snapshot });
        assert_eq!(fields(wrong), ["spec.target.apiGroup"]);
        let mixed = json!({ "source": {
            "apiGroup": "kubevirt.io", "kind": "VirtualMachineSnapshot", "name": "a",
        } });
        assert_eq!(fields(mixed), ["spec.source.kind"]);
    }

    #[test]
    fn what_cannot_be_changed_in_a_copy_is_refused_by_its_path() {
        let spec = json!({
            "source": vm("a"),
            "labelFilters": ["*", "a/b*", "!c", "!x*y", "x y", "!!a"],
            "template": { "annotationFilters": ["!"] },
            "newMacAddresses": { "default": "00:11", "other": "00-11-22-33-44-5f" },
            "patches": ["{}"],
            "volumeNamePolicy": "Same",
        });
        let found = fields(spec);
        let expected = [
            "spec.labelFilters[4]",
            "spec.labelFilters[5]",
            "spec.template.annotationFilters[0]",
            "spec.newMacAddresses.default",
            "spec.patches[0].op",
            "spec.patches[0].path",
            "spec.volumeNamePolicy",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn filters_that_refuse_come_before_those_that_take() {
        let passes = |filters: &[&str], key: &str| {
            let filters: Vec<String> = filters.iter().map(|&text| text.to_owned()).collect();
            super::passes(&filters, key)
        };
        assert!(passes(&[], "a"));
        assert!(passes(&["*"], "a"));
        assert!(passes(&["*", "!a"], "b") && !passes(&["*", "!a"], "a"));
        assert!(passes(&["some/*"], "some/key") && !passes(&["some/*"], "other"));
        assert!(!passes(&["!a"], "b"), "nothing takes it");
        for (filter, key, fits) in [
            ("*/app", "example.com/app", true),
            ("*/app", "app", false),
            ("a*b*c", "a-b-c", true),
            ("a*b*c", "a-c", false),
            ("a*b*c", "abbc", true),
            ("ab*b", "ab", false),
            ("*a*a*", "banana", true),
            ("*a*a*a*a*", "banana", false),
            ("**", "", true),
        ] {
            assert_eq!(passes(&[filter], key), fits, "{filter} {key}");
        }
        assert!(!passes(&["*", "!*.io/*"], "kubevirt.io/x") && passes(&["*", "!*.io/*"], "x"));
    }
}
