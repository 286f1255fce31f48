//! The process of one sandbox: `podvisor sandbox`.
//!
//! [`Launching::begin`](super::Launching::begin) starts it, and sends a frame with its
//! configuration and open files on its stdin. It leaves its parent's session, boots the machine,
//! waits for the agent and for a frame with the guest's network, and replies. (If the guest has an
//! operating system of its own, its machine comes later.) From then on it serves its control
//! socket: it keeps the containers' exit codes and writes their logs, whether or not a client is
//! connected. It ends when its machine ends, and its machine when it does.
//!
//! | file | contents |
//! | --- | --- |
//! | `launch` | from the launcher's frame to a guest that is configured |
//! | `serve` | the control socket: connections |
//! | `connection`, `fds` | one connection's requests, each executed and replied to |
//! | `service` | dispatches requests to what is in the guest |
//! | `health` | checks of a container's health |
//! | `guest` | what is in the guest: the agent's containers, or a system of its own |
//! | `containers`, `machine` | implementations of requests |
//! | `container` | one container's state and its processes |
//! | `execs` | starts of further processes, and the end of those that come too late |
//! | `restart` | whether, when and with which streams a container's process is restarted |
//! | `output`, `log`, `backlog` | output to the log and to attached clients |
//! | `own_log` | the log of the process itself |
//! | `own_os` | a guest with an operating system of its own |
//! | `pauses` | pauses of the guest, and its clock |
//! | `end` | the machine's end: when it is due, and the work that is left then |
//! | `maintenance` | periodic work for a running guest: its clock, and removed files |
//! | `images` | which disk holds which image |
//! | `plugs` | which disks are plugged in for which containers |

mod backlog;
mod blocking;
mod connection;
mod container;
mod containers;
#[cfg(test)]
mod drain_tests;
mod end;
mod entries;
mod error;
mod execs;
mod fds;
mod guest;
mod health;
mod images;
mod launch;
mod log;
mod machine;
mod maintenance;
mod output;
mod own_log;
mod own_os;
mod pauses;
mod plugs;
mod restart;
mod serve;
mod service;
mod waits;

use std::cell::Cell;
use std::fs::File;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::time::Duration;

use podvisor_host::request;
use rustix::process::Resource;
use tokio::net::UnixStream;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{debug, info, warn};

use super::error::SandboxError;
use super::jail;
use super::types::GuestNetwork;
use super::wire::{FrameError, FrameReader, FrameWriter, LaunchReply};
use crate::machine::{EarlyVm, causes};
use end::{Cause, Shutdown};
pub use error::ProcessError;
use error::set_up;
pub use images::mount_source as image_source;
use launch::{ConfiguredSandbox, Received};
use service::Service;

/// The grace period of a SIGTERM, which carries none.
const SIGTERM_GRACE: Duration = Duration::from_secs(30);

/// Stack of the threads that may block. The usual 2 MiB can become a huge page.
const STACK: usize = 512 << 10;

/// Runs the process from start to end. Closes all files that it inherited except stdin, stdout and
/// stderr.
///
/// # Safety
/// No value in this process owns a descriptor above 2, and no other thread runs.
///
/// # Errors
/// [`ProcessError`] if there never was a sandbox. The exit of a sandbox is in its directory.
#[allow(unsafe_code)] // The caller's promise is passed on.
pub unsafe fn run() -> Result<(), ProcessError> {
    // SAFETY: by the contract of this function.
    unsafe { jail::close_inherited() };
    jail::limit_arenas();
    // Fails for a process group leader, which a process that was just forked is not.
    if let Err(error) = rustix::process::setsid() {
        debug!(%error, "not in a session of its own");
    }
    rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
    // Files that a guest opens in shared directories, and its connections, count against it.
    let mut files = rustix::process::getrlimit(Resource::Nofile);
    files.current = files.maximum;
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, files) {
        debug!(%error, "failed to raise RLIMIT_NOFILE");
    }
    let early = EarlyVm::begin();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_stack_size(STACK)
        .build()
        .map_err(set_up("start the event loop"))?;
    let done = runtime.block_on(async {
        let launcher = take_stdin()?;
        let mut frames = FrameReader::new(Arc::clone(&launcher));
        let received = launch::receive(&mut frames, early).await?;
        live(launcher, frames, received).await
    });
    // Threads may be blocked in writes to a client that does not read.
    runtime.shutdown_background();
    done
}

