use super::*;
use crate::testing::{
    CountingInterrupt, DriverQueue, F_INDIRECT, F_NEXT, F_WRITE, memory, memory_in_pieces,
    queue_resources,
};
use proptest::prelude::*;
use std::sync::atomic::Ordering::SeqCst;

const BASE: u64 = 0x10000;
const BUF: u64 = 0x40000;

fn setup() -> (GuestRam, DriverQueue, Queue, Arc<CountingInterrupt>) {
    let mem = memory(1 << 20);
    let driver = DriverQueue::new(&mem, BASE, 16);
    let irq = Arc::new(CountingInterrupt::default());
    let queue = driver.device_queue(0, irq.clone());
    (mem, driver, queue, irq)
}

#[test]
fn a_chain_comes_out_once_and_goes_back_once() {
    let (_, mut driver, mut queue, irq) = setup();
    let head = driver.add(&[(BUF, 10), (BUF + 100, 20)], &[(BUF + 200, 30)]);
    let chain = queue.next().unwrap().unwrap();
    assert_eq!(
        (chain.head(), chain.readable_len(), chain.writable_len()),
        (head, 30, 30)
    );
    assert!(queue.next().unwrap().is_none());
    queue.complete(chain, 7).unwrap();
    assert_eq!(
        irq.queue.load(SeqCst),
        0,
        "completion alone does not interrupt"
    );
    queue.notify().unwrap();
    queue.notify().unwrap();
    assert_eq!(irq.queue.load(SeqCst), 1);
    let used = driver.take_used().unwrap();
    assert_eq!((used.id, used.len), (u32::from(head), 7));
    assert!(driver.take_used().is_none());
}

#[test]
fn a_buffer_across_regions_of_memory_is_a_segment_in_each() {
    let mem = memory_in_pieces(&[0x10_0000, 0x1000, 0x10_0000]);
    let mut driver = DriverQueue::new(&mem, BASE, 16);
    let mut queue = driver.device_queue(0, Arc::new(CountingInterrupt::default()));
    let (border, other) = (0x10_0000, 0x10_1000);
    driver.add(
        &[(BUF, 4), (border - 4, 8)],
        &[(border - 10, 0x1000 + 20), (other, 6)],
    );
    mem.write_slice(b"abcdefgh", GuestAddress(border - 4))
        .unwrap();
    let chain = queue.next().unwrap().unwrap();
    assert_eq!((chain.readable_len(), chain.writable_len()), (12, 4122));
    assert_eq!((chain.descriptors(), chain.segments.len()), (4, 7));
    let mut slices = Vec::new();
    chain.readable_slices(&mem, 4, 8, &mut slices).unwrap();
    let mut read = [0; 8];
    slices[0].copy_to(&mut read[..4]);
    slices[1].copy_to(&mut read[4..]);
    assert_eq!((&read, slices.len()), (b"abcdefgh", 2));
    chain.writable_slices(&mem, 0, 4122, &mut slices).unwrap();
    let lens: Vec<_> = slices.iter().map(|slice| slice.len()).collect();
    assert_eq!(lens, [10, 4096, 10, 6]);
    queue.complete(chain, 0).unwrap();
    // The same with more pieces than one system call of the host takes.
    let tiny = memory_in_pieces(&[&[0x10_0000][..], &[8; MAX_SEGMENTS]].concat());
    let mut driver = DriverQueue::new(&tiny, BASE, 16);
    let mut queue = driver.device_queue(0, Arc::new(CountingInterrupt::default()));
    driver.add(&[], &[(0x10_0000, 8 * 1024)]);
    assert_eq!(queue.next().unwrap().unwrap().segments.len(), MAX_SEGMENTS);
    driver.add(&[], &[(0x10_0000 - 1, 8 * 1024)]);
    let fault = queue.next().unwrap_err();
    assert!(matches!(fault, QueueFault::ChainTooLong { .. }), "{fault}");
}

