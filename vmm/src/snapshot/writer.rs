//! A snapshot in files that its owner has opened: for a process that may open none.
//!
//! Names, and their directory, are the owner's matter, so that the state file itself tells whether
//! the snapshot is complete: its header, without which nobody takes it for one, is written last,
//! when all else is on the disk.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use super::directory::{MEMORY, STATE};
use super::error::SnapshotError;
use super::format::{HEADER_LEN, MAGIC};
use super::state::MachineState;
use crate::memory::{GuestMemory, SaveScope};

/// Writes a full snapshot of a paused VM to files that are empty. `plugged` is as for
/// [`super::write`]; the snapshot counts if `check` confirms that the VM is still paused. After a
/// failure the files are empty again.
pub(crate) fn write_files<E: From<SnapshotError>>(
    (state_file, memory_file): (&File, &File),
    state: &MachineState,
    memory: &GuestMemory,
    plugged: u64,
    check: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    for (file, name) in [(state_file, STATE), (memory_file, MEMORY)] {
        must_be_empty(file).map_err(failed(name))?;
    }
    let written = write_all((state_file, memory_file), state, memory, plugged, check);
    if written.is_err() {
        // The state first: without it, the memory is nothing.
        for (file, name) in [(state_file, STATE), (memory_file, MEMORY)] {
            if let Err(error) = file.set_len(0).and_then(|()| file.sync_all()) {
                tracing::warn!(%error, name, "an incomplete snapshot could not be emptied");
            }
        }
    }
    written
}

fn write_all<E: From<SnapshotError>>(
    (state_file, memory_file): (&File, &File),
    state: &MachineState,
    memory: &GuestMemory,
    plugged: u64,
    check: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    memory
        .write_to(memory_file, SaveScope::All, plugged)
        .map_err(SnapshotError::from)?;
    memory_file.sync_all().map_err(failed(MEMORY))?;
    let bytes = state.encode(Path::new(STATE))?;
    let (header, rest) = bytes.split_at(HEADER_LEN.min(bytes.len()));
    state_file
        .write_all_at(rest, header.len() as u64)
        .and_then(|()| state_file.sync_all())
        .map_err(failed(STATE))?;
    check()?;
    // One sector: it is there or not.
    state_file
        .write_all_at(header, 0)
        .and_then(|()| state_file.sync_all())
        .map_err(failed(STATE))?;
    Ok(())
}

/// Whether a state file has its header.
pub(super) fn is_finished(state: &File) -> io::Result<bool> {
    let mut magic = [0; MAGIC.len()];
    match state.read_exact_at(&mut magic, 0) {
        Ok(()) => Ok(magic != [0; MAGIC.len()]),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

fn must_be_empty(file: &File) -> io::Result<()> {
    let meta = file.metadata()?;
    match meta.is_file() && meta.len() == 0 {
        true => Ok(()),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is not an empty regular file",
        )),
    }
}

fn failed(name: &'static str) -> impl Fn(io::Error) -> SnapshotError {
    move |source| SnapshotError::Write {
        path: PathBuf::from(name),
        source,
    }
}
