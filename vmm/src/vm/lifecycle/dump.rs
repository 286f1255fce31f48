//! Writes the memory and the registers of a paused VM for debuggers.

use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;

use super::vm::{Vm, VmError};
use crate::dump::{self, DumpedVcpu, Region};
use crate::kvm::KvmError;
use crate::memory::MemoryError;
use crate::vm::devices::handle::HandleError;
use crate::vm::lock::lock;
use crate::vm::state::Action;

/// The bytes by which a file is known as an ELF file.
const MAGIC_LEN: usize = 16;

/// How far a dump is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DumpProgress {
    /// Bytes of memory that were passed; zeroes take no time.
    pub done: u64,
    /// Bytes of all memory.
    pub total: u64,
}

/// Why a VM's memory was not dumped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DumpError {
    /// The VM is not paused, or has ended.
    #[error(transparent)]
    State(#[from] VmError),
    /// The device that plugs memory in did not answer.
    #[error(transparent)]
    Device(#[from] HandleError),
    /// KVM did not return a vCPU's registers.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// Memory could not be read, or written to the file.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The file could not be written.
    #[error("failed to write the dump")]
    Write(#[source] io::Error),
    /// The file is no place for a dump.
    #[error("a dump needs an empty regular file")]
    NotEmpty,
    /// The caller did not want to go on.
    #[error("the dump was cancelled")]
    Cancelled,
    /// The guest ran meanwhile, so that the file has memory of several moments.
    #[error("the VM was resumed before its memory was written")]
    Resumed,
}

impl Vm {
    /// Writes the memory of a paused VM and the registers of its vCPUs to `file`, which is empty
    /// and open for reading and writing: as an ELF core file, as QEMU's `dump-guest-memory` writes
    /// it without paging. Pages of zeroes become holes. `progress` is called from time to time, at
    /// most every 16 MiB, and may end it.
    ///
    /// The file begins with zeroes until all else is on the disk, so that nobody takes a part for a
    /// dump. It is empty again if this fails. The VM stays paused, and may be resumed meanwhile by
    /// who does not want to wait, upon which this fails.
    ///
    /// # Errors
    /// See [`DumpError`].
    pub fn dump_to(
        &self,
        file: &File,
        progress: impl FnMut(DumpProgress) -> ControlFlow<()>,
    ) -> Result<(), DumpError> {
        let meta = file.metadata().map_err(DumpError::Write)?;
        if !meta.is_file() || meta.len() != 0 {
            return Err(DumpError::NotEmpty);
        }
        let written = self.write_dump(file, progress);
        if written.is_err()
            && let Err(error) = file.set_len(0).and_then(|()| file.sync_all())
        {
            tracing::warn!(%error, "an incomplete dump could not be emptied");
        }
        written
    }

    fn write_dump(
        &self,
        file: &File,
        mut progress: impl FnMut(DumpProgress) -> ControlFlow<()>,
    ) -> Result<(), DumpError> {
        let (vcpus, plugged, resumes) = self.gather_for_dump()?;
        let memory = &self.context.machine.memory;
        let regions = memory.dumped(plugged).into_iter().map(|span| Region {
            start: span.start,
            len: span.len,
        });
        let regions: Vec<Region> = regions.collect();
        let total: u64 = regions.iter().map(|region| region.len).sum();
        let head = dump::head(&vcpus, &regions);
        // Not under the lock: who must have the guest running can resume it.
        let is_written = memory.dump_to(file, head.len() as u64, plugged, |done| {
            match self.check_not_ended() {
                Ok(()) => progress(DumpProgress { done, total }),
                Err(_) => ControlFlow::Break(()),
            }
        })?;
        if !is_written {
            self.check_not_ended()?;
            return Err(DumpError::Cancelled);
        }
        let (magic, rest) = head.split_at(MAGIC_LEN.min(head.len()));
        file.write_all_at(rest, magic.len() as u64)
            .and_then(|()| file.sync_all())
            .map_err(DumpError::Write)?;
        self.check_not_ended()?;
        if self.control().lock().resumes != resumes {
            return Err(DumpError::Resumed);
        }
        // They are there or not.
        file.write_all_at(magic, 0)
            .and_then(|()| file.sync_all())
            .map_err(DumpError::Write)
    }

    /// Returns the registers of all vCPUs, where plugged memory ends, and how often the VM was
    /// resumed by then.
    fn gather_for_dump(&self) -> Result<(Vec<DumpedVcpu>, u64, u64), DumpError> {
        let _transition = lock(&self.transition);
        let resumes = {
            let inner = self.control().lock();
            self.legal(&inner, Action::Dump)?;
            inner.resumes
        };
        let plugged = self.plugged_memory()?;
        let vcpus = self
            .control()
            .with_vcpus(|vcpu| DumpedVcpu::gather(vcpu))
            .ok_or_else(|| {
                let inner = self.control().lock();
                self.illegal(&inner, Action::Dump)
            })?;
        let vcpus = vcpus.into_iter().collect::<Result<_, _>>()?;
        Ok((vcpus, plugged, resumes))
    }
}
