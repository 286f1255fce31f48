//! A machine that is saved: its memory, its devices and, if asked for, copies of its disks.
//!
//! The guest stands still meanwhile. The state file counts when all else is on the disk, so that
//! whoever is killed in between leaves nothing that counts; and a machine that is to end then never
//! runs again once it counts.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use rustix::fs::{SeekFrom, ioctl_ficlone, seek};
use rustix::io::Errno;
use tracing::{info, warn};

use super::super::super::error::SandboxError;
use super::super::super::types::{AfterSave, RefusalKind, SaveMachine};
use super::system::OwnOs;
use super::vm::Vm;
use crate::machine::{Machine, MachineError, MachinePlan, causes};

/// Bytes of a disk that are copied in one step.
const CHUNK: usize = 1 << 20;

/// Why a machine was not saved.
#[derive(Debug, thiserror::Error)]
enum SaveError {
    #[error(transparent)]
    Machine(#[from] MachineError),
    #[error("failed to copy the disk {0:?}")]
    Copy(String, #[source] io::Error),
    #[error("failed to write the disk {0:?} to the host's disk")]
    Sync(String, #[source] io::Error),
}

impl OwnOs {
    /// Saves the machine of a container.
    pub(super) async fn save(&self, vm: &Arc<Vm>, save: SaveMachine) -> Result<(), SandboxError> {
        vm.must_share_nothing()?;
        // Nobody pauses, resumes or plugs meanwhile.
        let _turn = self.pausing.lock().await;
        vm.must_have_plugged(&save.plugged)?;
        let disks = vm.plan().written()?.len();
        if !save.disks.is_empty() && save.disks.len() != disks {
            return Err(SandboxError::refused(
                RefusalKind::InvalidArgument,
                format!(
                    "{} files for copies of disks, but the guest writes {disks}",
                    save.disks.len()
                ),
            ));
        }
        // It may run elsewhere.
        vm.migrations.must_be_over()?;
        let machine = vm.machine()?;
        let saving = vm.begin_saving()?;
        let was_paused = machine.is_paused();
        if !was_paused {
            machine.pause().await?;
        }
        let then = save.then;
        let saved = write(Arc::clone(vm), Arc::clone(&machine), save).await;
        if saved.is_ok() && then == AfterSave::End {
            saving.done();
            info!(
                container = vm.container.id,
                "the machine is saved, and ends"
            );
            machine.kill();
            return Ok(());
        }
        drop(saving);
        if !was_paused {
            let resumed = machine.resume().await;
            // One that has ended meanwhile was not saved, which says why.
            saved?;
            resumed?;
            vm.set_clock();
            return Ok(());
        }
        saved
    }
}

async fn write(vm: Arc<Vm>, machine: Arc<Machine>, save: SaveMachine) -> Result<(), SandboxError> {
    let write = move || write_all(vm.plan(), &machine, &save);
    let written = match tokio::task::spawn_blocking(write).await {
        Ok(written) => written,
        Err(error) => Err(MachineError::Thread(io::Error::other(error)).into()),
    };
    written.map_err(|error| {
        let why = causes(&error);
        warn!(why, "the machine is not saved");
        SandboxError::refused(RefusalKind::Internal, why)
    })
}

/// Writes a paused machine, its state last.
fn write_all(plan: &MachinePlan, machine: &Machine, save: &SaveMachine) -> Result<(), SaveError> {
    for (number, (serial, file)) in plan.written()?.into_iter().enumerate() {
        match save.disks.get(number) {
            Some(copy) => copy_disk(&file, copy).map_err(|error| SaveError::Copy(serial, error))?,
            // What the guest counts as written must not be lost if the host's power is.
            None => (file.sync_data()).map_err(|error| SaveError::Sync(serial, error))?,
        }
    }
    Ok(machine.snapshot_to(&save.state, &save.memory)?)
}

/// Copies the bytes of a disk's file to an empty one: as shared blocks where the file system has
/// them, else without the holes.
fn copy_disk(from: &File, to: &OwnedFd) -> io::Result<()> {
    let to = File::from(to.try_clone()?);
    match ioctl_ficlone(&to, from) {
        Ok(()) => return to.sync_all(),
        Err(Errno::OPNOTSUPP | Errno::XDEV | Errno::INVAL | Errno::NOTTY | Errno::NOSYS) => {}
        Err(error) => return Err(error.into()),
    }
    // A block device has no length in its metadata.
    let len = seek(from, SeekFrom::End(0))?;
    to.set_len(len)?;
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while at < len {
        let start = match seek(from, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            // Not every file system or device tells its holes.
            Err(Errno::INVAL) => at,
            Err(error) => return Err(error.into()),
        };
        let end = match seek(from, SeekFrom::Hole(start)) {
            Ok(end) => end.min(len),
            Err(Errno::INVAL) => len,
            Err(error) => return Err(error.into()),
        };
        at = start;
        while at < end {
            let count = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            let Some(bytes) = buffer.get_mut(..count) else {
                break;
            };
            from.read_exact_at(bytes, at)?;
            to.write_all_at(bytes, at)?;
            at += count as u64;
        }
    }
    to.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_copy_of_a_disk_has_its_bytes_and_its_holes() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let mut options = File::options();
            let options = options.read(true).write(true).create_new(true);
            options.open(dir.path().join(name)).unwrap()
        };
        let from = file("from");
        from.set_len((9 << 20) + 513).unwrap();
        for (at, bytes) in [(4096, vec![1; 3 << 20]), (8 << 20, vec![2; 1 << 20])] {
            from.write_all_at(&bytes, at).unwrap();
        }
        let to = file("to");
        copy_disk(&from, &OwnedFd::from(to.try_clone().unwrap())).unwrap();
        let read = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
        assert!(read("from") == read("to"));
        let blocks = |file: &File| file.metadata().unwrap().blocks();
        assert!(blocks(&to) <= blocks(&from) + 16);
    }
}
