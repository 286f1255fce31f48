//! A body whose pieces come as they are made.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame};
use tokio::sync::mpsc;

/// A body that ends with its sender. An error breaks the connection off: the other side must not
/// take it for the end.
pub(crate) struct Pieces(pub(crate) mpsc::Receiver<io::Result<Bytes>>);

impl Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let piece = self.0.poll_recv(context);
        piece.map(|piece| piece.map(|piece| piece.map(Frame::data)))
    }
}
