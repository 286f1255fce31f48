//! The requests about disks that come and go while a guest with an operating system of its own
//! runs.

use std::fs::File;
use std::time::Duration;

use super::super::error::SandboxError;
use super::super::types::Unplugged;
use super::super::wire::{Answer, Call};
use super::SandboxClient;

/// How much longer than the guest the process may take to unplug a disk.
const UNPLUG_SLACK: Duration = Duration::from_secs(30);

impl SandboxClient {
    /// Gives a running guest a disk: a file or block device, open for reading, and for writing
    /// unless it is read-only. The guest is told, and keeps it when it reboots. If it has the disk
    /// already, nothing changes.
    ///
    /// # Errors
    /// [`SandboxError::Refused`]: another disk has the serial number, another machine has the
    /// disk, there is no room, or the guest does not run; or the sandbox is gone.
    pub async fn plug_disk(
        &self,
        id: &str,
        serial: &str,
        file: File,
        is_read_only: bool,
    ) -> Result<(), SandboxError> {
        let call = Call::PlugDisk {
            id: id.to_owned(),
            serial: serial.to_owned(),
            is_read_only,
        };
        self.done(call, vec![file.into()]).await
    }

    /// Asks a running guest to release a disk that was plugged in, and takes it away when it has,
    /// or when the limit is over. Nothing has it open when this returns. A disk that is not there
    /// counts as released.
    ///
    /// # Errors
    /// [`SandboxError::Refused`]: the guest was booted with the disk, does not run, or the disk
    /// does not answer; or the sandbox is gone.
    pub async fn unplug_disk(
        &self,
        id: &str,
        serial: &str,
        limit: Duration,
    ) -> Result<Unplugged, SandboxError> {
        let call = Call::UnplugDisk {
            id: id.to_owned(),
            serial: serial.to_owned(),
            limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
        };
        let longest = limit.saturating_add(UNPLUG_SLACK);
        match self.call_within(longest, call, Vec::new()).await? {
            (Answer::Unplugged(unplugged), _) => Ok(unplugged),
            _ => Err(self.unfit()),
        }
    }
}
