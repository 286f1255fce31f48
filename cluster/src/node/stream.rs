//! A WebSocket at one end, a guest at the other.
//!
//! Bytes are binary messages in both directions; for UDP a message is a datagram. The subprotocol
//! is `plain.kubevirt.io`. A client that does not answer pings is gone.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use bytes::Bytes;
use futures_util::{
    SinkExt, StreamExt,
    stream::{BoxStream, SplitSink, SplitStream},
};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, upgrade::Upgraded};
use hyper_util::rt::TokioIo;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Message,
        handshake::derive_accept_key,
        protocol::{CloseFrame, Role, WebSocketConfig, frame::coding::CloseCode},
    },
};

use super::machines::{Pipe, Refusal};
use crate::{https::Answer, status::Failure};

/// The subprotocol.
pub(super) const PROTOCOL: &str = "plain.kubevirt.io";

/// The largest message that is taken.
const MAX_MESSAGE: usize = 1 << 20;

/// How often a client is asked whether it is there. If it has said nothing until the next time, it
/// is not.
const PING_EVERY: Duration = Duration::from_secs(30);

/// How long a client may take to accept a message, or to close.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// A close frame's reason must not be longer.
const MAX_REASON: usize = 123;

type Socket = WebSocketStream<TokioIo<Upgraded>>;

/// A valid handshake of a client.
#[derive(Debug)]
pub(super) struct Handshake {
    accept: String,
    has_protocol: bool,
}

impl Handshake {
    /// Reads the handshake of a request, which has to be one.
    pub(super) fn read(method: &Method, headers: &HeaderMap) -> Result<Self, Failure> {
        let words = |name| {
            let values = headers.get_all(name).iter();
            let values = values.filter_map(|value: &HeaderValue| value.to_str().ok());
            values.flat_map(|value| value.split(',').map(str::trim))
        };
        let has = |name, word: &str| words(name).any(|found| found.eq_ignore_ascii_case(word));
        let key = headers.get(header::SEC_WEBSOCKET_KEY);
        let (true, true, true, true, Some(key)) = (
            method == Method::GET,
            has(header::CONNECTION, "upgrade"),
            has(header::UPGRADE, "websocket"),
            has(header::SEC_WEBSOCKET_VERSION, "13"),
            key,
        ) else {
            return Err(Failure::bad_request(
                "this is a stream: connect by a WebSocket (RFC 6455)",
            ));
        };
        let has_protocol = has(header::SEC_WEBSOCKET_PROTOCOL, PROTOCOL);
        if !has_protocol && headers.contains_key(header::SEC_WEBSOCKET_PROTOCOL) {
            let message = format!("the subprotocol must be {PROTOCOL}");
            return Err(Failure::bad_request(message));
        }
        Ok(Self {
            accept: derive_accept_key(key.as_bytes()),
            has_protocol,
        })
    }

    /// Answers, and connects the client with the guest.
    pub(super) fn finish(self, mut request: Request<Incoming>, pipe: Pipe) -> Answer {
        let mut answer = Response::new(Full::new(Bytes::new()));
        *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = answer.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        if let Ok(accept) = HeaderValue::from_str(&self.accept) {
            headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
        }
        if self.has_protocol {
            let protocol = HeaderValue::from_static(PROTOCOL);
            headers.insert(header::SEC_WEBSOCKET_PROTOCOL, protocol);
        }
        let upgraded = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            match upgraded.await {
                Ok(upgraded) => connect(upgraded, pipe).await,
                Err(error) => tracing::debug!(%error, "a stream did not begin"),
            }
        });
        answer
    }
}

