//! A SPDY connection within a WebSocket, which `kubectl` and `crictl` use to forward ports since
//! Kubernetes 1.31: its bytes are those of all binary messages, regardless of their boundaries.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{SplitSink, Stream};
use futures_util::{SinkExt as _, StreamExt as _};
use tokio::io::{
    AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, duplex,
};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::{self, Message};
use tracing::debug;

use super::backend::{Backend, PortForwardRequest};
use super::channel::{CHUNK_SIZE, CLOSE_TIMEOUT};
use super::spdy::session;
use super::websocket::{self, Socket};

/// Most bytes that wait in each direction between the two protocols; no more is read.
const BUFFER: usize = 2 * CHUNK_SIZE;

/// Serves connections to ports until the client is gone.
pub(super) async fn port_forward<T: AsyncRead + AsyncWrite + Unpin + Send>(
    io: T,
    backend: Arc<dyn Backend>,
    request: PortForwardRequest,
) {
    let (sink, mut source) = websocket::accept(io).await.split();
    // A pipe for each direction, so that each ends by itself.
    let (from_client, spdy_reader) = duplex(BUFFER);
    let (spdy_writer, to_client) = duplex(BUFFER);
    let connection = tokio::io::join(spdy_reader, spdy_writer);
    let talking = async {
        let session = session::port_forward(connection, backend, request);
        let ((), written) = tokio::join!(session, write(sink, to_client));
        written
    };
    tokio::pin!(talking);
    let written = tokio::select! {
        written = &mut talking => written,
        () = read(&mut source, from_client) => talking.await,
    };
    if let Err(error) = written {
        debug!(%error, "a SPDY connection within a WebSocket ended");
    }
    // An unread byte would make the kernel reset the connection, and the client would lose what it
    // has not read yet.
    let rest = async { while let Some(Ok(_)) = source.next().await {} };
    let _ = timeout(CLOSE_TIMEOUT, rest).await;
}

/// Reads messages until the client closes or breaks the protocol, which ends the pipe, or the pipe
/// is no longer read.
async fn read(
    source: &mut (impl Stream<Item = Result<Message, tungstenite::Error>> + Unpin),
    mut pipe: DuplexStream,
) {
    while let Some(Ok(message)) = source.next().await {
        match message {
            Message::Binary(bytes) => {
                if pipe.write_all(&bytes).await.is_err() {
                    return;
                }
            }
            Message::Text(_) | Message::Close(_) => return,
            // Pings are answered by the library.
            Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
        }
    }
}

async fn write<T: AsyncRead + AsyncWrite + Unpin>(
    mut sink: SplitSink<Socket<T>, Message>,
    mut pipe: DuplexStream,
) -> Result<(), tungstenite::Error> {
    let mut buffer = vec![0; CHUNK_SIZE];
    loop {
        let count = pipe.read(&mut buffer).await?;
        let Some(piece @ [_, ..]) = buffer.get(..count) else {
            break;
        };
        let piece = Bytes::copy_from_slice(piece);
        sink.send(Message::Binary(piece)).await?;
    }
    websocket::close(&mut sink).await
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message() -> impl Strategy<Value = Message> {
        let bytes = || proptest::collection::vec(any::<u8>(), 0..300).prop_map(Bytes::from);
        prop_oneof![
            12 => bytes().prop_map(Message::Binary),
            2 => bytes().prop_map(Message::Ping),
            2 => bytes().prop_map(Message::Pong),
            1 => ".{0,9}".prop_map(|text| Message::Text(text.into())),
            1 => Just(Message::Close(None)),
        ]
    }

    proptest! {
        /// The pipe is smaller than the data: it is read at the same time.
        #[test]
        fn bytes_are_those_of_binary_messages_until_there_is_another_one(
            messages in proptest::collection::vec(message(), 0..30),
        ) {
            let is_end = |message: &Message| message.is_text() || message.is_close();
            let until_end = messages.iter().take_while(|message| !is_end(message));
            let expected: Vec<u8> = until_end
                .filter(|message| message.is_binary())
                .flat_map(|message| message.clone().into_data())
                .collect();
            let mut source = futures_util::stream::iter(messages.into_iter().map(Ok));
            let (pipe, mut reader) = duplex(64);
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let mut bytes = Vec::new();
            let read = runtime.block_on(async {
                let reading = reader.read_to_end(&mut bytes);
                tokio::join!(read(&mut source, pipe), reading).1
            });
            prop_assert_eq!(read.unwrap(), expected.len());
            prop_assert_eq!(bytes, expected);
        }
    }
}
