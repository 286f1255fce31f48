//! Character devices that every guest's kernel has itself. A container gets them instead of the
//! host's, of which a virtual machine has none.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};

use rustix::fs::makedev;

/// A device, with the number that Linux has assigned to it.
struct GuestDevice {
    path: &'static str,
    major: u32,
    minor: u32,
    is_for_privileged: bool,
}

const fn device(path: &'static str, major: u32, minor: u32) -> GuestDevice {
    GuestDevice {
        path,
        major,
        minor,
        is_for_privileged: false,
    }
}

/// `Documentation/admin-guide/devices.txt` of Linux.
const DEVICES: [GuestDevice; 10] = [
    device("/dev/null", 1, 3),
    device("/dev/zero", 1, 5),
    device("/dev/full", 1, 7),
    device("/dev/random", 1, 8),
    device("/dev/urandom", 1, 9),
    device("/dev/tty", 5, 0),
    device("/dev/fuse", 10, 229),
    device("/dev/net/tun", 10, 200),
    GuestDevice {
        is_for_privileged: true,
        ..device("/dev/kmsg", 1, 11)
    },
    GuestDevice {
        is_for_privileged: true,
        ..device("/dev/loop-control", 10, 237)
    },
];

/// Whether a container may ask for the guest's device of this path.
pub(crate) fn is_given(path: &str, is_privileged: bool) -> bool {
    DEVICES
        .iter()
        .any(|device| device.path == path && (is_privileged || !device.is_for_privileged))
}

/// Returns the path in the guest of the device that a node of the host stands for, if the guest has
/// it. Whether a container may open it is up to the device rules of its control group.
pub(crate) fn path_of(node: &Metadata) -> Option<&'static str> {
    let is_it = |device: &&GuestDevice| makedev(device.major, device.minor) == node.rdev();
    let known = node.file_type().is_char_device();
    let found = known.then(|| DEVICES.iter().find(is_it)).flatten();
    found.map(|device| device.path)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn nodes_of_the_host_are_known_by_their_numbers() {
        for path in ["/dev/null", "/dev/full", "/dev/urandom"] {
            assert_eq!(path_of(&fs::metadata(path).unwrap()), Some(path));
        }
        for other in ["/dev/ptmx", "/dev", "/etc/passwd"] {
            assert_eq!(path_of(&fs::metadata(other).unwrap()), None, "{other}");
        }
    }

    #[test]
    fn some_are_for_privileged_containers() {
        assert!(is_given("/dev/fuse", false) && is_given("/dev/kmsg", true));
        assert!(!is_given("/dev/kmsg", false) && !is_given("/dev/sda", true));
    }
}
