//! Finds out how a sandbox ended whose process is gone.

use std::path::Path;

use tracing::{info, warn};

use super::cgroup::{self, MemoryKill};
use super::record::{self, ExitRecord};
use super::types::SandboxExit;

/// Returns how the sandbox in `dir` ended, by its process's record or by what the host's kernel did
/// to it, which is recorded; then removes its control group. `None` if it is unknown.
pub(super) fn exit_of(dir: &Path) -> Option<SandboxExit> {
    let exit = record::read(dir).map(|record| record.exit);
    let exit = exit.or_else(|| note_kill(dir, cgroup::memory_kill_of(dir)));
    cgroup::remove_of(dir);
    exit
}

/// Records that the kernel killed a process before it could write its own record: the control group
/// that shows the kill will soon be removed.
fn note_kill(dir: &Path, kill: Option<MemoryKill>) -> Option<SandboxExit> {
    let exit = SandboxExit::OutOfMemory { group: kill?.group };
    info!(dir = %dir.display(), %exit, "the sandbox was killed");
    let record = ExitRecord {
        exit: exit.clone(),
        containers: Vec::new(),
    };
    if let Err(error) = record::write_late(dir, &record) {
        warn!(dir = %dir.display(), %error, "failed to write the sandbox's exit record");
    }
    Some(exit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kill() -> Option<MemoryKill> {
        Some(MemoryKill {
            group: Some("/sys/fs/cgroup/pods/pod".into()),
        })
    }

    #[test]
    fn a_kill_is_on_record_for_who_asks_later() {
        let dir = tempfile::tempdir().unwrap();
        // As its launcher created it.
        record::create(dir.path()).unwrap();
        assert_eq!(exit_of(dir.path()), None);
        let exit = note_kill(dir.path(), kill());
        let said = "the host's kernel killed the machine because the control group \
                    /sys/fs/cgroup/pods/pod was at its memory limit";
        assert_eq!(exit.as_ref().unwrap().to_string(), said);
        assert_eq!(exit_of(dir.path()), exit);
        let none = SandboxExit::OutOfMemory { group: None };
        assert!(none.to_string().ends_with("because memory ran out"));
    }

    #[test]
    fn a_kill_in_a_directory_that_is_gone_is_told_all_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let gone = dir.path().join("gone");
        assert!(note_kill(&gone, kill()).is_some());
        assert_eq!(note_kill(dir.path(), None), None);
    }
}
