//! Completes the host's OCI runtime specification with what only the guest knows.

mod destinations;

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::{Component, Path, PathBuf};

use oci_spec::runtime::{LinuxNamespace, LinuxNamespaceType, Mount, Process, RootBuilder, Spec};
use pathrs::Root;
use podvisor_agent_protocol::{
    FILL, GUEST_DEVICES, MountSource, PidNamespace, SHARED_MEMORY, is_containers_own, limits,
};

use super::files::disk;
use super::files::memory::{MemoryVolumeMount, is_plain};
use super::spec_error::SpecError;
use super::users::user::User;
use crate::cgroup::Cgroup;
use crate::guest::shares::is_below_share;
use crate::owner::Owner;
use crate::seccomp::{self, Filter};
pub use destinations::resolve_destinations;

/// A file that the agent shows in a container.
#[derive(Debug)]
pub struct EtcFile<'a> {
    /// The path in the container.
    pub destination: &'static str,
    /// Contents; nothing is shown if empty.
    pub contents: &'a [u8],
}

/// Reads a container's specification.
///
/// # Errors
///
/// [`SpecError`] for JSON that is not a specification, and for one with unsupported parts: hooks
/// (they would run outside of the container), no mount namespace (the container's mounts would be
/// the guest's), no command.
pub fn parse(json: &[u8]) -> Result<Spec, SpecError> {
    const WHAT: &str = "spec_json";
    bounded(WHAT, json)?;
    let spec: Spec = serde_json::from_slice(json)
        .map_err(|source| SpecError::Malformed { what: WHAT, source })?;
    if spec
        .hooks()
        .as_ref()
        .is_some_and(|hooks| *hooks != Default::default())
    {
        return Err(SpecError::Refused(
            "hooks are not run in a guest, remove them",
        ));
    }
    let linux = spec
        .linux()
        .as_ref()
        .ok_or(SpecError::Refused("`linux` is missing"))?;
    let has_mount_namespace = linux
        .namespaces()
        .iter()
        .flatten()
        .any(|n| n.typ() == LinuxNamespaceType::Mount && n.path().is_none());
    if !has_mount_namespace {
        return Err(SpecError::Refused(
            "a new `mount` namespace is missing in `linux.namespaces`",
        ));
    }
    check_process(
        spec.process()
            .as_ref()
            .ok_or(SpecError::Refused("`process` is missing"))?,
    )?;
    check_mounts(&spec)?;
    Ok(spec)
}

/// Bind mounts may have their source in the shares of the host, in images, in volumes in memory,
/// and of the guest's own in /dev/shm and in some devices. None may be mounted where the container
/// has something of its own.
fn check_mounts(spec: &Spec) -> Result<(), SpecError> {
    let is_bind = |mount: &&Mount| {
        mount.typ().as_deref() == Some("bind")
            || mount
                .options()
                .iter()
                .flatten()
                .any(|option| matches!(option.as_str(), "bind" | "rbind"))
    };
    for mount in spec.mounts().iter().flatten().filter(is_bind) {
        if is_containers_own(mount.destination()) {
            return Err(SpecError::Refused(
                "nothing can be mounted at /dev, nor at the devices and links that every \
                 container has in it: mount it elsewhere",
            ));
        }
        let from = mount.source().as_deref().unwrap_or(Path::new(""));
        if let Some((serial, below)) = image_of(from)
            && disk::validate_serial(serial).is_ok()
            && is_plain(Path::new(below))
        {
            continue;
        }
        if MemoryVolumeMount::of(mount)?.is_some() {
            continue;
        }
        let plain = from
            .components()
            .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        let is_device = GUEST_DEVICES
            .iter()
            .any(|(path, ..)| from == Path::new(path));
        if !plain || !(is_below_share(from) || from == Path::new(SHARED_MEMORY) || is_device) {
            return Err(SpecError::Refused(
                "a bind mount's source lies below a share (/run/podvisor/shared/NAME), is \
                 /dev/shm, a device such as /dev/null, image:SERIAL[/PATH] or memory:KEY",
            ));
        }
    }
    Ok(())
}

