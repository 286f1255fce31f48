use super::*;
use crate::testing::{CountingInterrupt, DriverQueue, memory, resources};
use crate::vsock::HOST_CID;
use crate::vsock::mux::{MAX_CONNECTIONS, MAX_HANDSHAKES, MAX_RESETS};
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

const CID: u64 = 3;
const QUEUE: u16 = 64;
/// What Linux posts: 4 KiB and a header.
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
        device
            .start(resources(&mem, &[&rx, &tx, &event], &irq, 1))
            .unwrap();
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

    /// What an event loop that waits on the backend would see.
    fn backend_readable(&self) -> bool {
        crate::testing::backend_readable(&self.device)
    }

    fn send_raw(&mut self, header: &Header, payload: &[u8]) {
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
        self.tx.add(&buffers, &[]);
        self.run();
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

    /// The next packet that the device put into a receive buffer.
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

    /// As [`Self::take`], which must be this operation; the buffer is posted again.
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

    /// All packets there are, with fresh buffers for more.
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

    /// A stream that a program in the guest opened.
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

    /// A stream that a host program opened.
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
        let counters = self.device.counters();
        counters.iter().find(|c| c.name == name).unwrap().value
    }
}

/// A test that waits for what never comes fails.
fn limit(stream: &UnixStream) {
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
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

// ---- Setting up ----

#[test]
fn the_guest_reads_its_cid() {
    let rig = Rig::new();
    let mut data = [0; 12];
    rig.device.read_config(0, &mut data);
    assert_eq!(data, [3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn cids_that_mean_something_else_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for cid in [0, 1, 2, 0xffff_ffff, 1 << 32, u64::MAX] {
        assert!(matches!(
            VsockDevice::unix_mux(cid, dir.path().join("v")),
            Err(VsockError::GuestCid { .. })
        ));
    }
    assert!(!dir.path().join("v").exists());
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vsock");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let first = VsockDevice::unix_mux(3, &path).unwrap();
    assert!(matches!(
        VsockDevice::unix_mux(4, &path),
        Err(VsockError::InUse { .. })
    ));
    drop(first);
    assert!(!path.exists(), "the file goes with the device");
}

#[test]
fn what_is_no_socket_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("precious");
    std::fs::write(&path, "data").unwrap();
    assert!(matches!(
        VsockDevice::unix_mux(3, &path),
        Err(VsockError::NotASocket { .. })
    ));
    assert_eq!(std::fs::read(&path).unwrap(), b"data");
}

#[test]
fn a_file_that_replaced_the_socket_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vsock");
    let device = VsockDevice::unix_mux(3, &path).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "other").unwrap();
    drop(device);
    assert!(path.exists());
}

#[test]
fn a_missing_folder_and_a_long_path_are_named() {
    let missing = VsockDevice::unix_mux(3, "/nonexistent/x/vsock").unwrap_err();
    assert!(missing.to_string().contains("/nonexistent/x/vsock"));
    let long = format!("/tmp/{}", "x".repeat(100));
    assert!(matches!(
        VsockDevice::unix_mux(3, long),
        Err(VsockError::PathTooLong { .. })
    ));
}

#[test]
fn a_device_without_all_queues_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let mut device = VsockDevice::unix_mux(3, dir.path().join("v")).unwrap();
    let mem = memory(1 << 20);
    let queue = DriverQueue::new(&mem, 0x10000, 16);
    let irq = Arc::new(CountingInterrupt::default());
    let mut parts = resources(&mem, &[&queue], &irq, 0);
    parts.queues.push(None);
    parts.queues.push(None);
    assert!(device.start(parts).is_err());
    assert!(!device.is_running());
}

// ---- Streams ----

#[test]
fn a_guest_program_reaches_a_host_program() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1024);
    rig.data(ports, b"podvisor-agent 1\n");
    assert_eq!(read(&mut host, 17), b"podvisor-agent 1\n");
    host.write_all(b"welcome").unwrap();
    rig.run();
    let (header, payload) = rig.expect(Op::Data);
    assert_eq!(payload, b"welcome");
    assert_eq!((header.src_cid, header.dst_cid), (HOST_CID, CID));
    assert_eq!((header.src_port, header.dst_port), (1024, ports.guest));
    assert_eq!(header.fwd_cnt, 17);
    assert_eq!(rig.counter("connections_from_guest"), 1);
}

#[test]
fn a_host_program_reaches_a_guest_program() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_host(1025);
    assert_eq!(ports.guest, 1025);
    host.write_all(b"question").unwrap();
    rig.run();
    assert_eq!(rig.expect(Op::Data).1, b"question");
    rig.data(ports, b"answer");
    assert_eq!(read(&mut host, 6), b"answer");
    assert_eq!(rig.counter("connections_from_host"), 1);
}

