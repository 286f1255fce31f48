//! PID 1's side of creating a process: its streams, the launcher, the launcher's report.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::process::{Command, Stdio as ChildStdio};
use std::time::Duration;

use podvisor_agent_protocol::{StreamId, api};
use rustix::fs::{Uid, fchown, fstat};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer};
use tokio::net::UnixListener;
use tokio::task::JoinSet;

use crate::cgroup::Cgroup;
use crate::container::process::turns::{ContainerTurns, LaunchLimits};
use crate::container::process::{Process, resize};
use crate::launcher::{self, Confinement, Failure, LaunchReport, LaunchRequest, NewProcess};
use crate::reaper::{Child, Reaper, ended};
use crate::stdio::fd::Endpoint;
use crate::stdio::relay;
use crate::stdio::{StreamClaim, StreamInUse, StreamRegistry};

/// A container with slow mounts takes a second; after this time something hangs.
const LAUNCH_TIMEOUT: Duration = Duration::from_secs(60);
/// A killed launcher ends immediately, unless it is in an uninterruptible system call.
const END_TIMEOUT: Duration = Duration::from_secs(10);
const DEFAULT_SIZE: (u16, u16) = (80, 24);

/// A process cannot be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The request's streams are invalid.
    #[error("stdio: {0}")]
    Streams(&'static str),
    /// A stream id is in use.
    #[error(transparent)]
    StreamInUse(#[from] StreamInUse),
    /// The launcher reports a failure.
    #[error("{message}")]
    Reported {
        /// The kind of failure.
        failure: Failure,
        /// The launcher's message.
        message: String,
    },
    /// The launcher ended without a report.
    #[error("the launcher ended without a report: see the guest's kernel log")]
    Silent,
    /// The launcher took too long.
    #[error("the process was not made within {} s", LAUNCH_TIMEOUT.as_secs())]
    Timeout,
    /// An operation in the guest failed.
    #[error("cannot {action}")]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

fn io_error(action: &'static str) -> impl FnOnce(io::Error) -> LaunchError {
    move |source| LaunchError::Io { action, source }
}

/// The checked streams of a process to be created.
#[derive(Debug)]
pub enum Streams {
    /// A terminal, and the stream that carries it; without one its output is not seen.
    Terminal {
        /// Both directions.
        stream: Option<StreamId>,
        /// Columns and rows.
        size: (u16, u16),
    },
    /// Three separate streams; each one that is missing is /dev/null.
    Pipes {
        /// To the process.
        stdin: Option<StreamId>,
        /// From the process.
        stdout: Option<StreamId>,
        /// From the process.
        stderr: Option<StreamId>,
    },
}

impl Streams {
    /// Checks the streams of a request.
    ///
    /// # Errors
    ///
    /// [`LaunchError::Streams`].
    pub fn new(stdio: &api::Stdio) -> Result<Self, LaunchError> {
        let id = |field: &[u8]| {
            StreamId::from_field(field)
                .map_err(|_| LaunchError::Streams("a stream id is 16 bytes, not all zero"))
        };
        let (stdin, stdout, stderr) = (id(&stdio.stdin)?, id(&stdio.stdout)?, id(&stdio.stderr)?);
        if stdio.terminal {
            if stderr.is_some() || (stdin.is_some() && stdin != stdout) {
                return Err(LaunchError::Streams(
                    "a terminal has one stream, that of stdout",
                ));
            }
            let size = match (stdio.columns, stdio.rows) {
                (0, 0) => DEFAULT_SIZE,
                (columns, rows) => terminal_size(columns, rows).ok_or(LaunchError::Streams(
                    "a terminal has 1 to 65535 columns and rows",
                ))?,
            };
            return Ok(Self::Terminal {
                stream: stdout,
                size,
            });
        }
        let ids: Vec<StreamId> = [stdin, stdout, stderr].into_iter().flatten().collect();
        if ids
            .iter()
            .enumerate()
            .any(|(i, id)| ids.iter().skip(i + 1).any(|other| other == id))
        {
            return Err(LaunchError::Streams("each stream needs an id of its own"));
        }
        Ok(Self::Pipes {
            stdin,
            stdout,
            stderr,
        })
    }

    /// Returns whether the process gets a terminal.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal { .. })
    }
}

/// Checks a terminal's size.
#[must_use]
pub fn terminal_size(columns: u32, rows: u32) -> Option<(u16, u16)> {
    let within = |n| u16::try_from(n).ok().filter(|&n| n > 0);
    Some((within(columns)?, within(rows)?))
}

/// Creates processes of one container.
#[derive(Debug)]
pub struct Launcher<'a> {
    /// Limits on launches, shared by all containers.
    pub launches: &'a LaunchLimits,
    /// Limits on launches of the container.
    pub turns: &'a ContainerTurns,
    /// Reaps the new process.
    pub reaper: &'a Reaper,
    /// Has the host's connections.
    pub hub: &'a StreamRegistry,
    /// libcontainer's name of the container.
    pub name: &'a str,
    /// Directory of libcontainer's states; an exec has a separate one.
    pub state: PathBuf,
    /// Where a console socket may be created; short enough for a socket's name.
    pub directory: PathBuf,
    /// The process's user, as an id of the guest, which owns its streams: it may reopen them, as
    /// /dev/stdout.
    pub uid: u32,
    /// The restrictions that are not passed to libcontainer, for a process with a seccomp filter or
    /// a user namespace.
    pub confinement: Option<Confinement>,
}

