use super::super::header::{HEADER_LEN, MAX_FRAME};
use super::super::memory::{MemoryNic, MemoryWire};
use super::super::offloads::Offloads;
use super::super::receive::BUDGET;
use super::*;
use crate::GuestRam;
use crate::allocations::allocations;
use crate::testing::{
    CountingInterrupt, DriverQueue, Used, backend_readable, counter, memory, start, stop,
};
use proptest::prelude::*;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::SeqCst;
use vm_memory::{Bytes, GuestAddress};

mod accepted;
mod control;
mod filter;
mod receive;

/// Queues of a device with one pair.
const RX: u16 = 0;
const TX: u16 = 1;
const CONTROL: u16 = 2;

/// Receive buffers start here; those for sending start a MiB before the end of memory.
const BUF: u64 = 0x10_0000;
const TX_BUF: u64 = 0x70_0000;

struct Rig {
    mem: GuestRam,
    rx: DriverQueue,
    tx: DriverQueue,
    control: DriverQueue,
    device: NetDevice,
    irq: Arc<CountingInterrupt>,
    wire: MemoryWire,
    /// The number of receive buffers so far.
    placed: u64,
    /// The number of frames transmitted so far.
    sent: u64,
}

fn rig_with(features: u64, make: impl FnOnce(NetDevice) -> NetDevice) -> Rig {
    let mem = memory(8 << 20);
    let [rx, tx, control] = [(0x1_0000, 256), (0x2_0000, 256), (0x3_0000, 64)]
        .map(|(base, size)| DriverQueue::new(&mem, base, size));
    let irq = Arc::new(CountingInterrupt::default());
    let (nic, wire) = MemoryNic::pair();
    let mut device = make(NetDevice::new(Box::new(nic)).unwrap());
    start(&mut device, &[&rx, &tx, &control], &irq, features);
    Rig {
        mem,
        rx,
        tx,
        control,
        device,
        irq,
        wire,
        placed: 0,
        sent: 0,
    }
}

fn rig(features: u64) -> Rig {
    rig_with(features, |device| device)
}

impl Rig {
    /// Lets the device work until nothing wakes it up; returns how often it was called.
    fn work(&mut self) -> usize {
        let mut calls = 0;
        while backend_readable(&self.device) {
            let _ = self.device.on_backend().unwrap();
            calls += 1;
            assert!(calls < 1000, "the device spins");
        }
        calls
    }

    fn notify(&mut self, queue: u16) {
        while self.device.on_queue(queue).unwrap() == Progress::More {}
    }

    /// Adds receive buffers of `len` bytes, one after the other.
    fn buffers(&mut self, count: u64, len: u32) {
        for n in self.placed..self.placed + count {
            self.rx.add(&[], &[(BUF + n * u64::from(len), len)]);
        }
        self.placed += count;
        self.notify(RX);
    }

    fn bytes(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mem.read_slice(&mut bytes, GuestAddress(addr)).unwrap();
        bytes
    }

    /// Sends a frame after a header, each in its own buffer.
    fn transmit(&mut self, header: &[u8], frame: &[u8]) {
        let head = TX_BUF + self.sent % 12 * 0x1_2000;
        self.sent += 1;
        let at = head + 0x1000;
        self.mem.write_slice(header, GuestAddress(head)).unwrap();
        self.mem.write_slice(frame, GuestAddress(at)).unwrap();
        let lens = [header.len(), frame.len()].map(|len| u32::try_from(len).unwrap());
        self.tx.add(&[(head, lens[0]), (at, lens[1])], &[]);
    }

    fn counter(&self, name: &str) -> u64 {
        counter(&self.device, name)
    }

