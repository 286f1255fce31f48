use super::*;
use crate::rng::RngDevice;
use crate::testing::{CountingInterrupt, DriverQueue, memory};
use crate::virtio::{QueueServer, QueueThread, StartError};
use rustix::event::{PollFd, PollFlags};
use std::sync::atomic::Ordering::SeqCst;
use std::thread::JoinHandle;

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

/// Serves a queue, until it fails the first time that it is notified.
#[derive(Debug)]
struct Failing(Option<Fault>, Option<Queue>);

impl QueueServer for Failing {
    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        self.1 = Some(queue);
        Ok(())
    }
    fn stop_queue(&mut self, _: u16) -> Option<Queue> {
        self.1.take()
    }
    fn queue(&mut self, _: u16) -> Option<&Queue> {
        self.1.as_ref()
    }
    fn is_quiet(&self) -> bool {
        true
    }
    fn on_queue(&mut self, _: u16) -> Result<Progress, Fault> {
        self.0.take().map_or(Ok(Progress::Idle), Err)
    }
    fn backend(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn on_backend(&mut self) -> Result<Progress, Fault> {
        Ok(Progress::Idle)
    }
}

/// A device whose only queue has a thread, which fails with this once.
#[derive(Debug)]
struct Threaded {
    fault: Option<Fault>,
    threads: Vec<Arc<QueueThread<Failing>>>,
}

impl VirtioDevice for Threaded {
    fn info(&self) -> DeviceInfo {
        RngDevice::new().info()
    }
    fn queue_threads(&mut self) -> QueueThreads {
        let server = Failing(self.fault.take(), None);
        let (threads, known) = QueueThreads::new([(0, server)]).unwrap();
        self.threads = threads;
        known
    }
    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        self.threads[0].halt().start(queue)
    }
    fn stop_queue(&mut self, _: u16) -> Option<Queue> {
        self.threads[0].halt().stop()
    }
    fn on_queue(&mut self, _: u16) -> Result<Progress, Fault> {
        panic!("its thread is to be woken");
    }
}

impl Drop for Threaded {
    fn drop(&mut self) {
        self.threads[0].halt().end();
    }
}

/// A worker whose device's only queue has met a fault on its thread, which nobody has taken yet.
fn failed(fault: Fault) -> (Rig, JoinHandle<()>) {
    let mut rig = rig();
    let fault = Some(fault);
    let threads = Vec::new();
    let device = Box::new(Threaded { fault, threads });
    rig.worker = Worker::new("rng0".to_owned(), device, rig.irq.clone());
    let body = rig.worker.begin_threads().pop().unwrap();
    let thread = std::thread::spawn(move || body.run());
    assert!(!rig.worker.watches(0) && rig.worker.watches(1));
    rig.start();
    assert_eq!(rig.worker.on_queue(0).unwrap(), Progress::Idle);
    let alarm = rig.worker.alarm().unwrap();
    rustix::event::poll(&mut [PollFd::new(&alarm, PollFlags::IN)], None).unwrap();
    assert!(rig.worker.is_serving());
    (rig, thread)
}

fn faults() -> [(Fault, bool); 2] {
    let host = Fault::host("failed", std::io::ErrorKind::Other.into());
    [(Fault::protocol("broken"), false), (host, true)]
}

#[test]
fn a_fault_on_the_thread_of_a_queue_parks_the_device_once() {
    for (fault, is_host) in faults() {
        let (mut rig, thread) = failed(fault);
        assert_eq!(rig.worker.on_alarm().is_err(), is_host);
        assert!(!rig.worker.is_serving());
        assert_eq!(rig.irq.needs_reset.load(SeqCst), 1);
        assert_eq!(rig.worker.on_alarm().unwrap(), Progress::Idle);
        assert_eq!(rig.worker.faults().get(), 1);
        drop(rig);
        thread.join().unwrap();
    }
}

#[test]
fn a_fault_of_the_last_session_is_not_the_next_drivers() {
    let (mut rig, thread) = failed(Fault::protocol("broken"));
    rig.worker.reset();
    rig.driver = DriverQueue::new(&memory(1 << 20), 0x10000, 16);
    rig.start();
    assert_eq!(rig.worker.on_alarm().unwrap(), Progress::Idle);
    assert!(rig.worker.is_serving());
    assert_eq!(rig.irq.needs_reset.load(SeqCst), 0);
    drop(rig);
    thread.join().unwrap();
}

#[test]
fn a_pause_parks_a_device_whose_fault_nobody_has_seen() {
    for (fault, is_host) in faults() {
        let (mut rig, thread) = failed(fault);
        let (is_quiet, failed) = rig.worker.pause();
        assert!(is_quiet && rig.worker.held().is_empty());
        assert_eq!(failed.is_some(), is_host);
        assert_eq!(rig.irq.needs_reset.load(SeqCst), 1);
        assert_eq!(rig.worker.faults().get(), 1);
        assert!(!rig.worker.resume() && !rig.worker.is_serving());
        drop(rig);
        thread.join().unwrap();
    }
}
