//! The streams of a container, from a guest that is a socket, to logs and clients.

use std::io::{Read as _, Write as _};
use std::thread::JoinHandle;

use podvisor_host::blocking::refuse_threads;
use tokio::time::sleep;

use super::super::backlog::LIMIT;
use super::*;

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(120);

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
        streams: ContainerStreams::start(streams, Some(file.into()), false, is_lasting).unwrap(),
        stdout,
        stderr,
        log,
    }
}

impl Scene {
    /// Ends the streams and returns the log without its times.
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

/// An attacher of both outputs, and its ends of them.
fn attacher_of_both() -> (StdioFds, UnixStream, UnixStream) {
    let (mut files, stdout) = attacher();
    let (stderr, theirs) = UnixStream::pair().unwrap();
    files.stderr = Some(theirs.into());
    (files, stdout, stderr)
}

#[test]
fn an_attacher_that_reads_gets_all_of_it() {
    let mut scene = scene();
    let (files, mut reader) = attacher();
    scene.streams.attach(files, false).unwrap();
    let reads = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).unwrap();
        bytes.len()
    });
    let line = [vec![b'x'; 1023], b"\n".to_vec()].concat();
    let count = 8 * LIMIT / line.len();
    for _ in 0..count {
        scene.stdout.write_all(&line).unwrap();
    }
    assert_eq!(scene.log().lines().count(), count);
    assert_eq!(reads.join().unwrap(), count * line.len());
}

#[test]
fn an_attacher_that_does_not_read_is_detached_as_a_whole() {
    let mut scene = scene();
    let (files, stuck, mut errors) = attacher_of_both();
    scene.streams.attach(files, false).unwrap();
    // Otherwise it would be waited for.
    scene.streams.hurry();
    let line = [vec![b'x'; 1023], b"\n".to_vec()].concat();
    let count = 4 * LIMIT / line.len();
    for _ in 0..count {
        scene.stdout.write_all(&line).unwrap();
    }
    let mut text = Vec::new();
    errors.read_to_end(&mut text).unwrap();
    assert_eq!(text, b"");
    assert_eq!(scene.log().lines().count(), count);
    drop(stuck);
}

#[test]
fn nothing_is_written_after_the_exit_for_a_guest_that_keeps_its_outputs_open() {
    let mut scene = scene();
    let (files, mut reader) = attacher();
    scene.streams.attach(files, false).unwrap();
    scene.stdout.write_all(b"begun").unwrap();
    let mut bytes = [0; 5];
    reader.read_exact(&mut bytes).unwrap();
    scene.streams.close();
    let text = || std::fs::read_to_string(scene.log.path()).unwrap();
    assert!(text().ends_with(" stdout P begun\n"), "{}", text());
    let before = text();
    let piece = [b'x'; 1 << 10];
    // What is on its way when the stream is closed may still be taken.
    let mut writes = (0..10_000).map(|_| scene.stdout.write_all(&piece));
    let error = writes.find_map(Result::err).unwrap();
    assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
    scene.stderr.write_all(b"lost\n").unwrap_err();
    assert_eq!(text(), before);
    assert_eq!(reader.read(&mut bytes).unwrap(), 0);
}

