//! Flags of `run`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{ArgAction, Args, ValueEnum};

use super::health::HealthArgs;
use super::mount::{self, MountArg};
use super::spec_flags::{RightsArgs, Tmpfs};
use crate::cli::container::{NetworkArgs, RestartArg, Volume, parse_volume};
use crate::cli::env_file::{self, EnvFile, LabelFile, from_here, parse_label};
use crate::cli::guest::GuestArgs;
use crate::cli::io_limits::IoArgs;
use crate::cli::keys::DetachArgs;
use crate::cli::registries::RegistryArgs;
use crate::cli::settings::BootArgs;
use crate::cli::verify::VerifyArgs;
use crate::sandbox::{ContainerOptions, RootAccess, TerminalSize};

#[derive(Debug, Args)]
#[command(override_usage = "podvisor run [OPTIONS] IMAGE [CMD]...")]
#[command(disable_help_flag = true)]
pub(in crate::cli) struct RunArgs {
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,

    /// Let the program read podvisor's stdin
    #[arg(short, long)]
    pub(super) interactive: bool,

    /// Give the program a terminal
    #[arg(short, long)]
    pub(super) tty: bool,

    /// Set an environment variable; NAME alone takes the value from here
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub(super) env: Vec<String>,

    /// Set the variables of a file, a line each; --env overrides them
    #[arg(long, value_name = "FILE", value_parser = env_file::read_env)]
    pub(super) env_file: Vec<EnvFile>,

    /// Start in this directory of the image
    #[arg(short, long, value_name = "DIR")]
    pub(super) workdir: Option<String>,

    /// Run as this user of the image, or number
    #[arg(short, long, value_name = "USER[:GROUP]")]
    pub(super) user: Option<String>,

    /// Run this instead of the image's entrypoint
    #[arg(long, value_name = "CMD")]
    pub(super) entrypoint: Option<String>,

    /// Host name of the guest [default: a random id]
    #[arg(short = 'h', long, value_name = "NAME", value_parser = parse_hostname)]
    pub(super) hostname: Option<String>,

    #[command(flatten)]
    pub(super) network: NetworkArgs,

    #[command(flatten)]
    pub(super) guest: GuestArgs,

    #[command(flatten)]
    pub(super) io: IoArgs,

    /// The bus of the guest's devices: MMIO boots faster, PCI costs less per request [default: pci;
    /// mmio with --boot cold or --console]
    #[arg(long, value_name = "BUS", value_enum)]
    pub(super) transport: Option<Bus>,

    /// Give the guest a serial console: `pty` for `podvisor console` alone, or a file for what is
    /// written to it, too
    #[arg(long, value_name = "pty|FILE", value_parser = parse_console)]
    pub(super) console: Option<PathBuf>,

    #[command(flatten)]
    pub(super) rights: RightsArgs,

