//! Streams over one connection: one task reads frames, another writes them.

use std::collections::HashMap;
use std::io;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::frame::{self, FrameHeader, FrameKind, HEADER_LEN};
use super::headers::{Packer, Unpacker};
use crate::streaming::channel::{
    CHUNK_SIZE, CLOSE_TIMEOUT, INPUT_PIECES, Input, OUTPUT_PIECES, Outgoing, Output,
};

/// Most streams that a client may have open at the same time.
const MAX_STREAMS: usize = 1024;

/// Size of the buffer for frames that come together; longer data frames bypass it.
const READ_BUFFER: usize = 4 << 10;

/// Most bytes of a control frame; Kubernetes' have a few hundred.
const MAX_CONTROL: u32 = 64 << 10;

/// Most streams that wait to be taken by the session.
const NEW_STREAMS: usize = 16;

/// Most replies of the reader that wait to be sent.
const REPLIES: usize = 64;

/// A stream that the client has opened.
#[derive(Debug)]
pub(crate) struct Stream {
    /// The names are as the client wrote them, which is in lower case.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) input: Input,
    pub(crate) output: Output,
}

impl Stream {
    /// Returns the value of a header.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self
            .headers
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }
}

/// A reply of the reader to the client.
#[derive(Debug)]
enum Reply {
    Taken(u32),
    Refused(u32, u32),
    Pong(u32),
}

