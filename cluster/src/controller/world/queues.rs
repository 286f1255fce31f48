//! The queues of the controllers: one per kind of object that a controller is for.

use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::Resource;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher;
use tokio::sync::mpsc;

use crate::objects::{
    DataSource, DataVolume, VirtualMachine, VirtualMachineClone, VirtualMachineExport,
    VirtualMachineInstance, VirtualMachineInstanceMigration, VirtualMachineInstanceReplicaSet,
    VirtualMachineRestore, VirtualMachineSnapshot,
};

/// Changes that wait for a controller. Each is known by its object, so a controller that falls
/// behind has at most as many as there are objects.
const QUEUE: usize = 1024;

/// Objects that a controller has to look at.
pub(in crate::controller) type Queue<K> = BoxStream<'static, Result<ObjectRef<K>, watcher::Error>>;

macro_rules! queues {
    ($($field:ident: $kind:ty),* $(,)?) => {
        /// The queues of the controllers.
        pub(in crate::controller) struct Queues {
            $(pub(in crate::controller) $field: Queue<$kind>,)*
        }

        /// The objects that one change makes the controllers look at.
        #[derive(Debug, Default)]
        pub(super) struct Woken {
            $(pub(super) $field: Vec<ObjectRef<$kind>>,)*
        }

        /// The other ends of the queues.
        #[derive(Clone)]
        pub(super) struct Senders {
            $($field: mpsc::Sender<ObjectRef<$kind>>,)*
        }

        impl Senders {
            /// Queues what a change wakes; waits while a queue is full.
            pub(super) async fn send(&self, woken: Woken) {
                $(send(&self.$field, woken.$field).await;)*
            }
        }

        /// Makes the queues.
        pub(super) fn channels() -> (Senders, Queues) {
            $(let $field = mpsc::channel(QUEUE);)*
            let senders = Senders { $($field: $field.0,)* };
            let queues = Queues { $($field: queue($field.1),)* };
            (senders, queues)
        }
    };
}

queues! {
    vms: VirtualMachine,
    vmis: VirtualMachineInstance,
    sets: VirtualMachineInstanceReplicaSet,
    volumes: DataVolume,
    claims: PersistentVolumeClaim,
    migrations: VirtualMachineInstanceMigration,
    snapshots: VirtualMachineSnapshot,
    restores: VirtualMachineRestore,
    clones: VirtualMachineClone,
    exports: VirtualMachineExport,
    sources: DataSource,
}

async fn send<K: Resource<DynamicType = ()>>(
    sender: &mpsc::Sender<ObjectRef<K>>,
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