impl Launcher<'_> {
    /// Creates a process and connects its streams to the host's.
    ///
    /// # Errors
    ///
    /// [`LaunchError`].
    pub async fn make(&self, kind: NewProcess, streams: Streams) -> Result<Process, LaunchError> {
        match streams {
            Streams::Terminal { stream, size } => self.with_terminal(kind, stream, size).await,
            Streams::Pipes {
                stdin,
                stdout,
                stderr,
            } => self.with_pipes(kind, stdin, stdout, stderr).await,
        }
    }

    async fn with_pipes(
        &self,
        kind: NewProcess,
        stdin: Option<StreamId>,
        stdout: Option<StreamId>,
        stderr: Option<StreamId>,
    ) -> Result<Process, LaunchError> {
        let claim = |id: Option<StreamId>| id.map(|id| self.hub.claim(id)).transpose();
        let (stdin, stdout, stderr) = (claim(stdin)?, claim(stdout)?, claim(stderr)?);
        let (input, child_input) = self.pipe(stdin, Direction::ToProcess)?;
        let (output, child_output) = self.pipe(stdout, Direction::FromProcess)?;
        let (error, child_error) = self.pipe(stderr, Direction::FromProcess)?;
        let mut command = Command::new("/proc/self/exe");
        command
            .stdin(child_input)
            .stdout(child_output)
            .stderr(child_error);
        let (pid, child) = self.run(kind, None, command).await?;

        let mut relays = JoinSet::new();
        if let Some((end, claim)) = input {
            relays.spawn(relay::input(end, child.exit.clone(), claim));
        }
        for (end, claim) in [output, error].into_iter().flatten() {
            relays.spawn(relay::output(
                end,
                relay::OutputKind::Pipe,
                child.exit.clone(),
                claim,
            ));
        }
        Ok(Process::new(pid, child, None, relays))
    }

    /// Creates a pipe for a stream, or opens /dev/null without one: returns our end and the
    /// process's.
    fn pipe(
        &self,
        claim: Option<StreamClaim>,
        direction: Direction,
    ) -> Result<(OurEnd, ChildStdio), LaunchError> {
        let Some(claim) = claim else {
            return Ok((None, ChildStdio::null()));
        };
        let (reader, writer) =
            pipe_with(PipeFlags::CLOEXEC).map_err(|e| io_error("create a pipe")(e.into()))?;
        let (ours, theirs) = match direction {
            Direction::ToProcess => (writer, reader),
            Direction::FromProcess => (reader, writer),
        };
        fchown(&theirs, Some(Uid::from_raw(self.uid)), None)
            .map_err(|e| io_error("change the owner of a pipe")(e.into()))?;
        let ours = Endpoint::new(ours).map_err(io_error("watch a pipe"))?;
        Ok((Some((ours, claim)), theirs.into()))
    }

    async fn with_terminal(
        &self,
        kind: NewProcess,
        stream: Option<StreamId>,
        size: (u16, u16),
    ) -> Result<Process, LaunchError> {
        let claim = stream.map(|id| self.hub.claim(id)).transpose()?;
        let console = Console::bind(self.directory.join(self.launches.console()))?;
        let mut command = Command::new("/proc/self/exe");
        command
            .stdin(ChildStdio::null())
            .stdout(ChildStdio::null())
            .stderr(ChildStdio::null());
        let (pid, child) = self.run(kind, Some(console.path.clone()), command).await?;
        let master = console
            .receive()
            .await
            .map_err(io_error("receive the terminal"))?;
        resize(&master, size).map_err(io_error("set the size of the terminal"))?;
        give(&master, self.uid).map_err(io_error("change the owner of the terminal"))?;

        let mut relays = JoinSet::new();
        if let Some(claim) = claim {
            relays.spawn(relay::terminal(master.clone(), child.exit.clone(), claim));
        } else {
            relays.spawn(relay::discard(master.clone()));
        }
        Ok(Process::new(pid, child, Some(master), relays))
    }

    async fn run(
        &self,
        kind: NewProcess,
        console: Option<PathBuf>,
        mut command: Command,
    ) -> Result<(Pid, Child), LaunchError> {
        let _turn = self.launches.turn(self.turns).await;
        let (reports, child_reports) =
            pipe_with(PipeFlags::CLOEXEC).map_err(|e| io_error("create a pipe")(e.into()))?;
        // The launcher inherits it. No other process can be started in between: there is one
        // thread, and nothing is awaited until it is closed again.
        fcntl_setfd(&child_reports, FdFlags::empty())
            .map_err(|e| io_error("pass a pipe on")(e.into()))?;
        let pipe = ReportPipe::of(&reports, &child_reports).map_err(io_error("look at a pipe"))?;
        let reports = Endpoint::new(reports).map_err(io_error("read the launcher's report"))?;
        let request = LaunchRequest {
            name: self.name.to_owned(),
            state: self.state.clone(),
            console,
            report_fd: child_reports.as_raw_fd(),
            confinement: self.confinement.clone(),
            kind,
        };
        let request = serde_json::to_string(&request)
            .map_err(|e| io_error("write a request for the launcher")(e.into()))?;
        let launch = self.reaper.launch();
        let child = command
            .arg(launcher::SUBCOMMAND)
            .arg(request)
            .env_clear()
            .envs(
                std::env::var_os(crate::log::LEVEL_VARIABLE)
                    .map(|v| (crate::log::LEVEL_VARIABLE, v)),
            )
            .current_dir("/")
            .spawn()
            .map_err(io_error("start the launcher"))?;
        drop(child_reports);
        // Closes our copies of the process's ends, so that their end of file is seen.
        drop(command);

        let mut launcher = launch
            .claim(Pid::from_child(&child))
            .map_err(io_error("watch the launcher"))?;
        let report = tokio::select! {
            biased;
            report = read_report(&reports) => report,
            // Its last output may still be in the pipe, whose other end others may hold.
            _ = ended(&mut launcher.exit) => last_report(&reports),
            () = tokio::time::sleep(LAUNCH_TIMEOUT) => Err(LaunchError::Timeout),
        };
        let made = report.and_then(|report| match report {
            LaunchReport::Made { pid } => {
                let pid = Pid::from_raw(pid).ok_or(LaunchError::Silent)?;
                let child = launch
                    .claim(pid)
                    .map_err(io_error("watch the new process"))?;
                Ok((pid, child))
            }
            LaunchReport::Failed { failure, message } => {
                Err(LaunchError::Reported { failure, message })
            }
        });
        if made.is_err() {
            end_failed(launcher, &pipe, || Cgroup::new(self.name).countable()).await;
        }
        made
    }
}

