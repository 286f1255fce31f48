//! What the controllers know of the cluster: a store per kind of object, each fed by one watch.
//!
//! A store is brought up to date before the controllers are told of a change, so that none of
//! them acts on something older than what woke it.

mod refs;
mod streams;

use std::fmt::Debug;
use std::future::Future;
use std::sync::Arc;

use futures_util::stream::BoxStream;
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher;
use kube::{Api, Client, Resource};
use tokio::sync::mpsc;

use super::Error;
use super::datavolume::{self, DataVolume};
use super::objects::{
    COMPONENT_LABEL, DataSource, HOTPLUG, LAUNCHER, VirtualMachine, VirtualMachineClone,
    VirtualMachineInstance, VirtualMachineInstanceMigration, VirtualMachineInstanceReplicaSet,
    VirtualMachineRestore, VirtualMachineSnapshot, VirtualMachineSnapshotContent, VolumeSnapshot,
};
use super::vmi::{Claim, VolumeMode};
use refs::{
    begun, copies_of, is_drained, migration_of, on_node, owner, restores_of, restores_to,
    restores_with, snapshot_of, snapshot_with, snapshots_of, sources_of, users, volumes_of,
    waiting, waiting_migrations,
};
use streams::{api, pump, queue, send, watch};

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
    pub(super) claims: Store<PersistentVolumeClaim>,
    budgets: Store<PodDisruptionBudget>,
    nodes: Store<Node>,
    pub(super) volumes: Store<DataVolume>,
    importers: Store<Pod>,
    pub(super) snapshots: Store<VirtualMachineSnapshot>,
    contents: Store<VirtualMachineSnapshotContent>,
    pub(super) restores: Store<VirtualMachineRestore>,
    pub(super) clones: Store<VirtualMachineClone>,
    pub(super) sources: Store<DataSource>,
}

/// Objects that a controller has to look at.
pub(super) type Queue<K> = BoxStream<'static, Result<ObjectRef<K>, watcher::Error>>;

