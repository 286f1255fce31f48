//! Copies bytes between a channel and a descriptor.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use tokio::io::unix::AsyncFd;
use tokio::io::{
    AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf, ReadHalf, WriteHalf,
};
use tokio::net::UnixStream;

use super::channel::{CHUNK_SIZE, Gone, Input, Output};
use podvisor_host::watch;

/// Returns a socket pair: one end for this program, the other for another process.
pub(super) fn pair() -> io::Result<(UnixStream, OwnedFd)> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    Ok((UnixStream::from_std(ours)?, theirs.into()))
}

/// A stream socket that another process has open, too. That process may clear its non-blocking flag
/// at any time, so each call here is made non-blocking by its own flag.
#[derive(Debug)]
pub(crate) struct ForeignStream(AsyncFd<OwnedFd>);

impl ForeignStream {
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Self> {
        Ok(Self(watch::both(socket)?))
    }

    /// Splits it into a reader and a writer.
    pub(crate) fn into_split(self) -> (ReadHalf<Self>, WriteHalf<Self>) {
        tokio::io::split(self)
    }
}

impl AsyncRead for ForeignStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut ready = ready!(self.0.poll_read_ready(context))?;
            let space = buffer.initialize_unfilled();
            let received = ready.try_io(|fd| {
                let (count, _) = recv(fd.get_ref(), space, RecvFlags::DONTWAIT)?;
                Ok(count)
            });
            // Otherwise it would have blocked, and is polled again.
            if let Ok(received) = received {
                buffer.advance(received?);
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl AsyncWrite for ForeignStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut ready = ready!(self.0.poll_write_ready(context))?;
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            if let Ok(sent) = ready.try_io(|fd| Ok(send(fd.get_ref(), bytes, flags)?)) {
                return Poll::Ready(sent);
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(shutdown(self.0.get_ref(), Shutdown::Write)?))
    }
}

/// Copies the client's input to a process, until one of them has closed. The end of the client's
/// input becomes that of the process's.
pub(super) async fn to_process(mut input: Input, mut socket: impl AsyncWrite + Unpin) {
    while let Some(piece) = input.recv().await {
        if socket.write_all(&piece).await.is_err() {
            // The process no longer reads. Its input is dropped, so that it does not block other
            // channels.
            while input.recv().await.is_some() {}
            return;
        }
    }
    let _ = socket.shutdown().await;
}

/// Copies a process's output to the client, until the process has closed its end.
pub(super) async fn to_client(
    mut socket: impl AsyncRead + Unpin,
    output: &Output,
) -> Result<(), Gone> {
    loop {
        let mut piece = BytesMut::with_capacity(CHUNK_SIZE);
        match socket.read_buf(&mut piece).await {
            // A socket whose other end was closed with unread bytes is reset: that is an end as
            // well.
            Ok(0) | Err(_) => return Ok(()),
            Ok(_) => output.write(piece.freeze()).await?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::ioctl_fionbio;
    use std::time::Duration;

    /// All on one thread, which a blocking call would occupy forever.
    #[tokio::test]
    async fn a_stream_whose_other_holder_wants_it_to_block_does_not() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let held = ours.try_clone().unwrap();
        let stream = ForeignStream::new(ours.into()).unwrap();
        ioctl_fionbio(&held, false).unwrap();
        let (mut reader, mut writer) = stream.into_split();
        let mut buffer = [0; 16];
        let limit = Duration::from_millis(50);
        let read = tokio::time::timeout(limit, reader.read(&mut buffer)).await;
        assert!(read.is_err(), "there is nothing to read");
        let much = vec![0; 4 << 20];
        let written = tokio::time::timeout(limit, writer.write_all(&much)).await;
        assert!(written.is_err(), "nobody reads");

        theirs.set_nonblocking(true).unwrap();
        let mut theirs = UnixStream::from_std(theirs).unwrap();
        theirs.write_all(b"hello").await.unwrap();
        assert_eq!(reader.read(&mut buffer).await.unwrap(), 5);
        writer.shutdown().await.unwrap();
        theirs.read_to_end(&mut Vec::new()).await.unwrap();
        drop(theirs);
        assert_eq!(reader.read(&mut buffer).await.unwrap(), 0);
    }
}