#[test]
fn an_undone_chain_comes_out_again() {
    let (_, mut driver, mut queue, _) = setup();
    let head = driver.add(&[(BUF, 10)], &[]);
    let chain = queue.next().unwrap().unwrap();
    queue.undo_pop(chain);
    assert_eq!(queue.next().unwrap().unwrap().head(), head);
}

#[test]
fn chains_completed_together_are_seen_together() {
    let (mem, mut driver, mut queue, _) = setup();
    for _ in 0..3 {
        driver.add(&[], &[(BUF, 10)]);
    }
    let chains: Vec<_> = std::iter::from_fn(|| queue.next().unwrap()).collect();
    let used_index = || mem.read_obj::<u16>(GuestAddress(BASE + 0xa002)).unwrap();
    let mut before = Vec::new();
    let used = chains
        .into_iter()
        .zip(1u32..)
        .inspect(|_| before.push(used_index()));
    queue.complete_all(used).unwrap();
    assert_eq!(before, [0, 0, 0]);
    assert_eq!(used_index(), 3);
    let lens: Vec<_> = std::iter::from_fn(|| driver.take_used())
        .map(|u| u.len)
        .collect();
    assert_eq!(lens, [1, 2, 3]);
}

#[test]
fn a_driver_that_waits_for_an_index_is_interrupted_when_it_is_passed_and_only_then() {
    let mem = memory(1 << 20);
    let mut driver = DriverQueue::new(&mem, BASE, 16);
    let irq = Arc::new(CountingInterrupt::default());
    let mut resources = queue_resources(&mem, irq.clone());
    resources.event_idx = true;
    let mut queue = Queue::new(0, 16, &driver.config(), resources).unwrap();
    // `used_event`, after 16 heads.
    let event = GuestAddress(BASE + 0x8000 + 4 + 32);
    let mut complete = |count: usize| {
        for _ in 0..count {
            driver.add(&[], &[(BUF, 10)]);
        }
        let chains: Vec<_> = std::iter::from_fn(|| queue.next().unwrap()).collect();
        queue
            .complete_all(chains.into_iter().map(|c| (c, 0)))
            .unwrap();
        queue.notify().unwrap();
        while driver.take_used().is_some() {}
        irq.queue.load(SeqCst)
    };
    mem.write_obj(0u16, event).unwrap();
    assert_eq!(complete(1), 1);
    // Now 1 is used; it waits for the fifth.
    mem.write_obj(4u16, event).unwrap();
    assert_eq!(complete(3), 1);
    assert_eq!(complete(3), 2);
    assert_eq!(complete(9), 2);
    // 16 are used: the event is behind by a whole ring.
    mem.write_obj(20u16, event).unwrap();
    assert_eq!(complete(8), 3);
}

#[test]
fn a_cycle_is_a_fault() {
    let (_, mut driver, mut queue, _) = setup();
    driver.descriptor(0, BUF, 1, F_NEXT, 1);
    driver.descriptor(1, BUF, 1, F_NEXT, 0);
    driver.make_available(0);
    assert!(matches!(
        queue.next(),
        Err(QueueFault::ChainBroken { head: 0 })
    ));
}

#[test]
fn a_link_out_of_the_table_is_a_fault() {
    let (_, mut driver, mut queue, _) = setup();
    driver.descriptor(0, BUF, 1, F_NEXT, 16);
    driver.make_available(0);
    assert!(matches!(
        queue.next(),
        Err(QueueFault::ChainBroken { head: 0 })
    ));
}

#[test]
fn a_head_out_of_the_table_is_a_fault() {
    let (_, mut driver, mut queue, _) = setup();
    driver.make_available(16);
    assert!(matches!(
        queue.next(),
        Err(QueueFault::HeadOutOfRange { head: 16, size: 16 })
    ));
    let (_, mut driver, mut queue, _) = setup();
    driver.make_available(u16::MAX);
    assert!(matches!(
        queue.next(),
        Err(QueueFault::HeadOutOfRange { .. })
    ));
}

#[test]
fn an_available_index_that_jumps_is_a_fault() {
    let (_, mut driver, mut queue, _) = setup();
    driver.set_avail_idx(17);
    assert!(matches!(queue.next(), Err(QueueFault::AvailIndex(_))));
}