/// Keeps a session's connection open until it is dropped.
#[derive(Debug)]
pub(crate) struct KeepOpen(#[expect(dead_code, reason = "held")] mpsc::Sender<Outgoing>);

/// A connection, which runs in parallel with a session that takes its streams.
pub(crate) struct Connection<T> {
    io: T,
    streams: mpsc::Sender<Stream>,
    pieces: mpsc::Sender<Outgoing>,
    outgoing: mpsc::Receiver<Outgoing>,
}

impl<T: AsyncRead + AsyncWrite> Connection<T> {
    /// Wraps an upgraded connection; returns also the receiver of its streams.
    pub(crate) fn new(io: T) -> (Self, mpsc::Receiver<Stream>, KeepOpen) {
        let (streams, new_streams) = mpsc::channel(NEW_STREAMS);
        let (pieces, outgoing) = mpsc::channel(OUTPUT_PIECES);
        let keep_open = KeepOpen(pieces.clone());
        let connection = Self {
            io,
            streams,
            pieces,
            outgoing,
        };
        (connection, new_streams, keep_open)
    }

    /// Serves until the client is gone, or the session has dropped all outputs and its
    /// [`KeepOpen`].
    pub(crate) async fn run(self) -> io::Result<()> {
        let (reader, writer) = tokio::io::split(self.io);
        let (replies, owed) = mpsc::channel(REPLIES);
        let mut reading = Reading {
            io: BufReader::with_capacity(READ_BUFFER, reader),
            unpacker: Unpacker::default(),
            open: HashMap::new(),
            last: 0,
            streams: self.streams,
            // The writer ends when all outputs are dropped: the reader must not hold one.
            pieces: self.pieces.downgrade(),
            replies,
        };
        drop(self.pieces);
        let writing = write(writer, self.outgoing, owed);
        tokio::pin!(writing);
        tokio::select! {
            read = reading.run() => {
                // The session sees the end of its inputs; its remaining output is sent.
                drop(reading);
                writing.await.and(read)
            }
            written = &mut writing => {
                written?;
                // An unread byte would make the kernel reset the connection, and the client would
                // lose what it has not read yet.
                let _ = timeout(CLOSE_TIMEOUT, reading.drain()).await;
                Ok(())
            }
        }
    }
}

/// A stream that has not ended on both sides, or had not at the last check.
struct Open {
    /// The receiver of its data, until the client has ended its side.
    data: Option<mpsc::Sender<Bytes>>,
    /// Whether the client has reset it; closed when the server has ended its side.
    is_reset: watch::Sender<bool>,
}

impl Open {
    fn has_ended(&self) -> bool {
        self.data.is_none() && self.is_reset.is_closed()
    }
}

struct Reading<R> {
    io: BufReader<R>,
    unpacker: Unpacker,
    open: HashMap<u32, Open>,
    last: u32,
    streams: mpsc::Sender<Stream>,
    pieces: mpsc::WeakSender<Outgoing>,
    replies: mpsc::Sender<Reply>,
}

impl<R: AsyncRead + Unpin> Reading<R> {
    async fn run(&mut self) -> io::Result<()> {
        while let Some(header) = self.header().await? {
            match header.kind {
                FrameKind::Data { stream } => self.data(stream, &header).await?,
                _ if header.len > MAX_CONTROL => {
                    return Err(invalid("a control frame is too large"));
                }
                kind => {
                    let mut payload = vec![0; header.len as usize];
                    self.io.read_exact(&mut payload).await?;
                    self.control(kind, header.flags, &payload).await?;
                }
            }
        }
        Ok(())
    }

    /// Reads and drops everything up to the client's end.
    async fn drain(&mut self) -> io::Result<()> {
        self.open.clear();
        let mut bytes = vec![0; CHUNK_SIZE];
        while self.io.read(&mut bytes).await? > 0 {}
        Ok(())
    }

    /// Reads a header; `None` at the end of the connection, between two frames.
    async fn header(&mut self) -> io::Result<Option<FrameHeader>> {
        let mut bytes = [0; HEADER_LEN];
        let [first, rest @ ..] = &mut bytes;
        if self.io.read(std::slice::from_mut(first)).await? == 0 {
            return Ok(None);
        }
        self.io.read_exact(rest).await?;
        FrameHeader::parse(bytes).map(Some).map_err(invalid)
    }

    async fn data(&mut self, id: u32, header: &FrameHeader) -> io::Result<()> {
        let mut left = header.len as usize;
        let input = self.open.get(&id).and_then(|stream| stream.data.clone());
        if input.is_none() {
            self.reply(Reply::Refused(id, frame::INVALID_STREAM)).await;
        }
        while left > 0 {
            let mut piece = BytesMut::zeroed(left.min(CHUNK_SIZE));
            self.io.read_exact(&mut piece).await?;
            left -= piece.len();
            if let Some(input) = &input {
                // Fails if the stream is no longer read: its bytes are dropped.
                let _ = input.send(piece.freeze()).await;
            }
        }
        if header.flags & frame::FLAG_FIN != 0 {
            self.end_input(id);
        }
        Ok(())
    }

    /// Records that the client sends no more on a stream, though it may still read there.
    fn end_input(&mut self, id: u32) {
        if let Some(stream) = self.open.get_mut(&id) {
            stream.data = None;
        }
    }

    async fn control(&mut self, kind: FrameKind, flags: u8, payload: &[u8]) -> io::Result<()> {
        match kind {
            FrameKind::SynStream => self.open_stream(flags, payload).await?,
            FrameKind::Headers => {
                // Only to keep the compression in step.
                let block = payload.get(4..).unwrap_or(&[]);
                self.unpacker.unpack(block).map_err(invalid)?;
                if flags & frame::FLAG_FIN != 0 {
                    self.end_input(frame::stream_id(payload).map_err(invalid)?);
                }
            }
            FrameKind::RstStream => {
                let id = frame::stream_id(payload).map_err(invalid)?;
                if let Some(stream) = self.open.remove(&id) {
                    stream.is_reset.send_replace(true);
                }
            }
            FrameKind::Ping => {
                let id = frame::word(payload, 0).map_err(invalid)?;
                self.reply(Reply::Pong(id)).await;
            }
            // After GOAWAY, a client closes the connection. The server opens no streams that could
            // get a reply.
            FrameKind::GoAway | FrameKind::SynReply | FrameKind::Other | FrameKind::Data { .. } => {
            }
        }
        Ok(())
    }

    async fn open_stream(&mut self, flags: u8, payload: &[u8]) -> io::Result<()> {
        let id = frame::stream_id(payload).map_err(invalid)?;
        // The associated stream, priority and slot are not used.
        let block = payload
            .get(10..)
            .ok_or_else(|| invalid("a stream without headers"))?;
        let headers = self.unpacker.unpack(block).map_err(invalid)?;
        if id.is_multiple_of(2) || id <= self.last {
            return Err(invalid("a stream with an id that is not the client's next"));
        }
        self.last = id;
        if self.open.len() >= MAX_STREAMS {
            self.open.retain(|_, stream| !stream.has_ended());
        }
        let pieces = self.pieces.upgrade();
        let (Some(pieces), true) = (pieces, self.open.len() < MAX_STREAMS) else {
            self.reply(Reply::Refused(id, frame::REFUSED_STREAM)).await;
            return Ok(());
        };
        let (data, input) = mpsc::channel(INPUT_PIECES);
        let (reset, is_reset) = watch::channel(false);
        let open = Open {
            data: (flags & frame::FLAG_FIN == 0).then_some(data),
            is_reset: reset,
        };
        self.open.insert(id, open);
        self.reply(Reply::Taken(id)).await;
        let stream = Stream {
            headers,
            input,
            output: Output {
                channel: id,
                pieces,
                is_reset: Some(is_reset),
            },
        };
        if self.streams.send(stream).await.is_err() {
            self.open.remove(&id);
            self.reply(Reply::Refused(id, frame::REFUSED_STREAM)).await;
        }
        Ok(())
    }

    async fn reply(&mut self, reply: Reply) {
        // Fails if the writer has ended.
        let _ = self.replies.send(reply).await;
    }
}

async fn write(
    mut io: impl AsyncWrite + Unpin,
    mut outgoing: mpsc::Receiver<Outgoing>,
    mut owed: mpsc::Receiver<Reply>,
) -> io::Result<()> {
    let mut packer = Packer::new();
    let mut out = BytesMut::with_capacity(CHUNK_SIZE + HEADER_LEN);
    let mut last = 0;
    let mut replies_end = false;
    loop {
        out.clear();
        // Replies first: a client waits for them before it reads a stream.
        tokio::select! {
            biased;
            reply = owed.recv(), if !replies_end => match reply {
                Some(Reply::Taken(id)) => {
                    last = id;
                    frame::syn_reply(&mut out, id, &packer.pack(&[]));
                }
                Some(Reply::Refused(id, status)) => frame::rst_stream(&mut out, id, status),
                Some(Reply::Pong(id)) => frame::ping(&mut out, id),
                None => replies_end = true,
            },
            piece = outgoing.recv() => match piece {
                Some(piece) => {
                    let flags = if piece.last { frame::FLAG_FIN } else { 0 };
                    frame::data(&mut out, piece.channel, flags, piece.data.len());
                    out.extend_from_slice(&piece.data);
                }
                None => break,
            },
        }
        io.write_all(&out).await?;
    }
    out.clear();
    frame::go_away(&mut out, last);
    io.write_all(&out).await?;
    io.shutdown().await
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
