//! `podvisor run`: a program from an image, in a virtual machine of its own, behaving like a
//! program that was started right here.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use podvisor_images::{Image, PullOptions, PullPolicy, Store};
use podvisor_vmm::{MemorySize, ParseMemorySizeError};
use tracing::debug;

use super::progress::Progress;
use super::pull::{Pulled, pull};
use super::registries::RegistryArgs;
use super::shown::SHORT_ID;
use super::signals::{Signals, exit_code_of};
use super::verify::VerifyArgs;
use super::{Globals, advice, program, terminal};
use crate::machine::{Assets, Boot, Disk, GuestFiles, MachineConfig, Transport};
use crate::sandbox::{
    AgentContainer, ContainerOptions, GuestConfig, LinkError, RootAccess, Sandbox, SandboxConfig,
    SandboxError, StreamSet, Streams, SupplementalGroups, TerminalSize, container_spec, etc_hosts,
    random_id,
};

/// Less than this, and the guest's kernel and agent have no room.
const MEMORY_MIN: u64 = 64 << 20;

/// CPUs that podvisor's own kernel is built for (`CONFIG_NR_CPUS`); further ones it would leave idle.
const OWN_KERNEL_CPUS: u8 = 64;

/// A use so soon after another need not be noted.
const USE_NOTED: Duration = Duration::from_secs(3600);

/// What a terminal has that does not say.
const DEFAULT_SIZE: TerminalSize = TerminalSize {
    rows: 24,
    columns: 80,
};

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

    /// Virtual CPUs of the guest
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse_cpus)]
    cpus: u8,

    /// Memory of the guest, with a unit: 512M, 2G
    #[arg(short, long, value_name = "SIZE", default_value = "512M", value_parser = parse_memory)]
    memory: u64,

    /// Kernel to boot, vmlinux or bzImage [default: podvisor's own]
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,

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

    /// Accepted for docker's sake: nothing is ever kept
    #[arg(long, hide = true)]
    rm: bool,

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

impl From<Bus> for Transport {
    fn from(bus: Bus) -> Self {
        match bus {
            Bus::Mmio => Self::Mmio,
            Bus::Pci => Self::Pci,
        }
    }
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
fn from_here(entry: &str) -> String {
    match std::env::var(entry) {
        Ok(value) if !entry.contains('=') => format!("{entry}={value}"),
        _ => entry.to_owned(),
    }
}

fn parse_cpus(text: &str) -> Result<u8, String> {
    match text.parse() {
        Ok(cpus) if cpus > 0 => Ok(cpus),
        _ => Err("a guest has whole CPUs; write a number from 1 to 255".to_owned()),
    }
}

fn parse_memory(text: &str) -> Result<u64, String> {
    let size: MemorySize = text
        .parse()
        .map_err(|error: ParseMemorySizeError| error.to_string())?;
    if size.as_bytes() < MEMORY_MIN {
        return Err(format!("a guest needs at least {}M", MEMORY_MIN >> 20));
    }
    let whole = size.as_bytes().checked_next_multiple_of(1 << 20);
    whole.ok_or_else(|| "no machine has so much".to_owned())
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
    debug!("begin");
    let terminal = args.tty.then(|| terminal::size().unwrap_or(DEFAULT_SIZE));
    let files = guest_files(args)?;
    check_memory(
        args.memory,
        &fs::read_to_string("/proc/meminfo").unwrap_or_default(),
    )?;

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
        let set = StreamSet {
            stdin: args.interactive,
            stdout: true,
            stderr: true,
        };
        let streams = Streams::new(set, terminal)?;
        let code = in_sandbox(args, files, &image, streams, &mut signals).await;
        note_use(&store, &image);
        code
    });
    // A thread may sit in a read of stdin for ever.
    runtime.shutdown_background();
    code
}

/// The kernel that the user gave, or podvisor's own, with the agent's initramfs. Opened before
/// anything is pulled: what is wrong with them is said at once.
fn guest_files(args: &RunArgs) -> anyhow::Result<GuestFiles> {
    let assets = Assets::of_this_process();
    let kernel = match &args.kernel {
        Some(kernel) => kernel.clone(),
        None if args.cpus > OWN_KERNEL_CPUS => anyhow::bail!(
            "--cpus {}: podvisor's own kernel is built for {OWN_KERNEL_CPUS}; ask for fewer, or give one that is built for more by --kernel",
            args.cpus
        ),
        None => assets.kernel().map_err(advice::missing_file)?,
    };
    Ok(GuestFiles::open(
        &kernel,
        &assets.initramfs().map_err(advice::missing_file)?,
    )?)
}

/// Refuses a guest larger than the machine: it would be killed in the middle of its work.
fn check_memory(wanted: u64, meminfo: &str) -> anyhow::Result<()> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    match kilobytes.and_then(|kilobytes| kilobytes.checked_mul(1024)) {
        Some(total) if wanted > total => anyhow::bail!(
            "--memory {}M is more than the {}M that this machine has; ask for less",
            wanted >> 20,
            total >> 20
        ),
        _ => Ok(()),
    }
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