    /// Returns the first frame that the driver got, and the header before it.
    fn received(&mut self, buffer: u32) -> Option<(Vec<u8>, Vec<u8>)> {
        let first = self.rx.take_used()?;
        let at = |used: Used| BUF + u64::from(used.id) * u64::from(buffer);
        let mut bytes = self.bytes(at(first), first.len as usize);
        let header = bytes.drain(..HEADER_LEN).collect::<Vec<_>>();
        for _ in 1..u16::from_le_bytes([header[10], header[11]]) {
            let used = self
                .rx
                .take_used()
                .expect("as many buffers as the header says");
            bytes.extend(self.bytes(at(used), used.len as usize));
        }
        Some((header, bytes))
    }

    fn command(&mut self, class: u8, command: u8, data: &[u8]) -> u8 {
        let at = TX_BUF + 0x8000;
        let mut bytes = vec![class, command];
        bytes.extend(data);
        self.mem.write_slice(&bytes, GuestAddress(at)).unwrap();
        let len = u32::try_from(bytes.len()).unwrap();
        self.control.add(&[(at, len)], &[(at + 0x1000, 1)]);
        self.notify(CONTROL);
        assert_eq!(self.control.take_used().unwrap().len, 1);
        self.bytes(at + 0x1000, 1)[0]
    }
}

fn frame(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|n| (n % 251) as u8 ^ seed).collect()
}

#[test]
fn frames_go_out_as_the_driver_wrote_them() {
    let mut rig = rig(0);
    for (len, seed) in [(14, 1), (1514, 2), (MAX_FRAME, 3)] {
        rig.transmit(&[0; HEADER_LEN], &frame(len, seed));
        rig.notify(TX);
        let (header, bytes) = rig.wire.receive().unwrap();
        assert_eq!((header, bytes), ([0; HEADER_LEN], frame(len, seed)));
        assert_eq!(rig.tx.take_used().unwrap().len, 0);
    }
    assert_eq!(rig.irq.queue.load(SeqCst), 3);
    assert_eq!(rig.counter("tx_frames"), 3);
    assert_eq!(rig.counter("tx_bytes"), (14 + 1514 + MAX_FRAME) as u64);
}

#[test]
fn a_header_split_over_buffers_is_one_header() {
    let mut rig = rig(0);
    let bytes = frame(100, 7);
    rig.mem
        .write_slice(&bytes, GuestAddress(TX_BUF + 12))
        .unwrap();
    rig.tx
        .add(&[(TX_BUF, 5), (TX_BUF + 5, 50), (TX_BUF + 55, 57)], &[]);
    rig.notify(TX);
    assert_eq!(rig.wire.receive().unwrap().1, bytes);
}

#[test]
fn frames_that_are_none_are_dropped_and_counted_and_the_next_one_goes() {
    let mut rig = rig(feature::CSUM);
    let gso = [1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0];
    let checksum_beyond = [1, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0];
    for (header, len) in [
        ([0; HEADER_LEN], 0),
        ([0; HEADER_LEN], 13),
        ([0; HEADER_LEN], MAX_FRAME + 1),
        (gso, 1514),
        (checksum_beyond, 1514),
    ] {
        rig.transmit(&header, &frame(len, 0));
    }
    // 4 GiB in one chain.
    rig.tx.add(&[(0, 8 << 20); 100], &[]);
    rig.transmit(&[0; HEADER_LEN], &frame(60, 9));
    rig.notify(TX);
    assert_eq!(rig.wire.receive().unwrap().1, frame(60, 9));
    assert!(rig.wire.receive().is_none());
    assert_eq!(rig.counter("tx_malformed"), 6);
    assert_eq!(std::iter::from_fn(|| rig.tx.take_used()).count(), 7);
}

#[test]
fn a_frame_shorter_than_its_header_is_a_fault() {
    let mut rig = rig(0);
    rig.tx.add(&[(TX_BUF, 11)], &[]);
    assert!(matches!(rig.device.on_queue(TX), Err(Fault::Guest(_))));
    assert_eq!(stop(&mut rig.device).len(), 3);
    assert_eq!(rig.device.on_queue(TX).unwrap(), Progress::Idle);
}

