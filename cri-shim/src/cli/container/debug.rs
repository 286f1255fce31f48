//! `podvisor debug`: runs a program next to the containers of a machine, with a view of the whole
//! guest.

use anyhow::Context as _;
use clap::Args;
use oci_spec::runtime::{
    Capabilities, LinuxDeviceCgroupBuilder, LinuxDeviceType, LinuxNamespaceType, Spec, UserBuilder,
};
use podvisor_images::Image;

use super::foreground::{Abandoned, Program, exit_code};
use super::{Containers, Entry, sweep};
use crate::cli::keys::DetachKeys;
use crate::cli::signals::{Signals, exit_code_of};
use crate::cli::{Globals, terminal};
use crate::sandbox::{
    ContainerOptions, CreateContainer, SandboxClient, SandboxError, all_capabilities,
    container_spec, process_capabilities, random_id,
};

/// The default command.
const SHELL: &str = "sh";

#[derive(Debug, Args)]
#[command(override_usage = "podvisor debug [OPTIONS] CONTAINER|POD [CMD]...")]
pub(in crate::cli) struct DebugArgs {
    /// Image of the program, which has to be here [default: the container's]
    #[arg(long, value_name = "IMAGE")]
    image: Option<String>,

    /// The container or pod, and the command with its arguments [default: sh]
    #[arg(value_names = ["CONTAINER", "CMD"], required = true, trailing_var_arg = true)]
    container_and_command: Vec<String>,
}

pub(in crate::cli) fn run(globals: &Globals, args: &DebugArgs) -> anyhow::Result<u8> {
    let (name, command) = match args.container_and_command.split_first() {
        Some((name, command)) => (name, command),
        None => anyhow::bail!("name a container"),
    };
    let containers = Containers::open(&globals.root()?)?;
    let runtime = crate::cli::runtime()?;
    let code = runtime.block_on(async {
        sweep(&containers).await?;
        let entry = match containers.find(name) {
            Ok(entry) => entry,
            Err(error) => containers.find_pod(name).map_err(|_| error)?,
        };
        let store = globals.store()?;
        let image = match (&args.image, entry.record.is_pod) {
            (Some(image), _) => store.resolve(image)?,
            (None, false) => store.resolve(&entry.record.image_id)?,
            (None, true) => anyhow::bail!("a pod has no image; name one by --image"),
        };
        let client = SandboxClient::connect(&entry.sandbox_dir())
            .await
            .with_context(|| format!("{name} is not running"))?;
        let id: String = format!("debug-{}", random_id()?.get(..12).unwrap_or_default());
        // From here on the container is removed, whatever ends this.
        let mut signals = Signals::new()?;
        let code = in_guest(&entry, &client, &image, &id, command, &mut signals).await;
        // Processes that it left running are killed, too.
        match client.delete_container(&id).await {
            Err(error) if !error.is_gone() => crate::cli::report(&error.into()),
            _ => {}
        }
        code
    });
    // A thread may be blocked in a read of stdin forever.
    runtime.shutdown_background();
    code.or_else(super::exec::not_started)
}

async fn in_guest(
    entry: &Entry,
    client: &SandboxClient,
    image: &Image,
    id: &str,
    command: &[String],
    signals: &mut Signals,
) -> anyhow::Result<u8> {
    let has_terminal =
        terminal::is_terminal(std::io::stdin()) && terminal::is_terminal(std::io::stdout());
    let mut env = Vec::new();
    let list = client.list().await?;
    if let Some(info) = list.iter().find(|info| info.id == entry.record.id) {
        env.push(format!("CONTAINER_PID={}", info.pid));
        env.push(format!("CONTAINER_ROOT=/proc/{}/root", info.pid));
    }
    let options = ContainerOptions {
        entrypoint: Some(String::new()),
        command: match command {
            [] => vec![SHELL.to_owned()],
            command => command.to_vec(),
        },
        env,
        workdir: Some("/".to_owned()),
        user: Some("0".to_owned()),
        terminal: has_terminal.then(terminal::size_or_usual),
        ..ContainerOptions::default()
    };
    let hostname = &entry.record.hostname;
    let config = image.config().config().as_ref();
    let mut spec = container_spec(id, hostname, config, &options)?.spec;
    unconfine(&mut spec)?;
    if let Some(process) = spec.process_mut() {
        process.set_user(UserBuilder::default().uid(0u32).gid(0u32).build()?);
    }
    if let Some(linux) = spec.linux_mut()
        && let Some(namespaces) = linux.namespaces_mut()
    {
        namespaces.retain(|namespace| namespace.typ() == LinuxNamespaceType::Mount);
    }
    let (rootfs, digest) = (image.open_rootfs()?, image.id().to_string());
    let container = CreateContainer {
        tty: has_terminal,
        stdin: true,
        ..CreateContainer::new(id, rootfs, digest, spec)
    };
    tokio::select! {
        created = client.create_container(container) => drop(created?),
        signal = signals.ending() => return Ok(exit_code_of(signal)),
    }
    let program = Program {
        client: client.clone(),
        id: id.to_owned(),
        exec_id: None,
        has_terminal,
        has_input: true,
        abandoned: Abandoned::Ends,
    };
    let (streams, theirs) = program.streams()?;
    program.client.attach_whole(id, theirs).await?;
    let served = program.serve(streams, &DetachKeys::default())?;
    tokio::select! {
        started = program.client.start_container(id) => drop(started?),
        signal = signals.ending() => return Ok(exit_code_of(signal)),
    }
    match program.wait(served, signals).await {
        Ok(outcome) => Ok(exit_code(&outcome)),
        Err(error) => match error.downcast::<SandboxError>() {
            Ok(error) if error.is_gone() => anyhow::bail!("the machine ended meanwhile: {error}"),
            Ok(error) => Err(error.into()),
            Err(error) => Err(error),
        },
    }
}

/// Gives a program access to everything in the guest: devices, kernel interfaces, all capabilities
/// and system calls. Its namespaces are unchanged.
pub(in crate::cli) fn unconfine(spec: &mut Spec) -> anyhow::Result<()> {
    if let Some(process) = spec.process_mut() {
        let capabilities = process_capabilities(all_capabilities(), Capabilities::new())?;
        process.set_capabilities(Some(capabilities));
    }
    for mount in spec.mounts_mut().iter_mut().flatten() {
        if let Some(options) = mount.options_mut() {
            options.retain(|option| option != "ro");
        }
    }
    if let Some(linux) = spec.linux_mut() {
        linux.set_seccomp(None);
        linux.set_masked_paths(None);
        linux.set_readonly_paths(None);
        if let Some(resources) = linux.resources_mut() {
            let all = LinuxDeviceCgroupBuilder::default()
                .allow(true)
                .typ(LinuxDeviceType::A)
                .access("rwm")
                .build()?;
            resources.set_devices(Some(vec![all]));
        }
    }
    Ok(())
}
