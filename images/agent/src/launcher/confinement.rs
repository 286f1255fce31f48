//! What a process submits to at last: its user namespace, the container's seccomp filter and the
//! loss of capabilities.
//!
//! libcontainer 0.7 has filters for a container's own process alone, and takes capabilities away
//! before it calls back, while without `no_new_privs` only a process with `CAP_SYS_ADMIN` may
//! install a filter, and none without it enters a user namespace. So where there is one of both,
//! libcontainer is told of none of it, and all is done here.

use std::path::PathBuf;

use anyhow::Context as _;
use libcontainer::capabilities::drop_privileges;
use libcontainer::syscall::syscall::create_syscall;
use oci_spec::runtime::{LinuxCapabilities, Process};
use serde::{Deserialize, Serialize};

use super::entry::{LoadedStep, UserEntry, UserStep};
use crate::seccomp::Filter;

/// What a process still has to submit to before its command runs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Confinement {
    users: Option<UserStep>,
    /// File with the compiled filter.
    filter: Option<PathBuf>,
    capabilities: Option<LinuxCapabilities>,
    no_new_privileges: bool,
}

impl Confinement {
    /// Takes out of `process` what has to wait for the filter in the file `filter` and for the
    /// user namespace that it enters, where there is one of them.
    #[must_use]
    pub fn take(
        process: &mut Process,
        filter: Option<PathBuf>,
        entry: Option<UserEntry>,
    ) -> Option<Self> {
        if filter.is_none() && entry.is_none() {
            return None;
        }
        let capabilities = process.capabilities().clone();
        process.set_capabilities(None);
        Some(Self {
            users: entry.map(|entry| UserStep::take(process, entry)),
            filter,
            capabilities,
            no_new_privileges: process.no_new_privileges() == Some(true),
        })
    }

    /// Opens and reads what it needs while that can be seen.
    pub(super) fn load(self) -> anyhow::Result<LoadedConfinement> {
        let filter = self.filter.map(|filter| Filter::load(&filter));
        Ok(LoadedConfinement {
            users: self.users.map(UserStep::load).transpose()?,
            filter: filter
                .transpose()
                .context("cannot read the seccomp filter")?,
            capabilities: self.capabilities,
            no_new_privileges: self.no_new_privileges,
        })
    }
}

/// A [`Confinement`] that needs no file any more.
#[derive(Debug, Clone)]
pub(super) struct LoadedConfinement {
    users: Option<LoadedStep>,
    filter: Option<Filter>,
    capabilities: Option<LinuxCapabilities>,
    no_new_privileges: bool,
}

impl LoadedConfinement {
    /// Submits this process. There is no way back, so it is called once, shortly before the
    /// command.
    pub(super) fn apply(&self) -> anyhow::Result<()> {
        if let Some(users) = &self.users {
            users.enter()?;
        }
        // As late as the right to install the filter allows: giving up capabilities takes calls
        // that it may forbid.
        if self.no_new_privileges {
            self.drop_capabilities()?;
            self.install_filter()
        } else {
            self.install_filter()?;
            self.drop_capabilities()
        }
    }

    fn install_filter(&self) -> anyhow::Result<()> {
        match &self.filter {
            Some(filter) => filter
                .install()
                .context("cannot install the seccomp filter"),
            None => Ok(()),
        }
    }

    fn drop_capabilities(&self) -> anyhow::Result<()> {
        if let Some(capabilities) = &self.capabilities {
            drop_privileges(capabilities, create_syscall().as_ref())
                .context("cannot drop capabilities")?;
        }
        Ok(())
    }
}