#[test]
fn a_backend_that_refuses_loses_the_frame_and_no_more() {
    let mut rig = rig(0);
    rig.wire.refuse(Some(io::ErrorKind::WouldBlock));
    rig.transmit(&[0; HEADER_LEN], &frame(60, 1));
    rig.notify(TX);
    rig.wire.refuse(Some(io::ErrorKind::BrokenPipe));
    rig.transmit(&[0; HEADER_LEN], &frame(60, 2));
    rig.notify(TX);
    rig.wire.refuse(None);
    rig.transmit(&[0; HEADER_LEN], &frame(60, 3));
    rig.notify(TX);
    assert_eq!(rig.wire.receive().unwrap().1, frame(60, 3));
    let counts = ["tx_dropped", "tx_errors", "tx_frames"].map(|name| rig.counter(name));
    assert_eq!(counts, [1, 1, 1]);
}

#[test]
fn offloads_reach_the_backend_as_they_were_negotiated() {
    let all = feature::GUEST_OFFLOADS;
    assert_eq!(rig(all).wire.offloads(), Offloads::ALL);
    // Segments need checksums (§5.1.3.1).
    let without_checksum = rig(all & !feature::GUEST_CSUM);
    assert_eq!(without_checksum.wire.offloads(), Offloads::default());
    let tso6 = rig(feature::GUEST_CSUM | feature::GUEST_TSO6)
        .wire
        .offloads();
    assert_eq!((tso6.tso4, tso6.tso6, tso6.ecn), (false, true, false));
}

#[test]
fn a_flood_leaves_the_event_loop_its_turn() {
    let mut rig = rig(feature::MRG_RXBUF);
    rig.buffers(256, 8192);
    for _ in 0..300 {
        rig.wire.send(&frame(6000, 0));
    }
    let most = 1 + BUDGET / 6000;
    let mut turns = 0;
    while backend_readable(&rig.device) {
        let before = rig.wire.waiting();
        let _ = rig.device.on_backend().unwrap();
        assert!(before - rig.wire.waiting() <= most);
        turns += 1;
        assert!(turns < 100);
    }
    assert!(turns > 1);
    assert_eq!(rig.wire.waiting(), 300 - 256);

    for _ in 0..40 {
        rig.transmit(&[0; HEADER_LEN], &frame(60_000, 0));
    }
    assert_eq!(rig.device.on_queue(TX).unwrap(), Progress::More);
    assert!(rig.counter("tx_frames") < 40);
    rig.notify(TX);
    assert_eq!(rig.counter("tx_frames"), 40);
}

#[test]
fn a_card_restored_has_its_drivers_address_and_offloads() {
    let control = feature::CTRL_MAC_ADDR | feature::CTRL_GUEST_OFFLOADS;
    let features = control | feature::GUEST_CSUM | feature::GUEST_TSO4 | feature::GUEST_TSO6;
    let mut one = rig(features);
    assert_eq!(one.command(1, 1, &[2, 9, 9, 9, 9, 9]), 0);
    let bits = feature::GUEST_CSUM | feature::GUEST_TSO6;
    assert_eq!(one.command(5, 0, &bits.to_le_bytes()), 0);
    stop(&mut one.device);
    let saved = one.device.save();
    let (nic, wire) = MemoryNic::pair();
    let mut two = NetDevice::new(Box::new(nic)).unwrap();
    two.restore(&saved).unwrap();
    two.negotiated(features);
    assert_eq!(wire.offloads(), one.wire.offloads());
    two.negotiated(features);
    assert_ne!(wire.offloads(), one.wire.offloads(), "another driver");
    two.restore(&saved).unwrap();
    assert_eq!(wire.offloads(), one.wire.offloads());
    let mut mac = [0; 6];
    two.info().config.read(0, &mut mac);
    assert_eq!(mac, [2, 9, 9, 9, 9, 9]);
    one.device.set_link(LinkState::Down);
    two.restore(&one.device.save()).unwrap();
    assert_eq!(
        (two.link, one.device.link),
        (LinkState::Down, LinkState::Down)
    );
    let mut status = [9; 2];
    two.info().config.read(6, &mut status);
    assert_eq!(status, [0, 0]);
    let version = saved.version;
    for bytes in [vec![], vec![0; 16], vec![0; 17], vec![0xff; 17]] {
        assert!(two.restore(&SavedDevice { version, bytes }).is_err());
    }
    let bytes = saved.bytes;
    let older = SavedDevice { version: 1, bytes };
    assert!(two.restore(&older).is_err());
}

