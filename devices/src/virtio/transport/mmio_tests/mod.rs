mod life;
mod queues;
mod registers;
mod saved;

use super::super::core::RESET_TIMEOUT;
use super::*;
use crate::WriteLog;
use crate::testing::{DirectLink, DriverQueue, memory};
use crate::virtio::{
    Command, ConfigSpace, Counter, DeviceInfo, DeviceType, Fault, Progress, Queue, QueueConfig,
    ReadCounters, StartError, VirtioDevice, WorkerLink, features,
};
use proptest::prelude::*;
use std::sync::Mutex;
use std::time::Duration;
use vmm_sys_util::eventfd::EventFd;

#[derive(Debug, Default)]
struct NoCounters;

impl ReadCounters for NoCounters {
    fn read(&self) -> Vec<Counter> {
        Vec::new()
    }
}

/// What a device has seen, for the test to read.
#[derive(Debug, Default)]
struct Seen {
    features: u64,
    starts: u32,
    resets: u32,
    running: [bool; 2],
}

#[derive(Debug)]
struct Probe {
    queues: [Option<Queue>; 2],
    config: Arc<ConfigSpace>,
    seen: Arc<Mutex<Seen>>,
}

impl VirtioDevice for Probe {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            device_type: DeviceType::Block,
            queue_sizes: vec![16, 16],
            features: 1 << 5,
            config: self.config.clone(),
            counters: Arc::new(NoCounters),
        }
    }
    fn negotiated(&mut self, features: u64) {
        self.seen.lock().unwrap().features = features;
    }
    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        let index = usize::from(queue.index());
        assert!(self.queues[index].is_none(), "started twice");
        let mut seen = self.seen.lock().unwrap();
        seen.starts += 1;
        seen.running[index] = true;
        self.queues[index] = Some(queue);
        Ok(())
    }
    fn stop_queue(&mut self, index: u16) -> Option<Queue> {
        self.seen.lock().unwrap().running[usize::from(index)] = false;
        self.queues[usize::from(index)].take()
    }
    fn reset(&mut self) {
        assert!(
            self.queues.iter().all(Option::is_none),
            "reset while it runs"
        );
        self.seen.lock().unwrap().resets += 1;
    }
    fn on_queue(&mut self, _: u16) -> Result<Progress, Fault> {
        Ok(Progress::Idle)
    }
}

/// A link whose commands wait until the test carries them out.
#[derive(Debug)]
struct SlowLink {
    direct: DirectLink,
    waiting: Arc<Mutex<Vec<WaitingCommand>>>,
    slow: Arc<std::sync::atomic::AtomicBool>,
}

struct WaitingCommand(Command);

impl std::fmt::Debug for WaitingCommand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a command")
    }
}

impl WorkerLink for SlowLink {
    fn send(&self, command: Command) {
        if self.slow.load(Ordering::SeqCst) {
            self.waiting.lock().unwrap().push(WaitingCommand(command));
        } else {
            self.direct.send(command);
        }
    }
}

struct Rig {
    mmio: MmioTransport,
    seen: Arc<Mutex<Seen>>,
    config: Arc<ConfigSpace>,
    kicks: Vec<Arc<EventFd>>,
    line: EventFd,
    driver: DriverQueue,
    direct: DirectLink,
    waiting: Arc<Mutex<Vec<WaitingCommand>>>,
    slow: Arc<std::sync::atomic::AtomicBool>,
}

fn rig() -> Rig {
    let mem = memory(1 << 20);
    let seen = Arc::new(Mutex::new(Seen::default()));
    let config = Arc::new(ConfigSpace::new([1, 2, 3, 4]));
    let probe = Probe {
        queues: [None, None],
        config: config.clone(),
        seen: seen.clone(),
    };
    let kicks: Vec<_> = (0..2)
        .map(|_| Arc::new(EventFd::new(libc::EFD_NONBLOCK).unwrap()))
        .collect();
    let line = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    let irq = Arc::new(MmioInterrupt::new(line.try_clone().unwrap()));
    let driver = DriverQueue::new(&mem, 0x10000, 16);
    let info = probe.info();
    let direct = DirectLink::new(Box::new(probe), irq.clone());
    let waiting = Arc::default();
    let slow = Arc::default();
    let link = Arc::new(SlowLink {
        direct: direct.clone(),
        waiting: Arc::clone(&waiting),
        slow: Arc::clone(&slow),
    });
    let parts = TransportParts {
        info,
        link,
        mem,
        kicks: kicks.clone(),
        writes: WriteLog::default(),
    };
    Rig {
        mmio: MmioTransport::new(parts, irq),
        seen,
        config,
        kicks,
        line,
        driver,
        direct,
        waiting,
        slow,
    }
}

impl Rig {
    fn w(&mut self, offset: u64, value: u32) {
        self.mmio.write(offset, &value.to_le_bytes());
    }
    fn r(&mut self, offset: u64) -> u32 {
        let mut data = [0xee; 4];
        self.mmio.read(offset, &mut data);
        u32::from_le_bytes(data)
    }
    fn negotiate(&mut self, features: u64) {
        self.w(reg::STATUS, 1);
        self.w(reg::STATUS, 3);
        self.w(reg::DRIVER_FEATURES_SEL, 0);
        self.w(reg::DRIVER_FEATURES, features as u32);
        self.w(reg::DRIVER_FEATURES_SEL, 1);
        self.w(reg::DRIVER_FEATURES, (features >> 32) as u32);
        self.w(reg::STATUS, 11);
    }
    fn set_queue(&mut self, index: u32, config: QueueConfig) {
        self.w(reg::QUEUE_SEL, index);
        self.w(reg::QUEUE_SIZE, config.size);
        self.w(reg::QUEUE_DESC_LOW, config.desc_table as u32);
        self.w(reg::QUEUE_DESC_HIGH, (config.desc_table >> 32) as u32);
        self.w(reg::QUEUE_DRIVER_LOW, config.avail_ring as u32);
        self.w(reg::QUEUE_DRIVER_HIGH, (config.avail_ring >> 32) as u32);
        self.w(reg::QUEUE_DEVICE_LOW, config.used_ring as u32);
        self.w(reg::QUEUE_DEVICE_HIGH, (config.used_ring >> 32) as u32);
        self.w(reg::QUEUE_READY, u32::from(config.ready));
    }
    fn started() -> Self {
        let mut rig = rig();
        rig.negotiate(features::VERSION_1);
        let config = rig.driver.config();
        rig.set_queue(0, config);
        rig.w(reg::STATUS, 15);
        rig
    }
}

proptest! {
    /// No sequence of accesses panics, starts a queue twice, or makes one run without DRIVER_OK.
    #[test]
    fn any_sequence_of_accesses_is_survived(
        ops in proptest::collection::vec(
            (any::<bool>(), 0u64..0x120, any::<u32>(), 0usize..9),
            0..200,
        )
    ) {
        let mut rig = rig();
        for (write, offset, value, width) in ops {
            let offset = offset & !3;
            if write && width == 4 {
                rig.w(offset, value & 0x8f);
            } else if write {
                rig.mmio.write(offset, &vec![value as u8; width]);
            } else {
                rig.mmio.read(offset, &mut vec![0; width]);
            }
            let status = rig.r(reg::STATUS);
            let running = rig.seen.lock().unwrap().running;
            prop_assert!(status & 4 != 0 || running == [false, false]);
        }
    }
}
