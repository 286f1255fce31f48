//! What the controllers know of the cluster: a store per kind of object, each fed by one watch.
//!
//! A store is brought up to date before the controllers are told of a change, so that none of
//! them acts on something older than what woke it.

use std::fmt::Debug;
use std::future::Future;
use std::hash::Hash;
use std::sync::Arc;

use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

use super::Error;
use super::datavolume::{self, DataVolume};
use super::migration::DRAIN_TAINT;
use super::objects::{
    COMPONENT_LABEL, LAUNCHER, MIGRATION_NAME_ANNOTATION, MigrationPhase, Phase, VirtualMachine,
    VirtualMachineInstance, VirtualMachineInstanceMigration, VirtualMachineInstanceReplicaSet,
};
use super::vmi::{Claim, VolumeMode};

/// Changes that wait for a controller. Each is known by its object, so a controller that falls
/// behind has at most as many as there are objects.
const QUEUE: usize = 1024;

/// The objects of the cluster, or of one namespace.
#[derive(Clone)]
pub(super) struct World {
    client: Client,
    namespace: Option<String>,
    pub(super) vms: Store<VirtualMachine>,
    pub(super) vmis: Store<VirtualMachineInstance>,
    pub(super) sets: Store<VirtualMachineInstanceReplicaSet>,
    pub(super) migrations: Store<VirtualMachineInstanceMigration>,
    pods: Store<Pod>,
    claims: Store<PersistentVolumeClaim>,
    budgets: Store<PodDisruptionBudget>,
    nodes: Store<Node>,
    pub(super) volumes: Store<DataVolume>,
    importers: Store<Pod>,
}

/// Objects that a controller has to look at.
pub(super) type Queue<K> = BoxStream<'static, Result<ObjectRef<K>, watcher::Error>>;

/// The queues of the controllers.
pub(super) struct Queues {
    pub(super) vms: Queue<VirtualMachine>,
    pub(super) vmis: Queue<VirtualMachineInstance>,
    pub(super) sets: Queue<VirtualMachineInstanceReplicaSet>,
    pub(super) volumes: Queue<DataVolume>,
    pub(super) migrations: Queue<VirtualMachineInstanceMigration>,
}