/// Runs the program of `image` and gives its exit code.
async fn in_sandbox(
    args: &RunArgs,
    files: GuestFiles,
    image: &Image,
    streams: Streams,
    signals: &mut Signals,
) -> anyhow::Result<u8> {
    let begin = Instant::now();
    let id = random_id().context("cannot make up an id for the container")?;
    let short: String = id.chars().take(SHORT_ID).collect();
    let hostname = args.hostname.clone().unwrap_or_else(|| short.clone());
    let options = args.container_options(streams.terminal());
    let container = container_spec(&id, &hostname, image.config().config().as_ref(), &options)?;
    let serial: String = image.id().hex().chars().take(SHORT_ID).collect();
    let console = args.console.as_deref().map(console).transpose()?;
    let config = SandboxConfig {
        guest: GuestConfig {
            hostname: hostname.clone(),
            ..GuestConfig::default()
        },
        machine: MachineConfig {
            boot: Boot::Cold(files),
            cpus: args.cpus,
            memory: args.memory,
            disks: vec![Disk {
                // Open and locked, it cannot be removed under the guest's feet.
                file: image.open_rootfs()?,
                serial: serial.clone(),
            }],
            spare_disks: 0,
            nics: Vec::new(),
            share: None,
            transport: args.transport.into(),
            console,
        },
    };
    let container = AgentContainer {
        id: id.clone(),
        image_serial: serial,
        readonly_rootfs: args.read_only,
        spec: container.spec,
        user: container.user,
        supplemental_groups: SupplementalGroups::Default,
        stdio: streams.request(),
        etc_hosts: etc_hosts(&hostname).into_bytes(),
        etc_resolv_conf: Vec::new(),
        etc_hostname: format!("{hostname}\n").into_bytes(),
    };
    let prepare = async {
        let sandbox = Sandbox::start(config).await?;
        let create = sandbox.agent().create(container);
        sandbox.unless_ended(create).await?;
        Ok::<_, SandboxError>(sandbox)
    };
    let sandbox = tokio::select! {
        sandbox = prepare => sandbox,
        signal = signals.ending() => return Ok(exit_code_of(signal)),
    };
    let code = match sandbox {
        Ok(sandbox) => {
            debug!(elapsed = ?begin.elapsed(), "the container is made");
            program::run(sandbox, &id, streams, signals).await
        }
        Err(error) => Err(error.into()),
    };
    debug!(elapsed = ?begin.elapsed(), "done");
    code.or_else(not_started)
}

/// The file for what the guest's kernel prints.
fn console(path: &Path) -> anyhow::Result<File> {
    File::create(path)
        .with_context(|| format!("cannot write the guest's console to {}", path.display()))
}

/// The shell's exit codes for a command that is not there or cannot be executed.
fn not_started(error: anyhow::Error) -> anyhow::Result<u8> {
    let code = match error.downcast_ref() {
        Some(SandboxError::Link(LinkError::Agent(agent))) => agent.kind.shell_code(),
        _ => None,
    };
    match code {
        Some(code) => {
            super::report(&error);
            Ok(code)
        }
        None => Err(match error.downcast::<SandboxError>() {
            Ok(error) => advice::advised(error),
            Err(error) => error,
        }),
    }
}

#[cfg(test)]
mod tests {
    use podvisor_agent_protocol::{AgentError, ErrorKind};

    use super::*;

    #[test]
    fn cpus_are_whole_and_positive() {
        assert_eq!(parse_cpus("2"), Ok(2));
        for bad in ["0", "-1", "1.5", "", "256", "x"] {
            assert!(parse_cpus(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn memory_has_a_least_size_and_whole_mebibytes() {
        assert_eq!(parse_memory("512M"), Ok(512 << 20));
        assert_eq!(parse_memory("104857601"), Ok(101 << 20));
        let message = parse_memory("1M").unwrap_err();
        assert!(message.contains("64M"), "{message}");
        assert!(parse_memory("lots").is_err());
        assert!(parse_memory("16777215T").is_ok());
        assert!(parse_memory("18446744073709551615").is_err());
    }

    #[test]
    fn more_memory_than_the_machine_has_is_refused() {
        let meminfo = "MemTotal:       24689460 kB\nMemFree: 1 kB\n";
        assert!(check_memory(24 << 30, meminfo).is_err());
        assert!(check_memory(8 << 30, meminfo).is_ok());
        assert!(check_memory(24 << 30, "").is_ok());
    }

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

    #[test]
    fn what_cannot_be_executed_has_the_shells_codes() {
        let error = |kind| SandboxError::Link(AgentError::new(kind, "x").into()).into();
        assert_eq!(not_started(error(ErrorKind::CommandNotFound)).unwrap(), 127);
        let code = not_started(error(ErrorKind::CommandNotExecutable)).unwrap();
        assert_eq!(code, 126);
        assert!(not_started(error(ErrorKind::Internal)).is_err());
    }
}
