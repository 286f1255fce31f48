use super::*;
use crate::testing::{CountingInterrupt, DriverQueue, counter, memory, start, stop, with_image};
use proptest::prelude::*;
use std::sync::Mutex;
use std::sync::atomic::Ordering::SeqCst;
use vm_memory::Bytes;

/// After the rings, which take 5 × 64 KiB from 64 KiB on.
const BUF: u64 = 0x8_0000;
/// Pages under test.
const PAGES: u64 = 0x10_0000;

struct Rig {
    mem: GuestRam,
    drivers: Vec<DriverQueue>,
    device: BalloonDevice,
    irq: Arc<CountingInterrupt>,
}

fn rig() -> Rig {
    rig_in(memory(4 << 20))
}

fn rig_in(mem: GuestRam) -> Rig {
    let drivers: Vec<_> = (1..=5)
        .map(|n| DriverQueue::new(&mem, n * 0x1_0000, 128))
        .collect();
    let irq = Arc::new(CountingInterrupt::default());
    let mut device = BalloonDevice::new();
    let all: Vec<_> = drivers.iter().collect();
    start(&mut device, &all, &irq, 0);
    Rig {
        mem,
        drivers,
        device,
        irq,
    }
}

impl Rig {
    fn fill(&self) {
        let bytes = vec![7; 3 << 20];
        self.mem.write_slice(&bytes, GuestAddress(PAGES)).unwrap();
    }

    fn byte(&self, at: u64) -> u8 {
        self.mem.read_obj(GuestAddress(at)).unwrap()
    }

    fn name_pages(&mut self, queue: u16, pages: &[u32]) -> Result<Progress, Fault> {
        let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        self.mem.write_slice(&bytes, GuestAddress(BUF)).unwrap();
        let len = u32::try_from(bytes.len()).unwrap();
        self.drivers[usize::from(queue)].add(&[(BUF, len)], &[]);
        self.device.on_queue(queue)
    }

