//! Volumes in memory: an emptyDir of the medium Memory, which is a tmpfs on the host. The guest has
//! its own tmpfs in its place, which containers of the pod share while the guest runs.
//!
//! Whether the guest's tmpfs or the host's (by virtio-fs) is used is decided when the first
//! container of the pod mounts the volume or a part of it, and recorded with the pod, so that later
//! containers see the same. A volume that contains a file at that time stays the host's, so that
//! nothing is hidden; one that contains only directories does not, since the kubelet creates them
//! for subPaths.
//!
//! The kubelet creates a subPath in the host's tmpfs and mounts it elsewhere. It is the same file
//! system, and the kernel reports its directory in it, which is used in the guest's tmpfs.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use podvisor_cri_messages::Mount;

use super::error::{CriError, Result};
use super::spec::MemorySource;
use super::spec::mounts::image_of;
use super::state::MemoryVolume;
use super::volume_users::EMPTY_DIR;
use crate::bind::{MOUNTINFO, open_path, unescape};

/// Maximum number of directories of a volume that are scanned.
const MAX_DIRECTORIES: usize = 256;

/// Returns the mounts, by their indices, that are volumes in the guest's memory. `known` are the
/// pod's volumes in memory, to which new ones are added.
pub(super) fn sources(
    mounts: &[Mount],
    known: &mut Vec<MemoryVolume>,
) -> Result<BTreeMap<usize, MemorySource>> {
    let mut sources = BTreeMap::new();
    for (number, wanted) in mounts.iter().enumerate() {
        if image_of(wanted).is_some() {
            continue;
        }
        if let Some(source) = source(Path::new(&wanted.host_path), known)? {
            sources.insert(number, source);
        }
    }
    Ok(sources)
}

fn source(path: &Path, known: &mut Vec<MemoryVolume>) -> Result<Option<MemorySource>> {
    let opened = match open_path(path) {
        // It is created later.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(CriError::io("open the volume", path))?,
    };
    // A single file stays on the host.
    let meta = opened.metadata().map_err(CriError::io("look at", path))?;
    if !meta.is_dir() || !is_tmpfs(&opened).map_err(CriError::io("look at", path))? {
        return Ok(None);
    }
    let text = fs::read(MOUNTINFO).map_err(CriError::io("read", MOUNTINFO))?;
    let found = find(&opened, &text).map_err(CriError::io("find the mount of", path))?;
    let Some(VolumeDirectory {
        volume,
        below,
        has_size,
    }) = found
    else {
        return Ok(None);
    };
    let stat = fs::metadata(&volume).map_err(CriError::io("look at", &volume))?;
    // Another file system may be mounted over it.
    if stat.dev() != meta.dev() {
        return Ok(None);
    }
    let text_of = |path: &Path| {
        let text = path.to_str().map(str::to_owned);
        text.ok_or_else(|| CriError::invalid("mounts.host_path", "what it names is not UTF-8"))
    };
    let name = text_of(&volume)?;
    let key = match known.iter().position(|volume| volume.path == name) {
        Some(key) => key,
        None => {
            let holds_nothing = has_only_directories(&volume);
            known.push(MemoryVolume {
                path: name,
                in_guest: holds_nothing.map_err(CriError::io("list", &volume))?,
            });
            known.len() - 1
        }
    };
    if !known.get(key).is_some_and(|volume| volume.in_guest) {
        return Ok(None);
    }
    let size = match has_size {
        true => size_of(&volume).map_err(CriError::io("ask for the size of", &volume))?,
        false => None,
    };
    let below = text_of(&below)?;
    Ok(Some(MemorySource {
        key,
        below: Some(below).filter(|below| !below.is_empty()),
        size,
        mode: stat.mode() & 0o7777,
        uid: stat.uid(),
        gid: stat.gid(),
    }))
}

