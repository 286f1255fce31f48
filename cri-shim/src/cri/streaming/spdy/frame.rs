//! Frames (SPDY protocol draft 3.1, section 2.2): reading and writing.

use tokio::io::{AsyncRead, AsyncReadExt as _};

use super::SpdyError;

/// Longest frame that is taken, in bytes. Go's client writes at most 32 KiB at a time.
const FRAME_BYTES: usize = 1 << 20;

/// Version in control frames.
const VERSION: u16 = 3;

/// Stream ids and ping ids have 31 bits.
const ID_MASK: u32 = 0x7fff_ffff;

const FLAG_FIN: u8 = 0x01;

/// A frame, as far as a server of Kubernetes' streams cares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cri::streaming) enum Frame {
    /// Bytes of a stream.
    Data {
        /// The stream.
        id: u32,
        /// Whether they are its last.
        fin: bool,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// A new stream.
    SynStream {
        /// Its id.
        id: u32,
        /// Whether its opener sends nothing on it.
        fin: bool,
        /// Its header, compressed.
        block: Vec<u8>,
    },
    /// The answer to a new stream.
    SynReply {
        /// The stream.
        id: u32,
        /// Its header, compressed.
        block: Vec<u8>,
    },
    /// The end of a stream in both directions.
    RstStream {
        /// The stream.
        id: u32,
        /// Why.
        status: u32,
    },
    /// A question whether the other side is there, and the answer.
    Ping(u32),
    /// No more streams are taken.
    GoAway {
        /// The last stream that was taken.
        last: u32,
    },
    /// More of a stream's header, compressed: the compression goes on through it.
    Headers {
        /// The header.
        block: Vec<u8>,
    },
    /// Settings, window updates and what else there may be.
    Other,
}

mod kind {
    pub(super) const SYN_STREAM: u16 = 1;
    pub(super) const SYN_REPLY: u16 = 2;
    pub(super) const RST_STREAM: u16 = 3;
    pub(super) const PING: u16 = 6;
    pub(super) const GOAWAY: u16 = 7;
    pub(super) const HEADERS: u16 = 8;
}

impl Frame {
    /// The next frame; `None` at the end of the connection.
    pub(in crate::cri::streaming) async fn read(
        from: &mut (impl AsyncRead + Unpin),
    ) -> Result<Option<Self>, SpdyError> {
        let mut head = [0; 8];
        let first = from.read(&mut head[..1]).await?;
        if first == 0 {
            return Ok(None);
        }
        from.read_exact(&mut head[1..]).await?;
        let [a, b, c, d, flags, x, y, z] = head;
        let length = u32::from_be_bytes([0, x, y, z]) as usize;
        if length > FRAME_BYTES {
            return Err(SpdyError::Protocol("a frame is too long"));
        }
        let mut bytes = vec![0; length];
        from.read_exact(&mut bytes).await?;
        let word = u32::from_be_bytes([a, b, c, d]);
        if word & !ID_MASK == 0 {
            let fin = flags & FLAG_FIN != 0;
            return Ok(Some(Self::Data {
                id: word,
                fin,
                bytes,
            }));
        }
        if u16::from_be_bytes([a & 0x7f, b]) != VERSION {
            return Err(SpdyError::Protocol("a frame is of another version than 3"));
        }
        Self::control(u16::from_be_bytes([c, d]), flags, bytes).map(Some)
    }

    fn control(kind: u16, flags: u8, mut bytes: Vec<u8>) -> Result<Self, SpdyError> {
        let word = |at: usize| -> Result<u32, SpdyError> {
            let word = bytes.get(at..at + 4).and_then(|word| word.try_into().ok());
            let word = word.ok_or(SpdyError::Protocol("a frame is too short"))?;
            Ok(u32::from_be_bytes(word))
        };
        let id = || word(0).map(|word| word & ID_MASK);
        Ok(match kind {
            kind::SYN_STREAM => {
                let id = id()?;
                // The associated stream, priority and slot.
                word(4)?;
                if bytes.len() < 10 {
                    return Err(SpdyError::Protocol("a frame is too short"));
                }
                Self::SynStream {
                    id,
                    fin: flags & FLAG_FIN != 0,
                    block: bytes.split_off(10),
                }
            }
            kind::SYN_REPLY => Self::SynReply {
                id: id()?,
                block: bytes.split_off(4),
            },
            kind::RST_STREAM => Self::RstStream {
                id: id()?,
                status: word(4)?,
            },
            kind::PING => Self::Ping(word(0)?),
            kind::GOAWAY => Self::GoAway { last: id()? },
            kind::HEADERS => {
                id()?;
                Self::Headers {
                    block: bytes.split_off(4),
                }
            }
            _ => Self::Other,
        })
    }

    /// The frame as it is sent.
    pub(in crate::cri::streaming) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Data { id, fin, bytes } => {
                let mut frame = data_head(*id, *fin, bytes.len()).to_vec();
                frame.extend_from_slice(bytes);
                frame
            }
            Self::SynStream { id, fin, block } => {
                let mut body = id.to_be_bytes().to_vec();
                body.extend_from_slice(&[0; 6]);
                body.extend_from_slice(block);
                encode_control(kind::SYN_STREAM, u8::from(*fin), &body)
            }
            Self::SynReply { id, block } => {
                let mut body = id.to_be_bytes().to_vec();
                body.extend_from_slice(block);
                encode_control(kind::SYN_REPLY, 0, &body)
            }
            Self::RstStream { id, status } => {
                let mut body = id.to_be_bytes().to_vec();
                body.extend_from_slice(&status.to_be_bytes());
                encode_control(kind::RST_STREAM, 0, &body)
            }
            Self::Ping(id) => encode_control(kind::PING, 0, &id.to_be_bytes()),
            Self::GoAway { last } => {
                let mut body = last.to_be_bytes().to_vec();
                body.extend_from_slice(&[0; 4]);
                encode_control(kind::GOAWAY, 0, &body)
            }
            Self::Headers { .. } | Self::Other => Vec::new(),
        }
    }
}

/// What precedes the bytes of a stream; there are less than 2²⁴ of them.
pub(super) fn data_head(id: u32, fin: bool, length: usize) -> [u8; 8] {
    let [a, b, c, d] = (id & ID_MASK).to_be_bytes();
    let [_, x, y, z] = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    [a, b, c, d, u8::from(fin), x, y, z]
}

fn encode_control(kind: u16, flags: u8, body: &[u8]) -> Vec<u8> {
    let [version_high, version_low] = VERSION.to_be_bytes();
    let [kind_high, kind_low] = kind.to_be_bytes();
    let [_, x, y, z] = u32::try_from(body.len()).unwrap_or(u32::MAX).to_be_bytes();
    let mut frame = vec![
        0x80 | version_high,
        version_low,
        kind_high,
        kind_low,
        flags,
        x,
        y,
        z,
    ];
    frame.extend_from_slice(body);
    frame
}