    fn tell_stats(&mut self, entries: &[(u16, u64)]) {
        let bytes: Vec<u8> = entries
            .iter()
            .flat_map(|(tag, value)| [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat())
            .collect();
        self.mem.write_slice(&bytes, GuestAddress(BUF)).unwrap();
        let len = u32::try_from(bytes.len()).unwrap();
        self.drivers[2].add(&[(BUF, len)], &[]);
        assert_eq!(self.device.on_queue(STATS).unwrap(), Progress::Idle);
    }

    fn count(&self, name: &str) -> u64 {
        counter(&self.device, name)
    }

    fn config(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.device.config.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }
}

#[test]
fn pages_that_are_named_go_and_others_stay() {
    let mut rig = rig();
    rig.fill();
    // In any order, with a duplicate.
    let progress = rig.name_pages(INFLATE, &[0x104, 0x101, 0x102, 0x101]);
    assert_eq!(progress.unwrap(), Progress::Idle);
    assert_eq!(rig.drivers[0].take_used().unwrap().len, 0);
    assert_eq!(rig.irq.queue.load(SeqCst), 1);
    let pages = [0x100, 0x101, 0x102, 0x103, 0x104, 0x105];
    assert_eq!(pages.map(|page| rig.byte(page << 12)), [7, 0, 0, 7, 0, 7]);
    assert_eq!(rig.count("inflated_bytes"), 3 << 12);
    assert_eq!(rig.count("ignored_bytes"), 0);
}

#[test]
fn pages_that_come_back_are_the_guests_at_once() {
    let mut rig = rig();
    rig.fill();
    let _ = rig.name_pages(DEFLATE, &[0x101, 0x102]).unwrap();
    assert!(rig.drivers[1].take_used().is_some());
    assert_eq!(rig.byte(0x10_1000), 7);
    assert_eq!(rig.count("deflated_bytes"), 2 << 12);
    assert_eq!(rig.count("inflated_bytes"), 0);
}

#[test]
fn pages_that_are_not_there_are_left_out() {
    let mut rig = rig();
    rig.fill();
    let pages = [0x3ff, 0x400, 0x401, u32::MAX, u32::MAX - 1];
    let _ = rig.name_pages(INFLATE, &pages).unwrap();
    assert_eq!(rig.byte(0x3f_f000), 0);
    assert_eq!(rig.count("inflated_bytes"), 1 << 12);
    assert_eq!(rig.count("ignored_bytes"), 4 << 12);
}

#[test]
fn pages_of_an_image_are_left_out() {
    let image = 4 << 20;
    let mut rig = rig_in(with_image(&memory(4 << 20), image, 0x4000, None));
    rig.fill();
    // The last page before the image, two of the image, and one after it.
    let pages = [0x3ff, 0x400, 0x402, 0x404];
    assert_eq!(rig.name_pages(INFLATE, &pages).unwrap(), Progress::Idle);
    assert!(rig.drivers[0].take_used().is_some());
    assert_eq!(rig.byte(0x3f_f000), 0);
    assert_eq!(rig.count("inflated_bytes"), 1 << 12);
    assert_eq!(rig.count("ignored_bytes"), 3 << 12);
    // Their numbers may come from the image, which is all zeroes: the page at 0.
    rig.drivers[0].add(&[(image, 4)], &[]);
    assert_eq!(rig.device.on_queue(INFLATE).unwrap(), Progress::Idle);
    assert!(rig.drivers[0].take_used().is_some());
    assert_eq!(rig.count("inflated_bytes"), 2 << 12);
}

#[test]
fn a_driver_that_refills_a_ring_leaves_the_event_loop_its_turn() {
    for index in 0..5 {
        let mut rig = rig();
        let driver = &mut rig.drivers[usize::from(index)];
        driver.indirect_empties(PAGES, 64);
        (0..128).for_each(|head| driver.make_available(head));
        for turn in 0..10 {
            let progress = rig.device.on_queue(index).unwrap();
            assert_eq!(progress, Progress::More, "queue {index}, turn {turn}");
            let used: Vec<_> = std::iter::from_fn(|| driver.take_used()).collect();
            assert!((63..=64).contains(&used.len()), "{index}: {}", used.len());
            for used in used {
                driver.make_available(u16::try_from(used.id).unwrap());
            }
        }
    }
}

#[test]
fn a_chain_of_too_many_pages_is_a_fault_and_the_longest_is_not() {
    let mut rig = rig();
    let len = |pages: usize| u32::try_from(pages * 4).unwrap();
    rig.drivers[0].add(&[(BUF, len(MAX_PAGES))], &[]);
    assert_eq!(rig.device.on_queue(INFLATE).unwrap(), Progress::More);
    assert!(rig.drivers[0].take_used().is_some());
    rig.drivers[0].add(&[(BUF, len(MAX_PAGES + 1))], &[]);
    let fault = rig.device.on_queue(INFLATE).unwrap_err();
    assert!(matches!(fault, Fault::Guest(_)), "{fault:?}");
}

#[test]
fn reported_memory_goes_whichever_number_its_queue_has() {
    for queue in [3, 4] {
        let mut rig = rig();
        rig.fill();
        rig.drivers[usize::from(queue)].add(&[], &[(PAGES, 0x4000), (PAGES + 0x8000, 0x1000)]);
        assert_eq!(rig.device.on_queue(queue).unwrap(), Progress::Idle);
        let used = rig.drivers[usize::from(queue)].take_used().unwrap();
        assert_eq!(used.len, 0);
        let offsets = [0, 0x3fff, 0x4000, 0x7fff, 0x8000, 0x9000];
        let bytes = offsets.map(|offset| rig.byte(PAGES + offset));
        assert_eq!(bytes, [0, 0, 7, 7, 0, 7]);
        assert_eq!(rig.count("reported_bytes"), 0x5000);
    }
}

#[test]
fn a_long_report_is_released_in_several_turns_and_anew_after_a_stop() {
    const MIB: u64 = 1 << 20;
    for queue in [3, 4] {
        let mut rig = rig();
        let driver = usize::from(queue);
        rig.drivers[driver].add(&[], &[(PAGES, 2 << 20); 20]);
        // Another one after it.
        rig.drivers[driver].add(&[], &[(PAGES, 0x1000)]);
        for released in [16, 32] {
            assert_eq!(rig.device.on_queue(queue).unwrap(), Progress::More);
            assert_eq!(rig.count("reported_bytes"), released * MIB);
            assert!(rig.drivers[driver].take_used().is_none());
        }
        let queues = stop(&mut rig.device);
        assert_eq!(queues[driver].state().next_avail, 0, "it is in the ring");
        for queue in queues {
            rig.device.start_queue(queue).unwrap();
        }
        for released in [48, 64] {
            assert_eq!(rig.device.on_queue(queue).unwrap(), Progress::More);
            assert_eq!(rig.count("reported_bytes"), released * MIB);
            assert!(rig.drivers[driver].take_used().is_none());
        }
        assert_eq!(rig.device.on_queue(queue).unwrap(), Progress::Idle);
        assert_eq!(rig.count("reported_bytes"), 72 * MIB + 0x1000);
        let used: Vec<_> = std::iter::from_fn(|| rig.drivers[driver].take_used()).collect();
        assert_eq!(used.len(), 2);
        assert_eq!(rig.count("ignored_bytes"), 0);
    }
}

#[test]
fn a_report_of_nowhere_is_a_fault() {
    let mut rig = rig();
    rig.drivers[4].add(&[], &[(1 << 40, 0x1000)]);
    let fault = rig.device.on_queue(4).unwrap_err();
    assert!(matches!(fault, Fault::Guest(_)), "{fault:?}");
}

#[test]
fn statistics_are_kept_until_they_are_asked_for_and_told_when_new_ones_come() {
    let mut rig = rig();
    rig.tell_stats(&[(4, 1)]);
    assert!(rig.drivers[2].take_used().is_none(), "kept");
    let told = Arc::new(Mutex::new(Vec::new()));
    for _ in 0..2 {
        let told = told.clone();
        let asked = rig.device.request_stats(move |stats| {
            told.lock().unwrap().push(stats);
        });
        assert!(asked.unwrap());
    }
    assert!(rig.drivers[2].take_used().is_some());
    assert_eq!(rig.irq.queue.load(SeqCst), 1);
    assert!(told.lock().unwrap().is_empty(), "the old ones are not told");
    let all = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0xffff].map(|tag| (tag, u64::from(tag) + 100));
    rig.tell_stats(&all);
    let expected = BalloonStats {
        swapped_in: Some(100),
        swapped_out: Some(101),
        major_faults: Some(102),
        minor_faults: Some(103),
        free: Some(104),
        total: Some(105),
        available: Some(106),
        caches: Some(107),
        oom_kills: Some(110),
    };
    assert_eq!(*told.lock().unwrap(), [expected; 2]);
}

