//! A client for SPDY/3.1, like crictl and a kubelet's clients. It builds its frames with the
//! server's own code, so that their correctness is only proved by another server.

use std::collections::HashMap;
use std::io::{BufReader, Read as _, Write as _};
use std::net::TcpStream;

use bytes::BytesMut;
use podvisor_cri::streaming::spdy::frame::{self, FLAG_FIN, FrameHeader, FrameKind, HEADER_LEN};
use podvisor_cri::streaming::spdy::headers::Packer;

/// A frame that opens a stream.
const SYN_STREAM: u16 = 1;

/// A connection to a URL.
pub(super) struct Client {
    write: TcpStream,
    read: BufReader<TcpStream>,
    packer: Packer,
    next: u32,
    /// The data of each stream.
    pub(super) streams: HashMap<u32, Vec<u8>>,
    /// Streams that the server has ended.
    pub(super) ended: Vec<u32>,
}

impl Client {
    pub(super) fn connect(url: &str, protocol: &str) -> Self {
        let rest = url.strip_prefix("http://").unwrap();
        let (address, path) = rest.split_at(rest.find('/').unwrap());
        let mut write = TcpStream::connect(address).unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\n\
             Upgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: {protocol}\r\n\r\n"
        );
        write.write_all(head.as_bytes()).unwrap();
        let mut read = BufReader::new(write.try_clone().unwrap());
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            read.read_exact(&mut byte).unwrap();
            head.extend(byte);
        }
        let head = String::from_utf8(head).unwrap();
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        let head = head.to_ascii_lowercase();
        let chosen = format!("x-stream-protocol-version: {protocol}\r\n");
        assert!(head.contains(&chosen), "{head}");
        Self {
            write,
            read,
            packer: Packer::new(),
            next: 1,
            streams: HashMap::new(),
            ended: Vec::new(),
        }
    }

    /// Opens a stream; returns its number.
    pub(super) fn open(&mut self, headers: &[(&str, &str)]) -> u32 {
        let id = self.next;
        self.next += 2;
        let mut payload = id.to_be_bytes().to_vec();
        // No associated stream, and default priority.
        payload.extend_from_slice(&[0; 6]);
        payload.append(&mut self.packer.pack(headers));
        let mut out = BytesMut::new();
        frame::control(&mut out, SYN_STREAM, 0, &payload);
        self.write.write_all(&out).unwrap();
        id
    }

    pub(super) fn send(&mut self, stream: u32, bytes: &[u8]) {
        self.data(stream, bytes, 0);
    }

    /// Closes this side of a stream.
    pub(super) fn finish(&mut self, stream: u32) {
        self.data(stream, &[], FLAG_FIN);
    }

    fn data(&mut self, stream: u32, bytes: &[u8], flags: u8) {
        let mut out = BytesMut::new();
        frame::data(&mut out, stream, flags, bytes.len());
        out.extend_from_slice(bytes);
        self.write.write_all(&out).unwrap();
    }

    /// Receives a frame; returns `false` at the end.
    pub(super) fn receive(&mut self) -> bool {
        let mut header = [0; HEADER_LEN];
        if self.read.read_exact(&mut header).is_err() {
            return false;
        }
        let header = FrameHeader::parse(header).unwrap();
        let mut payload = vec![0; usize::try_from(header.len).unwrap()];
        self.read.read_exact(&mut payload).unwrap();
        if let FrameKind::Data { stream } = header.kind {
            self.streams.entry(stream).or_default().append(&mut payload);
            if header.flags & FLAG_FIN != 0 {
                self.ended.push(stream);
            }
        }
        true
    }
}
