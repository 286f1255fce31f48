//! What the node reports of its VMs: conditions, addresses and what the guest's agent says, in the
//! instances' status; and events.
//!
//! A task per VM looks at its latest state. It writes by server-side apply, as a manager of the
//! fields that are the node's: so it does not have to read the instance, which it may not, and
//! what it does not report any more is removed.

mod apply;
mod events;
mod status;

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use futures_util::StreamExt;
use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use podvisor_node_api::messages::{GuestInfo, VmName, VmPhase};
use serde_json::Value;
use tokio::{
    sync::{Semaphore, watch},
    task::JoinSet,
    time::timeout,
};

use super::{
    Access,
    machines::{Change, Machines, Vm},
};
pub(super) use events::Events;

/// How long to wait after the end of a watch.
const WATCH_AGAIN: Duration = Duration::from_secs(2);

/// More VMs than this are not reported: no node has them.
const MAX_VMS: usize = 4096;

/// Requests to the API server at the same time.
const CONCURRENCY: usize = 8;

/// How often a guest's agent is asked: until it answers, while the guest may still boot; after
/// that; and once it has answered.
const AGENT_AT_BOOT: Duration = Duration::from_secs(10);
const BOOT: Duration = Duration::from_secs(300);
const AGENT_LATER: Duration = Duration::from_secs(60);
const AGENT_AGAIN: Duration = Duration::from_secs(30);

/// How long an agent may take.
const AGENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The first wait after a status that was refused, and the last: then its instance is none of ours.
const FIRST_RETRY: Duration = Duration::from_millis(500);
const RETRIES: u32 = 10;

struct Reporter {
    machines: Machines,
    access: Arc<Access>,
    events: Events,
    requests: Semaphore,
}

/// Reports until it is dropped.
pub(super) async fn run(machines: Machines, access: Arc<Access>, node: String) {
    let reporter = Arc::new(Reporter {
        events: Events::new(Arc::clone(&access)),
        machines,
        access,
        requests: Semaphore::new(CONCURRENCY),
    });
    let mut known = HashMap::new();
    let mut tasks = JoinSet::new();
    loop {
        match reporter.machines.watch().await {
            Ok(mut changes) => {
                while let Some(change) = changes.next().await {
                    take(&reporter, &mut known, &mut tasks, change);
                    while tasks.try_join_next().is_some() {}
                }
                tracing::warn!(%node, "the watch of the node's machines ended: it begins again");
            }
            Err(error) => tracing::warn!(%node, %error, "failed to watch the node's machines"),
        }
        tokio::time::sleep(WATCH_AGAIN).await;
    }
}

fn take(
    reporter: &Arc<Reporter>,
    known: &mut HashMap<VmName, watch::Sender<Vm>>,
    tasks: &mut JoinSet<()>,
    change: Change,
) {
    let vms = match change {
        Change::All(vms) => {
            // Without its sender, a task ends.
            known.retain(|key, _| vms.iter().any(|vm| vm.name == *key));
            vms
        }
        Change::One(vm) => vec![vm],
        Change::Gone(key) => {
            known.remove(&key);
            return;
        }
    };
    for vm in vms {
        if let Some(sender) = known.get(&vm.name) {
            sender.send_if_modified(|old| {
                let differs = *old != vm;
                if differs {
                    *old = vm;
                }
                differs
            });
        } else if known.len() < MAX_VMS {
            let (sender, receiver) = watch::channel(vm.clone());
            known.insert(vm.name, sender);
            tasks.spawn(follow(Arc::clone(reporter), receiver));
        }
    }
}

/// What a task knows of its VM.
#[derive(Debug, Default)]
struct Known {
    /// When it was first seen.
    since: Option<Instant>,
    phase: Option<VmPhase>,
    guest: Option<GuestInfo>,
    asked: Option<Instant>,
    /// When each condition began.
    begun: HashMap<&'static str, Time>,
    /// The specification, once the API server has shown it.
    spec: Option<Value>,
    written: Option<Value>,
    /// The version of the instance in which it was last seen to be the VM's.
    version: Option<String>,
    failures: u32,
}

