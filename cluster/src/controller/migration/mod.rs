//! VirtualMachineInstanceMigration → a pod on another node, and the VM in it.
//!
//! `decide` says what has to be done, `turn` when it is a migration's turn, and this file does what
//! was decided, by the two nodes. What is known of a migration is in three places, all of which
//! outlive a controller: its own status, the instance's `status.migrationState`, and the records of
//! the two nodes.

mod decide;
mod policy;
mod turn;

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::runtime::controller;
use serde_json::json;

pub use decide::{Action, Decision, Observed, Side, decide};
pub use turn::{Open, may_begin};

use super::error::{Error, code, is_gone};
use super::instances::is_of;
use super::nodes::{self, CallError, Seen, Subject};
use super::settings::Settings;
use super::{Context, expectations, patch, vmi};
use crate::contact::disks::PlugRequest;
use crate::contact::migration::{ExpectRequest, ResolveRequest, SendRequest};
use crate::objects::{
    Condition, MIGRATION_FINALIZER, MigrationPhase, MigrationState, MigrationStatus,
    VirtualMachineInstance, VirtualMachineInstanceMigration, clear_condition, set_condition,
};

/// The condition of a migration whose pod a quota does not admit.
const QUOTA: &str = "migrationRejectedByResourceQuota";

/// So many migrations of an instance are kept after their end.
const KEPT: usize = 5;

/// Everything that is known of a migration.
struct Facts {
    vmi: Option<Arc<VirtualMachineInstance>>,
    source: Option<Arc<Pod>>,
    target: Option<Arc<Pod>>,
    at_source: Seen,
    at_target: Seen,
    settings: Settings,
    policy: Option<String>,
}

/// Brings a migration one step nearer to its end.
pub(super) async fn reconcile(
    migration: Arc<VirtualMachineInstanceMigration>,
    context: Arc<Context>,
) -> Result<controller::Action, Error> {
    context.check().await?;
    let namespace = migration.metadata.namespace.as_deref().unwrap_or_default();
    let instance = context.world.instance(namespace, &migration.spec.vmi_name);
    let target = instance.as_ref().and_then(|vmi| {
        context
            .world
            .pod(namespace, &vmi::target_name(vmi, &migration))
    });
    if context
        .expectations
        .are_pending(&*migration, target.as_deref())
    {
        return Ok(controller::Action::requeue(expectations::LIMIT));
    }
    let mut facts = observe(&migration, instance, target, &context).await?;
    let uid = migration.metadata.uid.as_deref().unwrap_or_default();
    if migration.status.phase.is_final() {
        context.progress.set(uid, None);
        forget(&migration, &context).await?;
    } else if let Some(report) = facts.at_source.migration() {
        context.progress.set(uid, Some(report.clone()));
    }
    let mut decision = look(&migration, &facts, None, &context);
    if let Some(refused) = carry_out(&migration, &facts, &decision, &context).await? {
        // Unless it was done meanwhile, by a controller that was killed.
        (facts.at_source, facts.at_target) = ask(&migration, &facts, &context).await;
        decision = look(&migration, &facts, Some(refused), &context);
        write(&migration, &facts, &decision, &context).await?;
    }
    Ok(match decision.wait {
        Some(wait) => controller::Action::requeue(wait),
        None => controller::Action::await_change(),
    })
}

