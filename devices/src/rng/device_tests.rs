use super::*;
use crate::testing::{CountingInterrupt, DriverQueue, memory, start, stop};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use vm_memory::{Bytes, GuestAddress};

const BUF: u64 = 0x40000;

struct Rig {
    mem: GuestRam,
    driver: DriverQueue,
    device: RngDevice,
    irq: Arc<CountingInterrupt>,
}

fn rig() -> Rig {
    let mem = memory(1 << 20);
    let driver = DriverQueue::new(&mem, 0x10000, 64);
    let irq = Arc::new(CountingInterrupt::default());
    let mut device = RngDevice::new();
    start(&mut device, &[&driver], &irq, 0);
    Rig {
        mem,
        driver,
        device,
        irq,
    }
}

impl Rig {
    fn bytes(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mem.read_slice(&mut bytes, GuestAddress(addr)).unwrap();
        bytes
    }
}

#[test]
fn buffers_are_filled_to_their_end_and_not_beyond() {
    let mut rig = rig();
    rig.driver.add(&[], &[(BUF, 5000), (BUF + 0x4000, 3000)]);
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
    assert_eq!(rig.driver.take_used().unwrap().len, 8000);
    assert_eq!(rig.irq.queue.load(SeqCst), 1);
    // 16 zeroes by chance have a probability of 2^-128.
    for at in [BUF, BUF + 4984, BUF + 0x4000, BUF + 0x4000 + 2984] {
        assert_ne!(rig.bytes(at, 16), [0; 16]);
    }
    let counter = |name| crate::testing::counter(&rig.device, name);
    assert_eq!((counter("requests"), counter("random_bytes")), (1, 8000));
    assert_eq!(rig.bytes(BUF + 5000, 16), [0; 16]);
    assert_eq!(rig.bytes(BUF + 0x4000 + 3000, 16), [0; 16]);
}

#[test]
fn two_requests_get_different_bytes() {
    let mut rig = rig();
    rig.driver.add(&[], &[(BUF, 32)]);
    rig.driver.add(&[], &[(BUF + 32, 32)]);
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
    assert_ne!(rig.bytes(BUF, 32), rig.bytes(BUF + 32, 32));
}

#[test]
fn overlapping_buffers_of_gigabytes_cost_no_more_than_one_request() {
    let mut rig = rig();
    // 60 times everything beyond the rings.
    rig.driver.add(&[], &[(BUF, 0xC_0000); 60]);
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
    assert_eq!(rig.driver.take_used().unwrap().len as usize, MAX_REQUEST);
}

#[test]
fn a_greedy_driver_leaves_the_event_loop_its_turn() {
    let mut rig = rig();
    for _ in 0..10 {
        rig.driver.add(&[], &[(BUF, 0x20000)]);
    }
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::More);
    let mut calls = 1;
    while rig.device.on_queue(0).unwrap() == Progress::More {
        calls += 1;
    }
    assert_eq!(calls, 2);
    assert_eq!(std::iter::from_fn(|| rig.driver.take_used()).count(), 10);
}

#[test]
fn empty_and_readable_buffers_are_given_back_empty() {
    let mut rig = rig();
    rig.driver.add(&[(BUF, 100)], &[]);
    rig.driver.add(&[], &[(BUF, 0)]);
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
    assert_eq!(rig.driver.take_used().unwrap().len, 0);
    assert_eq!(rig.driver.take_used().unwrap().len, 0);
}

#[test]
fn unmapped_buffers_are_a_fault_once() {
    let mut rig = rig();
    rig.driver.add(&[], &[(1 << 40, 64)]);
    assert!(matches!(rig.device.on_queue(0), Err(Fault::Guest(_))));
    assert_eq!(stop(&mut rig.device).len(), 1);
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
}

proptest! {
    #[test]
    fn what_is_reported_is_what_was_asked_up_to_the_limit(
        lens in proptest::collection::vec(0u32..20_000, 1..20),
    ) {
        let mut rig = rig();
        let buffers: Vec<_> = lens.iter().map(|len| (BUF, *len)).collect();
        rig.driver.add(&[], &buffers);
        prop_assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
        let asked: usize = lens.iter().map(|len| *len as usize).sum();
        let used = rig.driver.take_used().unwrap();
        prop_assert_eq!(used.len as usize, asked.min(MAX_REQUEST));
    }
}
