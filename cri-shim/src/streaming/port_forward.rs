//! Ports of a pod: each connection of the client has a channel of data and one of errors.

use std::sync::Arc;

use bytes::Bytes;

use super::backend::Backend;
use super::channel::{Input, Output};
use super::command::with_causes;
use super::pipe::{self, ForeignStream};

/// One connection that a client wants forwarded.
#[derive(Debug)]
pub(super) struct Forward {
    pub(super) port: u16,
    pub(super) input: Input,
    pub(super) output: Output,
    pub(super) error: Output,
}

impl Forward {
    /// Tells the client why there is no connection.
    pub(super) async fn refuse(self, why: &str) {
        let text = format!("failed to forward port {}: {why}", self.port);
        let _ = self.output.finish(Bytes::new()).await;
        let _ = self.error.finish(Bytes::from(text)).await;
    }
}

/// Carries bytes both ways until both ends have closed, or one of them is gone.
pub(super) async fn run(backend: &Arc<dyn Backend>, pod: &str, forward: Forward) {
    let Forward {
        port,
        input,
        output,
        error,
    } = forward;
    let socket = match backend.port_forward(pod, port).await {
        Ok(fd) => ForeignStream::new(fd).map_err(Into::into),
        Err(why) => Err(why),
    };
    let socket = match socket {
        Ok(socket) => socket,
        Err(why) => {
            let text = format!("failed to forward port {port}: {}", with_causes(&*why));
            let _ = output.finish(Bytes::new()).await;
            let _ = error.finish(Bytes::from(text)).await;
            return;
        }
    };
    let (reader, writer) = socket.into_split();
    let inward = pipe::to_process(input, writer);
    let outward = async {
        if pipe::to_client(reader, &output).await.is_ok() {
            let _ = output.finish(Bytes::new()).await;
        }
    };
    // A server that has closed takes no more either: what the client still sends is thrown away
    // when it ends its stream, or with the connection.
    tokio::join!(inward, outward);
    let _ = error.finish(Bytes::new()).await;
}