#[test]
fn without_statistics_of_a_driver_nobody_waits() {
    assert!(!BalloonDevice::new().request_stats(|_| ()).unwrap());
    let mut rig = rig();
    let (send, receive) = std::sync::mpsc::channel();
    for number in 0..=MAX_WAITING {
        let send = send.clone();
        let asked = rig
            .device
            .request_stats(move |_| send.send(number).unwrap());
        assert!(asked.unwrap());
    }
    rig.tell_stats(&[]);
    let told: Vec<_> = receive.try_iter().collect();
    let expected: Vec<_> = (1..=MAX_WAITING).collect();
    assert_eq!(told, expected, "the oldest went");
    assert!(rig.device.request_stats(move |_| drop(send)).unwrap());
    stop(&mut rig.device);
    rig.device.reset();
    assert!(
        receive.recv().is_err(),
        "a driver that begins anew knows nothing"
    );
}

#[test]
fn a_driver_with_several_statistics_gets_all_but_the_last_back() {
    let mut rig = rig();
    for _ in 0..3 {
        rig.drivers[2].add(&[(BUF, 10)], &[]);
    }
    assert_eq!(rig.device.on_queue(STATS).unwrap(), Progress::Idle);
    let back: Vec<_> = std::iter::from_fn(|| rig.drivers[2].take_used()).collect();
    assert_eq!(back.iter().map(|used| used.id).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn statistics_that_are_kept_are_not_lost_by_a_pause() {
    let mut rig = rig();
    rig.tell_stats(&[(4, 1)]);
    let queues = stop(&mut rig.device);
    assert_eq!(queues.len(), 5);
    assert_eq!(queues[2].state().next_avail, 0, "not taken");
    for queue in queues {
        rig.device.start_queue(queue).unwrap();
    }
    assert_eq!(rig.device.on_queue(STATS).unwrap(), Progress::Idle);
    assert!(rig.device.request_stats(|_| ()).unwrap());
    assert!(rig.drivers[2].take_used().is_some());
}

#[test]
fn the_driver_hears_of_the_target_and_tells_what_it_has() {
    let mut device = BalloonDevice::new();
    device.set_target((5 << 12) + 4095);
    assert!(device.config.take_changed());
    let info = device.info();
    info.config.driver_write(0, &[9; 8]);
    info.config.driver_write(8, &[9; 8]);
    info.config.driver_write(4, &3u32.to_le_bytes());
    assert_eq!(device.actual(), 3 << 12);
    let saved = device.save();
    let mut rig = rig();
    rig.device.restore(&saved).unwrap();
    assert_eq!((rig.config(0), rig.config(4), rig.config(8)), (5, 0, 0));
    device.reset();
    assert_eq!(device.actual(), 0);
    device.set_target(u64::MAX);
    assert_eq!(device.save().bytes, [0xff; 4]);
}

#[test]
fn a_saved_state_of_another_length_is_refused() {
    let mut device = BalloonDevice::new();
    for bytes in [vec![], vec![0; 3], vec![0; 5]] {
        let saved = SavedDevice { version: 1, bytes };
        assert!(device.restore(&saved).is_err());
    }
    assert!(device.restore(&SavedDevice::default()).is_err());
}

#[test]
fn queues_that_run_or_do_not_exist_are_refused() {
    let mut rig = rig();
    let mut start = |index| {
        let queue = rig.drivers[0].device_queue(index, rig.irq.clone());
        rig.device.start_queue(queue).unwrap_err()
    };
    assert!(matches!(start(4), StartError::Running { index: 4 }));
    assert!(matches!(start(5), StartError::NoSuchQueue { index: 5 }));
    assert!(rig.device.stop_queue(5).is_none());
}

#[test]
fn the_device_is_as_the_specification_says() {
    let info = BalloonDevice::default().info();
    assert_eq!(info.device_type.number(), 5);
    assert_eq!(info.features, 0b10_0110);
    assert_eq!((info.queue_sizes.len(), info.config.len()), (5, 16));
    let text = format!("{:?}", BalloonDevice::new());
    assert!(text.starts_with("BalloonDevice { queues"), "{text}");
}

proptest! {
    #[test]
    fn memory_that_was_not_named_is_never_touched(
        pages in prop::collection::vec(0x100u32..0x400, 0..200),
    ) {
        let mut rig = rig();
        rig.fill();
        let _ = rig.name_pages(INFLATE, &pages).unwrap();
        for page in 0x100..0x400 {
            let expected = if pages.contains(&page) { 0 } else { 7 };
            prop_assert_eq!(rig.byte(u64::from(page) << 12), expected);
        }
    }
}
