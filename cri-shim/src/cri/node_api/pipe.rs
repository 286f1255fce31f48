//! The stream of bytes of a client, joined with a connection.

use bytes::{Bytes, BytesMut};
use podvisor_node_api::messages::Data;
use podvisor_node_api::{AnswerStream, MAX_CHUNK_BYTES};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Status, Streaming};

use super::STREAM_QUEUE;

pub(super) type Answers = mpsc::Sender<Result<Data, Status>>;

/// Returns what a client sends, until it goes.
pub(super) fn bytes_of<T: Send + 'static>(
    input: Streaming<T>,
    data: impl Fn(T) -> Option<Bytes> + Send,
) -> impl Stream<Item = Bytes> + Send {
    input
        .take_while(Result::is_ok)
        .filter_map(move |message| data(message.ok()?))
}

/// Answers a client with what comes from a connection, and sends there what comes from the client.
/// The first answer is empty.
pub(super) fn joined(
    connection: impl AsyncRead + AsyncWrite + Send + 'static,
    input: impl Stream<Item = Bytes> + Send + 'static,
) -> AnswerStream<Data> {
    let (answers, stream) = mpsc::channel(STREAM_QUEUE);
    tokio::spawn(async move { copy(connection, input, &answers).await });
    AnswerStream::new(ReceiverStream::new(stream))
}

/// Copies in both directions until the connection's ends, or the client goes.
async fn copy(
    stream: impl AsyncRead + AsyncWrite,
    input: impl Stream<Item = Bytes>,
    answers: &Answers,
) {
    let (mut reader, mut writer) = tokio::io::split(stream);
    let sending = async {
        tokio::pin!(input);
        while let Some(data) = input.next().await {
            if writer.write_all(&data).await.is_err() {
                return;
            }
        }
        // The client has sent all, and may wait for the answer.
        let _ = writer.shutdown().await;
    };
    let receiving = async {
        // Says that it is open.
        let mut data = Bytes::new();
        loop {
            if answers.send(Ok(Data { data })).await.is_err() {
                return;
            }
            let mut buffer = BytesMut::with_capacity(MAX_CHUNK_BYTES);
            match reader.read_buf(&mut buffer).await {
                Ok(1..) => data = buffer.freeze(),
                Ok(0) => return,
                Err(error) => {
                    let status = Status::unavailable(format!("the connection broke: {error}"));
                    let _ = answers.send(Err(status)).await;
                    return;
                }
            }
        }
    };
    let both = async {
        tokio::pin!(sending, receiving);
        tokio::select! {
            () = &mut receiving => {}
            () = &mut sending => receiving.await,
        }
    };
    tokio::select! {
        () = both => {}
        () = answers.closed() => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bytes_are_copied_until_both_directions_have_ended() {
        let (mut guest, stream) = tokio::io::duplex(64);
        let (answers, mut heard) = mpsc::channel(STREAM_QUEUE);
        let input = tokio_stream::iter([Bytes::from_static(b"GET")]);
        let copying = tokio::spawn(async move { copy(stream, input, &answers).await });
        let mut asked = Vec::new();
        guest.read_to_end(&mut asked).await.unwrap();
        assert_eq!(asked, b"GET");
        guest.write_all(b"200").await.unwrap();
        drop(guest);
        let mut said = Vec::new();
        while let Some(answer) = heard.recv().await {
            said.extend_from_slice(&answer.unwrap().data);
        }
        assert_eq!(said, b"200");
        copying.await.unwrap();
    }
}
