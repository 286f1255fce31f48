//! Character devices that every guest's kernel has itself. A container gets them instead of the
//! host's, of which a virtual machine has none.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};

use podvisor_agent_protocol::GUEST_DEVICES;
use rustix::fs::makedev;

/// Those that only privileged containers may ask for.
const PRIVILEGED: [&str; 2] = ["/dev/kmsg", "/dev/loop-control"];

/// Whether a container may ask for the guest's device of this path.
pub(crate) fn is_given(path: &str, is_privileged: bool) -> bool {
    GUEST_DEVICES.iter().any(|(known, ..)| *known == path)
        && (is_privileged || !PRIVILEGED.contains(&path))
}

/// Returns the path in the guest of the device that a node of the host stands for, if the guest has
/// it. Whether a container may open it is up to the device rules of its control group.
pub(crate) fn path_of(node: &Metadata) -> Option<&'static str> {
    if !node.file_type().is_char_device() {
        return None;
    }
    let is_it = |(_, major, minor): &&(_, u32, u32)| makedev(*major, *minor) == node.rdev();
    GUEST_DEVICES.iter().find(is_it).map(|(path, ..)| *path)
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