/// Replaces the path of a pid namespace by one that can be joined: [`PidNamespace::Shared`] by the
/// path of the shared one, which `shared` returns, and that of a container by the path that
/// `of_container` returns.
///
/// # Errors
///
/// Errors of `shared` and `of_container`.
pub fn join_pids<E>(
    spec: &mut Spec,
    shared: impl FnOnce() -> Result<PathBuf, E>,
    of_container: impl FnOnce(&str) -> Result<PathBuf, E>,
) -> Result<(), E> {
    let namespaces = spec
        .linux_mut()
        .as_mut()
        .and_then(|linux| linux.namespaces_mut().as_mut());
    let pids = namespaces.and_then(|namespaces| {
        let mut namespaces = namespaces.iter_mut();
        namespaces.find(|namespace| namespace.typ() == LinuxNamespaceType::Pid)
    });
    let Some(namespace) = pids else { return Ok(()) };
    let wanted = namespace.path().clone().unwrap_or_default();
    let wanted = wanted.to_str().unwrap_or_default();
    let path = match PidNamespace::parse(wanted) {
        Some(PidNamespace::Shared) => shared()?,
        Some(PidNamespace::OfContainer(id)) => of_container(id)?,
        None => return Ok(()),
    };
    namespace.set_path(Some(path));
    Ok(())
}

/// Returns the serial numbers of the disks whose images the specification mounts in addition to the
/// root.
#[must_use]
pub fn mounted_images(spec: &Spec) -> Vec<String> {
    let sources = spec.mounts().iter().flatten();
    let mut serials: Vec<String> = sources
        .filter_map(|mount| Some(image_of(mount.source().as_deref()?)?.0.to_owned()))
        .collect();
    serials.sort_unstable();
    serials.dedup();
    serials
}

/// Returns the destinations of the specification's mounts, in its order.
#[must_use]
pub fn destinations(spec: &Spec) -> Vec<&Path> {
    let mounts = spec.mounts().iter().flatten();
    mounts.map(|mount| mount.destination().as_path()).collect()
}

/// Returns whether the container has its own /dev, and not the host's.
#[must_use]
pub fn has_own_dev(spec: &Spec) -> bool {
    let mut mounts = spec.mounts().iter().flatten();
    mounts.any(|mount| {
        mount.destination() == Path::new("/dev") && mount.typ().as_deref() == Some("tmpfs")
    })
}

/// Returns the paths of the host's volumes that the specification mounts.
#[must_use]
pub fn shared_volumes(spec: &Spec) -> Vec<PathBuf> {
    let sources = spec.mounts().iter().flatten();
    let sources = sources.filter_map(|mount| mount.source().as_deref());
    let shared = sources.filter(|source| is_below_share(source));
    shared.map(Path::to_owned).collect()
}

/// A volume of the host into which the image's content at its mount point is to be copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeOfImage {
    /// Its path in the guest.
    pub source: PathBuf,
    /// Its path in the container.
    pub destination: PathBuf,
}

/// Removes `FILL` from the options of the specification's mounts; returns those that had it.
pub fn take_volumes_of_image(spec: &mut Spec) -> Vec<VolumeOfImage> {
    let mut found = Vec::new();
    for mount in spec.mounts_mut().iter_mut().flatten() {
        let mut options = mount.options().clone().unwrap_or_default();
        let before = options.len();
        options.retain(|option| option != FILL);
        let source = mount.source().clone().unwrap_or_default();
        if options.len() < before && is_below_share(&source) {
            found.push(VolumeOfImage {
                source,
                destination: mount.destination().clone(),
            });
            mount.set_options(Some(options));
        }
    }
    found
}

/// Replaces sources in images by the paths where the images are mounted.
///
/// # Errors
///
/// [`SpecError::InImage`] for a path that an image does not have.
pub fn place_images(
    spec: &mut Spec,
    path_of: impl Fn(&str) -> Option<PathBuf>,
) -> Result<(), SpecError> {
    for mount in spec.mounts_mut().iter_mut().flatten() {
        let source = mount.source().clone().unwrap_or_default();
        if let Some((serial, below)) = image_of(&source)
            && let Some(root) = path_of(serial)
        {
            let path = path_in(&root, below).map_err(|source| SpecError::InImage {
                path: below.to_owned(),
                source,
            })?;
            mount.set_source(Some(path));
        }
    }
    Ok(())
}

/// Returns the serial number of the disk whose image a source is in, and the path in the image.
fn image_of(source: &Path) -> Option<(&str, &str)> {
    match MountSource::parse(source.to_str()?)? {
        MountSource::Image { serial, below } => Some((serial, below.unwrap_or(""))),
        MountSource::Memory { .. } => None,
    }
}

