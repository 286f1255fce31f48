//! Sessions of exec and attach: a command's streams.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::Bytes;
use serde::Deserialize;
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::task::JoinSet;

use super::backend::{AttachRequest, Backend, BackendError, ExecRequest, Process};
use super::channel::{Gone, Input, Output};
use super::pipe;
use super::status::{CommandStatus, Version};
use crate::sandbox::{StdioFds, TerminalSize};

/// A request for one of the two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CommandRequest {
    Exec(ExecRequest),
    Attach(AttachRequest),
}

/// The channels that a client must open for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RequestedChannels {
    pub(super) stdin: bool,
    pub(super) stdout: bool,
    pub(super) stderr: bool,
    pub(super) resize: bool,
}

impl CommandRequest {
    pub(super) fn wanted(&self, version: Version) -> RequestedChannels {
        let (tty, stdin, stdout, stderr) = match self {
            Self::Exec(exec) => (exec.tty, exec.stdin, exec.stdout, exec.stderr),
            Self::Attach(attach) => (attach.tty, attach.stdin, attach.stdout, attach.stderr),
        };
        RequestedChannels {
            stdin,
            stdout,
            // A terminal has only one output.
            stderr: stderr && !tty,
            resize: tty && version >= Version::V3,
        }
    }
}

/// The channels of one client, as its protocol opened them.
#[derive(Debug)]
pub(super) struct Channels {
    pub(super) stdin: Option<Input>,
    pub(super) resize: Option<Input>,
    pub(super) stdout: Option<Output>,
    pub(super) stderr: Option<Output>,
    pub(super) error: Output,
}

/// The size of a terminal, in the clients' format.
#[derive(Debug, Deserialize)]
struct Size {
    #[serde(rename = "Width")]
    width: u16,
    #[serde(rename = "Height")]
    height: u16,
}

/// Most bytes of an incomplete size.
const MAX_SIZE_TEXT: usize = 4096;

/// Connects the channels to a process, and reports how it ended. `gone` completes when the client
/// is gone.
pub(super) async fn run(
    backend: &Arc<dyn Backend>,
    request: CommandRequest,
    version: Version,
    channels: Channels,
    gone: impl Future<Output = ()>,
) {
    let Channels {
        stdin,
        resize,
        stdout,
        stderr,
        error,
    } = channels;
    let started = start(backend, request, &stdin, &stdout, &stderr).await;
    let (process, sockets) = match started {
        Ok(started) => started,
        Err(why) => {
            let outcome = CommandStatus::Failed(with_causes(&*why));
            for output in [stdout, stderr].into_iter().flatten() {
                let _ = output.finish(Bytes::new()).await;
            }
            let _ = error.finish(outcome.message(version)).await;
            return;
        }
    };
    let Process {
        exit,
        resize: set_size,
        abandon,
    } = process;

    // These two end with the connection; dropping the set ends them, too.
    let mut inputs = JoinSet::new();
    if let (Some(input), Some(socket)) = (stdin, sockets.stdin) {
        let (_, writer) = socket.into_split();
        inputs.spawn(pipe::to_process(input, writer));
    }
    if let Some(input) = resize {
        inputs.spawn(async move {
            let mut sizes = Sizes::new(input);
            while let Some(size) = sizes.next().await {
                set_size(size).await;
            }
        });
    }
    let work = async {
        let out = carry(sockets.stdout, stdout);
        let err = carry(sockets.stderr, stderr);
        let (out, err, exit) = tokio::join!(out, err, exit);
        out.and(err)?;
        let outcome = match exit {
            Ok(code) => CommandStatus::Exit(code),
            Err(why) => CommandStatus::Failed(with_causes(&*why)),
        };
        error.finish(outcome.message(version)).await
    };
    tokio::select! {
        biased;
        done = work => {
            if done == Err(Gone) {
                abandon.await;
            }
        }
        () = gone => abandon.await,
    }
}

struct Sockets {
    stdin: Option<UnixStream>,
    stdout: Option<OwnedReadHalf>,
    stderr: Option<OwnedReadHalf>,
}

