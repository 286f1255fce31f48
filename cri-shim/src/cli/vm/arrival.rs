//! Whether a VM that was to come from another host has come.
//!
//! Its record says that it arrives until `vm receive` has seen that its machine runs here. If that
//! is killed in between, the record stays so: the disk may be as it was in the moment in which the
//! guest stood still, and the guest may have gone on since, where it was. What the machine's
//! process left when it ended says which of the two it is.

use anyhow::bail;

use crate::cli::container::{Entry, Record};
use crate::sandbox::exit_record;

/// What is known of a VM that is off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Came {
    Yes,
    No,
    /// Its process was killed, or its host lost power.
    Unknown,
}

/// Returns whether nobody has seen yet that a VM runs here.
pub(super) fn is_open(record: &Record) -> bool {
    record.vm.as_ref().is_some_and(|vm| vm.arriving)
}

/// Writes down that the VM is this host's, by whoever has the claim.
pub(super) fn has_come(entry: &mut Entry) -> anyhow::Result<()> {
    if let Some(vm) = &mut entry.record.vm {
        vm.arriving = false;
    }
    entry.store()
}

/// Refuses a VM that is off and did not come, or may not have; by whoever has the claim.
pub(super) fn must_have_come(entry: &mut Entry) -> anyhow::Result<()> {
    if !is_open(&entry.record) {
        return Ok(());
    }
    let name = &entry.record.name;
    match came(entry) {
        Came::Yes => has_come(entry),
        Came::No => bail!(
            "VM {name} is half of a migration: it did not arrive from another host, and its disk \
             here is older than the VM, which goes on there (if it stands still there: `podvisor \
             vm migrate --resolve here` on that host); remove this half by `podvisor vm rm {name}`"
        ),
        Came::Unknown => bail!(
            "VM {name} may be half of a migration: nobody saw it arrive from another host, and it \
             may run there, while its disk here is older. See there by `podvisor vm ps`; then, \
             here, `podvisor vm migrate --resolve there {name}` if it is there, which removes this \
             half, else `--resolve here`, after which it can be started"
        ),
    }
}

fn came(entry: &Entry) -> Came {
    let record = exit_record(&entry.sandbox_dir());
    let own = record.and_then(|record| {
        let mut all = record.containers.into_iter();
        all.find(|info| info.id == entry.record.id)
    });
    match own {
        Some(info) if info.never_came => Came::No,
        Some(_) => Came::Yes,
        None => Came::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;
    use crate::cli::container::{Containers, VmRecord, sample_record};

    #[test]
    fn what_the_machines_process_left_says_whether_the_vm_came() {
        let root = tempfile::tempdir().unwrap();
        let containers = Containers::open(root.path()).unwrap();
        let mut record = sample_record("a", "web");
        record.vm = Some(VmRecord {
            arriving: true,
            ..VmRecord::default()
        });
        let (mut entry, _claim) = containers.create(record).unwrap();
        let refusal = |entry: &mut Entry| must_have_come(entry).unwrap_err().to_string();
        // It was killed.
        let unknown = refusal(&mut entry);
        assert!(unknown.contains("--resolve there web"), "{unknown}");
        let left = |id: &str, never_came| {
            let exit = json!({"code": 1, "exited_at_ns": 2, "oom_killed": false});
            let info = json!({
                "id": id, "state": "Exited", "pid": 1, "started_at_ns": 1, "exit": exit,
                "never_came": never_came
            });
            json!({"exit": "PoweredOff", "containers": [info]}).to_string()
        };
        let file = entry.sandbox_dir().join("exit.json");
        let id = entry.record.id.clone();
        fs::write(&file, left("b", false)).unwrap();
        assert_eq!(came(&entry), Came::Unknown);
        fs::write(&file, left(&id, true)).unwrap();
        let never = refusal(&mut entry);
        assert!(never.contains("vm rm web"), "{never}");
        // Its process ended after it had run, and nobody had told so.
        fs::write(&file, left(&id, false)).unwrap();
        must_have_come(&mut entry).unwrap();
        fs::remove_file(&file).unwrap();
        must_have_come(&mut entry).unwrap();
        let stored = containers.find("web").unwrap();
        assert!(!is_open(&stored.record));
    }
}