#[test]
fn data_may_follow_the_connect_line_at_once() {
    let mut rig = Rig::ready();
    let mut host = UnixStream::connect(rig.path()).unwrap();
    host.write_all(b"CONNECT 7\nearly").unwrap();
    rig.run();
    let (request, _) = rig.expect(Op::Request);
    rig.expect_nothing();
    let ports = Ports {
        guest: 7,
        host: request.src_port,
    };
    rig.send(ports, Op::Response);
    assert_eq!(rig.expect(Op::Data).1, b"early");
}

#[test]
fn a_port_that_nobody_listens_on_is_refused_both_ways() {
    let mut rig = Rig::ready();
    let ports = Ports { guest: 5, host: 99 };
    rig.send(ports, Op::Request);
    let (reset, _) = rig.expect(Op::Reset);
    assert_eq!((reset.src_port, reset.dst_port), (99, 5));

    let mut host = UnixStream::connect(rig.path()).unwrap();
    limit(&host);
    host.write_all(b"CONNECT 1\n").unwrap();
    rig.run();
    let (request, _) = rig.expect(Op::Request);
    let ports = Ports {
        guest: 1,
        host: request.src_port,
    };
    rig.send(ports, Op::Reset);
    assert!(is_closed(&mut host));
    rig.expect_nothing();
    assert_eq!(rig.device.census(), (0, 0, 0, 0));
}

#[test]
fn a_host_program_may_come_before_the_driver() {
    let dir = tempfile::tempdir().unwrap();
    let device = VsockDevice::unix_mux(CID, dir.path().join("vsock")).unwrap();
    let mut host = UnixStream::connect(dir.path().join("vsock")).unwrap();
    host.write_all(b"CONNECT 1\n").unwrap();
    let mut rig = Rig::over(device, dir);
    rig.run();
    rig.post_rx(4);
    rig.run();
    rig.expect(Op::Request);
}

#[test]
fn large_data_survives_both_directions() {
    let mut rig = Rig::ready();
    let (ports, host) = rig.open_from_host(1);
    let data = pattern(3 << 20);
    let mut writer = host.try_clone().unwrap();
    let to_send = data.clone();
    let sending = std::thread::spawn(move || {
        writer.write_all(&to_send).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let mut reader = host;
    let reading = std::thread::spawn(move || {
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        all
    });
    // The guest echoes, within both sides' credit.
    let mut echo = VecDeque::new();
    let (mut received, mut sent, mut consumed) = (Vec::new(), 0u32, 0u32);
    let mut room = (0u32, 0u32);
    let mut ended = false;
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while !(ended && echo.is_empty()) {
        assert!(
            std::time::Instant::now() < deadline,
            "{} bytes",
            received.len()
        );
        for (header, payload) in rig.drain() {
            room = (header.buf_alloc, header.fwd_cnt);
            match Op::from_raw(header.op).unwrap() {
                Op::Data => {
                    echo.extend(&payload);
                    received.extend(payload);
                    assert!(received.len() as u32 - consumed <= GUEST_BUF_ALLOC);
                }
                Op::Shutdown => ended = true,
                Op::CreditUpdate | Op::CreditRequest => {}
                other => panic!("{other:?}"),
            }
        }
        consumed = received.len() as u32;
        rig.credit(ports, GUEST_BUF_ALLOC, consumed);
        let free = room.0 - (sent - room.1);
        let n = (free as usize).min(echo.len()).min(64 << 10);
        if n > 0 {
            let piece: Vec<u8> = echo.drain(..n).collect();
            sent += n as u32;
            let header = Header {
                len: n as u32,
                fwd_cnt: consumed,
                ..rig.packet(ports, Op::Data)
            };
            rig.send_raw(&header, &piece);
        }
    }
    let header = Header {
        flags: SHUTDOWN_BOTH,
        fwd_cnt: consumed,
        ..rig.packet(ports, Op::Shutdown)
    };
    rig.send_raw(&header, &[]);
    while rig.device.census().2 > 0 {
        rig.run();
    }
    sending.join().unwrap();
    assert_eq!(reading.join().unwrap(), data);
    assert_eq!(received, data);
    assert_eq!(rig.counter("rx_bytes"), data.len() as u64);
    assert_eq!(rig.counter("tx_bytes"), data.len() as u64);
}

// ---- The ends of streams ----

#[test]
fn the_end_of_the_hosts_sending_is_a_half_close() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    host.write_all(b"last").unwrap();
    host.shutdown(Shutdown::Write).unwrap();
    rig.run();
    assert_eq!(rig.expect(Op::Data).1, b"last");
    assert_eq!(rig.expect(Op::Shutdown).0.flags, SHUTDOWN_SEND);
    rig.data(ports, b"still");
    assert_eq!(read(&mut host, 5), b"still");
    drop(host);
    rig.run();
    assert_eq!(rig.expect(Op::Shutdown).0.flags, SHUTDOWN_BOTH);
    rig.expect_nothing();
    rig.send(ports, Op::Reset);
    assert_eq!(rig.device.census(), (0, 0, 0, 0));
    rig.expect_nothing();
}

#[test]
fn a_host_program_that_closes_ends_both_directions_after_its_data() {
    let mut rig = Rig::ready();
    let (_, mut host) = rig.open_from_guest(1);
    host.write_all(b"last").unwrap();
    drop(host);
    rig.run();
    assert_eq!(rig.expect(Op::Data).1, b"last");
    assert_eq!(rig.expect(Op::Shutdown).0.flags, SHUTDOWN_BOTH);
    rig.expect_nothing();
}

#[test]
fn the_end_of_the_guests_sending_is_a_half_close() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    rig.data(ports, b"last");
    rig.shutdown(ports, SHUTDOWN_SEND);
    assert_eq!(read(&mut host, 4), b"last");
    assert!(is_closed(&mut host));
    host.write_all(b"still").unwrap();
    rig.run();
    assert_eq!(rig.expect(Op::Data).1, b"still");
    rig.data(ports, b"x");
    rig.expect(Op::Reset);
    assert_eq!(rig.counter("protocol_errors"), 1);
}

