//! Runs a program in the foreground: with podvisor's streams, its signals and its exit code.

use std::future::pending;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use rustix::io::Errno;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tracing::debug;

use crate::cli::keys::{DetachKeys, TerminalEvents, watched_stdin};
use crate::cli::signals::{Event, ForceKillDetector, SIGHUP, Signals, exit_code_of};
use crate::cli::terminal::{self, RawMode};
use crate::sandbox::{
    AttachedStreams, Outputs, ProcessExit, SandboxClient, SandboxError, StdioError, StdioFds,
    StreamSet,
};
use crate::signal::SIGKILL;

/// The signal to a program that writes to a pipe without a reader.
const SIGPIPE: u8 = 13;

/// How long a program may take to end after its output lost its reader.
const SIGPIPE_GRACE: Duration = Duration::from_secs(2);

/// What a program does when its user is gone: the terminal was closed, or nobody reads its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cli) enum Abandoned {
    /// It goes on, and may be attached to again.
    GoesOn,
    /// It gets the signal of a process in its place on the host, SIGHUP or SIGPIPE, and SIGKILL if
    /// it goes on without a reader.
    Ends,
}

/// A process whose streams this process serves.
#[derive(Debug, Clone)]
pub(in crate::cli) struct Program {
    pub(in crate::cli) client: SandboxClient,
    pub(in crate::cli) id: String,
    /// The exec's id; `None` for the container's own process.
    pub(in crate::cli) exec_id: Option<String>,
    pub(in crate::cli) has_terminal: bool,
    pub(in crate::cli) has_input: bool,
    pub(in crate::cli) abandoned: Abandoned,
}

/// The outcome of a program in the foreground.
#[derive(Debug)]
pub(in crate::cli) enum Outcome {
    /// It ended.
    Ended(ProcessExit),
    /// It did not end after several requests; the number of the last signal.
    GivenUp(u8),
    /// The user has detached or is gone, and it continues.
    Left,
    /// Its output cannot be written, and it continues.
    Unwritable(StdioError),
}

/// A program's streams while they are connected to this process's own.
#[derive(Debug)]
pub(in crate::cli) struct ForwardedStreams {
    outputs: Outputs,
    /// Of the user's terminal, if it is raw.
    terminal: Option<Arc<TerminalEvents>>,
    has_terminal: bool,
    _raw: Option<RawMode>,
}

impl Program {
    /// Creates the streams, and returns the ends for the sandbox.
    pub(in crate::cli) fn streams(&self) -> anyhow::Result<(AttachedStreams, StdioFds)> {
        let set = StreamSet {
            stdin: self.has_input,
            stdout: true,
            stderr: !self.has_terminal,
        };
        Ok(AttachedStreams::new(set)?)
    }

    /// Starts to serve this process's own streams. The terminal is raw from now on, and `keys`
    /// detach from the program.
    pub(in crate::cli) fn serve(
        &self,
        streams: AttachedStreams,
        keys: &DetachKeys,
    ) -> anyhow::Result<ForwardedStreams> {
        let mut files = own_files(self.has_input).context("cannot use podvisor's own streams")?;
        let is_raw = self.has_terminal && self.has_input && terminal::is_terminal(io::stdin());
        let raw = is_raw.then(RawMode::enter).transpose()?;
        let terminal = match is_raw {
            true => {
                let (stdin, events) =
                    watched_stdin(keys.clone(), self.abandoned == Abandoned::Ends)?;
                files.stdin = Some(stdin);
                Some(events)
            }
            false => None,
        };
        Ok(ForwardedStreams {
            outputs: streams.serve(files)?,
            terminal,
            // Once it is closed, it is no terminal.
            has_terminal: terminal::is_terminal(io::stdout()),
            _raw: raw,
        })
    }