/// Ends a failed launch: the launcher, and the processes that it has put into the container.
/// Nothing else would end those if the container has stopped them, or if the launcher ended too
/// early.
async fn end_failed(mut launcher: Child, pipe: &ReportPipe, put: impl FnOnce() -> Vec<Pid>) {
    if let Some(pidfd) = &launcher.pidfd {
        // It may have ended in this instant.
        let _ = crate::sys::pidfd_send_signal(pidfd, 9);
    }
    // Until then it may create processes, and files in the directory that it was given.
    let _ = tokio::time::timeout(END_TIMEOUT, ended(&mut launcher.exit)).await;
    for pid in put() {
        // Opened before it is checked, so that exactly this process is killed.
        if let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty())
            && pipe.is_held_by(pid)
        {
            let _ = crate::sys::pidfd_send_signal(&pidfd, 9);
        }
    }
}

/// The pipe of a launcher's report: all processes of its launch hold it under the same number,
/// until they execute their commands.
struct ReportPipe {
    number: i32,
    /// The target of `/proc/PID/fd/NUMBER`.
    link: PathBuf,
}

impl ReportPipe {
    fn of(reader: &OwnedFd, inherited: &OwnedFd) -> io::Result<Self> {
        Ok(Self {
            number: inherited.as_raw_fd(),
            link: PathBuf::from(format!("pipe:[{}]", fstat(reader)?.st_ino)),
        })
    }