#[test]
fn a_guest_that_receives_no_more_breaks_the_hosts_pipe() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    rig.shutdown(ports, SHUTDOWN_RECEIVE);
    assert_eq!(
        host.write_all(b"x").unwrap_err().kind(),
        ErrorKind::BrokenPipe
    );
    rig.data(ports, b"still");
    assert_eq!(read(&mut host, 5), b"still");
}

#[test]
fn a_guest_that_closes_is_answered_by_a_reset() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    rig.data(ports, b"bye");
    rig.shutdown(ports, SHUTDOWN_BOTH);
    rig.expect(Op::Reset);
    assert_eq!(read(&mut host, 3), b"bye");
    assert!(is_closed(&mut host));
    assert_eq!(rig.device.census(), (0, 0, 0, 0));
}

#[test]
fn both_halves_in_turn_are_a_close() {
    let mut rig = Rig::ready();
    let (ports, _host) = rig.open_from_guest(1);
    rig.shutdown(ports, SHUTDOWN_RECEIVE);
    rig.expect_nothing();
    rig.shutdown(ports, SHUTDOWN_SEND);
    rig.expect(Op::Reset);
}

#[test]
fn what_a_guest_sent_before_it_closed_reaches_a_slow_host_program() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    let data = pattern(400 << 10);
    for piece in data.chunks(64 << 10) {
        rig.data(ports, piece);
    }
    rig.shutdown(ports, SHUTDOWN_BOTH);
    assert_eq!(rig.device.census().0, 0);
    assert_eq!(rig.device.census().2, 1, "bytes are waiting");
    let mut all = Vec::new();
    while all.len() < data.len() {
        let mut piece = vec![0; 32 << 10];
        let n = host.read(&mut piece).unwrap();
        all.extend_from_slice(&piece[..n]);
        rig.run();
    }
    assert_eq!(all, data);
    assert!(is_closed(&mut host));
    assert_eq!(rig.device.census().2, 0);
}

#[test]
fn data_for_a_host_program_that_is_gone_is_dropped_and_the_guest_hears_of_it() {
    let mut rig = Rig::ready();
    let (ports, host) = rig.open_from_guest(1);
    drop(host);
    rig.data(ports, b"x");
    let flags: Vec<_> = rig.drain().iter().map(|(h, _)| (h.op, h.flags)).collect();
    assert_eq!(flags.last(), Some(&(Op::Shutdown as u16, SHUTDOWN_BOTH)));
    for _ in 0..20 {
        rig.data(ports, &[0; 60 << 10]);
    }
    assert!(
        rig.drain().iter().all(|(h, _)| h.op != Op::Reset as u16),
        "dropped data gives its credit back"
    );
}

// ---- Credit ----

