//! The socket device between a hostile driver and hostile programs of the host.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::LazyLock;

use arbitrary::Arbitrary;
use podvisor_devices::vsock::VsockDevice;
use tempfile::TempDir;

use crate::driver::{self, BUFFERS, Bench, steps, unique};

const CID: u64 = 3;
/// The host port with a listener.
const PORT: u32 = 1;
/// The maximum number of host sockets at a time: fewer than a listener's backlog.
const MAX_HOSTS: usize = 64;

/// The operations of a stream (§5.10.6).
mod op {
    pub(super) const REQUEST: u8 = 1;
    pub(super) const RESPONSE: u8 = 2;
    pub(super) const DATA: u8 = 5;
}

#[derive(Arbitrary, Debug)]
enum Step {
    Driver(driver::Step),
    /// A packet with a valid header; operation 0 and those above 7 do not exist.
    Packet {
        guest_port: u8,
        op: u8,
        payload: Vec<u8>,
        flags: u8,
        buf_alloc: u32,
        fwd_cnt: u32,
    },
    /// A packet for a connection that a host program requested.
    Answer {
        connection: u8,
        op: u8,
        payload: Vec<u8>,
        fwd_cnt: u16,
    },
    /// This many bytes for one of the initial connections, within their credit.
    GuestFlood {
        from_host: bool,
        len: u16,
    },
    /// Any bytes as a header.
    Header(Vec<u8>),
    ReceiveBuffers(u8),
    HostConnect(u8),
    HostSend(u8, Vec<u8>),
    HostFlood(u8, u16),
    HostReceive(u8, u16),
    HostEnd(u8),
    HostClose(u8),
    Accept,
    Backend,
    ResetTransport,
}

/// The directory of the sockets, one for the process.
static DIRECTORY: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a directory"));

/// The initial state before the program starts: bits of its first byte.
mod given {
    /// The driver posts receive buffers before every step.
    pub(super) const BUFFERS: u8 = 1;
    /// A program in the guest has connected to one of the host.
    pub(super) const FROM_GUEST: u8 = 2;
    /// A program of the host has connected to one in the guest.
    pub(super) const FROM_HOST: u8 = 4;
}

