//! Volumes of a pod: each is bind-mounted to a name of its own in the directory that the
//! guest shares, when a container needs it, and unmounted with the container.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use k8s_cri::v1::{Mount, MountPropagation};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount_bind, mount_bind_recursive,
    mount_change, mount_remount, unmount,
};
use tracing::warn;

use super::error::{CriError, Result};
use super::spec::mounts::image_of;
use super::spec::{MemorySource, Volume, VolumeSource};

/// Directory of a pod's volumes within its own.
pub(super) const SHARED: &str = "shared";

/// Mounts `mounts` for a container, but for those of images and, by their numbers, those that are
/// in the guest's `memory`; nothing of them stays when one fails.
pub(super) fn mount(
    shared: &Path,
    container: &str,
    mounts: &[Mount],
    mut memory: BTreeMap<usize, MemorySource>,
) -> Result<Vec<Volume>> {
    let mut volumes = Vec::new();
    for (number, wanted) in mounts.iter().enumerate() {
        let short: String = container.chars().take(16).collect();
        let name = format!("{short}-{number}");
        if image_of(wanted).is_some() {
            continue;
        }
        if let Some(source) = memory.remove(&number) {
            volumes.push(Volume {
                source: VolumeSource::Memory(source),
                destination: wanted.container_path.clone(),
                readonly: wanted.readonly,
                is_slave: is_slave(wanted),
            });
            continue;
        }
        match mount_one(&shared.join(&name), wanted) {
            Ok(readonly) => volumes.push(Volume {
                source: VolumeSource::Shared(name),
                destination: wanted.container_path.clone(),
                readonly,
                is_slave: is_slave(wanted),
            }),
            Err(error) => {
                let made = volumes.iter().filter_map(Volume::name);
                remove(shared, made.chain([name.as_str()]))?;
                return Err(error);
            }
        }
    }
    Ok(volumes)
}

fn is_slave(mount: &Mount) -> bool {
    mount.propagation == i32::from(MountPropagation::PropagationHostToContainer)
}

/// Mounts a volume. True when nothing in it can be written, not even below mounts in it.
fn mount_one(target: &Path, wanted: &Mount) -> Result<bool> {
    let path = Path::new(&wanted.host_path);
    let source = open_source(path)?;
    let failed = || CriError::io("mount the volume", path);
    let is_dir = source.metadata().map_err(failed())?.is_dir();
    if is_dir {
        fs::create_dir(target).map_err(CriError::io("create", target))?;
    } else {
        File::create_new(target).map_err(CriError::io("create", target))?;
    }
    // By its descriptor: what the path means cannot change in between.
    let opened = format!("/proc/self/fd/{}", source.as_raw_fd());
    let propagation = match is_slave(wanted) {
        true => MountPropagationFlags::DOWNSTREAM,
        false => MountPropagationFlags::PRIVATE,
    };
    let mount = || -> Result<(), Errno> {
        match is_dir {
            true => mount_bind_recursive(&*opened, target)?,
            false => mount_bind(&*opened, target)?,
        }
        mount_change(target, propagation | MountPropagationFlags::REC)
    };
    mount().map_err(|error| failed()(error.into()))?;
    // The guest must not write even if it ignores what it is told; and what it makes or finds
    // there is neither a device nor a program with another's rights on the host. What is mounted
    // below stays as it is, unless the request says otherwise.
    let mut points = mount_points(target)?;
    let is_whole = wanted.recursive_read_only || (points.len() == 1 && !is_slave(wanted));
    if !(wanted.readonly && wanted.recursive_read_only) {
        points.truncate(1);
    }
    for point in points {
        let mut flags = kept_flags(&point).map_err(failed())?;
        flags |= MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV;
        if wanted.readonly {
            flags |= MountFlags::RDONLY;
        }
        mount_remount(&point, flags, "").map_err(|error| failed()(error.into()))?;
    }
    Ok(wanted.readonly && is_whole)
}

/// Flags of a mount that a remount must repeat in order to keep them.
fn kept_flags(point: &Path) -> io::Result<MountFlags> {
    use rustix::fs::{StatVfsMountFlags, statvfs};
    let now = statvfs(point)?.f_flag;
    let mut kept = MountFlags::empty();
    for (have, keep) in [
        (StatVfsMountFlags::RDONLY, MountFlags::RDONLY),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
        (StatVfsMountFlags::NOATIME, MountFlags::NOATIME),
        (StatVfsMountFlags::RELATIME, MountFlags::RELATIME),
    ] {
        if now.contains(have) {
            kept |= keep;
        }
    }
    Ok(kept)
}

/// Opens what is to be mounted; a path that is not there becomes a directory, as other
/// runtimes have it.
fn open_source(path: &Path) -> Result<File> {
    let failed = || CriError::io("open the volume", path);
    match open_path(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let mut builder = fs::DirBuilder::new();
            let made = builder.recursive(true).mode(0o755).create(path);
            made.map_err(CriError::io("create the volume", path))?;
            open_path(path).map_err(failed())
        }
        opened => opened.map_err(failed()),
    }
}

/// Opens what is at a path, only to name it.
pub(super) fn open_path(path: &Path) -> io::Result<File> {
    let flags = (OFlags::PATH | OFlags::CLOEXEC).bits().cast_signed();
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// Unmounts volumes and removes their names; what is gone is no error.
pub(super) fn remove<'a>(shared: &Path, names: impl IntoIterator<Item = &'a str>) -> Result<()> {
    let mut first = Ok(());
    for name in names {
        first = first.and(remove_one(&shared.join(name)));
    }
    first
}

