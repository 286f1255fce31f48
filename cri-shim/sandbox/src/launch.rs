//! Starts the process of a sandbox: this executable again, detached. Its files are passed over a
//! socket that is its stdin, and the guest's network after them.

mod prepare;
mod sandbox;

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Once};
use std::time::Duration;

use podvisor_host::stall_timeout::timeout;
use rustix::process::Signal;
use serde::Serialize;
use tokio::net::UnixStream;
use tracing::{debug, info, warn};

use super::boot_timeout::{BOOT_TIMEOUT_VARIABLE, boot_timeout};
use super::cgroup::{Cgroup, CgroupError, IoLimitError, IoMax, MachineLimits, resolve_io_limits};
use super::client::SandboxClient;
use super::error::SandboxError;
use super::jail;
use super::log_tail::{MAX_STDERR_TAIL, last_line};
use super::oom;
use super::printable::printable;
use super::spawn::{Child, Program};
use super::template::{Shape, THIS_PROGRAM, Template};
use super::types::{GuestNetwork, JailMode, LaunchConfig};
use super::wire::{FrameError, FrameReader, FrameWriter, LaunchHeader, LaunchReply};
use crate::machine::{KernelPanic, NicKind, causes};
use prepare::Prepared;

/// The process's own log in a sandbox's directory.
const LOG: &str = "sandbox.log";

/// What is said of a process that was killed before it said anything itself.
const KILLED: &str = "something killed it: its pod was removed meanwhile, or the host has run out \
    of memory (its kernel's log tells)";

/// Longest path of a directory in which sockets are created, in bytes.
pub const DIR_MAX: usize = 90;

/// Time that a launch may take in addition to its guest's boots.
const LAUNCH_MARGIN: Duration = Duration::from_secs(60);

/// How long a process may take to end once it is killed. One that reads from a file server which
/// does not answer ends only when the server answers.
const KILL_TIMEOUT: Duration = Duration::from_secs(20);

/// The time limit for a process until its guest is up: it may boot one after a clone has failed,
/// and limits both itself. A process that is stopped, or waits for a disk, does not keep these
/// limits.
fn time_limit() -> Duration {
    boot_timeout()
        .saturating_mul(2)
        .saturating_add(LAUNCH_MARGIN)
}

/// A process that is killed when this is dropped, unless it is kept.
#[derive(Debug)]
struct Launched {
    child: Option<Child>,
    cgroup: Option<Cgroup>,
}

impl Launched {
    fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Kills the process, which is of no use any more, and returns how it ended; `None` if that
    /// is not known, as of one that does not end in time.
    async fn ended(&mut self) -> Option<ExitStatus> {
        self.ended_within(KILL_TIMEOUT).await
    }

    async fn ended_within(&mut self, limit: Duration) -> Option<ExitStatus> {
        let child = self.child.as_mut()?;
        child.kill();
        match timeout(limit, child.wait()).await {
            Ok(ended) => ended.ok(),
            Err(_) => {
                warn!(
                    pid = child.id(),
                    "a sandbox's process was killed and does not end"
                );
                None
            }
        }
    }

    /// Whether the process has not been seen to end.
    fn is_running(&self) -> bool {
        self.child.as_ref().is_some_and(|child| !child.has_ended())
    }

    /// Whether the process has ended by its own fault, and not because another process or the
    /// host's kernel killed it.
    async fn has_crashed(&mut self) -> bool {
        let faults = [
            Signal::SEGV,
            Signal::BUS,
            Signal::ABORT,
            Signal::ILL,
            Signal::FPE,
            Signal::SYS,
        ];
        let signal = self.ended().await.and_then(|status| status.signal());
        signal.is_some_and(|signal| faults.map(Signal::as_raw).contains(&signal))
    }

