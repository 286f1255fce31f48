//! The network device with a hostile driver, and a host side that sends anything.
//!
//! The first byte of an input selects the backend: a card in memory with one queue pair or two, or
//! a stream socket whose peer lies about lengths, does not read, and hangs up.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use arbitrary::Arbitrary;
use podvisor_devices::net::{HEADER_LEN, LinkState, MemoryNic, MemoryWire, NetDevice, Nic};
use rustix::net::sockopt::set_socket_send_buffer_size;

use crate::driver::{self, Addr, Bench, Len, buffers, steps};

/// The size of the socket's buffer; the kernel enforces a minimum.
const SEND_BUFFER: usize = 1;

/// The valid lengths of frames that reach a stream's peer.
const FRAMES: std::ops::RangeInclusive<usize> = 14..=65_535;

#[derive(Arbitrary, Debug)]
enum Step<A> {
    Driver(driver::Step),
    /// Receive buffers.
    Buffers {
        pair: u8,
        room: Vec<(Addr, Len)>,
    },
    /// A frame after a header.
    Transmit {
        pair: u8,
        header: [u8; HEADER_LEN],
        frame: Vec<(Addr, Len)>,
    },
    Command {
        class: u8,
        command: u8,
        data: Vec<u8>,
    },
    /// The number of queue pairs that the driver uses.
    Pairs(u16),
    Link(bool),
    Backend,
    Host(A),
}

/// The host side of a device.
trait Host {
    /// The actions of the host.
    type Action: for<'a> Arbitrary<'a>;
    fn act(&mut self, action: Self::Action);
    /// Checks what the driver sent.
    fn check(&mut self);
}

/// Runs the program `data`.
///
/// # Panics
/// If the device misbehaves.
pub fn run(data: &[u8]) {
    let Some((kind, program)) = data.split_first() else {
        return;
    };
    match kind % 3 {
        0 => over_memory(1, program),
        1 => over_memory(2, program),
        _ => over_stream(program),
    }
}

fn over_memory(pairs: u8, program: &[u8]) {
    let (nics, wires) = (0..pairs)
        .map(|_| {
            let (nic, wire) = MemoryNic::pair();
            (Box::new(nic) as Box<dyn Nic>, wire)
        })
        .unzip();
    let device = NetDevice::over(nics).expect("descriptors");
    drive(program, pairs, device, Wires(wires));
}

fn over_stream(program: &[u8]) {
    let (ours, theirs) = UnixStream::pair().expect("descriptors");
    theirs.set_nonblocking(true).expect("a socket");
    // One or two frames fill it.
    set_socket_send_buffer_size(&ours, SEND_BUFFER).expect("a socket");
    let device = NetDevice::stream(ours.into()).expect("a stream");
    let peer = Peer {
        socket: Some(theirs),
        prefix: Vec::new(),
        missing: 0,
    };
    drive(program, 1, device, peer);
}

/// Runs a program against a device with this many queue pairs.
fn drive<H: Host>(program: &[u8], pairs: u8, device: NetDevice, mut host: H) {
    let control = 2 * pairs;
    let mut bench = Bench::new(device);
    for step in steps::<Step<H::Action>>(program) {
        match step {
            Step::Driver(step) => bench.step(step),
            Step::Buffers { pair, room } => {
                let queue = pair % pairs * 2;
                for buffer in buffers(&room) {
                    bench.chain(queue, &[], &[buffer]);
                }
                bench.notify(queue.into());
            }
            Step::Transmit {
                pair,
                header,
                frame,
            } => {
                let queue = pair % pairs * 2 + 1;
                let mut parts = vec![bench.place(&header)];
                parts.extend(buffers(&frame));
                bench.chain(queue, &parts, &[]);
                bench.notify(queue.into());
            }
            Step::Command {
                class,
                command,
                data,
            } => {
                let bytes = [vec![class % 8, command % 8], data].concat();
                send_command(&mut bench, control, &bytes);
            }
            Step::Pairs(count) => {
                // Valid numbers more often than others.
                let count = if count > 255 { count } else { count % 4 };
                let [low, high] = count.to_le_bytes();
                send_command(&mut bench, control, &[4, 0, low, high]);
            }
            Step::Link(up) => {
                let link = if up { LinkState::Up } else { LinkState::Down };
                bench.device.set_link(link);
            }
            Step::Backend => bench.backend(),
            Step::Host(action) => {
                host.act(action);
                bench.backend();
            }
        }
        bench.take_used();
        host.check();
    }
    driver::finish(bench);
    host.check();
}

