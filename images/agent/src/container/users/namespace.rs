//! User namespaces: a container's ids differ from those in the guest.
//!
//! A specification requests one as defined by the OCI runtime specification, with a `user`
//! namespace and mappings. Containers with the same mappings share one namespace, which exists
//! until the guest ends. libcontainer does not know about it: everything that a container needs is
//! prepared by the guest's root, with the guest's ids of the container's, and the container's
//! processes enter the namespace last ([`crate::launcher`]). So user ids are the container's in
//! specifications and requests, and the guest's in ownership of files.

use std::fmt;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;

use oci_spec::runtime::{Linux, LinuxIdMapping, LinuxNamespaceType, Mount, Spec};
use podvisor_agent_protocol::limits;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Pid;
use tokio::sync::Mutex;

use crate::container::limit::TooMany;
use crate::container::spec_error::SpecError;
use crate::owner::Owner;
use crate::reaper::Reaper;
use crate::stdio::fd::Endpoint;

/// First argument of the command line of the process that creates a namespace.
pub const SUBCOMMAND: &str = "users";

/// What containers of the guest share, and a container's root is to own.
const SHARED: [&str; 2] = ["/dev/shm", "/dev/mqueue"];

/// Maximum lines of a mapping: all of them fit the one page that the kernel accepts.
const MAX_LINES: usize = 64;

/// The mount option for the group that terminals belong to.
const GROUP: &str = "gid=";

/// Maps a container's ids to the guest's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdMaps {
    uids: Vec<LinuxIdMapping>,
    gids: Vec<LinuxIdMapping>,
}

/// Whether an id is a user's or a group's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdKind {
    /// A user's.
    User,
    /// A group's.
    Group,
}

impl fmt::Display for IdKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::User => "user",
            Self::Group => "group",
        })
    }
}