    /// Lets the process live on. It is reaped when it ends, if this process still lives.
    fn keep(mut self) {
        if let Some(mut child) = self.child.take() {
            tokio::spawn(async move { child.wait().await });
        }
        if let Some(cgroup) = self.cgroup.take() {
            cgroup.keep();
        }
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        if let Some(child) = self.child.take() {
            child.discard();
        }
    }
}

/// What the processes of a sandbox are launched with, one after the other.
#[derive(Debug)]
struct Plan {
    program: PathBuf,
    prepared: Prepared,
    cgroup_parent: Option<String>,
    io: Vec<IoMax>,
}

impl Plan {
    /// Starts a process with its configuration, in a directory that has nothing of an earlier one.
    async fn begin(&mut self, template: Option<Template>) -> Result<Process, SandboxError> {
        let program = &self.program;
        let fds = self.prepared.files(template)?;
        let header = &mut self.prepared.header;
        let spawn_error = |source| SandboxError::Spawn {
            program: program.clone(),
            source,
        };
        let is_io_limited = !self.io.is_empty();
        let (ours, theirs) = StdUnixStream::pair().map_err(spawn_error)?;
        ours.set_nonblocking(true).map_err(spawn_error)?;
        let cgroup = match &self.cgroup_parent {
            Some(parent) => {
                let limits = MachineLimits {
                    vcpus: header.vcpus,
                    memory: header.memory,
                    growth: header.growth,
                };
                match make_cgroup(parent, &header.id, limits, self.io.clone(), &header.dir).await {
                    Ok(cgroup) => Some(cgroup),
                    Err(error) if is_io_limited => {
                        return Err(IoLimitError::Group(error).into());
                    }
                    Err(error) => {
                        no_cgroup(&error, &header.id);
                        None
                    }
                }
            }
            None => None,
        };
        let (launched, outside) = spawn(program, header, theirs, cgroup)?;
        match outside {
            Some(error) if is_io_limited => return Err(IoLimitError::Group(error).into()),
            Some(error) => no_cgroup(&error, &header.id),
            None => {}
        }
        if let Some(Err(error)) = launched.pid().map(oom::expose) {
            debug!(id = header.id, %error, "failed to reset the inherited oom_score_adj");
        }
        header.has_cgroup = launched.cgroup.is_some();
        header.denies_devices = launched.cgroup.as_ref().is_some_and(Cgroup::denies_devices);
        let mut process = Process {
            id: header.id.clone(),
            dir: header.dir.clone(),
            launched,
            stream: Arc::new(UnixStream::from_std(ours).map_err(spawn_error)?),
        };
        let limit = time_limit();
        match timeout(limit, process.send(header, &fds)).await {
            Ok(Ok(())) => Ok(process),
            Ok(Err(FrameError::Json(error))) => Err(process.control(error.into())),
            // The process is gone.
            Ok(Err(_)) => Err(process.failed().await),
            Err(_) => Err(process.silent(limit)),
        }
    }

    /// Whether another process can use the cards of one that gave this answer. A socket that
    /// carries frames may be in the middle of one.
    fn has_usable_cards(&self, reply: Option<&LaunchReply>) -> bool {
        let mut nics = self.prepared.header.nics.iter();
        nics.all(|nic| nic.kind == NicKind::Tap)
            || reply.is_some_and(|reply| reply.has_unused_cards)
    }
}

/// A sandbox's process that has its configuration. It is killed when this is dropped.
#[derive(Debug)]
struct Process {
    id: String,
    dir: PathBuf,
    launched: Launched,
    stream: Arc<UnixStream>,
}

impl Process {
    async fn send<T: Serialize>(&self, message: &T, fds: &[OwnedFd]) -> Result<(), FrameError> {
        let body = serde_json::to_vec(message)?;
        let mut writer = FrameWriter::new(Arc::clone(&self.stream));
        writer.send(&body, fds).await
    }