    /// Returns whether a process belongs to the launch. Its files, which may be a container's, are
    /// not touched.
    fn is_held_by(&self, pid: Pid) -> bool {
        std::fs::read_link(format!("/proc/{pid}/fd/{}", self.number))
            .is_ok_and(|link| link == self.link)
    }
}

/// Reads until the first line is complete.
async fn read_report(pipe: &Endpoint) -> Result<LaunchReport, LaunchError> {
    let mut received = Vec::new();
    let mut buffer = [0; 1024];
    loop {
        let count = pipe
            .read(&mut buffer)
            .await
            .map_err(io_error("read the launcher's report"))?;
        received.extend_from_slice(buffer.get(..count).unwrap_or_default());
        if let Some(report) = parse_report(&received) {
            return report;
        }
        if count == 0 || received.len() > launcher::REPORT_BYTES {
            return Err(LaunchError::Silent);
        }
    }
}

/// Reads what is in the pipe now.
fn last_report(pipe: &Endpoint) -> Result<LaunchReport, LaunchError> {
    let mut buffer = vec![0; launcher::REPORT_BYTES];
    let count = pipe
        .try_read(&mut buffer)
        .map_err(io_error("read the launcher's report"))?;
    parse_report(buffer.get(..count.unwrap_or(0)).unwrap_or_default())
        .unwrap_or(Err(LaunchError::Silent))
}

fn parse_report(received: &[u8]) -> Option<Result<LaunchReport, LaunchError>> {
    let end = received.iter().position(|&b| b == b'\n')?;
    let line = received.get(..end)?;
    Some(serde_json::from_slice(line).map_err(|_| LaunchError::Silent))
}

enum Direction {
    ToProcess,
    FromProcess,
}

type OurEnd = Option<(Endpoint, StreamClaim)>;

/// Makes a user the owner of a terminal, given by its master.
fn give(master: &Endpoint, uid: u32) -> io::Result<()> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let slave = ioctl_tiocgptpeer(master, flags)?;
    Ok(fchown(slave, Some(Uid::from_raw(uid)), None)?)
}

/// The socket through which libcontainer sends a terminal's master.
struct Console {
    listener: UnixListener,
    path: PathBuf,
}

impl Console {
    fn bind(path: PathBuf) -> Result<Self, LaunchError> {
        let listener = UnixListener::bind(&path).map_err(io_error("listen for the terminal"))?;
        Ok(Self { listener, path })
    }

