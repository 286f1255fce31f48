use super::*;
use crate::testing::{CountingInterrupt, DriverQueue, counter, memory, start, stop};
use proptest::prelude::*;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::TryRecvError;
use vm_memory::Bytes;

const BUF: u64 = 0x4_0000;
const MIB: u64 = 1 << 20;
/// 16 blocks, after 16 MiB of other memory.
const REGION: MemRegion = MemRegion {
    start: 16 * MIB,
    len: 32 * MIB,
};

struct Rig {
    mem: GuestRam,
    driver: DriverQueue,
    device: MemDevice,
    irq: Arc<CountingInterrupt>,
}

fn rig() -> Rig {
    rig_of(48 << 20, REGION)
}

/// A guest of `len` bytes of memory with a device for this region.
fn rig_of(len: usize, region: MemRegion) -> Rig {
    let mem = memory(len);
    let driver = DriverQueue::new(&mem, 0x1_0000, 64);
    let irq = Arc::new(CountingInterrupt::default());
    let mut device = MemDevice::new(region).unwrap();
    start(&mut device, &[&driver], &irq, 0);
    Rig {
        mem,
        driver,
        device,
        irq,
    }
}

fn block(number: u64) -> u64 {
    REGION.start + number * BLOCK_SIZE
}

impl Rig {
    /// Sends a request; returns the type and state of the answer.
    fn ask(&mut self, kind: u16, address: u64, count: u16) -> (u16, u16) {
        let mut request = [0; 24];
        request[..2].copy_from_slice(&kind.to_le_bytes());
        request[8..16].copy_from_slice(&address.to_le_bytes());
        request[16..18].copy_from_slice(&count.to_le_bytes());
        self.mem.write_slice(&request, GuestAddress(BUF)).unwrap();
        let answer = GuestAddress(BUF + 0x1000);
        self.mem.write_slice(&[0xee; 12], answer).unwrap();
        self.driver.add(&[(BUF, 24)], &[(BUF + 0x1000, 10)]);
        while self.device.on_queue(0).unwrap() == Progress::More {}
        assert_eq!(self.driver.take_used().unwrap().len, 10);
        let mut bytes = [0; 12];
        self.mem.read_slice(&mut bytes, answer).unwrap();
        assert_eq!(bytes[2..8], [0; 6]);
        assert_eq!(bytes[10..], [0xee; 2]);
        let number = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        (number(0), number(8))
    }