#[test]
fn nothing_is_sent_beyond_the_guests_credit() {
    let mut rig = Rig::ready();
    let listener = rig.listen(1);
    let ports = Ports { guest: 9, host: 1 };
    let request = Header {
        buf_alloc: 10,
        ..rig.packet(ports, Op::Request)
    };
    rig.send_raw(&request, &[]);
    let (mut host, _) = listener.accept().unwrap();
    rig.expect(Op::Response);
    host.write_all(b"0123456789abcdefghij").unwrap();
    rig.run();
    assert_eq!(rig.expect(Op::Data).1, b"0123456789");
    rig.expect(Op::CreditRequest);
    rig.expect_nothing();
    assert!(!rig.backend_readable());
    // It has consumed 4, then the rest.
    rig.credit(ports, 10, 4);
    assert_eq!(rig.expect(Op::Data).1, b"abcd");
    rig.expect(Op::CreditRequest);
    rig.credit(ports, 10, 14);
    assert_eq!(rig.expect(Op::Data).1, b"efghij");
    rig.expect_nothing();
}

#[test]
fn a_guest_that_sends_beyond_its_credit_is_reset() {
    let mut rig = Rig::ready();
    let (ports, _host) = rig.open_from_guest(1);
    let mut reset = false;
    for _ in 0..20 {
        rig.data(ports, &[7; 64 << 10]);
        reset |= rig.drain().iter().any(|(h, _)| h.op == Op::Reset as u16);
        if reset {
            break;
        }
    }
    assert!(reset);
    assert_eq!(rig.counter("protocol_errors"), 1);
}

#[test]
fn a_slow_host_program_stops_the_guest_and_a_reading_one_frees_it() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    rig.send(ports, Op::CreditRequest);
    let (header, _) = rig.expect(Op::CreditUpdate);
    let total = header.buf_alloc as usize;
    let mut room = (header.buf_alloc, header.fwd_cnt);
    let mut sent = 0u32;
    // Fill the socket and the buffer, exactly.
    loop {
        for (header, _) in rig.drain() {
            assert_ne!(header.op, Op::Reset as u16);
            room = (header.buf_alloc, header.fwd_cnt);
        }
        let free = room.0 - (sent - room.1);
        if free == 0 {
            break;
        }
        let n = free.min(50_000);
        rig.data(ports, &vec![1; n as usize]);
        sent += n;
    }
    assert!(sent as usize >= total);
    assert_eq!(sent - room.1, room.0);
    let mut left = sent as usize;
    let mut updates = 0;
    while left > 0 {
        let n = host.read(&mut vec![0; 128 << 10]).unwrap();
        left -= n;
        for (header, _) in rig.drain() {
            assert_eq!(header.op, Op::CreditUpdate as u16);
            updates += 1;
            assert!(header.fwd_cnt > room.1 && header.fwd_cnt <= sent);
            room.1 = header.fwd_cnt;
        }
    }
    assert!((1..=8).contains(&updates), "{updates}");
    assert!(room.0 - (sent - room.1) >= room.0 / 2);
}

#[test]
fn a_guest_that_lies_about_what_it_consumed_is_reset() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    host.write_all(b"abc").unwrap();
    rig.run();
    rig.expect(Op::Data);
    rig.credit(ports, GUEST_BUF_ALLOC, 4);
    rig.expect(Op::Reset);
    assert!(is_closed(&mut host));
}

#[test]
fn an_absurd_buffer_size_is_harmless() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    rig.credit(ports, u32::MAX, 0);
    host.write_all(&pattern(100_000)).unwrap();
    let all: Vec<u8> = rig.drain().into_iter().flat_map(|(_, p)| p).collect();
    assert_eq!(all, pattern(100_000));
}

// ---- Buffers ----

#[test]
fn nothing_spins_while_the_guest_has_no_receive_buffers() {
    let mut rig = Rig::new();
    let listener = rig.listen(1);
    rig.send(Ports { guest: 9, host: 1 }, Op::Request);
    let (mut host, _) = listener.accept().unwrap();
    host.write_all(b"hello").unwrap();
    rig.run();
    assert!(!rig.backend_readable(), "the event loop may sleep");
    host.write_all(b" world").unwrap();
    rig.run();
    assert!(!rig.backend_readable());
    rig.post_rx(2);
    rig.run();
    rig.expect(Op::Response);
    assert_eq!(rig.expect(Op::Data).1, b"hello world");
}

#[test]
fn one_read_fills_several_buffers_and_one_interrupt_tells_of_all() {
    let mut rig = Rig::ready();
    let (_, mut host) = rig.open_from_guest(1);
    host.write_all(&pattern(100_000)).unwrap();
    let before = rig.irq.queue.load(SeqCst);
    assert_eq!(rig.device.on_backend().unwrap(), Progress::Idle);
    assert_eq!(rig.irq.queue.load(SeqCst), before + 1);
    let packets = rig.drain();
    let all: Vec<u8> = packets.iter().flat_map(|(_, p)| p.clone()).collect();
    assert_eq!(all, pattern(100_000));
    assert_eq!(packets.len(), 100_000usize.div_ceil(4096));
}

