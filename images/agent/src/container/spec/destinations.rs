//! Where a container's mounts are in its root filesystem.
//!
//! libcontainer creates what a destination lacks, but not the target of a link that leads to
//! nothing: images have such links at `/etc/resolv.conf` and `/var/run`, for example. So the
//! specification that it gets has no links in destinations. They are followed as in a container:
//! an absolute link starts at its root, and `..` does not lead out of it. What does not exist is
//! created with the mount.

use std::collections::HashSet;
use std::io;
use std::path::{Component, Path, PathBuf};

use oci_spec::runtime::{Mount, Spec};
use pathrs::Root;
use pathrs::error::ErrorKind;

use crate::container::spec_error::SpecError;

/// Links that are followed in one path; as many as in runc.
const MAX_LINKS: usize = 255;

/// Replaces the destinations of the specification's mounts by what they are in the root filesystem
/// `rootfs`. Those that libcontainer compares or checks itself stay: /dev, and those of procfs and
/// sysfs.
///
/// # Errors
///
/// [`SpecError::Destination`].
pub fn resolve_destinations(spec: &mut Spec, rootfs: &Path) -> Result<(), SpecError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| SpecError::Destination { path, source }
    };
    let root = Root::open(rootfs).map_err(io::Error::other);
    let root = root.map_err(failed(rootfs))?;
    let mut mounted = HashSet::new();
    for mount in spec.mounts_mut().iter_mut().flatten() {
        let destination = mount.destination();
        let resolved = resolve(&root, destination, &mounted).map_err(failed(destination))?;
        // JSON has no paths of other bytes: libcontainer follows their links.
        if !is_checked_later(mount) && resolved.to_str().is_some() {
            mount.set_destination(resolved.clone());
        }
        mounted.insert(resolved);
    }
    Ok(())
}

/// Returns whether libcontainer needs the destination as it is: it creates devices in /dev, and
/// mounts procfs and sysfs on no link.
fn is_checked_later(mount: &Mount) -> bool {
    matches!(mount.typ().as_deref(), Some("proc" | "sysfs"))
        || mount.destination() == Path::new("/dev")
}

/// Follows the links of `path` in `root`, but not below the paths in `mounted`: other files will be
/// there when the mount is created.
fn resolve(root: &Root, path: &Path, mounted: &HashSet<PathBuf>) -> io::Result<PathBuf> {
    let mut resolved = PathBuf::from("/");
    let mut rest = path.to_owned();
    let mut links = 0;
    loop {
        let mut parts = rest.components();
        let next = parts.next();
        let is_below = matches!(next, Some(Component::Normal(_) | Component::CurDir));
        if is_below && mounted.contains(&resolved) {
            return Ok(resolved.join(rest));
        }
        match next {
            None => return Ok(resolved),
            Some(Component::RootDir) => resolved = PathBuf::from("/"),
            Some(Component::ParentDir) => {
                resolved.pop();
            }
            Some(Component::CurDir | Component::Prefix(_)) => {}
            Some(Component::Normal(name)) => {
                resolved.push(name);
                if !mounted.contains(&resolved)
                    && let Some(target) = link_at(root, &resolved)?
                {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err(io::Error::from_raw_os_error(libc::ELOOP));
                    }
                    resolved.pop();
                    rest = target.join(parts.as_path());
                    continue;
                }
            }
        }
        rest = parts.as_path().to_owned();
    }
}

