//! Snapshots: a paused VM in a directory, and VMs that continue from there.
//!
//! * `format.rs` is the state file: records with kind, id, version and checksum.
//! * `state.rs` defines which records a VM has, with `vcpu.rs` and `chips.rs` for KVM's state and
//!   `device.rs` for registers; devices define their own state (`podvisor-devices`).
//! * `cpu.rs` refuses a guest that was started on a processor with more features.
//! * `directory.rs` makes the directory complete or absent; `writer.rs` does so for files that
//!   the owner has opened.
//! * `working_set.rs` lists the pages that VMs write first.
//!
//! The memory file is written and mapped by the [memory](crate::memory) module. How a VM gathers
//! all this is part of its lifecycle, in `vm/lifecycle/save.rs`; `vm/builder/saved_state.rs` sets it
//! in a new one.
//!
//! A snapshot is untrusted input: whoever can write one controls what the guest does, but nothing
//! in it makes this process panic, hang or access what is not the guest's.

mod chips;
mod cpu;
mod device;
mod directory;
mod error;
mod format;
mod state;
#[cfg(any(test, feature = "test-utils"))]
#[allow(unreachable_pub)] // reached with the feature alone
pub mod testing;
mod vcpu;
mod working_set;
mod writer;

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use kvm_bindings::kvm_cpuid_entry2;
use kvm_ioctls::VcpuFd;

pub use cpu::CpuMismatch;
pub use error::SnapshotError;
pub use format::SnapshotFormatError;
pub use working_set::WorkingSet;

pub(crate) use chips::ChipState;
pub(crate) use device::{DeviceState, SavedRegisters};
pub(crate) use state::{Base, Identity, MachineState};
pub(crate) use vcpu::{CounterSetup, VcpuState, msr_numbers};
pub(crate) use writer::write_files;

use crate::memory::{GuestMemory, MemorySize, SaveScope, gather_huge_pages};
use directory::{MEMORY, NewDirectory, STATE};

/// An open snapshot, from which any number of VMs can be restored. Cheap to clone.
///
/// ```no_run
/// use podvisor_vmm::{BlockDevice, Snapshot, VsockDevice};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let warm = Snapshot::open("/var/lib/warm")?;
/// let vm = warm
///     .builder()
///     .block(BlockDevice::open("root.erofs")?.read_only())
///     .vsock(VsockDevice::unix_mux(7, "/run/x/vsock")?)
///     .build()?;
/// vm.start()?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Snapshot(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    state: MachineState,
    memory: Contents,
    /// The directory and identity of the full snapshot; `None` if it was passed as files.
    full: Option<(PathBuf, Identity)>,
}

/// What a restored machine's memory has in it.
#[derive(Debug)]
enum Contents {
    /// That of files.
    Files {
        /// The memory file of the full snapshot.
        full: Arc<File>,
        /// A difference's memory file.
        difference: Option<File>,
    },
    /// That of a machine that has moved here: it is one machine's, which goes on with it.
    Moved(Mutex<Option<GuestMemory>>),
}

