//! Moves bytes between a process and the host.
//!
//! Back-pressure is left to the kernel: nothing is read before the previous bytes have been
//! written, so at most one buffer per direction is in the agent's memory. A stream whose connection
//! has not come yet leaves the output in the pipe.

use std::io;
use std::time::Duration;

use podvisor_agent_protocol::limits;
use rustix::termios::{LocalModes, SpecialCodeIndex, tcgetattr};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::fd::Endpoint;
use super::{Connection, StreamClaim};
use crate::reaper::{ExitWatch, ended};

/// A pipe holds 64 KiB by default: one read empties it.
const BUFFER: usize = 64 << 10;

/// A terminal delivers output a moment after a process wrote it, by a kernel worker. So after the
/// process has ended, its output is complete only after a silence of this length.
const TERMINAL_SETTLE: Duration = Duration::from_millis(100);

/// When output that was written before the end of a process can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputKind {
    /// Everything written before the end can be read at the end.
    Pipe,
    /// Everything written before the end can be read soon after the end.
    Terminal,
}

/// Carries a process's output to the host until the output ends.
///
/// The output ends when no process can write to it any more, or when the process has ended and
/// everything written until then is delivered. Processes that it left behind may still hold the
/// pipe: their output is discarded from then on, and they get no `SIGPIPE`.
pub async fn output(source: Endpoint, kind: OutputKind, mut exit: ExitWatch, claim: StreamClaim) {
    let mut sink = claimed(claim, &mut exit).await;
    deliver(&source, kind, &mut exit, &mut sink).await;
    discard(source).await;
}

/// Connects a terminal to its one connection, both ways.
pub async fn terminal(master: Endpoint, mut exit: ExitWatch, claim: StreamClaim) {
    let Some(connection) = claimed(claim, &mut exit).await else {
        return discard(master).await;
    };
    let (reader, writer) = tokio::io::split(connection);
    let mut sink = Some(writer);
    let typing = async {
        type_in(&master, reader).await;
        // The terminal's output continues without its input.
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = deliver(&master, OutputKind::Terminal, &mut exit, &mut sink) => {}
        () = typing => {}
    }
    drop(sink);
    discard(master).await;
}

/// Waits for the host's connection; `None` if it does not come: the process has ended, and so has
/// the time for connecting to its streams.
async fn claimed(claim: StreamClaim, exit: &mut ExitWatch) -> Option<Connection> {
    let is_too_late = async {
        // An error means that nothing will report its end.
        let _ = ended(exit).await;
        tokio::time::sleep(limits::STREAM_CLAIM_TIMEOUT).await;
    };
    tokio::select! {
        biased;
        connection = claim => connection.ok(),
        () = is_too_late => {
            tracing::debug!("the host did not connect to an output stream");
            None
        }
    }
}

/// Carries the host's bytes to a process's standard input until either side ends it.
pub async fn input(sink: Endpoint, mut exit: ExitWatch, claim: StreamClaim) {
    let copy = async {
        let Ok(mut connection) = claim.await else {
            return;
        };
        let mut buffer = vec![0; BUFFER];
        loop {
            match connection.read(&mut buffer).await {
                Ok(0) => return,
                Ok(count) => {
                    // The process may close its input; the connection is then closed, which makes
                    // the host stop.
                    let Some(bytes) = buffer.get(..count) else {
                        return;
                    };
                    if let Err(error) = sink.write_all(bytes).await {
                        return tracing::debug!(%error, "standard input is closed");
                    }
                }
                Err(error) => return tracing::debug!(%error, "standard input was cut off"),
            }
        }
    };
    tokio::select! {
        () = copy => {}
        _ = ended(&mut exit) => {}
    }
}

