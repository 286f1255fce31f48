//! Events of containers.

use prost::{Enumeration, Message};

use crate::{ContainerStatus, PodSandboxStatus};

/// What happened to a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum ContainerEventType {
    /// It was made.
    ContainerCreatedEvent = 0,
    /// It was started.
    ContainerStartedEvent = 1,
    /// It ended.
    ContainerStoppedEvent = 2,
    /// It was removed.
    ContainerDeletedEvent = 3,
}

/// Request of
/// [`RuntimeService::get_container_events`](crate::RuntimeService::get_container_events).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct GetEventsRequest {}

/// One of the answers of
/// [`RuntimeService::get_container_events`](crate::RuntimeService::get_container_events).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerEventResponse {
    /// The id of the container.
    #[prost(string, tag = "1")]
    pub container_id: String,
    /// What happened.
    #[prost(enumeration = "ContainerEventType", tag = "2")]
    pub container_event_type: i32,
    /// When it happened, in nanoseconds since 1970.
    #[prost(int64, tag = "3")]
    pub created_at: i64,
    /// State of its pod.
    #[prost(message, optional, tag = "4")]
    pub pod_sandbox_status: Option<PodSandboxStatus>,
    /// States of the pod's containers.
    #[prost(message, repeated, tag = "5")]
    pub containers_statuses: Vec<ContainerStatus>,
}
