use super::*;
use crate::rng::RngDevice;
use crate::testing::{CountingInterrupt, DriverQueue, memory};
use crate::virtio::StartError;
use std::sync::atomic::Ordering::SeqCst;

const BUF: u64 = 0x40000;

struct Rig {
    worker: Worker,
    driver: DriverQueue,
    irq: Arc<CountingInterrupt>,
}

fn rig() -> Rig {
    let mem = memory(1 << 20);
    let driver = DriverQueue::new(&mem, 0x10000, 16);
    let irq = Arc::new(CountingInterrupt::default());
    let worker = Worker::new("rng0".to_owned(), Box::new(RngDevice::new()), irq.clone());
    Rig {
        worker,
        driver,
        irq,
    }
}

impl Rig {
    fn start(&mut self) {
        let queue = self.driver.device_queue(0, self.irq.clone());
        self.worker.start(1 << 32, vec![queue]);
    }
}

#[test]
fn a_fault_stops_the_queues_at_once_and_a_reset_mends_it() {
    let mut rig = rig();
    assert_eq!(rig.worker.name(), "rng0");
    let faults = rig.worker.faults();
    rig.start();
    rig.driver.make_available(99);
    assert_eq!(rig.worker.on_queue(0).unwrap(), Progress::Idle);
    assert!(!rig.worker.is_serving());
    assert_eq!(rig.irq.needs_reset.load(SeqCst), 1);
    assert_eq!(rig.worker.on_queue(0).unwrap(), Progress::Idle, "parked");
    assert_eq!(faults.get(), 1);
    assert_eq!(rig.irq.needs_reset.load(SeqCst), 1);
    rig.worker.reset();
    rig.driver = DriverQueue::new(&memory(1 << 20), 0x10000, 16);
    rig.start();
    rig.driver.add(&[], &[(BUF, 10)]);
    assert_eq!(rig.worker.on_queue(0).unwrap(), Progress::Idle);
    assert_eq!(rig.driver.take_used().unwrap().len, 10);
}

#[test]
fn a_paused_device_does_nothing_and_goes_on_where_it_was() {
    let mut rig = rig();
    rig.start();
    rig.driver.add(&[], &[(BUF, 10)]);
    assert_eq!(rig.worker.on_queue(0).unwrap(), Progress::Idle);
    rig.driver.take_used().unwrap();
    rig.worker.pause();
    rig.worker.pause();
    assert_eq!(rig.worker.held().len(), 1);
    assert_eq!(rig.worker.held()[0].state().next_avail, 1);
    rig.driver.add(&[], &[(BUF, 20)]);
    assert_eq!(rig.worker.on_queue(0).unwrap(), Progress::Idle);
    assert!(rig.driver.take_used().is_none());
    assert!(rig.worker.resume(), "its queues are to be looked at");
    assert_eq!(rig.worker.on_queue(0).unwrap(), Progress::Idle);
    assert_eq!(rig.driver.take_used().unwrap().len, 20);
    assert!(!rig.worker.resume());
}

#[test]
fn a_pause_does_not_wake_a_device_that_was_parked_or_reset() {
    let mut rig = rig();
    rig.worker.pause();
    assert!(!rig.worker.resume());
    rig.start();
    rig.worker.pause();
    rig.worker.reset();
    assert!(!rig.worker.resume() && !rig.worker.is_serving());
    rig.worker.pause();
    rig.start();
    assert!(!rig.worker.is_serving(), "started while paused");
    assert!(rig.worker.resume() && rig.worker.is_serving());
}

#[test]
fn a_driver_that_is_at_fault_again_and_again_does_not_fill_the_log() {
    let events = crate::logged::events(|| {
        let mut rig = rig();
        for _ in 0..100 {
            rig.start();
            rig.driver.make_available(99);
            assert_eq!(rig.worker.on_queue(0).unwrap(), Progress::Idle);
            assert!(!rig.worker.is_serving());
            rig.worker.reset();
            rig.driver = DriverQueue::new(&memory(1 << 20), 0x10000, 16);
        }
    });
    assert_eq!(events, 1);
}

/// A device of which one of its own threads has met a fault.
#[derive(Debug)]
struct Faulty(RngDevice, Option<Fault>);

impl VirtioDevice for Faulty {
    fn info(&self) -> DeviceInfo {
        self.0.info()
    }
    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        self.0.start_queue(queue)
    }
    fn stop_queue(&mut self, index: u16) -> Option<Queue> {
        self.0.stop_queue(index)
    }
    fn take_fault(&mut self) -> Option<Fault> {
        self.1.take()
    }
    fn on_queue(&mut self, index: u16) -> Result<Progress, Fault> {
        self.0.on_queue(index)
    }
}

#[test]
fn a_pause_parks_a_device_whose_fault_nobody_has_seen() {
    let failed = || Fault::host("failed", std::io::ErrorKind::Other.into());
    for (fault, is_host) in [(Fault::protocol("broken"), false), (failed(), true)] {
        let mut rig = rig();
        let device = Box::new(Faulty(RngDevice::new(), Some(fault)));
        rig.worker = Worker::new("rng0".to_owned(), device, rig.irq.clone());
        rig.start();
        let (is_quiet, failed) = rig.worker.pause();
        assert!(is_quiet && rig.worker.held().is_empty());
        assert_eq!(failed.is_some(), is_host);
        assert_eq!(rig.irq.needs_reset.load(SeqCst), 1);
        assert_eq!(rig.worker.faults().get(), 1);
        assert!(!rig.worker.resume() && !rig.worker.is_serving());
    }
}
