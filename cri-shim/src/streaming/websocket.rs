//! The channels over a WebSocket: the first byte of each message is the channel's number.

use std::convert::Infallible;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Bytes, BytesMut};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::error::ProtocolError;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{self, Message};
use tracing::debug;

use super::backend::{Backend, PortForwardRequest};
use super::channel::{CLOSE_TIMEOUT, INPUT_PIECES, Input, OUTPUT_PIECES, Outgoing, Output};
use super::command::{self, Channels, CommandRequest};
use super::port_forward::{self, Forward};
use super::status::Version;

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// The next byte is the number of a channel that the client has closed (version 5).
const CLOSE: u8 = 255;

/// Most bytes of one message; clients send 32 KiB.
const MAX_MESSAGE: usize = 1 << 20;

/// Size of the buffer for one read.
const READ_BUFFER: usize = 32 << 10;

/// The encoding of channels in messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    Binary,
    /// Text: a digit for the channel, and base64.
    Base64,
}

/// The sub-protocols for commands, newest first: the order of preference.
pub(super) const COMMAND_PROTOCOLS: &[(&str, Version, Encoding)] = &[
    ("v5.channel.k8s.io", Version::V5, Encoding::Binary),
    ("v4.channel.k8s.io", Version::V4, Encoding::Binary),
    ("v4.base64.channel.k8s.io", Version::V4, Encoding::Base64),
    ("channel.k8s.io", Version::V1, Encoding::Binary),
    ("base64.channel.k8s.io", Version::V1, Encoding::Base64),
    ("", Version::V1, Encoding::Binary),
];

/// The protocol that carries connections to ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PortProtocol {
    /// Two channels for each port, which the request names.
    Channels(Encoding),
    /// Streams of a SPDY connection within the WebSocket ([`super::tunnel`]).
    Spdy,
}

/// The sub-protocols for ports.
pub(super) const PORT_PROTOCOLS: &[(&str, PortProtocol)] = &[
    ("SPDY/3.1+portforward.k8s.io", PortProtocol::Spdy),
    (
        "v4.channel.k8s.io",
        PortProtocol::Channels(Encoding::Binary),
    ),
    (
        "v4.base64.channel.k8s.io",
        PortProtocol::Channels(Encoding::Base64),
    ),
    ("", PortProtocol::Channels(Encoding::Binary)),
];

pub(super) type Socket<T> = WebSocketStream<T>;

/// Creates the server's end of a WebSocket on an upgraded connection.
pub(super) async fn accept<T: AsyncRead + AsyncWrite + Unpin>(io: T) -> Socket<T> {
    let config = WebSocketConfig::default()
        // Cleared before each read; longer messages are read in pieces.
        .read_buffer_size(READ_BUFFER)
        .max_message_size(Some(MAX_MESSAGE))
        .max_frame_size(Some(MAX_MESSAGE));
    WebSocketStream::from_raw_socket(io, Role::Server, Some(config)).await
}

/// Serves exec or attach on an upgraded connection.
pub(super) async fn command<T: AsyncRead + AsyncWrite + Unpin + Send>(
    io: T,
    backend: Arc<dyn Backend>,
    request: CommandRequest,
    (version, encoding): (Version, Encoding),
) {
    let wanted = request.wanted(version);
    let (mut connection, pieces, is_gone) = Connection::new(io, version, encoding).await;
    let inputs = &mut connection.inputs;
    let stdin = inputs.open_if(wanted.stdin, STDIN);
    let resize = inputs.open_if(wanted.resize || request.wanted(Version::V5).resize, RESIZE);
    let output = |is_wanted: bool, channel: u8| {
        is_wanted.then(|| Output {
            channel: channel.into(),
            pieces: pieces.clone(),
            is_reset: None,
        })
    };
    let channels = Channels {
        stdin,
        resize,
        stdout: output(wanted.stdout, STDOUT),
        stderr: output(wanted.stderr, STDERR),
        error: Output {
            channel: ERROR.into(),
            pieces: pieces.clone(),
            is_reset: None,
        },
    };
    // An empty message tells the client that everything is set up.
    let first = match (wanted.stdout, wanted.stderr) {
        (true, _) => STDOUT,
        (_, true) => STDERR,
        _ => ERROR,
    };
    let greeting = Outgoing {
        channel: first.into(),
        data: Bytes::new(),
        last: false,
    };
    // The queue is empty, so there is room.
    let _ = pieces.try_send(greeting);
    drop(pieces);

    let session = async {
        let gone = async {
            let _ = is_gone.await;
        };
        command::run(&backend, request, version, channels, gone).await;
    };
    connection.serve(session).await;
}

