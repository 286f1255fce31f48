//! The process of one sandbox: `podvisor sandbox`.
//!
//! It is started by [`Launching::begin`](super::Launching::begin), which sends it a frame with its
//! configuration and open files on its stdin. It leaves its parent's session, boots the machine,
//! waits for the agent and for a frame with the guest's network, and answers. From then on it
//! serves its control socket: it holds the containers' exit codes and writes their logs, whether or
//! not somebody is connected. It ends when its machine ends, and its machine when it does.
//!
//! | file | what for |
//! | --- | --- |
//! | `serve` | the control socket: requests and answers |
//! | `containers`, `machine` | what the requests do |
//! | `container` | one container's state and its processes |
//! | `restart` | whether, when and as what a container's process is started again |
//! | `output`, `log` | output to the log and to attachers |
//! | `end` | the machine's end: when it is due, and what is left to do then |
//! | `images` | which disk holds which image |
//! | `plugs` | which disks are plugged in for which containers |

mod container;
mod containers;
#[cfg(test)]
mod drain_tests;
mod end;
mod entries;
mod images;
mod log;
mod machine;
mod output;
mod plugs;
mod restart;
mod serve;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener as StdUnixListener, UnixStream as StdUnixStream};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Resource;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{debug, info, warn};

use super::agent::{GuestConfig, Share};
use super::events::EventLog;
use super::jail::{self, CallFilter};
use super::template::Template;
use super::types::{GuestNetwork, JailMode};
use super::wire::{
    FrameError, FrameReader, FrameWriter, LAUNCH_VERSION, LaunchHeader, LaunchReply,
};
use super::{BuiltSandbox, Sandbox, SandboxConfig, SandboxError};
use crate::machine::{
    Boot, GuestFiles, MachineConfig, Nic, SHARE_TAG, SharedDir, Transport, causes,
};
use crate::request;
use containers::Containers;
use end::{Cause, Shutdown};
pub(crate) use images::mount_source as image_source;
use serve::Service;

/// The grace period of a SIGTERM, which names none.
const GRACE: Duration = Duration::from_secs(30);

/// How often a guest is told the time.
const CLOCK_EVERY: Duration = Duration::from_secs(600);

/// Where the guest has the shared directory.
pub(super) const SHARE_PATH: &str = "/run/podvisor/shared";

/// Connections to the control socket that wait to be accepted: of those that were closed
/// meanwhile, too, while the process is stopped.
const BACKLOG: i32 = 4096;

