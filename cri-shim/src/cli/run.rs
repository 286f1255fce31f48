//! `podvisor run`: a program from an image, in a virtual machine of its own, behaving like a
//! program that was started right here.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use oci_spec::runtime::MountBuilder;
use podvisor_images::{Image, PullOptions, PullPolicy, Store};
use tracing::debug;

use super::container::foreground::{Outcome, Program, exit_code};
use super::container::{
    Containers, Entry, Record, Volume, exec, parse_volume, state, sweep, volumes,
};
use super::guest::{Guest, GuestArgs};
use super::progress::Progress;
use super::pull::{Pulled, pull};
use super::registries::RegistryArgs;
use super::settings::BootMode;
use super::shown::SHORT_ID;
use super::signals::{Signals, exit_code_of};
use super::terminal::RawMode;
use super::verify::VerifyArgs;
use super::{Globals, advice, terminal};
use crate::sandbox::{
    ContainerOptions, CreateContainer, DEFAULT_CGROUP_PARENT, GuestNetwork, JailMode, LaunchConfig,
    Outputs, RootAccess, SandboxClient, SandboxError, SupplementalGroups, TerminalSize,
    container_spec, etc_hosts, random_id,
};

const SIGTERM: u8 = 15;

/// Where the guest has the directory that is shared with it.
const GUEST_SHARE: &str = "/run/podvisor/shared";

/// A use so soon after another need not be noted.
const USE_NOTED: Duration = Duration::from_secs(3600);

#[derive(Debug, Args)]
#[command(override_usage = "podvisor run [OPTIONS] IMAGE [CMD]...")]
pub(super) struct RunArgs {
    /// Let the program read podvisor's stdin
    #[arg(short, long)]
    interactive: bool,

    /// Give the program a terminal
    #[arg(short, long)]
    tty: bool,

    /// Set an environment variable; NAME alone takes the value from here
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    env: Vec<String>,

    /// Start in this folder of the image
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<String>,

    /// Run as this user of the image, or number
    #[arg(short, long, value_name = "USER[:GROUP]")]
    user: Option<String>,

    /// Run this instead of the image's entrypoint
    #[arg(long, value_name = "CMD")]
    entrypoint: Option<String>,

    /// Host name of the guest [default: a random id]
    #[arg(long, value_name = "NAME", value_parser = parse_hostname)]
    hostname: Option<String>,

    #[command(flatten)]
    guest: GuestArgs,

    /// The bus of the guest's devices: MMIO boots faster, PCI costs less per request
    #[arg(long, value_name = "BUS", value_enum, default_value_t = Bus::Mmio)]
    transport: Bus,

    /// Write what the guest's kernel prints to this file
    #[arg(long, value_name = "FILE")]
    console: Option<PathBuf>,

    /// Let the program write nowhere but to the mounts that are in memory
    #[arg(long)]
    read_only: bool,