    fn word(&self, offset: usize) -> u64 {
        let mut bytes = [0; 8];
        self.device.config.read(offset as u64, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    fn touch(&self, number: u64) {
        self.mem
            .write_obj(7u8, GuestAddress(block(number)))
            .unwrap();
    }

    fn byte(&self, number: u64) -> u8 {
        self.mem.read_obj(GuestAddress(block(number))).unwrap()
    }
}

#[test]
fn blocks_are_plugged_as_far_as_the_owner_asked() {
    let mut rig = rig();
    assert_eq!(
        rig.ask(PLUG, block(0), 1),
        (NACK, 0),
        "nothing was asked for"
    );
    rig.device.request(5 * MIB);
    assert_eq!(
        (rig.device.requested(), rig.word(REQUESTED)),
        (6 * MIB, 6 * MIB)
    );
    assert!(rig.device.config.take_changed());
    assert_eq!(rig.ask(PLUG, block(1), 2), (ACK, 0));
    assert_eq!(rig.ask(PLUG, block(4), 2), (NACK, 0), "one too many");
    assert_eq!(rig.ask(PLUG, block(4), 1), (ACK, 0));
    assert_eq!(rig.ask(PLUG, block(5), 1), (NACK, 0));
    assert_eq!(
        (rig.device.plugged(), rig.word(PLUGGED)),
        (6 * MIB, 6 * MIB)
    );
    assert!(
        !rig.device.config.take_changed(),
        "the driver did it itself"
    );
    assert_eq!(rig.irq.queue.load(SeqCst), 5);
    assert_eq!(counter(&rig.device, "plugged_bytes"), 6 * MIB);
    assert_eq!(counter(&rig.device, "refused_requests"), 3);
}

#[test]
fn unplugged_blocks_give_their_memory_back_and_others_do_not() {
    let mut rig = rig();
    rig.device.request(8 * MIB);
    assert_eq!(rig.ask(PLUG, block(2), 4), (ACK, 0));
    (1..7).for_each(|number| rig.touch(number));
    assert_eq!(rig.ask(UNPLUG, block(3), 2), (ACK, 0));
    let bytes: Vec<u8> = (1..7).map(|number| rig.byte(number)).collect();
    assert_eq!(bytes, [7, 7, 0, 0, 7, 7]);
    assert_eq!(rig.device.plugged(), 4 * MIB);
    assert_eq!(rig.ask(UNPLUG, block(2), 2), (ERROR, 0), "one is out");
    assert_eq!(rig.ask(UNPLUG_ALL, 0, 0), (ACK, 0));
    assert_eq!((rig.device.plugged(), rig.word(PLUGGED)), (0, 0));
    assert_eq!([rig.byte(2), rig.byte(5), rig.byte(6)], [0; 3]);
    assert_eq!(counter(&rig.device, "unplugged_bytes"), 8 * MIB);
    // The size that the owner requested stays.
    assert_eq!(rig.ask(PLUG, block(0), 4), (ACK, 0));
}

#[test]
fn who_waits_is_told_when_the_driver_is_there() {
    let mut rig = rig();
    rig.device.request_and_tell(0).try_recv().unwrap();
    let first = rig.device.request_and_tell(8 * MIB);
    assert_eq!(rig.ask(PLUG, block(0), 2), (ACK, 0));
    assert_eq!(first.try_recv(), Err(TryRecvError::Empty));
    let second = rig.device.request_and_tell(6 * MIB);
    assert_eq!(first.try_recv(), Err(TryRecvError::Disconnected));
    assert_eq!(rig.ask(PLUG, block(2), 1), (ACK, 0));
    second.try_recv().unwrap();
    let less = rig.device.request_and_tell(2 * MIB);
    assert_eq!(rig.ask(UNPLUG, block(2), 1), (ACK, 0));
    assert_eq!(less.try_recv(), Err(TryRecvError::Empty));
    assert_eq!(rig.ask(UNPLUG, block(0), 1), (ACK, 0));
    less.try_recv().unwrap();
    assert_eq!(rig.device.plugged_end(), 2 * BLOCK_SIZE);
}

#[test]
fn a_block_is_plugged_once() {
    let mut rig = rig();
    rig.device.request(REGION.len);
    assert_eq!(rig.ask(PLUG, block(3), 1), (ACK, 0));
    assert_eq!(rig.ask(PLUG, block(2), 3), (ERROR, 0));
    assert_eq!(rig.device.plugged(), BLOCK_SIZE);
}

#[test]
fn the_state_of_blocks_is_told() {
    let mut rig = rig();
    rig.device.request(REGION.len);
    assert_eq!(rig.ask(PLUG, block(2), 2), (ACK, 0));
    assert_eq!(rig.ask(STATE, block(2), 2), (ACK, STATE_PLUGGED));
    assert_eq!(rig.ask(STATE, block(4), 12), (ACK, STATE_UNPLUGGED));
    assert_eq!(rig.ask(STATE, block(1), 2), (ACK, STATE_MIXED));
    assert_eq!(rig.ask(STATE, block(0), 16), (ACK, STATE_MIXED));
}

#[test]
fn requests_beyond_the_region_are_refused() {
    let mut rig = rig();
    rig.device.request(u64::MAX);
    assert_eq!(rig.device.requested(), REGION.len);
    for kind in [PLUG, UNPLUG, STATE] {
        for (address, count) in [
            (block(0), 0),
            (block(0), 17),
            (block(16), 1),
            (block(15), 2),
            (block(0) - BLOCK_SIZE, 1),
            (block(0) + 4096, 1),
            (0, 1),
            (u64::MAX - BLOCK_SIZE + 1, 1),
            (!(BLOCK_SIZE - 1), u16::MAX),
        ] {
            assert_eq!(
                rig.ask(kind, address, count),
                (ERROR, 0),
                "{address:#x} {count}"
            );
        }
    }
    assert_eq!(rig.ask(4, block(0), 1), (ERROR, 0), "no such request");
    assert_eq!(rig.ask(u16::MAX, block(0), 1), (ERROR, 0));
    assert_eq!(rig.device.plugged(), 0);
    assert_eq!(rig.ask(PLUG, block(0), 16), (ACK, 0));
}

#[test]
fn requests_that_are_cut_off_are_refused_and_answers_are_cut_to_fit() {
    let mut rig = rig();
    rig.device.request(REGION.len);
    rig.mem.write_slice(&[0; 24], GuestAddress(BUF)).unwrap();
    rig.driver.add(&[(BUF, 3)], &[(BUF + 0x1000, 10)]);
    rig.driver.add(&[], &[(BUF + 0x2000, 4)]);
    rig.driver.add(&[(BUF, 24)], &[]);
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
    let used: Vec<_> = std::iter::from_fn(|| rig.driver.take_used()).collect();
    let lens: Vec<_> = used.iter().map(|used| used.len).collect();
    assert_eq!(lens, [10, 4, 0]);
    let kind = |at: u64| rig.mem.read_obj::<u16>(GuestAddress(at)).unwrap();
    assert_eq!([kind(BUF + 0x1000), kind(BUF + 0x2000)], [ERROR; 2]);
}

#[test]
fn many_blocks_at_once_let_the_event_loop_have_its_turn() {
    let mut rig = rig();
    for _ in 0..2 {
        rig.mem
            .write_slice(&[2, 0, 0, 0], GuestAddress(BUF))
            .unwrap();
        rig.driver.add(&[(BUF, 24)], &[(BUF + 0x1000, 10)]);
    }
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::More);
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::More);
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
}

