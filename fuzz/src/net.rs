//! The network device under a hostile driver, with frames from the host.

use arbitrary::Arbitrary;
use podvisor_devices::net::{HEADER_LEN, LinkState, MemoryNic, NetDevice};

use crate::driver::{self, Addr, Bench, Len, buffers, steps};

/// Queues, by their numbers.
const RX: u8 = 0;
const TX: u8 = 1;
const CONTROL: u8 = 2;

#[derive(Arbitrary, Debug)]
enum Step {
    Driver(driver::Step),
    /// Receive buffers.
    Buffers(Vec<(Addr, Len)>),
    /// A frame behind a header.
    Transmit {
        header: [u8; HEADER_LEN],
        frame: Vec<(Addr, Len)>,
    },
    Command {
        class: u8,
        command: u8,
        data: Vec<u8>,
    },
    /// Frames from the host.
    Receive {
        header: [u8; HEADER_LEN],
        len: u16,
        count: u8,
    },
    Link(bool),
    Backend,
}

/// Runs the program `data`.
///
/// # Panics
/// When the device misbehaves.
pub fn run(data: &[u8]) {
    let (nic, wire) = MemoryNic::pair();
    let device = NetDevice::new(Box::new(nic)).expect("descriptors");
    let mut bench = Bench::new(device);
    for step in steps(data) {
        match step {
            Step::Driver(step) => bench.step(step),
            Step::Buffers(room) => {
                for buffer in buffers(&room) {
                    bench.chain(RX, &[], &[buffer]);
                }
                bench.notify(RX.into());
            }
            Step::Transmit { header, frame } => {
                let mut parts = vec![bench.place(&header)];
                parts.extend(buffers(&frame));
                bench.chain(TX, &parts, &[]);
                bench.notify(TX.into());
            }
            Step::Command {
                class,
                command,
                data,
            } => {
                let bytes = [vec![class % 8, command % 8], data].concat();
                let message = bench.place(&bytes);
                bench.chain(CONTROL, &[message], &[(driver::BUFFERS, 1)]);
                bench.notify(CONTROL.into());
            }
            Step::Receive { header, len, count } => {
                for _ in 0..count % 8 {
                    wire.send_with(header, &vec![0xa5; len.into()]);
                }
                bench.backend();
            }
            Step::Link(up) => {
                let link = if up { LinkState::Up } else { LinkState::Down };
                bench.device.set_link(link);
            }
            Step::Backend => bench.backend(),
        }
        bench.take_used();
        while let Some((header, frame)) = wire.receive() {
            let gso = u16::from_le_bytes([header[4], header[5]]);
            assert!(header[1] == 0 || gso > 0, "segments of no size: {header:?}");
            assert!(header[0] & !1 == 0 && header[10..] == [0, 0]);
            let checksum = [6, 8].map(|at| u16::from_le_bytes([header[at], header[at + 1]]));
            let end: usize = checksum.into_iter().map(usize::from).sum();
            assert!(header[0] == 0 || end + 2 <= frame.len());
        }
    }
    driver::finish(bench);
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("net", super::run);
    }
}
