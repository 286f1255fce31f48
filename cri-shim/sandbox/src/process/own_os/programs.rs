//! Programs that run in a guest by its agent, as processes of its container.
//!
//! The agent starts a program with all of its input, and tells its output when it has ended: there
//! is no terminal, and nothing is seen before the end.

use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;

use podvisor_guest_agent::{GuestAgentError, Program};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::debug;

use super::super::super::agent::now_ns;
use super::super::super::error::SandboxError;
use super::super::super::stdio::{AttachedStreams, StdioError, StreamSet};
use super::super::super::types::{ProcessExit, RefusalKind, StdioFds};
use super::super::super::wire::ExecHeader;
use super::super::container::{KILLED_EXIT_CODE, finish_exec};
use super::agent_of_machine::{LIMIT, Running, refusal};
use super::vm::Vm;

/// What a program that cannot be started ends with, as in a shell.
const NOT_FOUND: i32 = 127;
const NOT_EXECUTABLE: i32 = 126;

/// What a program ends with whose end is not known for another reason.
const FAILED: i32 = 125;

/// Our ends of a program's streams.
struct Ends {
    stdin: Option<UnixStream>,
    stdout: Option<UnixStream>,
    stderr: Option<UnixStream>,
}

impl Ends {
    fn new(fds: StdioFds) -> Result<Self, StdioError> {
        let end = |fd: Option<std::os::fd::OwnedFd>, name: &'static str| {
            let Some(fd) = fd else { return Ok(None) };
            let stream = StdUnixStream::from(fd);
            let stream = stream.set_nonblocking(true).map(|()| stream);
            let stream = stream.and_then(UnixStream::from_std);
            stream
                .map(Some)
                .map_err(|source| StdioError::SetUp { name, source })
        };
        Ok(Self {
            stdin: end(fds.stdin, "stdin")?,
            stdout: end(fds.stdout, "stdout")?,
            stderr: end(fds.stderr, "stderr")?,
        })
    }

    /// Reads all of the input, or a byte more than a program may get.
    async fn input(&mut self) -> Vec<u8> {
        let mut input = Vec::new();
        if let Some(stdin) = self.stdin.take() {
            let most = Program::MAX_INPUT as u64 + 1;
            if let Err(error) = stdin.take(most).read_to_end(&mut input).await {
                debug!(%error, "a program's input has ended");
            }
        }
        input
    }

    /// Writes all output; a reader that is gone does not matter.
    async fn write(self, stdout: &[u8], stderr: &[u8]) {
        let write = async |stream: Option<UnixStream>, bytes: &[u8]| {
            if let Some(mut stream) = stream
                && let Err(error) = stream.write_all(bytes).await
            {
                debug!(%error, "nobody reads a program's output any more");
            }
        };
        tokio::join!(write(self.stdout, stdout), write(self.stderr, stderr));
    }
}

/// Starts a program in the guest. If it has an input, that is read to its end first, and what goes
/// wrong with the start then is the program's output and exit code.
pub(super) async fn start(
    vm: &Arc<Vm>,
    header: ExecHeader,
    files: StdioFds,
) -> Result<(), SandboxError> {
    let program = program(&header)?;
    let agent = vm.agent("run a program in the guest").await?;
    let (streams, ends) = AttachedStreams::new(StreamSet::of(&files))?;
    let mut ends = Ends::new(ends)?;
    let (sender, number) = watch::channel(None);
    if ends.stdin.is_none() {
        let started = agent.start_program(&program, LIMIT).await;
        let started = match started {
            Ok(number) => number,
            Err(error) if is_of_program(&error) => return Err(not_started(&error)),
            Err(error) => vm.judged(Err(error)).await?,
        };
        sender.send_replace(Some(started));
    }
    let outputs = streams.serve(files)?;
    let exec_id = header.exec_id;
    let exit = vm.container.note_exec(&exec_id);
    vm.programs().push(Running {
        exec_id: exec_id.clone(),
        agent: Arc::clone(&agent),
        number,
    });
    let vm = Arc::clone(vm);
    tokio::spawn(async move {
        let ended = async {
            let number = *sender.borrow();
            let number = match number {
                Some(number) => number,
                None => {
                    let input = ends.input().await;
                    let program = Program { input, ..program };
                    let number = agent.start_program(&program, LIMIT).await?;
                    sender.send_replace(Some(number));
                    number
                }
            };
            agent.program_end(number, LIMIT).await
        };
        let code = match ended.await {
            Ok(end) => {
                ends.write(&end.stdout, &end.stderr).await;
                end.exit.code()
            }
            Err(error) => {
                let error = not_started(&error);
                ends.write(b"", format!("podvisor: {error}\n").as_bytes())
                    .await;
                code(&error)
            }
        };
        finish_exec(&exec_id, outputs).await;
        vm.programs().retain(|program| program.exec_id != exec_id);
        exit.send_replace(Some(ProcessExit {
            code,
            exited_at_ns: now_ns(),
            oom_killed: false,
            of_machine: false,
        }));
    });
    Ok(())
}