impl World {
    /// Begins to watch; the future does the work, and must be polled.
    pub(super) fn watch(
        client: Client,
        namespace: Option<String>,
    ) -> (Self, Queues, impl Future<Output = ()> + Send) {
        let (vms, vm_changes) = watch(
            api(&client, namespace.as_deref()),
            watcher::Config::default(),
        );
        let (vmis, vmi_changes) = watch(
            api(&client, namespace.as_deref()),
            watcher::Config::default(),
        );
        let (sets, set_changes) = watch(
            api(&client, namespace.as_deref()),
            watcher::Config::default(),
        );
        let (migrations, migration_changes) = watch(
            api(&client, namespace.as_deref()),
            watcher::Config::default(),
        );
        let launchers = watcher::Config::default().labels(&format!("{COMPONENT_LABEL}={LAUNCHER}"));
        let (pods, pod_changes) = watch(api::<Pod>(&client, namespace.as_deref()), launchers);
        let (claims, claim_changes) = watch(
            api(&client, namespace.as_deref()),
            watcher::Config::default(),
        );
        let launchers = watcher::Config::default().labels(&format!("{COMPONENT_LABEL}={LAUNCHER}"));
        let (budgets, budget_changes) = watch(api(&client, namespace.as_deref()), launchers);
        let (nodes, node_changes) = watch(Api::all(client.clone()), watcher::Config::default());
        let (volumes, volume_changes) = watch(
            api(&client, namespace.as_deref()),
            watcher::Config::default(),
        );
        let importers = format!("{}={}", datavolume::COMPONENT_LABEL, datavolume::IMPORTER);
        let importers = watcher::Config::default().labels(&importers);
        let (importers, importer_changes) =
            watch(api::<Pod>(&client, namespace.as_deref()), importers);
        let world = Self {
            client,
            namespace,
            vms,
            vmis,
            sets,
            migrations,
            pods,
            claims,
            budgets,
            nodes,
            volumes,
            importers,
        };
        let (vm_sender, vm_queue) = mpsc::channel(QUEUE);
        let (vmi_sender, vmi_queue) = mpsc::channel(QUEUE);
        let (set_sender, set_queue) = mpsc::channel(QUEUE);
        let (volume_sender, volume_queue) = mpsc::channel(QUEUE);
        let (migration_sender, migration_queue) = mpsc::channel(QUEUE);
        let queues = Queues {
            vms: queue(vm_queue),
            vmis: queue(vmi_queue),
            sets: queue(set_queue),
            volumes: queue(volume_queue),
            migrations: queue(migration_queue),
        };
        let of_volumes = pump(volume_changes, {
            let (own, vm_sender) = (volume_sender.clone(), vm_sender.clone());
            let vmi_sender = vmi_sender.clone();
            let (vms, vmis) = (world.vms.clone(), world.vmis.clone());
            move |volume: DataVolume| {
                let volumes = send(own.clone(), vec![ObjectRef::from_obj(&volume)]);
                let of_vms = send(vm_sender.clone(), users(&vms, &volume));
                let of_vmis = send(vmi_sender.clone(), begun(&vmis, &volume));
                async move {
                    volumes.await;
                    of_vms.await;
                    of_vmis.await;
                }
            }
        });
        let of_importers = pump(importer_changes, {
            let sender = volume_sender.clone();
            move |pod: Pod| {
                let owner = owner(&pod.metadata, "DataVolume");
                send(sender.clone(), owner.into_iter().collect())
            }
        });
        let of_vms = pump(vm_changes, {
            let sender = vm_sender.clone();
            move |vm: VirtualMachine| send(sender.clone(), vec![ObjectRef::from_obj(&vm)])
        });
        let of_sets = pump(set_changes, {
            let sender = set_sender.clone();
            move |set: VirtualMachineInstanceReplicaSet| {
                send(sender.clone(), vec![ObjectRef::from_obj(&set)])
            }
        });
        let of_vmis = pump(vmi_changes, {
            let sender = vmi_sender.clone();
            move |vmi: VirtualMachineInstance| {
                let vmis = send(sender.clone(), vec![ObjectRef::from_obj(&vmi)]);
                // A machine has its name, whether or not it made it.
                let namespace = vmi.metadata.namespace.as_deref().unwrap_or_default();
                let name = vmi.metadata.name.as_deref().unwrap_or_default();
                let vms = send(
                    vm_sender.clone(),
                    vec![ObjectRef::new(name).within(namespace)],
                );
                let set = owner(&vmi.metadata, "VirtualMachineInstanceReplicaSet");
                let sets = send(set_sender.clone(), set.into_iter().collect());
                async move {
                    vmis.await;
                    vms.await;
                    sets.await;
                }
            }
        });
        let of_pods = pump(pod_changes, {
            let (sender, migration_sender) = (vmi_sender.clone(), migration_sender.clone());
            move |pod: Pod| {
                let owner = owner(&pod.metadata, "VirtualMachineInstance");
                let vmis = send(sender.clone(), owner.into_iter().collect());
                let migration = migration_of(&pod);
                let migrations = send(migration_sender.clone(), migration.into_iter().collect());
                async move {
                    vmis.await;
                    migrations.await;
                }
            }
        });
        let of_migrations = pump(migration_changes, {
            let sender = vmi_sender.clone();
            let store = world.migrations.clone();
            move |migration: VirtualMachineInstanceMigration| {
                // One that ends makes place for those that wait.
                let mut those = vec![ObjectRef::from_obj(&migration)];
                if migration.status.phase.is_final() {
                    those.extend(waiting_migrations(&store));
                }
                let migrations = send(migration_sender.clone(), those);
                let namespace = migration.metadata.namespace.as_deref().unwrap_or_default();
                let vmi = ObjectRef::new(&migration.spec.vmi_name).within(namespace);
                let vmis = send(sender.clone(), vec![vmi]);
                async move {
                    migrations.await;
                    vmis.await;
                }
            }
        });
        let of_claims = pump(claim_changes, {
            let (vmis, sender) = (world.vmis.clone(), vmi_sender.clone());
            move |claim: PersistentVolumeClaim| {
                let of_vmis = send(sender.clone(), waiting(&vmis, &claim));
                // A DataVolume has its name, whether or not it made it.
                let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
                let name = claim.metadata.name.as_deref().unwrap_or_default();
                let volume = ObjectRef::new(name).within(namespace);
                let of_volumes = send(volume_sender.clone(), vec![volume]);
                async move {
                    of_vmis.await;
                    of_volumes.await;
                }
            }
        });
        let of_budgets = pump(budget_changes, {
            let sender = vmi_sender.clone();
            move |budget: PodDisruptionBudget| {
                let owner = owner(&budget.metadata, "VirtualMachineInstance");
                send(sender.clone(), owner.into_iter().collect())
            }
        });
        let of_nodes = pump(node_changes, {
            let vmis = world.vmis.clone();
            move |node: Node| {
                let those = if is_drained(&node) {
                    on_node(&vmis, &node)
                } else {
                    Vec::new()
                };
                send(vmi_sender.clone(), those)
            }
        });
        let work = async move {
            tokio::join!(
                of_budgets,
                of_nodes,
                of_vms,
                of_vmis,
                of_sets,
                of_migrations,
                of_pods,
                of_claims,
                of_volumes,
                of_importers
            );
        };
        (world, queues, work)
    }