#[test]
fn receive_buffers_in_pieces_are_filled_across() {
    let mut rig = Rig::new();
    let base = 0x40_0000u64;
    for n in 0..4u64 {
        let at = base + n * 0x1000;
        rig.rx.add(&[], &[(at, 10), (at + 100, 40), (at + 200, 7)]);
    }
    let listener = rig.listen(1);
    rig.send(Ports { guest: 9, host: 1 }, Op::Request);
    let (mut host, _) = listener.accept().unwrap();
    host.write_all(b"0123456789ABCDEF").unwrap();
    rig.run();
    assert_eq!(rig.rx.take_used().unwrap().len, 44);
    assert_eq!(rig.rx.take_used().unwrap().len, 57);
    assert_eq!(rig.rx.take_used().unwrap().len, 47);
    let mut got = [0; 13];
    rig.mem
        .read_slice(&mut got[..6], GuestAddress(base + 0x1000 + 134))
        .unwrap();
    rig.mem
        .read_slice(&mut got[6..], GuestAddress(base + 0x1000 + 200))
        .unwrap();
    assert_eq!(&got, b"0123456789ABC");
}

#[test]
fn receive_buffers_without_room_are_a_fault() {
    for len in [1, 43, 44] {
        let mut rig = Rig::new();
        rig.rx.add(&[], &[(RX_BASE, len)]);
        let header = rig.packet(Ports { guest: 1, host: 1 }, Op::Data);
        rig.mem
            .write_slice(&header.to_bytes(), GuestAddress(TX_BASE))
            .unwrap();
        rig.tx.add(&[(TX_BASE, 44)], &[]);
        assert!(matches!(rig.device.on_queue(TX), Err(Fault::Guest(_))));
    }
}

// ---- Hostile guests ----

#[test]
fn a_packet_shorter_than_its_header_or_its_length_is_a_fault() {
    let mut rig = Rig::ready();
    rig.tx.add(&[(TX_BASE, 43)], &[]);
    assert!(matches!(rig.device.on_queue(TX), Err(Fault::Guest(_))));

    for (len, payload) in [(1, 0), (101, 100), (u32::MAX, 100), (u32::MAX - 43, 100)] {
        let mut rig = Rig::ready();
        let (ports, _host) = rig.open_from_guest(1);
        let header = Header {
            len,
            ..rig.packet(ports, Op::Data)
        };
        rig.mem
            .write_slice(&header.to_bytes(), GuestAddress(TX_BASE))
            .unwrap();
        rig.tx.add(&[(TX_BASE, 44 + payload)], &[]);
        assert!(matches!(rig.device.on_queue(TX), Err(Fault::Guest(_))));
    }
}

#[test]
fn a_buffer_longer_than_the_packet_says_is_used_as_far_as_it_says() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    let header = Header {
        len: 3,
        ..rig.packet(ports, Op::Data)
    };
    rig.send_raw(&header, b"abcdef");
    rig.data(ports, b"XYZ");
    assert_eq!(read(&mut host, 6), b"abcXYZ");
}

#[test]
fn packets_that_belong_to_nothing_are_reset_and_resets_are_not() {
    let mut rig = Rig::ready();
    let ports = Ports { guest: 1, host: 2 };
    for op in [
        Op::Response,
        Op::Shutdown,
        Op::Data,
        Op::CreditUpdate,
        Op::CreditRequest,
    ] {
        rig.send(ports, op);
        rig.expect(Op::Reset);
    }
    rig.send(ports, Op::Reset);
    rig.expect_nothing();
    let unknown = Header {
        op: 77,
        ..rig.packet(ports, Op::Data)
    };
    rig.send_raw(&unknown, &[]);
    rig.expect(Op::Reset);
}

#[test]
fn packets_of_other_types_and_to_other_hosts_are_reset_and_forged_ones_dropped() {
    let mut rig = Rig::ready();
    let good = rig.packet(Ports { guest: 1, host: 2 }, Op::Request);
    rig.send_raw(&Header { kind: 2, ..good }, &[]);
    assert_eq!(rig.expect(Op::Reset).0.kind, 2);
    rig.send_raw(&Header { dst_cid: 7, ..good }, &[]);
    assert_eq!(rig.expect(Op::Reset).0.src_cid, 7);
    rig.send_raw(&Header { src_cid: 9, ..good }, &[]);
    rig.expect_nothing();
    assert_eq!(rig.counter("invalid_packets"), 3);
}

