//! What a process submits to at last: the container's seccomp filter and the loss of capabilities.
//!
//! libcontainer 0.7 has filters for a container's own process alone, and takes capabilities away
//! before it calls back, while without `no_new_privs` only a process with `CAP_SYS_ADMIN` may
//! install a filter. So where there is a filter, libcontainer is told of neither, and both are
//! done here.

use std::path::PathBuf;

use anyhow::Context as _;
use libcontainer::capabilities::drop_privileges;
use libcontainer::syscall::syscall::create_syscall;
use oci_spec::runtime::{LinuxCapabilities, Process};
use serde::{Deserialize, Serialize};

use crate::seccomp::Filter;

/// What a process still has to submit to before its command runs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Confinement {
    /// File with the compiled filter.
    filter: PathBuf,
    capabilities: Option<LinuxCapabilities>,
    no_new_privileges: bool,
}

impl Confinement {
    /// Takes out of `process` what has to wait for the filter in the file `filter`.
    #[must_use]
    pub fn take(process: &mut Process, filter: PathBuf) -> Self {
        let capabilities = process.capabilities().clone();
        process.set_capabilities(None);
        Self {
            filter,
            capabilities,
            no_new_privileges: process.no_new_privileges() == Some(true),
        }
    }

    /// Reads the filter while its file can be seen.
    pub(super) fn load(self) -> anyhow::Result<LoadedConfinement> {
        let filter = Filter::load(&self.filter).context("cannot read the seccomp filter")?;
        Ok(LoadedConfinement {
            filter,
            capabilities: self.capabilities,
            no_new_privileges: self.no_new_privileges,
        })
    }
}

/// A [`Confinement`] that needs no file any more.
#[derive(Debug, Clone)]
pub(super) struct LoadedConfinement {
    filter: Filter,
    capabilities: Option<LinuxCapabilities>,
    no_new_privileges: bool,
}

impl LoadedConfinement {
    /// Submits this process. There is no way back, so it is called once, shortly before the
    /// command.
    pub(super) fn apply(&self) -> anyhow::Result<()> {
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
        self.filter
            .install()
            .context("cannot install the seccomp filter")
    }

    fn drop_capabilities(&self) -> anyhow::Result<()> {
        if let Some(capabilities) = &self.capabilities {
            drop_privileges(capabilities, create_syscall().as_ref())
                .context("cannot drop capabilities")?;
        }
        Ok(())
    }
}