#[test]
fn a_head_that_is_in_use_is_a_fault() {
    let (_, mut driver, mut queue, _) = setup();
    let head = driver.add(&[(BUF, 1)], &[]);
    driver.make_available(head);
    let _first = queue.next().unwrap().unwrap();
    assert!(matches!(queue.next(), Err(QueueFault::HeadInUse { .. })));
}

#[test]
fn segments_outside_memory_are_a_fault() {
    for (addr, len) in [
        (1 << 20, 1),
        ((1 << 20) - 1, 2),
        (u64::MAX, 2),
        (0, 1 << 21),
    ] {
        let (_, mut driver, mut queue, _) = setup();
        driver.add(&[(addr, len)], &[]);
        assert!(
            matches!(queue.next(), Err(QueueFault::SegmentMemory { .. })),
            "{addr:#x}+{len}"
        );
    }
}

#[test]
fn a_readable_segment_after_a_writable_one_is_a_fault() {
    let (_, mut driver, mut queue, _) = setup();
    driver.descriptor(0, BUF, 1, F_NEXT | F_WRITE, 1);
    driver.descriptor(1, BUF, 1, 0, 0);
    driver.make_available(0);
    assert!(matches!(queue.next(), Err(QueueFault::SegmentOrder { .. })));
}

#[test]
fn empty_segments_are_passed_over() {
    let (_, mut driver, mut queue, _) = setup();
    driver.add(&[(u64::MAX, 0), (BUF, 3)], &[(BUF, 0), (BUF, 4)]);
    let chain = queue.next().unwrap().unwrap();
    assert_eq!((chain.readable_len(), chain.writable_len()), (3, 4));
}

#[test]
fn an_indirect_table_is_walked_and_a_nested_one_is_a_fault() {
    let (mem, mut driver, mut queue, _) = setup();
    let table = 0x60000u64;
    let entry = |i: u64, addr: u64, len: u32, flags: u16, next: u16| {
        mem.write_obj(addr, GuestAddress(table + i * 16)).unwrap();
        mem.write_obj(len, GuestAddress(table + i * 16 + 8))
            .unwrap();
        mem.write_obj(flags, GuestAddress(table + i * 16 + 12))
            .unwrap();
        mem.write_obj(next, GuestAddress(table + i * 16 + 14))
            .unwrap();
    };
    entry(0, BUF, 5, F_NEXT, 1);
    entry(1, BUF, 6, F_WRITE, 0);
    driver.descriptor(0, table, 32, F_INDIRECT, 0);
    driver.make_available(0);
    let chain = queue.next().unwrap().unwrap();
    assert_eq!((chain.readable_len(), chain.writable_len()), (5, 6));
    queue.complete(chain, 0).unwrap();

    entry(1, table, 32, F_INDIRECT, 0);
    driver.make_available(0);
    assert!(matches!(queue.next(), Err(QueueFault::ChainBroken { .. })));
}

#[test]
fn a_table_that_was_not_negotiated_is_a_fault() {
    let (mem, mut driver, _, irq) = setup();
    let table = 0x60000;
    for (indirect_desc, is_served) in [(true, true), (false, false)] {
        let resources = QueueResources {
            indirect_desc,
            ..queue_resources(&mem, irq.clone())
        };
        let mut queue = Queue::new(0, 16, &driver.config(), resources).unwrap();
        let chain = DriverQueue::new(&mem, table, 2);
        chain.descriptor(0, BUF, 8, 0, 0);
        driver.descriptor(0, table, 16, F_INDIRECT, 0);
        if is_served {
            driver.make_available(0);
        }
        assert_eq!(queue.next().is_ok_and(|chain| chain.is_some()), is_served);
    }
}

#[test]
fn an_indirect_table_of_odd_length_is_a_fault() {
    let (_, mut driver, mut queue, _) = setup();
    driver.descriptor(0, 0x60000, 33, F_INDIRECT, 0);
    driver.make_available(0);
    assert!(matches!(queue.next(), Err(QueueFault::ChainBroken { .. })));
}

