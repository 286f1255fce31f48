//! What `run` is told: its flags.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::cli::container::{NetworkArgs, RestartArg, Volume, parse_volume};
use crate::cli::guest::GuestArgs;
use crate::cli::registries::RegistryArgs;
use crate::cli::settings::BootMode;
use crate::cli::verify::VerifyArgs;
use crate::sandbox::{ContainerOptions, RootAccess, TerminalSize};

#[derive(Debug, Args)]
#[command(override_usage = "podvisor run [OPTIONS] IMAGE [CMD]...")]
pub(in crate::cli) struct RunArgs {
    /// Let the program read podvisor's stdin
    #[arg(short, long)]
    pub(super) interactive: bool,

    /// Give the program a terminal
    #[arg(short, long)]
    pub(super) tty: bool,

    /// Set an environment variable; NAME alone takes the value from here
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub(super) env: Vec<String>,

    /// Start in this folder of the image
    #[arg(short, long, value_name = "DIR")]
    pub(super) workdir: Option<String>,

    /// Run as this user of the image, or number
    #[arg(short, long, value_name = "USER[:GROUP]")]
    pub(super) user: Option<String>,

    /// Run this instead of the image's entrypoint
    #[arg(long, value_name = "CMD")]
    pub(super) entrypoint: Option<String>,

    /// Host name of the guest [default: a random id]
    #[arg(long, value_name = "NAME", value_parser = parse_hostname)]
    pub(super) hostname: Option<String>,

    #[command(flatten)]
    pub(super) network: NetworkArgs,

    #[command(flatten)]
    pub(super) guest: GuestArgs,

    /// The bus of the guest's devices: MMIO boots faster, PCI costs less per request [default: mmio
    /// for a guest that boots, pci for others]
    #[arg(long, value_name = "BUS", value_enum)]
    pub(super) transport: Option<Bus>,

    /// Give the guest a serial console: `pty` for `podvisor console` alone, or a file for what is
    /// written to it, too
    #[arg(long, value_name = "pty|FILE", value_parser = parse_console)]
    pub(super) console: Option<PathBuf>,

    /// Let the program write nowhere but to the mounts that are in memory
    #[arg(long)]
    pub(super) read_only: bool,

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
            "publish", "dns", "no_jail",
        ]
    )]
    pub(super) pod: Option<String>,

    /// Whose processes the program sees and is seen by: those of the pod's containers that ask for
    /// the same [default: its own]
    #[arg(long, value_name = "MODE", value_enum, requires = "pod")]
    pub(super) pid: Option<PidMode>,

    /// Start the program again when it has ended, in the same guest
    #[arg(long, value_name = "POLICY", default_value_t)]
    pub(super) restart: RestartArg,

    /// Do not wait for the end: print the container's id and go
    #[arg(short, long)]
    pub(super) detach: bool,

    /// Name of the container [default: the beginning of its id]
    #[arg(long, value_name = "NAME")]
    pub(super) name: Option<String>,

    /// Label of the container
    #[arg(short, long, value_name = "KEY[=VALUE]", value_parser = parse_label)]
    pub(super) label: Vec<(String, String)>,

    /// Share a directory or file of the host
    #[arg(short, long, value_name = "HOST:GUEST[:ro]", value_parser = parse_volume)]
    pub(super) volume: Vec<Volume>,

    /// Signal by which `podvisor stop` asks the program to end [default: the image's, or TERM]
    #[arg(long, value_name = "SIGNAL", value_parser = crate::signal::parse)]
    pub(super) stop_signal: Option<u8>,

    /// How the guest begins: as a clone of one that has booted already, or by booting
    #[arg(
        long,
        value_name = "HOW",
        value_enum,
        env = "PODVISOR_BOOT",
        default_value_t = BootMode::Warm
    )]
    pub(super) boot: BootMode,

    /// Begin as a clone of this machine, which `podvisor snapshot` made; its CPUs, memory and
    /// kernel are the snapshot's
    #[arg(
        long,
        value_name = "DIR",
        conflicts_with_all = ["cpus", "memory", "kernel", "transport", "console"]
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
        // The parser takes at least one.
        self.image_and_command.first().map_or("", String::as_str)
    }

    pub(in crate::cli) fn command(&self) -> &[String] {
        self.image_and_command.get(1..).unwrap_or_default()
    }

    pub(super) fn container_options(&self, terminal: Option<TerminalSize>) -> ContainerOptions {
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

/// What is written to the console goes to a file in any case: for `pty`, to one that keeps nothing.
pub(in crate::cli) fn parse_console(text: &str) -> Result<PathBuf, String> {
    match text {
        "" => Err("write pty, or the name of a file".to_owned()),
        "pty" => Ok(PathBuf::from("/dev/null")),
        file => Ok(PathBuf::from(file)),
    }
}

/// `NAME` alone stands for this process's own value, and removes the variable when there is
/// none.
pub(in crate::cli) fn from_here(entry: &str) -> String {
    match std::env::var(entry) {
        Ok(value) if !entry.contains('=') => format!("{entry}={value}"),
        _ => entry.to_owned(),
    }
}

pub(in crate::cli) fn parse_label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').unwrap_or((text, ""));
    match key.is_empty() {
        true => Err("write KEY=VALUE".to_owned()),
        false => Ok((key.to_owned(), value.to_owned())),
    }
}

pub(in crate::cli) fn parse_hostname(text: &str) -> Result<String, String> {
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
