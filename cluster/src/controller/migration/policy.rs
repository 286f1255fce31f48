//! Policies: how the migrations of some VMs differ from the cluster's settings.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Namespace;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams};
use kube::{Api, Client};
use podvisor_cluster_types::migration::{MigrationPolicySpec, POLICY_GROUP, POLICY_VERSION};

use crate::controller::settings::{Decided, Settings};
use crate::objects::VirtualMachineInstance;

type Labels = BTreeMap<String, String>;

/// Returns the settings of an instance's migration, and the policy that they come from.
///
/// # Errors
///
/// The API server cannot be asked.
pub(super) async fn settings(
    client: &Client,
    vmi: &VirtualMachineInstance,
    of_cluster: &Settings,
) -> Result<(Settings, Option<String>), kube::Error> {
    let gvk = GroupVersionKind::gvk(POLICY_GROUP, POLICY_VERSION, "MigrationPolicy");
    let resource = ApiResource::from_gvk_with_plural(&gvk, "migrationpolicies");
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let found = api.list(&ListParams::default()).await?;
    let policies: Vec<_> = found
        .items
        .into_iter()
        .filter_map(|policy| {
            let spec = policy.data.get("spec")?.clone();
            Some((policy.metadata.name?, serde_json::from_value(spec).ok()?))
        })
        .collect();
    if policies.is_empty() {
        return Ok((of_cluster.clone(), None));
    }
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let namespace = vmi.metadata.namespace.as_deref().unwrap_or_default();
    let namespace = namespaces.get_opt(namespace).await?;
    let namespace = namespace.and_then(|namespace| namespace.metadata.labels);
    let labels = vmi.metadata.labels.clone().unwrap_or_default();
    let Some((name, spec)) = choose(&policies, &labels, &namespace.unwrap_or_default()) else {
        return Ok((of_cluster.clone(), None));
    };
    Ok((applied(spec, of_cluster), Some(name.to_owned())))
}

/// Returns the policy that fits best: by most labels, then by most of the VM's own, then the first
/// by name.
fn choose<'a>(
    policies: &'a [(String, MigrationPolicySpec)],
    of_vmi: &Labels,
    of_namespace: &Labels,
) -> Option<(&'a str, &'a MigrationPolicySpec)> {
    let fits = |wanted: &Labels, labels: &Labels| {
        wanted
            .iter()
            .all(|(name, value)| labels.get(name) == Some(value))
    };
    policies
        .iter()
        .filter_map(|(name, spec)| {
            let selectors = spec.selectors.as_ref()?;
            let own = &selectors.virtual_machine_instance_selector;
            let around = &selectors.namespace_selector;
            let count = own.len() + around.len();
            let does = count > 0 && fits(own, of_vmi) && fits(around, of_namespace);
            does.then_some((std::cmp::Reverse((count, own.len())), name.as_str(), spec))
        })
        .min_by_key(|(rank, name, _)| (*rank, *name))
        .map(|(_, name, spec)| (name, spec))
}

fn applied(spec: &MigrationPolicySpec, of_cluster: &Settings) -> Settings {
    of_cluster.with(&Decided {
        bandwidth: spec.bandwidth_per_migration.as_ref(),
        completion_timeout: spec.completion_timeout_per_gi_b,
        auto_converge: spec.allow_auto_converge,
        workload_disruption: spec.allow_workload_disruption,
        ..Decided::default()
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn policy(name: &str, own: Value, around: Value) -> (String, MigrationPolicySpec) {
        let spec = json!({"selectors": {
            "virtualMachineInstanceSelector": own, "namespaceSelector": around,
        }});
        (name.to_owned(), serde_json::from_value(spec).unwrap())
    }

    fn chosen(policies: &[(String, MigrationPolicySpec)]) -> Option<&str> {
        let of = |labels: Value| -> Labels { serde_json::from_value(labels).unwrap() };
        let vmi = of(json!({"app": "db", "tier": "1"}));
        let namespace = of(json!({"team": "x", "zone": "z"}));
        choose(policies, &vmi, &namespace).map(|(name, _)| name)
    }

    #[test]
    fn the_most_specific_policy_that_fits_is_chosen() {
        let wide = policy("wide", json!({}), json!({"team": "x"}));
        let none = policy(
            "none",
            json!({"app": "web"}),
            json!({"team": "x", "zone": "z"}),
        );
        let all = policy("all", json!({}), json!({}));
        assert_eq!(chosen(&[wide.clone(), none.clone(), all]), Some("wide"));
        let own = policy("own", json!({"app": "db"}), json!({}));
        assert_eq!(
            chosen(&[wide.clone(), own.clone()]),
            Some("own"),
            "labels of the VM"
        );
        let both = policy("both", json!({}), json!({"team": "x", "zone": "z"}));
        assert_eq!(chosen(&[wide, own.clone(), both, none]), Some("both"));
        let first = policy("a", json!({"tier": "1"}), json!({}));
        assert_eq!(chosen(&[own, first]), Some("a"), "by name");
    }

    #[test]
    fn a_policy_changes_what_it_names() {
        let spec = json!({
            "bandwidthPerMigration": "64Mi", "allowWorkloadDisruption": true,
            "allowAutoConverge": true,
        });
        let spec: MigrationPolicySpec = serde_json::from_value(spec).unwrap();
        let found = applied(&spec, &Settings::default());
        assert_eq!(found.bandwidth_per_migration, 64 << 20);
        assert_eq!(found.completion_timeout_per_gi_b, 150);
        assert!(found.allow_workload_disruption && found.allow_auto_converge);
    }
}
