//! The disruption budget of an instance whose pod may not be evicted: the VM moves instead.
//!
//! Evictions are answered by a webhook; the budget keeps the pod where that is not asked. While the
//! VM moves it has two pods, and both are kept.

use std::collections::BTreeMap;

use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::controller::names;
use crate::objects::{
    COMPONENT_LABEL, CREATED_BY_LABEL, LAUNCHER, VirtualMachineInstance, is_true,
};

/// What has to be done about a budget.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Change {
    /// Make it, or write it anew.
    Write(Box<PodDisruptionBudget>),
    /// Delete it.
    Delete,
}

/// Returns the name of an instance's budget.
#[must_use]
pub(super) fn name(vmi: &VirtualMachineInstance) -> String {
    let uid = vmi.metadata.uid.as_deref().unwrap_or_default();
    format!("kubevirt-disruption-budget-{}", names::hash(uid))
}

/// Returns what has to be done about the budget of an instance with so many pods that are needed.
#[must_use]
pub(super) fn change(
    vmi: &VirtualMachineInstance,
    pods: usize,
    found: Option<&PodDisruptionBudget>,
) -> Option<Change> {
    let strategy = vmi.spec.get("evictionStrategy");
    let migratable = is_true(&vmi.status.conditions, "LiveMigratable");
    let keeps = match strategy.and_then(|strategy| strategy.as_str()) {
        Some("LiveMigrate" | "External") => true,
        Some("LiveMigrateIfPossible") => migratable,
        _ => false,
    };
    let over = vmi.status.phase.is_final() || vmi.metadata.deletion_timestamp.is_some();
    if !keeps || over {
        return found.map(|_| Change::Delete);
    }
    let wanted = IntOrString::Int(if pods > 1 { 2 } else { 1 });
    let written = found.and_then(|found| found.spec.as_ref()?.min_available.as_ref());
    if written == Some(&wanted) {
        return None;
    }
    let mut budget = found.cloned().unwrap_or_else(|| new(vmi));
    budget.spec.get_or_insert_default().min_available = Some(wanted);
    budget.status = None;
    Some(Change::Write(Box::new(budget)))
}

fn new(vmi: &VirtualMachineInstance) -> PodDisruptionBudget {
    let uid = vmi.metadata.uid.clone().unwrap_or_default();
    let owner = OwnerReference {
        api_version: vmi.api_version.clone(),
        kind: vmi.kind.clone(),
        name: vmi.metadata.name.clone().unwrap_or_default(),
        uid: uid.clone(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    };
    let labels: BTreeMap<_, _> = [(COMPONENT_LABEL.to_owned(), LAUNCHER.to_owned())].into();
    PodDisruptionBudget {
        metadata: ObjectMeta {
            name: Some(name(vmi)),
            namespace: vmi.metadata.namespace.clone(),
            labels: Some(labels),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        spec: Some(PodDisruptionBudgetSpec {
            selector: Some(LabelSelector {
                match_labels: Some([(CREATED_BY_LABEL.to_owned(), uid)].into()),
                ..LabelSelector::default()
            }),
            ..PodDisruptionBudgetSpec::default()
        }),
        status: None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vmi(strategy: &str, migratable: &str, phase: &str) -> VirtualMachineInstance {
        serde_json::from_value(json!({
            "metadata": {"name": "a", "uid": "a"},
            "spec": {"evictionStrategy": strategy},
            "status": {
                "phase": phase,
                "conditions": [{"type": "LiveMigratable", "status": migratable}],
            },
        }))
        .unwrap()
    }

    fn available(change: Option<Change>) -> Option<i32> {
        match change? {
            Change::Write(budget) => match budget.spec?.min_available? {
                IntOrString::Int(count) => Some(count),
                IntOrString::String(_) => None,
            },
            Change::Delete => Some(0),
        }
    }

    #[test]
    fn one_pod_is_kept_and_both_while_the_vm_moves() {
        let vmi = vmi("LiveMigrate", "True", "Running");
        assert_eq!(available(change(&vmi, 1, None)), Some(1));
        assert_eq!(available(change(&vmi, 2, None)), Some(2));
        let Some(Change::Write(one)) = change(&vmi, 1, None) else {
            panic!("it is made");
        };
        assert_eq!(change(&vmi, 1, Some(&one)), None);
        assert_eq!(available(change(&vmi, 2, Some(&one))), Some(2));
    }

    #[test]
    fn what_may_be_evicted_or_has_ended_has_none() {
        let found = PodDisruptionBudget::default();
        for (strategy, migratable, phase, expected) in [
            ("", "True", "Running", Some(0)),
            ("LiveMigrateIfPossible", "False", "Running", Some(0)),
            ("LiveMigrateIfPossible", "True", "Running", Some(1)),
            ("External", "False", "Running", Some(1)),
            ("LiveMigrate", "False", "Running", Some(1)),
            ("LiveMigrate", "True", "Succeeded", Some(0)),
        ] {
            let vmi = vmi(strategy, migratable, phase);
            let done = available(change(&vmi, 1, Some(&found)));
            assert_eq!(done, expected, "{strategy} {migratable} {phase}");
        }
        assert_eq!(change(&vmi("", "True", "Running"), 1, None), None);
    }
}
