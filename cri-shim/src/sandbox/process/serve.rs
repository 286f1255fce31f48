//! The control socket: requests come in, are carried out side by side, and are answered.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tracing::{debug, warn};

use super::super::error::{RefusalKind, SandboxError};
use super::super::types::{SandboxExit, StdioFds};
use super::super::wire::{
    Answer, CONTROL_VERSION, Call, Frame, FrameError, FrameReader, FrameWriter, Refusal, Reply,
    Request, StdioHeader,
};
use super::Shutdown;
use super::containers::Containers;
use crate::request;

/// Connections at once.
const CONNECTIONS: usize = 32;

/// Requests of one connection that are carried out at once; further ones wait in the socket.
const IN_FLIGHT: usize = 1024;

/// When a connection that could not be accepted is tried again.
const RETRY: Duration = Duration::from_millis(100);

/// Longest message in a refusal, in bytes: parts of it may come from the guest.
const MESSAGE_MAX: usize = 4 << 10;

/// What the answers to requests need.
#[derive(Debug, Clone)]
pub(super) struct Service {
    pub(super) containers: Arc<Containers>,
    /// Takes reasons for the machine's end.
    pub(super) shutdown: mpsc::UnboundedSender<Shutdown>,
    /// How the machine ended, once it has.
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
            accepted = accept, if connections.len() < CONNECTIONS => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(converse(stream, service.clone()));
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
    while connections.join_next().await.is_some() {}
}

async fn has_ended(exit: &mut watch::Receiver<Option<SandboxExit>>) {
    // The sender goes only after it has said how the machine ended.
    let _ = exit.wait_for(Option::is_some).await;
}

/// A reply with the descriptors that go with it.
type Outgoing = (Reply, Vec<OwnedFd>);

/// Serves one connection until its other side closes it or the machine has ended.
async fn converse(stream: UnixStream, service: Service) {
    let stream = Arc::new(stream);
    let (replies, outgoing) = mpsc::channel(IN_FLIGHT);
    let writer = tokio::spawn(write(FrameWriter::new(Arc::clone(&stream)), outgoing));
    // Dropped with this connection: nobody waits any more.
    let (closed, _) = watch::channel(());
    let in_flight = Arc::new(Semaphore::new(IN_FLIGHT));
    let mut exit = service.exit.clone();
    let read = async {
        let mut reader = FrameReader::new(stream);
        loop {
            let Ok(permit) = Arc::clone(&in_flight).acquire_owned().await else {
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
            let (service, replies) = (service.clone(), replies.clone());
            let mut closed = closed.subscribe();
            tokio::spawn(async move {
                let number = request.number;
                let is_wait = matches!(request.call, Call::Wait { .. } | Call::Ended);
                let answer = service.answer(request.call, fds);
                let answer = request::on_behalf(request.request, answer);
                let answer = tokio::select! {
                    answer = answer => answer,
                    // What changes something is carried out whether or not somebody is left to
                    // be told.
                    _ = closed.changed(), if is_wait => return,
                };
                let (answer, fds) = match answer {
                    Ok((answer, fds)) => (Ok(answer), fds),
                    Err(error) => (Err(refusal(&error)), Vec::new()),
                };
                // The connection may be gone.
                let _ = replies.send((Reply { number, answer }, fds)).await;
                drop(permit);
            });
        }
    };
    tokio::select! {
        () = read => {}
        () = has_ended(&mut exit) => {}
    }
    // Those that still work have a sender each; those that wait for processes have been told.
    drop(replies);
    if service.exit.borrow().is_none() {
        drop(closed);
    }
    if let Err(error) = writer.await {
        debug!(%error, "the task that answers ended");
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
        let sent = match serde_json::to_vec(&reply) {
            Ok(body) => writer.send(&body, &fds).await,
            Err(error) => Err(error.into()),
        };
        if let Err(error) = sent {
            debug!(%error, "cannot answer");
            return;
        }
    }
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
            Call::Hello { .. } => Answer::Hello {
                version: CONTROL_VERSION,
            },
            Call::Create(header) => {
                let digests = [&header.image_digest].into_iter().chain(&header.volumes);
                let images = digests.map(|digest| Ok((digest.clone(), fds.next()?)));
                let images = images.collect::<Result<Vec<_>, SandboxError>>()?;
                let log = header.has_log.then(|| fds.next()).transpose()?;
                Answer::Created(containers.create(*header, images, log).await?)
            }
            Call::Start { id } => Answer::Started(containers.start(&id).await?),
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
                let mut exit = containers.exit_of(&id)?;
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
            Call::Stats { id } => Answer::Stats(Box::new(containers.stats(&id).await?)),
            Call::List => Answer::List(containers.list()),
            Call::UpdateResources { id, resources } => {
                containers.update_resources(&id, &resources).await?;
                Answer::Done
            }
            Call::Grow { bytes, patience_ms } => {
                let patience = Duration::from_millis(patience_ms);
                Answer::Grown(containers.grow(bytes, patience).await?)
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
        };
        Ok((answer, Vec::new()))
    }
}
