//! The control socket: requests come in, are carried out side by side, and are answered.

use std::future::pending;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, warn};

use super::super::error::{RefusalKind, SandboxError};
use super::super::types::{SandboxExit, StdioFds};
use super::super::wire::{
    Answer, CONTROL_VERSION, Call, DeviceHeader, DeviceKind, Frame, FrameError, FrameReader,
    FrameWriter, Greeting, MAX_FRAME, Refusal, Reply, Request, StdioHeader,
};
use super::containers::{Containers, CreateFiles};
use super::end::{Cause, Shutdown};
use super::waits::{WAITS, Waits};
use crate::request;

/// Connections at once. Each program in the foreground, and each who waits, has one.
const CONNECTIONS: usize = 512;

/// Connections beyond these that are told so at once; further ones wait to be accepted.
const REFUSED: usize = 64;

/// How long one that is refused may take to ask.
const ASKS: Duration = Duration::from_secs(2);

/// Requests of one connection that are carried out at once, but for those that end something or
/// send signals, and those that wait: these wait for no others.
const IN_FLIGHT: usize = 1024;

/// Requests of one connection that are taken from its socket at once; further ones wait there.
const TAKEN: usize = 4 * IN_FLIGHT;

/// When a connection that could not be accepted is tried again.
const RETRY: Duration = Duration::from_millis(100);

/// Longest message in a refusal, in bytes: parts of it may come from the guest.
const MESSAGE_MAX: usize = 4 << 10;

/// What the answers to requests need.
#[derive(Debug, Clone)]
pub(super) struct Service {
    pub(super) containers: Arc<Containers>,
    /// Layers of the jail that the host does not have.
    pub(super) missing_layers: Arc<[String]>,
    /// Takes reasons for the machine's end.
    pub(super) shutdown: mpsc::UnboundedSender<Shutdown>,
    /// How the machine ended, as soon as it is known.
    pub(super) cause: Cause,
    /// As `cause`, once everything is written.
    pub(super) exit: watch::Receiver<Option<SandboxExit>>,
}

