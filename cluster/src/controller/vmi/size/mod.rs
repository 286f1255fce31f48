//! CPUs and memory that come while an instance's VM runs, where its specification says more than
//! the VM has.
//!
//! `decide` says what has to be done, and this file does it: the pod's resources at the API server,
//! and what the guest gets at the node. What it asks for may be asked for twice.

mod decide;

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::pod::{self, CONTAINER};
use crate::contact::size::{ResizeAnswer, ResizeRequest};
use crate::controller::error::Error;
use crate::controller::nodes::CallError;
use crate::controller::{Context, patch};
use crate::objects::{MigrationState, Phase, VirtualMachineInstance, VmiStatus, condition};
use decide::{Change, State, Step, decide};

/// When a node is asked again that did not do it, or whose guest does not use all memory yet.
const RETRY: Duration = Duration::from_secs(10);

/// When a pod is resized again that the API server did not resize.
const RESIZE_RETRY: Duration = Duration::from_secs(30);

/// Brings the CPUs and the memory of a VM nearer to what its instance's specification says; returns
/// when to look again, if nothing else leads to it.
pub(super) async fn keep(
    vmi: &VirtualMachineInstance,
    pod: Option<&Pod>,
    pods: &Api<Pod>,
    context: &Context,
) -> Result<Option<Duration>, Error> {
    let moves = vmi.status.migration_state.as_ref();
    let moves = moves.is_some_and(MigrationState::is_open);
    let runs = vmi.status.phase == Phase::Running && vmi.metadata.deletion_timestamp.is_none();
    let (Some(pod), true, false, Ok(spec)) = (pod, runs, moves, pod::specification(vmi)) else {
        return Ok(None);
    };
    let mut turn = Turn { vmi, context };
    let Some(change) = Change::of(&spec, &vmi.status) else {
        let mut status = vmi.status.clone();
        if decide::forget(&mut status) {
            turn.write(&status).await?;
        }
        return Ok(None);
    };
    let step = match decide(&spec, pod) {
        Ok(step) => step,
        Err(error) => {
            let message = error.to_string();
            let reason = "FailedResize";
            return turn
                .wait(&change, &State::Failed { reason, message }, None)
                .await;
        }
    };
    match step {
        Step::Wait(state) => turn.wait(&change, &state, None).await,
        Step::ResizePod(resources) => match turn.resize_pod(pod, resources, pods).await {
            Ok(()) => {
                let state = State::Waits {
                    reason: "PodResizeInProgress",
                    message: "the pod asks for what the VM is to have".to_owned(),
                };
                turn.wait(&change, &state, None).await
            }
            Err(error) => {
                let state = State::Failed {
                    reason: "PodResizeRefused",
                    message: refusal(&error),
                };
                turn.wait(&change, &state, Some(RESIZE_RETRY)).await
            }
        },
        Step::Ask => match turn.ask(&change.request()).await {
            Ok(answer) => turn.done(&change, answer.memory).await,
            Err(error) => {
                let reason = match error {
                    CallError::Refused(_) => "HotplugFailed",
                    CallError::Unreachable(_) => "NodeUnresponsive",
                };
                let message = error.to_string();
                turn.wait(&change, &State::Failed { reason, message }, Some(RETRY))
                    .await
            }
        },
    }
}

/// Says why the API server did not resize a pod.
fn refusal(error: &kube::Error) -> String {
    let why = match error {
        kube::Error::Api(status) if status.code == 404 => {
            return "the API server cannot resize pods while they run: it takes Kubernetes 1.33, \
                    or a restart of the VM"
                .to_owned();
        }
        kube::Error::Api(status) => status.message.clone(),
        _ => error.to_string(),
    };
    format!("the API server does not resize the pod: {why}")
}

/// One look at an instance's size.
struct Turn<'a> {
    vmi: &'a VirtualMachineInstance,
    context: &'a Context,
}

impl Turn<'_> {
    async fn write(&mut self, status: &VmiStatus) -> Result<(), Error> {
        let namespace = self.vmi.metadata.namespace.as_deref().unwrap_or_default();
        let api: Api<VirtualMachineInstance> = self.context.world.api(namespace);
        let written = patch::status(&api, self.vmi, &self.vmi.status, status).await?;
        if let Some(written) = written {
            self.context.expectations.wrote(&written);
        }
        Ok(())
    }

    /// Writes how far the change is, and says what went wrong, once.
    async fn wait(
        &mut self,
        change: &Change,
        state: &State,
        again: Option<Duration>,
    ) -> Result<Option<Duration>, Error> {
        let mut status = self.vmi.status.clone();
        change.report(&mut status, state, &Time(Timestamp::now()));
        let is_known = [decide::CPUS, decide::MEMORY].iter().all(|kind| {
            let message = |status: &VmiStatus| {
                condition(&status.conditions, kind).map(|found| found.message.clone())
            };
            message(&status) == message(&self.vmi.status)
        });
        self.write(&status).await?;
        if let State::Failed { reason, message } = state
            && !is_known
        {
            self.context
                .warn(self.vmi, reason, "Resize", message.clone())
                .await;
        }
        Ok(again)
    }

    async fn resize_pod(
        &self,
        pod: &Pod,
        resources: Value,
        pods: &Api<Pod>,
    ) -> Result<(), kube::Error> {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        // Merged by the container's name.
        let patch = json!({
            "metadata": {"uid": pod.metadata.uid},
            "spec": {"containers": [{"name": CONTAINER, "resources": resources}]},
        });
        let patch = Patch::Strategic(patch);
        let resized = pods
            .patch_subresource("resize", name, &PatchParams::default(), &patch)
            .await?;
        self.context.expectations.made(self.vmi, &resized);
        Ok(())
    }

    /// Asks the node.
    async fn ask(&self, with: &ResizeRequest) -> Result<ResizeAnswer, CallError> {
        let answer = self.context.nodes.change(self.vmi, "size", with).await?;
        Ok(serde_json::from_value(answer).unwrap_or_default())
    }

    /// The machine has it, and the guest so much of the memory.
    async fn done(&mut self, change: &Change, memory: u64) -> Result<Option<Duration>, Error> {
        let mut status = self.vmi.status.clone();
        let is_all = change.done(&mut status, memory, &Time(Timestamp::now()));
        self.write(&status).await?;
        if !is_all {
            return Ok(Some(RETRY));
        }
        let ResizeRequest { vcpus, memory } = change.request();
        let note = match (vcpus, memory) {
            (0, memory) => format!("The VM has {memory} bytes of memory"),
            (vcpus, 0) => format!("The VM has {vcpus} vCPUs"),
            (vcpus, memory) => format!("The VM has {vcpus} vCPUs and {memory} bytes of memory"),
        };
        self.context
            .event(self.vmi, "Resized", "Resize", note)
            .await;
        Ok(None)
    }
}