/// Deletes migrations of the same instance that ended before the last few.
async fn forget(
    migration: &VirtualMachineInstanceMigration,
    context: &Context,
) -> Result<(), Error> {
    let namespace = migration.metadata.namespace.as_deref().unwrap_or_default();
    let mut ended = context.world.migrations.state_filter(|other| {
        other.status.phase.is_final()
            && other.metadata.deletion_timestamp.is_none()
            && other.metadata.namespace == migration.metadata.namespace
            && other.spec.vmi_name == migration.spec.vmi_name
    });
    ended.sort_by_key(|other| {
        let created = other.metadata.creation_timestamp.as_ref();
        (created.map(|time| time.0), other.metadata.uid.clone())
    });
    let api: Api<VirtualMachineInstanceMigration> = context.world.api(namespace);
    let old = ended.len().saturating_sub(KEPT);
    for other in &ended[..old] {
        let params = DeleteParams::background().preconditions(Preconditions {
            uid: other.metadata.uid.clone(),
            resource_version: None,
        });
        let name = other.metadata.name.as_deref().unwrap_or_default();
        match api.delete(name, &params).await {
            Ok(_) => {}
            Err(error) if is_gone(&error) => {}
            Err(error) => return Err(Error::request("delete", &**other, error)),
        }
    }
    Ok(())
}

async fn observe(
    migration: &VirtualMachineInstanceMigration,
    instance: Option<Arc<VirtualMachineInstance>>,
    target: Option<Arc<Pod>>,
    context: &Context,
) -> Result<Facts, Error> {
    let namespace = migration.metadata.namespace.as_deref().unwrap_or_default();
    let pods: Api<Pod> = context.world.api(namespace);
    let api: Api<VirtualMachineInstance> = context.world.api(namespace);
    let is_final = migration.status.phase.is_final();
    let lookup = |what| move |source| Error::request(what, migration, source);
    // A migration ends but once: what is not seen is asked for.
    let instance = match instance {
        None if !is_final => api
            .get_opt(&migration.spec.vmi_name)
            .await
            .map_err(lookup("look for the instance of"))?
            .map(Arc::new),
        known => known,
    };
    let mut facts = Facts {
        vmi: instance,
        source: None,
        target: None,
        at_source: Seen::NotAsked,
        at_target: Seen::NotAsked,
        settings: context.settings().settings,
        policy: None,
    };
    let Some(instance) = facts.vmi.clone().filter(|_| !is_final) else {
        return Ok(facts);
    };
    let own = instance.status.migration_state.as_ref();
    let own = own.filter(|state| Some(&state.migration_uid) == migration.metadata.uid.as_ref());
    if let Some(settings) = own.and_then(|state| state.migration_configuration.clone()) {
        // As it began, so it goes on.
        facts.settings = serde_json::from_value(settings).unwrap_or(facts.settings);
    }
    if own.is_none() && decide::is_to_be_written(migration.status.phase) {
        (facts.settings, facts.policy) =
            policy::settings(context.world.client(), &instance, &facts.settings)
                .await
                .map_err(lookup("look for the policy of"))?;
    }
    let source = own.map_or_else(|| vmi::active_pod(&instance), |own| own.source_pod.clone());
    let find = async |name: &str, known: Option<Arc<Pod>>, expected: bool| {
        let pod = match known {
            None if expected => pods
                .get_opt(name)
                .await
                .map_err(lookup("look for a pod of"))?
                .map(Arc::new),
            known => known,
        };
        Ok::<_, Error>(pod.filter(|pod| is_of(pod, &instance)))
    };
    facts.source = find(&source, context.world.pod(namespace, &source), true).await?;
    let expected = migration.status.phase > MigrationPhase::Pending;
    facts.target = find(&vmi::target_name(&instance, migration), target, expected).await?;
    if decide::asks_nodes(migration.status.phase) {
        (facts.at_source, facts.at_target) = ask(migration, &facts, context).await;
    }
    Ok(facts)
}

/// Asks both nodes.
async fn ask(
    migration: &VirtualMachineInstanceMigration,
    facts: &Facts,
    context: &Context,
) -> (Seen, Seen) {
    let Some((subject, state)) = subject(migration, facts) else {
        return (Seen::NotAsked, Seen::NotAsked);
    };
    tokio::join!(
        context.nodes.see(&state.source_node, subject),
        context.nodes.see(&state.target_node, subject),
    )
}