/// Serves connections until the machine has ended and everything is answered.
pub(super) async fn serve(listener: UnixListener, service: Service) {
    let mut exit = service.exit.clone();
    let mut connections = JoinSet::new();
    let mut retry_at = Instant::now();
    loop {
        let accept = async {
            sleep_until(retry_at).await;
            listener.accept().await
        };
        tokio::select! {
            accepted = accept, if connections.len() < CONNECTIONS + REFUSED => match accepted {
                Ok((stream, _)) if connections.len() < CONNECTIONS => {
                    let (cause, exit) = (service.cause.clone(), service.exit.clone());
                    let service = service.clone();
                    connections.spawn(converse(stream, cause, exit, move |call, fds| {
                        let service = service.clone();
                        async move { service.answer(call, fds).await }
                    }));
                }
                Ok((stream, _)) => {
                    connections.spawn(refuse(stream));
                }
                // Its other side is gone already, or descriptors are short.
                Err(error) => {
                    warn!(%error, "cannot accept a control connection");
                    retry_at = Instant::now() + RETRY;
                }
            },
            Some(_) = connections.join_next() => {}
            () = has_ended(&mut exit) => break,
        }
    }
    // Who comes now finds nobody, and not a machine that does not answer.
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn has_ended(exit: &mut watch::Receiver<Option<SandboxExit>>) {
    // The sender goes only after it has said how the machine ended.
    let _ = exit.wait_for(Option::is_some).await;
}

/// Answers the first request of a connection that is one too many, and closes it.
async fn refuse(stream: UnixStream) {
    let stream = Arc::new(stream);
    let mut reader = FrameReader::new(Arc::clone(&stream));
    let Ok(Ok(Some((Request { number, .. }, _)))) = timeout(ASKS, next(&mut reader)).await else {
        return;
    };
    let message = format!(
        "there are {CONNECTIONS} connections to the sandbox already, each of a program in the \
         foreground or of somebody who waits: end some"
    );
    let answer = Err(Refusal {
        kind: RefusalKind::ResourceExhausted,
        message,
    });
    if let Ok(body) = serde_json::to_vec(&Reply { number, answer }) {
        // Whoever asked may be gone.
        let _ = FrameWriter::new(stream).send(&body, &[]).await;
    }
}

/// A reply with the descriptors that go with it.
type Outgoing = (Reply, Vec<OwnedFd>);

/// Serves one connection until its other side closes it or the machine has ended. `answer` carries
/// a request out.
async fn converse<A>(
    stream: UnixStream,
    cause: Cause,
    mut exit: watch::Receiver<Option<SandboxExit>>,
    answer: impl Fn(Call, Fds) -> A,
) where
    A: Future<Output = Result<(Answer, Vec<OwnedFd>), SandboxError>> + Send + 'static,
{
    let stream = Arc::new(stream);
    let (replies, outgoing) = mpsc::channel(IN_FLIGHT);
    let mut writer = tokio::spawn(write(FrameWriter::new(Arc::clone(&stream)), outgoing));
    // Dropped with this connection: nobody waits any more.
    let (closed, _) = watch::channel(());
    let in_flight = Arc::new(Semaphore::new(IN_FLIGHT));
    let taken = Arc::new(Semaphore::new(TAKEN));
    let waits = Arc::new(Waits::default());
    let has_exit = exit.clone();
    let read = async {
        let mut reader = FrameReader::new(stream);
        loop {
            let Ok(taken) = Arc::clone(&taken).acquire_owned().await else {
                return;
            };
            let (request, fds) = match next(&mut reader).await {
                Ok(Some(next)) => next,
                Ok(None) => return,
                Err(error) => {
                    warn!(%error, "a control connection is not understood");
                    return;
                }
            };
            let number = request.number;
            if let Call::Abandon { number } = request.call {
                waits.abandon(number);
                continue;
            }
            let is_wait = request.call.is_wait();
            let mut wait = is_wait.then(|| waits.begin(number)).flatten();
            // What waits keeps nothing else in the socket.
            let taken = wait.is_none().then_some(taken);
            let is_one_too_many = is_wait && wait.is_none();
            // Others that wait for the guest must not keep it from being ended.
            let is_end = matches!(
                request.call,
                Call::Shutdown { .. } | Call::Stop { .. } | Call::Signal { .. }
            );
            let replies = replies.clone();
            let mut cause = cause.clone();
            let in_flight = Arc::clone(&in_flight);
            let mut closed = closed.subscribe();
            let answer = answer(request.call, fds);
            tokio::spawn(async move {
                let answer = async {
                    if is_one_too_many {
                        return Err(too_many_waits());
                    }
                    let _permit = match is_end || is_wait {
                        true => None,
                        false => in_flight.acquire().await.ok(),
                    };
                    answer.await
                };
                let answer = request::on_behalf(request.request, answer);
                let abandoned = async {
                    match &mut wait {
                        Some(wait) => wait.abandoned().await,
                        None => pending().await,
                    }
                };
                let answer = tokio::select! {
                    answer = answer => answer,
                    // What changes something is carried out whether or not somebody is left to
                    // be told.
                    _ = closed.changed(), if is_wait => return,
                    () = abandoned => return,
                };
                let (answer, fds) = match answer {
                    Ok((answer, fds)) => (Ok(answer), fds),
                    Err(error) => {
                        let error = explained(error, &mut cause).await;
                        (Err(refusal(&error)), Vec::new())
                    }
                };
                // The connection may be gone.
                let _ = replies.send((Reply { number, answer }, fds)).await;
                drop(taken);
            });
        }
    };
    let mut written = None;
    tokio::select! {
        () = read => {}
        () = has_ended(&mut exit) => {}
        // Nobody is answered any more: whoever asks must not wait for it.
        end = &mut writer => written = Some(end),
    }
    // Those that still work have a sender each; those that wait for processes have been told.
    drop(replies);
    if has_exit.borrow().is_none() {
        drop(closed);
    }
    let written = match written {
        Some(end) => end,
        None => writer.await,
    };
    if let Err(error) = written {
        debug!(%error, "the task that answers ended");
    }
}

fn too_many_waits() -> SandboxError {
    let message =
        format!("{WAITS} requests of the connection wait for something already: end some");
    SandboxError::refused(RefusalKind::ResourceExhausted, message)
}

/// Says that the machine has ended, and how, where that is why its guest could not be reached.
async fn explained(error: SandboxError, cause: &mut Cause) -> SandboxError {
    if !error.is_of_a_lost_guest() {
        return error;
    }
    match cause.known().await {
        Some(exit) => SandboxError::refused(RefusalKind::Internal, exit.to_string()),
        None => error,
    }
}

async fn next(reader: &mut FrameReader) -> Result<Option<(Request, Fds)>, FrameError> {
    let Some(Frame { body, fds }) = reader.next().await? else {
        return Ok(None);
    };
    let request = serde_json::from_slice(&body)?;
    Ok(Some((request, Fds(fds.into_iter()))))
}

async fn write(mut writer: FrameWriter, mut outgoing: mpsc::Receiver<Outgoing>) {
    while let Some((reply, fds)) = outgoing.recv().await {
        let sent = match frame(&reply) {
            Ok(body) => writer.send(&body, &fds).await,
            Err(error) => Err(error),
        };
        if let Err(error) = sent {
            debug!(%error, "cannot answer");
            return;
        }
    }
}

/// A reply as it is sent; one that is too long, by what the guest said, is refused instead.
fn frame(reply: &Reply) -> Result<Vec<u8>, FrameError> {
    let body = serde_json::to_vec(reply)?;
    if body.len() <= MAX_FRAME {
        return Ok(body);
    }
    let answer = Err(Refusal {
        kind: RefusalKind::Internal,
        message: format!("the answer of {} bytes is too long", body.len()),
    });
    let number = reply.number;
    Ok(serde_json::to_vec(&Reply { number, answer })?)
}

fn refusal(error: &SandboxError) -> Refusal {
    let mut message = crate::machine::causes(error);
    if message.len() > MESSAGE_MAX {
        let end = message.floor_char_boundary(MESSAGE_MAX);
        message.truncate(end);
    }
    Refusal {
        kind: error.kind().unwrap_or(RefusalKind::Internal),
        message,
    }
}

/// The descriptors of a request, in their order.
struct Fds(std::vec::IntoIter<OwnedFd>);

impl Fds {
    fn next(&mut self) -> Result<OwnedFd, SandboxError> {
        self.0.next().ok_or_else(|| {
            let message = FrameError::MissingFd.to_string();
            SandboxError::refused(RefusalKind::InvalidArgument, message)
        })
    }

    fn stdio(&mut self, header: StdioHeader) -> Result<StdioFds, SandboxError> {
        let mut file = |is_there: bool| is_there.then(|| self.next()).transpose();
        Ok(StdioFds {
            stdin: file(header.stdin)?,
            stdout: file(header.stdout)?,
            stderr: file(header.stderr)?,
        })
    }
}

impl Service {
    async fn answer(
        &self,
        call: Call,
        mut fds: Fds,
    ) -> Result<(Answer, Vec<OwnedFd>), SandboxError> {
        let containers = &self.containers;
        let answer = match call {
            Call::Hello { .. } => Answer::Hello(Greeting {
                version: CONTROL_VERSION,
                takes_devices: true,
                missing_layers: self.missing_layers.to_vec(),
                tells_pressure: true,
                drops_waits: true,
            }),
            Call::Create(header) => {
                let digests = [&header.image_digest].into_iter().chain(&header.volumes);
                let images = digests.map(|digest| Ok((digest.clone(), fds.next()?)));
                let images = images.collect::<Result<Vec<_>, SandboxError>>()?;
                let log = header.has_log.then(|| fds.next()).transpose()?;
                let is_disk =
                    |device: &&DeviceHeader| matches!(device.source, DeviceKind::Disk { .. });
                let disks = header.devices.iter().filter(is_disk);
                let disks = disks.map(|_| fds.next()).collect::<Result<_, _>>()?;
                let files = CreateFiles { images, log, disks };
                Answer::Created(Containers::create(containers, *header, files).await?)
            }
            Call::Start { id } => Answer::Started(Containers::start(containers, &id).await?),
            Call::Signal {
                id,
                exec_id,
                signal,
                all,
            } => {
                let exec_id = exec_id.as_deref();
                containers.signal(&id, exec_id, signal, all).await?;
                Answer::Done
            }
            Call::Wait { id, exec_id } => {
                Answer::Exit(containers.wait(&id, exec_id.as_deref()).await?)
            }
            Call::Delete { id } => {
                containers.delete(&id).await?;
                Answer::Done
            }
            Call::Exec(header) => {
                let files = fds.stdio(header.stdio)?;
                containers.exec(*header, files).await?;
                Answer::Done
            }
            Call::Attach {
                id,
                stdio,
                is_whole,
            } => {
                let files = fds.stdio(stdio)?;
                containers.attach(&id, files, is_whole).await?;
                Answer::Done
            }
            Call::EndWith { id } => {
                let mut exit = containers.end_with(&id)?;
                let shutdown = self.shutdown.clone();
                tokio::spawn(async move {
                    // An error means that the container was deleted: not what was asked for.
                    if exit.wait_for(Option::is_some).await.is_ok() {
                        let _ = shutdown.send(Shutdown::Done);
                    }
                });
                Answer::Done
            }
            Call::Stop {
                id,
                signal,
                grace_ms,
            } => {
                let grace = Duration::from_millis(grace_ms);
                containers.stop(&id, signal, grace).await?;
                Answer::Done
            }
            Call::EndRestarts { id } => {
                containers.end_restarts(&id)?;
                Answer::Done
            }
            Call::Pause => {
                containers.pause().await?;
                Answer::Done
            }
            Call::Resume => {
                containers.resume().await?;
                Answer::Done
            }
            Call::IsPaused => Answer::IsPaused(containers.is_paused()),
            Call::Resize { id, exec_id, size } => {
                containers.resize(&id, exec_id.as_deref(), size).await?;
                Answer::Done
            }
            Call::ReopenLog { id } => {
                containers.reopen_log(&id, fds.next()?).await?;
                Answer::Done
            }
            Call::LimitLog { id, max_bytes } => {
                containers.limit_log(&id, fds.next()?, max_bytes).await?;
                Answer::Done
            }
            Call::Stats { id, brief } => {
                Answer::Stats(Box::new(containers.stats(&id, brief).await?))
            }
            Call::List => Answer::List(containers.list()),
            Call::UpdateResources { id, resources } => {
                containers.update_resources(&id, &resources).await?;
                Answer::Done
            }
            Call::Grow { bytes, patience_ms } => {
                let patience = Duration::from_millis(patience_ms);
                Answer::Grown(containers.grow(bytes, patience).await?)
            }
            Call::AwaitPressure => {
                containers.await_pressure().await?;
                Answer::Done
            }
            Call::SetCpus { count } => {
                containers.set_cpus(count).await?;
                Answer::Done
            }
            Call::PortForward { port } => {
                let stream = containers.port_forward(port).await?;
                return Ok((Answer::Stream, vec![stream]));
            }
            Call::Console => return Ok((Answer::Stream, vec![containers.console()?])),
            Call::Shutdown { grace_ms } => {
                // Nobody listens when the end has begun anyway.
                let grace = Duration::from_millis(grace_ms);
                let _ = self.shutdown.send(Shutdown::Within(grace));
                Answer::Done
            }
            Call::Ended => {
                let mut exit = self.exit.clone();
                let exit = exit.wait_for(Option::is_some).await;
                let exit = exit.ok().and_then(|exit| exit.clone());
                Answer::Ended(exit.unwrap_or(SandboxExit::Died))
            }
            Call::Abandon { .. } => Answer::Done,
        };
        Ok((answer, Vec::new()))
    }
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
