//! gRPC clients that name a socket's path as the authority of their requests.
//!
//! Clients on a unix socket send `localhost`, or nothing, as `:authority`, except some that send
//! the socket's path: as it is (gRPC for Go before 1.54, for Java), or percent-encoded (gRPC's C
//! core, with Python, C++ and Ruby on it). Neither is an authority by RFC 3986, and h2 resets such
//! streams with PROTOCOL_ERROR before a server sees them. No server on a unix socket has a use for
//! the authority, so [`PathAuthority`] replaces the offending characters in what a client sends.
//!
//! It does so in place and without HPACK's state: a value of the name `:authority` is found by
//! walking over a header block (RFC 7541 §6), and `%`, `/` and `:` in it become `-`, or a letter
//! whose Huffman code is as long. No length changes, neither of the frame nor of an entry of the
//! dynamic table, so nothing else of the connection does. A block that cannot be walked is left as
//! it is, and so is the rest of a connection that is not HTTP/2: h2 says what is wrong with it.

use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

/// What a client sends first (RFC 9113 §3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Length of a frame's header.
const FRAME_HEADER: usize = 9;

/// Types of frames, and their flags.
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// Most bytes of a header block with its frames; h2 refuses larger ones.
const MAX_BLOCK: usize = 64 << 10;

/// A connection of which the authorities are valid.
#[derive(Debug)]
pub(crate) struct PathAuthority<S> {
    stream: S,
    rewriter: Rewriter,
}

