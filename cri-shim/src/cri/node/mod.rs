//! The node: state that all calls share, its pods and containers, and what they are created with.

mod clock;
mod container;
mod cpu_rate;
mod host_users;
mod index;
mod labels;
mod output_room;
mod pod;
#[cfg(test)]
mod testing;
mod vm_states;

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use podvisor_cri_messages::{CreateContainerRequest, RunPodSandboxRequest};
use podvisor_images::Store;
use tracing::warn;

use super::config::ServeConfig;
use super::error::{CriError, ObjectKind, Result};
use super::events::Events;
use super::flights::SingleFlight;
use super::retry_writer::{PendingRecord, RetryWriter};
use super::state::{ContainerRecord, DATABASE, Database, PodRecord};
use super::state_lock::{SANDBOXES, StateOwner};
use super::volumes;
use crate::cni::Cni;
use crate::turns::Turns;

pub(super) use clock::{ReportClock, now};
pub(super) use container::Container;
use host_users::HostUsers;
use index::PodIndex;
pub(super) use labels::matches_labels;
pub(super) use output_room::OutputRoom;
pub(super) use pod::{GuestResources, Pod, pod_name};
#[cfg(test)]
pub(super) use testing::TestNode;
pub(super) use vm_states::{ConsoleHold, VmStates};

/// Number of digits of an id in the name of a sandbox's directory.
const DIR_DIGITS: usize = 24;

