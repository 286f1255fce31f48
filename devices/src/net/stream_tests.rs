use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use proptest::prelude::*;

use super::*;

const HEADER: [u8; HEADER_LEN] = [0; HEADER_LEN];

fn pair() -> (FrameStream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    (FrameStream::new(ours.into()).unwrap(), theirs)
}

fn framed(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_be_bytes(), frame].concat()
}

/// Sends a frame from pieces of `piece` bytes.
fn send_in(stream: &mut FrameStream, frame: &[u8], piece: usize) -> io::Result<()> {
    let mut bytes = frame.to_vec();
    let slices: Vec<_> = bytes.chunks_mut(piece).map(VolatileSlice::from).collect();
    stream.send(&HEADER, &slices)
}

/// Receives a frame into pieces of `piece` bytes.
fn receive_in(stream: &mut FrameStream, piece: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; MAX_FRAME];
    let slices: Vec<_> = bytes.chunks_mut(piece).map(VolatileSlice::from).collect();
    let mut header = [9; HEADER_LEN];
    let len = stream.receive(&mut header, &slices)?;
    assert_eq!(header, HEADER);
    bytes.truncate(len);
    Ok(bytes)
}

fn kind<T>(done: io::Result<T>) -> Option<io::ErrorKind> {
    done.err().map(|error| error.kind())
}

/// Returns the bytes that the peer has not read yet.
fn drain(peer: &mut UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = peer.read_to_end(&mut bytes);
    bytes
}

#[test]
fn what_is_no_stream_socket_is_refused() {
    let file = tempfile::tempfile().unwrap();
    assert!(matches!(
        FrameStream::new(file.into()),
        Err(StreamError::NotASocket(_))
    ));
    let datagrams = std::os::unix::net::UnixDatagram::unbound().unwrap();
    assert!(matches!(
        FrameStream::new(datagrams.into()),
        Err(StreamError::NotAStream)
    ));
}

#[test]
fn a_frame_goes_behind_its_length() {
    let (mut stream, mut peer) = pair();
    send_in(&mut stream, b"0123456789abcdef", 3).unwrap();
    assert_eq!(drain(&mut peer), framed(b"0123456789abcdef"));
    peer.write_all(&framed(b"fedcba9876543210")).unwrap();
    assert_eq!(receive_in(&mut stream, 5).unwrap(), b"fedcba9876543210");
    assert_eq!(
        kind(receive_in(&mut stream, 5)),
        Some(io::ErrorKind::WouldBlock)
    );
}

#[test]
fn a_frame_that_comes_byte_by_byte_is_one() {
    let (mut stream, mut peer) = pair();
    let bytes = [framed(&[1; 60]), framed(&[]), framed(&[2; 60])].concat();
    let mut got = Vec::new();
    for byte in bytes {
        peer.write_all(&[byte]).unwrap();
        match receive_in(&mut stream, 100) {
            Ok(frame) => got.push(frame),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
        }
    }
    assert_eq!(got, [vec![1; 60], vec![], vec![2; 60]]);
}

#[test]
fn a_frame_longer_than_the_drivers_room_is_cut_off_and_the_next_one_is_whole() {
    let (mut stream, mut peer) = pair();
    let bytes = [framed(&[1; 100]), framed(&[2; 20])].concat();
    peer.write_all(&bytes).unwrap();
    let mut room = [0; 30];
    let slice = VolatileSlice::from(room.as_mut_slice());
    assert_eq!(stream.receive(&mut HEADER.clone(), &[slice]).unwrap(), 30);
    assert_eq!(receive_in(&mut stream, 100).unwrap(), [2; 20]);
}

#[test]
fn a_peer_that_lies_about_a_length_is_heard_no_more() {
    for len in [MAX_FRAME as u32 + 1, u32::MAX] {
        let (mut stream, mut peer) = pair();
        peer.write_all(&framed(&[7; 14])).unwrap();
        peer.write_all(&len.to_be_bytes()).unwrap();
        assert_eq!(receive_in(&mut stream, 99).unwrap(), [7; 14]);
        assert_eq!(
            kind(receive_in(&mut stream, 99)),
            Some(io::ErrorKind::InvalidData)
        );
        peer.write_all(&framed(&[7; 14])).unwrap();
        let gone = Some(io::ErrorKind::NotConnected);
        assert_eq!(kind(receive_in(&mut stream, 99)), gone);
        assert_eq!(kind(send_in(&mut stream, &[1; 60], 60)), gone);
        assert!(stream.flush().is_ok());
    }
}