/// Resolves a path in an image: links in the image do not lead out of it.
fn path_in(image: &Path, below: &str) -> io::Result<PathBuf> {
    if below.is_empty() {
        return Ok(image.to_owned());
    }
    let found = Root::open(image).and_then(|root| root.resolve(below));
    let found = found.map_err(io::Error::other)?;
    fs::read_link(format!("/proc/self/fd/{}", found.as_fd().as_raw_fd()))
}

/// Reads the process of an exec.
///
/// # Errors
///
/// [`SpecError`] for JSON that is not a process object, or has no command.
pub fn parse_process(json: &[u8]) -> Result<Process, SpecError> {
    const WHAT: &str = "process_json";
    bounded(WHAT, json)?;
    let process = serde_json::from_slice(json)
        .map_err(|source| SpecError::Malformed { what: WHAT, source })?;
    check_process(&process)?;
    Ok(process)
}

fn bounded(what: &'static str, json: &[u8]) -> Result<(), SpecError> {
    let limit = limits::SPEC_BYTES;
    if json.len() <= limit {
        Ok(())
    } else {
        Err(SpecError::TooLarge { what, limit })
    }
}

fn check_process(process: &Process) -> Result<(), SpecError> {
    let args = process.args().as_deref().unwrap_or_default();
    if args.first().is_none_or(String::is_empty) {
        return Err(SpecError::Refused("`process.args` names no command"));
    }
    if args
        .iter()
        .chain(process.env().iter().flatten())
        .any(|text| text.contains('\0'))
    {
        return Err(SpecError::Refused(
            "`process.args` and `process.env` cannot hold NUL bytes",
        ));
    }
    if !process.cwd().is_absolute() {
        return Err(SpecError::Refused("`process.cwd` is no absolute path"));
    }
    Ok(())
}

/// Fills in the paths of the container's root and control group, and whether it may write.
///
/// A container always gets a cgroup namespace: a container that mounts cgroup2 in the guest's own
/// namespace would change the options of the guest's mount.
pub fn place(spec: &mut Spec, rootfs: &Path, readonly: bool, cgroup: &Cgroup) {
    let readonly = readonly
        || spec
            .root()
            .as_ref()
            .and_then(|r| r.readonly())
            .unwrap_or(false);
    // Building from these two fields cannot fail.
    spec.set_root(
        RootBuilder::default()
            .path(rootfs)
            .readonly(readonly)
            .build()
            .ok(),
    );
    if let Some(linux) = spec.linux_mut() {
        linux.set_cgroups_path(Some(cgroup.spec_path().to_owned()));
        let namespaces = linux.namespaces_mut().get_or_insert_default();
        if !namespaces
            .iter()
            .any(|n| n.typ() == LinuxNamespaceType::Cgroup)
        {
            let mut namespace = LinuxNamespace::default();
            namespace.set_typ(LinuxNamespaceType::Cgroup);
            namespaces.push(namespace);
        }
    }
}

/// Takes the seccomp profile out of the specification, as the filter to install: libcontainer
/// applies none to additional processes, and compiles it at each start.
///
/// # Errors
///
/// [`SpecError::Seccomp`].
pub fn take_filter(spec: &mut Spec) -> Result<Option<Filter>, SpecError> {
    let Some(linux) = spec.linux_mut() else {
        return Ok(None);
    };
    let profile = linux.seccomp().clone();
    linux.set_seccomp(None);
    Ok(profile.as_ref().map(seccomp::compile).transpose()?)
}

/// File of a container's filter, in its directory.
const FILTER: &str = "seccomp";

/// Stores a container's filter for the launch of its processes.
///
/// # Errors
///
/// [`SpecError::Write`].
pub fn store_filter(
    filter: Option<Filter>,
    directory: &Path,
) -> Result<Option<PathBuf>, SpecError> {
    let Some(filter) = filter else {
        return Ok(None);
    };
    let path = directory.join(FILTER);
    match filter.store(&path) {
        Ok(()) => Ok(Some(path)),
        Err(source) => Err(SpecError::Write { path, source }),
    }
}

/// Returns the filter of the container with this directory, if it has one.
#[must_use]
pub fn stored_filter(directory: &Path) -> Option<PathBuf> {
    Some(directory.join(FILTER)).filter(|path| path.exists())
}

