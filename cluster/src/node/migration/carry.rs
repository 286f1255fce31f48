//! Bytes between another node and `podvisor serve`.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use bytes::BytesMut;
use futures_util::StreamExt;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::{MissedTickBehavior, interval},
};

use crate::node::machines::Pipe;

/// Bytes of one message.
const CHUNK: usize = 256 << 10;

/// After so long without a byte in either direction it is over; both sides have shorter limits.
const SILENCE: Duration = Duration::from_secs(300);

/// Carries bytes until `podvisor serve` has said all.
pub(super) async fn carry(node: impl AsyncRead + AsyncWrite, pipe: Pipe) {
    let (mut reader, mut writer) = tokio::io::split(node);
    let Pipe {
        to_guest,
        mut from_guest,
    } = pipe;
    let alive = AtomicBool::new(true);
    let incoming = async {
        let mut buffer = BytesMut::with_capacity(CHUNK);
        loop {
            buffer.reserve(CHUNK);
            match reader.read_buf(&mut buffer).await {
                Ok(0) | Err(_) => break,
                Ok(_) => alive.store(true, Ordering::Relaxed),
            }
            if to_guest.send(buffer.split().freeze()).await.is_err() {
                break;
            }
        }
        // The end of the other side is the end for this one.
        drop(to_guest);
        std::future::pending::<()>().await;
    };
    let outgoing = async {
        while let Some(Ok(bytes)) = from_guest.next().await {
            if writer.write_all(&bytes).await.is_err() || writer.flush().await.is_err() {
                break;
            }
            alive.store(true, Ordering::Relaxed);
        }
        let _ = writer.shutdown().await;
    };
    let silence = async {
        let mut ticks = interval(SILENCE);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if !alive.swap(false, Ordering::Relaxed) {
                tracing::warn!("a migration's connection was silent for too long");
                return;
            }
        }
    };
    tokio::select! {
        () = incoming => {}
        () = outgoing => {}
        () = silence => {}
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use futures_util::stream;
    use tokio::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn bytes_go_both_ways_and_the_end_of_the_other_side_is_passed_on() {
        let (mut node, end) = tokio::io::duplex(1 << 20);
        let (to_guest, mut heard) = mpsc::channel::<Bytes>(16);
        let (says, said) = mpsc::channel::<Bytes>(16);
        let from_guest = stream::unfold(said, |mut said| async {
            let bytes = said.recv().await?;
            Some((Ok(bytes), said))
        });
        let pipe = Pipe {
            to_guest,
            from_guest: from_guest.boxed(),
        };
        let task = tokio::spawn(carry(end, pipe));
        node.write_all(b"memory").await.unwrap();
        assert_eq!(heard.recv().await.unwrap(), "memory");
        says.send("received".into()).await.unwrap();
        let mut answer = [0; 8];
        node.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"received");
        node.shutdown().await.unwrap();
        assert_eq!(heard.recv().await, None, "it hears the end");
        assert!(!task.is_finished(), "what it says still goes out");
        says.send("in doubt".into()).await.unwrap();
        node.read_exact(&mut answer).await.unwrap();
        drop(says);
        task.await.unwrap();
        assert_eq!(node.read(&mut answer).await.unwrap(), 0);
    }
}
