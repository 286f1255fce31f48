//! What is observed of an instance, and what is decided by it.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::controller::claims::{Claim, VolumeMode};
use crate::objects::{Phase, PhaseTransition, VirtualMachineInstance, VmiStatus, VolumeState};

/// What was observed.
#[allow(missing_debug_implementations, reason = "a closure has none")]
pub struct Observed<'a> {
    /// The instance.
    pub vmi: &'a VirtualMachineInstance,
    /// The pod that it is in.
    pub pod: Option<&'a Pod>,
    /// What a DataVolume of the namespace means for those who use its claim, if it exists.
    pub volume: &'a dyn Fn(&str) -> Option<VolumeState>,
    /// Its other pods: where it comes from, or may go.
    pub others: &'a [Other],
    /// Whether the migration of its status exists, if that is not over.
    pub is_migration_known: bool,
    /// What is known of a claim of the namespace, if it exists.
    pub claim: &'a dyn Fn(&str) -> Option<Claim>,
    /// The time.
    pub now: Time,
}

impl Observed<'_> {
    /// Returns how a claim can be used, if it exists.
    pub(super) fn mode(&self, claim: &str) -> Option<VolumeMode> {
        (self.claim)(claim).map(|claim| claim.mode)
    }
}

/// A pod of an instance that it is not in.
#[derive(Debug, Clone)]
pub struct Other {
    /// It.
    pub pod: Arc<Pod>,
    /// A migration that goes on needs it.
    pub is_wanted: bool,
}

/// Something to do at the API server.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Keep the instance until its pod is gone.
    AddFinalizer,
    /// Let the instance go.
    RemoveFinalizer,
    /// Write the node's name on the instance.
    SetNodeLabel(String),
    /// Write into the pod's readiness gate whether the VM is paused.
    SetGate {
        /// The pod's name.
        pod: String,
        /// Whether it is.
        is_paused: bool,
    },
    /// Make the pod.
    CreatePod(Box<Pod>),
    /// Make the pod by which claims are bound; it asks for what this pod would ask for.
    CreateConsumer(Box<Pod>),
    /// Delete that pod.
    DeleteConsumer,
    /// End the pod, with so many seconds for the guest to power off.
    DeletePod {
        /// The pod's name.
        name: String,
        /// The pod's unique id.
        uid: String,
        /// Seconds.
        grace: i64,
    },
}

/// What is to be written and done, in this order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Decision {
    /// The status to write, if it differs.
    pub status: VmiStatus,
    /// What follows.
    pub actions: Vec<Action>,
}

/// Records that an instance is in a phase, and since when.
pub(super) fn set_phase(status: &mut VmiStatus, phase: Phase, now: &Time) {
    status.phase = phase;
    let transitions = &mut status.phase_transition_timestamps;
    if !transitions.iter().any(|passed| passed.phase == phase) {
        transitions.push(PhaseTransition {
            phase,
            phase_transition_timestamp: Some(now.clone()),
        });
    }
}
