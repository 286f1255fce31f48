//! Moves a container's output to its log and to attached clients. The log comes first and waits for
//! no client.

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use rustix::net::{Shutdown, shutdown};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::super::stdio::{GuestInput, GuestStreams, StdioError, read, spawn, write_all};
use super::super::types::StdioFds;
use super::log::{LogWriter, OutputStream};
use crate::stall_timeout::timeout;

/// Bytes that are read from a process at a time.
const READ_SIZE: usize = 16 << 10;

/// Most pieces that a client may be behind: 1 MiB.
const ATTACH_QUEUE: usize = 64;

/// The streams of a container's process, from start to end; if it is restarted, those of each
/// process.
#[derive(Debug)]
pub(super) struct ContainerStreams {
    input: Mutex<Option<Arc<Input>>>,
    /// The input is closed when the first client's input ends.
    stdin_once: bool,
    /// Clients stay attached when the streams have ended: a restarted process has new streams.
    is_lasting: AtomicBool,
    sinks: Mutex<Sinks>,
    /// The number of streams that have not ended.
    open: AtomicUsize,
    ended: watch::Sender<bool>,
    readers: Arc<watch::Sender<Readers>>,
}

/// The clients that the process waits for.
#[derive(Debug, Default)]
struct Readers {
    /// The number of pieces that they have not got yet.
    unread: usize,
    /// They are no longer waited for.
    are_let_go: bool,
}

impl Readers {
    fn are_behind(&self) -> bool {
        self.unread > 0 && !self.are_let_go
    }
}

/// A piece that a client has not got yet, until this is dropped.
#[derive(Debug)]
struct Unread(Arc<watch::Sender<Readers>>);

impl Unread {
    fn new(readers: &Arc<watch::Sender<Readers>>) -> Self {
        readers.send_modify(|readers| readers.unread += 1);
        Self(Arc::clone(readers))
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        self.0.send_modify(|readers| readers.unread -= 1);
    }
}

/// A piece of output for a client.
#[derive(Debug)]
struct Piece {
    bytes: Arc<[u8]>,
    /// Set for a client that the process waits for.
    _unread: Option<Unread>,
}

#[derive(Debug)]
struct Input {
    guest: GuestInput,
    /// Closed when the first client's input ends.
    once: bool,
}

#[derive(Debug, Default)]
struct Sinks {
    log: Option<LogWriter>,
    /// The log's file does not accept lines; logged once until it does again.
    is_log_broken: bool,
    attachers: Vec<Attacher>,
    /// The number of attachments so far.
    attachments: u64,
}

impl Sinks {
    /// Lets go of all that no output comes for any more.
    fn clear(&mut self) {
        // Their threads write the rest, and close the files.
        self.attachers.clear();
        // Open, a log that is removed would keep its space.
        self.log = None;
    }
}

/// One of the process's outputs to a client.
#[derive(Debug)]
struct Attacher {
    /// The attachment that it belongs to.
    attachment: u64,
    stream: OutputStream,
    pieces: SyncSender<Piece>,
    /// The client's file, until its thread ends.
    file: Weak<OwnedFd>,
    /// Set for a client that the process waits for.
    readers: Option<Arc<watch::Sender<Readers>>>,
}

/// A piece for a client that the process waits for.
type Waiting = (SyncSender<Piece>, Piece);

impl ContainerStreams {
    /// Starts to read the process's output. If `is_lasting`, the streams continue with another
    /// process until they are closed.
    pub(super) fn start(
        streams: GuestStreams,
        log: Option<OwnedFd>,
        stdin_once: bool,
        is_lasting: bool,
    ) -> Result<Arc<Self>, StdioError> {
        let this = Arc::new(Self {
            input: Mutex::default(),
            stdin_once,
            is_lasting: AtomicBool::new(is_lasting),
            sinks: Mutex::new(Sinks {
                log: log.map(|fd| LogWriter::new(File::from(fd))),
                ..Sinks::default()
            }),
            open: AtomicUsize::new(0),
            ended: watch::Sender::new(false),
            readers: Arc::default(),
        });
        this.go_on(streams)?;
        Ok(this)
    }