impl Snapshot {
    /// Opens the snapshot in this directory, and the full one that it is based on.
    ///
    /// The files must not change while VMs run that were restored from them: their memory is the
    /// content of the file, except for what they wrote. If the memory file is truncated meanwhile,
    /// or its file system fails to read it, the process is ended by SIGBUS. A sealed memfd, passed
    /// to [`Self::from_files`], cannot be truncated.
    ///
    /// # Errors
    /// Fails if a file cannot be read, is damaged, or belongs to another version of this library.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self, SnapshotError> {
        let dir = dir.as_ref();
        let (state, memory) = open(dir)?;
        let Some(base) = &state.base else {
            let full = absolute(dir)?;
            let identity = state.identity;
            return Ok(Self(Arc::new(Opened {
                state,
                memory: Contents::Files {
                    full: Arc::new(memory),
                    difference: None,
                },
                full: Some((full, identity)),
            })));
        };
        let (full, full_memory) = open(&base.path)?;
        let same = full.identity == base.identity && full.base.is_none();
        if !same || full.memory != state.memory {
            return Err(SnapshotError::OtherBase {
                path: base.path.clone(),
            });
        }
        let full = Some((base.path.clone(), base.identity));
        Ok(Self(Arc::new(Opened {
            state,
            memory: Contents::Files {
                full: Arc::new(full_memory),
                difference: Some(memory),
            },
            full,
        })))
    }

    /// Creates a full snapshot from files that are open for reading: for a process that may not
    /// open any, or for a copy in a memfd that is sealed against being truncated and written.
    ///
    /// # Errors
    /// As [`Self::open`]; the messages call the files "state" and "memory".
    pub fn from_files(state: File, memory: File) -> Result<Self, SnapshotError> {
        let path = Path::new(STATE);
        let state = read_state(state, path)?;
        if state.base.is_some() {
            let source = SnapshotFormatError::Invalid {
                what: "the memory".to_owned(),
                why: "it is the difference to another snapshot",
            };
            let path = path.to_owned();
            return Err(SnapshotError::Format { path, source });
        }
        check_memory(&memory, Path::new(MEMORY), state.memory.total())?;
        Ok(Self(Arc::new(Opened {
            state,
            memory: Contents::Files {
                full: Arc::new(memory),
                difference: None,
            },
            full: None,
        })))
    }

    /// Returns whether this state file was written to its end: [`Vm::snapshot_to`] makes it count
    /// last, so that one whose writer was killed is empty or has no beginning. A file that was
    /// damaged later counts, and [`Self::from_files`] refuses it.
    ///
    /// # Errors
    /// The file cannot be read.
    ///
    /// [`Vm::snapshot_to`]: crate::Vm::snapshot_to
    pub fn is_finished(state: &File) -> io::Result<bool> {
        writer::is_finished(state)
    }

    /// Creates one of a machine that has moved here with its memory. One machine can be restored
    /// from it.
    pub(crate) fn moved(state: MachineState, memory: GuestMemory) -> Self {
        Self(Arc::new(Opened {
            state,
            memory: Contents::Moved(Mutex::new(Some(memory))),
            full: None,
        }))
    }

    /// Whether the guest goes on as the machine that it was, rather than as a copy of it.
    pub(crate) fn is_moved(&self) -> bool {
        matches!(self.0.memory, Contents::Moved(_))
    }

    /// Removes what killed processes have left of a snapshot that was to be in `dir`: of all
    /// processes, or of one by its PID, which may be this process's own unless it is writing
    /// another one there. Failures are logged.
    pub fn remove_partial(dir: impl AsRef<Path>, process: Option<u32>) {
        directory::remove_partial(dir.as_ref(), process);
    }

    /// Stores a working set with the snapshot in `dir`: pages that restored VMs will write first.
    /// VMs that are restored from now on get these pages copied up front. Pages that they will only
    /// read are gathered into huge pages if the kernel and the file system support it (Linux 6.1,
    /// tmpfs). If several callers do this at once, the last one wins.
    ///
    /// # Errors
    /// Fails if the snapshot cannot be read or written; it has its previous working set then. (It
    /// may have the new one if only the directory cannot be synced to disk.)
    pub fn set_working_set(
        dir: impl AsRef<Path>,
        working_set: WorkingSet,
    ) -> Result<(), SnapshotError> {
        let dir = dir.as_ref();
        let (mut state, memory) = open(dir)?;
        // It may be of another machine. A snapshot with pages beyond its memory cannot be opened.
        let working_set = working_set.within(state.memory.boot.as_bytes());
        match gather_huge_pages(&Arc::new(memory), state.memory, working_set.pages()) {
            Ok(bytes) => tracing::debug!(bytes, "the memory file has huge pages"),
            Err(error) => tracing::debug!(%error, "the memory file has no huge pages"),
        }
        state.working_set = Some(working_set);
        directory::replace_state(dir, &state.encode(dir)?)
    }

    /// Returns the number of vCPUs.
    #[must_use]
    pub fn vcpus(&self) -> u8 {
        // Checked when it was opened.
        u8::try_from(self.state().vcpus.len()).unwrap_or(u8::MAX)
    }

    /// Returns the maximum number of vCPUs.
    #[must_use]
    pub fn max_vcpus(&self) -> u8 {
        self.state().max_vcpus
    }

    /// Returns the amount of guest memory, without what may be plugged in.
    #[must_use]
    pub fn memory(&self) -> MemorySize {
        self.state().memory.boot
    }

    /// Returns how much memory may be plugged in; zero if the guest has no memory device.
    #[must_use]
    pub fn hotplug_memory(&self) -> MemorySize {
        self.state().memory.hotplug
    }

    /// Returns the names of the virtio devices, in order: `blk0`, `vsock0`, … The memory device is
    /// not among them: it comes with the memory.
    #[must_use]
    pub fn devices(&self) -> Vec<String> {
        self.state().builders_devices()
    }

    /// Returns the index of the memory device among the devices.
    pub(crate) fn memory_device(&self) -> Option<usize> {
        self.state().memory_device()
    }

    pub(crate) fn state(&self) -> &MachineState {
        &self.0.state
    }

    /// Returns the directory and identity of the underlying full snapshot.
    pub(crate) fn full(&self) -> Option<&(PathBuf, Identity)> {
        self.0.full.as_ref()
    }

    /// Maps guest memory that is the snapshot's until it is written. Pages of the working set are
    /// not copied yet.
    pub(crate) fn map(&self) -> Result<GuestMemory, SnapshotError> {
        let (full, difference) = match &self.0.memory {
            Contents::Files { full, difference } => (full, difference),
            Contents::Moved(memory) => {
                let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
                return memory.take().ok_or(SnapshotError::Moved);
            }
        };
        let memory = GuestMemory::private(self.state().memory, full.clone())?;
        if let (Some(file), Some(base)) = (difference, &self.state().base) {
            memory.read_from(file, &base.ranges)?;
        }
        Ok(memory)
    }

    /// Checks that this host has the CPU features that the guest knows.
    pub(crate) fn check_cpu(&self, here: &[kvm_cpuid_entry2]) -> Result<(), SnapshotError> {
        self.state().check_cpu(here)
    }

    /// Checks that the guest knows all features of this host. `vcpu` is a new one, as a guest that
    /// boots has it.
    pub(crate) fn check_same_cpu(
        &self,
        here: &[kvm_cpuid_entry2],
        vcpu: &VcpuFd,
    ) -> Result<(), SnapshotError> {
        let saved = self.state();
        cpu::check_known(saved.cpuid.as_slice(), here).map_err(SnapshotError::Cpu)?;
        let Some(saved) = saved.vcpus.first() else {
            return Ok(());
        };
        match saved.has_capabilities_of(vcpu)? {
            true => Ok(()),
            false => Err(SnapshotError::Cpu(CpuMismatch {
                unknown: vec!["IA32_ARCH_CAPABILITIES as it is here".to_owned()],
                ..CpuMismatch::default()
            })),
        }
    }

    #[cfg(test)]
    pub(crate) fn state_mut(&mut self) -> &mut MachineState {
        &mut Arc::get_mut(&mut self.0).expect("nobody else has it").state
    }
}

