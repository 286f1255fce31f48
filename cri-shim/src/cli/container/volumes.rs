//! `-v HOST:GUEST[:ro]`: directories and files of the host, bind-mounted into the directory that
//! the guest shares, in the mount namespace of the machine's process.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use rustix::fs::fstatvfs;
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use tracing::debug;

use super::record::{Record, Volume};
use crate::bind::{
    DetachedTree, Extent, Propagation, guest_options, mount_points, open_source, pass_on_mounts,
    private_mount_of,
};
use crate::guest_devices;
use crate::sandbox::jail::{self, MappedUsers};
use crate::sandbox::{SandboxClient, ShareUsers, SharedDirectory};

/// Parses `HOST:GUEST`, optionally followed by options: `ro`, `rw`, a propagation, and docker's `z`
/// and `Z`, which are for SELinux and have no effect in a guest.
pub(in crate::cli) fn parse(text: &str) -> Result<Volume, String> {
    let usage = || {
        "write HOST:GUEST, HOST:GUEST:ro or HOST:GUEST:rslave, an absolute path of the container's, and one of the \
         host that is absolute or begins with ./ or ../"
            .to_owned()
    };
    let mut parts = text.split(':');
    let (source, destination) = (parts.next().unwrap_or(""), parts.next().ok_or_else(usage)?);
    let (mut read_only, mut follows) = (false, false);
    for option in parts.next().into_iter().flat_map(|all| all.split(',')) {
        match option {
            "ro" => read_only = true,
            "rw" | "z" | "Z" => {}
            propagation => {
                follows = parse_propagation(propagation).unwrap_or_else(|| Err(usage()))?;
            }
        }
    }
    match parts.next() {
        None => new(source, destination, read_only, follows).ok_or_else(usage),
        Some(_) => Err(usage()),
    }
}

/// Returns whether later mounts of the host follow by this propagation; `None` if it is none.
pub(in crate::cli) fn parse_propagation(word: &str) -> Option<Result<bool, String>> {
    match word {
        "private" | "rprivate" => Some(Ok(false)),
        "slave" | "rslave" => Some(Ok(true)),
        "shared" | "rshared" => Some(Err(format!(
            "{word}: mounts of a guest cannot appear on the host; rslave has those of the host \
             appear in the guest"
        ))),
        _ => None,
    }
}

/// Returns a volume; `None` if one of the paths cannot be that of one.
pub(in crate::cli) fn new(
    source: &str,
    destination: &str,
    read_only: bool,
    follows: bool,
) -> Option<Volume> {
    let is_path = |path: &str| path.starts_with('/') && !path.split('/').any(|part| part == "..");
    let is_source = source.starts_with('/') || matches!(source.split('/').next(), Some("." | ".."));
    if !is_source || !is_path(destination) || destination == "/" {
        return None;
    }
    Some(Volume {
        source: std::path::absolute(source).ok()?,
        destination: destination.to_owned(),
        read_only,
        follows,
    })
}

/// Returns the name of a container's volume in the directory that its machine shares.
pub(in crate::cli) fn name(record: &Record, number: usize) -> String {
    match record.pod {
        None => format!("v{number}"),
        Some(_) => format!("{}-{number}", record.short_id()),
    }
}

/// Checks whether volumes can be mounted, before anything is created for them.
pub(in crate::cli) fn check(volumes: &[Volume]) -> anyhow::Result<()> {
    ensure!(
        volumes.is_empty() || rustix::process::geteuid().is_root(),
        "--volume: sharing directories takes root, who may mount them"
    );
    for volume in volumes {
        let source = fs::metadata(&volume.source);
        let cannot = || format!("--volume: cannot share {}", volume.source.display());
        source.with_context(cannot)?;
        if volume.follows {
            let source = open_source(&volume.source).with_context(cannot)?;
            check_follows(
                &volume.source,
                private_mount_of(&source).with_context(cannot)?,
            )?;
        }
    }
    Ok(())
}

