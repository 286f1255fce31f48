//! A program in the foreground: its streams are podvisor's, podvisor's signals are its own,
//! and its exit code comes back.

use std::io;
use std::os::fd::AsFd as _;
use std::time::Duration;

use anyhow::Context as _;
use podvisor_agent_protocol::ExitStatus;
use tokio::time::{Instant, sleep_until};
use tracing::debug;

use super::signals::{Event, Impatience, Signals, exit_code_of};
use super::terminal::{self, RawMode};
use crate::sandbox::{AgentExit, Sandbox, SandboxError, StdioFds, Streams};

/// Starts the program of container `id`, which has been made, and gives its exit code once
/// it has ended and all its output is written. The sandbox is gone then.
pub(super) async fn run(
    sandbox: Sandbox,
    id: &str,
    streams: Streams,
    signals: &mut Signals,
) -> anyhow::Result<u8> {
    match foreground(&sandbox, id, streams, signals).await? {
        Outcome::Ended(ended) => {
            debug!(status = ?ended.status, "the program has ended");
            if ended.oom_killed {
                super::notice(
                    "the guest had no memory left for the program; give it more with --memory",
                );
            }
            sandbox.shutdown().await;
            Ok(ended.status.shell_code())
        }
        Outcome::GivenUp(signal) => {
            super::notice("the program did not end, so its guest is switched off");
            Ok(exit_code_of(signal))
        }
    }
}

/// The signal that a program gets which writes to a pipe that nobody reads.
const SIGPIPE: u8 = 13;

const SIGKILL: u8 = 9;

/// How long a program may take to end when nobody reads its output any more.
const UNREAD: Duration = Duration::from_secs(2);

/// How it went with a program in the foreground.
enum Outcome {
    /// It ended.
    Ended(AgentExit),
    /// It did not end for all that the user wanted; the last signal's number.
    GivenUp(u8),
}

async fn foreground(
    sandbox: &Sandbox,
    id: &str,
    streams: Streams,
    signals: &mut Signals,
) -> anyhow::Result<Outcome> {
    let agent = sandbox.agent();
    let has_terminal = streams.terminal().is_some();
    let is_raw = has_terminal && streams.has_input();
    let files = own_files(streams.has_input()).context("cannot use podvisor's own streams")?;
    let outputs = sandbox
        .unless_ended(streams.attach(agent.mux(), files))
        .await?;
    // Restored on every way out of here, before anything is said about what happened.
    let _raw = is_raw.then(RawMode::enter).transpose()?;
    sandbox.unless_ended(agent.start(id)).await?;
    debug!("the program runs");
    if has_terminal {
        // The size may have changed while the guest booted.
        resize(sandbox, id);
    }

    let broken = outputs.broken();
    let mut kill_at = None;
    let ended = sandbox.unless_ended(async {
        let ended = agent.wait(id, "").await?;
        outputs.finish().await?;
        Ok::<_, SandboxError>(ended)
    });
    tokio::pin!(ended);
    let mut impatience = Impatience::default();
    loop {
        let event = tokio::select! {
            biased;
            ended = &mut ended => return Ok(Outcome::Ended(of_a_pipe(ended?, kill_at.is_some()))),
            event = signals.next() => event,
            () = broken.notified(), if kill_at.is_none() => {
                kill_at = Some(Instant::now() + UNREAD);
                Event::Forward(SIGPIPE)
            }
            () = sleep_until(kill_at.unwrap_or_else(Instant::now)), if kill_at.is_some() => {
                // The first process of a namespace is not killed by SIGPIPE.
                kill_at = Some(Instant::now() + UNREAD);
                Event::Forward(SIGKILL)
            }
        };
        match event {
            Event::Resized if has_terminal => resize(sandbox, id),
            Event::Resized => {}
            Event::Forward(signal) if impatience.is_over(signal, Instant::now().into_std()) => {
                return Ok(Outcome::GivenUp(signal));
            }
            Event::Forward(signal) => forward(sandbox, id, signal),
        }
    }
}

/// This process's own streams.
fn own_files(has_input: bool) -> io::Result<StdioFds> {
    let stdin = has_input.then(|| io::stdin().as_fd().try_clone_to_owned());
    Ok(StdioFds {
        stdin: stdin.transpose()?,
        stdout: Some(io::stdout().as_fd().try_clone_to_owned()?),
        stderr: Some(io::stderr().as_fd().try_clone_to_owned()?),
    })
}

/// A program that was killed because nobody reads its output died of the broken pipe.
fn of_a_pipe(ended: AgentExit, is_broken: bool) -> AgentExit {
    match ended.status {
        ExitStatus::Signal(SIGKILL) if is_broken => AgentExit {
            status: ExitStatus::Signal(SIGPIPE),
            oom_killed: false,
            ..ended
        },
        _ => ended,
    }
}

/// Passes a signal on, beside everything else: a guest that hangs must not hold up the user.
fn forward(sandbox: &Sandbox, id: &str, signal: u8) {
    let (agent, id) = (sandbox.agent().clone(), id.to_owned());
    tokio::spawn(async move {
        if let Err(error) = agent.signal(&id, "", signal.into(), false).await {
            // The program may have ended meanwhile.
            debug!(signal, %error, "cannot pass the signal on");
        }
    });
}

/// Tells the program's terminal the size of the user's.
fn resize(sandbox: &Sandbox, id: &str) {
    let Some(size) = terminal::size() else {
        return;
    };
    let (agent, id) = (sandbox.agent().clone(), id.to_owned());
    tokio::spawn(async move {
        if let Err(error) = agent.resize(&id, "", size).await {
            debug!(?size, %error, "cannot pass the terminal's size on");
        }
    });
}
