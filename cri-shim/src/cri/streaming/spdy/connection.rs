//! One connection and its streams.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{Mutex, mpsc};

use super::frame::{Frame, data_head};
use super::headers::{Deflater, Inflater};
use super::{Headers, SpdyError};

/// Frames that a stream may be ahead of who reads it; then the connection waits.
const AHEAD: usize = 8;
/// Most streams of a connection at a time.
const STREAMS: usize = 1024;

/// REFUSED_STREAM and PROTOCOL_ERROR (section 2.6.3).
const REFUSED: u32 = 3;
const PROTOCOL_ERROR: u32 = 1;

type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// The sending side, which all streams share.
struct Sender {
    io: Writer,
    deflater: Deflater,
}

/// The server's side of a connection.
pub(in crate::cri::streaming) struct Connection {
    sender: Arc<Mutex<Sender>>,
}

/// A stream that the client opened.
pub(in crate::cri::streaming) struct SpdyStream {
    id: u32,
    /// What the client says of it.
    pub(in crate::cri::streaming) headers: Headers,
    incoming: mpsc::Receiver<Vec<u8>>,
    outgoing: Outgoing,
}

/// The sending half of a stream.
#[derive(Clone)]
pub(in crate::cri::streaming) struct Outgoing {
    id: u32,
    sender: Arc<Mutex<Sender>>,
}

impl SpdyStream {
    /// The value of a header.
    pub(in crate::cri::streaming) fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.headers.iter();
        headers
            .find(|(n, _)| n == name)
            .map(|(_, value)| value.as_str())
    }

    /// What the client sends, until it closes its side; and what it is sent.
    pub(in crate::cri::streaming) fn split(self) -> (mpsc::Receiver<Vec<u8>>, Outgoing) {
        (self.incoming, self.outgoing)
    }
}

impl Outgoing {
    /// Sends bytes; returns when the client's socket has taken them.
    pub(in crate::cri::streaming) async fn send(&self, bytes: &[u8]) -> Result<(), SpdyError> {
        self.send_frame(bytes, false).await
    }

    /// Sends the end of the stream.
    pub(in crate::cri::streaming) async fn close(&self) -> Result<(), SpdyError> {
        self.send_frame(&[], true).await
    }

    async fn send_frame(&self, bytes: &[u8], fin: bool) -> Result<(), SpdyError> {
        let mut sender = self.sender.lock().await;
        sender
            .io
            .write_all(&data_head(self.id, fin, bytes.len()))
            .await?;
        sender.io.write_all(bytes).await?;
        Ok(sender.io.flush().await?)
    }
}

/// The receiving side of one stream.
struct Receiving {
    /// None once the client has closed it.
    bytes: Option<mpsc::Sender<Vec<u8>>>,
}

impl Connection {
    /// Begins a connection that writes to `io`.
    pub(in crate::cri::streaming) fn new(
        io: impl AsyncWrite + Send + Unpin + 'static,
    ) -> Result<Self, SpdyError> {
        let sender = Sender {
            io: Box::new(io),
            deflater: Deflater::new()?,
        };
        Ok(Self {
            sender: Arc::new(Mutex::new(sender)),
        })
    }

    /// Reads from `io` until the client ends the connection, and passes new streams on.
    /// Whoever takes no more streams has its `streams` closed; then new ones are refused.
    pub(in crate::cri::streaming) async fn serve(
        &self,
        mut io: impl AsyncRead + Unpin,
        streams: mpsc::Sender<SpdyStream>,
    ) -> Result<(), SpdyError> {
        let mut inflater = Inflater::default();
        let mut open: HashMap<u32, Receiving> = HashMap::new();
        let mut last = 0;
        while let Some(frame) = Frame::read(&mut io).await? {
            match frame {
                Frame::SynStream { id, fin, block } => {
                    // Also of a stream that is refused: the compression goes on through it.
                    let headers = inflater.read(&block)?;
                    // Clients' ids are odd and grow.
                    if id % 2 == 0 || id <= last {
                        self.reset(id, PROTOCOL_ERROR).await?;
                        continue;
                    }
                    last = id;
                    open.retain(|_, stream| {
                        stream
                            .bytes
                            .as_ref()
                            .is_some_and(|bytes| !bytes.is_closed())
                    });
                    if open.len() >= STREAMS {
                        self.reset(id, REFUSED).await?;
                        continue;
                    }
                    let (sender, incoming) = mpsc::channel(AHEAD);
                    let stream = SpdyStream {
                        id,
                        headers,
                        incoming,
                        outgoing: Outgoing {
                            id,
                            sender: Arc::clone(&self.sender),
                        },
                    };
                    self.reply(stream.id).await?;
                    if streams.send(stream).await.is_err() {
                        self.reset(id, REFUSED).await?;
                        continue;
                    }
                    let bytes = (!fin).then_some(sender);
                    open.insert(id, Receiving { bytes });
                }
                Frame::Data { id, fin, bytes } => {
                    // What comes for a stream that is closed is late, and nobody's.
                    let Some(stream) = open.get_mut(&id) else {
                        continue;
                    };
                    if let Some(sender) = &stream.bytes
                        && !bytes.is_empty()
                        && sender.send(bytes).await.is_err()
                    {
                        stream.bytes = None;
                    }
                    if fin {
                        stream.bytes = None;
                    }
                }
                Frame::RstStream { id, .. } => drop(open.remove(&id)),
                // The client's own pings have odd ids.
                Frame::Ping(id) if id % 2 == 1 => self.send(&Frame::Ping(id)).await?,
                Frame::Headers { block } | Frame::SynReply { block, .. } => {
                    inflater.read(&block)?;
                }
                Frame::GoAway { .. } | Frame::Ping(_) | Frame::Other => {}
            }
        }
        Ok(())
    }

    /// Tells the client that no more streams are taken, and closes the sending side.
    pub(in crate::cri::streaming) async fn close(&self) -> Result<(), SpdyError> {
        self.send(&Frame::GoAway { last: 0 }).await?;
        Ok(self.sender.lock().await.io.shutdown().await?)
    }

    async fn reply(&self, id: u32) -> Result<(), SpdyError> {
        let mut sender = self.sender.lock().await;
        let block = sender.deflater.write(&[])?;
        let frame = Frame::SynReply { id, block }.encode();
        sender.io.write_all(&frame).await?;
        Ok(sender.io.flush().await?)
    }

    async fn reset(&self, id: u32, status: u32) -> Result<(), SpdyError> {
        self.send(&Frame::RstStream { id, status }).await
    }

    async fn send(&self, frame: &Frame) -> Result<(), SpdyError> {
        let mut sender = self.sender.lock().await;
        sender.io.write_all(&frame.encode()).await?;
        Ok(sender.io.flush().await?)
    }
}
