//! Starts the process of a sandbox: this executable again, detached. Its files are passed over a
//! socket that is its stdin, and the guest's network after them.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Once};
use std::time::Duration;

use podvisor_agent_protocol::validate_id;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use rustix::process::Signal;
use serde::Serialize;
use tokio::net::UnixStream;
use tracing::{debug, info, warn};

use super::cgroup::{Cgroup, CgroupError, IoLimitError, IoMax, MachineLimits, resolve_io_limits};
use super::error::{SandboxError, printable};
use super::jail;
use super::log_tail::{MAX_STDERR_TAIL, last_line};
use super::spawn::{Child, Program};
use super::template::{Shape, THIS_PROGRAM, Template};
use super::types::{GuestNetwork, JailMode, LaunchConfig};
use super::wire::{
    FrameError, FrameReader, FrameWriter, LAUNCH_VERSION, LaunchHeader, LaunchReply, MAX_FDS,
    NicHeader,
};
use super::{BOOT_TIMEOUT_VARIABLE, SandboxClient, boot_timeout, cgroup, oom, record};
use crate::machine::{Transport, causes};
use crate::request;
use crate::stall_timeout::timeout;

/// The control socket in a sandbox's directory.
pub(super) const CONTROL_SOCKET: &str = "control.sock";

/// The process's own log in a sandbox's directory.
const LOG: &str = "sandbox.log";

/// What is said of a process that was killed before it said anything itself.
const KILLED: &str = "something killed it: its pod was removed meanwhile, or the host has run out \
    of memory (its kernel's log tells)";

/// Longest path of a directory in which sockets are created, in bytes.
pub(crate) const DIR_MAX: usize = 90;

