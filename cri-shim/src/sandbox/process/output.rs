//! Where a container's output goes: its log, and whoever is attached. The log comes first and
//! waits for nobody.

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::sync::watch;
use tracing::{debug, warn};

use super::super::stdio::{GuestInput, GuestStreams, StdioError, read, spawn, write_all};
use super::super::types::StdioFds;
use super::log::{LogWriter, OutputStream};

/// Bytes read from a process at once.
const PIECE: usize = 16 << 10;

/// Pieces that an attacher may be behind: 1 MiB.
const BEHIND: usize = 64;

/// The streams of a container's process, from their start to their end; of each of its processes,
/// when that is started again.
#[derive(Debug)]
pub(super) struct ContainerStreams {
    input: Mutex<Option<Arc<Input>>>,
    /// The input is closed with the first attacher's end.
    stdin_once: bool,
    /// Attachers stay when the streams have ended: the next process has further ones.
    is_lasting: AtomicBool,
    sinks: Mutex<Sinks>,
    /// Streams that have not ended.
    open: AtomicUsize,
    ended: watch::Sender<bool>,
}

#[derive(Debug)]
struct Input {
    guest: GuestInput,
    /// Closed with the first attacher's end.
    once: bool,
}

#[derive(Debug, Default)]
struct Sinks {
    log: Option<LogWriter>,
    /// The log's file refuses lines; said once until it takes some again.
    is_log_broken: bool,
    attachers: Vec<Attacher>,
    /// How many attachments there were.
    attachments: u64,
}

/// One output of the process on its way to somebody.
#[derive(Debug)]
struct Attacher {
    /// The attachment that it is one of the outputs of.
    attachment: u64,
    stream: OutputStream,
    pieces: SyncSender<Arc<[u8]>>,
    /// The process waits for it.
    is_whole: bool,
}

/// A piece for an attacher that the process waits for.
type Waiting = (SyncSender<Arc<[u8]>>, Arc<[u8]>);