#[test]
fn a_peer_that_goes_away_is_an_error_once_and_no_signal() {
    let (mut stream, mut peer) = pair();
    peer.write_all(&framed(&[7; 14])).unwrap();
    peer.write_all(&[0, 0]).unwrap();
    drop(peer);
    assert_eq!(receive_in(&mut stream, 99).unwrap(), [7; 14]);
    assert_eq!(
        kind(receive_in(&mut stream, 99)),
        Some(io::ErrorKind::UnexpectedEof)
    );
    assert_eq!(
        kind(send_in(&mut stream, &[1; 60], 60)),
        Some(io::ErrorKind::NotConnected)
    );
    let (mut stream, peer) = pair();
    drop(peer);
    assert_eq!(
        kind(send_in(&mut stream, &[1; 60], 60)),
        Some(io::ErrorKind::BrokenPipe)
    );
}

#[test]
fn frames_wait_for_a_peer_that_does_not_read_and_come_whole() {
    let (mut stream, mut peer) = pair();
    let frame = |number: u8| vec![number; 60_000];
    let mut sent = 0;
    while stream.flush().is_ok() {
        send_in(&mut stream, &frame(sent), 999).unwrap();
        sent += 1;
    }
    assert_eq!(kind(stream.flush()), Some(io::ErrorKind::WouldBlock));
    // No caller should try this, but if one does, nothing gets mixed up.
    assert_eq!(
        kind(send_in(&mut stream, &frame(99), 999)),
        Some(io::ErrorKind::WouldBlock)
    );
    let mut bytes = drain(&mut peer);
    stream.flush().unwrap();
    bytes.extend(drain(&mut peer));
    let all: Vec<u8> = (0..sent)
        .flat_map(|number| framed(&frame(number)))
        .collect();
    assert!(bytes == all, "{} bytes of {}", bytes.len(), all.len());
}

#[test]
fn a_frame_that_no_peer_takes_is_refused() {
    let (mut stream, mut peer) = pair();
    let refused = send_in(&mut stream, &vec![0; MAX_SENT + 1], MAX_FRAME);
    assert_eq!(kind(refused), Some(io::ErrorKind::InvalidInput));
    send_in(&mut stream, &[3; 60], 60).unwrap();
    assert_eq!(drain(&mut peer), framed(&[3; 60]));
}

proptest! {
    /// However the stream is divided into pieces, the same frames are received.
    #[test]
    fn frames_do_not_depend_on_how_they_come(
        lens in proptest::collection::vec(0usize..3000, 1..20),
        pieces in proptest::collection::vec(1usize..4000, 1..20),
    ) {
        let (mut stream, mut peer) = pair();
        let frames: Vec<Vec<u8>> = lens.iter().map(|len| vec![*len as u8; *len]).collect();
        let bytes: Vec<u8> = frames.iter().flat_map(|frame| framed(frame)).collect();
        let mut rest = bytes.as_slice();
        let mut got = Vec::new();
        for piece in pieces.iter().cycle() {
            let (now, later) = rest.split_at((*piece).min(rest.len()));
            peer.write_all(now).unwrap();
            while let Ok(frame) = receive_in(&mut stream, 1500) {
                got.push(frame);
            }
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(got, frames);
    }

    /// No bytes from the peer cause a panic or a read beyond the buffer.
    #[test]
    fn nonsense_ends_the_stream_at_most(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let (mut stream, mut peer) = pair();
        peer.write_all(&bytes).unwrap();
        drop(peer);
        while receive_in(&mut stream, 64).is_ok() {}
        prop_assert!(stream.has_failed);
    }
}

#[test]
fn a_frame_that_the_host_does_not_send_costs_no_other_one() {
    let (mut stream, mut peer) = pair();
    // With the length prefix it has one piece more than the kernel takes per call.
    let refused = send_in(&mut stream, &[1; 1024], 1).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EMSGSIZE));
    send_in(&mut stream, &[2; 60], 60).unwrap();
    assert_eq!(drain(&mut peer), framed(&[2; 60]));
    drop(peer);
    assert_eq!(
        kind(send_in(&mut stream, &[3; 60], 60)),
        Some(io::ErrorKind::BrokenPipe)
    );
    assert_eq!(
        kind(send_in(&mut stream, &[3; 60], 60)),
        Some(io::ErrorKind::NotConnected)
    );
}
