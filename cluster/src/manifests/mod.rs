//! What `podvisor-cluster install` prints: everything that a cluster needs, as one List.
//!
//! The List is JSON, which `kubectl` takes as it takes YAML. Nothing is asked of the cluster: the
//! same options print the same text.

mod crds;
mod policy;
mod rbac;
mod schema;
mod webhooks;
mod workloads;

use serde_json::{Value, json};

use crate::installation::IMAGE;
pub use crds::{GROUP, VERSIONS, crds};
pub use policy::{ANNOTATION, RUNTIME_CLASS, policies};
pub use webhooks::{api_services, webhooks};

/// What the subcommand takes from its command line.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct Options {
    /// Namespace that the components run in.
    #[arg(long, default_value = "podvisor")]
    pub namespace: String,
    /// Image of the components.
    #[arg(long, default_value = IMAGE)]
    pub image: String,
    /// How many of each component.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=9))]
    pub replicas: u32,
    /// Only the CustomResourceDefinitions.
    #[arg(long)]
    pub crds_only: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            namespace: "podvisor".to_owned(),
            image: IMAGE.to_owned(),
            replicas: 2,
            crds_only: false,
        }
    }
}

/// The manifests as one List object, in the order in which they are applied.
#[must_use]
pub fn install(options: &Options) -> Value {
    let mut items = crds();
    if !options.crds_only {
        items.push(json!({
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": { "name": options.namespace },
        }));
        items.extend(rbac::rbac(options));
        items.extend(policies(&options.namespace));
        items.extend(workloads::workloads(options));
        items.extend(webhooks());
        items.extend(api_services(&options.namespace));
    }
    json!({ "apiVersion": "v1", "kind": "List", "items": items })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_object_has_a_version_a_kind_and_a_name_of_its_own() {
        let list = install(&Options::default());
        let mut seen = std::collections::BTreeSet::new();
        for item in list["items"].as_array().unwrap() {
            let text = |pointer: &str| item.pointer(pointer).and_then(Value::as_str).unwrap();
            let name = (text("/apiVersion"), text("/kind"), text("/metadata/name"));
            assert!(seen.insert(name), "{name:?} is there twice");
        }
    }

    #[test]
    fn no_component_is_privileged_and_none_reads_secrets_of_others() {
        let list = install(&Options::default()).to_string();
        assert!(!list.contains("\"privileged\":true") && !list.contains("hostNetwork"));
        for item in install(&Options::default())["items"].as_array().unwrap() {
            if item["kind"] != "ClusterRole" {
                continue;
            }
            for rule in item["rules"].as_array().unwrap() {
                let has = |list: &str, word: &str| {
                    rule[list]
                        .as_array()
                        .is_some_and(|list| list.iter().any(|w| w == word))
                };
                let makes = json!(["create"]);
                assert!(
                    !has("resources", "secrets") || rule["verbs"] == makes,
                    "{item}"
                );
                assert!(!has("resources", "*") && !has("verbs", "*") && !has("apiGroups", "*"));
            }
        }
    }

    #[test]
    fn the_namespace_of_the_options_is_everywhere() {
        let options = Options {
            namespace: "elsewhere".to_owned(),
            ..Default::default()
        };
        let text = install(&options).to_string();
        assert!(!text.contains("\"namespace\":\"podvisor\""));
        assert!(text.contains("\"namespace\":\"elsewhere\""));
        assert!(text.contains("system:serviceaccount:elsewhere:podvisor-controller"));
    }
}
