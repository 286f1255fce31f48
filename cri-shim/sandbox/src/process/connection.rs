//! One connection to the control socket: its requests are executed concurrently, and each is
//! answered when it is done.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use podvisor_host::request;
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tracing::{debug, warn};

use super::super::error::SandboxError;
use super::super::types::{RefusalKind, SandboxExit};
use super::super::wire::{
    Answer, Call, Frame, FrameError, FrameReader, FrameWriter, MAX_FRAME, Numbered, Refusal, Reply,
    Request,
};
use super::end::Cause;
use super::fds::Fds;
use super::waits::{MAX_WAITS, Wait, Waits};

/// Most requests that are executed at the same time, not counting those that end something or send
/// signals, and those that wait.
const MAX_CONCURRENT_REQUESTS: usize = 1024;

/// Most requests that are taken from the socket at the same time; others stay there.
const MAX_TAKEN: usize = 4 * MAX_CONCURRENT_REQUESTS;

/// Longest message in a refusal, in bytes: parts of it may come from the guest.
const MESSAGE_MAX: usize = 4 << 10;

/// A reply with its descriptors.
type Outgoing = (Reply, Vec<OwnedFd>);

/// State that the requests of one connection share.
struct Connection {
    replies: mpsc::Sender<Outgoing>,
    cause: Cause,
    in_flight: Arc<Semaphore>,
    taken: Arc<Semaphore>,
    waits: Arc<Waits>,
    /// Dropped when the other side has closed the connection: its waits are cancelled then.
    closed: watch::Sender<()>,
}

/// How a request is executed in parallel with others.
enum Turn {
    /// It ends something or sends a signal: requests that wait for the guest must not delay it.
    AtOnce,
    /// It changes nothing and is answered when an event happens, unless it is abandoned before.
    Wait(Wait),
    /// There are too many waits already.
    Refused,
    /// It counts towards [`MAX_CONCURRENT_REQUESTS`].
    InFlight,
}

/// Waits until it is known how the machine ended.
pub(super) async fn has_ended(exit: &mut watch::Receiver<Option<SandboxExit>>) {
    // The sender is only dropped after it has sent this.
    let _ = exit.wait_for(Option::is_some).await;
}

