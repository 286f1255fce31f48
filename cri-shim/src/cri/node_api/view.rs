//! The VMs of the node, as they are reported.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use podvisor_node_api::messages::{Vm, VmExit, VmName, VmPhase};
use tokio::time::timeout;
use tonic::Status;
use tracing::debug;

use super::migrate::shown;
use crate::cri::node::{Container, Node, Pod, now};
use crate::cri::state::{ContainerExit, ContainerPhase, PodPhase, PodRecord};
use crate::cri::vm::{is_attachment, name_of};
use crate::sandbox::{MigrationDirection, MigrationInfo, MigrationState};

/// How long a sandbox may take to say whether its guest is paused: one that hangs must not hide
/// the others.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);

/// A VM and its pod.
#[derive(Debug, Clone)]
pub(super) struct PodOfVm {
    pub(super) name: VmName,
    pub(super) pod: Arc<Pod>,
}

/// Which pod of several is the VM: one whose machine runs goes before one that waits for it, and
/// the latest before the others.
type Rank = (bool, i64);

impl Node {
    /// Returns the pods that are VMs, in the order of their names: of several attempts to run one,
    /// the latest.
    pub(super) fn vm_pods(&self) -> Vec<PodOfVm> {
        let mut found: BTreeMap<(String, String, String), (Rank, PodOfVm)> = BTreeMap::new();
        let is_vm = |pod: &Arc<Pod>| pod.is_vm() && !is_attachment(pod);
        for pod in self.pods().into_iter().filter(is_vm) {
            let name = name_of(&pod);
            let rank = self.rank(&pod);
            let key = (name.namespace.clone(), name.name.clone(), name.uid.clone());
            if found.get(&key).is_none_or(|(other, _)| *other < rank) {
                found.insert(key, (rank, PodOfVm { name, pod }));
            }
        }
        found.into_values().map(|(_, found)| found).collect()
    }

    fn rank(&self, pod: &Pod) -> Rank {
        let runs = self.container_of_vm(pod).is_some_and(|container| {
            matches!(container.phase(), ContainerPhase::Running { .. })
                && !self.waits_for_machine(&container)
        });
        (runs, pod.with_record(|record| record.created_at))
    }

    /// Whether a container's machine is still to come from another node.
    fn waits_for_machine(&self, container: &Container) -> bool {
        match self.vms.migration_of(&container.id) {
            Some(info) => info.direction == MigrationDirection::In && !is_here(&info),
            // Its process has not said anything yet.
            None => container.with_record(|record| {
                let vm = record.vm.as_ref();
                vm.is_some_and(|vm| vm.incoming.is_some())
            }),
        }
    }

    /// Returns all VMs.
    pub(super) async fn vms(&self) -> Vec<Vm> {
        self.all_settled().await;
        let pods = self.vm_pods();
        let vms = join_all(pods.iter().map(|found| self.vm(found))).await;
        let runs = |container: &str| {
            let known = self.container(container);
            known.is_ok_and(|container| matches!(container.phase(), ContainerPhase::Running { .. }))
        };
        self.vms.retain(runs);
        self.vms
            .retain_migrations(|container| self.container(container).is_ok());
        vms
    }

    /// Finds a VM.
    ///
    /// # Errors
    /// There is none of that name.
    pub(super) async fn find_vm(&self, wanted: &VmName) -> Result<PodOfVm, Status> {
        if wanted.namespace.is_empty() || wanted.name.is_empty() {
            let message = "vm: a virtual machine has a namespace and a name";
            return Err(Status::invalid_argument(message));
        }
        self.all_settled().await;
        let mut pods = self.vm_pods();
        pods.retain(|found| wanted.matches(&found.name));
        // The latest, if several have the name.
        let latest = pods.into_iter().max_by_key(|found| self.rank(&found.pod));
        latest.ok_or_else(|| {
            let shown: String = format!("{}/{}", wanted.namespace, wanted.name)
                .chars()
                .take(320)
                .collect();
            Status::not_found(format!("this node has no virtual machine {shown}"))
        })
    }

    /// Returns the container of a VM, the latest attempt.
    pub(in crate::cri) fn container_of_vm(&self, pod: &Pod) -> Option<Arc<Container>> {
        let containers = self.containers_of(&pod.id).into_iter();
        containers.max_by_key(|container| container.with_record(|record| record.created_at))
    }