/// Returns the target of the link at `path`; `None` if there is no link.
fn link_at(root: &Root, path: &Path) -> io::Result<Option<PathBuf>> {
    match root.readlink(path) {
        Ok(target) => Ok(Some(target)),
        Err(error) => match error.kind() {
            // The kernel returns ENOENT also for a file that is no link.
            ErrorKind::OsError(Some(libc::ENOENT | libc::ENOTDIR | libc::EINVAL)) => Ok(None),
            _ => Err(io::Error::other(error)),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs;
    use std::os::unix::ffi::OsStrExt as _;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use pathrs::flags::OpenFlags;
    use tempfile::TempDir;

    use super::super::{store, stored};
    use super::*;

    /// Creates a root filesystem with these links, and the directories that they are in.
    fn rootfs(links: &[(&str, &str)]) -> TempDir {
        let root = tempfile::tempdir().unwrap();
        for (link, target) in links {
            let link = root.path().join(link);
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            symlink(target, link).unwrap();
        }
        root
    }

    fn mount(destination: impl AsRef<Path>, typ: &str) -> Mount {
        let mut mount = Mount::default();
        mount.set_destination(destination.as_ref().to_owned());
        mount.set_typ(Some(typ.to_owned()));
        mount
    }

    fn resolved(rootfs: &TempDir, mounts: Vec<Mount>) -> Result<Vec<PathBuf>, SpecError> {
        let mut spec = Spec::default();
        spec.set_mounts(Some(mounts));
        resolve_destinations(&mut spec, rootfs.path())?;
        let mounts = spec.mounts().iter().flatten();
        Ok(mounts.map(|mount| mount.destination().clone()).collect())
    }

    fn binds(rootfs: &TempDir, destinations: &[&str]) -> Vec<PathBuf> {
        let mounts = destinations.iter().map(|path| mount(path, "bind"));
        resolved(rootfs, mounts.collect()).unwrap()
    }

    fn paths(paths: &[&str]) -> Vec<PathBuf> {
        paths.iter().map(PathBuf::from).collect()
    }

    #[test]
    fn a_mount_on_a_link_to_nothing_is_where_the_link_leads() {
        let root = rootfs(&[
            ("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf"),
            ("etc/localtime", "/usr/share/zoneinfo/UTC"),
            ("var/run", "/run"),
        ]);
        let found = binds(
            &root,
            &[
                "/etc/resolv.conf",
                "/etc/localtime",
                "/var/run/secrets/kubernetes.io/serviceaccount",
                "/data/./missing//here/",
            ],
        );
        let expected = [
            "/run/systemd/resolve/stub-resolv.conf",
            "/usr/share/zoneinfo/UTC",
            "/run/secrets/kubernetes.io/serviceaccount",
            "/data/missing/here",
        ];
        assert_eq!(found, paths(&expected));
        // As libcontainer creates them.
        let opened = Root::open(root.path()).unwrap();
        let mode = fs::Permissions::from_mode(0o755);
        let flags = OpenFlags::O_EXCL | OpenFlags::O_NOFOLLOW;
        for path in &found {
            opened.mkdir_all(path.parent().unwrap(), &mode).unwrap();
            opened.create_file(path, flags, &mode).unwrap();
        }
        assert!(root.path().join(&expected[0][1..]).is_file());
    }

    #[test]
    fn links_do_not_lead_out_of_the_root() {
        let root = rootfs(&[
            ("a/up", "../../../../etc"),
            ("a/abs", "/../../b/c"),
            ("b/c", "d/../e"),
        ]);
        let found = binds(&root, &["/a/up/x", "/a/abs", "/../../a/up", "../a/abs/y"]);
        assert_eq!(found, paths(&["/etc/x", "/b/e", "/etc", "/b/e/y"]));
    }

    #[test]
    fn links_to_what_is_there_are_followed() {
        let root = rootfs(&[("bin", "usr/bin"), ("usr/bin/sh", "busybox")]);
        fs::write(root.path().join("usr/bin/busybox"), "").unwrap();
        assert_eq!(binds(&root, &["/bin/sh"]), paths(&["/usr/bin/busybox"]));
        // libcontainer reports that there is no directory.
        let below = binds(&root, &["/bin/sh/x"]);
        assert_eq!(below, paths(&["/usr/bin/busybox/x"]));
    }

    #[test]
    fn a_path_is_not_followed_below_an_earlier_mount() {
        let root = rootfs(&[
            ("run/hidden", "/etc"),
            ("var/run", "../run"),
            ("back", "/run/../etc"),
        ]);
        let found = binds(
            &root,
            &["/run/hidden", "/run", "/var/run/hidden/x", "/back"],
        );
        assert_eq!(found, paths(&["/etc", "/run", "/run/hidden/x", "/etc"]));
        let root = rootfs(&[("l", "/m")]);
        let found = binds(&root, &["/l", "/l/l", "/l", "/", "/l"]);
        assert_eq!(found, paths(&["/m", "/m/l", "/m", "/", "/l"]));
    }

    #[test]
    fn a_stored_specification_can_be_resolved_again() {
        let root = rootfs(&[("etc/file", "/run/file")]);
        let mut spec = Spec::default();
        spec.set_mounts(Some(vec![mount("/etc/file", "bind")]));
        let directory = tempfile::tempdir().unwrap();
        let path = store(&spec, directory.path().join("spec.json")).unwrap();
        let destination = || {
            let mut spec = stored(path.clone()).unwrap();
            resolve_destinations(&mut spec, root.path()).unwrap();
            spec.mounts().as_ref().unwrap()[0].destination().clone()
        };
        assert_eq!(destination(), Path::new("/run/file"));
        let link = root.path().join("etc/file");
        fs::remove_file(&link).unwrap();
        symlink("other", &link).unwrap();
        assert_eq!(destination(), Path::new("/etc/other"));
    }

    #[test]
    fn what_libcontainer_checks_itself_stays() {
        let links = [("proc", "/x"), ("sys", "/x"), ("dev", "/y"), ("z", "/x")];
        let root = rootfs(&links);
        let mounts = vec![
            mount("/proc", "proc"),
            mount("/sys", "sysfs"),
            mount("/dev", "tmpfs"),
            mount("/z", "tmpfs"),
        ];
        let found = resolved(&root, mounts).unwrap();
        assert_eq!(found, paths(&["/proc", "/sys", "/dev", "/x"]));
    }

    #[test]
    fn a_path_that_json_cannot_hold_stays() {
        let root = rootfs(&[]);
        symlink(OsStr::from_bytes(b"/d\xff"), root.path().join("link")).unwrap();
        assert_eq!(binds(&root, &["/link"]), paths(&["/link"]));
    }

    #[test]
    fn links_without_end_are_an_error() {
        let root = rootfs(&[("a", "b"), ("b", "a"), ("long", "l254")]);
        for number in 1..255 {
            let target = format!("l{}", number - 1);
            symlink(target, root.path().join(format!("l{number}"))).unwrap();
        }
        assert_eq!(binds(&root, &["/long"]), paths(&["/l0"]));
        symlink("long", root.path().join("longer")).unwrap();
        for path in ["/a/x", "/longer"] {
            let error = resolved(&root, vec![mount(path, "bind")]).unwrap_err();
            assert!(
                matches!(&error, SpecError::Destination { source, .. }
                    if source.raw_os_error() == Some(libc::ELOOP)),
                "{error}"
            );
        }
    }
}
