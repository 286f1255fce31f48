//! The daemon's state of a pod sandbox.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use podvisor_cri_messages::PodSandboxMetadata;
use podvisor_node_api::messages::VmName;
use tokio::sync::watch;

use crate::cri::error::{CriError, ObjectKind, Result};
use crate::cri::retry_writer::PendingRecord;
use crate::cri::state::{CachedRecord, Database, PodPhase, PodRecord, StateError};
use crate::cri::volume_users::Mounted;
use crate::sandbox::{GuestStats, SandboxClient};

/// A pod sandbox.
#[derive(Debug)]
pub(in crate::cri) struct Pod {
    pub(in crate::cri) id: String,
    /// See [`pod_name`]; it never changes.
    pub(in crate::cri) name: String,
    /// Locked by calls that change it.
    pub(in crate::cri) turn: Arc<tokio::sync::Mutex<()>>,
    /// Locked while CNI's plugins check or undo its network.
    pub(in crate::cri) network: tokio::sync::Mutex<()>,
    /// Number of callers that wait for the turn to end it: calls that create something in it give
    /// up.
    ending: watch::Sender<usize>,
    /// True once it and its containers match their records: a new daemon has asked its sandbox.
    settled: watch::Sender<bool>,
    /// Memory and vCPUs that its guest last got while it ran.
    pub(in crate::cri) given: tokio::sync::Mutex<GuestResources>,
    /// A task waits for memory pressure in its guest.
    pub(in crate::cri) is_watched: AtomicBool,
    /// Its volumes, and the containers that use them.
    pub(in crate::cri) mounted: Mounted,
    /// The last known total usage of its containers.
    pub(in crate::cri) used: Mutex<GuestStats>,
    /// The name of the virtual machine that it is, which never changes.
    pub(in crate::cri) vm_name: OnceLock<VmName>,
    record: CachedRecord<PodRecord>,
    client: Mutex<Option<SandboxClient>>,
}

/// Memory and vCPUs of a guest at run time; unknown to a daemon that has just started.
#[derive(Debug, Default)]
pub(in crate::cri) struct GuestResources {
    /// Bytes beyond its memory at boot; `None` while the guest does not have the amount that was
    /// last asked for.
    pub(in crate::cri) memory: Option<u64>,
    /// Total number of vCPUs.
    pub(in crate::cri) vcpus: Option<u8>,
}

/// A caller's wish to end a pod, until this is dropped.
#[derive(Debug)]
pub(in crate::cri) struct EndingGuard<'a>(&'a watch::Sender<usize>);

impl Drop for EndingGuard<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count = count.saturating_sub(1));
    }
}

impl Pod {
    pub(in crate::cri) fn new(record: PodRecord) -> Arc<Self> {
        Self::of(record, true)
    }

    /// A pod from the database; [`Self::set_settled`] has to be called when its state is known.
    pub(in crate::cri) fn found(record: PodRecord) -> Arc<Self> {
        Self::of(record, false)
    }

    fn of(record: PodRecord, is_settled: bool) -> Arc<Self> {
        let metadata = record.config.metadata.as_ref();
        let mounted = Mounted::of(metadata.map_or("", |metadata| &metadata.uid));
        Arc::new(Self {
            id: record.id.clone(),
            name: pod_name(&record),
            turn: Arc::default(),
            network: tokio::sync::Mutex::default(),
            ending: watch::Sender::new(0),
            settled: watch::Sender::new(is_settled),
            given: tokio::sync::Mutex::default(),
            is_watched: AtomicBool::new(false),
            mounted,
            used: Mutex::default(),
            vm_name: OnceLock::new(),
            record: CachedRecord::new(record),
            client: Mutex::new(None),
        })
    }

    /// Marks the pod's and its containers' state as known.
    pub(in crate::cri) fn set_settled(&self) {
        self.settled.send_replace(true);
    }

    /// Waits until the pod's and its containers' state is known.
    pub(super) async fn settled(&self) {
        // The sender lives as long as the pod.
        let _ = self.settled.subscribe().wait_for(|settled| *settled).await;
    }