/// Runs the program `data`, whose first byte selects the initial state.
///
/// # Panics
/// If the device misbehaves, or no sockets can be created.
pub fn run(data: &[u8]) {
    let Some((mode, data)) = data.split_first() else {
        return;
    };
    let path = DIRECTORY.path().join(unique().to_string());
    let device = VsockDevice::unix_mux(CID, &path).expect("a device");
    let listener_path = format!("{}_{PORT}", path.display());
    let listener = UnixListener::bind(&listener_path).expect("a listener");
    listener.set_nonblocking(true).expect("a socket's flag");
    let mut bench = Bench::new(device);
    let mut hosts: Vec<UnixStream> = Vec::new();
    if mode & (given::FROM_GUEST | given::FROM_HOST) != 0 {
        post(&mut bench, 2);
    }
    if mode & given::FROM_GUEST != 0 {
        let request = header((0, PORT), op::REQUEST, &[], 0, 1 << 16, 0);
        send(&mut bench, &request, &[]);
        let (host, _) = listener.accept().expect("a connection of the guest");
        host.set_nonblocking(true).expect("a socket's flag");
        hosts.push(host);
    }
    if mode & given::FROM_HOST != 0 {
        let mut host = connect(&path);
        host.write_all(b"CONNECT 7\n").expect("an empty socket");
        bench.backend();
        let response = header((7, 1 << 30), op::RESPONSE, &[], 0, 1 << 16, 0);
        send(&mut bench, &response, &[]);
        assert!(host.read(&mut [0; 32]).is_ok(), "an answer");
        hosts.push(host);
    }
    for step in steps(data) {
        if mode & given::BUFFERS != 0 {
            post(&mut bench, 2);
        }
        match step {
            Step::Driver(step) => bench.step(step),
            Step::Packet {
                guest_port,
                op,
                payload,
                flags,
                buf_alloc,
                fwd_cnt,
            } => {
                let ports = (u32::from(guest_port % 8), PORT);
                let header = header(ports, op % 9, &payload, flags, buf_alloc, fwd_cnt);
                send(&mut bench, &header, &payload);
            }
            Step::Answer {
                connection,
                op,
                payload,
                fwd_cnt,
            } => {
                let ports = (7, (1 << 30) + u32::from(connection % 8));
                let op = [op::RESPONSE, op::DATA, op % 9][usize::from(op % 3)];
                let header = header(ports, op, &payload, 0, 1 << 16, fwd_cnt.into());
                send(&mut bench, &header, &payload);
            }
            Step::GuestFlood { from_host, len } => {
                let ports = if from_host { (7, 1 << 30) } else { (0, PORT) };
                let payload = vec![b'g'; usize::from(len) % 4097];
                let header = header(ports, op::DATA, &payload, 0, 1 << 16, 0);
                send(&mut bench, &header, &payload);
            }
            Step::Header(bytes) => send(&mut bench, &bytes, &[]),
            Step::ReceiveBuffers(count) => post(&mut bench, count % 16),
            Step::HostConnect(kind) => {
                if hosts.len() < MAX_HOSTS {
                    let mut host = connect(&path);
                    if kind & 1 == 0 {
                        let _ = host.write(b"CONNECT 7\n");
                    }
                    hosts.push(host);
                    bench.backend();
                }
            }
            Step::HostSend(host, bytes) => {
                if let Some(host) = pick(&mut hosts, host) {
                    let _ = host.write(&bytes);
                }
            }
            Step::HostFlood(host, len) => {
                if let Some(host) = pick(&mut hosts, host) {
                    let _ = host.write(&vec![b'x'; len.into()]);
                }
            }
            Step::HostReceive(host, len) => {
                if let Some(host) = pick(&mut hosts, host) {
                    let _ = host.read(&mut vec![0; len.into()]);
                }
            }
            Step::HostEnd(host) => {
                if let Some(host) = pick(&mut hosts, host) {
                    let _ = host.shutdown(Shutdown::Write);
                }
            }
            Step::HostClose(host) => {
                if !hosts.is_empty() {
                    let index = usize::from(host) % hosts.len();
                    hosts.swap_remove(index);
                }
            }
            Step::Accept => {
                while let Ok((host, _)) = listener.accept() {
                    host.set_nonblocking(true).expect("a socket's flag");
                    if hosts.len() < MAX_HOSTS {
                        hosts.push(host);
                    }
                }
            }
            Step::Backend => bench.backend(),
            Step::ResetTransport => bench.device.reset_transport(),
        }
        let (connections, handshakes, lingering, resets) = bench.device.statistics();
        assert!(connections + lingering <= 1024 && handshakes <= 256 && resets <= 256 + 1024);
        bench.take_used();
    }
    let device = driver::finish(bench);
    drop(device);
    assert!(!path.exists());
    let _ = std::fs::remove_file(listener_path);
}

fn connect(path: &Path) -> UnixStream {
    let host = UnixStream::connect(path).expect("a connection");
    host.set_nonblocking(true).expect("a socket's flag");
    host
}

/// Posts receive buffers.
fn post(bench: &mut Bench<VsockDevice>, count: u8) {
    for n in 0..u64::from(count) {
        bench.chain(0, &[], &[(BUFFERS + 0x4_0000 + n * 0x1000, 4096)]);
    }
    bench.notify(0);
}

fn pick(hosts: &mut [UnixStream], index: u8) -> Option<&mut UnixStream> {
    let count = hosts.len();
    hosts.get_mut(usize::from(index).checked_rem(count)?)
}

fn header(
    (guest, host): (u32, u32),
    op: u8,
    payload: &[u8],
    flags: u8,
    buf_alloc: u32,
    fwd_cnt: u32,
) -> Vec<u8> {
    let mut header = Vec::with_capacity(44);
    header.extend(CID.to_le_bytes());
    header.extend(2u64.to_le_bytes());
    header.extend(guest.to_le_bytes());
    header.extend(host.to_le_bytes());
    let len = u32::try_from(payload.len().min(4096)).expect("short");
    header.extend(len.to_le_bytes());
    header.extend(1u16.to_le_bytes());
    header.extend(u16::from(op).to_le_bytes());
    header.extend(u32::from(flags).to_le_bytes());
    header.extend(buf_alloc.to_le_bytes());
    header.extend(fwd_cnt.to_le_bytes());
    header
}

fn send(bench: &mut Bench<VsockDevice>, header: &[u8], payload: &[u8]) {
    let header = bench.place(header);
    let payload = bench.place(payload);
    bench.chain(1, &[header, payload], &[]);
    bench.notify(1);
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("vsock", super::run);
    }
}