    /// When to ask the registry for the image
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = Pull::Missing)]
    pull: Pull,

    #[command(flatten)]
    verify: VerifyArgs,

    #[command(flatten)]
    registries: RegistryArgs,

    /// Show no progress of a pull
    #[arg(short, long)]
    quiet: bool,

    /// Remove the container when it has ended
    #[arg(long)]
    rm: bool,

    /// Do not wait for the end: print the container's id and go
    #[arg(short, long)]
    detach: bool,

    /// Name of the container [default: the beginning of its id]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Label of the container
    #[arg(short, long, value_name = "KEY[=VALUE]", value_parser = parse_label)]
    label: Vec<(String, String)>,

    /// Share a directory or file of the host
    #[arg(short, long, value_name = "HOST:GUEST[:ro]", value_parser = parse_volume)]
    volume: Vec<Volume>,

    /// Signal by which `podvisor stop` asks the program to end [default: the image's, or TERM]
    #[arg(long, value_name = "SIGNAL", value_parser = crate::signal::parse)]
    stop_signal: Option<u8>,

    /// How the guest begins: as a clone of one that has booted already, or by booting
    #[arg(
        long,
        value_name = "HOW",
        value_enum,
        env = "PODVISOR_BOOT",
        default_value_t = BootMode::Warm
    )]
    boot: BootMode,

    /// Begin as a clone of this machine, which `podvisor snapshot` made; its CPUs, memory and
    /// kernel are the snapshot's
    #[arg(
        long,
        value_name = "DIR",
        conflicts_with_all = ["cpus", "memory", "kernel", "transport", "console"]
    )]
    from_snapshot: Option<PathBuf>,

    /// Do not jail the machine's process: for hosts that do not let podvisor do so
    #[arg(long)]
    no_jail: bool,

    /// Image to run, and the command with its arguments
    #[arg(value_names = ["IMAGE", "CMD"], required = true, trailing_var_arg = true)]
    image_and_command: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Pull {
    /// Always: its tag may have moved
    Always,
    /// When it is not here
    Missing,
    /// Never
    Never,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Bus {
    /// virtio over MMIO
    Mmio,
    /// virtio over PCI, with MSI-X
    Pci,
}

impl RunArgs {
    pub(super) fn image(&self) -> &str {
        // The parser takes at least one.
        self.image_and_command.first().map_or("", String::as_str)
    }

    pub(super) fn command(&self) -> &[String] {
        self.image_and_command.get(1..).unwrap_or_default()
    }

    fn container_options(&self, terminal: Option<TerminalSize>) -> ContainerOptions {
        ContainerOptions {
            entrypoint: self.entrypoint.clone(),
            command: self.command().to_vec(),
            env: self.env.iter().map(|entry| from_here(entry)).collect(),
            workdir: self.workdir.clone(),
            user: self.user.clone(),
            terminal,
            root: if self.read_only {
                RootAccess::ReadOnly
            } else {
                RootAccess::Writable
            },
        }
    }
}

/// `NAME` alone stands for this process's own value, and removes the variable when there is
/// none.
pub(super) fn from_here(entry: &str) -> String {
    match std::env::var(entry) {
        Ok(value) if !entry.contains('=') => format!("{entry}={value}"),
        _ => entry.to_owned(),
    }
}

fn parse_label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').unwrap_or((text, ""));
    match key.is_empty() {
        true => Err("write KEY=VALUE".to_owned()),
        false => Ok((key.to_owned(), value.to_owned())),
    }
}

fn parse_hostname(text: &str) -> Result<String, String> {
    let label = |label: &str| {
        !label.is_empty()
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    if text.len() <= 63 && text.split('.').all(label) {
        Ok(text.to_owned())
    } else {
        Err("a host name is at most 63 letters, digits, `-` and `.`".to_owned())
    }
}

pub(super) fn run(globals: &Globals, args: &RunArgs) -> anyhow::Result<u8> {
    if args.tty && args.interactive && !terminal::is_terminal(std::io::stdin()) {
        anyhow::bail!(
            "the input device is not a terminal; leave out -t to read from a file or a pipe"
        );
    }
    if args.detach && args.rm {
        debug!("removed by the first command after its end");
    }
    debug!("begin");
    let root =
        std::path::absolute(globals.root()?).context("cannot find the root's absolute path")?;
    let guest = match &args.from_snapshot {
        Some(dir) => Guest::of_snapshot(dir)?,
        None => args.guest.guest(args.boot.templates(&root))?,
    };
    anyhow::ensure!(
        args.volume.is_empty() || guest.shares != Some(false),
        "--volume: the snapshot's machine cannot share directories; make one by `podvisor snapshot --volumes`"
    );

    let runtime = super::runtime()?;
    let code = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let store = globals.store()?;
        debug!("the store is open");
        let image = match image(&store, args).await? {
            Pulled::Image(image) => image,
            Pulled::Interrupted(signal) => return Ok(exit_code_of(signal)),
        };
        debug!(id = %image.id(), "the image is here");
        let containers = Containers::open(&root)?;
        sweep(&containers).await?;
        let code = in_sandbox(args, &guest, &image, &containers, &mut signals).await;
        note_use(&store, &image);
        code
    });
    // A thread may sit in a read of stdin for ever.
    runtime.shutdown_background();
    code
}

/// The image from the store, or from its registry.
async fn image(store: &Store, args: &RunArgs) -> anyhow::Result<Pulled> {
    let name = args.image();
    let mut options = PullOptions::default();
    options.signatures = args.verify.policy()?;
    if args.pull == Pull::Never {
        let found = match &options.signatures {
            Some(policy) => store.resolve_signed(name, policy),
            None => store.resolve(name),
        };
        return Ok(Pulled::Image(Box::new(found?)));
    }
    if args.pull == Pull::Missing {
        options = options.policy(PullPolicy::IfMissing);
    }
    let progress = if args.quiet {
        Progress::Quiet
    } else {
        Progress::for_stderr()
    };
    let options = options.registries(args.registries.config()?);
    pull(store, name, options, progress).await
}