    /// Reads the output of a process, the first one or a restarted one.
    pub(super) fn go_on(self: &Arc<Self>, streams: GuestStreams) -> Result<(), StdioError> {
        let outputs = [
            (OutputStream::Stdout, streams.output),
            (OutputStream::Stderr, streams.errors),
        ];
        let outputs: Vec<_> = outputs
            .into_iter()
            .filter_map(|(stream, from)| Some((stream, from?)))
            .collect();
        *self.input() = streams.input.map(|guest| {
            Arc::new(Input {
                guest,
                once: self.stdin_once,
            })
        });
        // Streams that an earlier process left open may still have output, and count.
        self.open.fetch_add(outputs.len(), Ordering::AcqRel);
        self.ended.send_replace(outputs.is_empty());
        let mut left = outputs.len();
        for (stream, from) in outputs {
            let to = Arc::clone(self);
            let pumped = spawn(stream.name(), move || to.pump(stream, &from));
            // Streams without a thread would never be reported as ended.
            pumped.inspect_err(|_| self.have_ended(left, &mut self.sinks()))?;
            left -= 1;
        }
        Ok(())
    }

    /// Records that `count` streams have ended.
    fn have_ended(&self, count: usize, sinks: &mut Sinks) {
        if self.open.fetch_sub(count, Ordering::AcqRel) != count {
            return;
        }
        if !self.is_lasting.load(Ordering::Acquire) {
            sinks.clear();
        }
        self.ended.send_replace(true);
    }

    /// Ends lasting streams: there are no more processes, and clients are disconnected.
    pub(super) fn close(&self) {
        let mut sinks = self.sinks();
        self.is_lasting.store(false, Ordering::Release);
        if *self.ended.borrow() {
            sinks.clear();
        }
    }

    fn input(&self) -> MutexGuard<'_, Option<Arc<Input>>> {
        self.input.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all output has come, is in the log, and has reached the clients that the process
    /// waits for. False if that takes longer than `limit`, not counting the time in which these
    /// clients read.
    pub(super) async fn drained(&self, limit: Duration) -> bool {
        let complete = async {
            self.ended().await;
            self.readers(|readers| !readers.are_behind()).await;
        };
        let mut complete = pin!(complete);
        let mut left = limit;
        loop {
            tokio::select! {
                biased;
                () = &mut complete => return true,
                () = self.readers(|readers| !readers.are_behind()) => {}
            }
            let begin = Instant::now();
            let next = async {
                tokio::select! {
                    biased;
                    () = &mut complete => true,
                    () = self.readers(Readers::are_behind) => false,
                }
            };
            match timeout(left, next).await {
                Ok(true) => return true,
                Ok(false) => left = left.saturating_sub(begin.elapsed()),
                Err(_) => return false,
            }
        }
    }

    /// Waits until all output has come and is in the log.
    async fn ended(&self) {
        let mut ended = self.ended.subscribe();
        // Cannot fail: the sender is in `self`.
        let _ = ended.wait_for(|ended| *ended).await;
    }

    async fn readers(&self, are: impl FnMut(&Readers) -> bool) {
        let mut readers = self.readers.subscribe();
        // Cannot fail: the sender is in `self`.
        let _ = readers.wait_for(are).await;
    }

    /// Stops waiting for clients. They do not get the rest of the output, so that it reaches the
    /// log.
    pub(super) fn detach_readers(&self) {
        self.readers
            .send_modify(|readers| readers.are_let_go = true);
        let sinks = self.sinks();
        let whole = sinks.attachers.iter().filter(|it| it.readers.is_some());
        for file in whole.filter_map(|attacher| attacher.file.upgrade()) {
            // Works only for sockets, which is what podvisor's own programs attach.
            if let Err(error) = shutdown(&file, Shutdown::Both) {
                debug!(%error, "an attacher is not cut off");
            }
        }
    }

    /// Attaches a client's files, from now on. A client that the process does not wait for, and
    /// whose end of input does not end the process's input, is detached when its input ends: other
    /// runtimes do so, and kubectl relies on it.
    pub(super) fn attach(
        self: &Arc<Self>,
        files: StdioFds,
        is_whole: bool,
    ) -> Result<(), StdioError> {
        let attachment = {
            let mut sinks = self.sinks();
            sinks.attachments += 1;
            sinks.attachments
        };
        let outputs = [
            (OutputStream::Stdout, files.stdout),
            (OutputStream::Stderr, files.stderr),
        ];
        for (stream, file) in outputs {
            let Some(file) = file else { continue };
            let (pieces, receiver) = sync_channel(ATTACH_QUEUE);
            let file = Arc::new(file);
            let weak = Arc::downgrade(&file);
            spawn("attach", move || serve_attacher(&receiver, &file))?;
            let mut sinks = self.sinks();
            // Under the lock, so that the last stream's end is either seen or closes this.
            if !*self.ended.borrow() || self.is_lasting.load(Ordering::Acquire) {
                sinks.attachers.push(Attacher {
                    attachment,
                    stream,
                    pieces,
                    file: weak,
                    readers: is_whole.then(|| Arc::clone(&self.readers)),
                });
            }
        }
        let input = self.input().clone();
        if let (Some(input), Some(file)) = (input, files.stdin) {
            let this = Arc::clone(self);
            spawn("stdin", move || {
                if !input.guest.take_from(file.as_fd()) {
                    return;
                }
                if input.once {
                    input.guest.close();
                } else if !is_whole {
                    this.sinks().detach(attachment);
                }
            })?;
        }
        Ok(())
    }

