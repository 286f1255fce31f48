//! How readily the host's kernel kills a sandbox's process when the host has no memory left.

use std::fs;
use std::io;

/// The `oom_score_adj` file of a process: from -1000 (never) to 1000 (first).
fn file(pid: u32) -> String {
    format!("/proc/{pid}/oom_score_adj")
}

/// Sets the value. Lowering it needs a privilege.
pub(super) fn set(pid: u32, value: i16) -> io::Result<()> {
    fs::write(file(pid), value.to_string())
}

/// Removes the protection that a process inherited from its launcher: a protected daemon's machines
/// are not protected for that reason.
pub(super) fn expose(pid: u32) -> io::Result<()> {
    let inherited = fs::read_to_string(file(pid))?;
    match inherited.trim().parse::<i16>() {
        Ok(value) if value < 0 => set(pid, 0),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_has_what_it_is_given_and_no_protection_of_its_launchers() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id();
        let value = || fs::read_to_string(file(pid)).unwrap().trim().to_owned();
        set(pid, 500).unwrap();
        expose(pid).unwrap();
        assert_eq!(value(), "500");
        // Without the privilege, nothing is protected either.
        if set(pid, -997).is_ok() {
            assert_eq!(value(), "-997");
            expose(pid).unwrap();
            assert_eq!(value(), "0");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(set(pid, 0).is_err());
    }
}