/// Moves output to `sink` until it ends, and then half-closes `sink`.
async fn deliver<W: AsyncWrite + Unpin>(
    source: &Endpoint,
    kind: OutputKind,
    exit: &mut ExitWatch,
    sink: &mut Option<W>,
) {
    let mut buffer = vec![0; BUFFER];
    let mut over = false;
    loop {
        let read = if over {
            rest(source, kind, &mut buffer).await
        } else {
            tokio::select! {
                // Output first, so that the last of it is not mistaken for silence.
                biased;
                read = source.read(&mut buffer) => read,
                _ = ended(exit) => {
                    over = true;
                    continue;
                }
            }
        };
        let bytes = match read {
            Ok(0) => break,
            Ok(count) => buffer.get(..count).unwrap_or_default(),
            Err(error) => {
                tracing::warn!(%error, "cannot read a process's output");
                break;
            }
        };
        // A host that closed the stream must not stop the process: its output is dropped.
        if let Some(open) = sink
            && let Err(error) = open.write_all(bytes).await
        {
            tracing::debug!(%error, "the host closed an output stream");
            *sink = None;
        }
    }
    if let Some(open) = sink
        && let Err(error) = open.shutdown().await
    {
        tracing::debug!(%error, "cannot half-close an output stream");
    }
}

/// Reads the rest of the output after the process has ended; 0 if there is no more.
async fn rest(source: &Endpoint, kind: OutputKind, buffer: &mut [u8]) -> io::Result<usize> {
    match source.try_read(buffer)? {
        Some(count) => Ok(count),
        None if kind == OutputKind::Pipe => Ok(0),
        None => tokio::time::timeout(TERMINAL_SETTLE, source.read(buffer))
            .await
            .unwrap_or(Ok(0)),
    }
}

/// Continues reading so that processes left behind neither block nor get `SIGPIPE`.
pub async fn discard(source: Endpoint) {
    let mut buffer = [0; 4096];
    while matches!(source.read(&mut buffer).await, Ok(1..)) {}
}