    /// Waits until all that exists is known.
    pub(super) async fn ready(&self) -> Result<(), Error> {
        let ended = |_| Error::Ended;
        self.vms.wait_until_ready().await.map_err(ended)?;
        self.vmis.wait_until_ready().await.map_err(ended)?;
        self.sets.wait_until_ready().await.map_err(ended)?;
        self.migrations.wait_until_ready().await.map_err(ended)?;
        self.pods.wait_until_ready().await.map_err(ended)?;
        self.budgets.wait_until_ready().await.map_err(ended)?;
        self.nodes.wait_until_ready().await.map_err(ended)?;
        self.claims.wait_until_ready().await.map_err(ended)?;
        self.volumes.wait_until_ready().await.map_err(ended)?;
        self.importers.wait_until_ready().await.map_err(ended)
    }

    /// Returns the part of the API for a kind in a namespace.
    pub(super) fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Returns the client.
    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the instance of a virtual machine's name.
    pub(super) fn vmi(&self, vm: &VirtualMachine) -> Option<Arc<VirtualMachineInstance>> {
        let meta = &vm.metadata;
        let namespace = meta.namespace.as_deref().unwrap_or_default();
        let name = meta.name.as_deref().unwrap_or_default();
        self.vmis.get(&ObjectRef::new(name).within(namespace))
    }

    /// Returns the instances that a controller with this unique id made.
    pub(super) fn vmis_of(&self, owner: &str) -> Vec<Arc<VirtualMachineInstance>> {
        self.vmis.state_filter(|vmi| {
            let owners = vmi.metadata.owner_references.iter().flatten();
            let mut controllers = owners.filter(|owner| owner.controller == Some(true));
            controllers.any(|controller| controller.uid == owner)
        })
    }

    /// Returns a pod.
    pub(super) fn pod(&self, namespace: &str, name: &str) -> Option<Arc<Pod>> {
        self.pods.get(&ObjectRef::new(name).within(namespace))
    }

    /// Returns an importer.
    pub(super) fn importer(&self, namespace: &str, name: &str) -> Option<Arc<Pod>> {
        self.importers.get(&ObjectRef::new(name).within(namespace))
    }