#[test]
fn a_driver_that_wants_no_interrupts_gets_none() {
    let (mem, mut driver, mut queue, irq) = setup();
    mem.write_obj(1u16, GuestAddress(BASE + 0x8000)).unwrap();
    driver.add(&[(BUF, 1)], &[]);
    let chain = queue.next().unwrap().unwrap();
    queue.complete(chain, 0).unwrap();
    queue.notify().unwrap();
    assert_eq!(irq.queue.load(SeqCst), 0);
}

#[test]
fn each_part_of_a_queue_may_lie_at_address_0() {
    let mem = memory(1 << 20);
    for part in 0..3 {
        let mut config = DriverQueue::new(&mem, BASE, 16).config();
        match part {
            0 => config.desc_table = 0,
            1 => config.used_ring = 0,
            _ => config.avail_ring = 0,
        }
        // One chain of one byte, in any position.
        let descriptor = [BUF, 1 | u64::from(F_WRITE) << 32];
        let table = config.desc_table;
        mem.write_obj(descriptor, GuestAddress(table)).unwrap();
        let avail = [0u16, 1, 0];
        mem.write_obj(avail, GuestAddress(config.avail_ring))
            .unwrap();
        let resources = queue_resources(&mem, Arc::new(CountingInterrupt::default()));
        let mut queue = Queue::new(0, 16, &config, resources).unwrap();
        let chain = queue.next().unwrap().unwrap();
        assert_eq!(chain.writable_len(), 1);
        queue.complete(chain, 1).unwrap();
        let used: u16 = mem.read_obj(GuestAddress(config.used_ring + 2)).unwrap();
        assert_eq!(used, 1);
    }
}

#[test]
fn bad_configurations_are_refused() {
    let mem = memory(1 << 20);
    let driver = DriverQueue::new(&mem, BASE, 16);
    let irq: Arc<dyn Interrupt> = Arc::new(CountingInterrupt::default());
    let good = driver.config();
    let try_new = |c: QueueConfig| Queue::new(0, 16, &c, queue_resources(&mem, irq.clone()));
    assert!(try_new(good).is_ok());
    for size in [0, 3, 32, 0x10010] {
        assert!(matches!(
            try_new(QueueConfig { size, ..good }),
            Err(QueueConfigError::Size { .. })
        ));
    }
    let bad = [
        QueueConfig {
            desc_table: BASE + 8,
            ..good
        },
        QueueConfig {
            avail_ring: BASE + 1,
            ..good
        },
        QueueConfig {
            used_ring: BASE + 2,
            ..good
        },
    ];
    for config in bad {
        assert!(matches!(
            try_new(config),
            Err(QueueConfigError::Alignment { .. })
        ));
    }
    let bad = [
        QueueConfig {
            avail_ring: (1 << 20) - 16,
            ..good
        },
        QueueConfig {
            desc_table: (1 << 20) - 16,
            ..good
        },
        QueueConfig {
            used_ring: !0xfu64,
            ..good
        },
    ];
    for config in bad {
        assert!(matches!(
            try_new(config),
            Err(QueueConfigError::Memory { .. })
        ));
    }
}

proptest! {
    /// Whatever is in the rings, a queue ends with a fault or with chains inside memory.
    #[test]
    fn arbitrary_rings_are_bounded(raw in proptest::collection::vec(any::<u8>(), 512), idx: u16) {
        let (mem, mut driver, mut queue, _) = setup();
        mem.write_slice(&raw[..256], GuestAddress(BASE)).unwrap();
        mem.write_slice(&raw[256..], GuestAddress(BASE + 0x8000)).unwrap();
        driver.set_avail_idx(idx % 20);
        for _ in 0..20 {
            match queue.next() {
                Ok(Some(chain)) => {
                    prop_assert!(chain.segments.len() <= MAX_SEGMENTS);
                    for s in &chain.segments {
                        prop_assert!(mem.check_range(s.addr, s.len as usize));
                    }
                    queue.complete(chain, 0).unwrap();
                }
                Ok(None) | Err(_) => break,
            }
        }
        queue.notify().unwrap();
    }
}

