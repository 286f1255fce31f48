//! A client by WebSocket, `v4.channel.k8s.io`.

use std::collections::HashMap;

use futures_util::{SinkExt as _, StreamExt as _};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

use crate::client::wait;

pub(super) const STDIN: u8 = 0;
pub(super) const STDOUT: u8 = 1;
pub(super) const STDERR: u8 = 2;
const STATUS: u8 = 3;
pub(super) const RESIZE: u8 = 4;

/// A connection to a URL; the first byte of a message is its channel.
pub(super) struct Client {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    pub(super) channels: HashMap<u8, Vec<u8>>,
}

impl Client {
    pub(super) fn connect(url: &str) -> Self {
        let mut request = url
            .replace("http://", "ws://")
            .into_client_request()
            .unwrap();
        let protocol = "v4.channel.k8s.io".parse().unwrap();
        request
            .headers_mut()
            .insert("Sec-WebSocket-Protocol", protocol);
        let (socket, _) = wait(tokio_tungstenite::connect_async(request)).unwrap();
        Self {
            socket,
            channels: HashMap::new(),
        }
    }

    pub(super) fn send(&mut self, channel: u8, bytes: &[u8]) {
        let mut message = vec![channel];
        message.extend_from_slice(bytes);
        wait(self.socket.send(Message::Binary(message.into()))).unwrap();
    }

    /// Takes a message; `false` at the end.
    pub(super) fn receive(&mut self) -> bool {
        match wait(self.socket.next()) {
            Some(Ok(Message::Binary(bytes))) => {
                if let Some((channel, rest)) = bytes.split_first() {
                    let kept = self.channels.entry(*channel).or_default();
                    kept.extend_from_slice(rest);
                }
                true
            }
            Some(Ok(Message::Close(_)) | Err(_)) | None => false,
            Some(Ok(_)) => true,
        }
    }

    /// Takes messages until a channel has what is looked for.
    pub(super) fn until(&mut self, channel: u8, has: impl Fn(&str) -> bool) {
        while !has(&self.text(channel)) {
            assert!(self.receive(), "only {:?} came", self.text(channel));
        }
    }

    pub(super) fn text(&self, channel: u8) -> String {
        let bytes = self.channels.get(&channel).map_or(&[][..], Vec::as_slice);
        String::from_utf8_lossy(bytes).into_owned()
    }

    /// Takes all until the end; the exit code that the status tells.
    pub(super) fn exit_code(&mut self) -> i32 {
        while self.receive() {}
        let status: serde_json::Value = serde_json::from_str(&self.text(STATUS)).unwrap();
        if status["status"] == "Success" {
            return 0;
        }
        let code = &status["details"]["causes"][0]["message"];
        code.as_str().unwrap().parse().unwrap()
    }
}
