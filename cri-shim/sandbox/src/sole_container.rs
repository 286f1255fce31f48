//! The only container of a machine: one program, from start to end.

use oci_spec::runtime::Spec;

use crate::agent::{AgentContainer, etc_hosts};
use crate::error::SandboxError;
use crate::in_process::Sandbox;
use crate::spec::{ContainerOptions, ContainerSpec, RootAccess};
use crate::stdio::{StreamSet, Streams};
use crate::types::{GuestContainer, ProcessExit, StdioFds, TerminalSize};

/// The name of the container, and its host name.
pub(crate) const NAME: &str = "podvisor";

/// Runs a container in the image on the disk [`NAME`] from start to end.
pub(crate) async fn run_once(
    sandbox: &Sandbox,
    ContainerSpec { spec, user }: ContainerSpec,
    stdio: StdioFds,
    options: &ContainerOptions,
) -> Result<ProcessExit, SandboxError> {
    let agent = sandbox.agent();
    let stdio = for_terminal(stdio, options.terminal);
    let work = async {
        let streams = Streams::new(StreamSet::of(&stdio), options.terminal)?;
        let container = AgentContainer {
            config: guest_container(spec, user, options),
            image_serial: NAME.to_owned(),
            stdio: streams.request(),
            devices: Vec::new(),
        };
        agent.create(container).await?;
        let outputs = streams.attach(agent.mux(), stdio).await?;
        agent.start(NAME).await?;
        let exit = agent.wait(NAME, "").await?;
        outputs.finish().await?;
        Ok::<ProcessExit, SandboxError>(exit.into())
    };
    sandbox.unless_ended(work).await
}

/// What the guest is told of the only container.
pub(crate) fn guest_container(
    spec: Spec,
    user: String,
    options: &ContainerOptions,
) -> GuestContainer {
    GuestContainer {
        id: NAME.to_owned(),
        readonly_rootfs: options.root == RootAccess::ReadOnly,
        spec,
        user,
        etc_hosts: etc_hosts(NAME).into_bytes(),
        ..GuestContainer::default()
    }
}

/// Drops stderr for a terminal, which has only one output.
pub(crate) fn for_terminal(stdio: StdioFds, terminal: Option<TerminalSize>) -> StdioFds {
    match terminal {
        Some(_) => StdioFds {
            stderr: None,
            ..stdio
        },
        None => stdio,
    }
}
