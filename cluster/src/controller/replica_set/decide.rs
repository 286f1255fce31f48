//! Which instances a replica set makes and deletes: a pure function of what was observed.
//!
//! An instance has a place, a number from 0 on that gives its name. What is missing is made at
//! the first free places: a controller that sees too little makes what is already there, which
//! the API server refuses.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use podvisor_cluster_types::replica_set::LabelSelector;

use crate::controller::names;
use crate::objects::{
    Condition, Phase, ReplicaSetStatus, VirtualMachineInstance, VirtualMachineInstanceReplicaSet,
    clear_condition, is_true, set_condition,
};

/// So many instances are made or deleted at a time; then it is looked again.
const AT_ONCE: usize = 50;

/// More instances than this of one set are a mistake.
const MOST: i32 = 10_000;

/// What is to be written and done.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Decision {
    /// The status to write, if it differs.
    pub status: ReplicaSetStatus,
    /// The names of instances to make.
    pub create: Vec<String>,
    /// The names and unique ids of instances to delete.
    pub delete: Vec<(String, String)>,
}

/// Decides; `owned` are the instances that the set has made.
#[must_use]
pub fn decide(
    set: &VirtualMachineInstanceReplicaSet,
    owned: &[Arc<VirtualMachineInstance>],
    now: &Time,
) -> Decision {
    let mut decision = Decision {
        status: set.status.clone(),
        ..Decision::default()
    };
    let lives = |vmi: &&Arc<VirtualMachineInstance>| {
        vmi.metadata.deletion_timestamp.is_none() && !vmi.status.phase.is_final()
    };
    let mut living: Vec<_> = owned.iter().filter(lives).collect();
    let ready = living
        .iter()
        .filter(|vmi| is_true(&vmi.status.conditions, "Ready"));
    decision.status.ready_replicas = i32::try_from(ready.count()).unwrap_or(i32::MAX);
    decision.status.replicas = i32::try_from(living.len()).unwrap_or(i32::MAX);
    decision.status.label_selector = text(&set.spec.selector);
    let conditions = &mut decision.status.conditions;
    if set.spec.paused {
        let paused = Condition {
            reason: "Paused".to_owned(),
            ..Condition::yes("ReplicaPaused")
        };
        set_condition(conditions, paused, now);
    } else {
        clear_condition(conditions, "ReplicaPaused");
    }
    // What it has made goes with it: that is the work of Kubernetes' garbage collector.
    if set.spec.paused || set.metadata.deletion_timestamp.is_some() {
        return decision;
    }
    let wanted = usize::try_from(set.spec.replicas.unwrap_or(1).clamp(0, MOST)).unwrap_or(0);
    let ended = owned
        .iter()
        .filter(|vmi| vmi.metadata.deletion_timestamp.is_none() && vmi.status.phase.is_final());
    decision.delete.extend(ended.filter_map(reference));
    if living.len() > wanted {
        living.sort_by_key(|vmi| (worth(vmi), vmi.metadata.name.clone()));
        let surplus = living.len() - wanted;
        let first = living.into_iter().take(surplus);
        decision.delete.extend(first.filter_map(reference));
    } else {
        let taken: BTreeSet<_> = owned
            .iter()
            .filter_map(|vmi| vmi.metadata.name.clone())
            .collect();
        let free = (0..)
            .map(|place| name(set, place))
            .filter(|name| !taken.contains(name));
        decision.create = free.take((wanted - living.len()).min(AT_ONCE)).collect();
    }
    decision.delete.truncate(AT_ONCE);
    decision
}

/// Returns the name of the instance at a place.
fn name(set: &VirtualMachineInstanceReplicaSet, place: u32) -> String {
    let uid = set.metadata.uid.as_deref().unwrap_or_default();
    let base = set.metadata.name.as_deref().unwrap_or_default();
    let room = 63 - 1 - names::HASH;
    let short: String = base.chars().take(room).collect();
    let short = short.trim_end_matches(['-', '.']);
    format!("{short}-{}", names::hash(&format!("{uid} {place}")))
}

fn reference(vmi: &Arc<VirtualMachineInstance>) -> Option<(String, String)> {
    Some((vmi.metadata.name.clone()?, vmi.metadata.uid.clone()?))
}

/// Of instances that are too many, those worth the least go first.
fn worth(vmi: &VirtualMachineInstance) -> (Phase, bool) {
    (vmi.status.phase, is_true(&vmi.status.conditions, "Ready"))
}

