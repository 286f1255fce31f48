//! Exec and Attach: Kubernetes' remote command protocols, versions 1 to 4. The client opens a
//! stream for each of stdin, stdout, stderr and resizes, and one for how it ended.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1::{AttachRequest, ExecRequest};
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tracing::debug;

use super::StreamError;
use super::spdy::{Connection, SpdyError, SpdyStream};
use crate::cri::error::{CriError, Result};
use crate::cri::node::Node;
use crate::cri::spec;
use crate::sandbox::{Exec, SandboxClient, StdioFds, TerminalSize, random_id};

/// Newest first; the last one is for clients that name none.
pub(super) const PROTOCOLS: &[&str] = &[
    "v4.channel.k8s.io",
    "v3.channel.k8s.io",
    "v2.channel.k8s.io",
    "channel.k8s.io",
];

/// How long a client may take to open its streams, in seconds.
const OPEN_SECONDS: u64 = 30;
/// How long a client may take to close its connection after the end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes that are read from a process at once.
const CHUNK: usize = 32 << 10;
/// Longest message about a terminal's size.
const RESIZE_BYTES: usize = 4096;

/// What a terminal has until its client says.
const DEFAULT_SIZE: TerminalSize = TerminalSize {
    rows: 24,
    columns: 80,
};

/// Which streams a call is for.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    stdin: bool,
    stdout: bool,
    stderr: bool,
    resize: bool,
}

impl Wanted {
    fn has(&self, kind: &str) -> bool {
        match kind {
            "error" => true,
            "stdin" => self.stdin,
            "stdout" => self.stdout,
            "stderr" => self.stderr,
            "resize" => self.resize,
            _ => false,
        }
    }

    fn count(&self) -> usize {
        let kinds = ["error", "stdin", "stdout", "stderr", "resize"];
        kinds.into_iter().filter(|kind| self.has(kind)).count()
    }
}

/// The client's streams by their kinds.
#[derive(Default)]
struct Opened {
    error: Option<SpdyStream>,
    stdin: Option<SpdyStream>,
    stdout: Option<SpdyStream>,
    stderr: Option<SpdyStream>,
    resize: Option<SpdyStream>,
}

impl Opened {
    async fn take(
        streams: &mut mpsc::Receiver<SpdyStream>,
        wanted: Wanted,
    ) -> Result<Self, StreamError> {
        let mut opened = Self::default();
        for _ in 0..wanted.count() {
            let next = timeout(Duration::from_secs(OPEN_SECONDS), streams.recv()).await;
            let Ok(Some(stream)) = next else {
                return Err(StreamError::Missing(OPEN_SECONDS));
            };
            let kind = stream.header("streamtype").unwrap_or_default().to_owned();
            let place = match kind.as_str() {
                "error" => &mut opened.error,
                "stdin" => &mut opened.stdin,
                "stdout" => &mut opened.stdout,
                "stderr" => &mut opened.stderr,
                "resize" => &mut opened.resize,
                _ => return Err(SpdyError::Protocol("a stream of an unknown type").into()),
            };
            if place.is_some() || !wanted.has(&kind) {
                return Err(SpdyError::Protocol("a stream that was not asked for").into());
            }
            *place = Some(stream);
        }
        Ok(opened)
    }
}

/// A connection whose streams are open.
struct Session {
    connection: Arc<Connection>,
    /// Ends with the client.
    reading: JoinHandle<Result<(), SpdyError>>,
    opened: Opened,
}

impl Session {
    async fn begin(io: TcpStream, wanted: Wanted) -> Result<Self, StreamError> {
        let (read, write) = io.into_split();
        let connection = Arc::new(Connection::new(write)?);
        let (sender, mut streams) = mpsc::channel(1);
        let reading = {
            let connection = Arc::clone(&connection);
            tokio::spawn(async move { connection.serve(read, sender).await })
        };
        match Opened::take(&mut streams, wanted).await {
            Ok(opened) => Ok(Self {
                connection,
                reading,
                opened,
            }),
            Err(error) => {
                reading.abort();
                Err(error)
            }
        }
    }

    /// Tells the client how it ended, and ends the connection when the client has read it.
    async fn end(mut self, outcome: &Outcome, protocol: &str) -> Result<(), StreamError> {
        if let Some(error) = self.opened.error.take() {
            let (_, outgoing) = error.split();
            let message = outcome.message(protocol);
            if !message.is_empty() {
                outgoing.send(message.as_bytes()).await?;
            }
            outgoing.close().await?;
        }
        self.connection.close().await?;
        // What the client still sends is read, or the kernel would take back what it has not
        // read yet.
        match timeout(CLOSE_TIMEOUT, &mut self.reading).await {
            Ok(_) => {}
            Err(_) => self.reading.abort(),
        }
        Ok(())
    }
}

/// How it ended.
enum Outcome {
    Exit(i32),
    Failed(String),
}

