//! `podvisor attach`: connects to a container's standard streams.

use clap::Args;

use super::foreground::{Abandoned, ForwardedStreams, Program, exit_code};
use super::state::running;
use super::{Containers, sweep};
use crate::cli::Globals;
use crate::cli::keys::DetachArgs;
use crate::cli::signals::{Signals, exit_code_of};

#[derive(Debug, Args)]
pub(in crate::cli) struct AttachArgs {
    /// Only show what it writes
    #[arg(long)]
    no_stdin: bool,

    #[command(flatten)]
    detach: DetachArgs,

    /// Name or id
    #[arg(value_name = "CONTAINER")]
    container: String,
}

pub(in crate::cli) fn run(globals: &Globals, args: &AttachArgs) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    let runtime = crate::cli::runtime()?;
    let code = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let (program, served) = tokio::select! {
            begun = begin(&containers, args) => begun?,
            signal = signals.ending() => return Ok(exit_code_of(signal)),
        };
        let outcome = program.wait(served, &mut signals).await?;
        anyhow::Ok(exit_code(&outcome))
    });
    runtime.shutdown_background();
    code
}

async fn begin(
    containers: &Containers,
    args: &AttachArgs,
) -> anyhow::Result<(Program, ForwardedStreams)> {
    sweep(containers).await?;
    let entry = containers.find(&args.container)?;
    let (client, _, is_paused) = running(&entry).await?;
    anyhow::ensure!(
        !is_paused,
        "container {} is paused; `podvisor unpause` it first",
        entry.record.name
    );
    let program = Program {
        client,
        id: entry.record.id.clone(),
        exec_id: None,
        has_terminal: entry.record.has_terminal(),
        has_input: entry.record.interactive && !args.no_stdin,
        abandoned: Abandoned::GoesOn,
    };
    let (streams, theirs) = program.streams()?;
    program.client.attach_whole(&program.id, theirs).await?;
    let served = program.serve(streams, &args.detach.detach_keys)?;
    Ok((program, served))
}
