//! Launches a sandbox whose network is known, in one call.

use std::path::Path;

use super::Launching;
use crate::client::SandboxClient;
use crate::error::SandboxError;
use crate::types::{GuestNetwork, LaunchConfig};

impl SandboxClient {
    /// Starts a sandbox in its own detached process (this executable again, as `podvisor sandbox`)
    /// that outlives this one. Returns when the agent has answered and the guest is configured,
    /// with `network` as its interfaces and routes. If the future is dropped before that, nothing
    /// is left of the sandbox except files in its directory. [`Launching`] is for networks that are
    /// not known yet.
    ///
    /// # Which program
    /// Most programs want [`Self::launch_program`], which takes the path of podvisor's executable.
    /// This function starts the running executable again, with the arguments `sandbox ID`, and with
    /// `template SHAPE DIRECTORY` (a [`Shape`](crate::Shape) as JSON) to create
    /// [templates](LaunchConfig::templates): it has to be `podvisor` of the same version, or has to
    /// handle these arguments as [`run_process`](crate::run_process) (unsafe: it is called first in
    /// `main`) and [`make_template`](crate::make_template) do.
    ///
    /// # Errors
    /// [`SandboxError`]; nothing runs then.
    pub async fn launch(config: LaunchConfig, network: GuestNetwork) -> Result<Self, SandboxError> {
        Launching::begin(config).await?.finish(network).await
    }

    /// As [`Self::launch`], with podvisor's executable at a path: for programs that are not
    /// podvisor themselves. That executable creates templates, too.
    ///
    /// # Errors
    /// [`SandboxError`]; nothing runs then.
    pub async fn launch_program(
        program: &Path,
        config: LaunchConfig,
        network: GuestNetwork,
    ) -> Result<Self, SandboxError> {
        let launching = Launching::begin_program(program, config).await?;
        launching.finish(network).await
    }
}