    /// Receives the terminal; it was sent before the process was reported as created.
    async fn receive(&self) -> io::Result<Endpoint> {
        let (stream, _) = self.listener.accept().await?;
        let mut name = [0; 64];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        loop {
            stream.readable().await?;
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let received = stream.try_io(tokio::io::Interest::READABLE, || {
                let mut parts = [io::IoSliceMut::new(&mut name)];
                Ok(recvmsg(
                    &stream,
                    &mut parts,
                    &mut control,
                    RecvFlags::CMSG_CLOEXEC,
                )?)
            });
            match received {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error),
            }
            let mut descriptors = control.drain().flat_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<OwnedFd>>(),
                _ => Vec::new(),
            });
            let master = descriptors.next().ok_or(io::ErrorKind::UnexpectedEof)?;
            return Endpoint::new(master);
        }
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        // It is in the container's own directory, which is removed with the container.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;
    use proptest::prelude::*;

    fn stdio(stdin: &[u8], stdout: &[u8], stderr: &[u8], terminal: bool) -> api::Stdio {
        api::Stdio {
            stdin: stdin.into(),
            stdout: stdout.into(),
            stderr: stderr.into(),
            terminal,
            ..Default::default()
        }
    }

    #[test]
    fn streams_that_cannot_be_told_apart_are_refused() {
        let (a, b) = ([1; 16], [2; 16]);
        assert!(Streams::new(&stdio(&a, &a, &[], false)).is_err());
        assert!(Streams::new(&stdio(&[], &a, &a, false)).is_err());
        assert!(Streams::new(&stdio(&a, &b, &[], true)).is_err());
        assert!(Streams::new(&stdio(&[], &a, &b, true)).is_err());
        assert!(Streams::new(&stdio(&[9], &[], &[], false)).is_err());
        assert!(
            !Streams::new(&stdio(&[], &[], &[], false))
                .unwrap()
                .is_terminal()
        );
        assert!(
            Streams::new(&stdio(&a, &a, &[], true))
                .unwrap()
                .is_terminal()
        );
    }

    #[test]
    fn a_terminal_has_a_size() {
        let mut request = stdio(&[], &[1; 16], &[], true);
        assert!(matches!(
            Streams::new(&request),
            Ok(Streams::Terminal {
                size: DEFAULT_SIZE,
                ..
            })
        ));
        request.columns = 65536;
        request.rows = 1;
        assert!(Streams::new(&request).is_err());
        request.columns = 120;
        assert!(matches!(
            Streams::new(&request),
            Ok(Streams::Terminal { size: (120, 1), .. })
        ));
    }

    #[test]
    fn the_first_line_of_a_report_counts() {
        let made = b"{\"Made\":{\"pid\":7}}\n{\"Made\":{\"pid\":8}}\n";
        assert_eq!(
            parse_report(made).unwrap().unwrap(),
            LaunchReport::Made { pid: 7 }
        );
        assert!(parse_report(b"{\"Made\":").is_none());
        assert!(parse_report(b"noise\n").unwrap().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_launch_that_failed_leaves_no_process_before_its_command() {
        let (reports, child_reports) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let pipe = ReportPipe::of(&reports, &child_reports).unwrap();
        let sleeping = || Command::new("sleep").arg("1000").spawn().unwrap();
        let mut command = sleeping();
        fcntl_setfd(&child_reports, FdFlags::empty()).unwrap();
        let (mut launcher, mut left) = (sleeping(), sleeping());
        fcntl_setfd(&child_reports, FdFlags::CLOEXEC).unwrap();
        let pids = [&command, &left].map(Pid::from_child);
        let stop = pidfd_open(pids[1], PidfdFlags::empty()).unwrap();
        crate::sys::pidfd_send_signal(&stop, 19).unwrap();

        // Nothing reaps here, so the launcher is not seen to end.
        let launch = Reaper::default().launch();
        let child = launch.claim(Pid::from_child(&launcher)).unwrap();
        end_failed(child, &pipe, || pids.to_vec()).await;
        assert_eq!(launcher.wait().unwrap().signal(), Some(9));
        assert_eq!(left.wait().unwrap().signal(), Some(9));
        assert!(command.try_wait().unwrap().is_none());
        command.kill().unwrap();
        command.wait().unwrap();
    }

    proptest! {
        #[test]
        fn any_report_is_read_without_panic(bytes: Vec<u8>) {
            let _ = parse_report(&bytes);
        }
    }
}
