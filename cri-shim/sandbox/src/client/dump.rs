//! The requests about dumps of a machine's memory.

use std::time::Duration;

use super::super::error::SandboxError;
use super::super::types::{DumpInfo, DumpMachine};
use super::super::wire::{Answer, Call};
use super::SandboxClient;

impl SandboxClient {
    /// Begins to write the memory of a running guest, and the registers of its vCPUs, to a file:
    /// an ELF core file as `crash` and `gdb` read it. The sandbox's process does it, whether or
    /// not a client is connected; [`Self::dump`] tells how far it is. The guest stands still
    /// meanwhile. If that dump is being written already, nothing changes.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] if another dump is being written, or the guest does not run; or
    /// the sandbox is gone.
    pub async fn dump_machine(&self, id: &str, dump: DumpMachine) -> Result<(), SandboxError> {
        let call = Call::DumpMemory {
            id: id.to_owned(),
            name: dump.name,
            limit_ms: millis(dump.limit),
        };
        self.done(call, vec![dump.file.into()]).await
    }

    /// Returns the latest dump of a container's machine, if there was one.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn dump(&self, id: &str) -> Result<Option<DumpInfo>, SandboxError> {
        let call = Call::Dump {
            id: id.to_owned(),
            is_end: false,
        };
        match self.call(call, Vec::new()).await? {
            (Answer::Dump(info), _) => Ok(info.map(|info| *info)),
            _ => Err(self.unfit()),
        }
    }

    /// Waits until no dump of a container's machine is being written, and returns the latest.
    ///
    /// # Errors
    /// As [`Self::dump`].
    pub async fn dump_ended(&self, id: &str) -> Result<Option<DumpInfo>, SandboxError> {
        let call = Call::Dump {
            id: id.to_owned(),
            is_end: true,
        };
        match self.wait_for(call, Vec::new()).await? {
            (Answer::Dump(info), _) => Ok(info.map(|info| *info)),
            _ => Err(self.unfit()),
        }
    }
}

fn millis(limit: Duration) -> u64 {
    u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)
}