fn subject<'a>(
    migration: &'a VirtualMachineInstanceMigration,
    facts: &'a Facts,
) -> Option<(Subject<'a>, &'a MigrationState)> {
    let vmi = facts.vmi.as_deref()?;
    let state = vmi.status.migration_state.as_ref()?;
    let migration = migration.metadata.uid.as_deref()?;
    let subject = Subject {
        namespace: vmi.metadata.namespace.as_deref()?,
        name: vmi.metadata.name.as_deref()?,
        uid: vmi.metadata.uid.as_deref()?,
        migration,
    };
    (state.migration_uid == migration).then_some((subject, state))
}

fn look(
    migration: &VirtualMachineInstanceMigration,
    facts: &Facts,
    refused: Option<String>,
    context: &Context,
) -> Decision {
    let uid = migration.metadata.uid.as_deref().unwrap_or_default();
    let waits = migration.status.phase <= MigrationPhase::Pending;
    decide(&Observed {
        migration,
        vmi: facts.vmi.as_deref(),
        source: facts.source.as_deref(),
        target: facts.target.as_deref(),
        at_source: facts.at_source.clone(),
        at_target: facts.at_target.clone(),
        plugs: plugs(facts, context),
        refused,
        may_begin: waits && may_begin(uid, &open(context), context.settings().places),
        settings: &facts.settings,
        policy: facts.policy.as_deref(),
        now: Time(Timestamp::now()),
    })
}

/// What has to be plugged in on the target's node before the VM comes.
fn plugs(facts: &Facts, context: &Context) -> Result<Vec<String>, String> {
    let Some(vmi) = facts.vmi.as_deref() else {
        return Ok(Vec::new());
    };
    let state = vmi.status.migration_state.as_ref();
    let Some(state) = state.filter(|state| state.is_open()) else {
        return Ok(Vec::new());
    };
    vmi::plugs_at(vmi, &context.world.keepers_of(vmi), &state.target_node)
}

/// All migrations that are not over.
fn open(context: &Context) -> Vec<Open> {
    let migrations = context
        .world
        .migrations
        .state_filter(|migration| !migration.status.phase.is_final());
    migrations
        .iter()
        .map(|migration| {
            let namespace = migration.metadata.namespace.as_deref().unwrap_or_default();
            let vmi = context.world.instance(namespace, &migration.spec.vmi_name);
            let created = migration.metadata.creation_timestamp.as_ref();
            Open {
                is_under_way: migration.status.phase.is_under_way(),
                priority: priority(migration.spec.priority.as_deref()),
                created: created.map_or(0, |time| time.0.as_second()),
                uid: migration.metadata.uid.clone().unwrap_or_default(),
                node: vmi.map_or_else(String::new, |vmi| vmi.status.node_name.clone()),
            }
        })
        .collect()
}

/// The order of KubeVirt's priorities.
fn priority(name: Option<&str>) -> i32 {
    match name {
        Some("system-critical") => 2,
        Some("user-triggered") => 1,
        _ => 0,
    }
}

/// Writes what was decided: first what the instance's status says.
async fn write(
    migration: &VirtualMachineInstanceMigration,
    facts: &Facts,
    decision: &Decision,
    context: &Context,
) -> Result<VirtualMachineInstanceMigration, Error> {
    let namespace = migration.metadata.namespace.as_deref().unwrap_or_default();
    if let (Some(state), Some(vmi)) = (&decision.state, &facts.vmi) {
        let mut status = vmi.status.clone();
        if state.completed && !state.failed {
            state.target_node.clone_into(&mut status.node_name);
        }
        status.migration_state = Some(state.clone());
        let api: Api<VirtualMachineInstance> = context.world.api(namespace);
        if let Some(written) = patch::status(&api, &**vmi, &vmi.status, &status).await? {
            context.expectations.wrote(&written);
            tell(&written, state, context).await;
        }
    }
    let api: Api<VirtualMachineInstanceMigration> = context.world.api(namespace);
    let written = patch::status(&api, migration, &migration.status, &decision.status).await?;
    let Some(written) = written else {
        return Ok(migration.clone());
    };
    context.expectations.wrote(&written);
    if migration.status.phase != written.status.phase {
        let phase = written.status.phase;
        tracing::info!(
            namespace,
            name = migration.metadata.name.as_deref().unwrap_or_default(),
            vmi = %migration.spec.vmi_name,
            ?phase,
            "a migration enters a phase"
        );
        ended(&written, facts, context).await;
    }
    Ok(written)
}