#[test]
fn empty_descriptors_count_like_others() {
    let mem = memory(8 << 20);
    let mut driver = DriverQueue::new(&mem, BASE, 16);
    let mut queue = driver.device_queue(0, Arc::new(CountingInterrupt::default()));
    let table = 0x10_0000;
    let indirect = |n: u16, len: u32| {
        let mut raw = [0; 16];
        raw[8..12].copy_from_slice(&len.to_le_bytes());
        raw[12..14].copy_from_slice(&F_NEXT.to_le_bytes());
        raw[14..].copy_from_slice(&(n + 1).to_le_bytes());
        mem.write_slice(&raw, GuestAddress(table + 16 * u64::from(n)))
            .unwrap();
    };
    for n in 0..u16::MAX {
        indirect(n, 0);
    }
    driver.descriptor(0, table, 16 * u32::from(u16::MAX), F_INDIRECT, 0);
    driver.make_available(0);
    assert!(matches!(
        queue.next(),
        Err(QueueFault::ChainTooLong { head: 0 })
    ));
}

#[test]
fn a_turn_ends_when_its_budget_is_used_up_by_descriptors_alone() {
    let (_, mut driver, mut queue, irq) = setup();
    for _ in 0..8 {
        driver.add(&[(BUF, 0)], &[(BUF, 0)]);
    }
    let mut served = 0;
    let mut serve = |queue: &mut Queue| {
        queue.serve(600, |queue, chain| {
            served += 1;
            queue.complete(chain, 0)?;
            Ok(0)
        })
    };
    // Two descriptors of 64 each: five chains.
    assert_eq!(serve(&mut queue).unwrap(), Progress::More);
    assert_eq!(irq.queue.load(SeqCst), 1, "told at the end of a turn");
    assert_eq!(serve(&mut queue).unwrap(), Progress::Idle);
    assert_eq!((served, irq.queue.load(SeqCst)), (8, 2));
}

#[test]
fn a_queue_goes_on_from_its_saved_state() {
    let (mem, mut driver, mut queue, irq) = setup();
    driver.add(&[(BUF, 10)], &[]);
    let chain = queue.next().unwrap().unwrap();
    queue.complete(chain, 0).unwrap();
    let state = queue.state();
    assert_eq!((state.next_avail, state.next_used), (1, 1));
    let config = queue.config();
    assert_eq!(config, driver.config());
    drop(queue);
    let head = driver.add(&[(BUF, 20)], &[]);
    let resources = QueueResources {
        state,
        ..queue_resources(&mem, irq)
    };
    let mut queue = Queue::new(0, 16, &config, resources).unwrap();
    let chain = queue.next().unwrap().unwrap();
    assert_eq!((chain.head(), chain.readable_len()), (head, 20));
    assert!(queue.next().unwrap().is_none());
    queue.complete(chain, 0).unwrap();
    driver.take_used().unwrap();
    assert_eq!(driver.take_used().unwrap().id, u32::from(head));
}

#[test]
fn a_driver_is_asked_to_notify_of_what_comes_behind_chains_that_were_not_taken() {
    let mem = memory(1 << 20);
    let mut driver = DriverQueue::new(&mem, 0x10000, 16);
    let mut resources = queue_resources(&mem, Arc::new(CountingInterrupt::default()));
    resources.event_idx = true;
    let mut queue = Queue::new(0, 16, &driver.config(), resources).unwrap();
    for _ in 0..3 {
        driver.add(&[], &[(0x8000, 8)]);
    }
    assert_eq!(queue.enable_kicks_for_more().unwrap(), 3);
    let avail_event = GuestAddress(driver.config().used_ring + 4 + 8 * 16);
    assert_eq!(mem.read_obj::<u16>(avail_event).unwrap(), 3);
    driver.add(&[], &[(0x8000, 8)]);
    assert_eq!(queue.available().unwrap(), 4);
}