/// Serves ports: each has a data and an error channel, which start with its number.
pub(super) async fn port_forward<T: AsyncRead + AsyncWrite + Unpin + Send>(
    io: T,
    backend: Arc<dyn Backend>,
    request: PortForwardRequest,
    encoding: Encoding,
) {
    let (mut connection, pieces, is_gone) = Connection::new(io, Version::V4, encoding).await;
    let mut forwards = JoinSet::new();
    // Two channels per port, of 255.
    for (channel, port) in (0u8..=252).step_by(2).zip(request.ports.iter().copied()) {
        let output = |channel: u8| Output {
            channel: channel.into(),
            pieces: pieces.clone(),
            is_reset: None,
        };
        let forward = Forward {
            port,
            input: connection.inputs.open(channel),
            output: output(channel),
            error: output(channel + 1),
        };
        let (backend, pod) = (Arc::clone(&backend), request.pod.clone());
        forwards.spawn(async move {
            let number = Bytes::copy_from_slice(&port.to_le_bytes());
            for channel in [&forward.output, &forward.error] {
                if channel.write(number.clone()).await.is_err() {
                    return;
                }
            }
            port_forward::run(&backend, &pod, forward).await;
        });
    }
    drop(pieces);
    let session = async {
        let all = async { while forwards.join_next().await.is_some() {} };
        let ended = tokio::select! {
            () = all => true,
            _ = is_gone => false,
        };
        if !ended {
            forwards.shutdown().await;
        }
    };
    connection.serve(session).await;
}

/// A connection, served in parallel with a session.
struct Connection<T> {
    socket: Socket<T>,
    encoding: Encoding,
    inputs: Inputs,
    /// Dropped when the client has closed.
    client: oneshot::Sender<Infallible>,
    outgoing: mpsc::Receiver<Outgoing>,
}

impl<T: AsyncRead + AsyncWrite + Unpin> Connection<T> {
    /// Creates a connection without inputs, the sender for its outputs, and a receiver that ends
    /// when the client has closed.
    async fn new(
        io: T,
        version: Version,
        encoding: Encoding,
    ) -> (Self, mpsc::Sender<Outgoing>, oneshot::Receiver<Infallible>) {
        let (pieces, outgoing) = mpsc::channel(OUTPUT_PIECES);
        let (client, is_gone) = oneshot::channel();
        let connection = Self {
            socket: accept(io).await,
            encoding,
            inputs: Inputs::new(version),
            client,
            outgoing,
        };
        (connection, pieces, is_gone)
    }

    /// Serves until the session has dropped all outputs, and the client has closed, too.
    async fn serve(self, session: impl Future<Output = ()>) {
        let Self {
            socket,
            encoding,
            inputs,
            client,
            outgoing,
        } = self;
        let (sink, mut source) = socket.split();
        let talking = async {
            let ((), written) = tokio::join!(session, write(sink, outgoing, encoding));
            written
        };
        let reading = async {
            read(&mut source, inputs, encoding).await;
            drop(client);
        };
        tokio::pin!(talking);
        let written = tokio::select! {
            written = &mut talking => written,
            () = reading => talking.await,
        };
        if let Err(error) = written {
            debug!(%error, "a WebSocket ended");
        }
        // An unread byte would make the kernel reset the connection, and the client would lose what
        // it has not read yet.
        let rest = async { while let Some(Ok(_)) = source.next().await {} };
        let _ = timeout(CLOSE_TIMEOUT, rest).await;
    }
}

/// The receivers of messages, by the number of their channel.
#[derive(Debug)]
struct Inputs {
    version: Version,
    open: Vec<(u8, mpsc::Sender<Bytes>)>,
}

impl Inputs {
    fn new(version: Version) -> Self {
        Self {
            version,
            open: Vec::new(),
        }
    }