/// Tells people what becomes of an instance.
async fn tell(vmi: &VirtualMachineInstance, state: &MigrationState, context: &Context) {
    if state.end_timestamp.is_none() {
        if state.start_timestamp.is_none() && !state.abort_requested {
            let note = format!("Migration Target is prepared on {}", state.target_node);
            context.event(vmi, "PreparingTarget", "Migrate", note).await;
        } else if !state.abort_requested {
            let note = format!(
                "Migrates from {} to {}",
                state.source_node, state.target_node
            );
            context.event(vmi, "Migrating", "Migrate", note).await;
        }
    } else if state.failed {
        let note = format!(
            "VMI stays on {}: {}",
            state.source_node, state.failure_reason
        );
        context.warn(vmi, "FailedMigration", "Migrate", note).await;
    } else {
        let note = format!(
            "The VirtualMachineInstance migrated to {}",
            state.target_node
        );
        context.event(vmi, "Migrated", "Migrate", note).await;
    }
}

async fn ended(migration: &VirtualMachineInstanceMigration, facts: &Facts, context: &Context) {
    let state = migration.status.migration_state.as_ref();
    match migration.status.phase {
        MigrationPhase::Succeeded => {
            let node = state.map_or("", |state| &state.target_node);
            let note = format!("Source node reported migration succeeded; it runs on {node}");
            context
                .event(migration, "SuccessfulMigration", "Migrate", note)
                .await;
        }
        MigrationPhase::Failed => {
            let failed = migration
                .status
                .conditions
                .iter()
                .find(|condition| condition.kind == "Failed");
            let why = failed.map_or("", |failed| &failed.message);
            let (reason, note) = if migration.metadata.deletion_timestamp.is_some() {
                ("SuccessfulAbortMigration", format!("Aborted: {why}"))
            } else {
                ("FailedMigration", format!("Migration failed: {why}"))
            };
            context.warn(migration, reason, "Migrate", note).await;
            // An instance whose status says nothing of it has no event yet.
            if let (None, Some(vmi)) = (state, &facts.vmi) {
                let note = format!("Migration failed: {why}");
                context
                    .warn(&**vmi, "FailedMigration", "Migrate", note)
                    .await;
            }
        }
        _ => {}
    }
}

/// Does what was decided; returns why a node refused something, if it did.
async fn carry_out(
    migration: &VirtualMachineInstanceMigration,
    facts: &Facts,
    decision: &Decision,
    context: &Context,
) -> Result<Option<String>, Error> {
    let namespace = migration.metadata.namespace.as_deref().unwrap_or_default();
    let written = write(migration, facts, decision, context).await?;
    for action in &decision.actions {
        let done = match action {
            Action::CreateTarget => {
                create(&written, facts, context).await?;
                Ok(())
            }
            Action::RemoveFinalizer => {
                let api: Api<VirtualMachineInstanceMigration> = context.world.api(namespace);
                let change = patch::finalizer(&written, MIGRATION_FINALIZER, false);
                patch::object(&api, &written, change).await?;
                Ok(())
            }
            action => call(action, migration, facts, context).await,
        };
        match done {
            Ok(()) => {}
            Err(CallError::Refused(why))
                if matches!(action, Action::Expect | Action::Send { .. }) =>
            {
                return Ok(Some(why));
            }
            // What it says at the next look decides.
            Err(error) => tracing::debug!(
                namespace,
                vmi = %migration.spec.vmi_name,
                ?action,
                error = &error as &dyn std::error::Error,
                "a node did not do it"
            ),
        }
    }
    Ok(None)
}

