use super::*;
use crate::GuestRam;
use crate::allocations::allocations;
use crate::descriptors::{MAX_CONNECTIONS, MAX_HANDSHAKES, Shares};
use crate::testing::{
    CountingInterrupt, DriverQueue, F_INDIRECT, F_NEXT, F_WRITE, memory, start, stop,
};
use crate::vsock::HOST_CID;
use crate::vsock::mux::MAX_RESETS;
use crate::vsock::packet::{Ports, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};

mod anything;
mod close_timer;
mod flow;
mod hostile;
mod ports;
mod setup;
mod streams;

const RX: u16 = 0;
const TX: u16 = 1;
const CID: u64 = 3;
const QUEUE: u16 = 64;
/// The size of Linux's buffers: 4 KiB and a header.
const RX_LEN: u32 = 4096 + HEADER_LEN as u32;
const RX_BASE: u64 = 0x10_0000;
const TX_BASE: u64 = 0x20_0000;
const EVENT_BUF: u64 = 0x30_0000;
const GUEST_BUF_ALLOC: u32 = 256 << 10;

/// A driver and the device, with real sockets on the host's side.
struct Rig {
    mem: GuestRam,
    device: VsockDevice,
    rx: DriverQueue,
    tx: DriverQueue,
    event: DriverQueue,
    irq: Arc<CountingInterrupt>,
    /// Addresses of posted receive buffers, in order.
    posted: VecDeque<u64>,
    next_rx: u64,
    rx_len: u32,
    dir: TempDir,
}

