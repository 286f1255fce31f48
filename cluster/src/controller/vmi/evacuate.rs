//! Migrations of instances that have to leave their node: a pure function of the instance and its
//! migrations, and the driver that makes them.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::PostParams;

use crate::controller::error::{Error, code};
use crate::controller::{Context, names};
use crate::objects::{
    EVACUATION_ANNOTATION, MIGRATION_FINALIZER, MigrationPhase, MigrationSpec, Phase,
    VirtualMachineInstance, VirtualMachineInstanceMigration, is_true,
};

/// The wait after the first failure; it doubles with each.
const FIRST_WAIT: u64 = 20;
const LONGEST_WAIT: u64 = 600;

/// What an instance needs.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Need {
    Nothing,
    /// Look again then: an evacuation has failed.
    Wait(Duration),
    /// A migration of this name.
    Migration(String),
}

/// Makes the migration of an instance that has to leave its node; returns when to look again.
pub(super) async fn evacuate(
    vmi: &VirtualMachineInstance,
    context: &Context,
) -> Result<Option<Duration>, Error> {
    let drained = context.world.is_drained(&vmi.status.node_name);
    if vmi.status.evacuation_node_name.is_empty() && !drained {
        return Ok(None);
    }
    let migrations = context.world.migrations_of(vmi);
    let migrations: Vec<_> = migrations.iter().map(|migration| &**migration).collect();
    match need(vmi, &migrations, drained, &Time(Timestamp::now())) {
        Need::Nothing => Ok(None),
        Need::Wait(wait) => Ok(Some(wait)),
        Need::Migration(name) => {
            make(vmi, name, context).await?;
            Ok(None)
        }
    }
}

async fn make(vmi: &VirtualMachineInstance, name: String, context: &Context) -> Result<(), Error> {
    let namespace = vmi.metadata.namespace.as_deref().unwrap_or_default();
    let api: Api<VirtualMachineInstanceMigration> = context.world.api(namespace);
    let node = vmi.status.node_name.clone();
    let vmi_name = vmi.metadata.name.clone().unwrap_or_default();
    let metadata = ObjectMeta {
        name: Some(name),
        namespace: vmi.metadata.namespace.clone(),
        annotations: Some([(EVACUATION_ANNOTATION.to_owned(), node.clone())].into()),
        labels: Some([("kubevirt.io/vmi-name".to_owned(), vmi_name.clone())].into()),
        finalizers: Some(vec![MIGRATION_FINALIZER.to_owned()]),
        ..ObjectMeta::default()
    };
    let spec = MigrationSpec {
        vmi_name,
        priority: Some("system-critical".to_owned()),
        ..MigrationSpec::default()
    };
    let migration = VirtualMachineInstanceMigration::new(metadata, spec);
    match api.create(&PostParams::default(), &migration).await {
        Ok(_) => {
            let note = format!("Has to leave {node}");
            context
                .event(vmi, "SuccessfulEvict", "Evacuate", note)
                .await;
            Ok(())
        }
        // It is there, or another one goes on: both lead to the next look.
        Err(error) if code(&error) == Some(409) => Ok(()),
        Err(error) => {
            let note = format!("Cannot leave {node}: {error}");
            context.warn(vmi, "FailedEvict", "Evacuate", note).await;
            Err(Error::request("make an evacuation of", vmi, error))
        }
    }
}