    /// Returns the container of a VM that runs.
    ///
    /// # Errors
    /// It does not run.
    pub(super) async fn running_vm(
        &self,
        wanted: &VmName,
    ) -> Result<(Arc<Pod>, Arc<Container>), Status> {
        let PodOfVm { name, pod } = self.find_vm(wanted).await?;
        let container = self.container_of_vm(&pod);
        let is_running = |container: &Arc<Container>| {
            matches!(container.phase(), ContainerPhase::Running { .. })
        };
        match container.filter(is_running) {
            Some(container) => Ok((pod, container)),
            None => Err(Status::failed_precondition(format!(
                "the virtual machine {}/{} does not run",
                name.namespace, name.name
            ))),
        }
    }

    async fn vm(&self, found: &PodOfVm) -> Vm {
        let PodOfVm { name, pod } = found;
        let record = pod.record();
        let metadata = record.config.metadata.clone().unwrap_or_default();
        let container = self.container_of_vm(pod);
        let migration = container
            .as_ref()
            .and_then(|container| self.vms.migration_of(&container.id));
        let (phase, since_ns, exit) = match &container {
            Some(container) => {
                let migration = migration.as_ref();
                self.phase_of(&record, pod, container, migration).await
            }
            None => without_container(&record),
        };
        let migration = migration
            .as_ref()
            .map(|info| Box::new(shown(info, exit.as_ref())));
        Vm {
            vm: Some(name.clone()),
            pod_name: metadata.name,
            pod_uid: metadata.uid,
            container_id: container.map_or_else(String::new, |container| container.id.clone()),
            phase: phase.into(),
            since_ns,
            addresses: match record.phase {
                PodPhase::Ready => record.addresses.iter().map(ToString::to_string).collect(),
                _ => Vec::new(),
            },
            exit,
            migration,
            sandbox_id: record.id,
        }
    }

    async fn phase_of(
        &self,
        pod_record: &PodRecord,
        pod: &Pod,
        container: &Container,
        migration: Option<&MigrationInfo>,
    ) -> (VmPhase, i64, Option<VmExit>) {
        let record = container.record();
        let is_waited_for = self.waits_for_machine(container);
        let is_in_doubt = migration.is_some_and(|info| info.state == MigrationState::InDoubt);
        let ended = |exit: ContainerExit| {
            let shown = VmExit {
                code: exit.code,
                reason: exit.reason,
                message: exit.message,
            };
            (VmPhase::Ended, exit.finished_at, Some(shown))
        };
        match (record.phase, record.exit_before_removal) {
            (ContainerPhase::Running { started_at }, _) if is_waited_for => {
                (VmPhase::Incoming, started_at, None)
            }
            (ContainerPhase::Running { started_at }, _) if is_in_doubt => {
                (VmPhase::Paused, started_at, None)
            }
            (ContainerPhase::Running { started_at }, _) => {
                match self.paused_since(pod, &record.id).await {
                    Some(since) => (VmPhase::Paused, since, None),
                    None => (VmPhase::Running, started_at, None),
                }
            }
            (ContainerPhase::Exited(exit), _) | (ContainerPhase::Removing, Some(exit)) => {
                ended(exit)
            }
            (ContainerPhase::Removing, None) => (VmPhase::Ended, record.created_at, None),
            (ContainerPhase::Creating | ContainerPhase::Created, _) => match pod_record.phase {
                PodPhase::Creating | PodPhase::Ready => {
                    (VmPhase::Starting, record.created_at, None)
                }
                _ => without_container(pod_record),
            },
        }
    }

    /// Returns since when a machine is paused. One that an earlier daemon has paused counts from
    /// now on.
    async fn paused_since(&self, pod: &Pod, container: &str) -> Option<i64> {
        if let Some(known) = self.vms.pause_of(container) {
            return known;
        }
        let client = pod.client().ok()?;
        match timeout(ASK_TIMEOUT, client.is_paused()).await {
            Ok(Ok(is_paused)) => self.vms.note_found(container, is_paused.then(now)),
            Ok(Err(error)) => {
                debug!(pod = pod.id, %error, "whether the guest is paused is not known");
                None
            }
            Err(_) => None,
        }
    }
}

/// Whether a machine that was to come has come.
fn is_here(info: &MigrationInfo) -> bool {
    info.state == MigrationState::Done
}

/// What is reported of a VM that has no container.
fn without_container(record: &PodRecord) -> (VmPhase, i64, Option<VmExit>) {
    match &record.phase {
        PodPhase::Creating | PodPhase::Ready => (VmPhase::Starting, record.created_at, None),
        PodPhase::Stopped { reason, .. } => {
            let exit = reason.clone().map(|message| VmExit {
                code: -1,
                reason: "PodEnded".to_owned(),
                message,
            });
            (VmPhase::Ended, record.created_at, exit)
        }
        PodPhase::Removing => (VmPhase::Ended, record.created_at, None),
    }
}