#[test]
fn a_second_request_for_the_same_ports_is_a_reset() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    rig.send(ports, Op::Request);
    rig.expect(Op::Reset);
    assert!(is_closed(&mut host));
    assert_eq!(rig.device.census(), (0, 0, 0, 0));
}

#[test]
fn a_guest_that_answers_before_it_was_asked_is_not_heeded() {
    let mut rig = Rig::new();
    let mut host = UnixStream::connect(rig.path()).unwrap();
    limit(&host);
    host.write_all(b"CONNECT 1\n").unwrap();
    rig.run();
    let ports = Ports {
        guest: 1,
        host: 1 << 30,
    };
    rig.send(ports, Op::Response);
    assert!(is_closed(&mut host));
}

#[test]
fn a_flood_of_resets_stalls_the_flood_and_loses_none() {
    let mut rig = Rig::new();
    let ports = Ports { guest: 1, host: 2 };
    let mut sent = 0;
    let header = rig.packet(ports, Op::Data);
    rig.mem
        .write_slice(&header.to_bytes(), GuestAddress(TX_BASE))
        .unwrap();
    let mut pending = 0;
    for _ in 0..MAX_RESETS + 40 {
        if pending == usize::from(QUEUE) {
            break;
        }
        rig.tx.add(&[(TX_BASE, 44)], &[]);
        sent += 1;
        pending += 1;
        rig.run();
        while rig.tx.take_used().is_some() {
            pending -= 1;
        }
    }
    assert_eq!(rig.device.census().3, MAX_RESETS);
    assert!(pending > 0, "packets wait in the queue");
    rig.post_rx(usize::from(QUEUE));
    let resets = rig.drain().len();
    assert_eq!(resets, sent);
    assert_eq!(rig.device.census().3, 0);
}

#[test]
fn connections_are_bounded_and_room_comes_back() {
    let mut rig = Rig::ready();
    let listener = rig.listen(1);
    listener.set_nonblocking(true).unwrap();
    let mut hosts = Vec::new();
    let mut first_reset = None;
    for n in 0..MAX_CONNECTIONS as u32 + 5 {
        rig.send(Ports { guest: n, host: 1 }, Op::Request);
        if let Ok((host, _)) = listener.accept() {
            hosts.push(host);
        }
        for (header, _) in rig.drain() {
            if header.op == Op::Reset as u16 {
                first_reset.get_or_insert(n);
            }
        }
    }
    assert_eq!(first_reset, Some(MAX_CONNECTIONS as u32));
    assert_eq!(rig.device.census().0, MAX_CONNECTIONS);
    // A host program waits, without a busy loop, until a connection ends.
    let mut late = UnixStream::connect(rig.path()).unwrap();
    late.write_all(b"CONNECT 5\n").unwrap();
    rig.run();
    rig.expect_nothing();
    assert!(!rig.backend_readable());
    rig.shutdown(Ports { guest: 0, host: 1 }, SHUTDOWN_BOTH);
    let ops: Vec<_> = rig.drain().iter().map(|(h, _)| h.op).collect();
    assert_eq!(ops, [Op::Reset as u16, Op::Request as u16]);
}

#[test]
fn connections_that_the_host_left_make_room_for_new_ones() {
    let mut rig = Rig::ready();
    let listener = rig.listen(1);
    for n in 0..MAX_CONNECTIONS as u32 + 1 {
        rig.send(Ports { guest: n, host: 1 }, Op::Request);
        drop(listener.accept().unwrap());
        rig.drain();
    }
    assert_eq!(rig.device.census().0, MAX_CONNECTIONS);
    assert_eq!(rig.counter("connections_refused"), 0);
}

// ---- Hostile host programs ----

#[test]
fn handshakes_are_bounded() {
    let mut rig = Rig::ready();
    let mut silent = Vec::new();
    for _ in 0..MAX_HANDSHAKES + 10 {
        silent.push(UnixStream::connect(rig.path()).unwrap());
        rig.run();
    }
    assert_eq!(rig.device.census().1, MAX_HANDSHAKES);
    assert_eq!(rig.counter("handshakes_dropped"), 10);
    limit(&silent[0]);
    assert!(is_closed(&mut silent[0]));
    rig.open_from_host(3);
}

