//! Several queue pairs.

use super::super::error::NetDeviceError;
use super::super::header::HEADER_LEN;
use super::super::memory::{MemoryNic, MemoryWire};
use super::super::nic::Nic;
use super::super::pair::MAX_QUEUE_PAIRS;
use super::*;
use crate::GuestRam;
use crate::testing::{
    CountingInterrupt, DriverQueue, backend_readable, counter, memory, start, stop,
};
use std::time::Instant;
use vm_memory::{Bytes, GuestAddress};

const FEATURES: u64 = feature::MQ | feature::MRG_RXBUF;
const BUF: u64 = 0x20_0000;
/// Bytes of a buffer, and of all buffers of one pair.
const LEN: u32 = 2048;
const AREA: u64 = 0x8_0000;
const MESSAGE: u64 = 0x10_0000;
const OK: u8 = 0;
const ERR: u8 = 1;

struct Rig {
    mem: GuestRam,
    queues: Vec<DriverQueue>,
    device: NetDevice,
    irq: Arc<CountingInterrupt>,
    wires: Vec<MemoryWire>,
    /// The number of receive buffers so far, of each pair.
    placed: Vec<u64>,
}

fn card(pairs: usize) -> (NetDevice, Vec<MemoryWire>) {
    let (nics, wires): (Vec<_>, Vec<_>) = (0..pairs)
        .map(|_| {
            let (nic, wire) = MemoryNic::pair();
            (Box::new(nic) as Box<dyn Nic>, wire)
        })
        .unzip();
    (NetDevice::over(nics).unwrap(), wires)
}

fn rig_with(
    pairs: usize,
    features: u64,
    queues: usize,
    make: impl FnOnce(NetDevice) -> NetDevice,
) -> Rig {
    let mem = memory(8 << 20);
    let (device, wires) = card(pairs);
    let mut device = make(device);
    let irq = Arc::new(CountingInterrupt::default());
    let queues: Vec<_> = (1..=queues as u64)
        .map(|n| DriverQueue::new(&mem, n << 16, 64))
        .collect();
    start(
        &mut device,
        &queues.iter().collect::<Vec<_>>(),
        &irq,
        features,
    );
    Rig {
        mem,
        queues,
        device,
        irq,
        wires,
        placed: vec![0; pairs],
    }
}

fn rig(pairs: usize) -> Rig {
    rig_with(pairs, FEATURES, 2 * pairs + 1, |device| device)
}

impl Rig {
    fn work(&mut self) {
        let mut calls = 0;
        while backend_readable(&self.device) {
            let _ = self.device.on_backend().unwrap();
            calls += 1;
            assert!(calls < 1000, "the device spins");
        }
    }

    fn notify(&mut self, queue: usize) {
        let queue = u16::try_from(queue).unwrap();
        while self.device.on_queue(queue).unwrap() == Progress::More {}
    }

    fn buffers(&mut self, pair: usize, count: u64) {
        for n in self.placed[pair]..self.placed[pair] + count {
            let at = BUF + pair as u64 * AREA + n * u64::from(LEN);
            self.queues[2 * pair].add(&[], &[(at, LEN)]);
        }
        self.placed[pair] += count;
        self.notify(2 * pair);
    }

    /// Returns the first byte of each frame that arrived on a pair.
    fn received(&mut self, pair: usize) -> Vec<u8> {
        let area = BUF + pair as u64 * AREA;
        let used = std::iter::from_fn(|| self.queues[2 * pair].take_used());
        used.map(|used| {
            let at = area + u64::from(used.id) * u64::from(LEN) + HEADER_LEN as u64;
            self.mem.read_obj(GuestAddress(at)).unwrap()
        })
        .collect()
    }

    /// Sends a frame that starts with the wire's number on each wire; returns the frames that
    /// arrived on each pair, in the order of the wires.
    fn arrivals(&mut self) -> Vec<Vec<u8>> {
        for (number, wire) in (0u8..).zip(&self.wires) {
            wire.send(&[number; 60]);
        }
        self.work();
        let pairs = 0..self.queues.len() / 2;
        let sorted = |mut frames: Vec<u8>| {
            frames.sort_unstable();
            frames
        };
        pairs.map(|pair| sorted(self.received(pair))).collect()
    }

    fn command(&mut self, queue: usize, class: u8, data: &[u8]) -> u8 {
        let bytes = [&[class, 0], data].concat();
        self.mem.write_slice(&bytes, GuestAddress(MESSAGE)).unwrap();
        let len = u32::try_from(bytes.len()).unwrap();
        let ack = MESSAGE + 0x1000;
        self.queues[queue].add(&[(MESSAGE, len)], &[(ack, 1)]);
        self.notify(queue);
        assert_eq!(self.queues[queue].take_used().unwrap().len, 1);
        self.mem.read_obj(GuestAddress(ack)).unwrap()
    }

    fn set_pairs(&mut self, count: u16) -> u8 {
        self.command(self.queues.len() - 1, 4, &count.to_le_bytes())
    }