fn remove_one(target: &Path) -> Result<()> {
    let failed = || CriError::io("unmount the volume", target);
    loop {
        match unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::NOENT) => return Ok(()),
            // Not a mount point, or no longer.
            Err(Errno::INVAL) => break,
            Err(error) => return Err(failed()(error.into())),
        }
    }
    let meta = match fs::symlink_metadata(target) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed()(error)),
    };
    // Never recursively: what is below is not ours.
    let removed = match meta.is_dir() {
        true => fs::remove_dir(target),
        false => fs::remove_file(target),
    };
    removed.map_err(CriError::io("remove", target))
}

/// Makes the directory of sandboxes a mount of its own which passes nothing on, so that pods'
/// volumes appear in no other mount namespace.
pub(super) fn make_private(dir: &Path) -> Result<()> {
    let failed = || CriError::io("make a private mount of", dir);
    if !mount_points(dir)?.contains(&dir.to_owned()) {
        mount_bind(dir, dir).map_err(|error| failed()(error.into()))?;
    }
    let private = MountPropagationFlags::PRIVATE;
    mount_change(dir, private).map_err(|error| failed()(error.into()))
}

/// Removes a sandbox's directory with all that is mounted below it.
pub(super) fn remove_dir(dir: &Path) -> Result<()> {
    for point in mount_points(dir)?.iter().rev() {
        if let Err(error) = unmount(point, UnmountFlags::DETACH) {
            warn!(point = %point.display(), %error, "cannot unmount");
        }
    }
    // A mount that is still there must not have its files removed with the directory.
    if let Some(left) = mount_points(dir)?.first() {
        let busy = io::Error::from(io::ErrorKind::ResourceBusy);
        return Err(CriError::io("unmount", left)(busy));
    }
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(CriError::io("remove the directory", dir)(error))
        }
        _ => Ok(()),
    }
}

/// Mount points at and below `dir`, in the order in which they were mounted.
fn mount_points(dir: &Path) -> Result<Vec<PathBuf>> {
    let path = "/proc/self/mountinfo";
    let text = fs::read(path).map_err(CriError::io("read", path))?;
    let lines = text.split(|byte| *byte == b'\n');
    let points = lines.filter_map(|line| {
        let point = line.split(|byte| *byte == b' ').nth(4)?;
        Some(unescape(point))
    });
    Ok(points.filter(|point| point.starts_with(dir)).collect())
}

/// The kernel writes blanks and backslashes in octal.
pub(super) fn unescape(text: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStringExt as _;
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [byte, after @ ..] = rest {
        rest = after;
        match (byte, after) {
            (
                b'\\',
                [
                    a @ b'0'..=b'3',
                    b @ b'0'..=b'7',
                    c @ b'0'..=b'7',
                    after @ ..,
                ],
            ) => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = after;
            }
            _ => bytes.push(*byte),
        }
    }
    std::ffi::OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(path: &Path) -> Mount {
        Mount {
            container_path: "/x".to_owned(),
            host_path: path.to_str().unwrap().to_owned(),
            ..Mount::default()
        }
    }

    fn none() -> BTreeMap<usize, MemorySource> {
        BTreeMap::new()
    }

    #[test]
    fn files_and_directories_are_mounted_and_nothing_stays() {
        let dir = tempfile::tempdir().unwrap();
        let shared = dir.path().join("shared dir");
        let data = dir.path().join("data");
        fs::create_dir(&shared).unwrap();
        fs::create_dir(&data).unwrap();
        fs::write(data.join("file"), "x").unwrap();
        let missing = dir.path().join("a/b");
        let mut readonly = wanted(&data);
        readonly.readonly = true;
        let mounts = [wanted(&data.join("file")), readonly, wanted(&missing)];
        let volumes = mount(&shared, "0123456789abcdef0", &mounts, none()).unwrap();
        assert_eq!(volumes[1].name(), Some("0123456789abcdef-1"));
        let at = |n: usize| shared.join(volumes[n].name().unwrap());
        assert_eq!(fs::read_to_string(at(0)).unwrap(), "x");
        let written = fs::write(at(1).join("new"), "");
        assert_eq!(
            written.unwrap_err().kind(),
            io::ErrorKind::ReadOnlyFilesystem
        );
        fs::write(at(2).join("new"), "").unwrap();
        assert!(missing.join("new").exists());

        for number in 0..volumes.len() {
            use rustix::fs::{StatVfsMountFlags, statvfs};
            let flags = statvfs(at(number)).unwrap().f_flag;
            let harmless = StatVfsMountFlags::NOSUID | StatVfsMountFlags::NODEV;
            assert!(flags.contains(harmless), "{number}: {flags:?}");
        }

        remove(&shared, volumes.iter().filter_map(Volume::name)).unwrap();
        remove(&shared, volumes.iter().filter_map(Volume::name)).unwrap();
        assert_eq!(fs::read_dir(&shared).unwrap().count(), 0);
        assert!(data.join("file").exists());
    }

    #[test]
    fn a_mount_that_fails_takes_the_others_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "x").unwrap();
        let shared = dir.path().join("shared");
        fs::create_dir(&shared).unwrap();
        let mounts = [wanted(&file), wanted(&file.join("below"))];
        assert!(mount(&shared, "c", &mounts, none()).is_err());
        assert_eq!(fs::read_dir(&shared).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_is_removed_and_what_was_mounted_in_it_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        fs::create_dir(&data).unwrap();
        fs::write(data.join("file"), "x").unwrap();
        let shared = dir.path().join("pod/shared");
        fs::create_dir_all(&shared).unwrap();
        make_private(&dir.path().join("pod")).unwrap();
        make_private(&dir.path().join("pod")).unwrap();
        mount(&shared, "c", &[wanted(&data)], none()).unwrap();
        remove_dir(&dir.path().join("pod")).unwrap();
        assert!(!dir.path().join("pod").exists());
        assert!(data.join("file").exists());
    }
}
