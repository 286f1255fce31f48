//! What the controllers know of the cluster: a store per kind of object, each fed by one watch.
//!
//! A store is brought up to date before the controllers are told of a change, so that none of
//! them acts on something older than what woke it.
//!
//! | file | contents |
//! | --- | --- |
//! | `streams` | the watches, which feed the stores and tell of changes |
//! | `changes` | whom a change of each kind of object wakes |
//! | `refs` | the objects that something refers to, or that refer to it |
//! | `queues` | the queues of the controllers |
//! | `writers` | which pods may write to claims |

mod changes;
mod queues;
mod refs;
mod streams;
mod writers;

use std::fmt::Debug;
use std::future::Future;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::ListParams;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher;
use kube::{Api, Client, Resource};

use super::Error;
use super::claims::{Claim, VolumeMode};
use super::instances::{is_keeper, is_of};
use crate::objects::{
    CDI_COMPONENT_LABEL, COMPONENT_LABEL, DataSource, DataVolume, EXPORTER, HOTPLUG, IMPORTER,
    LAUNCHER, VirtualMachine, VirtualMachineClone, VirtualMachineExport, VirtualMachineInstance,
    VirtualMachineInstanceMigration, VirtualMachineInstanceReplicaSet, VirtualMachineRestore,
    VirtualMachineSnapshot, VirtualMachineSnapshotContent, VolumeSnapshot,
};
pub(super) use queues::{Queue, Queues};
use refs::is_drained;
use streams::Watches;

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
    writers: Store<Pod>,
    pub(super) claims: Store<PersistentVolumeClaim>,
    budgets: Store<PodDisruptionBudget>,
    nodes: Store<Node>,
    pub(super) volumes: Store<DataVolume>,
    importers: Store<Pod>,
    pub(super) snapshots: Store<VirtualMachineSnapshot>,
    contents: Store<VirtualMachineSnapshotContent>,
    pub(super) restores: Store<VirtualMachineRestore>,
    pub(super) clones: Store<VirtualMachineClone>,
    pub(super) exports: Store<VirtualMachineExport>,
    exporters: Store<Pod>,
    pub(super) sources: Store<DataSource>,
}

impl World {
    /// Begins to watch; the future does the work, and must be polled.
    pub(super) fn watch(
        client: Client,
        namespace: Option<String>,
    ) -> (Self, Queues, impl Future<Output = ()> + Send) {
        let all = watcher::Config::default;
        let of_vms = format!("{COMPONENT_LABEL} in ({LAUNCHER},{HOTPLUG})");
        let launchers = format!("{COMPONENT_LABEL}={LAUNCHER}");
        let importers = format!("{CDI_COMPONENT_LABEL}={IMPORTER}");
        let exporters = format!("{COMPONENT_LABEL}={EXPORTER}");
        let mut watches = Watches::new(client.clone(), namespace.clone());
        let world = Self {
            client,
            namespace,
            vms: watches.of(all()),
            vmis: watches.of(all()),
            sets: watches.of(all()),
            migrations: watches.of(all()),
            pods: watches.of(all().labels(&of_vms)),
            // Trimmed, they wake exports alone: who else waits for them looks again by itself.
            writers: watches.of_trimmed(writers::trim),
            claims: watches.of(all()),
            budgets: watches.of(all().labels(&launchers)),
            nodes: watches.of_cluster(all()),
            volumes: watches.of(all()),
            importers: watches.of(all().labels(&importers)),
            snapshots: watches.of(all()),
            contents: watches.of(all()),
            restores: watches.of(all()),
            clones: watches.of(all()),
            exports: watches.of(all()),
            exporters: watches.of(all().labels(&exporters)),
            sources: watches.of(all()),
        };
        // A cluster may not have this kind: nobody waits for its store.
        watches.of::<VolumeSnapshot>(all());
        let (senders, queues) = queues::channels();
        let work = watches.tell(&world, &senders);
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
        self.writers.wait_until_ready().await.map_err(ended)?;
        self.budgets.wait_until_ready().await.map_err(ended)?;
        self.nodes.wait_until_ready().await.map_err(ended)?;
        self.claims.wait_until_ready().await.map_err(ended)?;
        self.volumes.wait_until_ready().await.map_err(ended)?;
        self.importers.wait_until_ready().await.map_err(ended)?;
        self.snapshots.wait_until_ready().await.map_err(ended)?;
        self.contents.wait_until_ready().await.map_err(ended)?;
        self.restores.wait_until_ready().await.map_err(ended)?;
        self.clones.wait_until_ready().await.map_err(ended)?;
        self.exports.wait_until_ready().await.map_err(ended)?;
        self.exporters.wait_until_ready().await.map_err(ended)?;
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

    /// Returns a pod that has not ended and may write to one of these claims. The API server is
    /// asked only about a namespace that is not watched.
    pub(super) async fn writer(
        &self,
        namespace: &str,
        claims: &[&str],
    ) -> kube::Result<Option<String>> {
        let is_watched = self.namespace.as_deref().is_none_or(|own| own == namespace);
        if is_watched {
            let found = self.writers.find(|pod| {
                pod.metadata.namespace.as_deref() == Some(namespace)
                    && writers::writes_to(pod, claims)
            });
            return Ok(found.and_then(|pod| pod.metadata.name.clone()));
        }
        let pods: Api<Pod> = self.api(namespace);
        let pods = pods.list(&ListParams::default()).await?.items;
        let found = pods.into_iter().find(|pod| writers::writes_to(pod, claims));
        Ok(found.and_then(|pod| pod.metadata.name))
    }

    /// Returns an importer.
    pub(super) fn importer(&self, namespace: &str, name: &str) -> Option<Arc<Pod>> {
        self.importers.get(&ObjectRef::new(name).within(namespace))
    }

    /// Returns a pod that serves an export.
    pub(super) fn exporter(&self, namespace: &str, name: &str) -> Option<Arc<Pod>> {
        self.exporters.get(&ObjectRef::new(name).within(namespace))
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
            pod.metadata.namespace == vmi.metadata.namespace && is_of(pod, vmi) && !is_keeper(pod)
        })
    }

    /// Returns the pods that keep claims for an instance.
    pub(super) fn keepers_of(&self, vmi: &VirtualMachineInstance) -> Vec<Arc<Pod>> {
        self.pods.state_filter(|pod| {
            pod.metadata.namespace == vmi.metadata.namespace && is_of(pod, vmi) && is_keeper(pod)
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
