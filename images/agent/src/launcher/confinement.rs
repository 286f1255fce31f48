//! The seccomp filter of a further process in a container: libcontainer 0.7 gives it to a container's own process alone.
//!
//! Without `no_new_privs` only a process with `CAP_SYS_ADMIN` may install a filter, and libcontainer takes the
//! capabilities away before it calls back. So they are left out of what it is told, and given up here.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use libcontainer::capabilities::drop_privileges;
use libcontainer::seccomp::{initialize_seccomp, is_notify};
use libcontainer::syscall::syscall::create_syscall;
use oci_spec::runtime::{LinuxCapabilities, LinuxSeccomp, Process, Spec};

/// What a process still has to submit to before its command runs.
#[derive(Debug, Clone)]
pub(super) struct Confinement {
    seccomp: LinuxSeccomp,
    capabilities: Option<LinuxCapabilities>,
    no_new_privileges: bool,
}

impl Confinement {
    /// Takes the filter from the container's specification in `bundle`, and what has to wait for it out of the process in the file
    /// `process`. `None` when the container has no filter.
    pub(super) fn take(bundle: &Path, process: &Path) -> anyhow::Result<Option<Self>> {
        let spec = Spec::load(bundle.join("config.json"))
            .context("cannot read the container's specification")?;
        let seccomp = spec
            .linux()
            .as_ref()
            .and_then(|linux| linux.seccomp().clone());
        let Some(seccomp) = seccomp else {
            return Ok(None);
        };
        anyhow::ensure!(
            !is_notify(&seccomp),
            "SCMP_ACT_NOTIFY of the seccomp profile has nobody to notify for a further process"
        );
        let json = fs::read(process).context("cannot read the process")?;
        let mut wanted: Process = serde_json::from_slice(&json).context("malformed process")?;
        let confinement = Self {
            seccomp,
            capabilities: wanted.capabilities().clone(),
            no_new_privileges: wanted.no_new_privileges() == Some(true),
        };
        wanted.set_capabilities(None);
        fs::write(process, serde_json::to_vec(&wanted)?).context("cannot write the process")?;
        Ok(Some(confinement))
    }

    /// Submits this process. Of no way back, so it is called once, shortly before the command.
    pub(super) fn apply(&self) -> anyhow::Result<()> {
        // As late as the right to install the filter allows: giving up capabilities takes calls that it may forbid.
        if self.no_new_privileges {
            self.drop_capabilities()?;
            self.install_filter()
        } else {
            self.install_filter()?;
            self.drop_capabilities()
        }
    }

    fn install_filter(&self) -> anyhow::Result<()> {
        initialize_seccomp(&self.seccomp).context("cannot install the seccomp filter")?;
        Ok(())
    }

    fn drop_capabilities(&self) -> anyhow::Result<()> {
        if let Some(capabilities) = &self.capabilities {
            drop_privileges(capabilities, create_syscall().as_ref())
                .context("cannot drop capabilities")?;
        }
        Ok(())
    }
}