/// Tells the store that the image was used, for pruning to see. That writes to the disk, so not for each run.
fn note_use(store: &Store, image: &Image) {
    let is_new = image.used().elapsed().is_ok_and(|age| age < USE_NOTED);
    if !is_new && let Err(error) = store.touch(&image.id().to_string()) {
        debug!(%error, "the use of the image is not noted");
    }
}

/// The record of the container that is asked for.
fn record(args: &RunArgs, guest: &Guest, image: &Image) -> anyhow::Result<Record> {
    let id = random_id().context("cannot make up an id for the container")?;
    let short: String = id.chars().take(SHORT_ID).collect();
    let hostname = args.hostname.clone().unwrap_or_else(|| short.clone());
    let terminal = args.tty.then(terminal::size_or_usual);
    let options = args.container_options(terminal);
    let config = image.config().config().as_ref();
    let container = container_spec(&id, &hostname, config, &options)?;
    let process = container.spec.process().clone().unwrap_or_default();
    let stop_signal = args.stop_signal.map(Ok).or_else(|| {
        let named = config.and_then(|config| config.stop_signal().as_deref())?;
        Some(crate::signal::parse(named))
    });
    let created = SystemTime::now().duration_since(UNIX_EPOCH);
    Ok(Record {
        name: args.name.clone().unwrap_or(short),
        image: args.image().to_owned(),
        image_id: image.id().to_string(),
        created: created.unwrap_or_default().as_secs(),
        labels: args.label.iter().cloned().collect(),
        remove: args.rm,
        cpus: guest.cpus,
        memory: guest.memory,
        interactive: args.interactive,
        // A name that nobody knows is the image's mistake.
        stop_signal: stop_signal.and_then(Result::ok).unwrap_or(SIGTERM),
        volumes: args.volume.clone(),
        jailed: !args.no_jail,
        user: container.user,
        hostname,
        process,
        id,
    })
}

/// Starts the sandbox, with its container made.
async fn launch(
    args: &RunArgs,
    guest: &Guest,
    image: &Image,
    entry: &Entry,
) -> anyhow::Result<SandboxClient> {
    let record = &entry.record;
    let options = args.container_options(None);
    let config = image.config().config().as_ref();
    let mut spec = container_spec(&record.id, &record.hostname, config, &options)?.spec;
    spec.set_process(Some(record.process.clone()));
    // A snapshot's machine has all of its devices, wanted or not.
    let shares = guest.shares.unwrap_or(!record.volumes.is_empty());
    let shared_dir = shares.then(|| entry.shared());
    if let Some(dir) = &shared_dir {
        volumes::mount(dir, &record.volumes)?;
    }
    let mut mounts = spec.mounts().clone().unwrap_or_default();
    for (number, volume) in record.volumes.iter().enumerate() {
        let access = if volume.read_only { "ro" } else { "rw" };
        let mount = MountBuilder::default()
            .destination(&volume.destination)
            .typ("bind")
            .source(Path::new(GUEST_SHARE).join(volumes::name(number)))
            .options(["rbind".to_owned(), access.to_owned()])
            .build()?;
        mounts.push(mount);
    }
    spec.set_mounts(Some(mounts));
    let client = SandboxClient::launch(LaunchConfig {
        id: record.id.clone(),
        hostname: record.hostname.clone(),
        dir: entry.dir.clone(),
        kernel: guest.kernel.clone(),
        initramfs: guest.initramfs.clone(),
        vcpus: record.cpus,
        memory: record.memory,
        image_slots: 1,
        nics: Vec::new(),
        shared_dir,
        console: args.console.clone(),
        network: GuestNetwork::default(),
        sysctls: Default::default(),
        pci: args.transport == Bus::Pci,
        templates: guest.templates.clone(),
        snapshot: guest.snapshot.clone(),
        jail: match record.jailed {
            true => JailMode::Enforced,
            false => JailMode::Disabled,
        },
        cgroup_parent: Some(DEFAULT_CGROUP_PARENT.to_owned()),
    })
    .await?;
    let container = CreateContainer {
        id: record.id.clone(),
        // Open and locked, it cannot be removed under the guest's feet.
        image: image.open_rootfs()?.into(),
        image_digest: image.id().to_string(),
        volumes: Vec::new(),
        readonly_rootfs: args.read_only,
        spec,
        user: record.user.clone(),
        supplemental_groups: SupplementalGroups::Default,
        log: Some(entry.open_log()?.into()),
        tty: args.tty,
        stdin: args.interactive,
        // Detached, somebody may attach again and again.
        stdin_once: !args.detach,
        etc_hosts: etc_hosts(&record.hostname).into_bytes(),
        etc_resolv_conf: Vec::new(),
        etc_hostname: format!("{}\n", record.hostname).into_bytes(),
    };
    client.create_container(container).await?;
    client.end_with(&record.id).await?;
    Ok(client)
}

