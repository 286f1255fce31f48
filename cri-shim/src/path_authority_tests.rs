//! Tests of connections whose client sends the socket's path as authority.

use proptest::prelude::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tonic::service::Routes;
use tonic::transport::Server;

use super::*;

fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
}

/// A field by its name's index, added to the table.
fn indexed(index: u8, is_huffman: bool, value: &[u8]) -> Vec<u8> {
    let length = u8::try_from(value.len()).unwrap() | if is_huffman { 0x80 } else { 0 };
    [&[0x40 | index, length], value].concat()
}

/// The block of a call: POST, http, a path, its type and `te`.
fn call(authority: &[u8]) -> Vec<u8> {
    let named = [b"\x00\x02te\x08trailers".as_slice()].concat();
    [
        &[0x83, 0x86][..],
        &indexed(4, false, b"/a.B/C"),
        authority,
        &indexed(31, false, b"application/grpc"),
        &named,
    ]
    .concat()
}

/// All that a client sends for a call.
fn request(authority: &[u8]) -> Vec<u8> {
    let settings = frame(4, 0, 0, &[]);
    let data = frame(0, 1, 1, &[0; 5]);
    let headers = frame(HEADERS, END_HEADERS, 1, &call(authority));
    [PREFACE, &settings, &headers, &data].concat()
}

/// Returns what the server reads of what a client sends in pieces of this size.
fn through(sent: &[u8], piece: usize) -> Vec<u8> {
    let mut rewriter = Rewriter::default();
    let mut read = Vec::new();
    let mut buffer = [0; 7];
    let mut drain = |rewriter: &mut Rewriter| {
        let mut buffer = ReadBuf::new(&mut buffer);
        while rewriter.give(&mut buffer) {
            read.extend_from_slice(buffer.filled());
            buffer.clear();
        }
    };
    for piece in sent.chunks(piece) {
        rewriter.take(piece);
        drain(&mut rewriter);
    }
    rewriter.end();
    drain(&mut rewriter);
    read
}

/// `tmp%2Fx.sock` and what becomes of it, `/run/podvisor/x.sock`, `unix:/run/x`, `localhost:80`, as
/// HPACK codes them.
const PERCENT_CODED: &[u8] = b"\x4d\x35\xaa\x2c\x3e\x57\x41\xc9\xd7";
const PERCENT_DONE: &[u8] = b"\x4d\x35\xac\x2c\x3e\x57\x41\xc9\xd7";
const SLASH_CODED: &[u8] = b"\x62\xcb\x6a\x62\xb3\xc9\xdc\xc8\x3d\x8c\x79\x5d\x07\x27\x5f";
const SLASH_DONE: &[u8] = b"\x5a\xcb\x6a\x5a\xb3\xc9\xdc\xc8\x3d\x8b\x79\x5d\x07\x27\x5f";
const COLON_CODED: &[u8] = b"\xb6\xa3\x79\xb8\xc5\x96\xd4\xc7\x9f";
const COLON_DONE: &[u8] = b"\xb6\xa3\x79\xba\xb5\x96\xd4\xb7\x9f";
const PORT_CODED: &[u8] = b"\xa0\xe4\x1d\x13\x9d\x09\xb8\xf0\x3f";

#[test]
fn a_path_as_authority_becomes_a_name_of_the_same_length() {
    for (is_huffman, sent, read) in [
        (
            false,
            b"tmp%2Fx.sock".as_slice(),
            b"tmp-2Fx.sock".as_slice(),
        ),
        (false, b"/run/x.sock", b"-run-x.sock"),
        (false, b"unix:///run/x", b"unix----run-x"),
        (false, b"localhost:80", b"localhost:80"),
        (false, b"", b""),
        (true, PERCENT_CODED, PERCENT_DONE),
        (true, SLASH_CODED, SLASH_DONE),
        (true, COLON_CODED, COLON_DONE),
        (true, PORT_CODED, PORT_CODED),
    ] {
        let sent = request(&indexed(1, is_huffman, sent));
        let read = request(&indexed(1, is_huffman, read));
        for piece in [1, 9, sent.len()] {
            assert!(through(&sent, piece) == read, "{sent:?} by {piece}");
        }
    }
    // By its name, never indexed, and with a table size first.
    let named = |value: &[u8]| [b"\x10\x0a:authority\x04", value].concat();
    let (sent, read) = (request(&named(b"/a/b")), request(&named(b"-a-b")));
    assert_eq!(through(&sent, 64), read);
    let sized = |value: &[u8]| [b"\x3f\xe1\x1f\x41\x02", value].concat();
    let (sent, read) = (request(&sized(b"/a")), request(&sized(b"-a")));
    assert_eq!(through(&sent, 64), read);
}