impl<S> PathAuthority<S> {
    pub(crate) fn new(stream: S) -> Self {
        let rewriter = Rewriter::default();
        Self { stream, rewriter }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for PathAuthority<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if this.rewriter.give(buffer) {
                return Poll::Ready(Ok(()));
            }
            let mut chunk = [0; 8192];
            let mut read = ReadBuf::new(&mut chunk);
            std::task::ready!(Pin::new(&mut this.stream).poll_read(context, &mut read))?;
            match read.filled() {
                [] => {
                    // What is left of an unfinished frame.
                    this.rewriter.end();
                    this.rewriter.give(buffer);
                    return Poll::Ready(Ok(()));
                }
                bytes => this.rewriter.take(bytes),
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PathAuthority<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

impl<S: Connected> Connected for PathAuthority<S> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

/// What a client has sent, on its way to the server.
#[derive(Debug, Default)]
struct Rewriter {
    bytes: Vec<u8>,
    /// How many of them the server has read.
    given: usize,
    /// How many of them it may read.
    ready: usize,
    /// How many further bytes pass without a look at them: of a frame's payload.
    passing: usize,
    state: State,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Preface,
    Frames,
    /// It is not HTTP/2, or a block is too long.
    Opaque,
}

impl Rewriter {
    /// Takes what the client has sent.
    fn take(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.given);
        self.ready -= self.given;
        self.given = 0;
        self.bytes.extend_from_slice(bytes);
        while self.step() {}
    }

    /// Takes the end of what the client has sent.
    fn end(&mut self) {
        self.ready = self.bytes.len();
        self.state = State::Opaque;
    }

    /// Gives the server what is ready; returns whether that is anything.
    fn give(&mut self, buffer: &mut ReadBuf<'_>) -> bool {
        let count = (self.ready - self.given).min(buffer.remaining());
        buffer.put_slice(&self.bytes[self.given..self.given + count]);
        self.given += count;
        count > 0
    }

    /// Makes more bytes ready; returns whether there may be further ones.
    fn step(&mut self) -> bool {
        let rest = self.bytes.len() - self.ready;
        if self.state == State::Opaque {
            self.ready += rest;
            return false;
        }
        if self.passing > 0 {
            let count = self.passing.min(rest);
            self.ready += count;
            self.passing -= count;
            return count > 0;
        }
        if self.state == State::Preface {
            let sent = &self.bytes[self.ready..];
            let count = sent.len().min(PREFACE.len());
            if sent[..count] != PREFACE[..count] {
                self.state = State::Opaque;
                return true;
            }
            if count < PREFACE.len() {
                return false;
            }
            self.ready += count;
            self.state = State::Frames;
            return true;
        }
        let Some(first) = Frame::at(&self.bytes, self.ready) else {
            return false;
        };
        if first.kind != HEADERS {
            self.ready += FRAME_HEADER;
            self.passing = first.payload.len();
            return true;
        }
        self.block(first)
    }

    /// Rewrites the header block that begins with a frame, if it is all there.
    fn block(&mut self, first: Frame) -> bool {
        let mut parts = Vec::new();
        let mut frame = first;
        let mut is_first = true;
        loop {
            if frame.payload.end - self.ready > MAX_BLOCK {
                self.state = State::Opaque;
                return true;
            }
            if frame.payload.end > self.bytes.len() {
                return false;
            }
            match is_first {
                true => parts.extend(frame.fragment(&self.bytes)),
                false => parts.push(frame.payload.clone()),
            }
            if frame.flags & END_HEADERS != 0 {
                break;
            }
            is_first = false;
            let Some(next) = Frame::at(&self.bytes, frame.payload.end) else {
                return false;
            };
            if next.kind != CONTINUATION {
                // h2 ends the connection.
                self.state = State::Opaque;
                return true;
            }
            frame = next;
        }
        let mut block: Vec<u8> = Vec::new();
        for part in &parts {
            block.extend_from_slice(&self.bytes[part.clone()]);
        }
        if rewrite(&mut block) {
            let mut done = 0;
            for part in parts {
                let length = part.len();
                self.bytes[part].copy_from_slice(&block[done..done + length]);
                done += length;
            }
        }
        self.ready = frame.payload.end;
        true
    }
}

/// A frame in a buffer.
#[derive(Debug)]
struct Frame {
    kind: u8,
    flags: u8,
    /// It may end beyond the buffer.
    payload: Range<usize>,
}

impl Frame {
    fn at(bytes: &[u8], start: usize) -> Option<Self> {
        let header = bytes.get(start..start + FRAME_HEADER)?;
        let length = u32::from_be_bytes([0, header[0], header[1], header[2]]) as usize;
        let begin = start + FRAME_HEADER;
        Some(Self {
            kind: header[3],
            flags: header[4],
            payload: begin..begin + length,
        })
    }

    /// Returns the part of the block in a HEADERS frame; `None` if the frame is invalid.
    fn fragment(&self, bytes: &[u8]) -> Option<Range<usize>> {
        let mut part = self.payload.clone();
        if self.flags & PADDED != 0 {
            let padding = usize::from(*bytes.get(part.clone())?.first()?);
            part.start += 1;
            part.end = part.end.checked_sub(padding)?;
        }
        if self.flags & PRIORITY != 0 {
            part.start += 5;
        }
        (part.start <= part.end).then_some(part)
    }
}

/// Makes the authorities of a header block valid. Returns whether anything was changed.
fn rewrite(block: &mut [u8]) -> bool {
    let mut values = Vec::new();
    let mut at = 0;
    while at < block.len() {
        let Some(field) = Field::at(block, at) else {
            break;
        };
        values.extend(field.authority);
        at = field.end;
    }
    let mut is_changed = false;
    for (is_huffman, value) in values {
        is_changed |= match is_huffman {
            true => rewrite_huffman(&mut block[value]),
            false => rewrite_plain(&mut block[value]),
        };
    }
    is_changed
}

/// A field of a header block.
#[derive(Debug)]
struct Field {
    end: usize,
    /// The value, if it is that of an authority, and whether it is Huffman-coded.
    authority: Option<(bool, Range<usize>)>,
}

impl Field {
    /// Index of `:authority` in HPACK's static table.
    const AUTHORITY: usize = 1;

    fn at(block: &[u8], at: usize) -> Option<Self> {
        let first = *block.get(at)?;
        let prefix = match first {
            0x80.. => 7,
            0x40.. => 6,
            // A change of the table's size.
            0x20.. => 5,
            _ => 4,
        };
        let (index, mut end) = integer(block, at, prefix)?;
        if prefix == 7 || prefix == 5 {
            let authority = None;
            return Some(Self { end, authority });
        }
        let is_authority = match index {
            0 => {
                let (is_huffman, name) = string(block, end)?;
                end = name.end;
                !is_huffman && block[name] == *b":authority"
            }
            index => index == Self::AUTHORITY,
        };
        let (is_huffman, value) = string(block, end)?;
        Some(Self {
            end: value.end,
            authority: is_authority.then_some((is_huffman, value)),
        })
    }
}

/// Reads an integer with a prefix of so many bits (RFC 7541 §5.1); returns it and where it ends.
fn integer(block: &[u8], at: usize, prefix: u32) -> Option<(usize, usize)> {
    let limit = (1_usize << prefix) - 1;
    let mut value = usize::from(*block.get(at)?) & limit;
    let mut end = at + 1;
    if value < limit {
        return Some((value, end));
    }
    for shift in [0, 7, 14] {
        let byte = *block.get(end)?;
        end += 1;
        value += usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some((value, end));
        }
    }
    // Longer than any block.
    None
}

/// Finds a string (RFC 7541 §5.2); returns whether it is Huffman-coded, and where it is.
fn string(block: &[u8], at: usize) -> Option<(bool, Range<usize>)> {
    let is_huffman = block.get(at)? & 0x80 != 0;
    let (length, begin) = integer(block, at, 7)?;
    let range = begin..begin.checked_add(length)?;
    block.get(range.clone())?;
    Some((is_huffman, range))
}

fn rewrite_plain(value: &mut [u8]) -> bool {
    if !value.iter().any(|byte| matches!(byte, b'%' | b'/')) {
        return false;
    }
    for byte in value {
        if matches!(*byte, b'%' | b'/' | b':') {
            *byte = b'-';
        }
    }
    true
}

/// How many of HPACK's Huffman codes have each length from 5 bits on. The code is canonical: those
/// of a length follow those of shorter ones, in the order of their symbols.
const CODES: [u32; 26] = [
    10, 26, 32, 6, 0, 5, 3, 2, 6, 2, 3, 0, 0, 0, 3, 8, 13, 26, 29, 12, 4, 15, 19, 29, 0, 4,
];

/// Replacements by code length and code: `%` and `/` by `-`, and `:` by `B`.
const PERCENT: (u32, u32) = (6, 0x15);
const SLASH: (u32, u32) = (6, 0x18);
const DASH: u32 = 0x16;
const COLON: (u32, u32) = (7, 0x5c);
const LETTER: u32 = 0x5d;

fn rewrite_huffman(value: &mut [u8]) -> bool {
    let mut found = Vec::new();
    let mut is_path = false;
    let bits = value.len() * 8;
    let bit = |value: &[u8], at: usize| u32::from(value[at / 8] >> (7 - at % 8) & 1);
    let mut at = 0;
    'symbols: while at < bits {
        let (mut code, mut first, mut length) = (0_u32, 0_u32, 0_u32);
        loop {
            if at + length as usize >= bits || length == 30 {
                // Padding.
                break 'symbols;
            }
            code = code << 1 | bit(value, at + length as usize);
            first <<= 1;
            length += 1;
            let count = length
                .checked_sub(5)
                .map_or(0, |index| CODES[index as usize]);
            if code < first + count {
                break;
            }
            first += count;
        }
        match (length, code) {
            PERCENT | SLASH => {
                is_path = true;
                found.push((at, length, DASH));
            }
            COLON => found.push((at, length, LETTER)),
            _ => {}
        }
        at += length as usize;
    }
    if !is_path {
        return false;
    }
    for (at, length, code) in found {
        for index in 0..length {
            let at = at + index as usize;
            let mask = 1 << (7 - at % 8);
            match code >> (length - 1 - index) & 1 {
                0 => value[at / 8] &= !mask,
                _ => value[at / 8] |= mask,
            }
        }
    }
    true
}

#[cfg(test)]
#[path = "path_authority_tests.rs"]
mod tests;