    /// Passes its network to the guest, and returns what the process answers; `None` if it has
    /// ended without an answer.
    async fn configure(&self, network: &GuestNetwork) -> Result<Option<LaunchReply>, SandboxError> {
        let limit = time_limit();
        let answered = async {
            let sent = self.send(network, &[]).await;
            // A process that has failed before does not read this, but has answered.
            let reply = FrameReader::new(Arc::clone(&self.stream)).next().await;
            (sent, reply)
        };
        let Ok((sent, reply)) = timeout(limit, answered).await else {
            return Err(self.silent(limit));
        };
        match reply {
            Ok(Some(frame)) => {
                let reply = serde_json::from_slice(&frame.body);
                Ok(Some(reply.map_err(|error| self.control(error.into()))?))
            }
            Ok(None) | Err(_) => {
                debug!(
                    id = self.id,
                    ?sent,
                    "the sandbox's process has not answered"
                );
                Ok(None)
            }
        }
    }

    /// Kills the process, and returns when nothing is left of it except files in its directory.
    async fn end(mut self) -> Result<(), SandboxError> {
        self.launched.ended().await;
        match self.launched.is_running() {
            true => Err(self.silent(KILL_TIMEOUT)),
            false => Ok(()),
        }
    }

    /// The error of a process that ended without an answer.
    async fn failed(&mut self) -> SandboxError {
        SandboxError::Launch(self.last_words().await)
    }

    async fn last_words(&mut self) -> String {
        last_words(&mut self.launched, &self.dir.join(LOG)).await
    }

    /// The error of a process that reports neither that its guest is up nor why it is not. It is
    /// killed when this is dropped.
    fn silent(&self, waited: Duration) -> SandboxError {
        SandboxError::Unresponsive {
            dir: self.dir.clone(),
            pid: self.launched.pid(),
            waited,
        }
    }

    fn control(&self, source: FrameError) -> SandboxError {
        SandboxError::Control {
            dir: self.dir.clone(),
            source,
        }
    }
}

/// A sandbox whose machine starts while its network is set up. It is killed when dropped.
#[derive(Debug)]
pub struct Launching {
    program: PathBuf,
    process: Process,
    /// The required shape of its template, and the directory where it is looked for.
    wanted: Option<(Shape, PathBuf)>,
    /// How to boot instead, if the process has a template that it can do without.
    cold: Option<Plan>,
}

impl Launching {
    /// Starts a sandbox's process: this executable again. Its guest starts to run.
    ///
    /// # Errors
    /// [`SandboxError`]; nothing runs then.
    pub async fn begin(config: LaunchConfig) -> Result<Self, SandboxError> {
        Self::begin_program(Path::new(THIS_PROGRAM), config).await
    }

    /// As [`Self::begin`], with another executable of podvisor.
    ///
    /// # Errors
    /// [`SandboxError`]; nothing runs then.
    pub async fn begin_program(program: &Path, config: LaunchConfig) -> Result<Self, SandboxError> {
        let cgroup_parent = config.cgroup_parent.clone();
        if !config.io_limits.is_empty() && cgroup_parent.is_none() {
            return Err(IoLimitError::NoGroup.into());
        }
        let io = resolve_io_limits(&config.io_limits)?;
        let templates = match config.snapshot {
            Some(_) => None,
            None => config.templates.clone(),
        };
        let wanted = templates.and_then(|dir| Some((Shape::of(&config)?, dir)));
        let template = match (&config.snapshot, &wanted) {
            (Some(snapshot), _) => Some(Template::of_snapshot(snapshot)?),
            (None, Some((shape, dir))) => shape.find(program, dir),
            (None, None) => None,
        };
        let mut plan = Plan {
            program: program.to_owned(),
            prepared: Prepared::new(config)?,
            cgroup_parent,
            io,
        };
        let is_optional = wanted.is_some() && template.is_some();
        Ok(Self {
            program: program.to_owned(),
            process: plan.begin(template).await?,
            wanted,
            cold: is_optional.then_some(plan),
        })
    }