/// Returns an error if the mount that a volume's source is on is private.
fn check_follows(source: &Path, private: Option<PathBuf>) -> anyhow::Result<()> {
    let Some(point) = private else {
        return Ok(());
    };
    bail!(
        "rslave: {} is on {}, a private mount: what is mounted below it later would not appear; \
         `mount --make-shared {}` first, or leave out rslave",
        source.display(),
        point.display(),
        point.display()
    );
}

/// Returns an error if two mounts have the same destination: the second one would hide the first.
pub(in crate::cli) fn check_distinct<'a>(
    destinations: impl IntoIterator<Item = &'a str>,
) -> anyhow::Result<()> {
    let mut known = BTreeSet::new();
    for destination in destinations {
        // A slash at the end makes no other path.
        let is_new = known.insert(Path::new(destination).components().collect::<PathBuf>());
        ensure!(
            is_new,
            "duplicate mount point {destination}: two of --volume, --mount and --tmpfs mount there; leave \
             one out, or choose another path for it"
        );
    }
    Ok(())
}

/// Creates the directory that a machine shares. Without a jail volumes are mounted where the host
/// sees them; the mount of its own keeps them from appearing anywhere else.
pub(in crate::cli) fn make_shared(shared: &Path, is_jailed: bool) -> anyhow::Result<()> {
    fs::create_dir(shared).with_context(|| format!("cannot create {}", shared.display()))?;
    if is_jailed {
        return Ok(());
    }
    pass_on_mounts(shared).with_context(|| format!("cannot mount {} on itself", shared.display()))
}

/// Mounts the volumes of a container in `shared`, where the machine's process sees them.
pub(in crate::cli) fn mount(
    client: &SandboxClient,
    shared: &Path,
    record: &Record,
) -> anyhow::Result<()> {
    if record.volumes.is_empty() {
        return Ok(());
    }
    let shared = client
        .shared_directory(shared)
        .context("cannot look at the mounts of the machine's process")?;
    for (number, volume) in record.volumes.iter().enumerate() {
        mount_one(&shared, &name(record, number), volume)
            .with_context(|| format!("cannot share {}", volume.source.display()))?;
    }
    Ok(())
}

/// Returns whose rights the process of a machine with these volumes needs: the host's root's, if
/// one of them cannot be mounted with mapped users.
pub(in crate::cli) fn share_users(volumes: &[Volume]) -> ShareUsers {
    let can_be_mapped = || -> anyhow::Result<bool> {
        // Any other users would do.
        let users = MappedUsers::new(jail::UID_BASE)?;
        for volume in volumes {
            let source = open_source(&volume.source)?;
            if guest_devices::path_of(&source.metadata()?).is_some() {
                continue;
            }
            if volume.follows {
                return Ok(false);
            }
            DetachedTree::of(&source, Extent::Whole, Propagation::Private)?.map_users(&users)?;
        }
        Ok(true)
    };
    match can_be_mapped() {
        Ok(true) => ShareUsers::Mapped,
        Ok(false) => ShareUsers::Host,
        Err(error) => {
            debug!(%error, "volumes without mapped users: the machine's process is root");
            ShareUsers::Host
        }
    }
}

fn mount_one(shared: &SharedDirectory, name: &str, volume: &Volume) -> anyhow::Result<()> {
    let source = open_source(&volume.source)?;
    let meta = source.metadata()?;
    if guest_devices::path_of(&meta).is_some() {
        // The guest has it itself.
        return Ok(());
    }
    // By descriptor, so that the path cannot change its meaning in between.
    let propagation = match volume.follows {
        true => Propagation::FromSource,
        false => Propagation::Private,
    };
    let tree = DetachedTree::of(&source, Extent::Whole, propagation)?;
    // The host enforces read-only even against a malicious guest. Neither devices nor set-user-ID
    // programs work where the jail has it.
    tree.make_harmless()?;
    if volume.read_only {
        tree.make_read_only(Extent::Whole)?;
    }
    Ok(shared.attach(&tree, name, meta.is_dir())?)
}