#[test]
fn a_driver_that_refills_the_ring_leaves_the_event_loop_its_turn() {
    let mut rig = rig();
    rig.driver.indirect_empties(BUF, 128);
    (0..64).for_each(|head| rig.driver.make_available(head));
    for _ in 0..10 {
        assert_eq!(rig.device.on_queue(0).unwrap(), Progress::More);
        let used: Vec<_> = std::iter::from_fn(|| rig.driver.take_used()).collect();
        assert_eq!(used.len(), 32);
        for used in used {
            rig.driver.make_available(u16::try_from(used.id).unwrap());
        }
    }
}

/// 64 blocks, all plugged in and with content, and a request to unplug them all.
fn all_of_many() -> Rig {
    let region = MemRegion {
        len: 128 * MIB,
        ..REGION
    };
    let mut rig = rig_of(144 << 20, region);
    rig.device.request(region.len);
    assert_eq!(rig.ask(PLUG, block(0), 64), (ACK, 0));
    (0..64).for_each(|number| rig.touch(number));
    rig.mem
        .write_slice(&[2, 0, 0, 0], GuestAddress(BUF))
        .unwrap();
    rig.driver.add(&[(BUF, 24)], &[(BUF + 0x1000, 10)]);
    rig
}

impl Rig {
    /// The number of blocks with content.
    fn touched(&self) -> usize {
        (0..64).filter(|number| self.byte(*number) == 7).count()
    }
}

#[test]
fn a_request_for_many_blocks_is_carried_out_in_several_turns() {
    let mut rig = all_of_many();
    // Another request after it, for which the size that is plugged in is 0.
    rig.mem
        .write_slice(&[2, 0, 0, 0], GuestAddress(BUF))
        .unwrap();
    rig.driver.add(&[(BUF, 24)], &[(BUF + 0x1000, 10)]);
    for left in [48, 32, 16] {
        assert_eq!(rig.device.on_queue(0).unwrap(), Progress::More);
        assert_eq!((rig.touched(), rig.device.plugged()), (left, 128 * MIB));
        assert!(rig.driver.take_used().is_none(), "it is not answered yet");
    }
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::More);
    assert_eq!(rig.driver.take_used().unwrap().len, 10);
    assert!(rig.driver.take_used().is_none(), "the next one waits");
    assert_eq!((rig.touched(), rig.word(PLUGGED)), (0, 0));
    assert_eq!(counter(&rig.device, "unplugged_bytes"), 128 * MIB);
    while rig.device.on_queue(0).unwrap() == Progress::More {}
    assert!(rig.driver.take_used().is_some());
}

#[test]
fn a_request_that_is_stopped_in_the_middle_is_carried_out_by_whoever_goes_on() {
    for is_restored in [false, true] {
        let mut rig = all_of_many();
        assert_eq!(rig.device.on_queue(0).unwrap(), Progress::More);
        let queue = stop(&mut rig.device).pop().unwrap();
        assert_eq!(queue.state().next_avail, 1, "the request is in the ring");
        if is_restored {
            let saved = rig.device.save();
            rig.device = MemDevice::new(MemRegion {
                len: 128 * MIB,
                ..REGION
            })
            .unwrap();
            rig.device.restore(&saved).unwrap();
        }
        assert_eq!(rig.device.plugged(), 128 * MIB);
        rig.device.start_queue(queue).unwrap();
        for _ in 0..3 {
            assert_eq!(rig.device.on_queue(0).unwrap(), Progress::More);
            assert!(rig.driver.take_used().is_none());
        }
        while rig.device.on_queue(0).unwrap() == Progress::More {}
        assert_eq!(rig.driver.take_used().unwrap().len, 10);
        assert_eq!((rig.touched(), rig.device.plugged()), (0, 0));
    }
}

#[test]
fn a_reset_leaves_blocks_as_they_are() {
    let mut rig = rig();
    rig.device.request(4 * MIB);
    assert_eq!(rig.ask(PLUG, block(0), 2), (ACK, 0));
    rig.touch(1);
    assert_eq!(stop(&mut rig.device).len(), 1);
    rig.device.reset();
    assert_eq!((rig.device.plugged(), rig.byte(1)), (4 * MIB, 7));
}