    fn transmit(&mut self, pair: usize, byte: u8) {
        let frame = [[0; HEADER_LEN].as_slice(), &[byte; 60]].concat();
        self.mem.write_slice(&frame, GuestAddress(MESSAGE)).unwrap();
        self.queues[2 * pair + 1].add(&[(MESSAGE, frame.len() as u32)], &[]);
        self.notify(2 * pair + 1);
    }
}

#[test]
fn a_card_has_one_to_eight_pairs_and_says_how_many() {
    for count in [0, MAX_QUEUE_PAIRS + 1] {
        let nics = (0..count).map(|_| Box::new(MemoryNic::pair().0) as Box<dyn Nic>);
        let error = NetDevice::over(nics.collect()).unwrap_err();
        assert!(matches!(error, NetDeviceError::QueuePairs { count: c } if c == count));
    }
    for count in [1, 2, MAX_QUEUE_PAIRS] {
        let (device, _wires) = card(count);
        let info = device.mtu(1400).info();
        let mut pairs = [0; 2];
        info.config.read(8, &mut pairs);
        assert_eq!(usize::from(u16::from_le_bytes(pairs)), count);
        assert_eq!(info.queue_sizes.len(), 2 * count + 1);
        assert_eq!(info.features & feature::MQ != 0, count > 1);
    }
}

#[test]
fn frames_come_by_the_active_pairs_whichever_queue_of_the_host_they_are_in() {
    let mut rig = rig(4);
    for pair in 0..4 {
        rig.buffers(pair, 60);
    }
    let none = Vec::<u8>::new;
    assert_eq!(
        rig.arrivals(),
        [vec![0, 1, 2, 3], none(), none(), none()],
        "one pair until the driver says otherwise (§5.1.6.5.5)"
    );
    assert_eq!(rig.set_pairs(2), OK);
    assert_eq!(rig.arrivals(), [vec![0, 2], vec![1, 3], none(), none()]);
    assert_eq!(rig.set_pairs(3), OK);
    assert_eq!(rig.arrivals(), [vec![0, 3], vec![1], vec![2], none()]);
    assert_eq!(rig.set_pairs(4), OK);
    assert_eq!(rig.arrivals(), [[0], [1], [2], [3]]);
    assert_eq!(rig.set_pairs(1), OK);
    assert_eq!(rig.arrivals()[0], [0, 1, 2, 3]);
    assert_eq!(counter(&rig.device, "rx_frames"), 20);
}

#[test]
fn numbers_of_pairs_that_cannot_be_are_refused_and_change_nothing() {
    let mut rig = rig(2);
    for pair in 0..2 {
        rig.buffers(pair, 8);
    }
    assert_eq!(rig.set_pairs(2), OK);
    for count in [0, 3, 4, 5, 0x8000, u16::MAX] {
        assert_eq!(rig.set_pairs(count), ERR, "{count}");
    }
    for data in [&[][..], &[1], &[1, 0, 0]] {
        assert_eq!(rig.command(4, 4, data), ERR);
    }
    assert_eq!(rig.arrivals(), [[0], [1]]);
    assert_eq!(counter(&rig.device, "commands_refused"), 9);
}

#[test]
fn pairs_whose_queues_do_not_run_are_not_used() {
    for stopped in [2, 3] {
        let mut rig = rig(2);
        rig.buffers(0, 8);
        let queue = rig.device.stop_queue(stopped).unwrap();
        assert_eq!(rig.set_pairs(2), ERR);
        assert_eq!(rig.arrivals(), [vec![0, 1], vec![]]);
        // The queues were started one by one, and are now complete.
        rig.device.start_queue(queue).unwrap();
        assert_eq!(rig.set_pairs(2), OK);
    }
}

#[test]
fn a_driver_that_knows_of_one_pair_has_its_control_queue_behind_it() {
    let features = feature::MRG_RXBUF | feature::CTRL_RX;
    let mut rig = rig_with(4, features, 3, |device| device);
    rig.buffers(0, 8);
    assert_eq!(rig.set_pairs(1), ERR, "was not negotiated");
    assert_eq!(rig.command(2, 0, &[1]), OK);
    assert_eq!(rig.arrivals()[0], [0, 1, 2, 3]);
    for index in [3, 4, 8, 9] {
        let queue = rig.queues[0].device_queue(index, rig.irq.clone());
        let refused = rig.device.start_queue(queue);
        assert!(matches!(refused, Err(StartError::NoSuchQueue { .. })));
        assert_eq!(rig.device.on_queue(index).unwrap(), Progress::Idle);
        assert!(rig.device.stop_queue(index).is_none());
    }
    let again = rig.queues[0].device_queue(2, rig.irq.clone());
    let refused = rig.device.start_queue(again);
    assert!(matches!(refused, Err(StartError::Running { index: 2 })));
}

