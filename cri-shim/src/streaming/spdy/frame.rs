//! Frames (SPDY draft 3.1, §2.2): a header of eight bytes, and a payload.

use bytes::{BufMut as _, BytesMut};

/// Size of a frame's header in bytes.
pub const HEADER_LEN: usize = 8;

/// The version in control frames.
const VERSION: u16 = 3;

/// The sender sends nothing more on this stream.
pub const FLAG_FIN: u8 = 1;

/// Stream status: the stream does not exist, or no longer.
pub const INVALID_STREAM: u32 = 2;
/// Stream status: the server refuses the stream.
pub const REFUSED_STREAM: u32 = 3;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameKind {
    /// Data of a stream.
    Data {
        /// The stream's id.
        stream: u32,
    },
    /// The client opens a stream.
    SynStream,
    /// The other side accepts a stream.
    SynReply,
    /// A stream ends immediately.
    RstStream,
    /// A ping, which has to be sent back.
    Ping,
    /// The sender accepts no more streams.
    GoAway,
    /// More headers of a stream.
    Headers,
    /// SETTINGS, WINDOW_UPDATE and any others, which are skipped.
    Other,
}

/// A frame's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// The kind of the frame.
    pub kind: FrameKind,
    /// [`FLAG_FIN`] and others.
    pub flags: u8,
    /// Size of the payload in bytes, at most 2²⁴ - 1.
    pub len: u32,
}

/// The reason why a frame cannot be parsed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum FrameError {
    /// The frame is of another version of SPDY.
    #[error("a control frame of SPDY version {0}, not 3")]
    Version(u16),
    /// A control frame is too short for its kind.
    #[error("a control frame of {len} bytes, which is too short")]
    Short {
        /// The size of its payload in bytes.
        len: usize,
    },
}

impl FrameHeader {
    /// Parses a header.
    ///
    /// # Errors
    /// [`FrameError::Version`].
    pub fn parse(bytes: [u8; HEADER_LEN]) -> Result<Self, FrameError> {
        let [a, b, c, d, flags, e, f, g] = bytes;
        let first = u32::from_be_bytes([a, b, c, d]);
        let len = u32::from_be_bytes([0, e, f, g]);
        if first >> 31 == 0 {
            let kind = FrameKind::Data { stream: first };
            return Ok(Self { kind, flags, len });
        }
        let version = u16::from_be_bytes([a & 0x7f, b]);
        if version != VERSION {
            return Err(FrameError::Version(version));
        }
        let kind = match u16::from_be_bytes([c, d]) {
            1 => FrameKind::SynStream,
            2 => FrameKind::SynReply,
            3 => FrameKind::RstStream,
            6 => FrameKind::Ping,
            7 => FrameKind::GoAway,
            8 => FrameKind::Headers,
            _ => FrameKind::Other,
        };
        Ok(Self { kind, flags, len })
    }
}

/// Returns the word at byte `at` of a control frame's payload.
///
/// # Errors
/// [`FrameError::Short`].
pub fn word(payload: &[u8], at: usize) -> Result<u32, FrameError> {
    let short = FrameError::Short { len: payload.len() };
    let bytes = at
        .checked_add(4)
        .and_then(|end| payload.get(at..end))
        .and_then(|bytes| bytes.try_into().ok());
    bytes.map(u32::from_be_bytes).ok_or(short)
}

/// Returns a stream's id: the first word without its highest bit, which is reserved.
///
/// # Errors
/// [`FrameError::Short`].
pub fn stream_id(payload: &[u8]) -> Result<u32, FrameError> {
    Ok(word(payload, 0)? & 0x7fff_ffff)
}

/// Writes a control frame.
pub fn control(out: &mut BytesMut, kind: u16, flags: u8, payload: &[u8]) {
    out.put_u16(0x8000 | VERSION);
    out.put_u16(kind);
    put_len(out, flags, payload.len());
    out.put_slice(payload);
}

/// Writes the header of a data frame of `len` bytes, which follow.
pub fn data(out: &mut BytesMut, stream: u32, flags: u8, len: usize) {
    out.put_u32(stream & 0x7fff_ffff);
    put_len(out, flags, len);
}

/// Writes the reply to a stream that the client opened; `block` is a block of headers.
pub fn syn_reply(out: &mut BytesMut, stream: u32, block: &[u8]) {
    let mut payload = Vec::with_capacity(block.len() + 4);
    payload.extend_from_slice(&stream.to_be_bytes());
    payload.extend_from_slice(block);
    control(out, 2, 0, &payload);
}

/// Writes a frame that ends a stream immediately.
pub fn rst_stream(out: &mut BytesMut, stream: u32, status: u32) {
    let mut payload = [0; 8];
    payload[..4].copy_from_slice(&stream.to_be_bytes());
    payload[4..].copy_from_slice(&status.to_be_bytes());
    control(out, 3, 0, &payload);
}

/// Writes the reply to a ping.
pub fn ping(out: &mut BytesMut, id: u32) {
    control(out, 6, 0, &id.to_be_bytes());
}

/// Writes a frame that ends the connection in good order; `last` is the last stream that was
/// served.
pub fn go_away(out: &mut BytesMut, last: u32) {
    let mut payload = [0; 8];
    payload[..4].copy_from_slice(&last.to_be_bytes());
    control(out, 7, 0, &payload);
}

fn put_len(out: &mut BytesMut, flags: u8, len: usize) {
    // No payload that is written here comes near 2²⁴ bytes.
    let len = u32::try_from(len).unwrap_or(u32::MAX) & 0x00ff_ffff;
    out.put_u32(u32::from(flags) << 24 | len);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_written_is_read_back() {
        let mut out = BytesMut::new();
        rst_stream(&mut out, 5, REFUSED_STREAM);
        let header = FrameHeader::parse(out[..8].try_into().unwrap()).unwrap();
        let expected = FrameHeader {
            kind: FrameKind::RstStream,
            flags: 0,
            len: 8,
        };
        assert_eq!(header, expected);
        assert_eq!(stream_id(&out[8..]), Ok(5));
        assert_eq!(word(&out[8..], 4), Ok(REFUSED_STREAM));
        out.clear();
        data(&mut out, 7, FLAG_FIN, 0x01_0203);
        let header = FrameHeader::parse(out[..].try_into().unwrap()).unwrap();
        assert_eq!(header.kind, FrameKind::Data { stream: 7 });
        assert_eq!((header.flags, header.len), (FLAG_FIN, 0x01_0203));
    }

    #[test]
    fn other_versions_and_cut_off_payloads_are_refused() {
        let version_2 = [0x80, 2, 0, 1, 0, 0, 0, 0];
        assert_eq!(FrameHeader::parse(version_2), Err(FrameError::Version(2)));
        assert_eq!(stream_id(&[1, 2, 3]), Err(FrameError::Short { len: 3 }));
        assert_eq!(word(&[0; 8], usize::MAX), Err(FrameError::Short { len: 8 }));
    }

    proptest! {
        #[test]
        fn any_eight_bytes_are_a_header_or_an_error(bytes: [u8; 8]) {
            if let Ok(header) = FrameHeader::parse(bytes) {
                prop_assert!(header.len < 1 << 24);
            }
        }
    }
}
