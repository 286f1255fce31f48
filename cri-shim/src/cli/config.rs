//! `podvisor config`: the settings file of the daemon.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::settings::{DEFAULT_TEXT, PATH, Settings};
use super::{FAILURE, Globals, notice, print, serve};

#[derive(Debug, Args)]
pub(super) struct ConfigArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Say whether a settings file of `podvisor serve` is valid, and what it leads to
    Check {
        /// The file [default: /etc/podvisor/config.toml]
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Print a settings file with all defaults as comments
    Default,
}

pub(super) fn run(globals: &Globals, args: &ConfigArgs) -> anyhow::Result<u8> {
    match &args.command {
        Command::Default => print(DEFAULT_TEXT)?,
        Command::Check { file } => {
            let path = file.clone().unwrap_or_else(|| PathBuf::from(PATH));
            let settings = Settings::read(Some(&path))?;
            let faults = serve::faults(globals, settings)?;
            for fault in &faults {
                notice(fault);
            }
            if !faults.is_empty() {
                return Ok(FAILURE);
            }
            print(&format!("{} is valid\n", path.display()))?;
        }
    }
    Ok(0)
}