#[test]
fn a_host_program_that_closes_or_babbles_before_its_line_is_dropped() {
    let mut rig = Rig::ready();
    drop(UnixStream::connect(rig.path()).unwrap());
    let mut partial = UnixStream::connect(rig.path()).unwrap();
    partial.write_all(b"CONN").unwrap();
    rig.run();
    assert_eq!(rig.device.census().1, 1);
    partial.shutdown(Shutdown::Write).unwrap();
    rig.run();
    assert_eq!(rig.device.census(), (0, 0, 0, 0));
    let mut babble = UnixStream::connect(rig.path()).unwrap();
    babble.write_all(&[b'A'; 4096]).unwrap();
    rig.run();
    assert_eq!(rig.device.census(), (0, 0, 0, 0));
    rig.expect_nothing();
    assert_eq!(rig.counter("handshakes_dropped"), 3);
}

#[test]
fn a_host_program_that_gives_up_waiting_for_the_guest_is_forgotten() {
    let mut rig = Rig::ready();
    let mut host = UnixStream::connect(rig.path()).unwrap();
    host.write_all(b"CONNECT 1\n").unwrap();
    rig.run();
    let (request, _) = rig.expect(Op::Request);
    drop(host);
    rig.run();
    rig.expect(Op::Reset);
    assert_eq!(rig.device.census(), (0, 0, 0, 0));
    let ports = Ports {
        guest: 1,
        host: request.src_port,
    };
    rig.send(ports, Op::Response);
    rig.expect(Op::Reset);
}

#[test]
fn many_streams_take_turns() {
    let mut rig = Rig::ready();
    let mut streams: Vec<_> = (1..=8).map(|port| rig.open_from_guest(port)).collect();
    for (_, host) in &mut streams {
        host.write_all(&pattern(60_000)).unwrap();
    }
    let mut got = std::collections::HashMap::<u32, Vec<u8>>::new();
    for (header, payload) in rig.drain() {
        got.entry(header.src_port).or_default().extend(payload);
    }
    assert_eq!(got.len(), 8);
    assert!(got.values().all(|data| *data == pattern(60_000)));
}

// ---- Stopping and starting ----

#[test]
fn a_pause_keeps_connections_and_a_reset_ends_them() {
    let mut rig = Rig::ready();
    let (ports, mut host) = rig.open_from_guest(1);
    let queues = rig.device.stop();
    assert_eq!(queues.len(), 3);
    assert!(rig.device.stop().is_empty());
    host.write_all(b"meanwhile").unwrap();
    let parts = Resources {
        mem: rig.mem.clone(),
        queues,
        irq: rig.irq.clone(),
        features: 1,
    };
    rig.device.start(parts).unwrap();
    rig.run();
    assert_eq!(rig.expect(Op::Data).1, b"meanwhile");
    rig.data(ports, b"yes");
    assert_eq!(read(&mut host, 3), b"yes");
    rig.device.stop();
    rig.device.reset();
    assert!(is_closed(&mut host));
    assert_eq!(rig.device.census(), (0, 0, 0, 0));
}

#[test]
fn a_reset_of_the_transport_is_an_event() {
    let mut rig = Rig::ready();
    let (_, mut host) = rig.open_from_guest(1);
    rig.device.reset_transport().unwrap();
    assert!(is_closed(&mut host));
    assert!(rig.event.take_used().is_none(), "no buffer yet");
    rig.mem.write_obj(7u32, GuestAddress(EVENT_BUF)).unwrap();
    rig.event.add(&[], &[(EVENT_BUF, 4)]);
    rig.run();
    assert_eq!(rig.event.take_used().unwrap().len, 4);
    assert_eq!(rig.mem.read_obj::<u32>(GuestAddress(EVENT_BUF)).unwrap(), 0);
    rig.event.add(&[], &[(EVENT_BUF, 4)]);
    rig.run();
    assert!(rig.event.take_used().is_none(), "told once");
    rig.expect_nothing();
}