/// Takes the launcher's socket from stdin, and replaces it by `/dev/null`.
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

async fn live(
    launcher: Arc<UnixStream>,
    frames: FrameReader,
    received: Received,
) -> Result<(), ProcessError> {
    // From here on a SIGTERM ends the sandbox in good order.
    let mut terminate = signal(SignalKind::terminate()).map_err(set_up("listen for SIGTERM"))?;
    if let Some(begun) = begin(launcher, frames, received, &mut terminate).await? {
        serve_until_end(begun, terminate).await;
    }
    Ok(())
}

/// Creates the sandbox and replies to the launcher; `None` if the launch was cancelled.
async fn begin(
    launcher: Arc<UnixStream>,
    frames: FrameReader,
    received: Received,
    terminate: &mut Signal,
) -> Result<Option<ConfiguredSandbox>, ProcessError> {
    let (told, network) = oneshot::channel();
    let dir = received.header.dir.clone();
    let is_used = Cell::new(false);
    let network = async {
        // The guest's agent has answered.
        is_used.set(true);
        let cut = |_| SandboxError::Control {
            dir,
            source: FrameError::Cut,
        };
        network.await.map_err(cut)
    };
    let request = received.header.request;
    let begun = request::on_behalf(request, launch::boot(received, network));
    let begun = tokio::select! {
        begun = begun => begun,
        () = hung_up(frames, told) => {
            info!("the launcher has exited");
            return Ok(None);
        }
        _ = terminate.recv() => {
            info!("terminated while starting");
            return Ok(None);
        }
    };
    match begun {
        Ok(begun) => {
            let answer = LaunchReply {
                is_clone: begun.is_clone,
                missing_layers: begun.missing_layers.clone(),
                ..LaunchReply::default()
            };
            reply(&launcher, answer).await;
            Ok(Some(begun))
        }
        Err(error) => {
            let failed = LaunchReply {
                failed: Some(causes(&error)),
                is_jail: matches!(error, SandboxError::Jail(_)),
                blames_template: matches!(error, SandboxError::Clone(_)),
                has_unused_cards: !is_used.get(),
                panic: error.panic().cloned(),
                ..LaunchReply::default()
            };
            reply(&launcher, failed).await;
            Err(error.into())
        }
    }
}

/// Serves the control socket until the machine has ended and the rest of the output is handled.
async fn serve_until_end(begun: ConfiguredSandbox, mut terminate: Signal) {
    let guest = begun.guest;
    let (shutdown, mut shutdowns) = mpsc::unbounded_channel();
    let (exit_sender, exit) = watch::channel(None);
    let (cause_sender, cause) = watch::channel(None);
    let cause = Cause {
        stopped: guest.stopped(),
        exit: cause,
        written: exit.clone(),
    };
    let service = Service {
        guest: guest.clone(),
        missing_layers: begun.missing_layers.into(),
        shutdown: shutdown.clone(),
        cause,
        exit,
    };
    let serving = tokio::spawn(serve::serve(begun.listener, service));
    let upkeep = tokio::spawn(guest.clone().upkeep());
    tokio::spawn(own_log::keep_short());
    tokio::spawn(async move {
        while terminate.recv().await.is_some() {
            // Received until the machine has ended.
            let _ = shutdown.send(Shutdown::Within(SIGTERM_GRACE));
        }
    });
    let ended = guest.ended(&mut shutdowns, begun.leaves_nothing);
    let (exit, asked_by) = ended.await;
    upkeep.abort();
    info!(%exit, "the machine has ended");
    cause_sender.send_replace(Some(exit.clone()));
    guest.drain(end::reads_are_over(shutdowns, asked_by)).await;
    end::leave(&begun.record, exit, guest.list(), exit_sender, serving).await;
}

/// Passes on the guest's network when it comes from the launcher, and waits for the launcher's end.
async fn hung_up(mut launcher: FrameReader, told: oneshot::Sender<GuestNetwork>) {
    let Ok(Some(frame)) = launcher.next().await else {
        return;
    };
    match serde_json::from_slice(&frame.body) {
        // There is no receiver if the boot has failed, which is about to be reported.
        Ok(network) => drop(told.send(network)),
        Err(error) => return warn!(%error, "invalid network configuration from the launcher"),
    }
    // No other frames are expected.
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
        warn!(%error, "failed to send the reply to the launcher");
    }
}
