//! Kernel parameters.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use podvisor_agent_protocol::limits;

const ROOT: &str = "/proc/sys";

/// A kernel parameter that cannot be set.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SysctlError {
    /// Not a valid name.
    #[error("{0:?} is not the name of a kernel parameter, such as net.core.somaxconn")]
    Name(String),
    /// The value is too long.
    #[error("the value of {0} is longer than {limit} bytes", limit = limits::SYSCTL_BYTES)]
    Value(String),
    /// More than the limit.
    #[error("more than {} kernel parameters", limits::SYSCTLS)]
    TooMany,
    /// The kernel does not know it, or does not accept the value.
    #[error("cannot set {name} to {value:?}")]
    Kernel {
        /// The parameter.
        name: String,
        /// The value.
        value: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// A kernel parameter of a request, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sysctl {
    name: String,
    path: PathBuf,
    value: String,
}

impl Sysctl {
    /// Checks the parameters of a request; returns them sorted by name.
    ///
    /// # Errors
    ///
    /// [`SysctlError`], except `Kernel`.
    pub fn all(wanted: &HashMap<String, String>) -> Result<Vec<Self>, SysctlError> {
        if wanted.len() > limits::SYSCTLS {
            return Err(SysctlError::TooMany);
        }
        let mut all = wanted
            .iter()
            .map(|(name, value)| {
                let path = path_of(name)
                    .ok_or_else(|| SysctlError::Name(name.chars().take(64).collect()))?;
                if value.len() > limits::SYSCTL_BYTES {
                    return Err(SysctlError::Value(name.clone()));
                }
                Ok(Self {
                    name: name.clone(),
                    path,
                    value: value.clone(),
                })
            })
            .collect::<Result<Vec<Self>, _>>()?;
        all.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(all)
    }

    /// Sets it.
    ///
    /// # Errors
    ///
    /// [`SysctlError::Kernel`].
    pub fn set(&self) -> Result<(), SysctlError> {
        // One write: the kernel takes each write as a whole value.
        OpenOptions::new()
            .write(true)
            .open(&self.path)
            .and_then(|mut file| file.write_all(self.value.as_bytes()))
            .map_err(|source| SysctlError::Kernel {
                name: self.name.clone(),
                value: self.value.chars().take(64).collect(),
                source,
            })
    }
}

/// Default parameters of every guest, unless a request sets them.
const USUAL: [(&str, &str); 19] = [
    // A program of any user may listen on every port and send echo requests.
    ("net.ipv4.ip_unprivileged_port_start", "0"),
    ("net.ipv4.ping_group_range", "0 2147483647"),
    // A program may reserve more memory than there is, as on each node that a kubelet has set up: a
    // guest grows when memory is used, and a program that uses too much is killed for that.
    ("vm.overcommit_memory", "1"),
    // The kernel derives these from the memory at boot, not from what the guest grows to. The
    // values are those of a large host with systemd; containers are limited by control groups.
    ("kernel.threads-max", "4194304"),
    ("kernel.pid_max", "4194304"),
    ("fs.file-max", "9223372036854775807"),
    // The same applies to these: values of a host with 16 GiB. The number of tracked connections is
    // set on the kernel's command line.
    ("net.ipv4.tcp_max_tw_buckets", "65536"),
    ("net.ipv4.tcp_max_orphans", "65536"),
    ("net.ipv4.tcp_max_syn_backlog", "1024"),
    // In pages for all sockets, and in bytes of each. Their memory counts as their container's.
    ("net.ipv4.tcp_mem", "190000 253000 380000"),
    ("net.ipv4.tcp_rmem", "4096 131072 6291456"),
    ("net.ipv4.tcp_wmem", "4096 16384 4194304"),
    ("net.ipv4.udp_mem", "380000 507000 760000"),
    ("fs.epoll.max_user_watches", "3500000"),
    // As editors and file synchronisers ask for on such a host.
    ("fs.inotify.max_user_watches", "524288"),
    // As set by systemd on most nodes: search engines and databases require at least 262144.
    ("vm.max_map_count", "1048576"),
    // As in a new network namespace of a node where a kubelet has set it.
    ("net.ipv4.ip_forward", "1"),
    // Work that the kernel does several times a second for unused memory is done rarely: each time
    // costs the host of an idle guest an exit.
    ("vm.compaction_proactiveness", "0"),
    ("vm.stat_interval", "10"),
];

/// Sets the default parameters of every guest. A kernel without one of them can still run
/// containers.
pub fn set_defaults() {
    let wanted = USUAL.map(|(name, value)| (name.to_owned(), value.to_owned()));
    for sysctl in Sysctl::all(&HashMap::from(wanted)).into_iter().flatten() {
        if let Err(error) = sysctl.set() {
            tracing::warn!(%error, "failed to set a default kernel parameter");
        }
    }
}

/// Returns the file of a parameter: `a.b.c` is a/b/c, and `a/b.1/c` is a path already, as in
/// sysctl(8) for interfaces with a dot in their names.
fn path_of(name: &str) -> Option<PathBuf> {
    let separator = name.chars().find(|c| matches!(c, '.' | '/'))?;
    let mut path = PathBuf::from(ROOT);
    for part in name.split(separator) {
        let part = match separator {
            '.' => part.replace('/', "."),
            _ => part.to_owned(),
        };
        let plain = part.bytes().all(|byte| byte.is_ascii_graphic());
        if part.is_empty() || part == "." || part == ".." || part.len() > 64 || !plain {
            return None;
        }
        path.push(part);
    }
    path.starts_with(Path::new(ROOT)).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_files() {
        for (name, path) in [
            ("net.core.somaxconn", "/proc/sys/net/core/somaxconn"),
            (
                "net/ipv4/conf/eth0.1/rp_filter",
                "/proc/sys/net/ipv4/conf/eth0.1/rp_filter",
            ),
            (
                "net.ipv4.conf.eth0/1.rp_filter",
                "/proc/sys/net/ipv4/conf/eth0.1/rp_filter",
            ),
        ] {
            assert_eq!(path_of(name), Some(path.into()));
        }
    }

    #[test]
    fn no_name_leads_out() {
        for name in [
            "",
            "kernel",
            "/etc/passwd",
            "net/../../etc/passwd",
            "a..b",
            ".a",
            "a.",
            "net.\n.x",
            "a.//.b",
            "net././x",
        ] {
            assert_eq!(path_of(name), None, "{name:?}");
        }
    }

    #[test]
    fn the_kernels_refusal_names_the_parameter() {
        let wanted = HashMap::from([("net.no_such.parameter".to_owned(), "1".to_owned())]);
        let error = Sysctl::all(&wanted).unwrap()[0].set().unwrap_err();
        assert!(error.to_string().contains("net.no_such.parameter"));
    }

    proptest! {
        #[test]
        fn every_path_stays_below_its_root(name in "[a./]{0,12}|\\PC{0,12}") {
            if let Some(path) = path_of(&name) {
                prop_assert!(path.starts_with(ROOT));
                prop_assert!(path.components().all(|part| part.as_os_str() != ".."));
            }
        }
    }
}
