//! The line in which a host program names the port of the guest that it connects to.

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

/// The maximum length of a line in bytes; the longest valid one has 19.
const MAX_LINE: usize = 32;

/// The state of a host program's handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Handshake {
    /// The line is not complete yet.
    Incomplete,
    /// The program connects to this port of the guest. The line, and nothing else, was read from
    /// the socket.
    Connect(u32),
    /// The program closed the socket, or sent something else.
    Refuse,
}

/// Looks at what a host program has sent. Until the line is complete it stays in the socket, so
/// that a slow program costs no memory, and the bytes after the line belong to the stream.
pub(super) fn read(socket: &OwnedFd) -> Handshake {
    let mut buf = [0u8; MAX_LINE];
    let seen = match receive(socket, &mut buf, RecvFlags::PEEK) {
        Ok(0) => return Handshake::Refuse,
        Ok(seen) => seen,
        Err(Errno::AGAIN) => return Handshake::Incomplete,
        Err(_) => return Handshake::Refuse,
    };
    let line = buf.get(..seen).unwrap_or(&[]);
    let Some(end) = line.iter().position(|&byte| byte == b'\n') else {
        return if seen < MAX_LINE {
            Handshake::Incomplete
        } else {
            Handshake::Refuse
        };
    };
    let Some(port) = line.get(..end).and_then(parse) else {
        return Handshake::Refuse;
    };
    let mut rest = end.saturating_add(1);
    while rest > 0 {
        let Some(line) = buf.get_mut(..rest) else {
            return Handshake::Refuse;
        };
        match receive(socket, line, RecvFlags::empty()) {
            Ok(0) | Err(_) => return Handshake::Refuse,
            Ok(taken) => rest = rest.saturating_sub(taken),
        }
    }
    Handshake::Connect(port)
}

fn receive(socket: &OwnedFd, buf: &mut [u8], flags: RecvFlags) -> Result<usize, Errno> {
    rustix::io::retry_on_intr(|| recv(socket.as_fd(), &mut *buf, flags | RecvFlags::DONTWAIT))
        .map(|(taken, _)| taken)
}

fn parse(line: &[u8]) -> Option<u32> {
    let digits = line.strip_prefix(b"CONNECT ")?;
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    fn pair() -> (UnixStream, OwnedFd) {
        let (peer, ours) = UnixStream::pair().unwrap();
        (peer, ours.into())
    }

    #[test]
    fn a_line_may_come_in_pieces_and_leaves_what_follows() {
        let (mut peer, ours) = pair();
        assert_eq!(read(&ours), Handshake::Incomplete);
        peer.write_all(b"CONN").unwrap();
        assert_eq!(read(&ours), Handshake::Incomplete);
        peer.write_all(b"ECT 1026\n0123456789abcdef and much more than a line")
            .unwrap();
        assert_eq!(read(&ours), Handshake::Connect(1026));
        let mut ours = UnixStream::from(ours);
        let mut rest = [0; 16];
        ours.read_exact(&mut rest).unwrap();
        assert_eq!(&rest, b"0123456789abcdef");
    }

    #[test]
    fn a_program_that_closes_before_its_line_is_refused() {
        let (peer, ours) = pair();
        drop(peer);
        assert_eq!(read(&ours), Handshake::Refuse);
    }

    #[test]
    fn a_line_that_does_not_end_is_refused() {
        let (mut peer, ours) = pair();
        peer.write_all(&[b'x'; MAX_LINE - 1]).unwrap();
        assert_eq!(read(&ours), Handshake::Incomplete);
        peer.write_all(b"x").unwrap();
        assert_eq!(read(&ours), Handshake::Refuse);
    }

    #[test]
    fn only_the_exact_line_counts() {
        for good in ["0", "1026", "4294967295", "0000000001"] {
            assert_eq!(
                parse(format!("CONNECT {good}").as_bytes()),
                good.parse().ok()
            );
        }
        for bad in [
            "CONNECT",
            "CONNECT ",
            "CONNECT +1",
            "CONNECT -1",
            "CONNECT 1 ",
            "CONNECT 4294967296",
            "connect 1",
            " CONNECT 1",
            "CONNECT 1\r",
        ] {
            assert_eq!(parse(bad.as_bytes()), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let (mut peer, ours) = pair();
            peer.write_all(&bytes).unwrap();
            let whole = bytes.iter().take(MAX_LINE).any(|b| *b == b'\n');
            let answer = read(&ours);
            prop_assert_eq!(
                answer == Handshake::Incomplete,
                !whole && bytes.len() < MAX_LINE
            );
        }
    }
}