async fn follow(reporter: Arc<Reporter>, mut receiver: watch::Receiver<Vm>) {
    let mut known = Known {
        since: Some(Instant::now()),
        ..Known::default()
    };
    loop {
        let vm = receiver.borrow_and_update().clone();
        let before = known.phase.replace(vm.phase);
        if let Some(before) = before {
            if before != vm.phase {
                // A VM that comes from another node is this node's from now on.
                known.failures = 0;
            }
            reporter.events.changed(&vm.name, before, vm.phase).await;
        }
        ask_agent(&reporter, &vm, &mut known).await;
        let mut wait = until_agent(&vm, &known);
        if let Some(retry) = write(&reporter, &vm, &mut known).await {
            wait = wait.min(retry);
        }
        tokio::select! {
            changed = receiver.changed() => if changed.is_err() {
                return;
            },
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// Asks the guest's agent, if it is time.
async fn ask_agent(reporter: &Reporter, vm: &Vm, known: &mut Known) {
    match vm.phase {
        VmPhase::Running => {}
        // A guest that is paused says nothing; what it said before still holds.
        VmPhase::Paused => return,
        VmPhase::Starting | VmPhase::Incoming | VmPhase::Ended | VmPhase::Unknown => {
            known.guest = None;
            return;
        }
    }
    if known.asked.is_some() && !until_agent(vm, known).is_zero() {
        return;
    }
    known.asked = Some(Instant::now());
    let guest = timeout(AGENT_TIMEOUT, reporter.machines.guest(&vm.name)).await;
    known.guest = match guest {
        Ok(Ok(guest)) => Some(guest),
        Ok(Err(error)) => {
            tracing::debug!(name = %vm.name.name, %error, "no guest agent");
            None
        }
        Err(_) => None,
    };
}

/// How long until the agent is asked again.
fn until_agent(vm: &Vm, known: &Known) -> Duration {
    if vm.phase != VmPhase::Running {
        return AGENT_LATER;
    }
    let Some(asked) = known.asked else {
        return Duration::ZERO;
    };
    let boots = known.since.is_some_and(|since| since.elapsed() < BOOT);
    let every = match (&known.guest, boots) {
        (Some(_), _) => AGENT_AGAIN,
        (None, true) => AGENT_AT_BOOT,
        (None, false) => AGENT_LATER,
    };
    every.saturating_sub(asked.elapsed())
}

/// Writes the status, if it differs from what was written; returns when to try again.
async fn write(reporter: &Reporter, vm: &Vm, known: &mut Known) -> Option<Duration> {
    if vm.phase == VmPhase::Incoming {
        // It is another node's still.
        return None;
    }
    loop {
        let wanted = wanted(vm, known);
        if known.written.as_ref() == Some(&wanted) || known.failures >= RETRIES {
            return None;
        }
        let permit = reporter.requests.acquire().await;
        let client = reporter.access.client();
        let applied = apply::status(client, &vm.name, &mut known.version, &wanted).await;
        drop(permit);
        match applied {
            Ok(object) => {
                known.failures = 0;
                known.written = Some(wanted);
                // With the specification the cards have names: once more.
                let spec = object.data.get("spec").cloned();
                if known.spec.is_some() || spec.is_none() {
                    return None;
                }
                known.spec = spec;
            }
            Err(error) => {
                // Until the controller has written on which node it is, for example.
                tracing::debug!(
                    namespace = %vm.name.namespace, name = %vm.name.name, error = &error as &dyn std::error::Error,
                    "the status was refused"
                );
                let wait = FIRST_RETRY.saturating_mul(1 << known.failures.min(7));
                known.failures = known.failures.saturating_add(1);
                if known.failures == RETRIES {
                    tracing::warn!(
                        namespace = %vm.name.namespace, name = %vm.name.name, error = &error as &dyn std::error::Error,
                        "the status is not accepted: is the VM of an instance?"
                    );
                    return None;
                }
                return Some(wait);
            }
        }
    }
}

fn wanted(vm: &Vm, known: &mut Known) -> Value {
    let paused = vm.phase == VmPhase::Paused;
    let agent = known.guest.is_some();
    for (condition, holds) in [("Paused", paused), ("AgentConnected", agent)] {
        if holds {
            let since = if condition == "Paused" {
                vm.since_ns
            } else {
                0
            };
            known.begun.entry(condition).or_insert_with(|| time(since));
        } else {
            known.begun.remove(condition);
        }
    }
    status::status(&known.begun, known.guest.as_ref(), known.spec.as_ref())
}

/// The time of so many nanoseconds since 1970, or now; conditions have whole seconds.
fn time(since_ns: i64) -> Time {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = i64::try_from(now.unwrap_or_default().as_secs()).unwrap_or_default();
    let given = since_ns / 1_000_000_000;
    let seconds = if given > 0 && given <= now {
        given
    } else {
        now
    };
    Time(Timestamp::from_second(seconds).unwrap_or_default())
}
