//! The user of the host that a sandbox's process becomes, which no other process is.

use rustix::process::geteuid;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities};

use super::error::{JailError, step};

/// A sandbox's user and group are this plus its pid: no two that run at the same time have the
/// same, and no state is needed. Linux pids are below 2²².
pub const UID_BASE: u32 = 2_000_000_000;

/// Capabilities for entering the jail as another user than root.
const CHANGE_IDENTITY: CapabilitySet = CapabilitySet::SYS_ADMIN
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETPCAP);

/// Whether this process may change its user and create namespaces: true for root, unless in a
/// container with fewer capabilities.
#[must_use]
pub fn can_change_identity() -> bool {
    let has = |sets: CapabilitySets| sets.effective.contains(CHANGE_IDENTITY);
    geteuid().is_root() && capabilities(None).is_ok_and(has)
}

/// Returns the user id for this process. `/proc` shows its pid in the host's PID namespace.
pub(super) fn own_uid() -> Result<u32, JailError> {
    let find = || {
        let link = std::fs::read_link("/proc/self")?;
        let pid = link.to_str().and_then(|text| text.parse::<u32>().ok());
        pid.and_then(|pid| UID_BASE.checked_add(pid))
            .ok_or_else(|| std::io::Error::from(std::io::ErrorKind::InvalidData))
    };
    find().map_err(step("find this process in /proc"))
}
