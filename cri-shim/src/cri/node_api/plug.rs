//! Disks that come and go while a VM runs: claims of other pods, which were made to keep them.

use std::sync::Arc;
use std::time::Duration;

use podvisor_node_api::messages::{PlugDiskRequest, UnplugDiskAnswer, UnplugDiskRequest, VmName};
use tonic::Status;
use tracing::info;

use super::control::status;
use crate::blocking::apart;
use crate::cri::error::CriError;
use crate::cri::node::{Container, Node};
use crate::cri::state::ContainerPhase;
use crate::cri::vm::{Attachment, name_of};
use crate::sandbox::Unplugged;

/// Longest time that a guest may get to release a disk, in seconds.
const MAX_LIMIT: u32 = 600;

impl Node {
    /// Plugs the claim that a pod keeps into its VM.
    pub(super) async fn plug_disk_into_vm(&self, request: PlugDiskRequest) -> Result<(), Status> {
        let vm = named(request.vm)?;
        let (pod, machine) = self.running_vm(&vm).await?;
        let vm = name_of(&pod);
        let (attachment, keeper) = self.attachment(&vm, &request.pod_uid)?;
        let config = keeper.with_record(|record| record.config.clone());
        let of_container = attachment.clone();
        // A file server that does not answer must not hold up the node.
        let opened = apart("vm-open", move || of_container.open(&config)).await;
        let opened = opened.map_err(CriError::host("open the volume"))??;
        let serial = &attachment.serial;
        let plugged = pod
            .client()?
            .plug_disk(&machine.id, serial, opened.file, opened.is_read_only)
            .await;
        plugged.map_err(status)?;
        info!(
            pod = pod.id,
            volume = attachment.volume,
            serial,
            "a claim is plugged into the guest"
        );
        Ok(())
    }

    /// Takes a disk from a VM.
    pub(super) async fn unplug_disk_of_vm(
        &self,
        request: UnplugDiskRequest,
    ) -> Result<UnplugDiskAnswer, Status> {
        let vm = named(request.vm)?;
        let (pod, machine) = self.running_vm(&vm).await?;
        let limit = Duration::from_secs(request.limit_seconds.min(MAX_LIMIT).into());
        let client = pod.client()?;
        let unplugged = client
            .unplug_disk(&machine.id, &request.serial, limit)
            .await;
        Ok(UnplugDiskAnswer {
            is_forced: unplugged.map_err(status)? == Unplugged::Forced,
        })
    }

    /// Returns what a pod keeps for a VM, and its container.
    pub(super) fn attachment(
        &self,
        vm: &VmName,
        pod_uid: &str,
    ) -> Result<(Attachment, Arc<Container>), Status> {
        let refused = |why: &str| {
            let shown: String = pod_uid.chars().take(64).collect();
            let message = format!(
                "the pod with the unique id {shown:?} {why} the virtual machine {}/{}",
                vm.namespace, vm.name
            );
            Status::failed_precondition(message)
        };
        let mut pods = self.pods().into_iter().filter_map(|pod| {
            let record = pod.record();
            let metadata = record.config.metadata.unwrap_or_default();
            let is_it = metadata.uid == pod_uid && metadata.namespace == vm.namespace;
            is_it.then_some((pod, record.config.annotations))
        });
        let found = pods.next();
        let (pod, annotations) = found.ok_or_else(|| refused("is not on the node of"))?;
        let attachment = Attachment::of_annotations(&annotations)?;
        let attachment = attachment
            .filter(|attachment| pod.is_vm() && attachment.instance == vm.uid)
            .ok_or_else(|| refused("keeps no claim for"))?;
        let mut containers = self.containers_of(&pod.id).into_iter();
        let running = containers
            .find(|container| matches!(container.phase(), ContainerPhase::Running { .. }));
        let container = running.ok_or_else(|| refused("does not run yet, or any more, for"))?;
        Ok((attachment, container))
    }
}

pub(super) fn named(vm: Option<VmName>) -> Result<VmName, Status> {
    vm.ok_or_else(|| Status::invalid_argument("vm: the request names no virtual machine"))
}