impl Rig {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let device = VsockDevice::unix_mux(CID, dir.path().join("vsock")).unwrap();
        Self::over(device, dir)
    }

    fn over(mut device: VsockDevice, dir: TempDir) -> Self {
        let mem = memory(8 << 20);
        let rx = DriverQueue::new(&mem, 0x10000, QUEUE);
        let tx = DriverQueue::new(&mem, 0x20000, QUEUE);
        let event = DriverQueue::new(&mem, 0x30000, 16);
        let irq = Arc::new(CountingInterrupt::default());
        start(&mut device, &[&rx, &tx, &event], &irq, 1);
        Self {
            mem,
            device,
            rx,
            tx,
            event,
            irq,
            posted: VecDeque::new(),
            next_rx: 0,
            rx_len: RX_LEN,
            dir,
        }
    }

    fn ready() -> Self {
        let mut rig = Self::new();
        rig.post_rx(usize::from(QUEUE));
        rig
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("vsock")
    }

    fn listen(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.dir.path().join(format!("vsock_{port}"))).unwrap()
    }

    /// Posts receive buffers without a notification.
    fn post_rx(&mut self, count: usize) {
        for _ in 0..count {
            let addr = RX_BASE + (self.next_rx % u64::from(QUEUE)) * 0x3000;
            self.next_rx += 1;
            self.rx.add(&[], &[(addr, self.rx_len)]);
            self.posted.push_back(addr);
        }
    }

    /// Lets the device work until it has nothing left to do.
    fn run(&mut self) {
        for _ in 0..10_000 {
            let queues = [RX, TX, EVENT].map(|q| self.device.on_queue(q).unwrap());
            let backend = if self.backend_readable() {
                self.device.on_backend().unwrap()
            } else {
                Progress::Idle
            };
            let busy = queues.contains(&Progress::More) || backend == Progress::More;
            if !busy && !self.backend_readable() {
                return;
            }
        }
        panic!("the device spins");
    }

    /// Whether an event loop that waits on the backend would be woken.
    fn backend_readable(&self) -> bool {
        crate::testing::backend_readable(&self.device)
    }

    fn send_raw(&mut self, header: &Header, payload: &[u8]) {
        self.send_many(1, header, payload);
        self.run();
    }

    /// Makes the same packet available this often, without a notification.
    fn send_many(&mut self, count: usize, header: &Header, payload: &[u8]) {
        self.mem
            .write_slice(&header.to_bytes(), GuestAddress(TX_BASE))
            .unwrap();
        self.mem
            .write_slice(payload, GuestAddress(TX_BASE + 0x1000))
            .unwrap();
        let mut buffers = vec![(TX_BASE, HEADER_LEN as u32)];
        if !payload.is_empty() {
            buffers.push((TX_BASE + 0x1000, payload.len() as u32));
        }
        for _ in 0..count {
            self.tx.add(&buffers, &[]);
        }
    }

    fn packet(&self, ports: Ports, op: Op) -> Header {
        Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port: ports.guest,
            dst_port: ports.host,
            kind: TYPE_STREAM,
            op: op as u16,
            buf_alloc: GUEST_BUF_ALLOC,
            ..Header::default()
        }
    }

    fn send(&mut self, ports: Ports, op: Op) {
        let header = self.packet(ports, op);
        self.send_raw(&header, &[]);
    }

    fn shutdown(&mut self, ports: Ports, flags: u32) {
        let header = Header {
            flags,
            ..self.packet(ports, Op::Shutdown)
        };
        self.send_raw(&header, &[]);
    }

    fn data(&mut self, ports: Ports, payload: &[u8]) {
        let header = Header {
            len: payload.len() as u32,
            ..self.packet(ports, Op::Data)
        };
        self.send_raw(&header, payload);
    }

    fn credit(&mut self, ports: Ports, buf_alloc: u32, fwd_cnt: u32) {
        let header = Header {
            buf_alloc,
            fwd_cnt,
            ..self.packet(ports, Op::CreditUpdate)
        };
        self.send_raw(&header, &[]);
    }

    /// Returns the next packet that the device put into a receive buffer.
    fn take(&mut self) -> Option<(Header, Vec<u8>)> {
        let used = self.rx.take_used()?;
        let addr = self.posted.pop_front().unwrap();
        let mut raw = [0; HEADER_LEN];
        self.mem.read_slice(&mut raw, GuestAddress(addr)).unwrap();
        let header = Header::from_bytes(&raw);
        assert_eq!(used.len, header.len + HEADER_LEN as u32);
        assert!(used.len <= self.rx_len);
        let mut payload = vec![0; header.len as usize];
        self.mem
            .read_slice(&mut payload, GuestAddress(addr + HEADER_LEN as u64))
            .unwrap();
        Some((header, payload))
    }

    /// As [`Self::take`], but the packet must have this operation; the buffer is posted again.
    fn expect(&mut self, op: Op) -> (Header, Vec<u8>) {
        let (header, payload) = self
            .take()
            .unwrap_or_else(|| panic!("no packet, {op:?} due"));
        assert_eq!(Op::from_raw(header.op), Some(op), "{header:?}");
        self.post_rx(1);
        (header, payload)
    }

    fn expect_nothing(&mut self) {
        assert_eq!(self.take(), None);
    }

    /// Returns all available packets, and posts new buffers for more.
    fn drain(&mut self) -> Vec<(Header, Vec<u8>)> {
        let mut all = Vec::new();
        loop {
            self.run();
            let before = all.len();
            while let Some(packet) = self.take() {
                all.push(packet);
                self.post_rx(1);
            }
            if all.len() == before {
                return all;
            }
        }
    }

    /// Opens a stream from a program in the guest.
    fn open_from_guest(&mut self, port: u32) -> (Ports, UnixStream) {
        let listener = self.listen(port);
        let ports = Ports {
            guest: 40_000 + port,
            host: port,
        };
        self.send(ports, Op::Request);
        let (stream, _) = listener.accept().unwrap();
        std::fs::remove_file(self.dir.path().join(format!("vsock_{port}"))).unwrap();
        self.expect(Op::Response);
        limit(&stream);
        (ports, stream)
    }

    /// Opens a stream from a host program.
    fn open_from_host(&mut self, port: u32) -> (Ports, UnixStream) {
        let mut stream = UnixStream::connect(self.path()).unwrap();
        limit(&stream);
        stream
            .write_all(format!("CONNECT {port}\n").as_bytes())
            .unwrap();
        self.run();
        let (header, _) = self.expect(Op::Request);
        let ports = Ports {
            guest: header.dst_port,
            host: header.src_port,
        };
        self.send(ports, Op::Response);
        let line = format!("OK {}\n", ports.host);
        let mut answer = vec![0; line.len()];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer, line.as_bytes());
        (ports, stream)
    }

    fn counter(&self, name: &str) -> u64 {
        crate::testing::counter(&self.device, name)
    }
}

/// Sets a timeout, so that a test that waits for data that never arrives fails.
fn limit(stream: &UnixStream) {
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
}

fn read(stream: &mut UnixStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

fn is_closed(stream: &mut UnixStream) -> bool {
    matches!(stream.read(&mut [0]), Ok(0))
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 7 + n / 251) as u8).collect()
}