/// Writes a snapshot of a paused VM. `state` is complete except for the list of memory in the file.
/// Of the memory that may be plugged in, nothing is plugged after the first `plugged` bytes. The
/// directory gets its name if `check` confirms that the VM is still paused.
pub(crate) fn write<E: From<SnapshotError>>(
    dir: &Path,
    mut state: MachineState,
    memory: &GuestMemory,
    plugged: u64,
    full: Option<(PathBuf, Identity)>,
    check: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    let new = NewDirectory::create(dir)?;
    let file = new.file(MEMORY)?;
    let which = if full.is_some() {
        SaveScope::Own
    } else {
        SaveScope::All
    };
    let ranges = memory
        .write_to(&file, which, plugged)
        .map_err(SnapshotError::from)?;
    file.sync_all().map_err(|source| new.failed(source))?;
    state.base = full.map(|(path, identity)| Base {
        path,
        identity,
        ranges,
    });
    let state = state.encode(dir)?;
    let mut file = new.file(STATE)?;
    file.write_all(&state)
        .and_then(|()| file.sync_all())
        .map_err(|source| new.failed(source))?;
    check()?;
    Ok(new.complete()?)
}

/// Encodes the state of a machine that moves to another host.
pub(crate) fn encode_moving(state: &MachineState) -> Vec<u8> {
    format::encode(&state.to_records())
}

/// Decodes what [`encode_moving`] returned elsewhere, or what claims to be that.
pub(crate) fn decode_moving(bytes: &[u8]) -> Result<MachineState, SnapshotFormatError> {
    let state = format::decode(bytes).and_then(MachineState::from_records)?;
    match state.base {
        None => Ok(state),
        Some(_) => Err(SnapshotFormatError::Invalid {
            what: "the memory".to_owned(),
            why: "it is the difference to another snapshot",
        }),
    }
}

/// Opens both files of a directory and checks that they belong together.
fn open(dir: &Path) -> Result<(MachineState, File), SnapshotError> {
    let open = |name| {
        let path = dir.join(name);
        // Opening a FIFO would wait for a writer.
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path);
        match file {
            Ok(file) => Ok((file, path)),
            Err(source) => Err(SnapshotError::Read { path, source }),
        }
    };
    let (state, path) = open(STATE)?;
    let state = read_state(state, &path)?;
    let (memory, path) = open(MEMORY)?;
    check_memory(&memory, &path, state.memory.total())?;
    Ok((state, memory))
}

fn read_state(file: File, path: &Path) -> Result<MachineState, SnapshotError> {
    let read = |source| SnapshotError::Read {
        path: path.to_owned(),
        source,
    };
    regular(&file).map_err(read)?;
    let mut bytes = Vec::new();
    file.take(format::MAX_LEN + 1)
        .read_to_end(&mut bytes)
        .map_err(read)?;
    let len = bytes.len() as u64;
    let decoded = if len > format::MAX_LEN {
        Err(SnapshotFormatError::Length { len })
    } else {
        format::decode(&bytes).and_then(MachineState::from_records)
    };
    decoded.map_err(|source| SnapshotError::Format {
        path: path.to_owned(),
        source,
    })
}

/// A file that is too short would kill the process with SIGBUS when the guest touches the missing
/// part.
fn check_memory(file: &File, path: &Path, size: MemorySize) -> Result<(), SnapshotError> {
    let path = || path.to_owned();
    let len = regular(file).map_err(|source| SnapshotError::Read {
        path: path(),
        source,
    })?;
    if len == size.as_bytes() {
        return Ok(());
    }
    Err(SnapshotError::Format {
        path: path(),
        source: SnapshotFormatError::Length { len },
    })
}

/// Returns the length of a regular file; other files are refused, since reading them might never
/// end.
fn regular(file: &File) -> io::Result<u64> {
    let meta = file.metadata()?;
    if meta.is_file() {
        Ok(meta.len())
    } else {
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is not a regular file",
        ))
    }
}

fn absolute(dir: &Path) -> Result<PathBuf, SnapshotError> {
    dir.canonicalize().map_err(|source| SnapshotError::Read {
        path: dir.to_owned(),
        source,
    })
}
