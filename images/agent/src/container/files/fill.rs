//! Copies the content of an image at the paths of its volumes into the directories of the host that
//! are mounted there. Both are walked by descriptors: links of the image do not lead out of it, and
//! are copied rather than followed.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::fchown;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps, Uid,
    XattrFlags, chownat, fgetxattr, flistxattr, flistxattr_query, fsetxattr, fstat, linkat,
    mkdirat, mknodat, openat, openat2, readlinkat, statat, symlinkat, utimensat,
};
use rustix::io::Errno;

use crate::owner::Owner;

/// Maximum depth of directories; each level takes three descriptors while its content is copied.
const MAX_DEPTH: usize = 200;

/// Bytes written in one piece.
const CHUNK: usize = 256 << 10;

/// The longest list of attribute names, and the longest value, by the kernel's limits.
const XATTR_BYTES: usize = 64 << 10;

/// The kernel asks for another attempt if something in the tree is renamed meanwhile.
const ATTEMPTS: usize = 16;

/// A file that cannot be copied.
#[derive(Debug, thiserror::Error)]
#[error("cannot copy {path} of the image into its volume")]
pub struct FillError {
    path: PathBuf,
    source: io::Error,
}

/// Copies the content of the root filesystem `rootfs` at `path` into the empty directory `volume`,
/// which gets the attributes of the directory there. If there is none, it becomes `owner`'s.
///
/// # Errors
///
/// [`FillError`], also if there is something other than a directory.
pub(in crate::container) fn fill(
    rootfs: &Path,
    path: &Path,
    volume: &Path,
    owner: Option<Owner>,
) -> Result<(), FillError> {
    let failed = |source: io::Error| FillError {
        path: path.to_owned(),
        source,
    };
    let to = openat(CWD, volume, DIRECTORY, Mode::empty()).map_err(|error| failed(error.into()))?;
    let Some(from) = open_in(rootfs, path).map_err(failed)? else {
        return match owner {
            Some(owner) => fchown(&to, Some(owner.uid), Some(owner.gid)).map_err(failed),
            None => Ok(()),
        };
    };
    let mut copy = Copy {
        top: to.try_clone().map_err(failed)?,
        links: HashMap::new(),
        buffer: vec![0; CHUNK],
    };
    let mut below = PathBuf::new();
    copy.directory(from, to, &mut below, 0)
        .map_err(|source| FillError {
            path: path.join(below),
            source,
        })
}

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Opens the directory that a path in the container refers to, if it exists.
fn open_in(rootfs: &Path, path: &Path) -> io::Result<Option<OwnedFd>> {
    let root = openat(CWD, rootfs, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let mut result = Err(Errno::AGAIN);
    for _ in 0..ATTEMPTS {
        result = openat2(&root, path, flags, Mode::empty(), resolve);
        if !matches!(result, Err(Errno::AGAIN)) {
            break;
        }
    }
    match result {
        Err(Errno::NOENT) => Ok(None),
        opened => Ok(Some(opened?)),
    }
}

struct Copy {
    /// The volume.
    top: OwnedFd,
    /// Paths in the volume of files that have more names in the image.
    links: HashMap<(u64, u64), PathBuf>,
    buffer: Vec<u8>,
}

impl Copy {
    /// Copies a directory and everything below it. `below` is its path; after a failure, it is the
    /// path of the file that could not be copied.
    fn directory(
        &mut self,
        from: OwnedFd,
        to: OwnedFd,
        below: &mut PathBuf,
        depth: usize,
    ) -> io::Result<()> {
        if depth >= MAX_DEPTH {
            return Err(io::Error::other(format!(
                "directories are nested deeper than {MAX_DEPTH}"
            )));
        }
        for entry in Dir::read_from(&from)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            below.push(as_path(name));
            self.object(&from, &to, name, below, depth)?;
            below.pop();
        }
        let stat = fstat(&from)?;
        dress(&stat, &from, &to)
    }

    fn object(
        &mut self,
        from: &OwnedFd,
        to: &OwnedFd,
        name: &CStr,
        below: &mut PathBuf,
        depth: usize,
    ) -> io::Result<()> {
        let stat = statat(from, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        // Those of volumes open nothing, and the host takes none.
        if matches!(kind, FileType::BlockDevice | FileType::CharacterDevice) {
            return Ok(());
        }
        if kind != FileType::Directory && stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&(stat.st_dev, stat.st_ino)) {
                return Ok(linkat(&self.top, first, to, name, AtFlags::empty())?);
            }
            let object = (stat.st_dev, stat.st_ino);
            self.links.insert(object, below.clone());
        }
        match kind {
            FileType::Directory => {
                let from = openat(from, name, DIRECTORY, Mode::empty())?;
                mkdirat(to, name, Mode::RWXU)?;
                let to = openat(to, name, DIRECTORY, Mode::empty())?;
                self.directory(from, to, below, depth + 1)
            }
            FileType::RegularFile => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let from = File::from(openat(from, name, flags, Mode::empty())?);
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let to = File::from(openat(to, name, flags, Mode::RUSR | Mode::WUSR)?);
                self.contents(&from, &to)?;
                dress(&stat, &from, &to)
            }
            FileType::Symlink => {
                symlinkat(readlinkat(from, name, Vec::new())?, to, name)?;
                own_by_name(&stat, to, name)
            }
            FileType::Fifo | FileType::Socket => {
                mknodat(to, name, kind, Mode::from_raw_mode(stat.st_mode), 0)?;
                own_by_name(&stat, to, name)
            }
            _ => Ok(()),
        }
    }

    fn contents(&mut self, mut from: &File, mut to: &File) -> io::Result<()> {
        loop {
            match from.read(&mut self.buffer) {
                Ok(0) => return Ok(()),
                Ok(len) => to.write_all(self.buffer.get(..len).unwrap_or_default())?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn as_path(name: &CStr) -> &Path {
    use std::os::unix::ffi::OsStrExt as _;
    Path::new(std::ffi::OsStr::from_bytes(name.to_bytes()))
}

/// Copies the attributes of a file or directory to another one.
fn dress(stat: &Stat, from: impl AsFd, to: impl AsFd) -> io::Result<()> {
    // The owner first: changing it clears bits of the mode and capabilities.
    let made = fstat(&to)?;
    if (stat.st_uid, stat.st_gid) != (made.st_uid, made.st_gid) {
        fchown(&to, Some(stat.st_uid), Some(stat.st_gid))?;
    }
    rustix::fs::fchmod(&to, Mode::from_raw_mode(stat.st_mode))?;
    copy_xattrs(&from, &to)?;
    Ok(rustix::fs::futimens(&to, &times(stat))?)
}

/// Copies the owner and times of a file that is not opened.
fn own_by_name(stat: &Stat, to: &OwnedFd, name: &CStr) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
    chownat(to, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
        let mode = Mode::from_raw_mode(stat.st_mode);
        rustix::fs::chmodat(to, name, mode, AtFlags::empty())?;
    }
    Ok(utimensat(
        to,
        name,
        &times(stat),
        AtFlags::SYMLINK_NOFOLLOW,
    )?)
}

fn times(stat: &Stat) -> Timestamps {
    let time = |seconds, nanoseconds: u64| Timespec {
        tv_sec: seconds,
        // Below one billion.
        tv_nsec: i64::try_from(nanoseconds).unwrap_or(0),
    };
    Timestamps {
        last_access: time(stat.st_atime, stat.st_atime_nsec),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
    }
}

/// Copies user attributes and capabilities of programs, as far as the host stores them.
fn copy_xattrs(from: impl AsFd, to: impl AsFd) -> io::Result<()> {
    let len = match flistxattr_query(&from) {
        Ok(0) | Err(Errno::OPNOTSUPP) => return Ok(()),
        len => len?.min(XATTR_BYTES),
    };
    let mut names = vec![0; len];
    let len = flistxattr(&from, &mut *names)?;
    for name in names
        .get(..len)
        .unwrap_or_default()
        .split(|byte| *byte == 0)
    {
        if !name.starts_with(b"user.") && name != b"security.capability" {
            continue;
        }
        let name = CString::new(name)?;
        let mut value = vec![0; XATTR_BYTES];
        let len = fgetxattr(&from, &*name, &mut *value)?;
        let value = value.get(..len).unwrap_or_default();
        match fsetxattr(&to, &*name, value, XattrFlags::empty()) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP) => tracing::debug!(?name, "a volume keeps no attribute"),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
    use std::time::{Duration, SystemTime};

    use super::*;

    struct Rig {
        _dir: tempfile::TempDir,
        rootfs: PathBuf,
        volume: PathBuf,
    }

    impl Rig {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let [rootfs, volume] = ["rootfs", "volume"].map(|name| dir.path().join(name));
            fs::create_dir(&rootfs).unwrap();
            fs::create_dir(&volume).unwrap();
            Self {
                _dir: dir,
                rootfs,
                volume,
            }
        }

        fn fill(&self, path: &str) -> Result<(), FillError> {
            fill(&self.rootfs, Path::new(path), &self.volume, None)
        }
    }

    #[test]
    fn a_volume_has_what_the_image_has_there() {
        let rig = Rig::new();
        let data = rig.rootfs.join("data");
        fs::create_dir_all(data.join("sub/inner")).unwrap();
        fs::write(data.join("file"), vec![7; CHUNK + 1]).unwrap();
        fs::set_permissions(data.join("file"), Permissions::from_mode(0o4750)).unwrap();
        fs::hard_link(data.join("file"), data.join("sub/same")).unwrap();
        symlink("/etc/passwd", data.join("sub/link")).unwrap();
        mknodat(CWD, data.join("pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        fs::set_permissions(data.join("pipe"), Permissions::from_mode(0o620)).unwrap();
        rustix::fs::setxattr(data.join("file"), c"user.a", b"1", XattrFlags::empty()).unwrap();
        fs::set_permissions(data.join("sub"), Permissions::from_mode(0o2500)).unwrap();
        let then = SystemTime::UNIX_EPOCH + Duration::from_nanos(1_234_567_890_123_456_789);
        for path in ["file", "sub"] {
            File::open(data.join(path))
                .unwrap()
                .set_modified(then)
                .unwrap();
        }
        fs::set_permissions(&data, Permissions::from_mode(0o1777)).unwrap();

        rig.fill("/data").unwrap();
        let at = |path: &str| fs::symlink_metadata(rig.volume.join(path)).unwrap();
        assert_eq!(at("").mode() & 0o7777, 0o1777);
        assert_eq!(
            fs::read(rig.volume.join("file")).unwrap(),
            vec![7; CHUNK + 1]
        );
        assert_eq!(at("file").mode() & 0o7777, 0o4750);
        assert_eq!(at("file").ino(), at("sub/same").ino());
        assert_eq!(
            (
                at("file").modified().unwrap(),
                at("sub").modified().unwrap()
            ),
            (then, then)
        );
        assert_eq!(at("sub").mode() & 0o7777, 0o2500);
        assert!(at("sub/inner").is_dir());
        let link = fs::read_link(rig.volume.join("sub/link")).unwrap();
        assert_eq!(link, Path::new("/etc/passwd"));
        assert_eq!(at("pipe").mode(), libc::S_IFIFO | 0o620);
        let mut value = [0; 8];
        let len = rustix::fs::getxattr(rig.volume.join("file"), c"user.a", &mut value[..]);
        assert_eq!(&value[..len.unwrap()], b"1");
    }

    #[test]
    fn devices_are_left_out_under_all_their_names() {
        let rig = Rig::new();
        let data = rig.rootfs.join("data");
        fs::create_dir(&data).unwrap();
        // The one that takes no capability to make.
        mknodat(
            CWD,
            data.join("a"),
            FileType::CharacterDevice,
            Mode::RUSR,
            0,
        )
        .unwrap();
        fs::hard_link(data.join("a"), data.join("b")).unwrap();
        fs::write(data.join("file"), "x").unwrap();
        rig.fill("/data").unwrap();
        let names = fs::read_dir(&rig.volume).unwrap();
        let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["file"]);
    }

    #[test]
    fn links_to_a_volumes_path_stay_in_the_image() {
        let rig = Rig::new();
        let outside = rig.rootfs.parent().unwrap().join("outside");
        for dir in [&outside, &rig.rootfs.join("outside")] {
            fs::create_dir(dir).unwrap();
            fs::write(dir.join(dir.parent().unwrap().file_name().unwrap()), "").unwrap();
        }
        symlink("../../outside", rig.rootfs.join("data")).unwrap();
        rig.fill("/data").unwrap();
        let names: Vec<_> = fs::read_dir(&rig.volume).unwrap().collect();
        assert_eq!(names.len(), 1);
        assert!(rig.volume.join("rootfs").exists());
        fs::remove_file(rig.volume.join("rootfs")).unwrap();
        symlink("/nowhere", rig.rootfs.join("dangling")).unwrap();
        for missing in ["/dangling", "/no/such/path", "/proc/self/root"] {
            rig.fill(missing).unwrap();
        }
        assert_eq!(fs::read_dir(&rig.volume).unwrap().count(), 0);
    }

    #[test]
    fn what_cannot_be_copied_is_named() {
        let rig = Rig::new();
        fs::write(rig.rootfs.join("file"), "").unwrap();
        let error = rig.fill("/file").unwrap_err();
        assert!(error.to_string().contains("/file"), "{error}");
        let deep = "d/".repeat(MAX_DEPTH);
        fs::create_dir_all(rig.rootfs.join(&deep)).unwrap();
        let error = rig.fill("/").unwrap_err();
        assert!(error.to_string().contains("/d/d/d"), "{error}");
        assert!(error.source.to_string().contains("deeper"), "{error:?}");
    }
}