#[test]
fn a_saved_device_goes_on_and_a_damaged_one_does_not() {
    let mut rig = rig();
    rig.device.request(6 * MIB);
    assert_eq!(rig.ask(PLUG, block(1), 2), (ACK, 0));
    let saved = rig.device.save();
    let mut other = MemDevice::new(REGION).unwrap();
    other.restore(&saved).unwrap();
    assert_eq!(other.save(), saved);
    rig.device = other;
    assert_eq!((rig.word(PLUGGED), rig.word(REQUESTED)), (4 * MIB, 6 * MIB));

    let refused = |device: &mut MemDevice, change: &dyn Fn(&mut Vec<u8>)| {
        let mut damaged = saved.clone();
        change(&mut damaged.bytes);
        assert!(device.restore(&damaged).is_err(), "{:?}", damaged.bytes);
        assert_eq!(device.plugged(), 0);
    };
    let mut device = MemDevice::new(REGION).unwrap();
    refused(&mut device, &|bytes| bytes.clear());
    refused(&mut device, &|bytes| bytes.truncate(12));
    refused(&mut device, &|bytes| bytes.truncate(17));
    refused(&mut device, &|bytes| bytes.push(0));
    refused(&mut device, &|bytes| bytes[2] ^= 1);
    refused(&mut device, &|bytes| bytes[8] ^= 1);
    refused(&mut device, &|bytes| bytes[12] ^= 1);
    let mut odd = MemDevice::new(MemRegion {
        len: 30 * MIB,
        ..REGION
    })
    .unwrap();
    refused(&mut odd, &|bytes| bytes[17] = 0x80);
    assert!(device.restore(&SavedDevice::default()).is_err());
}

#[test]
fn regions_are_made_of_blocks() {
    for (start, len) in [
        (4096, BLOCK_SIZE),
        (0, 4096),
        (!(BLOCK_SIZE - 1), 2 * BLOCK_SIZE),
    ] {
        let error = MemDevice::new(MemRegion { start, len }).unwrap_err();
        assert!(error.to_string().contains("blocks of 2 MiB"), "{error}");
    }
    let mut device = MemDevice::new(MemRegion { start: 0, len: 0 }).unwrap();
    device.request(1);
    assert_eq!(device.requested(), 0);
}

#[test]
fn the_device_is_as_the_specification_says() {
    let rig = rig();
    assert_eq!(rig.device.region(), REGION);
    let info = rig.device.info();
    assert_eq!((info.device_type.number(), info.features), (24, 2));
    assert_eq!(
        (info.queue_sizes.as_slice(), info.config.len()),
        (&[64][..], 56)
    );
    let words = [0, 8, 16, 24, 32, 40, 48].map(|offset| rig.word(offset));
    assert_eq!(
        words,
        [BLOCK_SIZE, 0, REGION.start, REGION.len, REGION.len, 0, 0]
    );
}

#[test]
fn queues_that_run_or_do_not_exist_are_refused() {
    let mut rig = rig();
    let mut start = |index| {
        let queue = rig.driver.device_queue(index, rig.irq.clone());
        rig.device.start_queue(queue).unwrap_err()
    };
    assert!(matches!(start(0), StartError::Running { index: 0 }));
    assert!(matches!(start(1), StartError::NoSuchQueue { index: 1 }));
    assert!(rig.device.stop_queue(1).is_none());
}

#[test]
fn a_region_that_is_no_memory_can_be_unplugged() {
    let mut rig = rig_of(1 << 20, REGION);
    assert_eq!(rig.ask(UNPLUG_ALL, 0, 0), (ACK, 0));
}

proptest! {
    #[test]
    fn never_more_is_plugged_than_was_asked_for(
        steps in prop::collection::vec((0u16..5, 0u64..20, 0u16..20, 0u64..40), 0..40),
    ) {
        let mut rig = rig();
        for (kind, at, count, request) in steps {
            let before = rig.device.plugged();
            if kind == 4 {
                rig.device.request(request << 20);
            } else {
                rig.ask(kind, block(at), count);
            }
            let after = rig.device.plugged();
            prop_assert!(after <= before || after <= rig.device.requested());
            prop_assert_eq!(after, rig.word(PLUGGED));
            let state = rig.ask(STATE, block(0), 16).1;
            prop_assert_eq!(state == STATE_UNPLUGGED, after == 0);
            prop_assert_eq!(state == STATE_PLUGGED, after == REGION.len);
        }
    }
}
