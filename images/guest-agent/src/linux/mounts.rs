//! What is mounted (`/proc/self/mountinfo`).

use std::path::Path;

use super::text::read_text;
use crate::protocol::Fault;

/// Most mounts that are looked at.
const MAX_MOUNTS: usize = 4096;

/// A mount of a file system on a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mount {
    /// `MAJOR:MINOR` of the file system.
    pub(super) device: String,
    /// Where it is mounted.
    pub(super) point: String,
    /// The type of the file system.
    pub(super) kind: String,
    /// The disk's device.
    pub(super) source: String,
}

/// Reads the mounts of file systems on disks, in the order in which they were mounted, each file
/// system once.
pub(super) fn read(path: &Path) -> Result<Vec<Mount>, Fault> {
    let text = read_text(path);
    let text = text.map_err(|error| Fault::io("read", &path.display().to_string(), &error))?;
    Ok(parse(&text))
}

fn parse(text: &str) -> Vec<Mount> {
    let mut mounts: Vec<Mount> = Vec::new();
    for line in text.lines().take(MAX_MOUNTS) {
        let Some(mount) = parse_line(line) else {
            continue;
        };
        let is_known = mounts.iter().any(|it| it.device == mount.device);
        if mount.source.starts_with("/dev/") && !is_known {
            mounts.push(mount);
        }
    }
    mounts
}

/// `ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [OPTIONAL…] - TYPE SOURCE OPTIONS`
fn parse_line(line: &str) -> Option<Mount> {
    let (first, last) = line.split_once(" - ")?;
    let mut first = first.split(' ').skip(2);
    let (device, _root, point) = (first.next()?, first.next()?, first.next()?);
    let mut last = last.split(' ');
    Some(Mount {
        device: device.to_owned(),
        point: unescape(point),
        kind: last.next()?.to_owned(),
        source: unescape(last.next()?),
    })
}

/// Spaces and others are `\040`.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let octal = match (first, after) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..]) => {
                Some(((a - b'0') << 6) | ((b - b'0') << 3) | (c - b'0'))
            }
            _ => None,
        };
        rest = match octal {
            Some(_) => after.get(3..).unwrap_or_default(),
            None => after,
        };
        bytes.push(octal.unwrap_or(*first));
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_system_on_a_disk_is_there_once() {
        let text = "22 1 0:21 / /proc rw - proc proc rw\n\
                    23 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw\n\
                    24 23 254:1 /srv /mnt/bind rw - ext4 /dev/vda1 rw\n\
                    25 23 254:15 / /boot/a\\040b rw shared:2 master:1 - vfat /dev/vda15 rw\n\
                    26 23 0:50 / /net rw - nfs4 host:/x rw\n\
                    broken\n 1 2 - \n";
        let mounts = parse(text);
        let shown: Vec<_> = mounts
            .iter()
            .map(|it| (it.device.as_str(), it.point.as_str(), it.kind.as_str()))
            .collect();
        assert_eq!(
            shown,
            [("254:1", "/", "ext4"), ("254:15", "/boot/a b", "vfat")]
        );
    }

    #[test]
    fn escapes_that_are_none_stay() {
        for (text, meant) in [("a\\134b", "a\\b"), ("\\9", "\\9"), ("x\\04", "x\\04")] {
            assert_eq!(unescape(text), meant);
        }
    }
}