/// Returns whether a volume contains only directories, and few of them.
fn has_only_directories(volume: &Path) -> io::Result<bool> {
    let mut found = vec![volume.to_owned()];
    let mut listed = 0;
    while let Some(directory) = found.pop() {
        listed += 1;
        if listed > MAX_DIRECTORIES {
            return Ok(false);
        }
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            // The type of a link is that of the link itself.
            if !entry.file_type()?.is_dir() {
                return Ok(false);
            }
            found.push(entry.path());
            if found.len() > MAX_DIRECTORIES {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

fn is_tmpfs(opened: &File) -> io::Result<bool> {
    Ok(rustix::fs::fstatfs(opened)?.f_type == libc::TMPFS_MAGIC)
}

/// Returns the size in bytes; `None` if it is unlimited.
fn size_of(volume: &Path) -> io::Result<Option<u64>> {
    let stat = rustix::fs::statvfs(volume)?;
    Ok(Some(stat.f_blocks.saturating_mul(stat.f_frsize)).filter(|size| *size > 0))
}

/// A directory in a volume in memory.
#[derive(Debug, PartialEq, Eq)]
struct VolumeDirectory {
    /// Where the volume is mounted.
    volume: PathBuf,
    /// The path in the volume; empty for its root.
    below: PathBuf,
    /// Whether its size was set; otherwise it depends on the host's memory.
    has_size: bool,
}

/// Returns where an open directory is in a volume in memory; `None` if it is not in one.
fn find(opened: &File, mounts: &[u8]) -> io::Result<Option<VolumeDirectory>> {
    let fd = opened.as_raw_fd();
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{fd}"))?;
    let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    let path = fs::read_link(format!("/proc/self/fd/{fd}"))?;
    Ok(id.and_then(|id| find_in(mounts, id.trim(), &path)))
}

fn find_in(mounts: &[u8], id: &str, path: &Path) -> Option<VolumeDirectory> {
    let lines = || mounts.split(|byte| *byte == b'\n').filter_map(Line::parse);
    let own = lines().find(|line| line.id == id.as_bytes())?;
    if own.root.as_os_str().as_bytes().ends_with(b"//deleted") {
        return None;
    }
    let below = own.root.join(path.strip_prefix(&own.point).ok()?);
    // The root of a tmpfs: one that the kubelet mounted for the volume, not a node whose disk is a
    // tmpfs.
    let volume = lines().find(|line| {
        let path = line.point.to_str().unwrap_or_default();
        line.device == own.device && line.root == Path::new("/") && path.contains(EMPTY_DIR)
    })?;
    let mut options = volume.options.split(|byte| *byte == b',');
    Some(VolumeDirectory {
        has_size: options.any(|option| option.starts_with(b"size=")),
        below: below.strip_prefix("/").ok()?.to_owned(),
        volume: volume.point,
    })
}

/// A line of mountinfo (proc_pid_mountinfo(5)).
#[derive(Debug)]
struct Line<'a> {
    id: &'a [u8],
    device: &'a [u8],
    /// The mounted directory within the file system.
    root: PathBuf,
    /// The mount point.
    point: PathBuf,
    /// The options of the file system.
    options: &'a [u8],
}

impl<'a> Line<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ');
        let id = fields.next()?;
        let device = fields.nth(1)?;
        let root = unescape(fields.next()?);
        let point = unescape(fields.next()?);
        fields.find(|field| *field == b"-")?;
        let options = fields.nth(2)?;
        Some(Self {
            id,
            device,
            root,
            point,
            options,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::os::unix::fs::PermissionsExt as _;

    use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, unmount};

    use super::*;

    /// A directory below which everything is unmounted on drop.
    struct Dir(tempfile::TempDir, Vec<PathBuf>);

    impl Dir {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap(), Vec::new())
        }

        fn make(&self, path: &str) -> PathBuf {
            let path = self.0.path().join(path);
            fs::create_dir_all(&path).unwrap();
            path
        }

        fn tmpfs(&mut self, path: &str, options: &str) -> PathBuf {
            let path = self.make(path);
            let options = CString::new(options).unwrap();
            let flags = MountFlags::empty();
            mount("tmpfs", &path, "tmpfs", flags, options.as_c_str()).unwrap();
            self.1.push(path.clone());
            path
        }

        fn bind(&mut self, from: &Path, path: &str) -> PathBuf {
            let path = self.make(path);
            mount_bind(from, &path).unwrap();
            self.1.push(path.clone());
            path
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            for point in self.1.iter().rev() {
                let _ = unmount(point, UnmountFlags::DETACH);
            }
        }
    }

    const VOLUME: &str = "u/volumes/kubernetes.io~empty-dir/a b";
    const SUB: &str = "u/volume-subpaths/a b/c/0";

    #[test]
    fn a_tmpfs_for_an_empty_dir_is_the_guests_with_its_parts() {
        let mut dir = Dir::new();
        let volume = dir.tmpfs(VOLUME, "size=1m,mode=0777,uid=3,gid=4");
        let mode = fs::Permissions::from_mode(0o2777);
        fs::set_permissions(&volume, mode).unwrap();
        let mut known = Vec::new();
        let whole = source(&volume, &mut known).unwrap().unwrap();
        let expected = MemorySource {
            key: 0,
            below: None,
            size: Some(1 << 20),
            mode: 0o2777,
            uid: 3,
            gid: 4,
        };
        assert_eq!(whole, expected);

        // As the kubelet creates a subPath; the volume is not empty any more.
        fs::create_dir_all(volume.join("x/y z")).unwrap();
        let sub = dir.bind(&volume.join("x/y z"), SUB);
        let part = |below: &str| MemorySource {
            below: Some(below.to_owned()),
            ..expected.clone()
        };
        let found = |path: &Path, known: &mut Vec<_>| source(path, known).unwrap();
        assert_eq!(found(&sub, &mut known), Some(part("x/y z")));
        assert_eq!(found(&volume.join("x"), &mut known), Some(part("x")));
        assert_eq!(found(&volume, &mut known), Some(expected));
        assert_eq!(known.len(), 1);
    }

    #[test]
    fn a_volume_with_directories_alone_is_the_guests() {
        let mut dir = Dir::new();
        let volume = dir.tmpfs(VOLUME, "size=1m,mode=0777");
        fs::create_dir_all(volume.join("x/y")).unwrap();
        let sub = dir.bind(&volume.join("x/y"), SUB);
        let found = source(&sub, &mut Vec::new()).unwrap().unwrap();
        assert_eq!(found.below.as_deref(), Some("x/y"));
        for number in 0..MAX_DIRECTORIES {
            fs::create_dir(volume.join(number.to_string())).unwrap();
        }
        assert_eq!(source(&sub, &mut Vec::new()).unwrap(), None);
    }

    #[test]
    fn a_volume_that_holds_a_file_stays_the_hosts() {
        let mut dir = Dir::new();
        let volume = dir.tmpfs(VOLUME, "mode=0777");
        fs::create_dir(volume.join("x")).unwrap();
        std::os::unix::fs::symlink("/", volume.join("x/link")).unwrap();
        let sub = dir.bind(&volume.join("x"), SUB);
        let mut known = Vec::new();
        assert_eq!(source(&sub, &mut known).unwrap(), None);
        let noted = MemoryVolume {
            path: volume.to_str().unwrap().to_owned(),
            in_guest: false,
        };
        assert_eq!(known, [noted]);
        // Even after a container has emptied it.
        fs::remove_dir_all(volume.join("x")).unwrap();
        assert_eq!(source(&volume, &mut known).unwrap(), None);
        assert_eq!(known.len(), 1);
    }

    #[test]
    fn a_size_that_nobody_chose_is_not_passed_on() {
        let mut dir = Dir::new();
        let by_default = dir.tmpfs(VOLUME, "mode=0777");
        let none = dir.tmpfs("u/volumes/kubernetes.io~empty-dir/b", "size=0");
        let mut known = Vec::new();
        for (key, volume) in [by_default, none].iter().enumerate() {
            let found = source(volume, &mut known).unwrap().unwrap();
            assert_eq!((found.key, found.size), (key, None));
        }
    }

    #[test]
    fn other_volumes_are_left_alone() {
        let mut dir = Dir::new();
        let plain = dir.make(VOLUME);
        let secret = dir.tmpfs("u/volumes/kubernetes.io~secret/s", "mode=0777");
        // If the node's disk is a tmpfs, it contains emptyDirs of every medium.
        let node = dir.tmpfs("node", "mode=0777");
        let on_it = dir.make("node/u/volumes/kubernetes.io~empty-dir/c");
        let file = dir
            .tmpfs("u/volumes/kubernetes.io~empty-dir/d", "")
            .join("f");
        fs::write(&file, "").unwrap();
        let missing = dir.0.path().join("missing");
        let mut known = Vec::new();
        for path in [plain, secret, node, on_it, file, missing] {
            let found = source(&path, &mut known).unwrap();
            assert_eq!(found, None, "{}", path.display());
        }
        assert!(known.is_empty());
    }

    #[test]
    fn mounts_of_which_nothing_is_known_are_none() {
        let line = b"36 35 0:40 /sub /x/sub\\040dir rw,noatime shared:1 - tmpfs t rw,size=4k\n\
                     37 35 0:40 / /p/volumes/kubernetes.io~empty-dir/v rw - tmpfs t rw,size=4k\n\
                     38 35 0:40 /sub//deleted /gone rw - tmpfs t rw,size=4k\n\
                     39 35 0:40";
        let find = |id, path: &str| find_in(line, id, Path::new(path));
        assert_eq!(
            find("36", "/x/sub dir/in"),
            Some(VolumeDirectory {
                volume: "/p/volumes/kubernetes.io~empty-dir/v".into(),
                below: "sub/in".into(),
                has_size: true,
            })
        );
        assert_eq!(find("36", "/elsewhere"), None);
        assert_eq!(find("35", "/x/sub dir"), None);
        assert_eq!(find("38", "/gone"), None);
        assert_eq!(find("39", "/x"), None);
    }
}