/// Serves a connection until its other side closes it or the machine has ended. `answer` executes a
/// request.
pub(super) async fn converse<A>(
    stream: UnixStream,
    cause: Cause,
    mut exit: watch::Receiver<Option<SandboxExit>>,
    answer: impl Fn(Call, Fds) -> A,
) where
    A: Future<Output = Result<(Answer, Vec<OwnedFd>), SandboxError>> + Send + 'static,
{
    let stream = Arc::new(stream);
    let (replies, outgoing) = mpsc::channel(MAX_CONCURRENT_REQUESTS);
    let mut writer = tokio::spawn(write(FrameWriter::new(Arc::clone(&stream)), outgoing));
    let connection = Connection {
        replies,
        cause,
        in_flight: Arc::new(Semaphore::new(MAX_CONCURRENT_REQUESTS)),
        taken: Arc::new(Semaphore::new(MAX_TAKEN)),
        waits: Arc::default(),
        closed: watch::Sender::new(()),
    };
    let mut written = None;
    tokio::select! {
        () = connection.read(FrameReader::new(stream), answer) => {}
        () = has_ended(&mut exit) => {}
        // Replies cannot be sent any more: the client must not wait for them.
        end = &mut writer => written = Some(end),
    }
    let Connection {
        replies, closed, ..
    } = connection;
    // Requests in progress have a sender each; waits for processes have been answered.
    drop(replies);
    if exit.borrow().is_none() {
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

impl Connection {
    /// Reads requests and executes them, until the other side closes the connection.
    async fn read<A>(&self, mut reader: FrameReader, answer: impl Fn(Call, Fds) -> A)
    where
        A: Future<Output = Result<(Answer, Vec<OwnedFd>), SandboxError>> + Send + 'static,
    {
        loop {
            let Ok(taken) = Arc::clone(&self.taken).acquire_owned().await else {
                return;
            };
            let (request, fds) = match next(&mut reader).await {
                Ok(Some(Incoming::Request(request, fds))) => (request, fds),
                Ok(Some(Incoming::Unknown { number, error })) => {
                    let answer = async move { Err(unknown(&error)) };
                    self.carry_out(number, Turn::AtOnce, taken, answer);
                    continue;
                }
                Ok(None) => return,
                Err(error) => {
                    warn!(%error, "a control connection is not understood");
                    return;
                }
            };
            if let Call::Abandon { number } = request.call {
                self.waits.abandon(number);
                continue;
            }
            let turn = self.turn(&request);
            let caller = request.request;
            let answer = request::on_behalf(caller, answer(request.call, fds));
            self.carry_out(request.number, turn, taken, answer);
        }
    }

    fn turn(&self, request: &Request) -> Turn {
        if request.call.is_wait() {
            let wait = self.waits.begin(request.number);
            return wait.map_or(Turn::Refused, Turn::Wait);
        }
        match request.call.ends_something() {
            true => Turn::AtOnce,
            false => Turn::InFlight,
        }
    }

    /// Spawns a task that executes a request and sends the reply.
    fn carry_out(
        &self,
        number: u64,
        mut turn: Turn,
        taken: OwnedSemaphorePermit,
        answer: impl Future<Output = Result<(Answer, Vec<OwnedFd>), SandboxError>> + Send + 'static,
    ) {
        // A wait does not keep other requests in the socket.
        let taken = (!matches!(turn, Turn::Wait(_))).then_some(taken);
        let replies = self.replies.clone();
        let mut cause = self.cause.clone();
        let in_flight = Arc::clone(&self.in_flight);
        let mut closed = self.closed.subscribe();
        tokio::spawn(async move {
            let answer = match &mut turn {
                Turn::AtOnce => answer.await,
                Turn::InFlight => {
                    // The semaphore is never closed.
                    let _permit = in_flight.acquire().await.ok();
                    answer.await
                }
                Turn::Refused => Err(too_many_waits()),
                // A request that changes something is completed whether or not its client still
                // waits; this one changes nothing.
                Turn::Wait(wait) => tokio::select! {
                    answer = answer => answer,
                    _ = closed.changed() => return,
                    () = wait.abandoned() => return,
                },
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
}

fn too_many_waits() -> SandboxError {
    let message =
        format!("{MAX_WAITS} requests of the connection wait for something already: end some");
    SandboxError::refused(RefusalKind::ResourceExhausted, message)
}

/// The refusal of a call, or of a kind of something in it, that this podvisor does not know.
fn unknown(error: &serde_json::Error) -> SandboxError {
    let version = env!("CARGO_PKG_VERSION");
    let message = format!(
        "podvisor {version}, which started this machine, does not support the request; start the \
         machine again to use it ({error})"
    );
    SandboxError::refused(RefusalKind::InvalidArgument, message)
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

/// What somebody asks.
pub(super) enum Incoming {
    Request(Request, Fds),
    /// As a newer podvisor may ask.
    Unknown {
        number: u64,
        error: serde_json::Error,
    },
}

impl Incoming {
    pub(super) fn number(&self) -> u64 {
        match self {
            Self::Request(request, _) => request.number,
            Self::Unknown { number, .. } => *number,
        }
    }
}

pub(super) async fn next(reader: &mut FrameReader) -> Result<Option<Incoming>, FrameError> {
    let Some(Frame { body, fds }) = reader.next().await? else {
        return Ok(None);
    };
    Ok(Some(match serde_json::from_slice(&body) {
        Ok(request) => Incoming::Request(request, Fds::new(fds)),
        Err(error) => {
            let (number, error) = Numbered::of(&body, error)?;
            Incoming::Unknown { number, error }
        }
    }))
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

/// Serializes a reply; one that is too long because of the guest's data is replaced by a refusal.
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

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