/// The daemon's state of the node.
#[derive(Debug)]
pub(crate) struct Node {
    pub(super) config: ServeConfig,
    pub(super) store: Store,
    pub(super) cni: Cni,
    pub(super) database: Database,
    pub(super) events: Events,
    /// What is known of virtual machines beyond their records.
    pub(super) vms: VmStates,
    pub(super) pod_flights: SingleFlight<RunPodSandboxRequest>,
    pub(super) container_flights: SingleFlight<CreateContainerRequest>,
    pub(super) start_flights: SingleFlight<()>,
    /// Limits how many pods start at the same time.
    pub(super) starts: Turns,
    pub(super) output_room: OutputRoom,
    pub(super) clock: ReportClock,
    pub(super) host_users: HostUsers,
    known: Mutex<PodIndex>,
    late: RetryWriter,
    /// Makes this the only daemon with the state directory.
    _owner: StateOwner,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Node {
    /// Opens the files on the disk; [`Self::recover`] adds pods and containers.
    pub(crate) fn open(config: ServeConfig) -> Result<Self> {
        root_dir(&config.root)?;
        let state = &config.state;
        fs::create_dir_all(state).map_err(CriError::io("create the directory", state))?;
        let owner = StateOwner::take(state, &config.root)?;
        let sandboxes = config.state.join(SANDBOXES);
        private_dir(&sandboxes)?;
        volumes::make_private(&sandboxes)?;
        for (handler, guest) in &config.handlers {
            if !guest.kernel.exists() {
                let kernel = guest.kernel.display();
                warn!(handler, %kernel, "pods of the handler are refused: its kernel is missing");
            }
        }
        Ok(Self {
            store: Store::open(config.root.join("images"))?,
            cni: Cni::open(config.cni.clone())?,
            database: Database::open(&config.root.join(DATABASE))?,
            events: Events::default(),
            vms: VmStates::default(),
            pod_flights: SingleFlight::default(),
            container_flights: SingleFlight::default(),
            start_flights: SingleFlight::default(),
            starts: Turns::default(),
            output_room: OutputRoom::default(),
            clock: ReportClock::default(),
            host_users: HostUsers::default(),
            known: Mutex::default(),
            late: RetryWriter::default(),
            _owner: owner,
            config,
        })
    }

    /// Returns why no pod can be run; `None` if those of the default runtime handler can.
    pub(super) fn runtime_fault(&self) -> Option<String> {
        let (kernel, initramfs) = (&self.config.guest.kernel, &self.config.initramfs);
        let needed = [kernel, initramfs, Path::new("/dev/kvm")];
        let missing = needed.into_iter().find(|path| !path.exists())?;
        let path = missing.display();
        Some(format!("{path} is missing; `podvisor check` says more"))
    }

    /// Returns why no pod can have a network; `None` if pods can.
    pub(super) async fn network_fault(&self) -> Option<String> {
        self.cni.ready().await.err().map(|error| error.to_string())
    }

    /// Returns the directory of a sandbox.
    pub(super) fn dir(&self, pod: &str) -> PathBuf {
        let name: String = pod.chars().take(DIR_DIGITS).collect();
        self.config.state.join(SANDBOXES).join(name)
    }

    /// Returns the existing directories of sandboxes.
    pub(super) fn dirs(&self) -> Result<Vec<PathBuf>> {
        let dir = self.config.state.join(SANDBOXES);
        let failed = || CriError::io("read the directory", &dir);
        let entries = fs::read_dir(&dir).map_err(failed())?;
        let paths = entries
            .map(|entry| Ok(entry?.path()))
            .collect::<io::Result<_>>();
        paths.map_err(failed())
    }

    /// Adds a pod under its name, which must be unused.
    pub(super) fn add_pod(&self, pod: &Arc<Pod>) -> Result<()> {
        lock(&self.known).add_pod(pod)
    }

    /// Like [`Self::add_pod`], for a pod that was not in the database: it counts as created after
    /// all other sandboxes of the kubelet's pod.
    pub(super) fn add_new_pod(&self, pod: &Arc<Pod>) -> Result<()> {
        lock(&self.known).add_new_pod(pod)
    }

    /// Returns the pod that has the same name as this one.
    pub(super) fn pod_of_name(&self, pod: &Pod) -> Option<Arc<Pod>> {
        lock(&self.known).pod_of_name(&pod.name).cloned()
    }

    /// Adds a container under its name, which must be unused in its pod.
    pub(super) fn add_container(&self, container: &Arc<Container>) -> Result<()> {
        lock(&self.known).add_container(container)
    }

    /// Like [`Self::add_container`], for a container that was not in the database: it counts as
    /// created after all others of its name in the kubelet's pod.
    pub(super) fn add_new_container(&self, container: &Arc<Container>) -> Result<()> {
        lock(&self.known).add_new_container(container)
    }

    pub(super) fn forget_pod(&self, pod: &Pod) -> Result<()> {
        pod.remove_record(&self.database)?;
        lock(&self.known).forget_pod(pod);
        self.pod_flights.forget(&pod.id);
        self.vms.changed();
        Ok(())
    }

    pub(super) fn forget_container(&self, container: &Container) -> Result<()> {
        container.remove_record(&self.database)?;
        lock(&self.known).forget_container(container);
        self.container_flights.forget(&container.id);
        self.start_flights.forget(&container.id);
        Ok(())
    }

    /// Records something that has happened to a pod: in memory immediately, and on the disk as soon
    /// as that can be written.
    pub(super) fn note_pod(self: &Arc<Self>, pod: &Arc<Pod>, change: impl FnOnce(&mut PodRecord)) {
        if let Err(error) = pod.note(&self.database, change)
            && self.write_later(pod)
        {
            warn!(pod = pod.id, %error, "what became of the pod is written later");
        }
    }

    /// Like [`Self::note_pod`], for a container.
    pub(super) fn note_container(
        self: &Arc<Self>,
        container: &Arc<Container>,
        change: impl FnOnce(&mut ContainerRecord),
    ) {
        if let Err(error) = container.note(&self.database, change)
            && self.write_later(container)
        {
            let id = &container.id;
            warn!(container = id, %error, "what became of the container is written later");
        }
    }

    /// Schedules another write. Returns false if that was scheduled already.
    fn write_later(self: &Arc<Self>, record: &Arc<impl PendingRecord + 'static>) -> bool {
        let (node, record) = (Arc::clone(self), Arc::clone(record));
        let begin = || tokio::spawn(async move { node.late.write_all(&node.database).await });
        self.late.add(record, begin)
    }

    /// Returns a pod by its id or a prefix of it.
    pub(super) fn pod(&self, id: &str) -> Result<Arc<Pod>> {
        find(&lock(&self.known).pods, id, ObjectKind::Pod)
    }

    /// Returns a container by its id or a prefix of it.
    pub(super) fn container(&self, id: &str) -> Result<Arc<Container>> {
        find(&lock(&self.known).containers, id, ObjectKind::Container)
    }

    /// Returns a pod by id, once its recovery has finished.
    pub(super) async fn settled_pod(&self, id: &str) -> Result<Arc<Pod>> {
        let pod = self.pod(id)?;
        pod.settled().await;
        Ok(pod)
    }

    /// Like [`Self::settled_pod`], for a container.
    pub(super) async fn settled_container(&self, id: &str) -> Result<Arc<Container>> {
        let container = self.container(id)?;
        container.pod.settled().await;
        Ok(container)
    }

    /// Waits until the recovery of all current pods has finished.
    pub(super) async fn all_settled(&self) {
        for pod in self.pods() {
            pod.settled().await;
        }
    }

    /// Returns how many pods' processes lack a layer of their jail, by the layer's name.
    pub(super) fn missing_layers(&self) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::new();
        for client in self.pods().iter().filter_map(|pod| pod.client().ok()) {
            for layer in client.missing_layers() {
                // The names come from processes that guests may have taken over.
                let name = layer.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
                *counts.entry(name).or_default() += 1;
            }
        }
        counts
    }