/// Time that a launch may take in addition to its guest's boots.
const LAUNCH_MARGIN: Duration = Duration::from_secs(60);

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

    /// Kills the process, which is of no use any more, and returns how it ended.
    async fn ended(&mut self) -> Option<ExitStatus> {
        let child = self.child.as_mut()?;
        child.kill();
        child.wait().await.ok()
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

/// A sandbox whose machine starts while its network is set up. It is killed when dropped.
#[derive(Debug)]
pub struct Launching {
    program: PathBuf,
    id: String,
    dir: PathBuf,
    launched: Launched,
    stream: Arc<UnixStream>,
    /// The required shape of its template, and the directory where it is looked for.
    wanted: Option<(Shape, PathBuf)>,
    has_template: bool,
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
        let dir = config.dir.clone();
        let cgroup_parent = config.cgroup_parent.clone();
        let is_io_limited = !config.io_limits.is_empty();
        if is_io_limited && cgroup_parent.is_none() {
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
        let (mut header, fds) = prepare(config, template)?;
        let spawn_error = |source| SandboxError::Spawn {
            program: program.to_owned(),
            source,
        };
        let (ours, theirs) = StdUnixStream::pair().map_err(spawn_error)?;
        ours.set_nonblocking(true).map_err(spawn_error)?;
        let cgroup = match &cgroup_parent {
            Some(parent) => {
                let limits = MachineLimits {
                    vcpus: header.vcpus,
                    memory: header.memory,
                    growth: header.growth,
                };
                match make_cgroup(parent, &header.id, limits, io, &dir).await {
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
        let (launched, outside) = spawn(program, &header, theirs, cgroup)?;
        match outside {
            Some(error) if is_io_limited => return Err(IoLimitError::Group(error).into()),
            Some(error) => no_cgroup(&error, &header.id),
            None => {}
        }
        if let Some(Err(error)) = launched.pid().map(oom::expose) {
            debug!(id = header.id, %error, "failed to reset the inherited oom_score_adj");
        }
        header.has_cgroup = launched.cgroup.is_some();
        let stream = Arc::new(UnixStream::from_std(ours).map_err(spawn_error)?);
        let launching = Self {
            program: program.to_owned(),
            id: header.id.clone(),
            dir,
            launched,
            stream,
            wanted,
            has_template: header.has_template,
        };
        let limit = time_limit();
        match timeout(limit, launching.send(&header, &fds)).await {
            Ok(Ok(())) => Ok(launching),
            Ok(Err(FrameError::Json(error))) => Err(launching.control(error.into())),
            // The process is gone.
            Ok(Err(_)) => Err(launching.failed().await),
            Err(_) => Err(launching.silent(limit)),
        }
    }

    /// Passes its network to the guest, and returns when it is configured. If the future is dropped
    /// before that, nothing is left of the sandbox except files in its directory.
    ///
    /// # Errors
    /// [`SandboxError`]; nothing runs then.
    pub async fn finish(mut self, network: GuestNetwork) -> Result<SandboxClient, SandboxError> {
        let limit = time_limit();
        let answered = async {
            let sent = self.send(&network, &[]).await;
            // A process that has failed before does not read this, but has answered.
            let reply = FrameReader::new(Arc::clone(&self.stream)).next().await;
            (sent, reply)
        };
        let Ok((sent, reply)) = timeout(limit, answered).await else {
            return Err(self.silent(limit));
        };
        let reply: Option<LaunchReply> = match reply {
            Ok(Some(frame)) => {
                let reply = serde_json::from_slice(&frame.body);
                Some(reply.map_err(|error| self.control(error.into()))?)
            }
            Ok(None) | Err(_) => {
                debug!(
                    id = self.id,
                    ?sent,
                    "the sandbox's process has not answered"
                );
                None
            }
        };
        let is_clone = reply.as_ref().is_some_and(|reply| reply.is_clone);
        let has_booted = matches!(&reply, Some(reply) if reply.failed.is_none() && !reply.is_clone);
        let is_bad = match &reply {
            // A process boots if the template does not suit.
            Some(reply) => has_booted || reply.blames_template,
            None => self.launched.has_crashed().await,
        };
        if let Some((shape, templates)) = &self.wanted {
            if self.has_template && is_bad {
                shape.discard(&self.program, templates);
            }
            if has_booted {
                shape.make_later(&self.program, templates);
            }
        }
        match reply {
            Some(LaunchReply {
                failed: None,
                missing_layers,
                ..
            }) => {
                info!(id = self.id, is_clone, ?missing_layers, "the sandbox runs");
                // With the same limit as its boot.
                let client = SandboxClient::connect_within(&self.dir, boot_timeout()).await?;
                self.launched.keep();
                Ok(client)
            }
            Some(LaunchReply {
                failed: Some(why),
                is_jail: true,
                ..
            }) => Err(SandboxError::JailRefused(printable(&why, MAX_STDERR_TAIL))),
            Some(LaunchReply {
                panic: Some(panic), ..
            }) => {
                let panic = panic.map(printable);
                info!(id = self.id, log = ?panic.log(), "the guest's kernel panicked");
                Err(SandboxError::Panicked(panic))
            }
            Some(LaunchReply {
                failed: Some(why), ..
            }) => Err(SandboxError::Launch(printable(&why, MAX_STDERR_TAIL))),
            None => Err(self.failed().await),
        }
    }

    /// Kills the process; returns when it is gone.
    pub async fn cancel(mut self) {
        self.launched.ended().await;
    }

    async fn send<T: Serialize>(&self, message: &T, fds: &[OwnedFd]) -> Result<(), FrameError> {
        let body = serde_json::to_vec(message)?;
        let mut writer = FrameWriter::new(Arc::clone(&self.stream));
        writer.send(&body, fds).await
    }

    /// The error of a process that ended without an answer.
    async fn failed(self) -> SandboxError {
        let log = self.dir.join(LOG);
        SandboxError::Launch(last_words(self.launched, &log).await)
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

/// Checks the configuration, and opens the files that are given by path.
fn prepare(
    config: LaunchConfig,
    template: Option<Template>,
) -> Result<(LaunchHeader, Vec<OwnedFd>), SandboxError> {
    validate_id(&config.id).map_err(SandboxError::Id)?;
    if !config.dir.is_absolute() || config.dir.as_os_str().len() > DIR_MAX {
        return Err(SandboxError::Dir {
            dir: config.dir,
            most: DIR_MAX,
        });
    }
    // Control socket, record, kernel, initramfs, template's files, shared directory, console,
    // events.
    let others = 9;
    if config.nics.len() + others > MAX_FDS {
        return Err(SandboxError::TooManyNics {
            count: config.nics.len(),
            most: MAX_FDS - others,
        });
    }
    let file = |action, path: &Path, source| SandboxError::File {
        action,
        path: path.to_owned(),
        source,
    };
    clear(&config.dir).map_err(|source| file("clear", &config.dir, source))?;
    let open = |path: &PathBuf| {
        let opened = File::open(path).map(OwnedFd::from);
        opened.map_err(|source| file("open", path, source))
    };
    let mut fds = vec![
        control_socket(&config.dir)?,
        record::create(&config.dir)
            .map_err(|source| file("create the record in", &config.dir, source))?
            .into(),
        open(&config.kernel)?,
        open(&config.initramfs)?,
    ];
    let has_template = template.is_some();
    if let Some(Template { state, memory }) = template {
        fds.extend([state, memory]);
    }
    let mut nics = Vec::new();
    for nic in config.nics {
        nics.push(NicHeader {
            kind: nic.kind,
            mac: nic.mac,
            mtu: nic.mtu,
        });
        fds.push(nic.fd);
    }
    if let Some(shared) = &config.shared_dir {
        fds.push(open(shared)?);
    }
    if let Some(console) = &config.console {
        let created = File::create(console);
        fds.push(
            created
                .map_err(|source| file("create", console, source))?
                .into(),
        );
    }
    let has_events = config.events.is_some();
    fds.extend(config.events.map(OwnedFd::from));
    let header = LaunchHeader {
        version: LAUNCH_VERSION,
        request: request::current(),
        id: config.id,
        hostname: config.hostname,
        dir: config.dir,
        vcpus: config.vcpus,
        max_vcpus: config.max_vcpus,
        memory: config.memory,
        growth: config.growth,
        image_slots: config.image_slots,
        nics,
        has_shared_dir: config.shared_dir.is_some(),
        users: config.users,
        has_console: config.console.is_some(),
        has_events,
        sysctls: config.sysctls,
        pci: config.transport == Transport::Pci,
        psi: config.psi,
        must_clone: config.snapshot.is_some(),
        jail: config.jail,
        // Known when the process exists.
        has_cgroup: false,
        has_template,
    };
    Ok((header, fds))
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

/// Removes what an earlier sandbox left in the directory: its record, its sockets and its
/// control group.
fn clear(dir: &Path) -> io::Result<()> {
    record::remove(dir)?;
    cgroup::remove_of(dir);
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_socket() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Creates the socket that the process will listen on: so the kernel reports the process's pid to
/// its peers, not this one's.
fn control_socket(dir: &Path) -> Result<OwnedFd, SandboxError> {
    let path = dir.join(CONTROL_SOCKET);
    let bound = || -> rustix::io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        bind(socket.as_fd(), &SocketAddrUnix::new(&path)?)?;
        Ok(socket)
    };
    bound().map_err(|error| SandboxError::File {
        action: "make the socket",
        path: path.clone(),
        source: error.into(),
    })
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
async fn last_words(mut launched: Launched, log: &Path) -> String {
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
