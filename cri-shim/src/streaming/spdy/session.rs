//! The sessions of a connection's streams: a command, or ports.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::debug;

use super::connection::{Connection, Stream};
use crate::streaming::backend::{Backend, PortForwardRequest};
use crate::streaming::channel::Output;
use crate::streaming::command::{self, Channels, CommandRequest, RequestedChannels};
use crate::streaming::port_forward::{self, Forward};
use crate::streaming::status::Version;

/// How long a client may take to open the streams that belong together.
const STREAMS_TIMEOUT: Duration = Duration::from_secs(30);

/// Most connections to ports of which a client has opened only one stream.
const MAX_HALF_OPEN: usize = 256;

/// Most connections to ports at the same time, each of which is one to the guest.
pub(crate) const MAX_FORWARDS: usize = 256;

/// Serves exec or attach on an upgraded connection.
pub(crate) async fn command(
    io: impl AsyncRead + AsyncWrite + Send + 'static,
    backend: Arc<dyn Backend>,
    request: CommandRequest,
    version: Version,
) {
    let (connection, mut streams, keep_open) = Connection::new(io);
    let session = async {
        let wanted = request.wanted(version);
        match timeout(STREAMS_TIMEOUT, channels(&mut streams, wanted)).await {
            Ok(Some(channels)) => {
                // No more streams are expected: this ends when the client is gone.
                let gone = async { while streams.recv().await.is_some() {} };
                command::run(&backend, request, version, channels, gone).await;
            }
            Ok(None) => debug!("the client opened other streams than it had asked for"),
            Err(_) => debug!("the client did not open its streams in time"),
        }
        drop(keep_open);
    };
    let (served, ()) = tokio::join!(connection.run(), session);
    if let Err(error) = served {
        debug!(%error, "a stream connection ended");
    }
}

/// Collects the streams of a command; `None` if the client opens others.
async fn channels(
    streams: &mut mpsc::Receiver<Stream>,
    wanted: RequestedChannels,
) -> Option<Channels> {
    let mut found: HashMap<String, Stream> = HashMap::new();
    let names = [
        ("error", true),
        ("stdin", wanted.stdin),
        ("stdout", wanted.stdout),
        ("stderr", wanted.stderr),
        ("resize", wanted.resize),
    ];
    let expected = names.iter().filter(|(_, is_wanted)| *is_wanted).count();
    while found.len() < expected {
        let stream = streams.recv().await?;
        let kind = stream.header("streamtype")?.to_owned();
        let is_wanted = names.iter().any(|&(name, wanted)| wanted && name == kind);
        if !is_wanted || found.contains_key(&kind) {
            return None;
        }
        found.insert(kind, stream);
    }
    let mut output = |name| found.remove(name).map(|stream| stream.output);
    let (error, stdout, stderr) = (output("error")?, output("stdout"), output("stderr"));
    let mut input = |name| found.remove(name).map(|stream| stream.input);
    Some(Channels {
        stdin: input("stdin"),
        resize: input("resize"),
        stdout,
        stderr,
        error,
    })
}

/// Serves connections to ports until the client is gone.
pub(crate) async fn port_forward(
    io: impl AsyncRead + AsyncWrite + Send + 'static,
    backend: Arc<dyn Backend>,
    request: PortForwardRequest,
) {
    let (connection, mut streams, keep_open) = Connection::new(io);
    let session = async {
        let mut forwards = JoinSet::new();
        // Streams whose counterpart is missing yet, by the client's number of the connection.
        let mut half_open: HashMap<String, (bool, Stream)> = HashMap::new();
        while let Some(stream) = streams.recv().await {
            while forwards.try_join_next().is_some() {}
            let Some((is_error, port, number)) = purpose(&stream) else {
                debug!("a stream that is for no port");
                end(stream).await;
                continue;
            };
            match half_open.remove(&number) {
                Some((other_is_error, other)) if other_is_error != is_error => {
                    let (data, error) = if is_error {
                        (other, stream)
                    } else {
                        (stream, other)
                    };
                    let forward = forward(port, data, error.output);
                    if !request.ports.is_empty() && !request.ports.contains(&port) {
                        forward.refuse("it was not asked for").await;
                        continue;
                    }
                    if forwards.len() >= MAX_FORWARDS {
                        forward.refuse("too many connections at once").await;
                        continue;
                    }
                    let (backend, pod) = (Arc::clone(&backend), request.pod.clone());
                    forwards.spawn(async move {
                        port_forward::run(&backend, &pod, forward).await;
                    });
                }
                _ if half_open.len() >= MAX_HALF_OPEN => break,
                earlier => {
                    half_open.insert(number, (is_error, stream));
                    if let Some((_, earlier)) = earlier {
                        end(earlier).await;
                    }
                }
            }
        }
        drop(keep_open);
        // The client is gone, so its connections end.
        forwards.shutdown().await;
    };
    let (served, ()) = tokio::join!(connection.run(), session);
    if let Err(error) = served {
        debug!(%error, "a port-forward connection ended");
    }
}

/// Returns whether it is the error stream, the port, and the client's number of the connection. Old
/// clients have no numbers; their connections are identified by port.
fn purpose(stream: &Stream) -> Option<(bool, u16, String)> {
    let is_error = match stream.header("streamtype")? {
        "error" => true,
        "data" => false,
        _ => return None,
    };
    let port = stream
        .header("port")?
        .parse()
        .ok()
        .filter(|port| *port > 0)?;
    let number = stream.header("requestid").map(str::to_owned);
    Some((
        is_error,
        port,
        number.unwrap_or_else(|| format!("port {port}")),
    ))
}

/// Ends a stream without data.
async fn end(stream: Stream) {
    let _ = stream.output.finish(Bytes::new()).await;
}

fn forward(port: u16, data: Stream, error: Output) -> Forward {
    Forward {
        port,
        input: data.input,
        output: data.output,
        error,
    }
}