impl Outcome {
    /// For the stream of errors: version 4 has a `Status` of Kubernetes there, older ones text
    /// in case of an error.
    fn message(&self, protocol: &str) -> String {
        let is_v4 = protocol == "v4.channel.k8s.io";
        match self {
            Self::Exit(0) if is_v4 => json!({"metadata": {}, "status": "Success"}).to_string(),
            Self::Exit(0) => String::new(),
            Self::Exit(code) if is_v4 => json!({
                "metadata": {},
                "status": "Failure",
                "reason": "NonZeroExitCode",
                "message": format!("command terminated with exit code {code}"),
                "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
            })
            .to_string(),
            Self::Exit(code) => format!("command terminated with exit code {code}"),
            Self::Failed(message) if is_v4 => json!({
                "metadata": {},
                "status": "Failure",
                "reason": "InternalError",
                "message": message,
                "code": 500,
            })
            .to_string(),
            Self::Failed(message) => message.clone(),
        }
    }
}

/// A process's standard streams on their way to and from the client.
#[derive(Default)]
struct Pumps {
    incoming: JoinSet<()>,
    outgoing: JoinSet<()>,
}

impl Pumps {
    /// Moves the client's bytes to the process, until either has had enough.
    fn stdin(&mut self, stream: Option<SpdyStream>) -> std::io::Result<Option<OwnedFd>> {
        let Some(stream) = stream else {
            return Ok(None);
        };
        let (mut ours, theirs) = pair()?;
        let (mut bytes, _) = stream.split();
        self.incoming.spawn(async move {
            while let Some(bytes) = bytes.recv().await {
                if ours.write_all(&bytes).await.is_err() {
                    // A process that does not read its input is no error.
                    return;
                }
            }
            // Closed when the client closed it, and not before.
            let _ = ours.shutdown().await;
        });
        Ok(Some(theirs))
    }

    /// Moves the process's bytes to the client, until either has had enough.
    fn output(&mut self, stream: Option<SpdyStream>) -> std::io::Result<Option<OwnedFd>> {
        let Some(stream) = stream else {
            return Ok(None);
        };
        let (mut ours, theirs) = pair()?;
        let (_, client) = stream.split();
        self.outgoing.spawn(async move {
            let mut buffer = vec![0; CHUNK];
            while let Ok(count) = ours.read(&mut buffer).await {
                let bytes = buffer.get(..count).unwrap_or_default();
                if bytes.is_empty() || client.send(bytes).await.is_err() {
                    break;
                }
            }
            // Gone with the client when that has gone.
            let _ = client.close().await;
        });
        Ok(Some(theirs))
    }

    async fn finish(mut self) {
        while self.outgoing.join_next().await.is_some() {}
    }
}

fn pair() -> std::io::Result<(UnixStream, OwnedFd)> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    Ok((UnixStream::from_std(ours)?, theirs.into()))
}

/// Runs another process in a container.
pub(super) async fn exec(
    node: &Arc<Node>,
    request: ExecRequest,
    protocol: &str,
    io: TcpStream,
) -> Result<(), StreamError> {
    let wanted = Wanted {
        stdin: request.stdin,
        stdout: request.stdout,
        stderr: request.stderr && !request.tty,
        resize: request.tty && has_resize(protocol),
    };
    let mut session = Session::begin(io, wanted).await?;
    let outcome = match run(node, &request, &mut session.opened).await {
        Ok(code) => Outcome::Exit(code),
        Err(error) => Outcome::Failed(tonic::Status::from(error).message().to_owned()),
    };
    session.end(&outcome, protocol).await
}

async fn run(node: &Arc<Node>, request: &ExecRequest, opened: &mut Opened) -> Result<i32> {
    let container = node.container(&request.container_id)?;
    container.running()?;
    let client = container.pod.client()?;
    let record = container.record();
    let process = spec::exec_process(&record.process, &request.cmd, request.tty)?;
    let exec_id = random_id().map_err(CriError::host("make up an id"))?;
    let mut pumps = Pumps::default();
    let failed = || CriError::host("make a socket pair");
    let stdio = StdioFds {
        stdin: pumps.stdin(opened.stdin.take()).map_err(failed())?,
        stdout: pumps.output(opened.stdout.take()).map_err(failed())?,
        stderr: pumps.output(opened.stderr.take()).map_err(failed())?,
    };
    let exec = Exec {
        exec_id: exec_id.clone(),
        process,
        user: record.user,
        supplemental_groups: record.groups,
        tty: request.tty.then_some(DEFAULT_SIZE),
        stdio,
    };
    client.exec(&container.id, exec).await?;
    let id = container.id.clone();
    let resizing = resizes(
        opened.resize.take(),
        client.clone(),
        id,
        Some(exec_id.clone()),
    );
    let exit = client.wait(&container.id, Some(&exec_id)).await;
    drop(resizing);
    let exit = exit?;
    pumps.finish().await;
    Ok(exit.code)
}

