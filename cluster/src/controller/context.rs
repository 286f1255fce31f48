//! What all reconciliations share.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kube::Resource;
use kube::runtime::controller::Action;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use serde_json::Value;
use tokio::sync::watch;

use super::Error;
use super::classes::Classes;
use super::expectations::Expectations;
use super::importers::Importers;
use super::leader::Leading;
use super::nodes::Nodes;
use super::progress::Progress;
use super::settings::ClusterSettings;
use super::world::World;
use crate::installation::Seen;
use crate::shares::Shares;

/// The first wait after an error.
const FIRST_WAIT: Duration = Duration::from_millis(250);

/// The longest wait after an error.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// After a conflict, the change that led to it leads to the next attempt. This is for the case
/// that it does not.
const AFTER_CONFLICT: Duration = Duration::from_secs(1);

/// How long classes are taken to be as they were read.
const CLASSES_LAST: Duration = Duration::from_secs(60);

/// So many entries a cache has at most; then it begins anew.
const CACHED: usize = 4096;

/// So many reconciliations of a kind wait at once for what a tenant's guest or pod answers: a part
/// of those that run at once, and of that a part for one namespace. Else a few guests that do not
/// answer would hold up everybody's objects.
const WAITING: usize = 24;
const WAITING_EACH: usize = 4;

/// An event's text must not be longer.
const NOTE: usize = 1000;

/// How VMs move: by the command line, and by what an administrator has decided since.
pub(super) struct Configuration {
    pub(super) settings: ClusterSettings,
    pub(super) seen: watch::Receiver<Seen>,
}

/// Who waits for what tenants' guests and pods answer, for each kind of object.
pub(super) struct Waiting {
    /// Instances, for their guests to release disks.
    pub(super) disks: Shares,
    /// Snapshots, for guests' file systems.
    pub(super) snapshots: Shares,
    /// DataVolumes, for importers.
    pub(super) importers: Shares,
}

impl Default for Waiting {
    fn default() -> Self {
        let shares = || Shares::new(WAITING, WAITING_EACH);
        Self {
            disks: shares(),
            snapshots: shares(),
            importers: shares(),
        }
    }
}

/// What all reconciliations share.
pub(super) struct Context {
    pub(super) world: World,
    pub(super) expectations: Expectations,
    pub(super) nodes: Nodes,
    configuration: Configuration,
    pub(super) progress: Progress,
    pub(super) waiting: Waiting,
    leading: Leading,
    importers: Importers,
    recorder: Recorder,
    revisions: Mutex<HashMap<String, Option<Arc<Value>>>>,
    errors: Mutex<HashMap<String, u32>>,
    classes: tokio::sync::Mutex<Option<(Instant, Arc<Classes>)>>,
}

impl Context {
    pub(super) fn new(
        world: World,
        leading: Leading,
        identity: &str,
        importers: Importers,
        nodes: Nodes,
        configuration: Configuration,
        progress: Progress,
    ) -> Self {
        let reporter = Reporter {
            controller: "podvisor-controller".to_owned(),
            instance: Some(identity.to_owned()),
        };
        Self {
            recorder: Recorder::new(world.client().clone(), reporter),
            world,
            expectations: Expectations::default(),
            nodes,
            configuration,
            progress,
            waiting: Waiting::default(),
            leading,
            importers,
            revisions: Mutex::default(),
            errors: Mutex::default(),
            classes: tokio::sync::Mutex::default(),
        }
    }

    /// Returns how VMs move.
    pub(super) fn settings(&self) -> ClusterSettings {
        let Configuration { settings, seen } = &self.configuration;
        let object = seen.borrow().object.clone();
        let decided = object.and_then(|object| object.spec.configuration.migrations.clone());
        settings.with(&decided.unwrap_or_default())
    }

    /// Whether changes of a template that can be live are.
    pub(super) fn is_live(&self) -> bool {
        let object = self.configuration.seen.borrow().object.clone();
        let strategy =
            object.and_then(|object| object.spec.configuration.vm_rollout_strategy.clone());
        strategy.as_deref() == Some("LiveUpdate")
    }

