//! What people read in `kubectl describe` of what happened on the node.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};

use podvisor_node_api::messages::{VmName, VmPhase};

use crate::node::{Access, guest::cut, machines::Action};

/// Writes events of VMs.
pub(in crate::node) struct Events(Arc<Access>);

impl Events {
    pub(in crate::node) fn new(access: Arc<Access>) -> Self {
        Self(access)
    }

    /// Of something that was asked for and done. That it pauses or runs again is told when it does.
    pub(in crate::node) async fn done(&self, vm: &VmName, action: Action) {
        let (reason, note) = match action {
            Action::SoftReboot => ("SoftRebooted", "The guest was asked to reboot"),
            Action::Reset => ("Reset", "The virtual machine was reset"),
            Action::Freeze(_) => ("Frozen", "The guest's file systems are frozen"),
            Action::Thaw => ("Thawed", "The guest's file systems are thawed"),
            Action::Pause | Action::Unpause => return,
        };
        self.publish(vm, EventType::Normal, reason, note).await;
    }

    /// Of something that failed in the guest.
    pub(in crate::node) async fn failed(&self, vm: &VmName, action: Action, why: &str) {
        if matches!(action, Action::Freeze(_) | Action::Thaw) {
            let note = cut(why);
            self.publish(vm, EventType::Warning, "FreezeError", &note)
                .await;
        }
    }

    /// Of a VM that was seen in another phase before.
    pub(super) async fn changed(&self, vm: &VmName, before: VmPhase, after: VmPhase) {
        let (reason, note) = match (before, after) {
            (VmPhase::Running | VmPhase::Starting, VmPhase::Paused) => {
                ("Paused", "The virtual machine was paused")
            }
            (VmPhase::Paused, VmPhase::Running) => ("Resumed", "The virtual machine runs again"),
            _ => return,
        };
        self.publish(vm, EventType::Normal, reason, note).await;
    }

    async fn publish(&self, vm: &VmName, type_: EventType, reason: &str, note: &str) {
        let reporter = Reporter {
            controller: "podvisor-node".to_owned(),
            instance: None,
        };
        let of = ObjectReference {
            api_version: Some("kubevirt.io/v1".to_owned()),
            kind: Some("VirtualMachineInstance".to_owned()),
            namespace: Some(vm.namespace.clone()),
            name: Some(vm.name.clone()),
            uid: Some(vm.uid.clone()),
            ..Default::default()
        };
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note.to_owned()),
            action: reason.to_owned(),
            secondary: None,
        };
        let recorder = Recorder::new(self.0.client(), reporter);
        if let Err(error) = recorder.publish(&event, &of).await {
            tracing::debug!(%error, reason, "failed to write an event");
        }
    }
}