/// Returns the source and the options of the mount by which a guest that has its volumes in `share`
/// gives a container its volume of this number.
pub(in crate::cli) fn guest_mount(
    share: &Path,
    record: &Record,
    number: usize,
    volume: &Volume,
) -> anyhow::Result<(PathBuf, Vec<String>)> {
    let path = &volume.source;
    let look = || {
        let source = open_source(path)?;
        io::Result::Ok((source.metadata()?, fstatvfs(&source)?.f_flag))
    };
    let (meta, flags) = look().with_context(|| format!("cannot look at {}", path.display()))?;
    let access = if volume.read_only { "ro" } else { "rw" };
    let owned = |options: Vec<&str>| options.into_iter().map(str::to_owned).collect();
    if let Some(device) = guest_devices::path_of(&meta) {
        let options = owned(vec!["bind", access, "nosuid", "noexec"]);
        return Ok((device.into(), options));
    }
    let options = ["rbind", access].into_iter();
    let options = options.chain(volume.follows.then_some("rslave"));
    let options = options.chain(guest_options(flags));
    Ok((share.join(name(record, number)), owned(options.collect())))
}

/// Takes the volumes of a container out of a directory that its pod goes on sharing.
pub(in crate::cli) fn remove(shared: &Path, record: &Record) -> anyhow::Result<()> {
    let entries = match fs::read_dir(shared) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.with_context(|| format!("cannot read {}", shared.display()))?,
    };
    let own: Vec<String> = (0..record.volumes.len())
        .map(|number| name(record, number))
        .collect();
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot read {}", shared.display()))?;
        if !own.iter().any(|name| entry.file_name() == name.as_str()) {
            continue;
        }
        let target = entry.path();
        unmount_all(&target)?;
        let removed = entry.file_type().and_then(|kind| match kind.is_dir() {
            true => fs::remove_dir(&target),
            false => fs::remove_file(&target),
        });
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", target.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Unmounts everything below `dir`.
pub(in crate::cli) fn unmount_all(dir: &Path) -> anyhow::Result<()> {
    let points = mount_points(dir)?;
    if points.is_empty() {
        return Ok(());
    }
    for point in points.iter().rev() {
        match unmount(point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            // `run` and `rm -f` may do this at the same time: it is no mount point any more.
            Err(Errno::INVAL | Errno::NOENT) => {}
            done => done.with_context(|| format!("cannot unmount {}", point.display()))?,
        }
    }
    // The files of a remaining mount would be removed with the directory.
    if let Some(left) = mount_points(dir)?.first() {
        bail!("{} is still mounted", left.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_is_mounted_on_once() {
        check_distinct(["/x", "/x/y", "/xy"]).unwrap();
        for twice in ["/x", "/x/", "//x", "/./x/."] {
            let error = check_distinct(["/y", "/x", twice]).unwrap_err().to_string();
            assert!(error.contains(&format!("mount point {twice}:")), "{error}");
        }
    }

    #[test]
    fn a_volume_cannot_follow_a_private_mount() {
        check_follows(Path::new("/a"), None).unwrap();
        let refused = check_follows(Path::new("/a/b"), Some("/a".into())).unwrap_err();
        assert!(
            refused.to_string().contains("mount --make-shared /a`"),
            "{refused}"
        );
    }

    #[test]
    fn a_volume_is_two_paths_and_options() {
        let volume = parse("/a:/b/c").unwrap();
        assert_eq!((&*volume.destination, volume.read_only), ("/b/c", false));
        assert!(parse("/a:/b:ro").unwrap().read_only);
        assert!(!parse("/a:/b:rw").unwrap().read_only);
        assert!(parse("/a:/b:ro,Z").unwrap().read_only);
        assert!(!parse("/a:/b:z").unwrap().read_only);
        assert!(!parse("/a:/b:ro,rprivate").unwrap().follows);
        assert!(parse("/a:/b:ro,rslave").unwrap().follows);
        let shared = parse("/a:/b:rshared").unwrap_err();
        assert!(shared.contains("rslave"), "{shared}");
        let here = std::env::current_dir().unwrap();
        assert_eq!(parse("./a:/b").unwrap().source, here.join("a"));
        assert_eq!(parse(".:/b").unwrap().source, here);
        for bad in [
            "",
            "/a",
            "a:/b",
            "/a:b",
            "/a:/",
            "/a:/b:x",
            "/a:/b:ro:",
            "/a:/b:U",
            ".a:/b",
            "/a:/b/../c",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
