//! The VMs of the node with every change.
//!
//! A watcher is told that something has changed, looks at the node, and sends the differences from
//! what it sent before. While its client does not read, changes come together: nothing is queued
//! but a few messages, and a slow client misses what lay between, never how things are.

use std::collections::BTreeMap;
use std::sync::Arc;

use podvisor_node_api::AnswerStream;
use podvisor_node_api::messages::{Vm, VmChange, VmEvent, VmList, VmName};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::STREAM_QUEUE;
use crate::cri::node::Node;

type Key = (String, String, String);

/// Returns the stream of a watcher.
pub(super) fn stream(node: Arc<Node>) -> AnswerStream<VmEvent> {
    let (events, stream) = mpsc::channel(STREAM_QUEUE);
    tokio::spawn(async move {
        tokio::select! {
            () = watch(&node, &events) => {}
            () = events.closed() => {}
        }
    });
    AnswerStream::new(ReceiverStream::new(stream))
}

async fn watch(node: &Node, events: &mpsc::Sender<Result<VmEvent, Status>>) {
    // Subscribed first: what changes while the node is looked at is a change.
    let mut changes = node.vms.changes();
    changes.mark_unchanged();
    let vms = node.vms().await;
    let mut known = by_name(vms.clone());
    let mut next = vec![VmChange::All(VmList { vms })];
    loop {
        for change in next {
            let event = VmEvent {
                change: Some(change),
            };
            if events.send(Ok(event)).await.is_err() {
                return;
            }
        }
        if changes.changed().await.is_err() {
            return;
        }
        let now = by_name(node.vms().await);
        next = differences(&known, &now);
        known = now;
    }
}

fn by_name(vms: Vec<Vm>) -> BTreeMap<Key, Vm> {
    let key = |vm: &Vm| {
        let name = vm.vm.clone().unwrap_or_default();
        (name.namespace, name.name, name.uid)
    };
    vms.into_iter().map(|vm| (key(&vm), vm)).collect()
}

/// Returns what leads from one state to another.
fn differences(before: &BTreeMap<Key, Vm>, after: &BTreeMap<Key, Vm>) -> Vec<VmChange> {
    let gone = before.keys().filter(|key| !after.contains_key(key));
    let gone =
        gone.map(|(namespace, name, uid)| VmChange::Removed(VmName::new(namespace, name, uid)));
    let changed = after
        .iter()
        .filter(|(key, vm)| before.get(*key) != Some(vm));
    let changed = changed.map(|(_, vm)| VmChange::Changed(vm.clone()));
    gone.chain(changed).collect()
}

#[cfg(test)]
mod tests {
    use podvisor_node_api::messages::VmPhase;

    use super::*;

    fn vm(name: &str, phase: VmPhase) -> Vm {
        Vm {
            vm: Some(VmName::new("n", name, "1")),
            phase: phase.into(),
            ..Vm::default()
        }
    }

    #[test]
    fn only_what_is_not_as_it_was_is_told() {
        let before = by_name(vec![
            vm("a", VmPhase::Running),
            vm("b", VmPhase::Running),
            vm("c", VmPhase::Running),
        ]);
        let after = by_name(vec![
            vm("a", VmPhase::Running),
            vm("b", VmPhase::Paused),
            vm("d", VmPhase::Starting),
        ]);
        assert_eq!(
            differences(&before, &after),
            [
                VmChange::Removed(VmName::new("n", "c", "1")),
                VmChange::Changed(vm("b", VmPhase::Paused)),
                VmChange::Changed(vm("d", VmPhase::Starting)),
            ]
        );
        assert_eq!(differences(&after, &after), []);
    }
}