/// Returns a selector as `kubectl` writes it.
fn text(selector: &LabelSelector) -> String {
    let equal = selector
        .match_labels
        .iter()
        .map(|(key, value)| format!("{key}={value}"));
    let others = selector.match_expressions.iter().map(|requirement| {
        let (key, values) = (&requirement.key, requirement.values.join(","));
        match requirement.operator.as_str() {
            "In" => format!("{key} in ({values})"),
            "NotIn" => format!("{key} notin ({values})"),
            "DoesNotExist" => format!("!{key}"),
            _ => key.clone(),
        }
    });
    equal.chain(others).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;
    use serde_json::json;

    use super::*;

    fn set(replicas: i32) -> VirtualMachineInstanceReplicaSet {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstanceReplicaSet",
            "metadata": {"name": "web", "uid": "u"},
            "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": "web"}}},
        }))
        .unwrap()
    }

    fn vmi(name: &str, phase: Phase, ready: bool) -> Arc<VirtualMachineInstance> {
        let mut vmi = VirtualMachineInstance::default();
        vmi.metadata.name = Some(name.to_owned());
        vmi.metadata.uid = Some(format!("uid of {name}"));
        vmi.status.phase = phase;
        if ready {
            vmi.status.conditions.push(Condition::yes("Ready"));
        }
        Arc::new(vmi)
    }

    fn run(
        set: &VirtualMachineInstanceReplicaSet,
        owned: &[Arc<VirtualMachineInstance>],
    ) -> Decision {
        decide(set, owned, &Time(Timestamp::UNIX_EPOCH))
    }

    fn deleted(decision: &Decision) -> Vec<&str> {
        decision
            .delete
            .iter()
            .map(|(name, _)| name.as_str())
            .collect()
    }

    #[test]
    fn what_is_missing_is_made_at_the_first_free_places() {
        let set = set(3);
        let first = run(&set, &[]);
        assert_eq!(first.create.len(), 3);
        assert_eq!(
            run(&set, &[]).create,
            first.create,
            "whoever sees the same makes the same"
        );
        let second = vmi(&first.create[1], Phase::Running, true);
        let rest = run(&set, &[second]);
        assert_eq!(
            rest.create,
            [first.create[0].clone(), first.create[2].clone()]
        );
        assert_eq!((rest.status.replicas, rest.status.ready_replicas), (1, 1));
        assert_eq!(rest.status.label_selector, "app=web");
    }

    #[test]
    fn an_ended_instance_is_replaced_when_it_is_gone_at_the_latest() {
        let set = set(1);
        let place = run(&set, &[]).create[0].clone();
        let ended = vmi(&place, Phase::Failed, false);
        let decision = run(&set, &[ended]);
        assert_eq!(deleted(&decision), [&*place]);
        assert_eq!(decision.create.len(), 1);
        assert_ne!(decision.create[0], place, "its name is taken still");
    }

    #[test]
    fn of_too_many_those_that_are_not_ready_go_first() {
        let owned = [
            vmi("a", Phase::Running, true),
            vmi("b", Phase::Running, false),
            vmi("c", Phase::Scheduling, false),
        ];
        assert_eq!(deleted(&run(&set(2), &owned)), ["c"]);
        assert_eq!(deleted(&run(&set(1), &owned)), ["c", "b"]);
        assert_eq!(deleted(&run(&set(0), &owned)), ["c", "b", "a"]);
        assert_eq!(deleted(&run(&set(-1), &owned)).len(), 3);
    }

    #[test]
    fn a_paused_set_only_counts() {
        let mut set = set(5);
        set.spec.paused = true;
        let decision = run(&set, &[vmi("a", Phase::Running, true)]);
        assert!(decision.create.is_empty() && decision.delete.is_empty());
        assert!(is_true(&decision.status.conditions, "ReplicaPaused"));
        assert_eq!(decision.status.replicas, 1);
        set.spec.paused = false;
        set.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        assert!(run(&set, &[]).create.is_empty());
    }

    #[test]
    fn a_step_has_a_bound() {
        assert_eq!(run(&set(i32::MAX), &[]).create.len(), AT_ONCE);
    }

    #[test]
    fn selectors_are_written_as_kubectl_does() {
        let selector = serde_json::from_value(json!({
            "matchLabels": {"a": "1"},
            "matchExpressions": [
                {"key": "b", "operator": "In", "values": ["2", "3"]},
                {"key": "c", "operator": "Exists"},
                {"key": "d", "operator": "DoesNotExist"},
            ],
        }))
        .unwrap();
        assert_eq!(text(&selector), "a=1,b in (2,3),c,!d");
    }
}
