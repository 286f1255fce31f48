//! Disks and shares of the guest: entries of `mounts`, and the scripts that do what entries cannot.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::files::GuestFile;
use crate::yaml::Node;

/// Where scripts are, and where cloud-init looks for those that it runs at each boot.
const SYMLINK_SCRIPT: &str = "/etc/cloud/symlink-devs.sh";
const MOUNT_SCRIPT: &str = "/etc/cloud/mount-volumes.sh";
const PER_BOOT: &str = "/var/lib/cloud/scripts/per-boot/";

/// Where a user's script gets the commands of the scripts.
const PLACEHOLDER: &str = "@virtlet-mount-script@";

/// A path under which the guest finds one of its disks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceLink {
    /// The path, beginning with `/`.
    pub path: String,
    /// The disk's serial number, of letters, digits, `-` and `_`, at most 20 bytes.
    pub serial: String,
}

/// What is mounted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MountSource {
    /// A disk by its serial number.
    Disk {
        /// As in [`DeviceLink::serial`].
        serial: String,
        /// Number of the partition; 0 for the whole disk.
        partition: u32,
    },
    /// A directory of the node, shared by virtio-fs.
    Share {
        /// The share's tag, of the characters of a serial number, at most 36 bytes.
        tag: String,
    },
}

/// A mount in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestMount {
    /// What is mounted.
    pub source: MountSource,
    /// Where, beginning with `/`.
    pub path: String,
    /// Whether nothing can be written there.
    pub read_only: bool,
}

impl DeviceLink {
    fn device(&self) -> String {
        device(&self.serial, 0)
    }
}

impl GuestMount {
    /// What the guest calls the source, and its type of file system.
    fn source(&self) -> (String, &'static str) {
        match &self.source {
            MountSource::Disk { serial, partition } => (device(serial, *partition), "auto"),
            MountSource::Share { tag } => (tag.clone(), "virtiofs"),
        }
    }

    /// The source's name in its [`MountSource`], with the most bytes that it may have.
    pub(crate) fn name(&self) -> (&str, usize) {
        match &self.source {
            MountSource::Disk { serial, .. } => (serial, MAX_SERIAL),
            MountSource::Share { tag } => (tag, MAX_TAG),
        }
    }
}

/// Bytes of a disk's serial number (virtio 1.3 §5.2.6.1).
pub(crate) const MAX_SERIAL: usize = 20;
/// Bytes of a share's tag (virtio 1.3 §5.11.4).
const MAX_TAG: usize = 36;

/// Whether `name` can be the name of a disk or share, of at most `most` bytes.
pub(crate) fn is_name(name: &str, most: usize) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (1..=most).contains(&name.len()) && name.bytes().all(is_letter)
}

/// The link that udev makes to a disk or one of its partitions.
fn device(serial: &str, partition: u32) -> String {
    match partition {
        0 => format!("/dev/disk/by-id/virtio-{serial}"),
        number => format!("/dev/disk/by-id/virtio-{serial}-part{number}"),
    }
}

/// Entries for the list `mounts`.
pub(crate) fn entries(mounts: &[GuestMount]) -> Vec<Node> {
    let entry = |mount: &GuestMount| {
        let (source, kind) = mount.source();
        // A disk that is missing must not keep the guest from booting.
        let options = match mount.read_only {
            true => "defaults,nofail,ro",
            false => "defaults,nofail",
        };
        let fields = [&source, &mount.path, kind, options, "0", "0"];
        Node::List(fields.map(Node::text).to_vec())
    };
    mounts.iter().map(entry).collect()
}

/// Rewrites entries of a user's own list `mounts` whose device is the path of a disk: when it is
/// mounted, the link may not be there yet.
pub(crate) fn rewrite(user_data: &mut Node, links: &[DeviceLink]) {
    let Some(Node::List(mounts)) = user_data.get_mut("mounts") else {
        return;
    };
    for mount in mounts {
        let Node::List(fields) = mount else { continue };
        let Some(first) = fields.first_mut() else {
            continue;
        };
        let link = links
            .iter()
            .find(|link| first.as_text() == Some(&link.path));
        if let Some(link) = link {
            *first = Node::text(&link.device());
        }
    }
}

/// The scripts as files, of which cloud-init runs one copy at each boot.
pub(crate) fn files(links: &[DeviceLink], mounts: &[GuestMount]) -> Vec<GuestFile> {
    let scripts = [
        (SYMLINK_SCRIPT, "50-podvisor-symlink-devs", symlinks(links)),
        (MOUNT_SCRIPT, "51-podvisor-mount-volumes", mount_all(mounts)),
    ];
    let scripts = scripts.into_iter().filter(|(_, _, text)| !text.is_empty());
    let files = scripts.flat_map(|(path, name, text)| {
        let script = format!("#!/bin/sh\n{text}");
        [
            GuestFile::new(path, script.clone(), 0o755),
            GuestFile::new(&format!("{PER_BOOT}{name}"), script, 0o755),
        ]
    });
    files.collect()
}

/// Puts the commands of the scripts where a user's script asks for them.
pub(crate) fn inject(script: &str, links: &[DeviceLink], mounts: &[GuestMount]) -> String {
    let commands = symlinks(links) + &mount_all(mounts);
    script.replace(PLACEHOLDER, commands.trim_end())
}

fn symlinks(links: &[DeviceLink]) -> String {
    let mut text = String::new();
    for link in links {
        let (device, path) = (quote(&link.device()), quote(&link.path));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "mkdir -p \"$(dirname {path})\" && ln -sfn {device} {path}"
        );
    }
    text
}

fn mount_all(mounts: &[GuestMount]) -> String {
    let mut text = String::new();
    for mount in mounts {
        let (source, kind) = mount.source();
        let (source, path) = (quote(&source), quote(&mount.path));
        let options = if mount.read_only { " -o ro" } else { "" };
        let _ = writeln!(
            text,
            "mountpoint -q {path} || {{ mkdir -p {path} && \
             mount -t {kind}{options} {source} {path}; }}"
        );
    }
    text
}

/// Quotes a word for the shell.
fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_the_shell_as_they_are() {
        for word in ["/a b", "/it's", "/$(reboot)", "/\"x\"; `y`", "/a\\"] {
            let script = format!("printf %s {}", quote(word));
            let output = std::process::Command::new("sh")
                .args(["-c", &script])
                .output();
            assert_eq!(output.unwrap().stdout, word.as_bytes());
        }
    }
}