/// Asks a node to do something.
async fn call(
    action: &Action,
    migration: &VirtualMachineInstanceMigration,
    facts: &Facts,
    context: &Context,
) -> Result<(), CallError> {
    let Some((subject, state)) = subject(migration, facts) else {
        return Ok(());
    };
    let nodes = &context.nodes;
    let (source, target) = (state.source_node.as_str(), state.target_node.as_str());
    match action {
        Action::Expect => {
            let (_, contact) = nodes.find(source).await?;
            let certificate = contact.certificate;
            let with = ExpectRequest { certificate };
            nodes.tell(target, subject, "expect", &with).await
        }
        Action::Send { plugs } => {
            let (address, contact) = nodes.find(target).await?;
            for keeper in plugs {
                let with = PlugRequest {
                    pod_uid: keeper.clone(),
                };
                let path = nodes::path(subject, "disks/plug");
                nodes.put(target, &path, &with).await?;
            }
            let guest = facts.vmi.as_deref().and_then(vmi::guest_memory_of);
            let timeout = facts.settings.completion_timeout(guest.as_ref());
            let seconds = |seconds: u64| u32::try_from(seconds).unwrap_or(u32::MAX);
            let with = SendRequest {
                address,
                certificate: contact.certificate,
                bandwidth: facts.settings.bandwidth_per_migration,
                auto_converge: facts.settings.allow_auto_converge,
                force: facts.settings.allow_workload_disruption,
                progress_timeout: seconds(facts.settings.progress_timeout),
                completion_timeout: seconds(timeout),
            };
            nodes.tell(source, subject, "send", &with).await
        }
        Action::Cancel(side) => {
            let node = match side {
                Side::Source => source,
                Side::Target => target,
            };
            nodes.tell(node, subject, "cancel", &json!({})).await
        }
        Action::Resolve { run } => {
            let with = ResolveRequest { run: *run };
            nodes.tell(source, subject, "resolve", &with).await
        }
        Action::CreateTarget | Action::RemoveFinalizer => Ok(()),
    }
}

/// Makes the pod that waits for the VM.
async fn create(
    migration: &VirtualMachineInstanceMigration,
    facts: &Facts,
    context: &Context,
) -> Result<(), Error> {
    let (Some(vmi), Some(source)) = (&facts.vmi, &facts.source) else {
        return Ok(());
    };
    let namespace = migration.metadata.namespace.as_deref().unwrap_or_default();
    let claim = |name: &str| context.world.claim(namespace, name).map(|claim| claim.mode);
    let mut status = migration.status.clone();
    let now = Time(Timestamp::now());
    let refused = match vmi::target(vmi, migration, source, &claim) {
        Ok(pod) => {
            let pods: Api<Pod> = context.world.api(namespace);
            match pods.create(&PostParams::default(), &pod).await {
                Ok(made) => {
                    context.expectations.made(migration, &made);
                    let name = made.metadata.name.as_deref().unwrap_or_default();
                    let note = format!("Created the pod {name}");
                    context
                        .event(migration, "SuccessfulCreate", "Create", note)
                        .await;
                    clear_condition(&mut status.conditions, QUOTA);
                    None
                }
                // Made before this controller was killed.
                Err(error) if code(&error) == Some(409) => None,
                Err(error) => Some(Error::request("make the target of", migration, error)),
            }
        }
        Err(error) => Some(Error::Target {
            object: migration.spec.vmi_name.clone(),
            source: error.into(),
        }),
    };
    if let Some(error) = &refused {
        let message =
            std::error::Error::source(error).map_or_else(String::new, ToString::to_string);
        let rejected = Condition {
            reason: "FailedCreate".to_owned(),
            message,
            ..Condition::yes(QUOTA)
        };
        set_condition(&mut status.conditions, rejected, &now);
    }
    let api: Api<VirtualMachineInstanceMigration> = context.world.api(namespace);
    patch::status::<_, MigrationStatus>(&api, migration, &migration.status, &status).await?;
    refused.map_or(Ok(()), Err)
}
