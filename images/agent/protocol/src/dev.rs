//! Devices of containers: those that every container has in its /dev, and those of the guest's own
//! that a mount may name.

use std::path::Path;

/// Nodes and links below /dev that are created in each container after its mounts.
const OWN: [&str; 12] = [
    "null", "zero", "full", "tty", "random", "urandom", "fd", "stdin", "stdout", "stderr", "ptmx",
    "kcore",
];

/// Character devices that the guest's kernel has, with the numbers (major and minor) that Linux has
/// assigned to them (`Documentation/admin-guide/devices.txt`). A bind mount may have one as its
/// source.
pub const GUEST_DEVICES: [(&str, u32, u32); 10] = [
    ("/dev/null", 1, 3),
    ("/dev/zero", 1, 5),
    ("/dev/full", 1, 7),
    ("/dev/random", 1, 8),
    ("/dev/urandom", 1, 9),
    ("/dev/kmsg", 1, 11),
    ("/dev/tty", 5, 0),
    ("/dev/net/tun", 10, 200),
    ("/dev/fuse", 10, 229),
    ("/dev/loop-control", 10, 237),
];

/// Returns whether a path is reserved for the container itself, /dev or something that is always in
/// it, so that no volume can be mounted there. It would be of no use either: devices in volumes
/// cannot be opened.
#[must_use]
pub fn is_containers_own(path: &Path) -> bool {
    let Ok(below) = path.strip_prefix("/dev") else {
        return false;
    };
    let name = below.components().next();
    name.is_none_or(|name| OWN.iter().any(|own| name.as_os_str() == *own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dev_and_what_is_always_in_it_are_the_containers_own() {
        for own in ["/dev", "/dev/", "//dev/null", "/dev/fd/3", "/dev/random"] {
            assert!(is_containers_own(Path::new(own)), "{own}");
        }
        for other in [
            "/",
            "/device",
            "/dev/termination-log",
            "/dev/shm",
            "/x/dev/null",
        ] {
            assert!(!is_containers_own(Path::new(other)), "{other}");
        }
    }
}