/// Sends a signal to a program, as soon as it runs.
pub(super) async fn signal(vm: &Arc<Vm>, exec_id: &str, signal: u32) -> Result<(), SandboxError> {
    let running = |programs: &[Running]| {
        let found = programs.iter().find(|program| program.exec_id == exec_id);
        found.cloned()
    };
    let Some(mut running) = running(&vm.programs()) else {
        // It has ended, or there was none.
        return vm.container.exit(Some(exec_id)).map(drop);
    };
    let known = timeout(LIMIT, running.number.wait_for(Option::is_some));
    let number = known.await.ok().and_then(Result::ok).and_then(|it| *it);
    let Some(number) = number else { return Ok(()) };
    let sent = running.agent.signal_program(number, signal, LIMIT).await;
    vm.judged(sent).await
}

/// Returns the program that a process of a container is in this guest.
fn program(header: &ExecHeader) -> Result<Program, SandboxError> {
    let ExecHeader {
        process, user, tty, ..
    } = header;
    if tty.is_some() || process.terminal().unwrap_or(false) {
        return Err(invalid(
            "the guest's agent runs programs without a terminal: leave it out (-t), attach to the \
             console, or log in over the network",
        ));
    }
    if !matches!(user.as_str(), "" | "0" | "root") || process.user().uid() != 0 {
        return Err(invalid(
            "the guest's agent runs programs as root: name no user, or run `su` or `runuser`",
        ));
    }
    let mut words = process.args().clone().unwrap_or_default();
    if words.is_empty() {
        return Err(invalid("no command"));
    }
    let directory = process.cwd().to_string_lossy();
    if !matches!(&*directory, "" | "/") {
        let begin = ["sh", "-c", "cd \"$0\" && exec \"$@\"", &directory];
        words.splice(0..0, begin.map(str::to_owned));
    }
    let path = words.remove(0);
    Ok(Program {
        path,
        arguments: words,
        environment: process.env().clone().unwrap_or_default(),
        input: Vec::new(),
    })
}

fn invalid(why: &str) -> SandboxError {
    SandboxError::refused(RefusalKind::InvalidArgument, why)
}

fn is_of_program(error: &GuestAgentError) -> bool {
    matches!(error, GuestAgentError::Refused { .. })
}

/// Why a program does not run. The agent passes the C library's words on.
fn not_started(error: &GuestAgentError) -> SandboxError {
    let kind = match error {
        GuestAgentError::Refused { reason, .. } if reason.contains("No such file") => {
            RefusalKind::CommandNotFound
        }
        GuestAgentError::Refused { reason, .. } if reason.contains("Permission denied") => {
            RefusalKind::CommandNotExecutable
        }
        error => return refusal(error),
    };
    SandboxError::refused(kind, error.to_string())
}

fn code(error: &SandboxError) -> i32 {
    match error.kind() {
        Some(RefusalKind::CommandNotFound) => NOT_FOUND,
        Some(RefusalKind::CommandNotExecutable) => NOT_EXECUTABLE,
        // The machine has ended, most likely.
        Some(RefusalKind::NoAgent) => KILLED_EXIT_CODE,
        _ => FAILED,
    }
}