/// The queues of the controllers.
pub(super) struct Queues {
    pub(super) vms: Queue<VirtualMachine>,
    pub(super) vmis: Queue<VirtualMachineInstance>,
    pub(super) sets: Queue<VirtualMachineInstanceReplicaSet>,
    pub(super) volumes: Queue<DataVolume>,
    pub(super) claims: Queue<PersistentVolumeClaim>,
    pub(super) migrations: Queue<VirtualMachineInstanceMigration>,
    pub(super) snapshots: Queue<VirtualMachineSnapshot>,
    pub(super) restores: Queue<VirtualMachineRestore>,
    pub(super) clones: Queue<VirtualMachineClone>,
    pub(super) sources: Queue<DataSource>,
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
        let of_vms = format!("{COMPONENT_LABEL} in ({LAUNCHER},{HOTPLUG})");
        let of_vms = watcher::Config::default().labels(&of_vms);
        let (pods, pod_changes) = watch(api::<Pod>(&client, namespace.as_deref()), of_vms);
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
        let (snapshots, snapshot_changes) = watch(
            api(&client, namespace.as_deref()),
            watcher::Config::default(),
        );
        let (contents, content_changes) = watch(
            api(&client, namespace.as_deref()),
            watcher::Config::default(),
        );
        let (restores, restore_changes) = watch(
            api(&client, namespace.as_deref()),
            watcher::Config::default(),
        );
        let (clones, clone_changes) = watch(
            api(&client, namespace.as_deref()),
            watcher::Config::default(),
        );
        let (sources, source_changes) = watch(
            api(&client, namespace.as_deref()),
            watcher::Config::default(),
        );
        // A cluster may not have this kind: nobody waits for its store.
        let (_, taken_changes) = watch::<VolumeSnapshot>(
            api(&client, namespace.as_deref()),
            watcher::Config::default(),
        );
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
            snapshots,
            contents,
            restores,
            clones,
            sources,
        };
        let (vm_sender, vm_queue) = mpsc::channel(QUEUE);
        let claim_vm_sender = vm_sender.clone();
        let (vmi_sender, vmi_queue) = mpsc::channel(QUEUE);
        let (set_sender, set_queue) = mpsc::channel(QUEUE);
        let (volume_sender, volume_queue) = mpsc::channel(QUEUE);
        let (claim_sender, claim_queue) = mpsc::channel(QUEUE);
        let (migration_sender, migration_queue) = mpsc::channel(QUEUE);
        let (snapshot_sender, snapshot_queue) = mpsc::channel(QUEUE);
        let (restore_sender, restore_queue) = mpsc::channel(QUEUE);
        let (clone_sender, clone_queue) = mpsc::channel(QUEUE);
        let (source_sender, source_queue) = mpsc::channel(QUEUE);
        let queues = Queues {
            snapshots: queue(snapshot_queue),
            restores: queue(restore_queue),
            clones: queue(clone_queue),
            sources: queue(source_queue),
            vms: queue(vm_queue),
            vmis: queue(vmi_queue),
            sets: queue(set_queue),
            volumes: queue(volume_queue),
            claims: queue(claim_queue),
            migrations: queue(migration_queue),
        };
        let of_volumes = pump(volume_changes, {
            let (own, vm_sender) = (volume_sender.clone(), vm_sender.clone());
            let vmi_sender = vmi_sender.clone();
            let (vms, vmis) = (world.vms.clone(), world.vmis.clone());
            move |volume: DataVolume| {
                let volumes = send(own.clone(), vec![ObjectRef::from_obj(&volume)]);
                let of_vms = send(vm_sender.clone(), users(&vms, &volume.metadata));
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
            let (sender, world) = (vm_sender.clone(), world.clone());
            let (snapshots, restores) = (snapshot_sender.clone(), restore_sender.clone());
            let clones = clone_sender.clone();
            move |vm: VirtualMachine| {
                let copies = copies_of(&world.clones, &vm.metadata);
                let copies = send(clones.clone(), copies);
                let vms = send(sender.clone(), vec![ObjectRef::from_obj(&vm)]);
                let of_it = snapshots_of(&world.snapshots, &vm.metadata);
                let of_it = send(snapshots.clone(), of_it);
                let to_it = restores_to(&world.restores, &vm.metadata);
                let to_it = send(restores.clone(), to_it);
                async move {
                    vms.await;
                    of_it.await;
                    to_it.await;
                    copies.await;
                }
            }
        });
        let of_snapshots = pump(snapshot_changes, {
            let (store, sender) = (world.restores.clone(), snapshot_sender.clone());
            let restores = restore_sender.clone();
            let (clones, clone_sender) = (world.clones.clone(), clone_sender.clone());
            move |snapshot: VirtualMachineSnapshot| {
                let copies = copies_of(&clones, &snapshot.metadata);
                let copies = send(clone_sender.clone(), copies);
                let own = send(sender.clone(), vec![ObjectRef::from_obj(&snapshot)]);
                let of_it = send(restores.clone(), restores_of(&store, &snapshot.metadata));
                async move {
                    own.await;
                    of_it.await;
                    copies.await;
                }
            }
        });
        let of_contents = pump(content_changes, {
            let sender = snapshot_sender.clone();
            move |content: VirtualMachineSnapshotContent| {
                send(sender.clone(), snapshot_of(&content).into_iter().collect())
            }
        });
        let of_taken = pump(taken_changes, {
            let (contents, sender) = (world.contents.clone(), snapshot_sender.clone());
            move |volume: VolumeSnapshot| {
                let snapshot = snapshot_with(&contents, &volume);
                send(sender.clone(), snapshot.into_iter().collect())
            }
        });
        let of_restores = pump(restore_changes, {
            let (sender, clones) = (restore_sender.clone(), clone_sender.clone());
            move |restore: VirtualMachineRestore| {
                let own = send(sender.clone(), vec![ObjectRef::from_obj(&restore)]);
                let copy = owner(&restore.metadata, "VirtualMachineClone");
                let copy = send(clones.clone(), copy.into_iter().collect());
                async move {
                    own.await;
                    copy.await;
                }
            }
        });
        let of_sources = pump(source_changes, {
            let (sender, volumes) = (source_sender.clone(), volume_sender.clone());
            let store = world.volumes.clone();
            move |source: DataSource| {
                let own = send(sender.clone(), vec![ObjectRef::from_obj(&source)]);
                let of_it = send(volumes.clone(), volumes_of(&store, &source));
                async move {
                    own.await;
                    of_it.await;
                }
            }
        });
        let of_clones = pump(clone_changes, {
            let sender = clone_sender.clone();
            move |clone: VirtualMachineClone| {
                send(sender.clone(), vec![ObjectRef::from_obj(&clone)])
            }
        });
        let of_sets = pump(set_changes, {
            let sender = set_sender.clone();
            move |set: VirtualMachineInstanceReplicaSet| {
                send(sender.clone(), vec![ObjectRef::from_obj(&set)])
            }
        });
        let of_vmis = pump(vmi_changes, {
            let (sender, world) = (vmi_sender.clone(), world.clone());
            let restore_sender = restore_sender.clone();
            move |vmi: VirtualMachineInstance| {
                let of_it = snapshots_of(&world.snapshots, &vmi.metadata);
                let of_it = send(snapshot_sender.clone(), of_it);
                let to_it = restores_to(&world.restores, &vmi.metadata);
                let to_it = send(restore_sender.clone(), to_it);
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
                    of_it.await;
                    to_it.await;
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
            let (restores, sources) = (world.restores.clone(), world.sources.clone());
            let (vms, vm_sender) = (world.vms.clone(), claim_vm_sender);
            move |claim: PersistentVolumeClaim| {
                let machines = send(vm_sender.clone(), users(&vms, &claim.metadata));
                let names = send(source_sender.clone(), sources_of(&sources, &claim));
                let with_it = restores_with(&restores, &claim);
                let with_it = send(restore_sender.clone(), with_it);
                let of_vmis = send(sender.clone(), waiting(&vmis, &claim));
                // A DataVolume has its name, whether or not it made it.
                let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
                let name = claim.metadata.name.as_deref().unwrap_or_default();
                let volume = ObjectRef::new(name).within(namespace);
                let of_volumes = send(volume_sender.clone(), vec![volume]);
                let target = datavolume::target::is_waiting(&claim);
                let target = target.then(|| ObjectRef::from_obj(&claim));
                let target = send(claim_sender.clone(), target.into_iter().collect());
                async move {
                    of_vmis.await;
                    of_volumes.await;
                    target.await;
                    with_it.await;
                    names.await;
                    machines.await;
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
                of_importers,
                of_snapshots,
                of_contents,
                of_taken,
                of_restores,
                of_clones,
                of_sources
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
        self.importers.wait_until_ready().await.map_err(ended)?;
        self.snapshots.wait_until_ready().await.map_err(ended)?;
        self.contents.wait_until_ready().await.map_err(ended)?;
        self.restores.wait_until_ready().await.map_err(ended)?;
        self.clones.wait_until_ready().await.map_err(ended)?;
        self.sources.wait_until_ready().await.map_err(ended)
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

    /// Returns a virtual machine by its name.
    pub(super) fn vm(&self, namespace: &str, name: &str) -> Option<Arc<VirtualMachine>> {
        self.vms.get(&ObjectRef::new(name).within(namespace))
    }

    /// Returns a snapshot.
    pub(super) fn snapshot(
        &self,
        namespace: &str,
        name: &str,
    ) -> Option<Arc<VirtualMachineSnapshot>> {
        self.snapshots.get(&ObjectRef::new(name).within(namespace))
    }

    /// Returns a DataSource.
    pub(super) fn source(&self, namespace: &str, name: &str) -> Option<Arc<DataSource>> {
        self.sources.get(&ObjectRef::new(name).within(namespace))
    }

    /// Returns a restore.
    pub(super) fn restore(
        &self,
        namespace: &str,
        name: &str,
    ) -> Option<Arc<VirtualMachineRestore>> {
        self.restores.get(&ObjectRef::new(name).within(namespace))
    }

    /// Returns what a snapshot contains.
    pub(super) fn content(
        &self,
        namespace: &str,
        name: &str,
    ) -> Option<Arc<VirtualMachineSnapshotContent>> {
        self.contents.get(&ObjectRef::new(name).within(namespace))
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

    /// Returns the DataVolumes that a controller with this unique id made.
    pub(super) fn volumes_of(&self, owner: &str) -> Vec<Arc<DataVolume>> {
        self.volumes.state_filter(|volume| {
            let owners = volume.metadata.owner_references.iter().flatten();
            let mut controllers = owners.filter(|owner| owner.controller == Some(true));
            controllers.any(|controller| controller.uid == owner)
        })
    }

    /// Returns the pods that were made to be an instance.
    pub(super) fn pods_of(&self, vmi: &VirtualMachineInstance) -> Vec<Arc<Pod>> {
        self.pods.state_filter(|pod| {
            pod.metadata.namespace == vmi.metadata.namespace
                && super::vmi::is_of(pod, vmi)
                && !super::vmi::is_keeper(pod)
        })
    }

    /// Returns the pods that keep claims for an instance.
    pub(super) fn keepers_of(&self, vmi: &VirtualMachineInstance) -> Vec<Arc<Pod>> {
        self.pods.state_filter(|pod| {
            pod.metadata.namespace == vmi.metadata.namespace
                && super::vmi::is_of(pod, vmi)
                && super::vmi::is_keeper(pod)
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