async fn connect(upgraded: Upgraded, pipe: Pipe) {
    let config = WebSocketConfig::default()
        .max_message_size(Some(MAX_MESSAGE))
        .max_frame_size(Some(MAX_MESSAGE));
    let io = TokioIo::new(upgraded);
    let socket = WebSocketStream::from_raw_socket(io, Role::Server, Some(config)).await;
    let (mut sink, mut stream) = socket.split();
    let alive = AtomicBool::new(true);
    let Pipe {
        to_guest,
        mut from_guest,
    } = pipe;
    let close = {
        let read = read(&mut stream, to_guest, &alive);
        let write = write(&mut sink, &mut from_guest, &alive);
        tokio::select! {
            () = read => None,
            close = write => close,
        }
    };
    let closing = async {
        match close {
            Some(close) => {
                let _ = sink.send(Message::Close(Some(close))).await;
                while let Some(Ok(_)) = stream.next().await {}
            }
            None => drop(sink.close().await),
        }
    };
    let _ = timeout(CLOSE_TIMEOUT, closing).await;
}

/// Passes on what the client says, until it goes or the guest's end does.
async fn read(
    stream: &mut SplitStream<Socket>,
    to_guest: tokio::sync::mpsc::Sender<Bytes>,
    alive: &AtomicBool,
) {
    while let Some(Ok(message)) = stream.next().await {
        alive.store(true, Ordering::Relaxed);
        let bytes = match message {
            Message::Binary(bytes) => bytes,
            Message::Text(text) => Bytes::from(text),
            Message::Close(_) => return,
            _ => continue,
        };
        if to_guest.send(bytes).await.is_err() {
            // The guest's end says why, in its own direction.
            break;
        }
    }
    while let Some(Ok(message)) = stream.next().await {
        alive.store(true, Ordering::Relaxed);
        if matches!(message, Message::Close(_)) {
            return;
        }
    }
}

/// Passes on what the guest says; returns how to close, unless the client is gone.
async fn write(
    sink: &mut SplitSink<Socket, Message>,
    from_guest: &mut BoxStream<'static, Result<Bytes, Refusal>>,
    alive: &AtomicBool,
) -> Option<CloseFrame> {
    let mut pings = interval(PING_EVERY);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    pings.tick().await;
    loop {
        let message = tokio::select! {
            chunk = from_guest.next() => match chunk {
                Some(Ok(bytes)) => Message::Binary(bytes),
                Some(Err(refusal)) => return Some(frame(CloseCode::Error, &refusal.to_string())),
                None => return Some(frame(CloseCode::Normal, "")),
            },
            _ = pings.tick() => {
                if !alive.swap(false, Ordering::Relaxed) {
                    return None;
                }
                Message::Ping(Bytes::new())
            }
        };
        match timeout(WRITE_TIMEOUT, sink.send(message)).await {
            Ok(Ok(())) => {}
            _ => return None,
        }
    }
}

fn frame(code: CloseCode, reason: &str) -> CloseFrame {
    let end = reason.floor_char_boundary(MAX_REASON);
    CloseFrame {
        code,
        reason: reason.get(..end).unwrap_or_default().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &[(&'static str, &'static str)]) -> Result<Handshake, u16> {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_static(value));
        }
        Handshake::read(&Method::GET, &headers).map_err(|failure| failure.code())
    }

    const PLAIN: [(&str, &str); 4] = [
        ("connection", "keep-alive, Upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        // The example of RFC 6455, section 1.3.
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ];

    #[test]
    fn a_handshake_is_answered_as_the_standard_says() {
        let handshake = read(&PLAIN).unwrap();
        assert_eq!(handshake.accept, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        assert!(!handshake.has_protocol);
    }

    #[test]
    fn the_subprotocol_is_the_one_that_is_spoken() {
        let with = |protocol| {
            let mut lines = PLAIN.to_vec();
            lines.push(("sec-websocket-protocol", protocol));
            read(&lines).map(|handshake| handshake.has_protocol)
        };
        assert_eq!(with("other, plain.kubevirt.io"), Ok(true));
        assert_eq!(with("v4.channel.k8s.io"), Err(400));
    }

    #[test]
    fn anything_else_is_no_handshake() {
        for missing in 0..PLAIN.len() {
            let mut lines = PLAIN.to_vec();
            lines.remove(missing);
            assert_eq!(read(&lines).unwrap_err(), 400);
        }
    }

    #[test]
    fn a_reason_fits_into_a_frame() {
        assert_eq!(frame(CloseCode::Error, &"€".repeat(100)).reason.len(), 123);
    }
}
