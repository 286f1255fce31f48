//! The control socket: connections are accepted and served in parallel, up to a limit.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::warn;

use super::super::types::RefusalKind;
use super::super::wire::{FrameReader, FrameWriter, Refusal, Reply};
use super::connection::{converse, has_ended, next};
use super::service::Service;

/// Most connections at the same time. Each program in the foreground, and each waiting client, has
/// one.
const MAX_CONNECTIONS: usize = 512;

/// Most excess connections that are refused at the same time; others wait to be accepted.
const MAX_REFUSED_CONNECTIONS: usize = 64;

/// Connections that are served or refused at the same time.
const MAX_ACCEPTED: usize = MAX_CONNECTIONS + MAX_REFUSED_CONNECTIONS;

/// How long a refused connection may take to send a request.
const REFUSED_TIMEOUT: Duration = Duration::from_secs(2);

/// Delay before the next accept after one has failed.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Serves connections until the machine has ended and everything is answered.
pub(super) async fn serve(listener: UnixListener, service: Service) {
    let mut exit = service.exit.clone();
    let mut connections = JoinSet::new();
    let mut retry_at = Instant::now();
    loop {
        let accept = async {
            sleep_until(retry_at).await;
            listener.accept().await
        };
        tokio::select! {
            accepted = accept, if connections.len() < MAX_ACCEPTED => match accepted {
                Ok((stream, _)) if connections.len() < MAX_CONNECTIONS => {
                    let (cause, exit) = (service.cause.clone(), service.exit.clone());
                    let service = service.clone();
                    connections.spawn(converse(stream, cause, exit, move |call, fds| {
                        let service = service.clone();
                        async move { service.answer(call, fds).await }
                    }));
                }
                Ok((stream, _)) => {
                    connections.spawn(refuse(stream));
                }
                // Its other side is gone already, or there are too few descriptors.
                Err(error) => {
                    warn!(%error, "cannot accept a control connection");
                    retry_at = Instant::now() + RETRY_DELAY;
                }
            },
            Some(_) = connections.join_next() => {}
            () = has_ended(&mut exit) => break,
        }
    }
    // New clients are refused from here on, instead of finding a machine that does not answer.
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Refuses the first request of a connection in excess of the limit, and closes it.
async fn refuse(stream: UnixStream) {
    let stream = Arc::new(stream);
    let mut reader = FrameReader::new(Arc::clone(&stream));
    let Ok(Ok(Some(asked))) = timeout(REFUSED_TIMEOUT, next(&mut reader)).await else {
        return;
    };
    let number = asked.number();
    let message = format!(
        "there are {MAX_CONNECTIONS} connections to the sandbox already, each of a program in the \
         foreground or of somebody who waits: end some"
    );
    let answer = Err(Refusal {
        kind: RefusalKind::ResourceExhausted,
        message,
    });
    if let Ok(body) = serde_json::to_vec(&Reply { number, answer }) {
        // The client may be gone.
        let _ = FrameWriter::new(stream).send(&body, &[]).await;
    }
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