fn send_command(bench: &mut Bench<NetDevice>, control: u8, bytes: &[u8]) {
    let message = bench.place(bytes);
    bench.chain(control, &[message], &[(driver::BUFFERS, 1)]);
    bench.notify(control.into());
}

/// In-memory cards.
struct Wires(Vec<MemoryWire>);

/// Frames from the host.
#[derive(Arbitrary, Debug)]
struct Frames {
    wire: u8,
    header: [u8; HEADER_LEN],
    len: u16,
    count: u8,
}

impl Host for Wires {
    type Action = Frames;

    fn act(&mut self, frames: Frames) {
        let wire = &self.0[usize::from(frames.wire) % self.0.len()];
        for _ in 0..frames.count % 8 {
            wire.send_with(frames.header, &vec![0xa5; frames.len.into()]);
        }
    }

    fn check(&mut self) {
        for (header, frame) in self
            .0
            .iter()
            .flat_map(|wire| std::iter::from_fn(|| wire.receive()))
        {
            let gso = u16::from_le_bytes([header[4], header[5]]);
            assert!(header[1] == 0 || gso > 0, "segments of no size: {header:?}");
            assert!(header[0] & !1 == 0 && header[10..] == [0, 0]);
            let checksum = [6, 8].map(|at| u16::from_le_bytes([header[at], header[at + 1]]));
            let end: usize = checksum.into_iter().map(usize::from).sum();
            assert!(header[0] == 0 || end + 2 <= frame.len());
        }
    }
}

/// The peer of a stream, and its position in what it reads.
struct Peer {
    /// `None` if it is gone.
    socket: Option<UnixStream>,
    /// The received part of a length prefix.
    prefix: Vec<u8>,
    /// The number of bytes of a frame that are still missing.
    missing: usize,
}

#[derive(Arbitrary, Debug)]
enum PeerAction {
    /// Sends any bytes.
    Send(Vec<u8>),
    /// Sends a frame in pieces; its last bytes may be missing.
    Frame {
        len: u16,
        piece: u8,
        missing: u8,
    },
    /// Announces a frame's length.
    Length(u32),
    /// Reads this many bytes.
    Read(u16),
    /// Shuts down sending.
    Shutdown,
    HangUp,
}

impl Host for Peer {
    type Action = PeerAction;

    fn act(&mut self, action: PeerAction) {
        match action {
            PeerAction::Send(bytes) => self.send(&bytes),
            PeerAction::Frame {
                len,
                piece,
                missing,
            } => {
                let mut bytes = u32::from(len).to_be_bytes().to_vec();
                bytes.resize(bytes.len() + usize::from(len), 0x5a);
                // Mostly complete.
                let missing = usize::from(missing.saturating_sub(250));
                bytes.truncate(bytes.len().saturating_sub(missing));
                for piece in bytes.chunks(usize::from(piece).max(1) * 64) {
                    self.send(piece);
                }
            }
            PeerAction::Length(len) => self.send(&len.to_be_bytes()),
            PeerAction::Read(len) => self.read(len.into()),
            PeerAction::Shutdown => {
                if let Some(socket) = &self.socket {
                    // Fails if the other side is gone.
                    let _ = socket.shutdown(Shutdown::Write);
                }
            }
            PeerAction::HangUp => self.socket = None,
        }
    }

    /// Reading already checks that frames are valid.
    fn check(&mut self) {}
}

impl Peer {
    fn send(&mut self, bytes: &[u8]) {
        if let Some(socket) = &mut self.socket {
            // Bytes that the socket does not accept now are lost: lengths and frames then get mixed
            // up.
            let _ = socket.write(bytes);
        }
    }

    fn read(&mut self, len: usize) {
        let Some(socket) = &mut self.socket else {
            return;
        };
        let mut bytes = vec![0; len];
        let got = match socket.read(&mut bytes) {
            Ok(got) => got,
            Err(error) => {
                let expected = [ErrorKind::WouldBlock, ErrorKind::ConnectionReset];
                assert!(expected.contains(&error.kind()), "{error}");
                return;
            }
        };
        for byte in &bytes[..got] {
            if self.missing > 0 {
                self.missing -= 1;
                continue;
            }
            self.prefix.push(*byte);
            if let [a, b, c, d] = self.prefix[..] {
                let len = u32::from_be_bytes([a, b, c, d]) as usize;
                assert!(FRAMES.contains(&len), "a frame of {len} bytes");
                self.missing = len;
                self.prefix.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("net", super::run);
    }
}