fn need(
    vmi: &VirtualMachineInstance,
    migrations: &[&VirtualMachineInstanceMigration],
    drained: bool,
    now: &Time,
) -> Need {
    let status = &vmi.status;
    let strategy = vmi.spec.get("evictionStrategy");
    let strategy = strategy.and_then(|strategy| strategy.as_str());
    // With External, somebody else moves it.
    let moves = matches!(strategy, Some("LiveMigrate" | "LiveMigrateIfPossible"));
    let has_to = drained || status.evacuation_node_name == status.node_name;
    let may = status.phase == Phase::Running
        && !status.node_name.is_empty()
        && vmi.metadata.deletion_timestamp.is_none()
        && is_true(&status.conditions, "LiveMigratable");
    if !moves || !has_to || !may || migrations.iter().any(|one| !one.status.phase.is_final()) {
        return Need::Nothing;
    }
    // What was done of this kind before, from this node, since it came here.
    let mut before: Vec<_> = migrations
        .iter()
        .filter(|one| {
            let annotations = one.metadata.annotations.as_ref();
            let from = annotations.and_then(|all| all.get(EVACUATION_ANNOTATION));
            from == Some(&status.node_name)
        })
        .collect();
    before.sort_by_key(|one| one.metadata.creation_timestamp.as_ref().map(|time| time.0));
    let failed = before
        .iter()
        .rev()
        .take_while(|one| one.status.phase == MigrationPhase::Failed)
        .count();
    if let Some(last) = before.last().filter(|_| failed > 0) {
        let ended = last
            .status
            .phase_transition_timestamps
            .iter()
            .find(|passed| passed.phase == MigrationPhase::Failed)
            .and_then(|passed| passed.phase_transition_timestamp.clone());
        let exponent = u32::try_from(failed - 1).unwrap_or(u32::MAX).min(16);
        let wait = FIRST_WAIT.saturating_mul(1 << exponent).min(LONGEST_WAIT);
        let passed = ended.map_or(i64::MAX, |ended| now.0.as_second() - ended.0.as_second());
        let passed = u64::try_from(passed).unwrap_or_default();
        if passed < wait {
            return Need::Wait(Duration::from_secs(wait - passed));
        }
    }
    // Named after what came before: no attempt is made twice.
    let last = before.last().and_then(|one| one.metadata.uid.as_deref());
    let of = [
        vmi.metadata.uid.as_deref().unwrap_or_default(),
        &status.node_name,
        last.unwrap_or_default(),
    ];
    Need::Migration(format!(
        "kubevirt-evacuation-{}",
        names::hash(&of.join(" "))
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn at(second: i64) -> Time {
        Time(Timestamp::from_second(1_000_000 + second).unwrap())
    }

    fn vmi(marked: bool, strategy: &str, migratable: &str) -> VirtualMachineInstance {
        let mark = if marked { "n" } else { "" };
        serde_json::from_value(json!({
            "metadata": {"name": "a", "uid": "a"},
            "spec": {"evictionStrategy": strategy},
            "status": {
                "phase": "Running",
                "nodeName": "n",
                "evacuationNodeName": mark,
                "conditions": [{"type": "LiveMigratable", "status": migratable}],
            },
        }))
        .unwrap()
    }

    fn before(uid: &str, phase: &str, second: i64) -> VirtualMachineInstanceMigration {
        serde_json::from_value(json!({
            "metadata": {
                "name": uid, "uid": uid, "creationTimestamp": at(second),
                "annotations": {EVACUATION_ANNOTATION: "n"},
            },
            "spec": {"vmiName": "a"},
            "status": {"phase": phase, "phaseTransitionTimestamps": [
                {"phase": phase, "phaseTransitionTimestamp": at(second)},
            ]},
        }))
        .unwrap()
    }

    fn is_made(need: &Need) -> bool {
        matches!(need, Need::Migration(_))
    }

    #[test]
    fn what_is_marked_or_drained_and_can_move_gets_a_migration() {
        for (marked, drained, strategy, migratable, expected) in [
            (true, false, "LiveMigrate", "True", true),
            (false, true, "LiveMigrateIfPossible", "True", true),
            (false, false, "LiveMigrate", "True", false),
            (true, false, "LiveMigrate", "False", false),
            (true, false, "External", "True", false),
            (false, true, "None", "True", false),
        ] {
            let found = need(&vmi(marked, strategy, migratable), &[], drained, &at(0));
            assert_eq!(
                is_made(&found),
                expected,
                "{marked} {drained} {strategy} {migratable}"
            );
        }
    }

    #[test]
    fn one_migration_at_a_time_and_each_failure_doubles_the_wait() {
        let vmi = vmi(true, "LiveMigrate", "True");
        let runs = before("m", "Running", 0);
        assert_eq!(need(&vmi, &[&runs], false, &at(0)), Need::Nothing);
        let first = before("m", "Failed", 0);
        let wait = |seconds| Need::Wait(Duration::from_secs(seconds));
        assert_eq!(need(&vmi, &[&first], false, &at(5)), wait(15));
        let again = need(&vmi, &[&first], false, &at(20));
        assert!(is_made(&again));
        assert_ne!(again, need(&vmi, &[], false, &at(20)), "its name is taken");
        let second = before("k", "Failed", 30);
        assert_eq!(need(&vmi, &[&second, &first], false, &at(30)), wait(40));
        let well = before("w", "Succeeded", 90);
        assert!(is_made(&need(
            &vmi,
            &[&first, &second, &well],
            false,
            &at(91)
        )));
    }
}
