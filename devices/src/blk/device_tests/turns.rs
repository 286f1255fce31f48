//! Turns on a slow disk, which end by time.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::*;

const MIB: u32 = 1 << 20;

/// A disk that takes 5 ms for each request; it completes those of 1 MiB when it is ready.
#[derive(Clone, Debug, Default)]
struct Slow {
    tokens: Vec<u16>,
    ready: Arc<AtomicBool>,
}

impl Disk for Slow {
    fn len(&self) -> u64 {
        1 << 30
    }
    fn submit(&mut self, _: &GuestRam, token: u16, operation: Operation<'_, '_>) -> Submitted {
        if let Operation::Read { slices, .. } = operation
            && slices.iter().map(VolatileSlice::len).sum::<usize>() == MIB as usize
        {
            self.tokens.push(token);
            return Submitted::Queued;
        }
        std::thread::sleep(Duration::from_millis(5));
        Submitted::Done(Ok(()))
    }
    fn completed(&mut self) -> Option<Completion> {
        let token = self.ready.load(SeqCst).then(|| self.tokens.pop());
        let result = Ok(());
        token.flatten().map(|token| Completion { token, result })
    }
}

/// Creates this number of reads of `len` bytes each, in a queue with room for all of them.
fn reads(count: usize, len: u32) -> (Rig, Arc<AtomicBool>) {
    let (disk, mem) = (Slow::default(), memory(4 << 20));
    let ready = disk.ready.clone();
    let mut device = BlockDevice::new(Box::new(disk));
    let driver = DriverQueue::new(&mem, 0x10000, 1024);
    let irq = Arc::new(CountingInterrupt::default());
    start(&mut device, &[&driver], &irq, FLUSH);
    let mut rig = Rig {
        mem,
        driver,
        device,
        irq,
    };
    rig.header(0, 0);
    for _ in 0..count {
        rig.driver
            .add(&[(HEADER, 16)], &[(0x10_0000, len), (STATUS, 1)]);
    }
    (rig, ready)
}

impl Rig {
    fn completed(&mut self) -> usize {
        std::iter::from_fn(|| self.driver.take_used()).count()
    }
}

#[test]
fn a_turn_ends_when_it_has_taken_long_enough() {
    let (mut rig, _) = reads(200, 512);
    for _ in 0..3 {
        assert_eq!(rig.device.on_queue(0).unwrap(), Progress::More);
        let served = rig.completed();
        assert!((1..60).contains(&served), "{served} of 200");
    }
}

#[test]
fn a_turn_with_the_last_request_is_the_last_one_however_long_it_took() {
    let (mut rig, _) = reads(4, 512);
    let mut turns = 1;
    while rig.device.on_queue(0).unwrap() == Progress::More {
        turns += 1;
        assert!(rig.completed() > 0, "each turn serves something");
    }
    assert!(turns <= 4, "{turns}");
}

#[test]
fn rests_of_requests_are_not_all_for_one_turn() {
    let (mut rig, ready) = reads(15, MIB + 512);
    while rig.device.on_queue(0).unwrap() == Progress::More {}
    assert_eq!(rig.completed(), 0, "the disk works on all first pieces");
    ready.store(true, SeqCst);
    assert_eq!(rig.device.on_backend().unwrap(), Progress::More);
    let mut served = rig.completed();
    assert!((1..12).contains(&served), "{served} of 15");
    while rig.device.on_queue(0).unwrap() == Progress::More {
        served += rig.completed();
    }
    assert_eq!(served + rig.completed(), 15);
}