/// Writes the host's input, and an end of file as the terminal's own (Ctrl-D).
async fn type_in<R: AsyncRead + Unpin>(master: &Endpoint, mut host: R) {
    let mut buffer = vec![0; BUFFER];
    let mut at_line_start = true;
    loop {
        match host.read(&mut buffer).await {
            Ok(0) => break,
            Ok(count) => {
                let Some(bytes) = buffer.get(..count) else {
                    return;
                };
                at_line_start = matches!(bytes.last(), Some(b'\n' | b'\r'));
                if master.write_all(bytes).await.is_err() {
                    return;
                }
            }
            Err(error) => return tracing::debug!(%error, "terminal input was cut off"),
        }
    }
    // In the middle of a line the first one only ends the line.
    let Ok(modes) = tcgetattr(master) else { return };
    if modes.local_modes.contains(LocalModes::ICANON) {
        let eof = modes.special_codes[SpecialCodeIndex::VEOF];
        let keys = if at_line_start {
            &[eof][..]
        } else {
            &[eof, eof][..]
        };
        // A terminal that no longer exists needs no end of file.
        let _ = master.write_all(keys).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reaper::ProcessExit;
    use crate::stdio::StreamRegistry;
    use podvisor_agent_protocol::{ExitStatus, StreamId};
    use rustix::fs::{Mode, OFlags};
    use rustix::pipe::{PipeFlags, pipe_with};
    use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
    use std::fs::File;
    use std::io::{Read as _, Write as _};
    use std::os::fd::OwnedFd;
    use tokio::io::{DuplexStream, duplex};
    use tokio::sync::watch;
    use tokio::task::{JoinHandle, JoinSet};

    /// A process's life, and the host's connection to one stream of it.
    struct Scene {
        exit: watch::Sender<Option<ProcessExit>>,
        host: DuplexStream,
        claim: Option<StreamClaim>,
    }

    impl Scene {
        async fn new() -> Self {
            let hub = StreamRegistry::new();
            let id = StreamId::new([1; 16]).unwrap();
            let claim = hub.claim(id).unwrap();
            let (mut host, guest) = duplex(1 << 10);
            host.write_all(id.as_bytes()).await.unwrap();
            hub.greet(Box::new(guest) as Connection).await;
            Self {
                exit: watch::channel(None).0,
                host,
                claim: Some(claim),
            }
        }

        fn output(&mut self, source: OwnedFd, kind: OutputKind) -> JoinHandle<()> {
            let source = Endpoint::new(source).unwrap();
            tokio::spawn(output(
                source,
                kind,
                self.exit.subscribe(),
                self.claim.take().unwrap(),
            ))
        }

        fn input(&mut self, sink: OwnedFd) -> JoinHandle<()> {
            let sink = Endpoint::new(sink).unwrap();
            tokio::spawn(input(
                sink,
                self.exit.subscribe(),
                self.claim.take().unwrap(),
            ))
        }

        fn end_process(&self) {
            let exit = ProcessExit {
                status: ExitStatus::Code(0),
                at_ns: 0,
            };
            self.exit.send_replace(Some(exit));
        }
    }

    fn pipe() -> (OwnedFd, OwnedFd) {
        pipe_with(PipeFlags::CLOEXEC).unwrap()
    }

    async fn all_of(host: &mut DuplexStream) -> Vec<u8> {
        let mut bytes = Vec::new();
        host.read_to_end(&mut bytes).await.unwrap();
        bytes
    }

    #[tokio::test]
    async fn output_reaches_the_host_whole_and_ends() {
        let mut scene = Scene::new().await;
        let (reader, writer) = pipe();
        scene.output(reader, OutputKind::Pipe);
        let sent: Vec<u8> = (0..1_000_000u32).map(|i| (i % 251) as u8).collect();
        let process = {
            let sent = sent.clone();
            std::thread::spawn(move || File::from(writer).write_all(&sent).unwrap())
        };
        assert_eq!(all_of(&mut scene.host).await, sent);
        process.join().unwrap();
    }

    #[tokio::test]
    async fn output_ends_with_the_process_though_another_holds_the_pipe() {
        let mut scene = Scene::new().await;
        let (reader, writer) = pipe();
        let mut left_behind = File::from(writer);
        left_behind.write_all(b"last words").unwrap();
        scene.end_process();
        let relay = scene.output(reader, OutputKind::Pipe);
        assert_eq!(all_of(&mut scene.host).await, b"last words");

        // It can continue writing; the output is discarded.
        left_behind.write_all(&vec![0; 60 << 10]).unwrap();
        assert!(!relay.is_finished());
        drop(left_behind);
        relay.await.unwrap();
    }

    #[tokio::test]
    async fn a_host_that_does_not_read_stops_the_process_and_loses_nothing() {
        let mut scene = Scene::new().await;
        let (reader, writer) = pipe();
        let relay = scene.output(reader, OutputKind::Pipe);
        let writer = Endpoint::new(writer).unwrap();
        let mut written = 0;
        // Full means: nothing could be written for a while.
        while tokio::time::timeout(Duration::from_millis(50), writer.write_all(&[7; 4096]))
            .await
            .is_ok()
        {
            written += 4096;
            assert!(written <= 1 << 20, "back-pressure is missing");
        }
        drop(writer);
        let received = all_of(&mut scene.host).await.len();
        assert!(
            (written..written + 4096).contains(&received),
            "{received} of {written}"
        );
        relay.await.unwrap();
    }

    #[tokio::test]
    async fn a_host_that_went_away_does_not_stop_the_process() {
        let mut scene = Scene::new().await;
        let (reader, writer) = pipe();
        let relay = scene.output(reader, OutputKind::Pipe);
        drop(scene.host);
        let writer = Endpoint::new(writer).unwrap();
        writer.write_all(&vec![7; 1 << 20]).await.unwrap();
        drop(writer);
        relay.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_host_that_never_connects_is_waited_for_until_a_while_after_the_end() {
        let (reader, writer) = pipe();
        let (master, slave) = open_terminal();
        let (exit, watch) = watch::channel(None);
        let hub = StreamRegistry::new();
        let claim = |number| hub.claim(StreamId::new([number; 16]).unwrap()).unwrap();
        let reader = Endpoint::new(reader).unwrap();
        let mut relays = JoinSet::new();
        relays.spawn(output(reader, OutputKind::Pipe, watch.clone(), claim(1)));
        relays.spawn(terminal(Endpoint::new(master).unwrap(), watch, claim(2)));
        // Its last output is kept for the host.
        File::from(writer).write_all(b"last words").unwrap();
        drop(slave);
        let long = 10 * limits::STREAM_CLAIM_TIMEOUT;
        tokio::time::timeout(long, relays.join_next())
            .await
            .unwrap_err();
        let over = ProcessExit {
            status: ExitStatus::Code(0),
            at_ns: 0,
        };
        exit.send_replace(Some(over));
        let early = limits::STREAM_CLAIM_TIMEOUT / 2;
        tokio::time::timeout(early, relays.join_next())
            .await
            .unwrap_err();
        tokio::time::timeout(long, relays.join_all()).await.unwrap();
    }

    #[tokio::test]
    async fn input_reaches_the_process_and_ends() {
        let mut scene = Scene::new().await;
        let (reader, writer) = pipe();
        scene.input(writer);
        let process = std::thread::spawn(move || {
            let mut read = Vec::new();
            File::from(reader).read_to_end(&mut read).unwrap();
            read
        });
        scene.host.write_all(&[9; 200_000]).await.unwrap();
        scene.host.shutdown().await.unwrap();
        let read = tokio::task::spawn_blocking(|| process.join().unwrap())
            .await
            .unwrap();
        assert_eq!(read, [9; 200_000]);
    }

    #[tokio::test]
    async fn input_that_the_process_closed_is_closed_to_the_host() {
        let mut scene = Scene::new().await;
        let (reader, writer) = pipe();
        let relay = scene.input(writer);
        drop(reader);
        scene.host.write_all(b"nobody reads this").await.unwrap();
        relay.await.unwrap();
        assert!(scene.host.write_all(&[0; 4096]).await.is_err());
    }

    #[tokio::test]
    async fn input_is_closed_to_the_host_when_the_process_has_ended() {
        let mut scene = Scene::new().await;
        let (_reader, writer) = pipe();
        let relay = scene.input(writer);
        scene.end_process();
        relay.await.unwrap();
        assert!(scene.host.write_all(&[0; 4096]).await.is_err());
    }

    fn open_terminal() -> (OwnedFd, OwnedFd) {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave = rustix::fs::open(&name, flags, Mode::empty()).unwrap();
        (master, slave)
    }

    #[tokio::test]
    async fn a_terminal_carries_both_directions_and_the_end_of_input() {
        let mut scene = Scene::new().await;
        let (master, slave) = open_terminal();
        let relay = tokio::spawn(terminal(
            Endpoint::new(master).unwrap(),
            scene.exit.subscribe(),
            scene.claim.take().unwrap(),
        ));
        let process = std::thread::spawn(move || {
            let mut terminal = File::from(slave);
            terminal.write_all(b"prompt> ").unwrap();
            let mut read = Vec::new();
            // Ends by the terminal's end of file, in the middle of a line.
            terminal.read_to_end(&mut read).unwrap();
            terminal.write_all(b"bye").unwrap();
            read
        });
        scene.host.write_all(b"one\ntwo").await.unwrap();
        scene.host.shutdown().await.unwrap();
        let seen = String::from_utf8(all_of(&mut scene.host).await).unwrap();
        assert!(
            seen.contains("prompt> ") && seen.contains("one\r\n"),
            "{seen:?}"
        );
        assert!(seen.ends_with("bye"), "{seen:?}");
        let read = tokio::task::spawn_blocking(|| process.join().unwrap())
            .await
            .unwrap();
        assert_eq!(read, b"one\ntwo");
        relay.await.unwrap();
    }

    #[tokio::test]
    async fn a_terminal_that_is_held_open_ends_with_the_process() {
        let mut scene = Scene::new().await;
        let (master, slave) = open_terminal();
        tokio::spawn(terminal(
            Endpoint::new(master).unwrap(),
            scene.exit.subscribe(),
            scene.claim.take().unwrap(),
        ));
        let mut left_behind = File::from(slave);
        left_behind.write_all(b"last words").unwrap();
        scene.end_process();
        assert_eq!(all_of(&mut scene.host).await, b"last words");
        left_behind.write_all(b"more").unwrap();
    }
}