    /// Returns a claim.
    pub(super) fn claim_of(
        &self,
        namespace: &str,
        name: &str,
    ) -> Option<Arc<PersistentVolumeClaim>> {
        self.claims.get(&ObjectRef::new(name).within(namespace))
    }

    /// Returns a DataVolume.
    pub(super) fn volume(&self, namespace: &str, name: &str) -> Option<Arc<DataVolume>> {
        self.volumes.get(&ObjectRef::new(name).within(namespace))
    }

    /// Returns the pods that were made for an instance.
    pub(super) fn pods_of(&self, vmi: &VirtualMachineInstance) -> Vec<Arc<Pod>> {
        self.pods.state_filter(|pod| {
            pod.metadata.namespace == vmi.metadata.namespace && super::vmi::is_of(pod, vmi)
        })
    }

    /// Returns an instance by its name.
    pub(super) fn instance(
        &self,
        namespace: &str,
        name: &str,
    ) -> Option<Arc<VirtualMachineInstance>> {
        self.vmis.get(&ObjectRef::new(name).within(namespace))
    }

    /// Returns the migrations of an instance's name.
    pub(super) fn migrations_of(
        &self,
        vmi: &VirtualMachineInstance,
    ) -> Vec<Arc<VirtualMachineInstanceMigration>> {
        self.migrations.state_filter(|migration| {
            migration.metadata.namespace == vmi.metadata.namespace
                && Some(&migration.spec.vmi_name) == vmi.metadata.name.as_ref()
        })
    }

    /// Returns a disruption budget.
    pub(super) fn budget(&self, namespace: &str, name: &str) -> Option<Arc<PodDisruptionBudget>> {
        self.budgets.get(&ObjectRef::new(name).within(namespace))
    }

    /// Returns whether VMs have to leave a node.
    pub(super) fn is_drained(&self, node: &str) -> bool {
        let node = self.nodes.get(&ObjectRef::new(node));
        node.is_some_and(|node| is_drained(&node))
    }

    /// Returns what is known of a claim, if it exists.
    pub(super) fn claim(&self, namespace: &str, name: &str) -> Option<Claim> {
        let claim = self.claims.get(&ObjectRef::new(name).within(namespace))?;
        let spec = claim.spec.as_ref()?;
        let mode = match spec.volume_mode.as_deref() {
            Some("Block") => VolumeMode::Block,
            _ => VolumeMode::Filesystem,
        };
        let modes = spec.access_modes.iter().flatten();
        let is_shared = modes.into_iter().any(|mode| mode == "ReadWriteMany");
        Some(Claim { mode, is_shared })
    }
}

impl Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World")
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

