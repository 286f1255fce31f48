//! Moves bytes between a process and the host.
//!
//! Back-pressure is the kernel's: nothing is read before what was read has been written, so
//! at most one buffer per direction is in the agent's memory. A stream whose connection has
//! not come yet leaves the output in the pipe.

use std::io;
use std::time::Duration;

use rustix::termios::{LocalModes, SpecialCodeIndex, tcgetattr};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::Claim;
use super::fd::Endpoint;
use crate::init::reaper::{ExitWatch, ended};

/// A pipe holds 64 KiB by default: one read empties it.
const BUFFER: usize = 64 << 10;

/// A terminal delivers what a process wrote a moment later, by a kernel worker. So the
/// silence after the process's end has to last this long to be the end of its output.
const TERMINAL_SETTLE: Duration = Duration::from_millis(100);

/// How the end of a process shows in what can be read from its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// What was written before the end can be read at the end.
    Pipe,
    /// What was written before the end can be read soon after the end.
    Terminal,
}

/// Carries a process's output to the host until the output ends.
///
/// The output ends when nobody can write to it any more, or when the process has ended and
/// all that was written by then is delivered. Processes that it left behind may still hold
/// the pipe: they write into the void from then on, and get no `SIGPIPE`.
pub async fn output(source: Endpoint, kind: Kind, mut exit: ExitWatch, claim: Claim) {
    let mut sink = claim.await.ok();
    deliver(&source, kind, &mut exit, &mut sink).await;
    discard(source).await;
}

/// Joins a terminal to its one connection, both ways.
pub async fn terminal(master: Endpoint, mut exit: ExitWatch, claim: Claim) {
    let Ok(connection) = claim.await else {
        return discard(master).await;
    };
    let (reader, writer) = tokio::io::split(connection);
    let mut sink = Some(writer);
    let typing = async {
        type_in(&master, reader).await;
        // The terminal's output goes on without its input.
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = deliver(&master, Kind::Terminal, &mut exit, &mut sink) => {}
        () = typing => {}
    }
    drop(sink);
    discard(master).await;
}

/// Carries the host's bytes to a process's standard input until either side ends it.
pub async fn input(sink: Endpoint, mut exit: ExitWatch, claim: Claim) {
    let copy = async {
        let Ok(mut connection) = claim.await else {
            return;
        };
        let mut buffer = vec![0; BUFFER];
        loop {
            match connection.read(&mut buffer).await {
                Ok(0) => return,
                Ok(count) => {
                    // The process may close its input; the connection is closed then, which
                    // tells the host to stop.
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

/// Moves output to `sink` until it ends, and half-closes `sink` then.
async fn deliver<W: AsyncWrite + Unpin>(
    source: &Endpoint,
    kind: Kind,
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
                // Output first, so that the last of it is not taken for silence.
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
        // A host that went away must not stop the process: its output is dropped.
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

/// What is left of the output after the process has ended; 0 when there is no more.
async fn rest(source: &Endpoint, kind: Kind, buffer: &mut [u8]) -> io::Result<usize> {
    match source.try_read(buffer)? {
        Some(count) => Ok(count),
        None if kind == Kind::Pipe => Ok(0),
        None => tokio::time::timeout(TERMINAL_SETTLE, source.read(buffer))
            .await
            .unwrap_or(Ok(0)),
    }
}

/// Reads on so that processes left behind neither block nor get `SIGPIPE`.
pub async fn discard(source: Endpoint) {
    let mut buffer = [0; 4096];
    while matches!(source.read(&mut buffer).await, Ok(1..)) {}
}

/// Writes what the host types, and an end of file as the terminal's own (Ctrl-D).
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
        // A terminal that is gone needs no end of file.
        let _ = master.write_all(keys).await;
    }
}