    /// Waits for the end of the started program and of its output, or until the user leaves it;
    /// forwards signals meanwhile. The terminal is restored before this returns.
    pub(in crate::cli) async fn wait(
        &self,
        served: ForwardedStreams,
        signals: &mut Signals,
    ) -> anyhow::Result<Outcome> {
        let ForwardedStreams {
            outputs,
            terminal,
            has_terminal,
            _raw,
        } = served;
        let (left, hung_up) = (
            notified(terminal.as_deref().map(|events| &events.left)),
            notified(terminal.as_deref().map(|events| &events.hung_up)),
        );
        tokio::pin!(left, hung_up);
        if self.has_terminal {
            // The size may have changed while the guest booted.
            self.resize();
        }
        let broken = outputs.broken();
        let goes_on = self.abandoned == Abandoned::GoesOn;
        let mut is_hung_up = false;
        let mut kill_at = None;
        let ended = async {
            let exit = self.client.wait(&self.id, self.exec_id.as_deref()).await?;
            outputs.finish().await?;
            Ok::<_, SandboxError>(exit)
        };
        tokio::pin!(ended);
        let mut impatience = ForceKillDetector::default();
        loop {
            let event = tokio::select! {
                biased;
                ended = &mut ended => {
                    return Ok(Outcome::Ended(of_a_pipe(ended?, kill_at.is_some())));
                }
                () = &mut left => return Ok(Outcome::Left),
                () = &mut hung_up, if !is_hung_up => {
                    is_hung_up = true;
                    Event::Forward(SIGHUP)
                }
                event = signals.next() => event,
                failure = broken.wait(), if kill_at.is_none() => {
                    if goes_on {
                        return Ok(left_by(failure, has_terminal));
                    }
                    kill_at = Some(Instant::now() + SIGPIPE_GRACE);
                    Event::Forward(SIGPIPE)
                }
                () = sleep_until(kill_at.unwrap_or_else(Instant::now)), if kill_at.is_some() => {
                    // SIGPIPE does not kill the first process of a namespace.
                    kill_at = Some(Instant::now() + SIGPIPE_GRACE);
                    Event::Forward(SIGKILL)
                }
            };
            match event {
                Event::Resized if self.has_terminal => self.resize(),
                Event::Resized => {}
                Event::Forward(SIGHUP) if goes_on => return Ok(Outcome::Left),
                Event::Forward(signal) if impatience.is_over(signal, Instant::now().into_std()) => {
                    return Ok(Outcome::GivenUp(signal));
                }
                Event::Forward(signal) => self.forward(signal),
            }
        }
    }

    /// Forwards a signal in a task of its own: a hanging guest must not block the user.
    fn forward(&self, signal: u8) {
        let program = self.clone();
        tokio::spawn(async move {
            let exec_id = program.exec_id.as_deref();
            let sent = program
                .client
                .signal(&program.id, exec_id, signal.into(), false);
            if let Err(error) = sent.await {
                // The program may have ended meanwhile.
                debug!(signal, %error, "cannot pass the signal on");
            }
        });
    }

    /// Sets the size of the program's terminal to that of the user's.
    fn resize(&self) {
        let Some(size) = terminal::size() else {
            return;
        };
        let program = self.clone();
        tokio::spawn(async move {
            let exec_id = program.exec_id.as_deref();
            let told = program.client.resize(&program.id, exec_id, size);
            if let Err(error) = told.await {
                debug!(?size, %error, "cannot pass the terminal's size on");
            }
        });
    }
}

/// Returns the exit code of a program, and tells the user if it ran out of memory or was left.
pub(in crate::cli) fn exit_code(outcome: &Outcome) -> u8 {
    match outcome {
        Outcome::Ended(exit) => {
            debug!(code = exit.code, "the program has ended");
            // With code 0 the program coped with it.
            if exit.oom_killed && exit.code != 0 {
                crate::cli::notice(
                    "the guest had no memory left for the program; give its machine more with \
                     --memory, of `run` or of `pod create`",
                );
            }
            u8::try_from(exit.code).unwrap_or(u8::MAX)
        }
        Outcome::GivenUp(signal) => exit_code_of(*signal),
        Outcome::Left => {
            crate::cli::notice("left the program, which goes on");
            0
        }
        Outcome::Unwritable(error) => {
            let error = crate::machine::causes(error);
            crate::cli::notice(&format!("{error}; left the program, which goes on"));
            crate::cli::RUN_FAILURE
        }
    }
}

/// Returns the outcome of a program that goes on though its output cannot be written.
fn left_by(failure: Option<StdioError>, has_terminal: bool) -> Outcome {
    match failure {
        // A terminal that was closed.
        Some(StdioError::Output { source, .. })
            if has_terminal && source.raw_os_error() == Some(Errno::IO.raw_os_error()) =>
        {
            Outcome::Left
        }
        Some(error) => Outcome::Unwritable(error),
        None => Outcome::Left,
    }
}

/// Waits for a notification; forever if there are none.
async fn notified(events: Option<&Notify>) {
    match events {
        Some(events) => events.notified().await,
        None => pending().await,
    }
}

/// Returns this process's own streams.
fn own_files(has_input: bool) -> io::Result<StdioFds> {
    let stdin = has_input.then(|| io::stdin().as_fd().try_clone_to_owned());
    Ok(StdioFds {
        stdin: stdin.transpose()?,
        stdout: Some(io::stdout().as_fd().try_clone_to_owned()?),
        stderr: Some(io::stderr().as_fd().try_clone_to_owned()?),
    })
}

/// Treats a program that was killed because its output lost its reader as killed by SIGPIPE.
fn of_a_pipe(exit: ProcessExit, is_broken: bool) -> ProcessExit {
    match exit.code {
        code if is_broken && code == i32::from(exit_code_of(SIGKILL)) => ProcessExit {
            code: exit_code_of(SIGPIPE).into(),
            oom_killed: false,
            ..exit
        },
        _ => exit,
    }
}