#[test]
fn a_stopped_device_has_given_back_every_buffer_it_did_not_fill() {
    let mut rig = rig(feature::MRG_RXBUF);
    rig.buffers(100, 1536);
    rig.wire.send(&frame(60, 1));
    rig.work();
    let mut rx = rig.device.stop_queue(RX).unwrap();
    assert_eq!(rig.rx.take_used().unwrap().id, 0);
    let mut heads = Vec::new();
    while let Some(chain) = rx.next().unwrap() {
        heads.push(chain.head());
    }
    assert_eq!(heads, (1..100).collect::<Vec<_>>());
}

#[test]
fn a_rate_holds_frames_back_and_a_timer_brings_them() {
    let rate = Rate {
        per_second: 1,
        burst: 1,
    };
    let mut rig = rig_with(feature::MRG_RXBUF, |device| {
        device
            .limit_receive(None, Some(rate))
            .limit_transmit(None, Some(rate))
    });
    rig.buffers(200, 1536);
    for n in 0..2 {
        rig.wire.send(&frame(60, n));
        rig.transmit(&[0; HEADER_LEN], &frame(60, n));
    }
    rig.notify(TX);
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while rig.counter("rx_frames") < 2 || rig.counter("tx_frames") < 2 {
        assert!(std::time::Instant::now() < deadline);
        rig.work();
        std::thread::yield_now();
    }
    for n in 0..2 {
        assert_eq!(rig.received(1536).unwrap().1, frame(60, n));
        assert_eq!(rig.wire.receive().unwrap().1, frame(60, n));
    }
    assert!(rig.counter("rx_limited") > 0 && rig.counter("tx_limited") > 0);
}

#[test]
fn a_link_that_is_down_passes_nothing_and_its_driver_is_told() {
    let mut rig = rig(feature::MRG_RXBUF);
    rig.buffers(64, 1536);
    rig.device.set_link(LinkState::Down);
    rig.device.set_link(LinkState::Down);
    assert_eq!(rig.device.info().config.generation(), 1);
    let status = |rig: &Rig| {
        let mut status = [9; 2];
        rig.device.info().config.read(6, &mut status);
        status
    };
    assert_eq!(status(&rig), [0, 0]);
    rig.wire.send(&frame(60, 1));
    rig.transmit(&[0; HEADER_LEN], &frame(60, 2));
    rig.notify(TX);
    rig.work();
    assert!(rig.rx.take_used().is_none());
    assert!(rig.wire.receive().is_none());
    assert_eq!(rig.counter("tx_dropped"), 1);
    rig.device.set_link(LinkState::Up);
    let generation = rig.device.info().config.generation();
    assert_eq!((generation, status(&rig)), (2, [1, 0]));
    rig.work();
    assert_eq!(rig.received(1536).unwrap().1, frame(60, 1));
}