#[test]
fn a_reader_that_the_process_waits_for_gets_all_of_it() {
    let mut scene = scene();
    let (files, mut reader) = attacher();
    scene.streams.attach(files, true).unwrap();
    let piece = vec![b'x'; 64 << 10];
    let pieces = 4 * LIMIT / piece.len();
    let writes = std::thread::spawn(move || {
        for _ in 0..pieces {
            scene.stdout.write_all(&piece).unwrap();
        }
        scene
    });
    // It starts when the writer cannot continue.
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

#[tokio::test]
async fn outputs_that_nobody_can_read_have_ended() {
    let scene = scene_of(true);
    drop((scene.stdout, scene.stderr));
    scene.streams.ended().await;
    let streams = Arc::clone(&scene.streams);
    let (_stdout, output) = UnixStream::pair().unwrap();
    let (_stderr, errors) = UnixStream::pair().unwrap();
    let next = GuestStreams {
        input: None,
        output: Some(Arc::new(output)),
        errors: Some(Arc::new(errors)),
    };
    let short = std::thread::spawn(move || {
        refuse_threads();
        streams.go_on(next)
    });
    short.join().unwrap().unwrap_err();
    assert!(scene.streams.drained(LONG).await);
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

#[tokio::test]
async fn the_log_is_closed_when_no_process_writes_it_any_more() {
    for is_lasting in [false, true] {
        let scene = scene_of(is_lasting);
        drop((scene.stdout, scene.stderr));
        scene.streams.ended().await;
        assert_eq!(scene.streams.sinks().log.is_some(), is_lasting);
        scene.streams.close();
        assert!(scene.streams.sinks().log.is_none());
    }
}

/// Fills the socket of a client that does not read, so that it is behind from the first byte on.
fn fill(files: &StdioFds) {
    let socket = files.stdout.as_ref().unwrap().try_clone().unwrap();
    let mut socket = UnixStream::from(socket);
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[b'-'; 4096]).is_ok() {}
    while socket.write(b"-").is_ok() {}
    socket.set_nonblocking(false).unwrap();
}

/// A client that the process waits for and that does not read, and the thread that writes more than
/// fits in between.
async fn behind() -> (Arc<ContainerStreams>, UnixStream, JoinHandle<Scene>) {
    let mut scene = scene();
    let streams = Arc::clone(&scene.streams);
    let (files, reader) = attacher();
    fill(&files);
    streams.attach(files, true).unwrap();
    let line = [vec![b'x'; 1023], b"\n".to_vec()].concat();
    let writes = std::thread::spawn(move || {
        for _ in 0..MANY {
            scene.stdout.write_all(&line).unwrap();
        }
        scene
    });
    streams.readers(Readers::are_behind).await;
    (streams, reader, writes)
}

/// Lines that [`behind`] writes, of 1 KiB each.
const MANY: usize = 4096;

#[tokio::test(start_paused = true)]
async fn a_slow_reader_whom_the_process_waits_for_has_all_the_time_of_the_world() {
    let (streams, mut reader, writes) = behind().await;
    let limit = Duration::from_secs(10);
    tokio::select! {
        _ = streams.drained(limit) => panic!("the reader has not got anything"),
        () = sleep(100 * limit) => {}
    }
    tokio::time::resume();
    let reads = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).unwrap();
        bytes.iter().filter(|byte| **byte != b'-').count()
    });
    drop(tokio::task::spawn_blocking(move || drop(writes.join())));
    assert!(streams.drained(LONG).await);
    assert_eq!(reads.join().unwrap(), MANY << 10);
}

#[tokio::test]
async fn output_has_not_gone_out_while_it_waits_for_a_reader() {
    let mut scene = scene();
    let streams = Arc::clone(&scene.streams);
    let (files, mut reader) = attacher();
    streams.attach(files, true).unwrap();
    // More than fits into the reader's socket, and less than a reader may be behind.
    let bytes = vec![b'x'; 600 << 10];
    scene.stdout.write_all(&bytes).unwrap();
    drop((scene.stdout, scene.stderr));
    streams.ended().await;
    assert!(streams.readers.borrow().are_behind());
    let reads = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).unwrap();
        bytes.len()
    });
    assert!(streams.drained(LONG).await);
    assert_eq!(reads.join().unwrap(), bytes.len());
}

#[tokio::test]
async fn a_reader_who_is_gone_is_not_waited_for() {
    let (streams, reader, writes) = behind().await;
    drop(reader);
    let scene = tokio::task::spawn_blocking(|| writes.join().unwrap());
    let scene = scene.await.unwrap();
    drop((scene.stdout, scene.stderr));
    assert!(streams.drained(LONG).await);
}

#[tokio::test]
async fn what_a_reader_does_not_get_who_is_let_go_comes_to_the_log() {
    let (streams, _reader, writes) = behind().await;
    streams.detach_readers();
    let scene = tokio::task::spawn_blocking(|| writes.join().unwrap());
    let scene = scene.await.unwrap();
    drop((scene.stdout, scene.stderr));
    assert!(streams.drained(LONG).await);
    let log = std::fs::read_to_string(scene.log.path()).unwrap();
    assert_eq!(log.lines().count(), MANY);
}

#[tokio::test(start_paused = true)]
async fn output_that_goes_on_without_end_is_not_waited_for() {
    let scene = scene();
    let (files, _reader) = attacher();
    scene.streams.attach(files, true).unwrap();
    assert!(!scene.streams.drained(LONG).await);
}
