//! A guest with an operating system of its own.
//!
//! The process begins without a machine. It ends when it is asked to, and not with a machine: a
//! guest that powers itself off ends its container alone.

use tokio::sync::watch;

use super::super::error::{RefusalKind, SandboxError};
use super::super::types::{ContainerInfo, ProcessExit, SandboxExit};
use super::end::EndOfMachine;
use super::entries::not_found;

/// The guest of a sandbox's process that has no agent.
#[derive(Debug)]
pub(super) struct OwnOs {
    stopped: watch::Sender<bool>,
    /// How the sandbox ended, once it was asked to and has no machine any more.
    ended: watch::Sender<Option<SandboxExit>>,
}

impl OwnOs {
    pub(super) fn new() -> Self {
        Self {
            stopped: watch::Sender::new(false),
            ended: watch::Sender::new(None),
        }
    }

    pub(super) fn stopped(&self) -> watch::Receiver<bool> {
        self.stopped.subscribe()
    }

    pub(super) async fn pause(&self) -> Result<(), SandboxError> {
        Err(no_machine())
    }

    pub(super) async fn resume(&self) -> Result<(), SandboxError> {
        Err(no_machine())
    }

    pub(super) fn is_paused(&self) -> bool {
        false
    }

    pub(super) fn list(&self) -> Vec<ContainerInfo> {
        Vec::new()
    }

    pub(super) fn end_with(
        &self,
        id: &str,
    ) -> Result<watch::Receiver<Option<ProcessExit>>, SandboxError> {
        Err(not_found(id))
    }

    pub(super) async fn guest_is_gone(&self) {}

    pub(super) async fn detach_readers(&self) {}
}

impl EndOfMachine for OwnOs {
    async fn exit(&self) -> SandboxExit {
        let mut ended = self.ended.subscribe();
        let exit = ended.wait_for(Option::is_some).await;
        let exit = exit.ok().and_then(|exit| exit.clone());
        exit.unwrap_or(SandboxExit::Died)
    }

    fn has_stopped(&self) -> bool {
        *self.stopped.borrow()
    }

    async fn lost(&self) {
        std::future::pending().await
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    fn ask_to_stop(&self) {
        self.stopped.send_replace(true);
        self.ended.send_replace(Some(SandboxExit::PoweredOff));
    }

    fn kill(&self) {
        self.ask_to_stop();
    }
}

fn no_machine() -> SandboxError {
    SandboxError::refused(
        RefusalKind::WrongState,
        "the sandbox has no machine that runs: start its container",
    )
}
