//! Status of containers and their processes.

use std::sync::Arc;

use oci_spec::runtime::User;
use podvisor_agent_protocol::api;

use super::lock::lock;
use super::table::{Container, Containers, Slot};
use crate::reaper::ProcessExit;

/// A created container.
#[derive(Debug, Clone)]
pub struct Created {
    /// Its process in the guest's pid namespace.
    pub pid: u32,
    /// Its user and groups, as numbers.
    pub user: User,
}

/// A started process.
#[derive(Debug, Clone, Copy)]
pub struct Started {
    /// Its id in the guest's pid namespace.
    pub pid: u32,
    /// Nanoseconds since 1970-01-01 UTC.
    pub at_ns: u64,
}

/// How a process ended.
#[derive(Debug, Clone, Copy)]
pub struct ContainerExit {
    /// Status and time.
    pub exit: ProcessExit,
    /// For the container's own process: whether the OOM killer killed any process in the container.
    /// For others: whether it killed that one.
    pub oom_killed: bool,
}

impl From<ContainerExit> for api::WaitProcessResponse {
    fn from(ended: ContainerExit) -> Self {
        Self {
            status: Some(ended.exit.status.into()),
            exited_at_ns: ended.exit.at_ns,
            oom_killed: ended.oom_killed,
            ..Default::default()
        }
    }
}

impl Containers {
    /// Returns every container, in the order of creation.
    #[must_use]
    pub fn list(&self) -> Vec<api::ContainerStatus> {
        let table = self.lock();
        let mut containers: Vec<(&String, &Arc<Container>)> = table
            .slots
            .iter()
            .filter_map(|(id, slot)| match slot {
                Slot::Ready(container) => Some((id, container)),
                Slot::Busy => None,
            })
            .collect();
        containers.sort_by_key(|(_, container)| container.order);
        let status = |(id, container): (&String, &Arc<Container>)| api::ContainerStatus {
            container_id: id.clone(),
            state: container.state().into(),
            pid: container.init.pid(),
            started_at_ns: lock(&container.started).unwrap_or(0),
            exit: container.ended().map(Into::into).into(),
            ..Default::default()
        };
        containers.into_iter().map(status).collect()
    }
}

impl Container {
    /// Returns the exit of its process, if it has ended.
    fn ended(&self) -> Option<ContainerExit> {
        let exit = (*self.init.exit().borrow())?;
        Some(ContainerExit {
            exit,
            oom_killed: self.is_oom_killed(),
        })
    }

    pub(super) fn is_oom_killed(&self) -> bool {
        let known = self.was_oom_killed.get().copied();
        known.unwrap_or_else(|| self.cgroup.oom_kills() > self.oom_kills_before)
    }

    /// Records whether there was an OOM kill, before the control group is removed.
    pub(super) fn keep_oom_kill(&self) {
        let is_killed = self.is_oom_killed();
        self.was_oom_killed.get_or_init(|| is_killed);
    }

    fn state(&self) -> api::ContainerState {
        if self.init.has_ended() {
            api::ContainerState::CONTAINER_STATE_EXITED
        } else if lock(&self.started).is_some() {
            api::ContainerState::CONTAINER_STATE_RUNNING
        } else {
            api::ContainerState::CONTAINER_STATE_CREATED
        }
    }
}
