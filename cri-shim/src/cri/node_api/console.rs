//! The serial console of a VM. One client has it; who comes later takes it over.

use std::sync::Arc;

use bytes::BytesMut;
use podvisor_node_api::messages::{ConsoleInput, ConsoleMessage, Data};
use podvisor_node_api::{AnswerStream, MAX_CHUNK_BYTES};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::pipe;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use tracing::debug;

use super::control::status;
use super::{STREAM_QUEUE, first, not_open};
use crate::cri::node::{ConsoleHold, Node};
use crate::sandbox::StdioFds;

/// Both directions of a console.
struct Console {
    typed: pipe::Sender,
    output: pipe::Receiver,
}

/// Answers a client that opens a console.
pub(super) async fn stream(
    node: &Arc<Node>,
    mut input: Streaming<ConsoleInput>,
) -> Result<AnswerStream<Data>, Status> {
    let Some(ConsoleMessage::Open(vm)) = first(&mut input).await?.message else {
        return Err(not_open());
    };
    let (pod, container) = node.running_vm(&vm).await?;
    let made = (pipe::pipe(), pipe::pipe());
    let ((typed, stdin), (stdout, output)) = match made {
        (Ok(stdin), Ok(stdout)) => (stdin, stdout),
        (Err(error), _) | (_, Err(error)) => {
            return Err(Status::internal(format!("failed to make a pipe: {error}")));
        }
    };
    let blocking = |error| Status::internal(format!("failed to prepare a pipe: {error}"));
    let stdio = StdioFds {
        stdin: Some(stdin.into_blocking_fd().map_err(blocking)?),
        stdout: Some(stdout.into_blocking_fd().map_err(blocking)?),
        ..StdioFds::default()
    };
    // Before it is attached to, so that no two type at the same time.
    let hold = node.vms.take_console(&container.id);
    let attached = pod.client()?.attach(&container.id, stdio).await;
    attached.map_err(status)?;
    let (answers, stream) = mpsc::channel(STREAM_QUEUE);
    let node = Arc::clone(node);
    tokio::spawn(async move {
        let mut hold = hold;
        let console = Console { typed, output };
        serve(console, input, &answers, &mut hold).await;
        node.vms.release_console(&container.id, &hold);
        debug!(container = container.id, "a client left the console");
    });
    Ok(AnswerStream::new(ReceiverStream::new(stream)))
}

/// Copies in both directions until the machine ends, the client goes, or another one comes.
async fn serve(
    console: Console,
    mut input: Streaming<ConsoleInput>,
    answers: &mpsc::Sender<Result<Data, Status>>,
    hold: &mut ConsoleHold,
) {
    let Console {
        mut typed,
        mut output,
    } = console;
    let typing = async {
        while let Ok(Some(message)) = input.message().await {
            let Some(message) = message.message else {
                continue;
            };
            let ConsoleMessage::Data(data) = message else {
                let status = Status::invalid_argument("the console is open already");
                let _ = answers.send(Err(status)).await;
                break;
            };
            // A guest that does not read holds up the client alone.
            if typed.write_all(&data).await.is_err() {
                break;
            }
        }
    };
    let reading = async {
        // Says that it is open.
        let mut data = bytes::Bytes::new();
        loop {
            if answers.send(Ok(Data { data })).await.is_err() {
                return;
            }
            let mut buffer = BytesMut::with_capacity(MAX_CHUNK_BYTES);
            match output.read_buf(&mut buffer).await {
                Ok(1..) => data = buffer.freeze(),
                Ok(0) | Err(_) => return,
            }
        }
    };
    tokio::select! {
        // The end of the client's direction ends the session, as a hang-up does.
        () = typing => {}
        () = reading => {}
        () = answers.closed() => {}
        _ = &mut hold.taken => {
            let status = Status::aborted("another client has taken the console over");
            // It may not read any more.
            let _ = answers.try_send(Err(status));
        }
    }
}