#[test]
fn frames_wait_in_the_queue_for_a_peer_that_is_slow_and_none_is_lost() {
    let (ours, mut peer) = UnixStream::pair().unwrap();
    peer.set_nonblocking(true).unwrap();
    let mut rig = rig_with(feature::MRG_RXBUF, |_| {
        NetDevice::stream(ours.into()).unwrap()
    });
    let offers = rig.device.info().features;
    assert_eq!(offers & (feature::CSUM | feature::GUEST_OFFLOADS), 0);
    let sent: Vec<Vec<u8>> = (0..12).map(|seed| frame(60_000, seed)).collect();
    for frame in &sent {
        rig.transmit(&[0; HEADER_LEN], frame);
    }
    rig.notify(TX);
    let gone = rig.counter("tx_frames");
    assert!(gone < 12 && rig.counter("tx_blocked") > 0, "{gone} frames");
    // Nothing wakes the device up before the peer reads.
    assert!(rig.work() <= 1);
    let (mut bytes, mut part) = (Vec::<u8>::new(), vec![0; 10_000]);
    while let Ok(len) = peer.read(&mut part) {
        bytes.extend(&part[..len]);
        rig.work();
    }
    let all = sent
        .iter()
        .flat_map(|frame| [&60_000u32.to_be_bytes(), &frame[..]].concat());
    assert!(bytes == all.collect::<Vec<u8>>());
    assert_eq!(
        (rig.counter("tx_frames"), rig.counter("tx_dropped")),
        (12, 0)
    );
    // The other direction.
    rig.buffers(40, 2000);
    let one = frame(5000, 9);
    peer.write_all(&[&5000u32.to_be_bytes(), &one[..]].concat())
        .unwrap();
    rig.work();
    assert_eq!(rig.received(2000).unwrap().1, one[..]);
    drop(peer);
    rig.work();
    assert_eq!(rig.counter("rx_errors"), 1);
}

#[test]
fn frames_need_no_allocation() {
    for (features, buffer) in [(feature::MRG_RXBUF, 2000), (0, 0x1_1000)] {
        let (ours, mut peer) = UnixStream::pair().unwrap();
        let mut rig = rig_with(features, |_| NetDevice::stream(ours.into()).unwrap());
        rig.buffers(40, buffer);
        let frame = frame(1000, 1);
        let on_the_wire = [&1000u32.to_be_bytes(), &frame[..]].concat();
        let mut round = || {
            peer.write_all(&on_the_wire).unwrap();
            rig.transmit(&[0; HEADER_LEN], &frame);
            let allocations = allocations(|| {
                rig.work();
                rig.notify(TX);
            });
            assert_eq!(rig.received(buffer).unwrap().1, frame);
            let mut sent = vec![0; on_the_wire.len()];
            peer.read_exact(&mut sent).unwrap();
            assert_eq!(sent, on_the_wire);
            rig.buffers(1, buffer);
            allocations
        };
        // Until the chains for a frame of any length are used up, since short ones are expected.
        for _ in 0..40 {
            round();
        }
        for _ in 0..8 {
            assert_eq!(round(), 0, "{features:#x}");
        }
    }
}

proptest! {
    /// For any frames and buffers, the frames that arrive are a subset of those sent, in order and
    /// complete.
    #[test]
    fn what_arrives_is_what_was_sent(
        frames in proptest::collection::vec(14usize..6000, 1..40),
        buffers in proptest::collection::vec(12u32..4000, 1..100),
        mergeable: bool,
    ) {
        let mut rig = rig(if mergeable { feature::MRG_RXBUF } else { 0 });
        for (n, len) in frames.iter().enumerate() {
            rig.wire.send(&frame(*len, n as u8));
        }
        let mut at = BUF;
        let mut places = Vec::new();
        for len in &buffers {
            rig.rx.add(&[], &[(at, *len)]);
            places.push(at);
            at += u64::from(*len);
            rig.notify(RX);
            rig.work();
        }
        let mut expected = frames.iter().enumerate().map(|(n, len)| frame(*len, n as u8));
        let mut arrived = 0u64;
        while let Some(first) = rig.rx.take_used() {
            let mut bytes = rig.bytes(places[first.id as usize], first.len as usize);
            let count = u16::from_le_bytes([bytes[10], bytes[11]]);
            bytes.drain(..HEADER_LEN);
            for _ in 1..count {
                let used = rig.rx.take_used().unwrap();
                bytes.extend(rig.bytes(places[used.id as usize], used.len as usize));
            }
            prop_assert!(expected.any(|frame| frame == bytes), "a frame that was not sent");
            arrived += 1;
        }
        prop_assert_eq!(arrived, rig.counter("rx_frames"));
        if mergeable {
            prop_assert_eq!(rig.counter("rx_dropped"), 0);
        }
    }
}