    /// Announces that it is to end, until the returned value is dropped.
    pub(in crate::cri) fn end(&self) -> EndingGuard<'_> {
        self.ending.send_modify(|count| *count += 1);
        EndingGuard(&self.ending)
    }

    /// Returns whether it is to end.
    pub(in crate::cri) fn is_ending(&self) -> bool {
        *self.ending.borrow() > 0
    }

    /// Waits until it is to end.
    pub(in crate::cri) async fn is_to_end(&self) {
        let mut ending = self.ending.subscribe();
        // The sender lives as long as the pod.
        let _ = ending.wait_for(|count| *count > 0).await;
    }

    pub(in crate::cri) fn record(&self) -> PodRecord {
        self.record.get()
    }

    /// Returns a part of the record, without copying the rest.
    pub(in crate::cri) fn with_record<T>(&self, part: impl FnOnce(&PodRecord) -> T) -> T {
        self.record.of(part)
    }

    pub(in crate::cri) fn phase(&self) -> PodPhase {
        self.record.of(|record| record.phase.clone())
    }

    fn lock_client(&self) -> MutexGuard<'_, Option<SandboxClient>> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the client of its sandbox process.
    pub(in crate::cri) fn client(&self) -> Result<SandboxClient> {
        let client = self.lock_client().clone();
        client.ok_or_else(|| self.not_ready())
    }

    pub(in crate::cri) fn not_ready(&self) -> CriError {
        CriError::WrongState {
            kind: ObjectKind::Pod,
            id: self.id.clone(),
            state: "not ready",
            wanted: "run a new one",
        }
    }

    pub(in crate::cri) fn set_client(&self, client: Option<SandboxClient>) {
        *self.lock_client() = client;
    }

    /// Changes the record, on the disk first.
    pub(in crate::cri) fn update(
        &self,
        database: &Database,
        change: impl FnOnce(&mut PodRecord),
    ) -> Result<()> {
        Ok(self.record.update(database, change)?)
    }

    /// Changes the record, whether or not the disk takes it.
    pub(super) fn note(
        &self,
        database: &Database,
        change: impl FnOnce(&mut PodRecord),
    ) -> Result<(), StateError> {
        self.record.note(database, change)
    }

    /// Removes the record from the disk.
    pub(super) fn remove_record(&self, database: &Database) -> Result<(), StateError> {
        self.record.remove(database)
    }

    /// Writes the record as it is.
    pub(in crate::cri) fn write(&self, database: &Database) -> Result<(), StateError> {
        self.record.write(database)
    }

    /// Has a new pod, which is not in the database yet, created later than `other`.
    pub(in crate::cri) fn create_after(&self, other: i64) {
        let least = other.saturating_add(1);
        let change = |record: &mut PodRecord| record.created_at = record.created_at.max(least);
        self.record.change_new(change);
    }

    /// Returns whether this is a sandbox of that pod of the kubelet, whatever the attempt.
    pub(in crate::cri) fn is_of(&self, pod: &PodSandboxMetadata) -> bool {
        let is_same = |own: &PodSandboxMetadata| {
            own.uid == pod.uid && own.name == pod.name && own.namespace == pod.namespace
        };
        self.record
            .of(|record| record.config.metadata.as_ref().is_some_and(is_same))
    }
}

impl PendingRecord for Pod {
    fn id(&self) -> &str {
        &self.id
    }

    fn write(&self, database: &Database) -> Result<(), StateError> {
        self.record.write(database)
    }
}

/// Returns the kubelet's unique name of a pod sandbox: name, namespace, uid and attempt.
pub(in crate::cri) fn pod_name(record: &PodRecord) -> String {
    let metadata = record.config.metadata.clone().unwrap_or_default();
    let (name, namespace) = (metadata.name, metadata.namespace);
    format!("{name}_{namespace}_{}_{}", metadata.uid, metadata.attempt)
}
