//! `vm console`: the serial console of a VM, which is the container's terminal.

use clap::Args;

use crate::cli::container::foreground::{Abandoned, ForwardedStreams, Outcome, Program};
use crate::cli::container::{Entry, state, sweep};
use crate::cli::keys::{DetachKeys, parse as parse_keys};
use crate::cli::signals::{Signals, exit_code_of};
use crate::cli::{Globals, notice, terminal};
use crate::sandbox::SandboxClient;

#[derive(Debug, Args)]
pub(super) struct ConsoleArgs {
    /// Keys that leave the console, with commas between several
    #[arg(long, value_name = "KEYS", default_value = "ctrl-]", value_parser = parse_keys)]
    detach_keys: DetachKeys,

    /// Name or id
    #[arg(value_name = "VM")]
    vm: String,
}

pub(super) fn run(globals: &Globals, args: &ConsoleArgs) -> anyhow::Result<u8> {
    let containers = globals.containers()?;
    let runtime = crate::cli::runtime()?;
    let code = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let begin = async {
            sweep(&containers).await?;
            let entry = containers.find(&args.vm)?;
            let (client, _, is_paused) = state::running(&entry).await?;
            anyhow::ensure!(
                !is_paused,
                "VM {} is paused; `podvisor vm unpause` it first",
                entry.record.name
            );
            let console = connect(client, &entry, &args.detach_keys).await?;
            Ok((entry, console))
        };
        let (entry, console) = tokio::select! {
            begun = begin => begun?,
            signal = signals.ending() => return Ok(exit_code_of(signal)),
        };
        console.talk(&entry, &mut signals).await
    });
    // A thread may be blocked in a read of stdin forever.
    runtime.shutdown_background();
    code
}

/// A console that this process's own terminal is connected to.
pub(super) struct Console {
    program: Program,
    served: ForwardedStreams,
}

/// Connects to the console, and tells how it is left.
pub(super) async fn connect(
    client: SandboxClient,
    entry: &Entry,
    keys: &DetachKeys,
) -> anyhow::Result<Console> {
    let program = Program {
        client,
        id: entry.record.id.clone(),
        exec_id: None,
        has_terminal: true,
        has_input: true,
        abandoned: Abandoned::GoesOn,
    };
    let (streams, theirs) = program.streams()?;
    program.client.attach(&program.id, theirs).await?;
    if terminal::is_terminal(std::io::stdin()) {
        notice(&format!(
            "connected to the console of VM {}; {keys} leaves it",
            entry.record.name
        ));
    }
    let served = program.serve(streams, keys)?;
    Ok(Console { program, served })
}

impl Console {
    /// Forwards input and output until the VM is off or the user leaves; returns the exit code.
    pub(super) async fn talk(self, entry: &Entry, signals: &mut Signals) -> anyhow::Result<u8> {
        let name = &entry.record.name;
        match self.program.wait(self.served, signals).await? {
            Outcome::Ended(exit) => {
                notice(&format!("VM {name} is off"));
                Ok(u8::try_from(exit.code).unwrap_or(u8::MAX))
            }
            Outcome::Left => {
                notice(&format!(
                    "left the console; VM {name} goes on, `podvisor vm console {name}` connects \
                     again, `podvisor vm stop {name}` powers it off"
                ));
                Ok(0)
            }
            Outcome::GivenUp(signal) => Ok(exit_code_of(signal)),
            Outcome::Unwritable(error) => {
                let error = crate::machine::causes(&error);
                notice(&format!("{error}; left the console, VM {name} goes on"));
                Ok(crate::cli::RUN_FAILURE)
            }
        }
    }
}
