//! Checks for free disk space before an hour's work, not at its end.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::paths;

const GIB: u64 = 1 << 30;

/// The space of all of a command's results in `target/`, from scratch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room(u64);

/// The tests' programs, the guest kernels and the test host.
pub(crate) const TEST: Room = Room(9 * GIB);

/// Programs of Go modules; Go's caches are on the same disk in most homes.
pub(crate) const GO: Room = Room(4 * GIB);

/// The product, a guest kernel and the test host.
pub(crate) const DEMO: Room = Room(5 * GIB);

/// Returns an error if the disk of `target/` has less free space than `room`, minus what is there
/// already.
pub(crate) fn ensure(room: Room) -> Result<()> {
    let target = paths::cargo_target();
    fs::create_dir_all(&target).with_context(|| format!("cannot make {}", target.display()))?;
    let disk = rustix::fs::statvfs(&target)
        .with_context(|| format!("cannot look at the disk of {}", target.display()))?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    // Only a nearly full disk is worth scanning.
    if free >= room.0 || free.saturating_add(used(&target)) >= room.0 {
        return Ok(());
    }
    bail!(
        "{} has {:.1} GiB of room, and {} GiB are needed: remove something, or set \
         CARGO_TARGET_DIR to a directory on a larger disk",
        target.display(),
        free as f64 / GIB as f64,
        room.0 / GIB,
    )
}

/// Returns the disk usage of a directory's files in bytes, as far as it can be read.
fn used(dir: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => used(&entry.path()),
            Ok(meta) => meta.blocks().saturating_mul(512),
            Err(_) => 0,
        })
        .fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_counts_and_what_no_disk_has_is_refused() {
        let dir = std::env::temp_dir().join(format!("podvisor-space-{}", std::process::id()));
        fs::create_dir_all(dir.join("below")).unwrap();
        fs::write(dir.join("below/file"), vec![1; 100 << 10]).unwrap();
        let found = used(&dir);
        fs::remove_dir_all(&dir).unwrap();
        assert!((100 << 10..1 << 20).contains(&found), "{found}");

        assert!(ensure(Room(0)).is_ok());
        let error = ensure(Room(u64::MAX)).unwrap_err().to_string();
        assert!(error.contains("CARGO_TARGET_DIR"), "{error}");
    }
}
