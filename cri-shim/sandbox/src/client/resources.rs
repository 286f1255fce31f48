//! What a sandbox has of the host, and may get while it runs: memory, CPUs, and their shares.

use std::io;
use std::path::Path;
use std::time::Duration;

use oci_spec::runtime::LinuxResources;

use super::super::cgroup;
use super::super::error::SandboxError;
use super::super::oom;
use super::super::types::RefusalKind;
use super::super::wire::{Answer, Call, FrameError};
use super::{REQUEST_TIMEOUT, SandboxClient};

impl SandboxClient {
    /// Changes a container's limits; those that `resources` leaves out stay as they are.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn update_resources(
        &self,
        id: &str,
        resources: &LinuxResources,
    ) -> Result<(), SandboxError> {
        let call = Call::UpdateResources {
            id: id.to_owned(),
            resources: Box::new(resources.clone()),
        };
        self.done(call, Vec::new()).await
    }

    /// Changes the guest's memory to `memory`, with which it was launched, plus `growth`, or as
    /// near to it as possible within `patience`: memory in use is not taken away. `most` is the
    /// growth for which it was launched. The control group's limit follows. Returns the growth that
    /// it has then, at most `most`.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] if the sandbox was launched without growth,
    /// [`SandboxError::Control`] if its process claims more than it can have, or it is gone.
    pub async fn grow(
        &self,
        memory: u64,
        growth: u64,
        most: u64,
        patience: Duration,
    ) -> Result<u64, SandboxError> {
        let dir = &self.inner.dir;
        cgroup::allow_memory(dir, memory.saturating_add(growth), most);
        let call = Call::Grow {
            bytes: growth,
            patience_ms: u64::try_from(patience.as_millis()).unwrap_or(u64::MAX),
        };
        let limit = patience.saturating_add(REQUEST_TIMEOUT);
        match self.call_within(limit, call, Vec::new()).await? {
            // The process must not raise its own limit.
            (Answer::Grown(grown), _) if grown > most => {
                Err(self.control(FrameError::Grown { grown, most }))
            }
            (Answer::Grown(grown), _) => {
                // The guest may use what it still has.
                let more = grown.max(growth);
                cgroup::limit_memory(dir, memory.saturating_add(more), most);
                Ok(grown)
            }
            _ => Err(self.unfit()),
        }
    }

    /// Whether the sandbox's process supports [`Self::await_pressure`].
    #[must_use]
    pub fn tells_pressure(&self) -> bool {
        self.greeting.tells_pressure
    }

    /// Waits until the guest's containers run short of memory. Containers that need more are
    /// stalled then, for half a minute at most: time to [`Self::grow`], and to call this again.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] if an older podvisor started the process, or the sandbox is gone.
    pub async fn await_pressure(&self) -> Result<(), SandboxError> {
        if !self.tells_pressure() {
            return Err(SandboxError::refused(
                RefusalKind::WrongState,
                "the sandbox's process is of an older podvisor and does not tell",
            ));
        }
        match self.wait_for(Call::AwaitPressure, Vec::new()).await? {
            (Answer::Done, _) => Ok(()),
            _ => Err(self.unfit()),
        }
    }

    /// Makes the guest use `count` vCPUs: more than it was launched with, or fewer again. The
    /// control group's limit follows.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] if the sandbox was launched for fewer at most, or it is gone.
    pub async fn set_vcpus(&self, count: u8) -> Result<(), SandboxError> {
        let set = self.done(Call::SetCpus { count }, Vec::new()).await;
        if set.is_ok() {
            cgroup::limit_cpus(&self.inner.dir, count);
        }
        set
    }

    /// Sets the share of CPU time that the sandbox gets under contention: 1024 is that of one CPU,
    /// as in cgroup v1.
    pub fn set_cpu_shares(&self, shares: u64) {
        cgroup::set_cpu_weight(&self.inner.dir, shares);
    }

    /// Sets how much of the host's swap the sandbox may use, in bytes; `None` is no limit.
    pub fn limit_swap(&self, bytes: Option<u64>) {
        cgroup::limit_swap(&self.inner.dir, bytes);
    }

    /// Sets how readily the host's kernel kills the sandbox when it has no memory left: -1000 is
    /// never, 1000 before all others.
    ///
    /// # Errors
    /// The process is gone, or the privilege is missing.
    pub fn set_oom_score_adj(&self, value: i16) -> io::Result<()> {
        oom::set(self.inner.pid, value)
    }

    /// Returns the host's memory that the sandbox uses, in bytes, if its control group is below
    /// `parent`, a path from the hierarchy's root.
    #[must_use]
    pub fn memory_below(&self, parent: &Path) -> Option<u64> {
        cgroup::memory_below(&self.inner.dir, parent)
    }
}