#[derive(Clone, Debug)]
enum Action {
    Packet {
        conn: u32,
        op: u16,
        len: u16,
        flags: u32,
        fwd_cnt: u32,
    },
    Credit(u32),
    HostWrite(usize, u16),
    HostRead(usize),
    HostClose(usize),
    HostHalf(usize),
    HostConnect,
    Accept,
    Respond,
    PostRx(u8),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => (0u32..4, 0u16..9, 0u16..6000, 0u32..4, prop_oneof![Just(0u32), any::<u32>(), 0u32..9000])
            .prop_map(|(conn, op, len, flags, fwd_cnt)| Action::Packet { conn, op, len, flags, fwd_cnt }),
        2 => (0u32..4).prop_map(Action::Credit),
        3 => (any::<usize>(), 0u16..20_000).prop_map(|(i, n)| Action::HostWrite(i, n)),
        2 => any::<usize>().prop_map(Action::HostRead),
        1 => any::<usize>().prop_map(Action::HostClose),
        1 => any::<usize>().prop_map(Action::HostHalf),
        1 => Just(Action::HostConnect),
        2 => Just(Action::Accept),
        2 => Just(Action::Respond),
        3 => (0u8..16).prop_map(Action::PostRx),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever the guest and host programs do: no panic, no spinning, never more in flight
    /// than the guest buffers, never more forwarded than was received.
    #[test]
    fn any_sequence_of_events_keeps_the_invariants(actions in proptest::collection::vec(action(), 1..60)) {
        let mut rig = Rig::ready();
        let listener = rig.listen(1);
        listener.set_nonblocking(true).unwrap();
        let mut hosts: Vec<UnixStream> = Vec::new();
        // Per connection: bytes we received, as the device counts them, and bytes we sent.
        let mut received = std::collections::HashMap::<(u32, u32), u32>::new();
        let mut sent = std::collections::HashMap::<(u32, u32), u32>::new();
        let mut requested = Vec::new();
        for action in actions {
            match action {
                Action::Packet { conn, op, len, flags, fwd_cnt } => {
                    let ports = Ports { guest: conn, host: 1 };
                    let key = (ports.guest, ports.host);
                    if op == Op::Request as u16 {
                        sent.insert(key, 0);
                        received.insert(key, 0);
                    }
                    let len = if op == Op::Data as u16 { len } else { 0 };
                    *sent.entry(key).or_default() += u32::from(len);
                    let header = Header {
                        op,
                        len: u32::from(len),
                        flags,
                        fwd_cnt,
                        ..rig.packet(ports, Op::Data)
                    };
                    rig.send_raw(&header, &vec![3; usize::from(len)]);
                }
                Action::Credit(conn) => {
                    let ports = Ports { guest: conn, host: 1 };
                    let got = *received.get(&(conn, 1)).unwrap_or(&0);
                    rig.credit(ports, GUEST_BUF_ALLOC, got);
                }
                Action::Accept => {
                    while let Ok((host, _)) = listener.accept() {
                        host.set_nonblocking(true).unwrap();
                        hosts.push(host);
                    }
                }
                Action::HostWrite(i, n) if !hosts.is_empty() => {
                    let i = i % hosts.len();
                    let _ = hosts[i].write(&vec![5; usize::from(n)]);
                }
                Action::HostRead(i) if !hosts.is_empty() => {
                    let i = i % hosts.len();
                    let _ = hosts[i].read(&mut vec![0; 100_000]);
                }
                Action::HostClose(i) if !hosts.is_empty() => {
                    let i = i % hosts.len();
                    hosts.swap_remove(i);
                }
                Action::HostHalf(i) if !hosts.is_empty() => {
                    let i = i % hosts.len();
                    let _ = hosts[i].shutdown(Shutdown::Write);
                }
                Action::HostConnect => {
                    let mut host = UnixStream::connect(rig.path()).unwrap();
                    host.write_all(b"CONNECT 2\n").unwrap();
                    host.set_nonblocking(true).unwrap();
                    hosts.push(host);
                }
                Action::Respond => {
                    if let Some(ports) = requested.pop() {
                        rig.send(ports, Op::Response);
                    }
                }
                Action::PostRx(n) => {
                    let free = usize::from(QUEUE) - rig.posted.len();
                    rig.post_rx(free.min(usize::from(n)));
                }
                _ => {}
            }
            rig.run();
            prop_assert!(!rig.backend_readable());
            while rig.tx.take_used().is_some() {}
            while let Some((header, payload)) = rig.take() {
                let key = (header.dst_port, header.src_port);
                let op = Op::from_raw(header.op).unwrap();
                match op {
                    Op::Request => {
                        requested.push(Ports { guest: key.0, host: key.1 });
                        received.insert(key, 0);
                        sent.insert(key, 0);
                    }
                    Op::Data => {
                        prop_assert!(!payload.is_empty());
                        let got = received.entry(key).or_default();
                        *got += payload.len() as u32;
                    }
                    _ => prop_assert!(payload.is_empty()),
                }
                if op != Op::Reset {
                    let total = *sent.get(&key).unwrap_or(&0);
                    prop_assert!(header.fwd_cnt <= total, "{} of {}", header.fwd_cnt, total);
                }
            }
        }
        let (connections, handshakes, lingering, resets) = rig.device.census();
        prop_assert!(connections + lingering <= MAX_CONNECTIONS);
        prop_assert!(handshakes <= MAX_HANDSHAKES && resets <= MAX_RESETS + MAX_CONNECTIONS);
    }
}