#[test]
fn what_the_driver_sends_goes_by_the_pairs_own_queue_of_the_host_active_or_not() {
    let mut rig = rig(3);
    for active in [1, 3, 2] {
        assert_eq!(rig.set_pairs(active), OK);
        for pair in 0..3 {
            rig.transmit(pair, 7 + pair as u8);
            let (_, frame) = rig.wires[pair].receive().unwrap();
            assert_eq!(frame, [7 + pair as u8; 60]);
        }
    }
    assert!(rig.wires.iter().all(|wire| wire.receive().is_none()));
}

#[test]
fn a_pair_without_buffers_holds_up_no_other_and_its_frames_wait() {
    let mut rig = rig(2);
    rig.buffers(0, 8);
    assert_eq!(rig.set_pairs(2), OK);
    assert_eq!(rig.arrivals(), [vec![0], vec![]]);
    assert_eq!(rig.arrivals(), [vec![0], vec![]]);
    assert_eq!(rig.wires[1].waiting(), 2);
    rig.buffers(1, 1);
    assert_eq!(rig.received(1), [1]);
    // They move to the remaining pair.
    assert_eq!(rig.set_pairs(1), OK);
    rig.work();
    assert_eq!(rig.received(0), [1]);
}

#[test]
fn a_frame_that_was_read_for_a_pair_is_gone_with_it() {
    let mut rig = rig(2);
    rig.buffers(0, 8);
    rig.buffers(1, 1);
    assert_eq!(rig.set_pairs(2), OK);
    // It needs two buffers.
    rig.wires[1].send(&[1; 3000]);
    rig.work();
    assert_eq!(rig.set_pairs(1), OK);
    rig.buffers(1, 8);
    assert_eq!(rig.received(1), []);
    assert_eq!(rig.set_pairs(2), OK);
    assert_eq!(rig.arrivals(), [[0], [1]]);
}

#[test]
fn a_pause_keeps_the_active_pairs_and_a_reset_forgets_them() {
    for reset in [false, true] {
        let mut rig = rig(2);
        rig.buffers(0, 8);
        rig.buffers(1, 8);
        assert_eq!(rig.set_pairs(2), OK);
        let queues = stop(&mut rig.device);
        assert_eq!(queues.len(), 5);
        if reset {
            rig.device.reset();
            assert!(stop(&mut rig.device).is_empty());
            rig.device.negotiated(FEATURES);
        }
        for queue in queues {
            rig.device.start_queue(queue).unwrap();
        }
        let expected = match reset {
            false => [vec![0], vec![1]],
            true => [vec![0, 1], vec![]],
        };
        assert_eq!(rig.arrivals(), expected);
    }
}

#[test]
fn a_card_restored_receives_by_the_pairs_of_its_driver() {
    let mut one = rig(4);
    assert_eq!(one.set_pairs(3), OK);
    stop(&mut one.device);
    let saved = one.device.save();
    let mut two = rig_with(4, FEATURES, 9, |mut device| {
        device.restore(&saved).unwrap();
        device
    });
    for pair in 0..4 {
        two.buffers(pair, 8);
    }
    assert_eq!(two.arrivals(), [vec![0, 3], vec![1], vec![2], vec![]]);
    assert_eq!(two.device.save(), saved);
    let (mut other, _wires) = card(2);
    assert!(other.restore(&saved).is_err(), "as many as it has not");
    // The state has more pairs than its driver knows about.
    let mut three = rig_with(4, feature::MRG_RXBUF, 3, |mut device| {
        device.restore(&saved).unwrap();
        device
    });
    three.buffers(0, 8);
    assert_eq!(three.arrivals()[0], [0, 1, 2, 3]);
}

#[test]
fn offloads_are_set_once_for_all_queues_of_the_backend() {
    let control = feature::CTRL_GUEST_OFFLOADS;
    let features = FEATURES | control | feature::GUEST_CSUM | feature::GUEST_TSO4;
    let mut rig = rig_with(2, features, 5, |device| device);
    let offloads = |rig: &Rig| [&rig.wires[0], &rig.wires[1]].map(MemoryWire::offloads);
    assert!(offloads(&rig)[0].tso4);
    assert_eq!(offloads(&rig)[1], Offloads::default());
    assert_eq!(rig.command(4, 5, &feature::GUEST_CSUM.to_le_bytes()), OK);
    assert!(!offloads(&rig)[0].tso4);
}

#[test]
fn a_rate_is_the_cards_and_pairs_take_turns() {
    let rate = Rate {
        per_second: 200,
        burst: 1,
    };
    let mut rig = rig_with(2, FEATURES, 5, |device| {
        device.limit_receive(None, Some(rate))
    });
    rig.buffers(0, 32);
    rig.buffers(1, 32);
    assert_eq!(rig.set_pairs(2), OK);
    for _ in 0..20 {
        for wire in &rig.wires {
            wire.send(&[0; 60]);
        }
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    while counter(&rig.device, "rx_frames") < 10 {
        assert!(Instant::now() < deadline);
        if backend_readable(&rig.device) {
            let _ = rig.device.on_backend().unwrap();
        }
        std::thread::yield_now();
    }
    let [one, two] = [0, 1].map(|pair| rig.received(pair).len());
    assert!(one > 2 && two > 2, "{one} and {two}");
}
