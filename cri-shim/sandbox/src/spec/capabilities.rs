//! Linux capabilities: a container's default ones, and their names for users.

use std::str::FromStr;

use oci_spec::OciSpecError;
use oci_spec::runtime::{Capabilities, Capability, LinuxCapabilities, LinuxCapabilitiesBuilder};

/// Default capabilities of a container's root: those that distributions' packages rely on, and none
/// that reaches beyond the container.
pub(super) const DEFAULT: &[Capability] = &[
    Capability::AuditWrite,
    Capability::Chown,
    Capability::DacOverride,
    Capability::Fowner,
    Capability::Fsetid,
    Capability::Kill,
    Capability::Mknod,
    Capability::NetBindService,
    Capability::NetRaw,
    Capability::Setfcap,
    Capability::Setgid,
    Capability::Setpcap,
    Capability::Setuid,
    Capability::SysChroot,
];

/// All capabilities that the guest's kernel knows: those of `ALL` and of a privileged container.
#[rustfmt::skip]
const ALL: &[Capability] = &[
    Capability::AuditControl, Capability::AuditRead, Capability::AuditWrite,
    Capability::BlockSuspend, Capability::Bpf, Capability::CheckpointRestore, Capability::Chown,
    Capability::DacOverride, Capability::DacReadSearch, Capability::Fowner, Capability::Fsetid,
    Capability::IpcLock, Capability::IpcOwner, Capability::Kill, Capability::Lease,
    Capability::LinuxImmutable, Capability::MacAdmin, Capability::MacOverride, Capability::Mknod,
    Capability::NetAdmin, Capability::NetBindService, Capability::NetBroadcast,
    Capability::NetRaw, Capability::Perfmon, Capability::Setfcap, Capability::Setgid,
    Capability::Setpcap, Capability::Setuid, Capability::SysAdmin, Capability::SysBoot,
    Capability::SysChroot, Capability::SysModule, Capability::SysNice, Capability::SysPacct,
    Capability::SysPtrace, Capability::SysRawio, Capability::SysResource, Capability::SysTime,
    Capability::SysTtyConfig, Capability::Syslog, Capability::WakeAlarm,
];

/// A capability by its name in capabilities(7), with or without `CAP_`, in upper or lower case; or
/// `ALL`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamedCapability {
    /// All that the kernel has.
    All,
    /// A single one.
    One(Capability),
}

/// A name is not that of a capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no such capability; write it as in capabilities(7), NET_ADMIN say, or ALL")]
pub struct UnknownCapability;

impl FromStr for NamedCapability {
    type Err = UnknownCapability;

    fn from_str(name: &str) -> Result<Self, UnknownCapability> {
        let upper = name.to_ascii_uppercase();
        if upper == "ALL" {
            return Ok(Self::All);
        }
        let short = upper.strip_prefix("CAP_").unwrap_or(&upper);
        let mut all = ALL.iter();
        let found = all.find(|capability| capability.to_string() == short);
        found.copied().map(Self::One).ok_or(UnknownCapability)
    }
}

/// Returns the default set with `added` and without `dropped`. `ALL` is applied before individual
/// capabilities; dropped ones win over added ones.
pub fn capabilities(added: &[NamedCapability], dropped: &[NamedCapability]) -> Capabilities {
    let mut set: Capabilities = DEFAULT.iter().copied().collect();
    if added.contains(&NamedCapability::All) {
        set.extend(ALL);
    }
    if dropped.contains(&NamedCapability::All) {
        set.clear();
    }
    set.extend(added.iter().filter_map(one));
    for capability in dropped.iter().filter_map(one) {
        set.remove(&capability);
    }
    set
}

fn one(named: &NamedCapability) -> Option<Capability> {
    match named {
        NamedCapability::All => None,
        NamedCapability::One(capability) => Some(*capability),
    }
}

/// Returns all capabilities.
pub fn all_capabilities() -> Capabilities {
    ALL.iter().copied().collect()
}

/// Returns the capability sets of a process whose root has `allowed`, and which keeps `ambient`
/// even if it is not root.
pub fn process_capabilities(
    allowed: Capabilities,
    ambient: Capabilities,
) -> Result<LinuxCapabilities, OciSpecError> {
    LinuxCapabilitiesBuilder::default()
        .bounding(allowed.clone())
        .permitted(allowed.clone())
        .effective(allowed)
        .inheritable(ambient.clone())
        .ambient(ambient)
        .build()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(added: &[&str], dropped: &[&str]) -> Capabilities {
        let named = |names: &[&str]| -> Vec<NamedCapability> {
            names.iter().map(|name| name.parse().unwrap()).collect()
        };
        capabilities(&named(added), &named(dropped))
    }

    #[test]
    fn capabilities_are_added_and_dropped_and_dropping_wins() {
        let usual = changed(&[], &[]);
        assert_eq!(usual, DEFAULT.iter().copied().collect());
        assert!(changed(&["cap_net_admin"], &[]).contains(&Capability::NetAdmin));
        assert_eq!(changed(&["all"], &[]), all_capabilities());
        assert!(changed(&["ALL"], &["ALL"]).is_empty());
        assert_eq!(changed(&["CHOWN"], &["ALL"]), [Capability::Chown].into());
        assert!(changed(&["CHOWN"], &["ALL", "CHOWN"]).is_empty());
        assert_eq!(changed(&["ALL"], &["SYS_ADMIN"]).len(), ALL.len() - 1);
    }

    #[test]
    fn a_name_is_one_of_the_kernels() {
        let one = NamedCapability::One(Capability::Syslog);
        assert_eq!("CAP_SYSLOG".parse(), Ok(one));
        for bad in ["", "NET_ADMINN", "CAP_", "CAP_ALL"] {
            assert_eq!(
                bad.parse::<NamedCapability>(),
                Err(UnknownCapability),
                "{bad}"
            );
        }
    }
}
