//! `-v HOST:GUEST[:ro]`: directories and files of the host, bind-mounted into the directory that
//! the guest shares.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount_bind_recursive, mount_change,
    mount_remount, unmount,
};
use serde::{Deserialize, Serialize};

use super::Record;

/// A part of the host's files in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::cli) struct Volume {
    pub(in crate::cli) source: PathBuf,
    pub(in crate::cli) destination: String,
    pub(in crate::cli) read_only: bool,
}

/// Reads `HOST:GUEST`, with `:ro` or `:rw` behind it.
pub(in crate::cli) fn parse(text: &str) -> Result<Volume, String> {
    let usage = || "write HOST:GUEST or HOST:GUEST:ro, both absolute paths".to_owned();
    let mut parts = text.split(':');
    let (source, destination) = (parts.next().unwrap_or(""), parts.next().ok_or_else(usage)?);
    let read_only = match (parts.next(), parts.next()) {
        (None | Some("rw"), None) => false,
        (Some("ro"), None) => true,
        _ => return Err(usage()),
    };
    let is_path = |path: &str| path.starts_with('/') && !path.split('/').any(|part| part == "..");
    match source.starts_with('/') && is_path(destination) && destination != "/" {
        true => Ok(Volume {
            source: source.into(),
            destination: destination.to_owned(),
            read_only,
        }),
        false => Err(usage()),
    }
}

/// The name of a container's volume in the directory that its machine shares.
pub(in crate::cli) fn name(record: &Record, number: usize) -> String {
    match record.pod {
        None => format!("v{number}"),
        Some(_) => format!("{}-{number}", record.short_id()),
    }
}

/// Makes the directory that a machine shares.
pub(in crate::cli) fn make_shared(shared: &Path) -> anyhow::Result<()> {
    fs::create_dir(shared).with_context(|| format!("cannot create {}", shared.display()))
}

/// Mounts the volumes of a container in `shared`.
pub(in crate::cli) fn mount(shared: &Path, record: &Record) -> anyhow::Result<()> {
    for (number, volume) in record.volumes.iter().enumerate() {
        mount_one(&shared.join(name(record, number)), volume)
            .with_context(|| format!("cannot share {}", volume.source.display()))?;
    }
    Ok(())
}

fn mount_one(target: &Path, volume: &Volume) -> anyhow::Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "sharing directories by -v takes root, who may mount them"
    );
    let source = File::open(&volume.source)?;
    match source.metadata()?.is_dir() {
        true => fs::create_dir(target)?,
        false => drop(File::create_new(target)?),
    }
    // By its descriptor: what the path means cannot change in between.
    mount_bind_recursive(format!("/proc/self/fd/{}", source.as_raw_fd()), target)?;
    mount_change(
        target,
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )?;
    // The guest must not write even if it ignores what it is told; and what it may make there
    // is neither a device nor a program with another's rights on the host.
    let mut flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV;
    if volume.read_only {
        flags |= MountFlags::RDONLY;
    }
    for point in mount_points(target)? {
        mount_remount(&point, flags, "")?;
    }
    Ok(())
}

/// Takes the volumes of a container out of a directory that its pod goes on sharing.
pub(in crate::cli) fn remove(shared: &Path, record: &Record) -> anyhow::Result<()> {
    for number in 0..record.volumes.len() {
        let target = shared.join(name(record, number));
        unmount_all(&target)?;
        let removed = match target.is_dir() {
            true => fs::remove_dir(&target),
            false => fs::remove_file(&target),
        };
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", target.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Unmounts all that is mounted below `dir`.
pub(in crate::cli) fn unmount_all(dir: &Path) -> anyhow::Result<()> {
    for point in mount_points(dir)?.iter().rev() {
        unmount(point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
            .with_context(|| format!("cannot unmount {}", point.display()))?;
    }
    // Were something left, its files would be removed with the directory.
    if let Some(left) = mount_points(dir)?.first() {
        bail!("{} is still mounted", left.display());
    }
    Ok(())
}

/// Mount points at and below `dir`, in the order in which they were mounted.
fn mount_points(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let text = fs::read_to_string("/proc/self/mountinfo")?;
    let points = text.lines().filter_map(|line| line.split(' ').nth(4));
    let points = points.map(|point| PathBuf::from(unescape(point)));
    Ok(points.filter(|point| point.starts_with(dir)).collect())
}

/// The kernel writes blanks and backslashes as octal numbers.
fn unescape(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        out.push_str(before);
        let digits = after
            .get(..3)
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match digits {
            Some(byte) => {
                out.push(char::from(byte));
                rest = &after[3..];
            }
            None => {
                out.push('\\');
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_two_absolute_paths_and_a_mode() {
        let volume = parse("/a:/b/c").unwrap();
        assert_eq!((&*volume.destination, volume.read_only), ("/b/c", false));
        assert!(parse("/a:/b:ro").unwrap().read_only);
        assert!(!parse("/a:/b:rw").unwrap().read_only);
        for bad in [
            "",
            "/a",
            "a:/b",
            "/a:b",
            "/a:/",
            "/a:/b:x",
            "/a:/b:ro:",
            "/a:/b/../c",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn escapes_of_the_mount_table_are_undone() {
        assert_eq!(unescape(r"/a\040b\134c"), r"/a b\c");
        assert_eq!(unescape(r"/a\9"), r"/a\9");
    }
}