/// Joins the container's own process.
pub(super) async fn attach(
    node: &Arc<Node>,
    request: AttachRequest,
    protocol: &str,
    io: TcpStream,
) -> Result<(), StreamError> {
    let wanted = Wanted {
        stdin: request.stdin,
        stdout: request.stdout,
        stderr: request.stderr && !request.tty,
        resize: request.tty && has_resize(protocol),
    };
    let mut session = Session::begin(io, wanted).await?;
    let joined = join(node, &request, &mut session.opened);
    let outcome = tokio::select! {
        joined = joined => match joined {
            Ok(()) => Outcome::Exit(0),
            Err(error) => Outcome::Failed(tonic::Status::from(error).message().to_owned()),
        },
        // The client has gone; the container goes on.
        _ = &mut session.reading => return Ok(()),
    };
    session.end(&outcome, protocol).await
}

async fn join(node: &Arc<Node>, request: &AttachRequest, opened: &mut Opened) -> Result<()> {
    let container = node.container(&request.container_id)?;
    container.running()?;
    let client = container.pod.client()?;
    let mut pumps = Pumps::default();
    let failed = || CriError::host("make a socket pair");
    let stdio = StdioFds {
        stdin: pumps.stdin(opened.stdin.take()).map_err(failed())?,
        stdout: pumps.output(opened.stdout.take()).map_err(failed())?,
        stderr: pumps.output(opened.stderr.take()).map_err(failed())?,
    };
    client.attach(&container.id, stdio).await?;
    let id = container.id.clone();
    let resizing = resizes(opened.resize.take(), client.clone(), id, None);
    client.wait(&container.id, None).await?;
    drop(resizing);
    pumps.finish().await;
    Ok(())
}

fn has_resize(protocol: &str) -> bool {
    matches!(protocol, "v4.channel.k8s.io" | "v3.channel.k8s.io")
}

/// A terminal's size as clients send it.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Size {
    width: u16,
    height: u16,
}

/// Passes the sizes of the client's terminal on until dropped.
fn resizes(
    stream: Option<SpdyStream>,
    client: SandboxClient,
    container: String,
    exec: Option<String>,
) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    let Some(stream) = stream else {
        return tasks;
    };
    tasks.spawn(async move {
        let (mut incoming, _outgoing) = stream.split();
        let mut text = Vec::new();
        while let Some(bytes) = incoming.recv().await {
            text.extend_from_slice(&bytes);
            for size in take_sizes(&mut text) {
                let size = TerminalSize {
                    rows: size.height,
                    columns: size.width,
                };
                if let Err(error) = client.resize(&container, exec.as_deref(), size).await {
                    debug!(%error, "the terminal keeps its size");
                }
            }
        }
    });
    tasks
}

/// Takes whole messages from the front; nonsense is dropped.
fn take_sizes(text: &mut Vec<u8>) -> Vec<Size> {
    let mut sizes = Vec::new();
    let mut messages = serde_json::Deserializer::from_slice(text).into_iter::<Size>();
    let mut is_nonsense = false;
    for message in messages.by_ref() {
        match message {
            Ok(size) => sizes.push(size),
            Err(error) => {
                is_nonsense = !error.is_eof();
                break;
            }
        }
    }
    let taken = messages.byte_offset();
    text.drain(..taken);
    if is_nonsense || text.len() > RESIZE_BYTES {
        text.clear();
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_4_tells_the_exit_code_in_a_status() {
        let status = |outcome: Outcome| -> serde_json::Value {
            serde_json::from_str(&outcome.message("v4.channel.k8s.io")).unwrap()
        };
        assert_eq!(status(Outcome::Exit(0))["status"], "Success");
        let failed = status(Outcome::Exit(5));
        assert_eq!(failed["reason"], "NonZeroExitCode");
        assert_eq!(
            failed["details"]["causes"][0],
            json!({"reason": "ExitCode", "message": "5"})
        );
        assert_eq!(status(Outcome::Failed("why".to_owned()))["message"], "why");
        assert_eq!(Outcome::Exit(0).message("channel.k8s.io"), "");
        assert!(
            Outcome::Exit(5)
                .message("v3.channel.k8s.io")
                .contains("exit code 5")
        );
    }

    #[test]
    fn sizes_are_read_however_they_are_cut() {
        let mut text = br#"{"Width":80,"Height":24} {"Width":1"#.to_vec();
        let size = |width, height| Size { width, height };
        assert_eq!(take_sizes(&mut text), [size(80, 24)]);
        text.extend_from_slice(br#"00,"Height":30}"#);
        assert_eq!(take_sizes(&mut text), [size(100, 30)]);
        text.extend_from_slice(b"nonsense");
        assert!(take_sizes(&mut text).is_empty() && text.is_empty());
    }
}