    pub(super) fn pods(&self) -> Vec<Arc<Pod>> {
        lock(&self.known).pods.values().cloned().collect()
    }

    pub(super) fn containers(&self) -> Vec<Arc<Container>> {
        lock(&self.known).containers.values().cloned().collect()
    }

    pub(super) fn containers_of(&self, pod: &str) -> Vec<Arc<Container>> {
        lock(&self.known).containers_of(pod)
    }
}

fn find<T>(all: &BTreeMap<String, Arc<T>>, id: &str, kind: ObjectKind) -> Result<Arc<T>> {
    let id_shown = || id.chars().take(128).collect::<String>();
    if id.is_empty() {
        let field = match kind {
            ObjectKind::Pod => "pod_sandbox_id",
            _ => "container_id",
        };
        return Err(CriError::invalid(field, "it is empty"));
    }
    let mut found = all
        .range(id.to_owned()..)
        .take_while(|(known, _)| known.starts_with(id));
    match (found.next(), found.next()) {
        (Some((_, one)), None) => Ok(Arc::clone(one)),
        (Some((known, one)), Some(_)) if known == id => Ok(Arc::clone(one)),
        (Some(_), Some(_)) => Err(CriError::Ambiguous {
            kind,
            id: id_shown(),
        }),
        (None, _) => Err(CriError::NotFound {
            kind,
            id: id_shown(),
        }),
    }
}

/// Creates the persistent root directory, unreadable for other users. A directory that a user
/// created keeps its mode: others may need files in it.
fn root_dir(path: &Path) -> Result<()> {
    let above = path.parent().unwrap_or(path);
    fs::create_dir_all(above).map_err(CriError::io("create the directory", above))?;
    private_dir(path)
}

/// Creates a directory that other users cannot read; an existing one is not an error.
pub(super) fn private_dir(path: &Path) -> Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(CriError::io("create the directory", path)(error))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_root_that_is_made_is_the_daemons_alone_and_a_users_keeps_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let mode = |path: &str| fs::metadata(dir.path().join(path)).unwrap().mode() & 0o777;
        root_dir(&dir.path().join("above/root")).unwrap();
        assert_eq!(mode("above/root"), 0o700);
        fs::DirBuilder::new()
            .mode(0o755)
            .create(dir.path().join("theirs"))
            .unwrap();
        let theirs = mode("theirs");
        root_dir(&dir.path().join("theirs")).unwrap();
        assert_eq!(mode("theirs"), theirs);
    }
}