    /// Continues the log in another file.
    pub(super) fn reopen_log(&self, log: OwnedFd) {
        let mut sinks = self.sinks();
        sinks.is_log_broken = false;
        match &mut sinks.log {
            Some(writer) => writer.reopen(File::from(log)),
            none => *none = Some(LogWriter::new(File::from(log))),
        }
    }

    /// Writes the log alternately to this file and the present one, with at most `max_bytes` each.
    pub(super) fn limit_log(&self, other: OwnedFd, max_bytes: u64) {
        if let Some(log) = &mut self.sinks().log {
            log.limit(File::from(other), max_bytes);
        }
    }

    fn sinks(&self) -> MutexGuard<'_, Sinks> {
        self.sinks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pump(&self, stream: OutputStream, from: &UnixStream) {
        let mut buffer = vec![0; READ_SIZE];
        loop {
            match read(from.as_fd(), &mut buffer) {
                Ok(0) => break,
                Ok(count) => {
                    let waiting = self.sinks().take(stream, &buffer[..count]);
                    for (attacher, piece) in waiting {
                        // A client that is gone is detected by the next piece.
                        let _ = attacher.send(piece);
                    }
                }
                Err(error) => {
                    // The guest reset the connection: what was received is complete.
                    debug!(stream = stream.name(), %error, "a process's output ended");
                    break;
                }
            }
        }
        let mut sinks = self.sinks();
        sinks.finish(stream, self.is_lasting.load(Ordering::Acquire));
        self.have_ended(1, &mut sinks);
    }
}

impl Sinks {
    /// Passes output on; returns pieces whose clients must be waited for, without the lock.
    fn take(&mut self, stream: OutputStream, bytes: &[u8]) -> Vec<Waiting> {
        if let Some(log) = &mut self.log {
            let written = log.write(stream, bytes, SystemTime::now());
            self.note(written);
        }
        let mut waiting = Vec::new();
        if self.attachers.is_empty() {
            return waiting;
        }
        let bytes: Arc<[u8]> = bytes.into();
        self.attachers.retain(|attacher| {
            if attacher.stream != stream {
                return true;
            }
            let piece = Piece {
                bytes: Arc::clone(&bytes),
                _unread: attacher.readers.as_ref().map(Unread::new),
            };
            match attacher.pieces.try_send(piece) {
                Ok(()) => true,
                Err(TrySendError::Full(piece)) if attacher.readers.is_some() => {
                    waiting.push((attacher.pieces.clone(), piece));
                    true
                }
                // A client that is gone, or would make all others wait, is detached.
                Err(_) => false,
            }
        });
        waiting
    }

    /// Detaches a client: its threads write the rest, and close the files.
    fn detach(&mut self, attachment: u64) {
        self.attachers
            .retain(|attacher| attacher.attachment != attachment);
    }

    fn finish(&mut self, stream: OutputStream, is_lasting: bool) {
        if let Some(log) = &mut self.log {
            let written = log.finish(stream, SystemTime::now());
            self.note(written);
        }
        if !is_lasting {
            self.attachers.retain(|attacher| attacher.stream != stream);
        }
    }

    fn note(&mut self, written: std::io::Result<()>) {
        match written {
            Ok(()) => self.is_log_broken = false,
            Err(error) if !self.is_log_broken => {
                self.is_log_broken = true;
                warn!(%error, "cannot write a container's log: lines are lost");
            }
            Err(_) => {}
        }
    }
}

fn serve_attacher(pieces: &Receiver<Piece>, file: &OwnedFd) {
    while let Ok(piece) = pieces.recv() {
        if let Err(error) = write_all(file.as_fd(), &piece.bytes) {
            debug!(%error, "an attacher is gone");
            return;
        }
    }
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