/// A user namespace does not have an id, or cannot be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NamespaceError {
    /// An id of the container has no id in the guest.
    #[error("{kind} {id} is not mapped in the container's user namespace: choose one that is")]
    NotMapped {
        /// Whether it is a user's or a group's.
        kind: IdKind,
        /// The id in the container.
        id: u32,
    },
    /// A limit is reached.
    #[error(transparent)]
    TooMany(#[from] TooMany),
    /// It cannot be created.
    #[error("cannot make a user namespace")]
    Make(#[source] io::Error),
}

impl IdMaps {
    /// Takes the user namespace out of a specification, if it has one.
    ///
    /// # Errors
    ///
    /// [`SpecError::Refused`] if namespace and mappings do not fit together.
    pub fn take(spec: &mut Spec) -> Result<Option<Self>, SpecError> {
        let Some(linux) = spec.linux_mut() else {
            return Ok(None);
        };
        let is_users = |typ: LinuxNamespaceType| typ == LinuxNamespaceType::User;
        let namespaces = linux.namespaces_mut().get_or_insert_default();
        let wanted = namespaces.iter().find(|one| is_users(one.typ()));
        let has_path = wanted.is_some_and(|one| one.path().is_some());
        let is_wanted = wanted.is_some();
        namespaces.retain(|one| !is_users(one.typ()));
        let maps = Self::of(linux);
        linux.set_uid_mappings(None).set_gid_mappings(None);
        match (is_wanted, maps.uids.is_empty() && maps.gids.is_empty()) {
            (false, true) => Ok(None),
            (false, false) => Err(SpecError::Refused(
                "`linux.uidMappings` and `gidMappings` need a `user` namespace",
            )),
            (true, _) if has_path => Err(SpecError::Refused(
                "a `user` namespace has no path: containers with the same mappings share one",
            )),
            (true, _) if !is_mapping(&maps.uids) || !is_mapping(&maps.gids) => {
                Err(SpecError::Refused(
                    "a `user` namespace needs `linux.uidMappings` and `gidMappings`, of at most \
                     64 ranges each that do not overlap, with the container's 0 and without the \
                     guest's 0",
                ))
            }
            (true, _) => Ok(Some(maps)),
        }
    }

    fn of(linux: &Linux) -> Self {
        Self {
            uids: linux.uid_mappings().clone().unwrap_or_default(),
            gids: linux.gid_mappings().clone().unwrap_or_default(),
        }
    }

    /// Returns the guest's id for one of the container's.
    ///
    /// # Errors
    ///
    /// [`NamespaceError::NotMapped`].
    pub fn id(&self, kind: IdKind, id: u32) -> Result<u32, NamespaceError> {
        let maps = match kind {
            IdKind::User => &self.uids,
            IdKind::Group => &self.gids,
        };
        mapped(maps, id).ok_or(NamespaceError::NotMapped { kind, id })
    }

    /// Returns the guest's ids of the container's root.
    #[must_use]
    pub fn root(&self) -> Owner {
        // Mappings without it are refused.
        let root = |maps| mapped(maps, 0).unwrap_or_default();
        Owner {
            uid: root(&self.uids),
            gid: root(&self.gids),
        }
    }

    /// Replaces a container's ids in a specification by the guest's, except in its process.
    ///
    /// # Errors
    ///
    /// [`NamespaceError::NotMapped`].
    pub fn translate(&self, spec: &mut Spec) -> Result<(), NamespaceError> {
        for mount in spec.mounts_mut().iter_mut().flatten() {
            self.translate_mount(mount)?;
        }
        let devices = spec.linux_mut().as_mut().map(Linux::devices_mut);
        for device in devices.into_iter().flatten().flatten() {
            let uid = self.id(IdKind::User, device.uid().unwrap_or(0))?;
            let gid = self.id(IdKind::Group, device.gid().unwrap_or(0))?;
            device.set_uid(Some(uid)).set_gid(Some(gid));
        }
        Ok(())
    }

    fn translate_mount(&self, mount: &mut Mount) -> Result<(), NamespaceError> {
        let is_tmpfs = mount.typ().as_deref() == Some("tmpfs");
        if !is_tmpfs && mount.typ().as_deref() != Some("devpts") {
            return Ok(());
        }
        let mut options = mount.options().clone().unwrap_or_default();
        let missing: &[&str] = if is_tmpfs { &["uid=", GROUP] } else { &[] };
        for name in missing {
            if !options.iter().any(|option| option.starts_with(name)) {
                options.push(format!("{name}0"));
            }
        }
        for option in &mut options {
            for (name, kind) in [("uid=", IdKind::User), (GROUP, IdKind::Group)] {
                // A value that is not a number is refused by the file system.
                if let Some(Ok(id)) = option.strip_prefix(name).map(str::parse) {
                    *option = format!("{name}{}", self.id(kind, id)?);
                }
            }
        }
        mount.set_options(Some(options));
        Ok(())
    }
}

/// Returns whether a mapping is valid for the kernel and meets the agent's own conditions.
fn is_mapping(maps: &[LinuxIdMapping]) -> bool {
    let ends = |first: u32, size: u32| first.checked_add(size).filter(|_| size > 0);
    let is_range = |map: &LinuxIdMapping| {
        map.host_id() > 0
            && ends(map.host_id(), map.size()).is_some()
            && ends(map.container_id(), map.size()).is_some()
    };
    let overlap = |one: u32, size: u32, other: u32, other_size: u32| {
        one < other.saturating_add(other_size) && other < one.saturating_add(size)
    };
    let mut pairs = maps.iter().enumerate();
    let is_apart = pairs.all(|(number, one)| {
        maps.iter().skip(number + 1).all(|other| {
            let (size, other_size) = (one.size(), other.size());
            !overlap(one.host_id(), size, other.host_id(), other_size)
                && !overlap(one.container_id(), size, other.container_id(), other_size)
        })
    });
    maps.len() <= MAX_LINES && maps.iter().all(is_range) && is_apart && mapped(maps, 0).is_some()
}

fn mapped(maps: &[LinuxIdMapping], id: u32) -> Option<u32> {
    maps.iter().find_map(|map| {
        let offset = id.checked_sub(map.container_id())?;
        (offset < map.size()).then(|| map.host_id().saturating_add(offset))
    })
}

/// A user namespace of the guest.
#[derive(Debug)]
pub struct UserNamespace {
    maps: IdMaps,
    fd: OwnedFd,
}

impl UserNamespace {
    /// Returns its mappings.
    #[must_use]
    pub fn maps(&self) -> &IdMaps {
        &self.maps
    }

    /// Returns the path with which other processes of the guest's root open it.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        let (agent, fd) = (std::process::id(), self.fd.as_raw_fd());
        PathBuf::from(format!("/proc/{agent}/fd/{fd}"))
    }
}

