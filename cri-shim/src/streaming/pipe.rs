//! Between a channel and a descriptor.

use std::io;
use std::os::fd::OwnedFd;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::channel::{Gone, Input, Output, PIECE};

/// One end for this program, the other for somebody else's.
pub(super) fn pair() -> io::Result<(UnixStream, OwnedFd)> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    Ok((UnixStream::from_std(ours)?, theirs.into()))
}

/// A descriptor that was opened elsewhere, as a stream.
pub(super) fn stream(fd: OwnedFd) -> io::Result<UnixStream> {
    let stream = std::os::unix::net::UnixStream::from(fd);
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

/// Carries what the client sends to a process, until one of them has closed. The client's end
/// of the stream becomes the process's.
pub(super) async fn to_process(mut input: Input, mut socket: OwnedWriteHalf) {
    while let Some(piece) = input.recv().await {
        if socket.write_all(&piece).await.is_err() {
            // The process reads no more. What comes is thrown away, so that it is in no one's way.
            while input.recv().await.is_some() {}
            return;
        }
    }
    let _ = socket.shutdown().await;
}

/// Carries what a process writes to the client, until it has closed its end.
pub(super) async fn to_client(mut socket: OwnedReadHalf, output: &Output) -> Result<(), Gone> {
    loop {
        let mut piece = BytesMut::with_capacity(PIECE);
        match socket.read_buf(&mut piece).await {
            // A socket whose other end was dropped with bytes in it is reset: an end as well.
            Ok(0) | Err(_) => return Ok(()),
            Ok(_) => output.write(piece.freeze()).await?,
        }
    }
}