    fn open(&mut self, channel: u8) -> Input {
        let (sender, input) = mpsc::channel(INPUT_PIECES);
        self.open.push((channel, sender));
        input
    }

    fn open_if(&mut self, is_wanted: bool, channel: u8) -> Option<Input> {
        is_wanted.then(|| self.open(channel))
    }

    /// Dispatches a message of the client.
    async fn take(&mut self, message: Bytes) {
        let Some((&channel, _)) = message.split_first() else {
            return;
        };
        let data = message.slice(1..);
        if channel == CLOSE && self.version >= Version::V5 {
            self.open.retain(|(known, _)| data.first() != Some(known));
            return;
        }
        let known = self.open.iter().find(|(known, _)| *known == channel);
        if let Some((_, input)) = known
            && !data.is_empty()
        {
            // Fails if the channel is no longer read: its bytes are dropped.
            let _ = input.send(data).await;
        }
    }
}

/// Reads messages until the client closes or breaks the protocol, which ends the inputs.
async fn read<T: AsyncRead + AsyncWrite + Unpin>(
    source: &mut SplitStream<Socket<T>>,
    mut inputs: Inputs,
    encoding: Encoding,
) {
    while let Some(Ok(message)) = source.next().await {
        let bytes = match (message, encoding) {
            (Message::Binary(bytes), Encoding::Binary) => bytes,
            (Message::Text(text), Encoding::Binary) => Bytes::from(text),
            (Message::Text(text), Encoding::Base64) => match decode(text.as_bytes()) {
                Some(bytes) => bytes,
                None => return,
            },
            (Message::Binary(bytes), Encoding::Base64) => match decode(&bytes) {
                Some(bytes) => bytes,
                None => return,
            },
            (Message::Close(_), _) => return,
            _ => continue,
        };
        inputs.take(bytes).await;
    }
}

/// Decodes a digit and base64 into a number and bytes.
fn decode(text: &[u8]) -> Option<Bytes> {
    let (digit, text) = text.split_first()?;
    let channel = digit.checked_sub(b'0')?;
    let data = STANDARD.decode(text).ok()?;
    let mut bytes = BytesMut::with_capacity(data.len() + 1);
    bytes.extend_from_slice(&[channel]);
    bytes.extend_from_slice(&data);
    Some(bytes.freeze())
}

async fn write<T: AsyncRead + AsyncWrite + Unpin>(
    mut sink: SplitSink<Socket<T>, Message>,
    mut outgoing: mpsc::Receiver<Outgoing>,
    encoding: Encoding,
) -> Result<(), tungstenite::Error> {
    while let Some(Outgoing {
        channel,
        data,
        last,
    }) = outgoing.recv().await
    {
        // One channel cannot be closed; an end without bytes sends no message.
        if last && data.is_empty() {
            continue;
        }
        // Channel numbers are single bytes here.
        let channel = u8::try_from(channel).unwrap_or(CLOSE);
        let message = match encoding {
            Encoding::Binary => {
                let mut bytes = BytesMut::with_capacity(data.len() + 1);
                bytes.extend_from_slice(&[channel]);
                bytes.extend_from_slice(&data);
                Message::Binary(bytes.freeze())
            }
            Encoding::Base64 => {
                let digit = char::from(b'0'.saturating_add(channel));
                Message::Text(format!("{digit}{}", STANDARD.encode(&data)).into())
            }
        };
        sink.send(message).await?;
    }
    close(&mut sink).await
}

/// Ends a connection as a success. Without this code, clients take its end as a failure, whatever
/// they have been told before.
pub(super) async fn close<T: AsyncRead + AsyncWrite + Unpin>(
    sink: &mut SplitSink<Socket<T>, Message>,
) -> Result<(), tungstenite::Error> {
    let end = CloseFrame {
        code: CloseCode::Normal,
        reason: "".into(),
    };
    match sink.send(Message::Close(Some(end))).await {
        // The client was first.
        Err(
            tungstenite::Error::ConnectionClosed
            | tungstenite::Error::Protocol(ProtocolError::SendAfterClosing),
        ) => Ok(()),
        sent => sent,
    }
}
