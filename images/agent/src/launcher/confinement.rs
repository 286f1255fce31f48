//! The last restrictions of a process: its user namespace, its working directory, the container's
//! seccomp filter and the loss of capabilities.
//!
//! libcontainer 0.7 applies filters only to a container's own process, and drops capabilities
//! before it calls back, while only a process with `CAP_SYS_ADMIN` may enter a user namespace or,
//! without `no_new_privs`, install a filter. Nor does it create a working directory, which may be
//! in a volume that only the container's own process sees. If one of these is needed, none of it is
//! passed to libcontainer, and all is done here.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use libcontainer::capabilities::{CapabilityExt as _, drop_privileges, reset_effective};
use libcontainer::syscall::syscall::create_syscall;
use oci_spec::runtime::{LinuxCapabilities, Process};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use serde::{Deserialize, Serialize};

use super::entry::{LoadedStep, UserEntry, UserStep};
use crate::seccomp::Filter;

/// The restrictions that are still to be applied to a process before its command runs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Confinement {
    users: Option<UserStep>,
    /// Working directory, created if it is missing.
    directory: Option<PathBuf>,
    /// File with the compiled filter.
    filter: Option<PathBuf>,
    capabilities: Option<LinuxCapabilities>,
    no_new_privileges: bool,
}

impl Confinement {
    /// Takes out of a container's own `process` everything that has to wait for its mounts, for the
    /// filter in the file `filter` and for the user namespace that it enters.
    #[must_use]
    pub fn take_own(
        process: &mut Process,
        filter: Option<PathBuf>,
        entry: Option<UserEntry>,
    ) -> Self {
        let directory = process.cwd().clone();
        process.set_cwd(PathBuf::from("/"));
        Self {
            directory: Some(directory),
            ..Self::take_rights(process, filter, entry)
        }
    }

    /// Takes out of an additional `process` everything that has to wait for the filter in the file
    /// `filter` and for the user namespace that it enters, if there is one of them.
    #[must_use]
    pub fn take(
        process: &mut Process,
        filter: Option<PathBuf>,
        entry: Option<UserEntry>,
    ) -> Option<Self> {
        let waits = filter.is_some() || entry.is_some();
        waits.then(|| Self::take_rights(process, filter, entry))
    }

    fn take_rights(
        process: &mut Process,
        filter: Option<PathBuf>,
        entry: Option<UserEntry>,
    ) -> Self {
        let capabilities = process.capabilities().clone();
        process.set_capabilities(None);
        Self {
            users: entry.map(|entry| UserStep::take(process, entry)),
            directory: None,
            filter,
            capabilities,
            no_new_privileges: process.no_new_privileges() == Some(true),
        }
    }

    /// Opens and reads the files that it needs while they are visible.
    pub(super) fn load(self) -> anyhow::Result<LoadedConfinement> {
        let filter = self.filter.map(|filter| Filter::load(&filter));
        Ok(LoadedConfinement {
            users: self.users.map(UserStep::load).transpose()?,
            directory: self.directory,
            filter: filter
                .transpose()
                .context("cannot read the seccomp filter")?,
            capabilities: self.capabilities,
            no_new_privileges: self.no_new_privileges,
        })
    }
}

/// A [`Confinement`] that needs no more files.
#[derive(Debug, Clone)]
pub(super) struct LoadedConfinement {
    users: Option<LoadedStep>,
    directory: Option<PathBuf>,
    filter: Option<Filter>,
    capabilities: Option<LinuxCapabilities>,
    no_new_privileges: bool,
}

impl LoadedConfinement {
    /// Moves this process to where its command runs, with the rights that determine what it can
    /// access. This is irreversible, so it is called once; [`Self::submit`] follows.
    pub(super) fn enter(&self) -> anyhow::Result<()> {
        if let Some(users) = &self.users {
            users.enter()?;
        }
        if let Some(directory) = &self.directory {
            enter_directory(directory)
                .with_context(|| format!("cannot use the working directory {directory:?}"))?;
        }
        match self.early_filter() {
            Some(_) => self.suspend_capabilities(),
            None => self.drop_capabilities(),
        }
    }

    /// Installs a filter that cannot wait for the command.
    pub(super) fn submit(&self) -> anyhow::Result<()> {
        let Some(filter) = self.early_filter() else {
            return Ok(());
        };
        reset_effective(create_syscall().as_ref()).context("cannot use capabilities")?;
        filter
            .install()
            .context("cannot install the seccomp filter")?;
        self.drop_capabilities()
    }

    /// Returns the filter that is installed when the command is executed.
    pub(super) fn late_filter(&self) -> Option<&Filter> {
        self.filter.as_ref().filter(|_| self.no_new_privileges)
    }

    /// Returns the filter if it has to be installed early: without `no_new_privs`, installation
    /// takes a capability that the command does not have.
    fn early_filter(&self) -> Option<&Filter> {
        self.filter.as_ref().filter(|_| !self.no_new_privileges)
    }

    /// Makes only those capabilities effective that the command has.
    fn suspend_capabilities(&self) -> anyhow::Result<()> {
        let Some(wanted) = &self.capabilities else {
            return Ok(());
        };
        let wanted = wanted.effective().iter().flatten();
        let wanted = wanted.fold(0, |set, capability| set | capability.to_cap().bitmask());
        capabilities(None)
            .and_then(|sets| {
                let effective = CapabilitySet::from_bits_retain(wanted) & sets.permitted;
                set_capabilities(None, CapabilitySets { effective, ..sets })
            })
            .context("cannot suspend capabilities")
    }

    fn drop_capabilities(&self) -> anyhow::Result<()> {
        if let Some(capabilities) = &self.capabilities {
            drop_privileges(capabilities, create_syscall().as_ref())
                .context("cannot drop capabilities")?;
        }
        Ok(())
    }
}

/// Changes to a directory; if it has to be created, it belongs to root, as in other runtimes.
fn enter_directory(path: &Path) -> io::Result<()> {
    match std::env::set_current_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            crate::sys::as_root_of_files(|| {
                DirBuilder::new().recursive(true).mode(0o755).create(path)?;
                std::env::set_current_dir(path)
            })?;
        }
        other => other?,
    }
    // A directory reached through a descriptor may be outside of the root.
    let entered = rustix::process::getcwd(Vec::new())?;
    match entered.as_bytes().starts_with(b"/") {
        true => Ok(()),
        false => Err(io::Error::other("it is outside of the container")),
    }
}