#[test]
fn a_block_may_be_in_several_frames_with_padding_and_priority() {
    let both = |value: &[u8]| {
        let block = call(&indexed(1, false, value));
        let (first, rest) = block.split_at(16);
        let padded = [&[3], &[0; 5][..], first, &[0; 3]].concat();
        let frames = [
            frame(HEADERS, PADDED | PRIORITY, 1, &padded),
            frame(CONTINUATION, 0, 1, &rest[..4]),
            frame(CONTINUATION, END_HEADERS, 1, &rest[4..]),
        ];
        [PREFACE, &frames.concat()].concat()
    };
    for piece in [1, 5, 1024] {
        assert_eq!(through(&both(b"/run/x"), piece), both(b"-run-x"));
    }
}

#[test]
fn nothing_else_is_changed() {
    // Another field's value, and data that look like a block.
    let path = indexed(4, false, b"/a%2Fb");
    let headers = frame(HEADERS, END_HEADERS, 1, &path);
    let data = frame(0, 0, 1, &indexed(1, false, b"/run/x"));
    let sent = [PREFACE, &headers, &data, &headers].concat();
    assert_eq!(through(&sent, 3), sent);
    let http1 = [b"GET / HTTP/1.1\r\n".as_slice(), &headers].concat();
    assert_eq!(through(&http1, 4), http1);
    // A block without end is not kept.
    let endless = frame(HEADERS, 0, 1, &[0x82; 200]);
    let more = frame(CONTINUATION, 0, 1, &[0x82; 16_000]).repeat(5);
    let sent = [PREFACE, &endless, &more].concat();
    assert!(through(&sent, 4096) == sent);
}

proptest! {
    #[test]
    fn whatever_a_client_sends_has_its_length_and_ends(
        frames in prop::collection::vec(
            (0..10_u8, any::<u8>(), prop::collection::vec(any::<u8>(), 0..64)), 0..8),
        piece in 1..100_usize,
    ) {
        let frames: Vec<_> = frames.iter().map(|(kind, flags, payload)| {
            frame(*kind, *flags, 1, payload)
        }).collect();
        let sent = [PREFACE, &frames.concat()].concat();
        prop_assert_eq!(through(&sent, piece).len(), sent.len());
        let noise = &sent[PREFACE.len()..];
        prop_assert_eq!(through(noise, piece).len(), noise.len());
    }
}

/// Returns the type of the first frame that a server sends on the call's stream.
async fn first_answer(mut client: UnixStream, authority: &[u8]) -> u8 {
    client.write_all(&request(authority)).await.unwrap();
    loop {
        let mut header = [0; FRAME_HEADER];
        client.read_exact(&mut header).await.unwrap();
        let frame = Frame::at(&header, 0).unwrap();
        let mut payload = vec![0; frame.payload.len()];
        client.read_exact(&mut payload).await.unwrap();
        if header[8] == 1 && frame.kind != 8 {
            return frame.kind;
        }
    }
}

#[tokio::test]
async fn a_server_answers_clients_whose_authority_is_a_path() {
    const RST_STREAM: u8 = 3;
    let authorities = [
        indexed(1, false, b"tmp%2Fx.sock"),
        indexed(1, false, b"/run/x.sock"),
        indexed(1, true, PERCENT_CODED),
        indexed(1, true, SLASH_CODED),
    ];
    for authority in authorities {
        let (client, served) = UnixStream::pair().unwrap();
        let incoming = tokio_stream::once(io::Result::Ok(served));
        let server = Server::builder().add_routes(Routes::default());
        let server = tokio::spawn(server.serve_with_incoming(incoming));
        // Why all this is needed.
        assert_eq!(first_answer(client, &authority).await, RST_STREAM);
        server.await.unwrap().unwrap();

        let (client, served) = UnixStream::pair().unwrap();
        let incoming = tokio_stream::once(io::Result::Ok(PathAuthority::new(served)));
        let server = Server::builder().add_routes(Routes::default());
        let server = tokio::spawn(server.serve_with_incoming(incoming));
        assert_eq!(first_answer(client, &authority).await, HEADERS);
        server.await.unwrap().unwrap();
    }
}
