//! `podvisor completions`: prints a shell's completion script for podvisor's arguments.

use clap::Args;
use clap_complete::Shell;

#[derive(Debug, Args)]
pub(super) struct CompletionsArgs {
    /// Shell to print the script for
    #[arg(value_enum)]
    shell: Shell,
}

pub(super) fn run(args: &CompletionsArgs, mut whole: clap::Command) -> anyhow::Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut whole, "podvisor", &mut script);
    super::print(&String::from_utf8_lossy(&script))?;
    Ok(0)
}