    /// Passes its network to the guest, and returns when it is configured. If the guest of a
    /// template's clone does not work, another one boots. If the future is dropped before that,
    /// nothing is left of the sandbox except files in its directory.
    ///
    /// # Errors
    /// [`SandboxError`]; nothing runs then.
    pub async fn finish(mut self, network: GuestNetwork) -> Result<SandboxClient, SandboxError> {
        let mut reply = self.process.configure(&network).await?;
        if let Some(cold) = self.cold.take()
            && self.blames_template(reply.as_ref()).await
        {
            if let Some((shape, templates)) = &self.wanted {
                shape.discard(&self.program, templates);
            }
            if !has_booted(reply.as_ref()) && cold.has_usable_cards(reply.as_ref()) {
                self.process = boot_instead(self.process, reply, cold).await?;
                reply = self.process.configure(&network).await?;
            }
        }
        if let Some((shape, templates)) = &self.wanted
            && has_booted(reply.as_ref())
        {
            shape.make_later(&self.program, templates);
        }
        let Process { id, dir, .. } = &self.process;
        match reply {
            Some(LaunchReply {
                failed: None,
                is_clone,
                missing_layers,
                ..
            }) => {
                info!(id, is_clone, ?missing_layers, "the sandbox runs");
                // With the same limit as its boot.
                let client = SandboxClient::connect_within(dir, boot_timeout()).await?;
                self.process.launched.keep();
                Ok(client)
            }
            Some(LaunchReply {
                failed: Some(why),
                is_jail: true,
                ..
            }) => Err(SandboxError::JailRefused(printable(&why, MAX_STDERR_TAIL))),
            Some(LaunchReply {
                panic: Some(panic), ..
            }) => Err(SandboxError::Panicked(note_panic(id, panic))),
            Some(LaunchReply {
                failed: Some(why), ..
            }) => Err(SandboxError::Launch(printable(&why, MAX_STDERR_TAIL))),
            None => Err(self.process.failed().await),
        }
    }

    /// Whether the process, which had a template, shows by its answer or its end that the template
    /// is of no use.
    async fn blames_template(&mut self, reply: Option<&LaunchReply>) -> bool {
        match reply {
            // A process boots if the template does not suit.
            Some(reply) => has_booted(Some(reply)) || reply.blames_template,
            None => self.process.launched.has_crashed().await,
        }
    }

    /// Kills the process; returns when it is gone, or does not end.
    pub async fn cancel(self) {
        // It is logged, and reaped when it ends.
        let _ = self.process.end().await;
    }
}

/// Starts a process that boots in place of one that gave this answer, because its clone has no
/// working guest.
async fn boot_instead(
    mut process: Process,
    reply: Option<LaunchReply>,
    mut cold: Plan,
) -> Result<Process, SandboxError> {
    let LaunchReply { failed, panic, .. } = reply.unwrap_or_default();
    if let Some(panic) = panic {
        note_panic(&process.id, panic);
    }
    let why = match failed {
        Some(why) => printable(&why, MAX_STDERR_TAIL),
        None => process.last_words().await,
    };
    warn!(
        id = process.id,
        why, "the clone of a template has no working guest: the guest boots"
    );
    // Both have the same names: control group, sockets, record.
    process.end().await?;
    cold.begin(None).await
}

/// Logs a panic; returns it without anything that a terminal acts on.
fn note_panic(id: &str, panic: KernelPanic) -> KernelPanic {
    let panic = panic.map(printable);
    info!(id, log = ?panic.log(), "the guest's kernel panicked");
    panic
}

/// Whether a process's guest is up and is not a clone.
fn has_booted(reply: Option<&LaunchReply>) -> bool {
    reply.is_some_and(|reply| reply.failed.is_none() && !reply.is_clone)
}