impl ContainerStreams {
    /// Begins to read the process's output. `is_lasting` streams go on with another process, until
    /// they are closed.
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
        });
        this.go_on(streams)?;
        Ok(this)
    }

    /// Reads the output of a process, the first one or the next one.
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
        // What a process before this one left open may still come, and counts.
        self.open.fetch_add(outputs.len(), Ordering::AcqRel);
        self.ended.send_replace(outputs.is_empty());
        for (stream, from) in outputs {
            let to = Arc::clone(self);
            spawn(stream.name(), move || to.pump(stream, &from))?;
        }
        Ok(())
    }

    /// No process comes any more: attachers are told the end.
    pub(super) fn close(&self) {
        let mut sinks = self.sinks();
        self.is_lasting.store(false, Ordering::Release);
        if *self.ended.borrow() {
            sinks.attachers.clear();
        }
    }

    fn input(&self) -> MutexGuard<'_, Option<Arc<Input>>> {
        self.input.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all output has come and is in the log.
    pub(super) async fn ended(&self) {
        let mut ended = self.ended.subscribe();
        // The sender is in `self`.
        let _ = ended.wait_for(|ended| *ended).await;
    }

    /// Connects somebody's files, from now on. Whom the process does not wait for, and whose end
    /// of input is not the process's, has seen enough when he ends his own: so it is with other
    /// runtimes, and kubectl waits for it.
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
            let (pieces, receiver) = sync_channel(BEHIND);
            spawn("attach", move || serve_attacher(&receiver, &file))?;
            let mut sinks = self.sinks();
            // Under the lock, so that the last stream's end is either seen or closes this.
            if !*self.ended.borrow() || self.is_lasting.load(Ordering::Acquire) {
                sinks.attachers.push(Attacher {
                    attachment,
                    stream,
                    pieces,
                    is_whole,
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

    /// Goes on with the log in another file.
    pub(super) fn reopen_log(&self, log: OwnedFd) {
        let mut sinks = self.sinks();
        sinks.is_log_broken = false;
        match &mut sinks.log {
            Some(writer) => writer.reopen(File::from(log)),
            none => *none = Some(LogWriter::new(File::from(log))),
        }
    }

    /// Goes on with the log in another file when it has so many bytes, and so on by turns.
    pub(super) fn limit_log(&self, other: OwnedFd, max_bytes: u64) {
        if let Some(log) = &mut self.sinks().log {
            log.limit(File::from(other), max_bytes);
        }
    }

    fn sinks(&self) -> MutexGuard<'_, Sinks> {
        self.sinks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pump(&self, stream: OutputStream, from: &UnixStream) {
        let mut buffer = vec![0; PIECE];
        loop {
            match read(from.as_fd(), &mut buffer) {
                Ok(0) => break,
                Ok(count) => {
                    let waiting = self.sinks().take(stream, &buffer[..count]);
                    for (attacher, piece) in waiting {
                        // One that is gone is found so by the next piece.
                        let _ = attacher.send(piece);
                    }
                }
                Err(error) => {
                    // The guest closed the connection the hard way: what came, came.
                    debug!(stream = stream.name(), %error, "a process's output ended");
                    break;
                }
            }
        }
        let mut sinks = self.sinks();
        let is_last = self.open.fetch_sub(1, Ordering::AcqRel) == 1;
        let is_lasting = self.is_lasting.load(Ordering::Acquire);
        sinks.finish(stream, is_lasting);
        if is_last {
            if !is_lasting {
                // Their threads write what they still have, and close the files.
                sinks.attachers.clear();
            }
            self.ended.send_replace(true);
        }
    }
}

impl Sinks {
    /// Passes output on; what is left waits for its attacher, without the lock.
    fn take(&mut self, stream: OutputStream, bytes: &[u8]) -> Vec<Waiting> {
        if let Some(log) = &mut self.log {
            let written = log.write(stream, bytes, SystemTime::now());
            self.note(written);
        }
        let mut waiting = Vec::new();
        if self.attachers.is_empty() {
            return waiting;
        }
        let piece: Arc<[u8]> = bytes.into();
        self.attachers.retain(|attacher| {
            if attacher.stream != stream {
                return true;
            }
            match attacher.pieces.try_send(Arc::clone(&piece)) {
                Ok(()) => true,
                Err(TrySendError::Full(piece)) if attacher.is_whole => {
                    waiting.push((attacher.pieces.clone(), piece));
                    true
                }
                // One that is gone, or that lets all others wait, is let go.
                Err(_) => false,
            }
        });
        waiting
    }

    /// Its threads write what they still have, and close the files.
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

fn serve_attacher(pieces: &Receiver<Arc<[u8]>>, file: &OwnedFd) {
    while let Ok(piece) = pieces.recv() {
        if let Err(error) = write_all(file.as_fd(), &piece) {
            debug!(%error, "an attacher is gone");
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    /// A container's streams, the guest's ends of stdout and stderr, and the log.
    struct Scene {
        streams: Arc<ContainerStreams>,
        stdout: UnixStream,
        stderr: UnixStream,
        log: tempfile::NamedTempFile,
    }

    fn scene() -> Scene {
        scene_of(false)
    }

    fn scene_of(is_lasting: bool) -> Scene {
        let (stdout, output) = UnixStream::pair().unwrap();
        let (stderr, errors) = UnixStream::pair().unwrap();
        let log = tempfile::NamedTempFile::new().unwrap();
        let file = log.reopen().unwrap();
        let streams = GuestStreams {
            input: None,
            output: Some(Arc::new(output)),
            errors: Some(Arc::new(errors)),
        };
        Scene {
            streams: ContainerStreams::start(streams, Some(file.into()), false, is_lasting)
                .unwrap(),
            stdout,
            stderr,
            log,
        }
    }

    impl Scene {
        /// Ends the streams and gives the log without its times.
        fn log(self) -> String {
            drop((self.stdout, self.stderr));
            let runtime = tokio::runtime::Builder::new_current_thread()
                .build()
                .unwrap();
            runtime.block_on(self.streams.ended());
            let text = std::fs::read_to_string(self.log.path()).unwrap();
            let lines = text.lines().map(|line| line.split_once(' ').unwrap().1);
            lines.map(|line| format!("{line}\n")).collect()
        }
    }

    fn attacher() -> (StdioFds, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let files = StdioFds {
            stdout: Some(theirs.into()),
            ..StdioFds::default()
        };
        (files, ours)
    }

    #[test]
    fn output_goes_to_the_log_and_to_every_attacher() {
        let mut scene = scene();
        let (files, mut one) = attacher();
        scene.streams.attach(files, false).unwrap();
        let (files, mut two) = attacher();
        scene.streams.attach(files, false).unwrap();
        scene.stdout.write_all(b"out\n").unwrap();
        let mut bytes = [0; 4];
        one.read_exact(&mut bytes).unwrap();
        scene.stderr.write_all(b"err\n").unwrap();
        let log = scene.log();
        assert!(
            log.contains("stdout F out\n") && log.contains("stderr F err\n"),
            "{log}"
        );
        let mut text = String::new();
        two.read_to_string(&mut text).unwrap();
        assert_eq!(text, "out\n");
    }

    #[test]
    fn an_attacher_that_does_not_read_holds_up_neither_the_log_nor_another() {
        let mut scene = scene();
        let (files, stuck) = attacher();
        scene.streams.attach(files, false).unwrap();
        let (files, mut reader) = attacher();
        scene.streams.attach(files, false).unwrap();
        let reads = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).unwrap();
            bytes.len()
        });
        let line = [vec![b'x'; 1023], b"\n".to_vec()].concat();
        let count = 8192;
        for _ in 0..count {
            scene.stdout.write_all(&line).unwrap();
        }
        assert_eq!(scene.log().lines().count(), count);
        // A reader is cut off only when it is 1 MiB behind.
        assert!(reads.join().unwrap() >= BEHIND * 1024);
        drop(stuck);
    }

    #[test]
    fn a_reader_that_the_process_waits_for_gets_all_of_it() {
        let mut scene = scene();
        let (files, mut reader) = attacher();
        scene.streams.attach(files, true).unwrap();
        let piece = vec![b'x'; 64 << 10];
        let pieces = 4 * BEHIND;
        let writes = std::thread::spawn(move || {
            for _ in 0..pieces {
                scene.stdout.write_all(&piece).unwrap();
            }
            scene
        });
        // It begins when the writer has come as far as it can.
        let mut bytes = vec![0; 1];
        reader.read_exact(&mut bytes).unwrap();
        let reads = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).unwrap();
            bytes.len() + 1
        });
        writes.join().unwrap().log();
        assert_eq!(reads.join().unwrap(), pieces * (64 << 10));
    }

    #[test]
    fn who_attaches_after_the_end_finds_the_end_at_once() {
        let scene = scene();
        let streams = Arc::clone(&scene.streams);
        scene.log();
        let (files, mut late) = attacher();
        streams.attach(files, false).unwrap();
        let mut text = String::new();
        late.read_to_string(&mut text).unwrap();
        assert_eq!(text, "");
    }

    #[test]
    fn the_output_of_the_next_process_goes_to_the_same_log_and_attachers() {
        let scene = scene_of(true);
        let (files, mut reader) = attacher();
        scene.streams.attach(files, false).unwrap();
        let streams = Arc::clone(&scene.streams);
        let mut first = scene.stdout;
        first.write_all(b"one\n").unwrap();
        drop((first, scene.stderr));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        runtime.block_on(streams.ended());
        let (mut second, output) = UnixStream::pair().unwrap();
        let next = GuestStreams {
            input: None,
            output: Some(Arc::new(output)),
            errors: None,
        };
        streams.go_on(next).unwrap();
        second.write_all(b"two\n").unwrap();
        drop(second);
        runtime.block_on(streams.ended());
        streams.close();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "one\ntwo\n");
        let log = std::fs::read_to_string(scene.log.path()).unwrap();
        assert_eq!(log.lines().count(), 2, "{log}");
    }

    #[test]
    fn a_reopened_log_goes_on_where_the_old_one_ended() {
        let mut scene = scene();
        scene.stdout.write_all(b"old\nbegun").unwrap();
        while !std::fs::read_to_string(scene.log.path())
            .unwrap()
            .contains("old")
        {
            std::thread::yield_now();
        }
        let new = tempfile::NamedTempFile::new().unwrap();
        scene.streams.reopen_log(new.reopen().unwrap().into());
        scene.stdout.write_all(b" new\n").unwrap();
        assert_eq!(scene.log(), "stdout F old\n");
        let text = std::fs::read_to_string(new.path()).unwrap();
        assert!(text.ends_with(" stdout F begun new\n"), "{text}");
    }
}
