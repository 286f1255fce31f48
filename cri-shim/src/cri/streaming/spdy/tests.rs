//! The protocol's constants, and connections with a client of our own.

use tokio::io::{AsyncWriteExt as _, DuplexStream, duplex};
use tokio::sync::mpsc;

use super::headers::dictionary;
use super::*;

#[test]
fn the_dictionary_is_the_protocols() {
    let bytes = dictionary();
    assert_eq!(bytes.len(), 1423);
    let (mut a, mut b) = (1_u32, 0_u32);
    for byte in bytes {
        a = (a + u32::from(byte)) % 65521;
        b = (b + a) % 65521;
    }
    // What each zlib stream of SPDY/3 names as its dictionary.
    assert_eq!(b << 16 | a, 0xe3c6_a7c2);
}

fn header(pairs: &[(&str, &str)]) -> Headers {
    let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    pairs.iter().map(owned).collect()
}

#[test]
fn headers_pass_through_compression_one_after_the_other() {
    let mut deflater = Deflater::new().unwrap();
    let mut inflater = Inflater::default();
    let long = "x".repeat(20_000);
    for pairs in [
        header(&[("streamtype", "stdin")]),
        header(&[]),
        header(&[("streamtype", "data"), ("port", "80"), ("requestid", &long)]),
        header(&[("streamtype", "stdin")]),
    ] {
        let block = deflater.write(&pairs).unwrap();
        assert_eq!(inflater.read(&block).unwrap(), pairs);
    }
}

#[test]
fn header_blocks_of_a_hostile_client_are_errors_and_bounded() {
    let bomb = header(&[("a", &"x".repeat(1 << 20))]);
    let block = Deflater::new().unwrap().write(&bomb).unwrap();
    assert!(block.len() < 8192);
    assert!(Inflater::default().read(&block).is_err());
    let good = Deflater::new()
        .unwrap()
        .write(&header(&[("a", "b")]))
        .unwrap();
    for cut in 0..good.len() {
        // The last bytes only say that the block is whole.
        match Inflater::default().read(&good[..cut]) {
            Ok(read) => assert_eq!(read, header(&[("a", "b")]), "{cut}"),
            Err(SpdyError::Protocol(_)) => {}
            Err(error) => panic!("{cut}: {error}"),
        }
    }
    assert!(Inflater::default().read(b"no zlib at all").is_err());
}

/// A client's end.
struct Client {
    io: DuplexStream,
    deflater: Deflater,
    inflater: Inflater,
}

impl Client {
    async fn open(&mut self, id: u32, pairs: &[(&str, &str)]) {
        let block = self.deflater.write(&header(pairs)).unwrap();
        let frame = Frame::SynStream {
            id,
            fin: false,
            block,
        };
        self.io.write_all(&frame.encode()).await.unwrap();
    }

    async fn send(&mut self, id: u32, bytes: &[u8], fin: bool) {
        let bytes = bytes.to_vec();
        let frame = Frame::Data { id, fin, bytes };
        self.io.write_all(&frame.encode()).await.unwrap();
    }

    async fn next(&mut self) -> Frame {
        let frame = Frame::read(&mut self.io).await.unwrap().unwrap();
        if let Frame::SynReply { block, .. } = &frame {
            assert!(self.inflater.read(block).unwrap().is_empty());
        }
        frame
    }
}

fn connected(room: usize) -> (Client, mpsc::Receiver<SpdyStream>) {
    let (ours, theirs) = duplex(room);
    let (read, write) = tokio::io::split(ours);
    let (sender, streams) = mpsc::channel(1);
    tokio::spawn(async move {
        let connection = Connection::new(write).unwrap();
        connection.serve(read, sender).await.unwrap();
    });
    let client = Client {
        io: theirs,
        deflater: Deflater::new().unwrap(),
        inflater: Inflater::default(),
    };
    (client, streams)
}

#[tokio::test]
async fn bytes_arrive_whole_and_in_order_though_the_reader_is_slow() {
    let (mut client, mut streams) = connected(4096);
    client.open(1, &[("streamtype", "stdin")]).await;
    let stream = streams.recv().await.unwrap();
    assert_eq!(stream.header("streamtype"), Some("stdin"));
    assert!(matches!(client.next().await, Frame::SynReply { id: 1, .. }));
    let sent: Vec<u8> = (0..2_000_000_u32).map(|n| (n % 251) as u8).collect();
    let expected = sent.clone();
    let write = tokio::spawn(async move {
        for chunk in sent.chunks(1000) {
            client.send(1, chunk, false).await;
        }
        client.send(1, b"", true).await;
        client
    });
    let (mut incoming, outgoing) = stream.split();
    let mut received = Vec::new();
    while let Some(bytes) = incoming.recv().await {
        received.extend_from_slice(&bytes);
        tokio::task::yield_now().await;
    }
    assert!(received == expected);
    // The other direction is open still.
    let mut client = write.await.unwrap();
    outgoing.send(b"done").await.unwrap();
    outgoing.close().await.unwrap();
    let bytes = b"done".to_vec();
    assert_eq!(
        client.next().await,
        Frame::Data {
            id: 1,
            fin: false,
            bytes
        }
    );
    assert_eq!(
        client.next().await,
        Frame::Data {
            id: 1,
            fin: true,
            bytes: Vec::new()
        }
    );
}

#[tokio::test]
async fn pings_are_answered_and_unknown_frames_skipped() {
    let (mut client, _streams) = connected(4096);
    // SETTINGS and a WINDOW_UPDATE.
    client
        .io
        .write_all(&[0x80, 3, 0, 4, 0, 0, 0, 4, 0, 0, 0, 0])
        .await
        .unwrap();
    client
        .io
        .write_all(&[0x80, 3, 0, 9, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0, 9])
        .await
        .unwrap();
    client.io.write_all(&Frame::Ping(7).encode()).await.unwrap();
    assert_eq!(client.next().await, Frame::Ping(7));
}

#[tokio::test]
async fn ids_that_are_even_or_used_are_reset_and_late_bytes_ignored() {
    let (mut client, mut streams) = connected(4096);
    client.open(2, &[]).await;
    assert!(matches!(
        client.next().await,
        Frame::RstStream { id: 2, status: 1 }
    ));
    client.open(3, &[]).await;
    assert!(matches!(client.next().await, Frame::SynReply { id: 3, .. }));
    drop(streams.recv().await.unwrap());
    client.open(1, &[]).await;
    assert!(matches!(
        client.next().await,
        Frame::RstStream { id: 1, .. }
    ));
    client.send(3, b"nobody reads this", false).await;
    client.send(99, b"nor this", false).await;
    client.io.write_all(&Frame::Ping(1).encode()).await.unwrap();
    assert_eq!(client.next().await, Frame::Ping(1));
}

#[tokio::test]
async fn what_is_not_spdy_ends_the_connection() {
    for bytes in [
        // Version 2.
        &[0x80, 2, 0, 1, 0, 0, 0, 0][..],
        // A frame of 16 MiB.
        &[0, 0, 0, 1, 0, 0xff, 0xff, 0xff],
        // SYN_STREAM without its ids.
        &[0x80, 3, 0, 1, 0, 0, 0, 1, 0],
    ] {
        let (ours, mut theirs) = duplex(4096);
        let (read, write) = tokio::io::split(ours);
        theirs.write_all(bytes).await.unwrap();
        let (sender, _streams) = mpsc::channel(1);
        let ended = Connection::new(write).unwrap().serve(read, sender).await;
        assert!(matches!(ended, Err(SpdyError::Protocol(_))), "{bytes:?}");
    }
}