    /// Returns what importers are made with.
    pub(super) fn importers(&self) -> &Importers {
        &self.importers
    }

    /// Waits until everything is known; an error if another replica acts.
    pub(super) async fn check(&self) -> Result<(), Error> {
        self.world.ready().await?;
        if self.leading.is_leading() {
            Ok(())
        } else {
            Err(Error::NotLeading)
        }
    }

    /// Returns a number from 0 to 0.5, which differs each time.
    pub(super) fn jitter(&self) -> f64 {
        // The keys are random; nothing depends on how well.
        let random = RandomState::new().hash_one(0_u8) >> 33;
        f64::from(u32::try_from(random).unwrap_or_default()) / f64::from(u32::MAX)
    }

    /// Returns the classes of storage and of snapshots; they change seldom, and are read so.
    pub(super) async fn classes(&self) -> Result<Arc<Classes>, kube::Error> {
        let mut known = self.classes.lock().await;
        if let Some((read, classes)) = &*known
            && read.elapsed() < CLASSES_LAST
        {
            return Ok(Arc::clone(classes));
        }
        let classes = Arc::new(Classes::read(self.world.client()).await?);
        *known = Some((Instant::now(), Arc::clone(&classes)));
        Ok(classes)
    }

    /// Returns a revision that was read before.
    pub(super) fn revision(&self, name: &str) -> Option<Option<Arc<Value>>> {
        lock(&self.revisions).get(name).cloned()
    }

    /// Keeps a revision: it never changes.
    pub(super) fn keep_revision(&self, name: String, template: Option<Arc<Value>>) {
        insert(&self.revisions, name, template);
    }

    /// Tells people what was done. That they cannot be told hinders nothing.
    pub(super) async fn event<K: Resource<DynamicType = ()>>(
        &self,
        object: &K,
        reason: &str,
        action: &str,
        note: String,
    ) {
        self.publish(object, EventType::Normal, reason, action, note)
            .await;
    }

    /// Tells people what could not be done.
    pub(super) async fn warn<K: Resource<DynamicType = ()>>(
        &self,
        object: &K,
        reason: &str,
        action: &str,
        note: String,
    ) {
        self.publish(object, EventType::Warning, reason, action, note)
            .await;
    }

    async fn publish<K: Resource<DynamicType = ()>>(
        &self,
        object: &K,
        type_: EventType,
        reason: &str,
        action: &str,
        note: String,
    ) {
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note.chars().take(NOTE).collect()),
            action: action.to_owned(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, &object.object_ref(&())).await {
            tracing::debug!(
                error = &error as &dyn std::error::Error,
                reason,
                "failed to write an event"
            );
        }
    }

    /// Returns when to try again after an error.
    pub(super) fn after<K: Resource<DynamicType = ()>>(&self, object: &K, error: &Error) -> Action {
        if error.is_conflict() {
            return Action::requeue(AFTER_CONFLICT);
        }
        let key = key(object);
        let count = lock(&self.errors).get(&key).copied().unwrap_or_default();
        insert(&self.errors, key, count.saturating_add(1));
        let wait = FIRST_WAIT.saturating_mul(2_u32.saturating_pow(count.min(16)));
        Action::requeue(wait.min(LONGEST_WAIT))
    }

    /// Forgets an object's errors.
    pub(super) fn succeeded<K: Resource<DynamicType = ()>>(&self, object: &K) {
        lock(&self.errors).remove(&key(object));
    }
}

fn key<K: Resource<DynamicType = ()>>(object: &K) -> String {
    format!(
        "{} {}",
        K::plural(&()),
        object.meta().uid.as_deref().unwrap_or_default()
    )
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn insert<T>(cache: &Mutex<HashMap<String, T>>, key: String, value: T) {
    let mut cache = lock(cache);
    if cache.len() >= CACHED {
        cache.clear();
    }
    cache.insert(key, value);
}
