//! The configuration and the open files that the processes of a sandbox get.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use podvisor_agent_protocol::validate_id;
use podvisor_host::request;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};

use super::super::error::SandboxError;
use super::super::template::Template;
use super::super::types::{GuestKind, LaunchConfig, ShareUsers};
use super::super::wire::{CONTROL_SOCKET, LAUNCH_VERSION, LaunchHeader, MAX_FDS, NicHeader};
use super::super::{cgroup, record};
use super::DIR_MAX;
use crate::machine::Transport;

/// A checked configuration, whose files are open.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) header: LaunchHeader,
    /// Kernel and initramfs; none if the guest has an operating system of its own.
    boot: Vec<OwnedFd>,
    /// Network cards, then the shared directory, the console and the log of events, each if there
    /// is one.
    devices: Vec<OwnedFd>,
}

impl Prepared {
    /// Checks the configuration, and opens the files that are given by path.
    pub(super) fn new(config: LaunchConfig) -> Result<Self, SandboxError> {
        validate_id(&config.id).map_err(SandboxError::Id)?;
        if !config.dir.is_absolute() || config.dir.as_os_str().len() > DIR_MAX {
            return Err(SandboxError::Dir {
                dir: config.dir,
                most: DIR_MAX,
            });
        }
        // Control socket, record, kernel, initramfs, template's files, shared directory, console,
        // events.
        let others = 9;
        if config.nics.len() + others > MAX_FDS {
            return Err(SandboxError::TooManyNics {
                count: config.nics.len(),
                most: MAX_FDS - others,
            });
        }
        let open = |path: &PathBuf| {
            let opened = File::open(path).map(OwnedFd::from);
            opened.map_err(|source| file("open", path, source))
        };
        let boot = match config.guest {
            GuestKind::Agent => vec![open(&config.kernel)?, open(&config.initramfs)?],
            GuestKind::OwnOs => Vec::new(),
        };
        let (mut nics, mut devices) = (Vec::new(), Vec::new());
        for nic in config.nics {
            nics.push(NicHeader {
                kind: nic.kind,
                mac: nic.mac,
                mtu: nic.mtu,
            });
            devices.push(nic.fd);
        }
        if let Some(shared) = &config.shared_dir {
            let dir = open(shared)?;
            if config.share_users == ShareUsers::Mapped {
                // The process is none of the host's users. Others cannot get to it.
                let searched = Permissions::from_mode(0o711);
                fs::set_permissions(shared, searched)
                    .map_err(|source| file("let others search", shared, source))?;
            }
            devices.push(dir);
        }
        if let Some(console) = &config.console {
            let created = File::create(console);
            let created = created.map_err(|source| file("create", console, source));
            devices.push(created?.into());
        }
        let has_events = config.events.is_some();
        devices.extend(config.events.map(OwnedFd::from));
        let header = LaunchHeader {
            version: LAUNCH_VERSION,
            request: request::current(),
            id: config.id,
            hostname: config.hostname,
            dir: config.dir,
            guest: config.guest,
            vcpus: config.vcpus,
            max_vcpus: config.max_vcpus,
            memory: config.memory,
            growth: config.growth,
            image_slots: config.image_slots,
            nics,
            has_shared_dir: config.shared_dir.is_some(),
            users: config.users,
            share_users: config.share_users,
            has_console: config.console.is_some(),
            has_events,
            sysctls: config.sysctls,
            pci: config.transport == Transport::Pci,
            psi: config.psi,
            must_clone: config.snapshot.is_some(),
            jail: config.jail,
            required_layers: config.required_layers,
            // Known when the process exists.
            has_cgroup: false,
            denies_devices: false,
            // Known when its files are.
            has_template: false,
        };
        Ok(Self {
            header,
            boot,
            devices,
        })
    }

    /// Returns the files of a process, in the order of [`LaunchHeader`]: its own socket and record
    /// in the directory, which is cleared first, and duplicates of the others.
    pub(super) fn files(
        &mut self,
        template: Option<Template>,
    ) -> Result<Vec<OwnedFd>, SandboxError> {
        let dir = &self.header.dir;
        clear(dir).map_err(|source| file("clear", dir, source))?;
        let record = record::create(dir);
        let record = record.map_err(|source| file("create the record in", dir, source))?;
        let mut fds = vec![control_socket(dir)?, record.into()];
        let duplicate = |fd: &OwnedFd| {
            let duplicate = fd.as_fd().try_clone_to_owned();
            duplicate.map_err(|source| file("keep open the files of", dir, source))
        };
        for file in &self.boot {
            fds.push(duplicate(file)?);
        }
        self.header.has_template = template.is_some();
        if let Some(Template { state, memory }) = template {
            fds.extend([state, memory]);
        }
        for device in &self.devices {
            fds.push(duplicate(device)?);
        }
        Ok(fds)
    }
}

fn file(action: &'static str, path: &Path, source: io::Error) -> SandboxError {
    SandboxError::File {
        action,
        path: path.to_owned(),
        source,
    }
}

/// Removes what an earlier process left in the directory: its record, its sockets and its control
/// group.
fn clear(dir: &Path) -> io::Result<()> {
    record::remove(dir)?;
    cgroup::remove_of(dir);
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_socket() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Creates the socket that the process will listen on: so the kernel reports the process's pid to
/// its peers, not this one's.
fn control_socket(dir: &Path) -> Result<OwnedFd, SandboxError> {
    let path = dir.join(CONTROL_SOCKET);
    let bound = || -> rustix::io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        bind(socket.as_fd(), &SocketAddrUnix::new(&path)?)?;
        Ok(socket)
    };
    bound().map_err(|error| file("make the socket", &path, error.into()))
}