fn api<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// Returns a store, and the changes that were made in it.
fn watch<K>(
    api: Api<K>,
    config: watcher::Config,
) -> (Store<K>, BoxStream<'static, Result<K, watcher::Error>>)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Hash + Eq,
{
    let (store, writer) = reflector::store();
    let changes = kube::runtime::watcher(api, config)
        .default_backoff()
        .reflect(writer)
        .touched_objects();
    // On the heap, as everything here that holds whole objects: what joins it would have it on its
    // stack several times, and overflow a thread's where it is not optimized.
    (store, changes.boxed())
}

/// Tells the controllers of each change; a watch that fails is begun again by itself.
async fn pump<K, F>(
    mut changes: BoxStream<'static, Result<K, watcher::Error>>,
    mut tell: impl FnMut(K) -> F,
) where
    F: Future<Output = ()>,
{
    loop {
        match changes.try_next().await {
            Ok(Some(object)) => tell(object).await,
            Ok(None) => return,
            Err(error) => tracing::warn!(
                error = &error as &dyn std::error::Error,
                "a watch failed, and begins again"
            ),
        }
    }
}

async fn send<K: Resource<DynamicType = ()>>(
    sender: mpsc::Sender<ObjectRef<K>>,
    objects: Vec<ObjectRef<K>>,
) {
    for object in objects {
        // Without a receiver, the controllers have ended.
        let _ = sender.send(object).await;
    }
}

fn queue<K>(receiver: mpsc::Receiver<ObjectRef<K>>) -> Queue<K>
where
    K: Resource<DynamicType = ()> + Send + 'static,
{
    stream::unfold(receiver, |mut receiver| async {
        let object = receiver.recv().await?;
        Some((Ok(object), receiver))
    })
    .boxed()
}

/// Returns the object of a kind that something is of.
fn owner<K: Resource<DynamicType = ()>>(meta: &ObjectMeta, kind: &str) -> Option<ObjectRef<K>> {
    let owner = meta
        .owner_references
        .iter()
        .flatten()
        .find(|owner| owner.controller == Some(true) && owner.kind == kind)?;
    let namespace = meta.namespace.as_deref().unwrap_or_default();
    Some(ObjectRef::new(&owner.name).within(namespace))
}

fn is_drained(node: &Node) -> bool {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
    taints.is_some_and(|taints| taints.iter().any(|taint| taint.key == DRAIN_TAINT))
}

/// Returns the instances on a node.
fn on_node(
    vmis: &Store<VirtualMachineInstance>,
    node: &Node,
) -> Vec<ObjectRef<VirtualMachineInstance>> {
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let those = vmis.state_filter(|vmi| vmi.status.node_name == name);
    those
        .iter()
        .map(|vmi| ObjectRef::from_obj(&**vmi))
        .collect()
}

/// Returns the migration that a pod is the target of.
fn migration_of(pod: &Pod) -> Option<ObjectRef<VirtualMachineInstanceMigration>> {
    let name = pod.metadata.annotations.as_ref()?;
    let name = name.get(MIGRATION_NAME_ANNOTATION)?;
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    Some(ObjectRef::new(name).within(namespace))
}

/// Returns the migrations that have not begun.
fn waiting_migrations(
    store: &Store<VirtualMachineInstanceMigration>,
) -> Vec<ObjectRef<VirtualMachineInstanceMigration>> {
    let waiting = store.state_filter(|migration| migration.status.phase <= MigrationPhase::Pending);
    waiting
        .iter()
        .map(|migration| ObjectRef::from_obj(&**migration))
        .collect()
}

/// Returns the instances that a claim may be what they wait for.
fn waiting(
    vmis: &Store<VirtualMachineInstance>,
    claim: &PersistentVolumeClaim,
) -> Vec<ObjectRef<VirtualMachineInstance>> {
    vmis.state_filter(|vmi| {
        vmi.metadata.namespace == claim.metadata.namespace
            && super::vmi::failure(&vmi.status)
                .is_some_and(|failure| failure.reason == "FailedPvcNotFound")
    })
    .iter()
    .map(|vmi| ObjectRef::from_obj(&**vmi))
    .collect()
}

/// Returns the machines that use a DataVolume.
fn users(vms: &Store<VirtualMachine>, volume: &DataVolume) -> Vec<ObjectRef<VirtualMachine>> {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    vms.state_filter(|vm| {
        vm.metadata.namespace == volume.metadata.namespace && super::vm::uses(vm, name)
    })
    .iter()
    .map(|vm| ObjectRef::from_obj(&**vm))
    .collect()
}

/// Returns the instances without a pod that may wait for a DataVolume.
fn begun(
    vmis: &Store<VirtualMachineInstance>,
    volume: &DataVolume,
) -> Vec<ObjectRef<VirtualMachineInstance>> {
    vmis.state_filter(|vmi| {
        vmi.metadata.namespace == volume.metadata.namespace
            && matches!(vmi.status.phase, Phase::Unset | Phase::Pending)
    })
    .iter()
    .map(|vmi| ObjectRef::from_obj(&**vmi))
    .collect()
}
