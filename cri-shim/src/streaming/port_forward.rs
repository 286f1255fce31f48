//! Sessions of port-forward: each connection of the client has a data and an error channel.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::timeout;

use super::backend::Backend;
use super::channel::{Gone, Input, Output};
use super::command::with_causes;
use super::pipe::{self, ForeignStream};

/// How long a client may continue to send after the pod's server has closed: clients usually wait
/// for the connection to end before they close their side. Other runtimes use the same value.
const CLOSE_GRACE: Duration = Duration::from_secs(1);

/// A connection that a client wants forwarded.
#[derive(Debug)]
pub(super) struct Forward {
    pub(super) port: u16,
    pub(super) input: Input,
    pub(super) output: Output,
    pub(super) error: Output,
}

impl Forward {
    /// Tells the client why its connection was refused.
    pub(super) async fn refuse(self, why: &str) {
        let _ = self.output.finish(Bytes::new()).await;
        let _ = self.error.finish(failure(self.port, why)).await;
    }
}

fn failure(port: u16, why: &str) -> Bytes {
    Bytes::from(format!("failed to forward port {port}: {why}"))
}

/// Connects to the port and copies bytes both ways until the pod's server has closed its end, or
/// the client is gone or has reset the data channel.
pub(super) async fn run(backend: &Arc<dyn Backend>, pod: &str, forward: Forward) {
    let Forward {
        port,
        input,
        output,
        error,
    } = forward;
    let reset = output.reset();
    let carried = async {
        let connected = backend.port_forward(pod, port).await;
        match connected.and_then(|fd| Ok(ForeignStream::new(fd)?)) {
            Ok(socket) => {
                carry(socket, input, output).await;
                Bytes::new()
            }
            Err(why) => {
                let _ = output.finish(Bytes::new()).await;
                failure(port, &with_causes(&*why))
            }
        }
    };
    // A client that has reset its data channel still waits for the end of the error channel.
    let told = tokio::select! {
        told = carried => told,
        () = reset => Bytes::new(),
    };
    let _ = error.finish(told).await;
}

/// Copies both ways; returns when the socket is closed.
async fn carry(socket: ForeignStream, input: Input, output: Output) {
    let (reader, writer) = socket.into_split();
    let inward = pipe::to_process(input, writer);
    let outward = async move {
        pipe::to_client(reader, &output).await?;
        output.finish(Bytes::new()).await
    };
    tokio::pin!(inward, outward);
    tokio::select! {
        // The answer follows, without a time limit.
        () = &mut inward => {
            let _ = outward.await;
        }
        ended = &mut outward => {
            if ended != Err(Gone) {
                let _ = timeout(CLOSE_GRACE, inward).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::StdioFds;
    use crate::streaming::backend::{AttachRequest, BackendError, BoxFuture, ExecRequest, Process};
    use crate::streaming::channel::OUTPUT_PIECES;
    use std::os::fd::OwnedFd;
    use std::sync::Mutex;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::sync::mpsc;

    /// A pod whose server is the other end of this socket.
    struct Pod(Mutex<Option<OwnedFd>>);

    impl Backend for Pod {
        fn exec(
            &self,
            _: ExecRequest,
            _: StdioFds,
        ) -> BoxFuture<'_, Result<Process, BackendError>> {
            Box::pin(std::future::ready(Err("only ports".into())))
        }

        fn attach(
            &self,
            _: AttachRequest,
            _: StdioFds,
        ) -> BoxFuture<'_, Result<Process, BackendError>> {
            Box::pin(std::future::ready(Err("only ports".into())))
        }

        fn port_forward<'a>(
            &'a self,
            _: &'a str,
            _: u16,
        ) -> BoxFuture<'a, Result<OwnedFd, BackendError>> {
            let socket = self.0.lock().unwrap().take();
            Box::pin(std::future::ready(socket.ok_or("in use".into())))
        }
    }

    /// The clock only advances while all tasks sleep.
    #[tokio::test(start_paused = true)]
    async fn an_answer_to_a_client_that_has_ended_its_question_is_whole_however_late_it_is() {
        let (mut server, theirs) = pipe::pair().unwrap();
        let backend: Arc<dyn Backend> = Arc::new(Pod(Mutex::new(Some(theirs))));
        let (pieces, mut outgoing) = mpsc::channel(OUTPUT_PIECES);
        let (client, input) = mpsc::channel(1);
        let output = |channel| Output {
            channel,
            pieces: pieces.clone(),
            is_reset: None,
        };
        let (data, error) = (1, 3);
        let forward = Forward {
            port: 80,
            input,
            output: output(data),
            error: output(error),
        };
        tokio::spawn(async move { run(&backend, "p", forward).await });
        client.send(Bytes::from_static(b"question")).await.unwrap();
        drop(client);
        let sent = vec![b'x'; 4 << 20];
        let written = sent.clone();
        let serving = tokio::spawn(async move {
            let mut question = Vec::new();
            server.read_to_end(&mut question).await.unwrap();
            assert_eq!(question, b"question");
            for piece in written.chunks(1 << 20) {
                tokio::time::sleep(CLOSE_GRACE * 1000).await;
                server.write_all(piece).await.unwrap();
            }
        });
        let mut answer = Vec::new();
        let mut is_last = false;
        while !is_last {
            let piece = outgoing.recv().await.unwrap();
            assert_eq!(piece.channel, data);
            answer.extend_from_slice(&piece.data);
            is_last = piece.last;
        }
        assert!(answer == sent, "{} bytes", answer.len());
        serving.await.unwrap();
        let end = outgoing.recv().await.unwrap();
        assert_eq!((end.channel, end.data.len(), end.last), (error, 0, true));
    }
}