/// Fills in user, home and terminal of a process.
///
/// `user` is the resolved one of the request, if it named one; `home` returns the home directory of
/// the resulting user in the image's database. HOME is always set: libcontainer would look it up
/// through the C library, which in a static program loads code from the container's files.
pub fn complete_process(
    process: &mut Process,
    user: Option<User>,
    home: impl FnOnce(u32) -> Option<String>,
    terminal: bool,
) {
    let mut home_of_user = None;
    if let Some(user) = user {
        let mut gids = process.user().additional_gids().clone().unwrap_or_default();
        gids.extend(user.additional_gids);
        // A file that denies access to the group must still do so after the process changes its own
        // group.
        gids.push(user.gid);
        gids.sort_unstable();
        gids.dedup();
        let spec_user = process.user_mut();
        spec_user.set_uid(user.uid);
        spec_user.set_gid(user.gid);
        spec_user.set_additional_gids(Some(gids));
        spec_user.set_username(None);
        home_of_user = user.home;
    }
    let uid = process.user().uid();
    let env = process.env_mut().get_or_insert_default();
    if !env
        .iter()
        .any(|v| v.strip_prefix("HOME=").is_some_and(|home| !home.is_empty()))
    {
        let home = home_of_user
            .or_else(|| home(uid))
            .unwrap_or_else(|| "/".to_owned());
        env.retain(|v| !v.starts_with("HOME="));
        env.push(format!("HOME={home}"));
    }
    if terminal && !env.iter().any(|v| v.starts_with("TERM=")) {
        env.push("TERM=xterm".to_owned());
    }
    process.set_terminal(Some(terminal));
}

/// Writes the files to `directory`, owned by `owner` if it is given and by the guest's root
/// otherwise, and mounts them over the image's, unless the specification has mounts there. They are
/// read-only if the root is.
///
/// # Errors
///
/// [`SpecError::TooLarge`] and [`SpecError::Write`].
pub fn show_files(
    spec: &mut Spec,
    directory: &Path,
    files: &[EtcFile<'_>],
    owner: Option<Owner>,
) -> Result<(), SpecError> {
    let is_read_only = (spec.root().as_ref()).is_some_and(|root| root.readonly() == Some(true));
    let access = if is_read_only { "ro" } else { "rw" };
    for file in files {
        let limit = limits::ETC_FILE_BYTES;
        if file.contents.len() > limit {
            return Err(SpecError::TooLarge {
                what: file.destination,
                limit,
            });
        }
        let destination = Path::new(file.destination);
        let mounts = spec.mounts_mut().get_or_insert_default();
        if file.contents.is_empty() || mounts.iter().any(|m| m.destination() == destination) {
            continue;
        }
        let path = directory.join(destination.file_name().unwrap_or_default());
        let written = std::fs::write(&path, file.contents)
            .and_then(|()| owner.map_or(Ok(()), |owner| owner.take(&path)));
        written.map_err(|source| SpecError::Write {
            path: path.clone(),
            source,
        })?;
        let mut mount = Mount::default();
        mount.set_destination(destination.to_owned());
        mount.set_typ(Some("bind".to_owned()));
        mount.set_source(Some(path));
        mount.set_options(Some(vec!["bind".into(), access.into(), "rprivate".into()]));
        mounts.push(mount);
    }
    Ok(())
}

/// Stores a specification or process in the file that libcontainer reads.
///
/// # Errors
///
/// [`SpecError::Write`].
pub fn store(value: &impl serde::Serialize, path: PathBuf) -> Result<PathBuf, SpecError> {
    let written = serde_json::to_vec(value)
        .map_err(io::Error::from)
        .and_then(|json| std::fs::write(&path, json));
    match written {
        Ok(()) => Ok(path),
        Err(source) => Err(SpecError::Write { path, source }),
    }
}

/// Reads a specification that [`store`] has written.
///
/// # Errors
///
/// [`SpecError::Read`].
pub fn stored(path: PathBuf) -> Result<Spec, SpecError> {
    let spec = std::fs::read(&path)
        .and_then(|json| serde_json::from_slice(&json).map_err(io::Error::from));
    spec.map_err(|source| SpecError::Read { path, source })
}

#[cfg(test)]
mod tests;