    /// Set a parameter of the guest's kernel by its dotted name
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_sysctl)]
    pub(super) sysctl: Vec<(String, String)>,

    /// When to ask the registry for the image
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = Pull::Missing)]
    pub(super) pull: Pull,

    #[command(flatten)]
    pub(super) verify: VerifyArgs,

    #[command(flatten)]
    pub(super) registries: RegistryArgs,

    /// Show no progress of a pull
    #[arg(short, long)]
    pub(super) quiet: bool,

    /// Remove the container when it has ended
    #[arg(long)]
    pub(super) rm: bool,

    /// Run in the machine of this pod, which has been made by `podvisor pod create`
    #[arg(
        long,
        value_name = "POD",
        conflicts_with_all = [
            "cpus", "memory", "kernel", "transport", "console", "from_snapshot", "hostname",
            "publish", "dns", "dns_search", "dns_option", "no_jail", "boot", "sysctl", "shm_size",
            "device_read_bps", "device_write_bps", "device_read_iops", "device_write_iops",
        ]
    )]
    pub(super) pod: Option<String>,

    /// PID namespace: `pod` is shared with the pod's containers that use `--pid pod` [default: its
    /// own]
    #[arg(long, value_name = "MODE", value_enum, requires = "pod")]
    pub(super) pid: Option<PidMode>,

    /// Do not make the program the first process of its PID namespace: one that reaps what the
    /// program leaves behind is
    #[arg(long, conflicts_with = "pod")]
    pub(super) init: bool,

    #[command(flatten)]
    pub(super) health: HealthArgs,

    /// Start the program again when it has ended, in the same guest
    #[arg(long, value_name = "POLICY", default_value_t)]
    pub(super) restart: RestartArg,

    /// Run in the background and print the container's id
    #[arg(short, long)]
    pub(super) detach: bool,

    #[command(flatten)]
    pub(super) leave: DetachArgs,

    /// Name of the container [default: the beginning of its id]
    #[arg(long, value_name = "NAME")]
    pub(super) name: Option<String>,

    /// Remove a container of this name first, whatever it does
    #[arg(long, requires = "name")]
    pub(super) replace: bool,

    /// Write the container's id to a file that is not there yet
    #[arg(long, value_name = "FILE")]
    pub(super) cidfile: Option<PathBuf>,

    /// Label of the container
    #[arg(short, long, value_name = "KEY[=VALUE]", value_parser = parse_label)]
    pub(super) label: Vec<(String, String)>,

    /// Labels of a file, a line each; --label overrides them
    #[arg(long, value_name = "FILE", value_parser = env_file::read_labels)]
    pub(super) label_file: Vec<LabelFile>,

    /// Share a directory or file of the host; options: ro, rw, rslave; z and Z are accepted and
    /// ignored
    #[arg(short, long, value_name = "HOST:GUEST[:OPTIONS]", value_parser = parse_volume)]
    pub(super) volume: Vec<Volume>,

    /// Mount a directory or file of the host, or memory of the guest:
    /// type=bind,source=HOST,target=GUEST[,readonly][,bind-propagation=rslave], or
    /// type=tmpfs,target=GUEST[,tmpfs-size=SIZE][,tmpfs-mode=MODE]
    #[arg(long, value_name = "KEY=VALUE,...", value_parser = mount::parse)]
    pub(super) mount: Vec<MountArg>,

    /// Rotate the log: keep two files of at most this size; the older one is
    /// begun anew when the other is full [default: keep all]
    #[arg(long, value_name = "SIZE", value_parser = crate::cli::size::parse)]
    pub(super) log_max_size: Option<u64>,

    /// Signal by which `podvisor stop` asks the program to end [default: the image's, or TERM]
    #[arg(long, value_name = "SIGNAL", value_parser = crate::signal::parse)]
    pub(super) stop_signal: Option<u8>,

    /// Seconds until `podvisor stop` kills the program [default: 10]
    #[arg(long, value_name = "SECONDS")]
    pub(super) stop_timeout: Option<u32>,

    #[command(flatten)]
    pub(super) boot: BootArgs,

    /// Begin as a clone of this machine, which `podvisor snapshot` made; its CPUs, memory and
    /// kernel are the snapshot's
    #[arg(
        long,
        value_name = "DIR",
        conflicts_with_all = ["cpus", "memory", "kernel", "transport", "console", "boot"]
    )]
    pub(super) from_snapshot: Option<PathBuf>,

    /// Do not jail the machine's process: for hosts that do not let podvisor do so
    #[arg(long)]
    pub(super) no_jail: bool,

    /// Image to run, and the command with its arguments
    #[arg(value_names = ["IMAGE", "CMD"], required = true, trailing_var_arg = true)]
    pub(super) image_and_command: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Pull {
    /// Always: its tag may have moved
    Always,
    /// When it is not here
    Missing,
    /// Never
    Never,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum PidMode {
    /// The pod's
    Pod,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Bus {
    /// virtio over MMIO
    Mmio,
    /// virtio over PCI, with MSI-X
    Pci,
}

impl RunArgs {
    pub(in crate::cli) fn image(&self) -> &str {
        // The parser requires at least one.
        self.image_and_command.first().map_or("", String::as_str)
    }

    pub(in crate::cli) fn command(&self) -> &[String] {
        self.image_and_command.get(1..).unwrap_or_default()
    }

    /// Returns whether the console's output is kept in a file.
    pub(super) fn keeps_console(&self) -> bool {
        let console = self.console.as_deref();
        console.is_some_and(|file| file != Path::new("/dev/null"))
    }

    /// Returns the variables, those of files first, so that those of flags override them.
    fn variables(&self) -> Vec<String> {
        let of_files = self.env_file.iter().flat_map(|file| file.0.iter().cloned());
        let of_flags = self.env.iter().map(|entry| from_here(entry));
        of_files.chain(of_flags).collect()
    }

    /// Returns the paths on which the user's mounts are.
    pub(super) fn mount_points(&self) -> impl Iterator<Item = &str> {
        let of_volumes = self.volume.iter().map(|volume| &*volume.destination);
        let of_mounts = self.mount.iter().map(|mount| match mount {
            MountArg::Bind(volume) => &*volume.destination,
            MountArg::Tmpfs(tmpfs) => tmpfs.path(),
        });
        let of_flags = of_volumes.chain(of_mounts);
        of_flags.chain(self.rights.tmpfs_paths())
    }

    /// Returns what is mounted of the host.
    pub(super) fn volumes(&self) -> Vec<Volume> {
        let of_mounts = self.mount.iter().filter_map(|mount| match mount {
            MountArg::Bind(volume) => Some(volume),
            MountArg::Tmpfs(_) => None,
        });
        self.volume.iter().chain(of_mounts).cloned().collect()
    }

    /// Returns what `--mount` mounts in the guest's memory.
    pub(super) fn mounted_tmpfs(&self) -> impl Iterator<Item = &Tmpfs> {
        self.mount.iter().filter_map(|mount| match mount {
            MountArg::Bind(_) => None,
            MountArg::Tmpfs(tmpfs) => Some(tmpfs),
        })
    }

    pub(super) fn labels(&self) -> BTreeMap<String, String> {
        let of_files = self.label_file.iter().flat_map(|file| &file.0);
        of_files.chain(&self.label).cloned().collect()
    }

    pub(super) fn container_options(&self, terminal: Option<TerminalSize>) -> ContainerOptions {
        ContainerOptions {
            entrypoint: self.entrypoint.clone(),
            command: self.command().to_vec(),
            env: self.variables(),
            workdir: self.workdir.clone(),
            user: self.user.clone(),
            terminal,
            root: if self.rights.read_only {
                RootAccess::ReadOnly
            } else {
                RootAccess::Writable
            },
        }
    }
}

/// Returns the file for the console's output: for `pty`, one that discards it.
pub(in crate::cli) fn parse_console(text: &str) -> Result<PathBuf, String> {
    match text {
        "" => Err("write pty, or the name of a file".to_owned()),
        "pty" => Ok(PathBuf::from("/dev/null")),
        file => Ok(PathBuf::from(file)),
    }
}

pub(in crate::cli) fn parse_sysctl(text: &str) -> Result<(String, String), String> {
    let is_part = |part: &str| !part.is_empty() && part != ".." && !part.contains('\0');
    match text.split_once('=') {
        Some((name, value)) if name.split(['.', '/']).all(is_part) => {
            Ok((name.to_owned(), value.to_owned()))
        }
        _ => Err("write NAME=VALUE, net.ipv4.ip_forward=1 say".to_owned()),
    }
}

pub(in crate::cli) fn parse_hostname(text: &str) -> Result<String, String> {
    let label = |label: &str| {
        !label.is_empty()
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    if text.len() <= 63 && text.split('.').all(label) {
        Ok(text.to_owned())
    } else {
        Err("a host name is at most 63 letters, digits, `-`, `_` and `.`".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::command::Command;

    fn parsed(line: &str) -> Result<crate::cli::Cli, clap::Error> {
        let arguments: Vec<_> = line.split(' ').map(Into::into).collect();
        crate::cli::parse(&arguments)
    }

    #[test]
    fn a_flag_may_have_a_boolean() {
        let run = |flags: &str| match parsed(&format!("podvisor run {flags}")).unwrap().command {
            Command::Run(args) => args,
            other => panic!("{other:?}"),
        };
        let args = run("--rm=true -t=false --privileged=true --read-only=false -iq box ls -t=true");
        assert!(args.rm && args.rights.privileged && args.interactive && args.quiet);
        assert!(!args.tty && !args.rights.read_only);
        assert_eq!(args.command(), ["ls", "-t=true"]);
        let args = run("--rm=false -it=true -e A=true box");
        assert!(!args.rm && args.interactive && args.tty);
        // A value follows only with an equals sign.
        let args = run("-t=true --rm true false");
        assert!(args.rm && args.tty);
        assert_eq!(
            (args.image(), args.command()),
            ("true", &["false".to_owned()][..])
        );
        parsed("podvisor exec -it=false --detach=false box true").unwrap_err();
        parsed("podvisor exec -it=false box true").unwrap();
        for bad in [
            "run --rm=no box",
            "run --rm=true --rmm box",
            "ps --all=true",
        ] {
            assert!(parsed(&format!("podvisor {bad}")).is_err(), "{bad}");
        }
        let help = parsed("podvisor run --help").unwrap_err().to_string();
        assert!(
            help.contains("--privileged") && !help.contains("[=<"),
            "{help}"
        );
    }

    #[test]
    fn host_names_are_dns_names_that_may_have_underscores() {
        for good in ["a", "web-1", "web_1", "a.b.example"] {
            assert!(parse_hostname(good).is_ok(), "{good}");
        }
        let long = "x".repeat(64);
        for bad in ["", "-a", "a-", "a..b", "a b", "a\n", "ä", &long] {
            assert!(parse_hostname(bad).is_err(), "{bad}");
        }
    }
}