async fn start(
    backend: &Arc<dyn Backend>,
    request: CommandRequest,
    stdin: &Option<Input>,
    stdout: &Option<Output>,
    stderr: &Option<Output>,
) -> Result<(Process, Sockets), BackendError> {
    let (stdin, for_stdin) = split(pair_if(stdin.is_some())?);
    let (stdout, for_stdout) = split(pair_if(stdout.is_some())?);
    let (stderr, for_stderr) = split(pair_if(stderr.is_some())?);
    let stdio = StdioFds {
        stdin: for_stdin,
        stdout: for_stdout,
        stderr: for_stderr,
    };
    let process = match request {
        CommandRequest::Exec(exec) => backend.exec(exec, stdio).await?,
        CommandRequest::Attach(attach) => backend.attach(attach, stdio).await?,
    };
    let read_half = |socket: UnixStream| socket.into_split().0;
    let sockets = Sockets {
        stdin,
        stdout: stdout.map(read_half),
        stderr: stderr.map(read_half),
    };
    Ok((process, sockets))
}

fn pair_if(wanted: bool) -> io::Result<Option<(UnixStream, OwnedFd)>> {
    wanted.then(pipe::pair).transpose()
}

fn split<A, B>(pair: Option<(A, B)>) -> (Option<A>, Option<B>) {
    match pair {
        Some((a, b)) => (Some(a), Some(b)),
        None => (None, None),
    }
}

/// Copies one output to its end.
async fn carry(socket: Option<OwnedReadHalf>, output: Option<Output>) -> Result<(), Gone> {
    match (socket, output) {
        (Some(socket), Some(output)) => {
            pipe::to_client(socket, &output).await?;
            output.finish(Bytes::new()).await
        }
        _ => Ok(()),
    }
}

/// Terminal sizes, JSON objects one after the other, in pieces of any length.
struct Sizes {
    input: Input,
    text: Vec<u8>,
}

impl Sizes {
    fn new(input: Input) -> Self {
        Self {
            input,
            text: Vec::new(),
        }
    }

    /// Returns the next size; `None` at the end, and after an invalid size.
    async fn next(&mut self) -> Option<TerminalSize> {
        loop {
            let mut sizes = serde_json::Deserializer::from_slice(&self.text).into_iter::<Size>();
            match sizes.next() {
                Some(Ok(Size { width, height })) => {
                    let used = sizes.byte_offset();
                    self.text.drain(..used);
                    if width > 0 && height > 0 {
                        return Some(TerminalSize {
                            rows: height,
                            columns: width,
                        });
                    }
                }
                Some(Err(error)) if !error.is_eof() => return None,
                _ if self.text.len() > MAX_SIZE_TEXT => return None,
                _ => self.text.extend_from_slice(&self.input.recv().await?),
            }
        }
    }
}

/// Formats an error with its causes, in one line.
pub(super) fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc;

    #[tokio::test]
    async fn sizes_are_read_from_pieces_of_any_length() {
        let (sender, input) = mpsc::channel(8);
        for piece in [
            "{\"Width\":80,\"He",
            "ight\":24}\n{\"Width\":0,\"Height\":0}",
            "{\"Height\":5,\"Width\":7}",
        ] {
            sender.send(Bytes::from(piece)).await.unwrap();
        }
        drop(sender);
        let mut sizes = Sizes::new(input);
        let size = |rows, columns| Some(TerminalSize { rows, columns });
        assert_eq!(sizes.next().await, size(24, 80));
        assert_eq!(sizes.next().await, size(5, 7));
        assert_eq!(sizes.next().await, None);
    }

    #[tokio::test]
    async fn what_is_no_size_ends_the_channel() {
        for bad in ["nonsense".to_owned(), " ".repeat(MAX_SIZE_TEXT * 2)] {
            let (sender, input) = mpsc::channel(8);
            sender.send(Bytes::from(bad)).await.unwrap();
            assert_eq!(Sizes::new(input).next().await, None);
        }
    }
}