/// Why the process could not take up its work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessError {
    /// The process is not what it should be.
    #[error("failed to {action}")]
    SetUp {
        /// What was tried.
        action: &'static str,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// It was not started by podvisor.
    #[error("stdin is not the socket on which podvisor sends a sandbox's configuration")]
    NotLaunched(#[source] FrameError),
    /// There is no sandbox; whoever launched it was told.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
}

fn set_up(action: &'static str) -> impl FnOnce(io::Error) -> ProcessError {
    move |source| ProcessError::SetUp { action, source }
}

/// The whole life of the process. Closes whatever files it inherited beyond stdin, stdout and
/// stderr.
///
/// # Safety
/// No value in this process owns a descriptor above 2, and no other thread runs.
///
/// # Errors
/// [`ProcessError`] when there never was a sandbox. How one ended is in its directory.
#[allow(unsafe_code)] // The caller's promise is passed on.
pub unsafe fn run() -> Result<(), ProcessError> {
    // SAFETY: by the contract of this function.
    unsafe { jail::close_inherited() };
    jail::limit_arenas();
    // Fails for the leader of a group, which a process that was just forked is not.
    if let Err(error) = rustix::process::setsid() {
        debug!(%error, "not in a session of its own");
    }
    rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
    // What a guest opens in shared directories, and its connections, count against it.
    let mut files = rustix::process::getrlimit(Resource::Nofile);
    files.current = files.maximum;
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, files) {
        debug!(%error, "no more open files than usual");
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(set_up("start the event loop"))?;
    let done = runtime.block_on(async {
        let launcher = take_stdin()?;
        let mut frames = FrameReader::new(Arc::clone(&launcher));
        let (launch, fds) = receive(&mut frames).await?;
        live(launcher, frames, launch, fds).await
    });
    // Threads may sit in writes to somebody who does not read.
    runtime.shutdown_background();
    done
}

/// Takes the launcher's socket from stdin, where `/dev/null` goes.
fn take_stdin() -> Result<Arc<UnixStream>, ProcessError> {
    let take = || {
        let socket = rustix::stdio::stdin().try_clone_to_owned()?;
        rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
        let socket = StdUnixStream::from(socket);
        socket.set_nonblocking(true)?;
        UnixStream::from_std(socket).map(Arc::new)
    };
    take().map_err(set_up("take the launcher's socket from stdin"))
}

/// The open files of a launch.
struct LaunchFiles {
    listener: UnixListener,
    record: File,
    files: GuestFiles,
    template: Option<Template>,
    nics: Vec<OwnedFd>,
    share: Option<jail::Share>,
    console: Option<File>,
    events: Option<EventLog>,
}

/// A sandbox whose guest is configured.
struct Begun {
    sandbox: Sandbox,
    listener: UnixListener,
    record: File,
    events: Option<EventLog>,
    is_clone: bool,
    missing_layers: Vec<String>,
}

async fn receive(
    frames: &mut FrameReader,
) -> Result<(LaunchHeader, std::vec::IntoIter<OwnedFd>), ProcessError> {
    let frame = frames.next().await;
    let frame = frame.and_then(|frame| frame.ok_or(FrameError::Cut));
    let frame = frame.map_err(ProcessError::NotLaunched)?;
    let launch: LaunchHeader = serde_json::from_slice(&frame.body)
        .map_err(|error| ProcessError::NotLaunched(error.into()))?;
    Ok((launch, frame.fds.into_iter()))
}

fn files(
    launch: &LaunchHeader,
    mut fds: std::vec::IntoIter<OwnedFd>,
) -> Result<LaunchFiles, SandboxError> {
    if launch.version != LAUNCH_VERSION {
        return Err(SandboxError::Version {
            dir: launch.dir.clone(),
            theirs: launch.version,
            ours: LAUNCH_VERSION,
        });
    }
    let control = |source: FrameError| SandboxError::Control {
        dir: launch.dir.clone(),
        source,
    };
    let mut next = || fds.next().ok_or_else(|| control(FrameError::MissingFd));
    let listener = listen(next()?).map_err(|error| control(error.into()))?;
    let record = next()?.into();
    let (kernel, initramfs) = (next()?, next()?);
    let template = match launch.has_template {
        true => Some(Template {
            state: next()?,
            memory: next()?,
        }),
        false => None,
    };
    let nics = launch
        .nics
        .iter()
        .map(|_| next())
        .collect::<Result<_, _>>()?;
    let shared_dir = launch.has_shared_dir.then(&mut next).transpose()?;
    let share = shared_dir.map(jail::Share::new).transpose();
    let share = share.map_err(|source| SandboxError::File {
        action: "copy the mounts of what is shared in",
        path: launch.dir.clone(),
        source,
    })?;
    let console = launch.has_console.then(&mut next).transpose()?;
    let events = launch.has_events.then(&mut next).transpose()?;
    Ok(LaunchFiles {
        listener,
        record,
        files: GuestFiles::from_files(kernel.into(), initramfs.into())?,
        template,
        nics,
        share,
        console: console.map(File::from),
        events: events.map(|fd| EventLog::new(fd.into())),
    })
}

/// Listens here and not in the launcher: so peers are told this process's number.
fn listen(socket: OwnedFd) -> io::Result<UnixListener> {
    rustix::net::listen(socket.as_fd(), BACKLOG)?;
    UnixListener::from_std(StdUnixListener::from(socket))
}

async fn live(
    launcher: Arc<UnixStream>,
    frames: FrameReader,
    launch: LaunchHeader,
    fds: std::vec::IntoIter<OwnedFd>,
) -> Result<(), ProcessError> {
    // From here on a SIGTERM is one to be obeyed in good order.
    let mut terminate = signal(SignalKind::terminate()).map_err(set_up("listen for SIGTERM"))?;
    let image_slots = launch.image_slots;
    // Its disks are not written, so all that it wrote goes with it.
    let leaves_nothing = !launch.has_shared_dir && !launch.has_console;
    let (told, network) = oneshot::channel();
    let dir = launch.dir.clone();
    let network = async {
        let cut = |_| SandboxError::Control {
            dir,
            source: FrameError::Cut,
        };
        network.await.map_err(cut)
    };
    let begun = request::on_behalf(launch.request, async {
        let files = files(&launch, fds)?;
        boot(launch, files, network).await
    });
    let begun = tokio::select! {
        begun = begun => begun,
        () = hung_up(frames, told) => {
            info!("whoever launched the sandbox is gone");
            return Ok(());
        }
        _ = terminate.recv() => {
            info!("terminated while starting");
            return Ok(());
        }
    };
    let Begun {
        sandbox,
        listener,
        record,
        events,
        is_clone,
        missing_layers,
    } = match begun {
        Ok(begun) => begun,
        Err(error) => {
            let failed = LaunchReply {
                failed: Some(causes(&error)),
                is_jail: matches!(error, SandboxError::Jail(_)),
                blames_template: matches!(error, SandboxError::Clone(_)),
                ..LaunchReply::default()
            };
            reply(&launcher, failed).await;
            return Err(error.into());
        }
    };
    let begun = LaunchReply {
        is_clone,
        missing_layers: missing_layers.clone(),
        ..LaunchReply::default()
    };
    reply(&launcher, begun).await;
    drop(launcher);

    let sandbox = Arc::new(sandbox);
    let containers = Arc::new(Containers::new(Arc::clone(&sandbox), image_slots, events));
    let (shutdown, mut shutdowns) = mpsc::unbounded_channel();
    let (exit_sender, exit) = watch::channel(None);
    let (cause_sender, cause) = watch::channel(None);
    let cause = Cause {
        stopped: sandbox.machine().stopped(),
        exit: cause,
        written: exit.clone(),
    };
    let service = Service {
        containers: Arc::clone(&containers),
        missing_layers: missing_layers.into(),
        shutdown: shutdown.clone(),
        cause,
        exit,
    };
    let serving = tokio::spawn(serve::serve(listener, service));
    let clock = tokio::spawn({
        let containers = Arc::clone(&containers);
        async move {
            let mut times = tokio::time::interval(CLOCK_EVERY);
            // The first comes at once, when the guest has just been told.
            times.tick().await;
            loop {
                times.tick().await;
                containers.set_clock().await;
            }
        }
    });
    tokio::spawn(async move {
        while terminate.recv().await.is_some() {
            // Heard until the end has come.
            let _ = shutdown.send(Shutdown::Within(GRACE));
        }
    });
    let (exit, asked_by) = end::ended(&sandbox, &containers, &mut shutdowns, leaves_nothing).await;
    clock.abort();
    info!(%exit, "the machine has ended");
    cause_sender.send_replace(Some(exit.clone()));
    end::drain(&containers, end::reads_are_over(shutdowns, asked_by)).await;
    end::leave(&record, exit, &containers, exit_sender, serving).await;
    Ok(())
}

/// Starts the machine, as a clone when there is a template that suits this host, and configures
/// its guest once its network is known.
async fn boot(
    launch: LaunchHeader,
    files: LaunchFiles,
    network: impl Future<Output = Result<GuestNetwork, SandboxError>>,
) -> Result<Begun, SandboxError> {
    let kept = |source| SandboxError::File {
        action: "keep open the files of",
        path: launch.dir.clone(),
        source,
    };
    let share = launch.has_shared_dir.then(|| Share {
        tag: SHARE_TAG.to_owned(),
        path: SHARE_PATH.to_owned(),
    });
    let guest = GuestConfig {
        hostname: launch.hostname,
        shares: share.into_iter().collect(),
        sysctls: launch.sysctls,
        ..GuestConfig::default()
    };
    let config = |boot| -> io::Result<SandboxConfig> {
        let nics = files.nics.iter().zip(&launch.nics);
        let nics = nics.map(|(fd, nic)| {
            Ok(Nic {
                kind: nic.kind,
                fd: fd.try_clone()?,
                mac: nic.mac,
                mtu: nic.mtu,
            })
        });
        let share = files.share.as_ref().map(|share| {
            Ok::<_, io::Error>(SharedDir {
                dir: share.as_fd().try_clone_to_owned()?,
                users: launch.users,
            })
        });
        Ok(SandboxConfig {
            guest: guest.clone(),
            machine: MachineConfig {
                boot,
                cpus: launch.vcpus,
                max_cpus: launch.max_vcpus,
                memory: launch.memory,
                growth: launch.growth,
                disks: Vec::new(),
                spare_disks: launch.image_slots,
                nics: nics.collect::<io::Result<_>>()?,
                share: share.transpose()?,
                transport: match launch.pci {
                    true => Transport::Pci,
                    false => Transport::Mmio,
                },
                psi: launch.psi,
                console: files.console.as_ref().map(File::try_clone).transpose()?,
            },
        })
    };
    let clone = files.template.map(|template| {
        let snapshot = template.open()?;
        let boot = match launch.must_clone {
            true => Boot::Warm(snapshot),
            false => Boot::Template(snapshot),
        };
        let config = config(boot).map_err(kept)?;
        BuiltSandbox::new(config)
    });
    let clone = match clone.transpose() {
        Err(error) if !launch.must_clone => {
            let why = causes(&error);
            info!(why, "no clone of the template: the guest boots");
            None
        }
        clone => clone?,
    };
    let is_clone = clone.is_some();
    let built = match clone {
        Some(clone) => clone,
        None => BuiltSandbox::new(config(Boot::Cold(files.files)).map_err(kept)?)?,
    };
    let mut missing_layers = Vec::new();
    if launch.jail == JailMode::Enforced {
        let adds_vcpus = built.may_grow_cpus();
        let missing = jail::close(files.share.as_ref(), CallFilter::Enforced { adds_vcpus })?;
        missing_layers.extend(missing.iter().map(ToString::to_string));
    }
    if !launch.has_cgroup {
        missing_layers.push("control group".to_owned());
    }
    let started = built.start_with(network).await;
    let sandbox = started.map_err(|error| match is_clone && error.is_of_no_guest() {
        true => SandboxError::Clone(Box::new(error)),
        false => error,
    })?;
    info!(is_clone, "the sandbox is ready");
    Ok(Begun {
        sandbox,
        listener: files.listener,
        record: files.record,
        events: files.events,
        is_clone,
        missing_layers,
    })
}

/// Passes on the guest's network when the launcher says it, and waits until that is gone.
async fn hung_up(mut launcher: FrameReader, told: oneshot::Sender<GuestNetwork>) {
    let Ok(Some(frame)) = launcher.next().await else {
        return;
    };
    match serde_json::from_slice(&frame.body) {
        // Nobody listens any more when the boot has failed, which is about to be answered.
        Ok(network) => drop(told.send(network)),
        Err(error) => return warn!(%error, "the launcher's word of the network"),
    }
    // There is nothing else to be said.
    let _ = launcher.next().await;
}

async fn reply(launcher: &Arc<UnixStream>, reply: LaunchReply) {
    let Ok(body) = serde_json::to_vec(&reply) else {
        return;
    };
    let sent = FrameWriter::new(Arc::clone(launcher))
        .send(&body, &[])
        .await;
    if let Err(error) = sent {
        warn!(%error, "whoever launched the sandbox does not hear the answer");
    }
}