impl AsFd for UserNamespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The existing user namespaces.
#[derive(Debug, Default)]
pub(in crate::container) struct UserNamespaces {
    made: Mutex<Vec<Arc<UserNamespace>>>,
}

impl UserNamespaces {
    /// Returns the namespace with these mappings, which is created unless it exists.
    ///
    /// # Errors
    ///
    /// [`NamespaceError`], except `NotMapped`.
    pub(in crate::container) async fn get(
        &self,
        maps: IdMaps,
        reaper: &Reaper,
    ) -> Result<Arc<UserNamespace>, NamespaceError> {
        let mut made = self.made.lock().await;
        if let Some(found) = made.iter().find(|one| one.maps == maps) {
            return Ok(Arc::clone(found));
        }
        let limit = limits::USER_NAMESPACES;
        if made.len() >= limit {
            let what = "user namespaces";
            return Err(TooMany { what, limit }.into());
        }
        let namespace = make(&maps, reaper).await.and_then(|fd| {
            for path in SHARED {
                maps.root().take(Path::new(path))?;
            }
            Ok(Arc::new(UserNamespace { maps, fd }))
        });
        let namespace = namespace.map_err(NamespaceError::Make)?;
        made.push(Arc::clone(&namespace));
        Ok(namespace)
    }
}

async fn make(maps: &IdMaps, reaper: &Reaper) -> io::Result<OwnedFd> {
    let (told, child_told) = pipe_with(PipeFlags::CLOEXEC)?;
    let launch = reaper.launch();
    let mut command = Command::new("/proc/self/exe");
    command
        .arg(SUBCOMMAND)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(child_told)
        .stderr(Stdio::null());
    let mut child = command.spawn()?;
    // Closes our copy of its end, so that its end of file is seen.
    drop(command);
    let pid = Pid::from_child(&child);
    // It ends with its standard input, which is closed in all cases.
    let _input = child.stdin.take();
    let _reaped = launch.claim(pid)?;
    let mut errno = [0];
    match (Endpoint::new(told)?.read(&mut errno).await?, errno) {
        (0, _) => return Err(io::Error::other("its first process has ended")),
        (_, [0]) => {}
        (_, [errno]) => return Err(io::Error::from_raw_os_error(errno.into())),
    }
    for (file, maps) in [("uid_map", &maps.uids), ("gid_map", &maps.gids)] {
        // In one write, as the kernel requires.
        fs::write(format!("/proc/{pid}/{file}"), lines(maps))?;
    }
    Ok(fs::File::open(format!("/proc/{pid}/ns/user"))?.into())
}

fn lines(maps: &[LinuxIdMapping]) -> String {
    let lines = maps
        .iter()
        .map(|map| format!("{} {} {}\n", map.container_id(), map.host_id(), map.size()));
    lines.collect()
}

/// Runs the process that creates a namespace: it reports the error number of the creation, or 0, in
/// one byte, and stays in the namespace until its standard input ends.
pub fn main() -> ExitCode {
    let made = crate::sys::unshare_users();
    let errno = made.map_or_else(|error| error.raw_os_error().unwrap_or(libc::EIO), |()| 0);
    let told = || {
        let mut out = io::stdout();
        out.write_all(&[u8::try_from(errno).unwrap_or(u8::MAX)])?;
        out.flush()?;
        io::stdin().read_to_end(&mut Vec::new())
    };
    match told() {
        Ok(_) if errno == 0 => ExitCode::SUCCESS,
        Ok(_) | Err(_) => ExitCode::FAILURE,
    }
}

#[cfg(test)]
#[path = "namespace_tests.rs"]
mod tests;
