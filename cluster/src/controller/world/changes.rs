//! Whom a change wakes: for each kind of object that is watched, what the controllers look at when
//! one of it has come, changed or gone.

use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::runtime::reflector::ObjectRef;

use super::World;
use super::queues::Woken;
use super::refs::{
    begun, copies_of, exports_beside, exports_of, exports_with, is_drained, migration_of, on_node,
    owner, restores_of, restores_to, restores_with, snapshot_of, snapshot_with, snapshots_of,
    sources_of, users, volumes_of, waiting, waiting_migrations,
};
use crate::controller::claims::awaits_upload;
use crate::objects::{
    DataSource, DataVolume, VirtualMachine, VirtualMachineClone, VirtualMachineExport,
    VirtualMachineInstance, VirtualMachineInstanceMigration, VirtualMachineInstanceReplicaSet,
    VirtualMachineRestore, VirtualMachineSnapshot, VirtualMachineSnapshotContent, VolumeSnapshot,
};

/// An object whose changes concern controllers.
pub(super) trait Change {
    /// Returns what has to be looked at after a change of the object, which `world` knows already.
    fn wakes(&self, world: &World) -> Woken;
}

/// Returns a reference to an object, as the only one.
fn itself<K: Resource<DynamicType = ()>>(object: &K) -> Vec<ObjectRef<K>> {
    vec![ObjectRef::from_obj(object)]
}

/// Returns a reference to the object of another kind with the name of this one.
fn namesake<K: Resource<DynamicType = ()>>(meta: &ObjectMeta) -> Vec<ObjectRef<K>> {
    let namespace = meta.namespace.as_deref().unwrap_or_default();
    let name = meta.name.as_deref().unwrap_or_default();
    vec![ObjectRef::new(name).within(namespace)]
}

/// Returns a reference to the object of a kind that made this one, if one did.
fn maker<K: Resource<DynamicType = ()>>(meta: &ObjectMeta, kind: &str) -> Vec<ObjectRef<K>> {
    owner(meta, kind).into_iter().collect()
}

impl Change for VirtualMachine {
    fn wakes(&self, world: &World) -> Woken {
        Woken {
            vms: itself(self),
            snapshots: snapshots_of(&world.snapshots, &self.metadata),
            restores: restores_to(&world.restores, &self.metadata),
            clones: copies_of(&world.clones, &self.metadata),
            exports: exports_of(&world.exports, "VirtualMachine", &self.metadata),
            ..Woken::default()
        }
    }
}

impl Change for VirtualMachineInstance {
    fn wakes(&self, world: &World) -> Woken {
        Woken {
            vmis: itself(self),
            // A machine has its name, whether or not it made it.
            vms: namesake(&self.metadata),
            sets: maker(&self.metadata, "VirtualMachineInstanceReplicaSet"),
            snapshots: snapshots_of(&world.snapshots, &self.metadata),
            restores: restores_to(&world.restores, &self.metadata),
            exports: exports_of(&world.exports, "VirtualMachine", &self.metadata),
            ..Woken::default()
        }
    }
}

impl Change for VirtualMachineInstanceReplicaSet {
    fn wakes(&self, _: &World) -> Woken {
        Woken {
            sets: itself(self),
            ..Woken::default()
        }
    }
}

impl Change for VirtualMachineInstanceMigration {
    fn wakes(&self, world: &World) -> Woken {
        let mut migrations = itself(self);
        // One that ends makes place for those that wait.
        if self.status.phase.is_final() {
            migrations.extend(waiting_migrations(&world.migrations));
        }
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        Woken {
            migrations,
            vmis: vec![ObjectRef::new(&self.spec.vmi_name).within(namespace)],
            ..Woken::default()
        }
    }
}

/// The pods of instances, those that keep volumes for them, importers and exporters, and whoever
/// uses claims.
impl Change for Pod {
    fn wakes(&self, world: &World) -> Woken {
        Woken {
            vmis: maker(&self.metadata, "VirtualMachineInstance"),
            migrations: migration_of(self).into_iter().collect(),
            volumes: maker(&self.metadata, "DataVolume"),
            exports: exports_beside(&world.exports, self),
            ..Woken::default()
        }
    }
}

impl Change for PersistentVolumeClaim {
    fn wakes(&self, world: &World) -> Woken {
        let claims = if awaits_upload(self) {
            itself(self)
        } else {
            Vec::new()
        };
        Woken {
            claims,
            vms: users(&world.vms, &self.metadata),
            vmis: waiting(&world.vmis, self),
            // A DataVolume has its name, whether or not it made it.
            volumes: namesake(&self.metadata),
            restores: restores_with(&world.restores, self),
            sources: sources_of(&world.sources, self),
            exports: exports_with(&world.exports, &world.vms, &self.metadata),
            ..Woken::default()
        }
    }
}

impl Change for PodDisruptionBudget {
    fn wakes(&self, _: &World) -> Woken {
        Woken {
            vmis: maker(&self.metadata, "VirtualMachineInstance"),
            ..Woken::default()
        }
    }
}

impl Change for Node {
    fn wakes(&self, world: &World) -> Woken {
        let vmis = if is_drained(self) {
            on_node(&world.vmis, self)
        } else {
            Vec::new()
        };
        Woken {
            vmis,
            ..Woken::default()
        }
    }
}

impl Change for DataVolume {
    fn wakes(&self, world: &World) -> Woken {
        Woken {
            volumes: itself(self),
            vms: users(&world.vms, &self.metadata),
            vmis: begun(&world.vmis, self),
            exports: exports_with(&world.exports, &world.vms, &self.metadata),
            ..Woken::default()
        }
    }
}

impl Change for VirtualMachineSnapshot {
    fn wakes(&self, world: &World) -> Woken {
        Woken {
            snapshots: itself(self),
            restores: restores_of(&world.restores, &self.metadata),
            clones: copies_of(&world.clones, &self.metadata),
            exports: exports_of(&world.exports, "VirtualMachineSnapshot", &self.metadata),
            ..Woken::default()
        }
    }
}

impl Change for VirtualMachineSnapshotContent {
    fn wakes(&self, _: &World) -> Woken {
        Woken {
            snapshots: snapshot_of(self).into_iter().collect(),
            ..Woken::default()
        }
    }
}

impl Change for VolumeSnapshot {
    fn wakes(&self, world: &World) -> Woken {
        let snapshot = snapshot_with(&world.contents, self);
        Woken {
            snapshots: snapshot.into_iter().collect(),
            ..Woken::default()
        }
    }
}

impl Change for VirtualMachineRestore {
    fn wakes(&self, _: &World) -> Woken {
        Woken {
            restores: itself(self),
            clones: maker(&self.metadata, "VirtualMachineClone"),
            ..Woken::default()
        }
    }
}

impl Change for VirtualMachineClone {
    fn wakes(&self, _: &World) -> Woken {
        Woken {
            clones: itself(self),
            ..Woken::default()
        }
    }
}

impl Change for VirtualMachineExport {
    fn wakes(&self, _: &World) -> Woken {
        Woken {
            exports: itself(self),
            ..Woken::default()
        }
    }
}

impl Change for DataSource {
    fn wakes(&self, world: &World) -> Woken {
        Woken {
            sources: itself(self),
            volumes: volumes_of(&world.volumes, self),
            ..Woken::default()
        }
    }
}