/// Runs the program of `image` and gives its exit code; detached, prints the container's id.
async fn in_sandbox(
    args: &RunArgs,
    guest: &Guest,
    image: &Image,
    containers: &Containers,
    signals: &mut Signals,
) -> anyhow::Result<u8> {
    let begin = Instant::now();
    let (entry, claim) = containers.create(record(args, guest, image)?)?;
    let launched = tokio::select! {
        launched = launch(args, guest, image, &entry) => launched,
        signal = signals.ending() => {
            drop(claim);
            state::remove(&entry.dir).await?;
            return Ok(exit_code_of(signal));
        }
    };
    let started = match launched {
        Ok(client) => {
            debug!(elapsed = ?begin.elapsed(), "the container is made");
            start(args, &entry, client).await
        }
        Err(error) => Err(error),
    };
    drop(claim);
    let (program, served) = match started {
        Ok(started) => started,
        Err(error) => {
            // Nothing of it ever ran.
            if let Err(error) = state::remove(&entry.dir).await {
                debug!(error = %format!("{error:#}"), "the container is left for the next sweep");
            }
            return exec::not_started(error).or_else(advised);
        }
    };
    let Some((outputs, raw)) = served else {
        super::print(&format!("{}\n", entry.record.id))?;
        return Ok(0);
    };
    let outcome = program.wait(outputs, signals).await;
    // Before anything is said about what happened.
    drop(raw);
    match &outcome {
        Ok(Outcome::Ended(_)) => {
            program.client.ended().await;
        }
        Ok(Outcome::GivenUp(_)) => {
            super::notice("the program did not end, so its guest is killed");
            program.client.shutdown(Duration::ZERO).await?;
        }
        Err(_) => {}
    }
    debug!(elapsed = ?begin.elapsed(), "done");
    if args.rm {
        state::remove(&entry.dir).await?;
    }
    match outcome {
        Ok(outcome) => Ok(exit_code(&outcome)),
        Err(error) => advised(error),
    }
}

/// What serves the streams of a program in the foreground.
type Served = Option<(Outputs, Option<RawMode>)>;

async fn start(
    args: &RunArgs,
    entry: &Entry,
    client: SandboxClient,
) -> anyhow::Result<(Program, Served)> {
    let program = Program {
        client,
        id: entry.record.id.clone(),
        exec_id: None,
        has_terminal: args.tty,
        has_input: args.interactive,
    };
    if args.detach {
        program.client.start_container(&program.id).await?;
        return Ok((program, None));
    }
    let (streams, theirs) = program.streams()?;
    program.client.attach_whole(&program.id, theirs).await?;
    let served = program.serve(streams)?;
    program.client.start_container(&program.id).await?;
    debug!("the program runs");
    Ok((program, Some(served)))
}

/// An error with its remedy, where it is a sandbox's.
fn advised(error: anyhow::Error) -> anyhow::Result<u8> {
    Err(match error.downcast::<SandboxError>() {
        Ok(error) => advice::advised(error),
        Err(error) => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_names_are_dns_names() {
        for good in ["a", "web-1", "a.b.example"] {
            assert!(parse_hostname(good).is_ok(), "{good}");
        }
        let long = "x".repeat(64);
        for bad in ["", "-a", "a-", "a..b", "a b", "a\n", "ä", &long] {
            assert!(parse_hostname(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_variable_without_a_value_takes_it_from_here() {
        let path = std::env::var("PATH").unwrap();
        assert_eq!(from_here("PATH"), format!("PATH={path}"));
        assert_eq!(from_here("PATH=x"), "PATH=x");
        assert_eq!(from_here("PODVISOR_NO_SUCH"), "PODVISOR_NO_SUCH");
    }
}
