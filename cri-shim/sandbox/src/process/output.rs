//! Moves a container's output to its log and to attached clients. The log comes first.

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use podvisor_host::stall_timeout::timeout;
use rustix::net::{Shutdown, shutdown};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::super::stdio::{GuestInput, GuestStreams, StdioError, read, spawn, write_all};
use super::super::types::StdioFds;
use super::backlog::{Backlog, Pushed, Readers};
use super::log::{LogError, LogWriter, OutputStream};
use crate::machine::causes;

/// Bytes that are read from a process at a time.
const READ_SIZE: usize = 16 << 10;

/// How long the process waits for a client that takes nothing, before that is detached. Less than
/// the time for the rest of the output after the process's exit.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 4 });

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

#[derive(Debug)]
struct Input {
    guest: GuestInput,
    /// Closed when the first client's input ends.
    once: bool,
}

#[derive(Debug, Default)]
struct Sinks {
    log: Option<LogWriter>,
    /// The log has a fault; logged once until it has none.
    is_log_broken: bool,
    /// The guest's outputs that have not ended.
    outputs: Vec<Weak<UnixStream>>,
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
    backlog: Arc<Backlog>,
    /// The client's file, until its thread ends.
    file: Weak<OwnedFd>,
}

impl Drop for Attacher {
    fn drop(&mut self) {
        self.backlog.complete();
    }
}

/// A piece of output, and the clients that have no room for it: each one's attachment and queue.
struct Waiting {
    bytes: Arc<[u8]>,
    clients: Vec<(u64, Arc<Backlog>)>,
}

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
        {
            let mut sinks = self.sinks();
            sinks.outputs.retain(|output| output.strong_count() > 0);
            let all = outputs.iter().map(|(_, from)| Arc::downgrade(from));
            sinks.outputs.extend(all);
            for attacher in &sinks.attachers {
                attacher.backlog.wait_again();
            }
        }
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

    /// Ends the streams: there are no more processes, and clients are disconnected. Streams that a
    /// guest still holds are closed: nothing of theirs is written after a container's exit.
    pub(super) fn close(&self) {
        let mut sinks = self.sinks();
        self.is_lasting.store(false, Ordering::Release);
        if !*self.ended.borrow() {
            for stream in [OutputStream::Stdout, OutputStream::Stderr] {
                sinks.finish(stream, false);
            }
            for output in sinks.outputs.iter().filter_map(Weak::upgrade) {
                // Fails if the guest has closed it meanwhile.
                let _ = shutdown(&output, Shutdown::Both);
            }
        }
        sinks.clear();
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
        let whole = sinks.attachers.iter().filter(|it| it.backlog.is_whole());
        for file in whole.filter_map(|attacher| attacher.file.upgrade()) {
            // Works only for sockets, which is what podvisor's own programs attach.
            if let Err(error) = shutdown(&file, Shutdown::Both) {
                debug!(%error, "an attacher is not cut off");
            }
        }
    }

    /// Stops waiting for the other clients, which are detached if they have no room for the rest of
    /// the output.
    pub(super) fn hurry(&self) {
        let sinks = self.sinks();
        for attacher in sinks.attachers.iter().filter(|it| !it.backlog.is_whole()) {
            attacher.backlog.let_go();
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
            let backlog = Backlog::new(is_whole.then(|| Arc::clone(&self.readers)));
            let file = Arc::new(file);
            let attacher = Attacher {
                attachment,
                stream,
                backlog: Arc::clone(&backlog),
                file: Arc::downgrade(&file),
            };
            spawn("attach", move || serve_attacher(&backlog, &file))?;
            let mut sinks = self.sinks();
            // Under the lock, so that the last stream's end is either seen or closes this.
            if !*self.ended.borrow() || self.is_lasting.load(Ordering::Acquire) {
                sinks.attachers.push(attacher);
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
                    self.wait_for(waiting);
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

    /// Waits for clients until they have room; detaches those that do not read.
    fn wait_for(&self, waiting: Option<Waiting>) {
        let Some(Waiting { bytes, mut clients }) = waiting else {
            return;
        };
        // Those that are waited for without a limit come last.
        clients.sort_by_key(|(_, backlog)| backlog.is_whole());
        let begin = Instant::now();
        for (attachment, backlog) in clients {
            // All have the same time to make room.
            let patience = PATIENCE.saturating_sub(begin.elapsed());
            let patience = (!backlog.is_whole()).then_some(patience);
            // A client that is gone is detected by the next piece.
            if backlog.push_within(&bytes, patience) == Pushed::Full {
                debug!(attachment, "an attacher that does not read is detached");
                self.sinks().detach(attachment);
            }
        }
    }
}

impl Sinks {
    /// Passes output on; the clients that have no room for it must be waited for, without the lock.
    fn take(&mut self, stream: OutputStream, bytes: &[u8]) -> Option<Waiting> {
        if let Some(log) = &mut self.log {
            let written = log.write(stream, bytes, SystemTime::now());
            self.note(written);
        }
        if self.attachers.is_empty() {
            return None;
        }
        let bytes: Arc<[u8]> = bytes.into();
        let mut clients = Vec::new();
        self.attachers.retain(|attacher| {
            if attacher.stream != stream {
                return true;
            }
            let pushed = attacher.backlog.push(&bytes);
            if pushed == Pushed::Full {
                clients.push((attacher.attachment, Arc::clone(&attacher.backlog)));
            }
            pushed != Pushed::Gone
        });
        (!clients.is_empty()).then_some(Waiting { bytes, clients })
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

    fn note(&mut self, written: Result<(), LogError>) {
        match written {
            Ok(()) => self.is_log_broken = false,
            Err(error) if !self.is_log_broken => {
                self.is_log_broken = true;
                warn!(error = causes(&error), "the container's log");
            }
            Err(_) => {}
        }
    }
}

fn serve_attacher(backlog: &Backlog, file: &OwnedFd) {
    while let Some(piece) = backlog.pop() {
        if let Err(error) = write_all(file.as_fd(), piece.bytes()) {
            debug!(%error, "an attacher is gone");
            return backlog.give_up();
        }
    }
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