/// Starts the process in its group. It waits for its configuration on `stdin`. Also returns why it
/// is not in the group, if there was one.
fn spawn(
    program: &Path,
    header: &LaunchHeader,
    stdin: StdUnixStream,
    mut cgroup: Option<Cgroup>,
) -> Result<(Launched, Option<CgroupError>), SandboxError> {
    let log = header.dir.join(LOG);
    // Readable, too: the process reads the part that it keeps when it drops the oldest.
    let stderr = OpenOptions::new()
        .create(true)
        .read(true)
        .append(true)
        .mode(0o600)
        .open(&log)
        .map_err(|source| SandboxError::File {
            action: "open",
            path: log,
            source,
        })?;
    let passed = [BOOT_TIMEOUT_VARIABLE, "RUST_BACKTRACE"];
    let passed = passed.map(|name| std::env::var_os(name).map(|value| (name, value)));
    let execution = Program {
        path: program,
        arguments: &["podvisor", "sandbox", &header.id],
        environment: passed.into_iter().flatten().collect(),
        stdin: stdin.into(),
        stderr: stderr.into(),
        new_pids: header.jail == JailMode::Enforced && jail::can_change_identity(),
    };
    let in_group = cgroup.as_ref().and_then(|group| {
        let started = group
            .open()
            .and_then(|group| execution.start_in(group.as_fd()));
        let refused = |error: &io::Error| debug!(id = header.id, %error, "no process in its group");
        started.inspect_err(refused).ok()
    });
    let mut outside = None;
    let child = match in_group {
        Some(child) => child,
        None => {
            let child = execution.start().map_err(|source| SandboxError::Spawn {
                program: program.to_owned(),
                source,
            })?;
            // It has not begun its work.
            cgroup = cgroup.and_then(|group| match group.take(child.id()) {
                Ok(()) => Some(group),
                Err(error) => {
                    outside = Some(error);
                    None
                }
            });
            child
        }
    };
    if let Some(group) = &mut cgroup {
        group.unlock();
    }
    let launched = Launched {
        child: Some(child),
        cgroup,
    };
    Ok((launched, outside))
}

/// Logs once at a higher level that sandboxes have no control groups of their own, and each time at
/// debug level.
fn no_cgroup(error: &CgroupError, id: &str) {
    static SAID: Once = Once::new();
    let why = causes(error);
    SAID.call_once(|| match rustix::process::geteuid().is_root() {
        // Then nothing limits how much of the node their machines use.
        true => warn!(why, "sandboxes have no control groups of their own"),
        false => info!(why, "sandboxes have no control groups of their own"),
    });
    debug!(id, why, "the sandbox has no control group of its own");
}

/// Creates a control group without blocking this thread.
async fn make_cgroup(
    parent: &str,
    id: &str,
    limits: MachineLimits,
    io: Vec<IoMax>,
    dir: &Path,
) -> Result<Cgroup, CgroupError> {
    let (parent, id, dir) = (parent.to_owned(), id.to_owned(), dir.to_owned());
    let path = dir.clone();
    let making =
        tokio::task::spawn_blocking(move || Cgroup::create(&parent, &id, limits, &io, &dir));
    making.await.unwrap_or_else(|error| {
        Err(CgroupError::Step {
            step: "make the control group of",
            path,
            source: io::Error::other(error),
        })
    })
}

/// Returns the last log line of a process that ended too early, and its exit status.
async fn last_words(launched: &mut Launched, log: &Path) -> String {
    // The process has closed its end.
    let status = launched.ended().await;
    let is_killed = status.is_some_and(|status| status.signal() == Some(Signal::KILL.as_raw()));
    let last = match last_line(log) {
        Some(last) => last,
        None if is_killed => KILLED.to_owned(),
        None => "it said nothing".to_owned(),
    };
    match status {
        Some(status) => format!("{last} ({status})"),
        None => last,
    }
}

#[cfg(test)]
#[path = "launch_tests.rs"]
mod tests;
