//! Tests of `stdio`.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::files::BUFFER;
use super::outputs::{MAX_REST, OutputEvents, move_output};
use super::*;
use crate::types::{StdioFds, TerminalSize};

#[test]
fn pipes_name_each_stream_that_is_wanted_and_a_terminal_one() {
    let set = |stdin, stdout, stderr| StreamSet {
        stdin,
        stdout,
        stderr,
    };
    let request = |set, size| Streams::new(set, size).unwrap().request();
    let pipes = request(set(true, true, true), None);
    assert_eq!(
        [pipes.stdin.len(), pipes.stdout.len(), pipes.stderr.len()],
        [16, 16, 16]
    );
    assert_ne!(pipes.stdout, pipes.stderr);
    let some = request(set(false, true, false), None);
    let lengths = [some.stdin.len(), some.stdout.len(), some.stderr.len()];
    assert_eq!(lengths, [0, 16, 0]);
    let size = TerminalSize {
        rows: 5,
        columns: 7,
    };
    let terminal = request(set(true, false, true), Some(size));
    assert!(terminal.terminal && terminal.stdin.is_empty() && terminal.stderr.is_empty());
    assert_eq!((terminal.rows, terminal.columns), (5, 7));
}

fn pipe_input(stream: UnixStream) -> GuestInput {
    GuestInput {
        stream: Arc::new(stream),
        is_terminal: false,
    }
}

#[test]
fn a_process_that_ends_ends_the_wait_for_input() {
    for is_terminal in [false, true] {
        let (guest, host) = UnixStream::pair().unwrap();
        let (reader, writer) = io::pipe().unwrap();
        let input = GuestInput {
            is_terminal,
            ..pipe_input(host)
        };
        let waits = thread::spawn(move || input.take_from(reader.as_fd()));
        if is_terminal {
            guest.shutdown(Shutdown::Write).unwrap();
        } else {
            guest.shutdown(Shutdown::Both).unwrap();
        }
        assert!(!waits.join().unwrap());
        drop((guest, writer));
    }
}

#[test]
fn output_passes_whole_through_a_file_that_does_not_block() {
    let (guest, host) = UnixStream::pair().unwrap();
    let (mut reader, writer) = UnixStream::pair().unwrap();
    writer.set_nonblocking(true).unwrap();
    let sent: Vec<u8> = (0..1_000_000u32).map(|i| (i % 251) as u8).collect();
    let expected = sent.clone();
    let guest = thread::spawn(move || (&guest).write_all(&sent));
    let pump = thread::spawn(move || move_output("stdout", &host, writer.as_fd(), &events()));
    let mut received = Vec::new();
    reader.read_to_end(&mut received).unwrap();
    guest.join().unwrap().unwrap();
    pump.join().unwrap().unwrap();
    assert_eq!(received.len(), expected.len());
    assert!(received == expected);
}

#[test]
fn a_reader_that_goes_away_ends_the_stream_and_is_no_error() {
    let (mut guest, host) = UnixStream::pair().unwrap();
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    guest.write_all(b"x").unwrap();
    move_output("stdout", &host, writer.as_fd(), &events()).unwrap();
    let error = guest.write_all(b"y").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn a_full_disk_is_an_error_that_names_the_stream() {
    let (mut guest, host) = UnixStream::pair().unwrap();
    guest.write_all(b"x").unwrap();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let error = move_output("stdout", &host, full.as_fd(), &events()).unwrap_err();
    assert!(matches!(error, StdioError::Output { name: "stdout", .. }));
}

#[test]
fn the_end_of_the_input_is_passed_on_and_output_still_comes() {
    let (mut guest, host) = UnixStream::pair().unwrap();
    let (reader, mut writer) = io::pipe().unwrap();
    writer.write_all(b"hi").unwrap();
    drop(writer);
    let input = pipe_input(host);
    assert!(input.take_from(reader.as_fd()));
    input.close();
    let mut received = String::new();
    guest.read_to_string(&mut received).unwrap();
    assert_eq!(received, "hi");
    guest.write_all(b"there").unwrap();
    drop(guest);
    let mut answer = String::new();
    (&*input.stream).read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "there");
}

#[test]
fn a_program_that_does_not_read_its_input_ends_the_pump() {
    let (guest, host) = UnixStream::pair().unwrap();
    drop(guest);
    let (reader, mut writer) = io::pipe().unwrap();
    writer.write_all(b"hi").unwrap();
    assert!(!pipe_input(host).take_from(reader.as_fd()));
    drop(writer);
}

fn events() -> OutputEvents {
    OutputEvents::new().unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_output_that_stays_open_is_cut_off_and_its_slow_reader_gets_all() {
    let (mut guest, host) = UnixStream::pair().unwrap();
    let (mut reader, writer) = io::pipe().unwrap();
    // More than a pipe holds: the reader is behind when the output is cut off.
    let sent = vec![7; 150_000];
    guest.write_all(&sent).unwrap();
    let streams = GuestStreams {
        input: None,
        output: Some(Arc::new(host)),
        errors: None,
    };
    let files = StdioFds {
        stdout: Some(writer.into()),
        ..StdioFds::default()
    };
    let outputs = streams.serve(files).unwrap();
    assert!(!outputs.finish_within(Duration::from_secs(1)).await.unwrap());
    let mut received = Vec::new();
    reader.read_to_end(&mut received).unwrap();
    assert!(received == sent);
    // What holds the output open learns that nobody reads it any more. The thread closes it after
    // the reader's pipe, which this waits for: nothing is ever sent.
    let _ = guest.read(&mut [0]);
    let error = guest.write_all(b"more").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn an_output_that_never_pauses_ends_when_it_is_cut_off() {
    let (guest, host) = UnixStream::pair().unwrap();
    let (mut reader, writer) = io::pipe().unwrap();
    let events = events();
    events.cut_off();
    let babbler = thread::spawn(move || while (&guest).write_all(&[1; 4096]).is_ok() {});
    let counted = thread::spawn(move || io::copy(&mut reader, &mut io::sink()).unwrap());
    move_output("stdout", &host, writer.as_fd(), &events).unwrap();
    drop((host, writer));
    babbler.join().unwrap();
    let most = u64::try_from(MAX_REST + BUFFER).unwrap();
    assert!(counted.join().unwrap() <= most);
}
