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

#[test]
fn a_driver_that_looks_for_shared_memory_finds_none_and_makes_no_error() {
    for mut rig in [rig(), Rig::started()] {
        let before = rig.mmio.save();
        for region in [0, 1, u32::MAX] {
            rig.w(0x0ac, region);
            let all: Vec<u32> = (0x0b0..0x0c0).step_by(4).map(|at| rig.r(at)).collect();
            assert_eq!(all, [u32::MAX; 4]);
        }
        assert_eq!(rig.mmio.save(), before);
        assert!(rig.mmio.core.has_logged_nothing());
        // An unknown register is an error.
        rig.w(0x0c0, 0);
        assert!(!rig.mmio.core.has_logged_nothing());
    }
}

#[test]
fn identification_registers() {
    let mut rig = rig();
    assert_eq!(rig.r(reg::MAGIC_VALUE), u32::from_le_bytes(*b"virt"));
    assert_eq!(rig.r(reg::VERSION), 2);
    assert_eq!(rig.r(reg::DEVICE_ID), 2);
    assert_eq!(rig.r(reg::VENDOR_ID), u32::from_le_bytes(*b"PVSR"));
    rig.w(reg::DEVICE_FEATURES_SEL, 0);
    assert_eq!(rig.r(reg::DEVICE_FEATURES), 1 << 5 | 1 << 28 | 1 << 29);
    rig.w(reg::DEVICE_FEATURES_SEL, 1);
    assert_eq!(rig.r(reg::DEVICE_FEATURES), 1);
    rig.w(reg::DEVICE_FEATURES_SEL, 2);
    assert_eq!(rig.r(reg::DEVICE_FEATURES), 0);
    // No shared memory.
    for offset in (0xb0..0xc0).step_by(4) {
        assert_eq!(rig.r(offset), u32::MAX, "{offset:#x}");
    }
}

#[test]
fn a_driver_in_the_right_order_starts_the_queues_that_it_enabled() {
    let mut rig = Rig::started();
    assert_eq!(rig.r(reg::STATUS), 15);
    let seen = rig.seen.lock().unwrap();
    assert_eq!((seen.starts, seen.running), (1, [true, false]));
    assert_eq!(seen.features, features::VERSION_1);
}

#[test]
fn features_that_were_not_offered_or_lack_version_1_are_not_accepted() {
    for bits in [
        features::VERSION_1 | 1 << 6,
        1 << 5,
        features::VERSION_1 | 1 << 63,
    ] {
        let mut rig = rig();
        rig.negotiate(bits);
        assert_eq!(rig.r(reg::STATUS), 3, "{bits:#x}");
    }
}

#[test]
fn a_bad_queue_needs_a_reset_and_a_reset_mends_it() {
    let mut rig = rig();
    rig.negotiate(features::VERSION_1);
    let good = rig.driver.config();
    rig.set_queue(
        0,
        QueueConfig {
            used_ring: !7,
            ..good
        },
    );
    rig.w(reg::STATUS, 15);
    assert_eq!(rig.r(reg::STATUS), 15 | 64);
    assert_eq!(rig.line.read().unwrap(), 1, "the driver is told");
    assert_eq!(rig.seen.lock().unwrap().starts, 0);
    rig.w(reg::STATUS, 0);
    assert_eq!(rig.r(reg::STATUS), 0);
    rig.negotiate(features::VERSION_1);
    rig.set_queue(0, good);
    rig.w(reg::STATUS, 15);
    assert_eq!(
        (rig.r(reg::STATUS), rig.seen.lock().unwrap().starts),
        (15, 1)
    );
}

#[test]
fn a_reset_stops_the_queues_and_is_not_over_before_the_worker_says_so() {
    let mut rig = Rig::started();
    rig.mmio.core.set_patience(Duration::from_millis(1));
    rig.slow.store(true, Ordering::SeqCst);
    rig.w(reg::STATUS, 0);
    assert_eq!(rig.r(reg::STATUS), 15, "the worker is busy");
    rig.w(reg::STATUS, 0);
    rig.w(reg::STATUS, 1);
    assert_eq!(rig.r(reg::STATUS), 15);
    assert_eq!(rig.r(reg::DEVICE_ID), 2, "other registers answer");
    let mut config = [0; 4];
    rig.mmio.read(reg::CONFIG, &mut config);
    assert_eq!(config, [1, 2, 3, 4]);
    let commands = std::mem::take(&mut *rig.waiting.lock().unwrap());
    assert_eq!(commands.len(), 1);
    for WaitingCommand(command) in commands {
        rig.direct.send(command);
    }
    assert_eq!(rig.r(reg::STATUS), 0);
    {
        let seen = rig.seen.lock().unwrap();
        assert_eq!((seen.resets, seen.running), (1, [false, false]));
    }
    rig.slow.store(false, Ordering::SeqCst);
    rig.negotiate(features::VERSION_1);
    assert_eq!(rig.r(reg::STATUS), 11);
}

#[test]
fn a_reset_of_a_worker_that_is_gone_ends() {
    let mut rig = Rig::started();
    rig.mmio.core.set_patience(Duration::from_millis(1));
    rig.slow.store(true, Ordering::SeqCst);
    rig.w(reg::STATUS, 0);
    assert_eq!(rig.r(reg::STATUS), 15);
    rig.waiting.lock().unwrap().clear();
    assert_eq!(rig.r(reg::STATUS), 0);
    assert!(RESET_TIMEOUT < Duration::from_secs(1));
}

#[test]
fn a_device_that_was_never_started_is_reset_without_its_worker() {
    let mut rig = rig();
    rig.w(reg::STATUS, 1);
    rig.w(reg::STATUS, 0);
    assert_eq!(rig.r(reg::STATUS), 0);
    assert_eq!(rig.seen.lock().unwrap().resets, 0);
}

#[test]
fn a_driver_that_gives_up_stops_the_queues() {
    let mut rig = Rig::started();
    rig.w(reg::STATUS, 15 | 128);
    assert_eq!(rig.r(reg::STATUS), 15 | 128);
    assert_eq!(rig.seen.lock().unwrap().running, [false, false]);
}

#[test]
fn a_change_of_the_configuration_is_an_interrupt_once_the_driver_is_ready() {
    let mut early = rig();
    early.config.update(0, &[9]);
    early.direct.with(|worker| worker.with_device(|_| ()));
    assert!(early.line.read().is_err(), "the driver has yet to read it");

    let mut rig = Rig::started();
    let generation = rig.r(reg::CONFIG_GENERATION);
    let config = rig.config.clone();
    rig.direct
        .with(|worker| worker.with_device(|_| config.update(0, &[8])));
    assert_eq!(rig.line.read().unwrap(), 1);
    assert_eq!(rig.r(reg::INTERRUPT_STATUS), 2);
    assert_ne!(rig.r(reg::CONFIG_GENERATION), generation);
    assert_eq!(early.r(reg::CONFIG_GENERATION), 1);
}

#[test]
fn queue_registers_are_frozen_after_driver_ok() {
    let mut rig = Rig::started();
    rig.set_queue(
        0,
        QueueConfig {
            size: 0,
            ready: true,
            ..QueueConfig::default()
        },
    );
    assert_eq!(rig.mmio.core.queue(0), Some(&rig.driver.config()));
}

#[test]
fn a_driver_that_gives_up_again_and_again_stops_its_device_once() {
    let mut rig = Rig::started();
    rig.slow.store(true, Ordering::SeqCst);
    for _ in 0..100 {
        rig.w(reg::STATUS, 0x8f);
        rig.w(reg::STATUS, 0x80);
    }
    assert_eq!(rig.r(reg::STATUS), 0x8f);
    assert_eq!(rig.waiting.lock().unwrap().len(), 1);
}

#[test]
fn a_driver_that_gave_up_begins_again_by_a_reset() {
    let mut rig = rig();
    rig.negotiate(features::VERSION_1);
    let config = rig.driver.config();
    rig.set_queue(0, config);
    rig.w(reg::STATUS, 0x8b);
    rig.w(reg::STATUS, 11);
    rig.w(reg::STATUS, 15);
    assert_eq!(rig.r(reg::STATUS), 0x8b);
    assert_eq!(rig.seen.lock().unwrap().starts, 0);
    rig.w(reg::STATUS, 0);
    rig.negotiate(features::VERSION_1);
    rig.set_queue(0, config);
    rig.w(reg::STATUS, 15);
    assert_eq!(rig.seen.lock().unwrap().starts, 1);
}

#[test]
fn a_queue_that_is_taken_out_of_service_stops_and_stays_so_until_a_reset() {
    let mut rig = Rig::started();
    rig.w(reg::QUEUE_SEL, 1);
    rig.w(reg::QUEUE_READY, 0);
    rig.w(reg::QUEUE_SEL, 0);
    assert_eq!(rig.r(reg::QUEUE_READY), 1);
    rig.w(reg::QUEUE_READY, 0);
    assert_eq!(rig.r(reg::QUEUE_READY), 0);
    assert_eq!(rig.seen.lock().unwrap().running, [false, false]);
    for _ in 0..2 {
        rig.w(reg::QUEUE_READY, 1);
        rig.w(reg::QUEUE_READY, 0);
    }
    assert_eq!((rig.r(reg::QUEUE_READY), rig.r(reg::STATUS)), (0, 15));
    rig.w(reg::STATUS, 0);
    rig.negotiate(features::VERSION_1);
    rig.set_queue(0, rig.driver.config());
    rig.w(reg::STATUS, 15);
    assert_eq!(rig.seen.lock().unwrap().running, [true, false]);
    // For a device that is paused.
    rig.direct.with(|worker| worker.pause());
    rig.w(reg::QUEUE_READY, 0);
    assert!(rig.direct.with(|worker| worker.queue_states().is_empty()));
}

#[test]
fn a_queue_of_a_worker_that_is_blocked_reads_as_ready_until_it_is_stopped() {
    let mut rig = Rig::started();
    rig.mmio.core.set_patience(Duration::from_millis(1));
    rig.slow.store(true, Ordering::SeqCst);
    for _ in 0..3 {
        rig.w(reg::QUEUE_READY, 0);
        assert_eq!(rig.r(reg::QUEUE_READY), 1);
    }
    let commands: Vec<_> = rig.waiting.lock().unwrap().drain(..).collect();
    assert_eq!(commands.len(), 1);
    for WaitingCommand(command) in commands {
        rig.direct.send(command);
    }
    assert_eq!(rig.r(reg::QUEUE_READY), 0);
    assert_eq!(rig.seen.lock().unwrap().running, [false, false]);
}

#[test]
fn queues_of_a_worker_that_is_blocked_are_stopped_together_and_each_once() {
    let mut rig = rig();
    rig.negotiate(features::VERSION_1);
    let config = rig.driver.config();
    rig.set_queue(0, config);
    rig.set_queue(1, config);
    rig.w(reg::STATUS, 15);
    rig.mmio.core.set_patience(Duration::from_millis(1));
    rig.slow.store(true, Ordering::SeqCst);
    for queue in [0, 1, 0, 1] {
        rig.w(reg::QUEUE_SEL, queue);
        rig.w(reg::QUEUE_READY, 0);
        assert_eq!(rig.r(reg::QUEUE_READY), 1);
    }
    let commands: Vec<_> = rig.waiting.lock().unwrap().drain(..).collect();
    assert_eq!(commands.len(), 2);
    for (queue, WaitingCommand(command)) in (0..).zip(commands) {
        rig.w(reg::QUEUE_SEL, queue);
        assert_eq!(rig.r(reg::QUEUE_READY), 1);
        rig.direct.send(command);
        assert_eq!(rig.r(reg::QUEUE_READY), 0);
    }
    assert_eq!(rig.seen.lock().unwrap().running, [false, false]);
}

#[test]
fn a_queue_that_was_refused_is_taken_out_of_service_at_once() {
    let mut rig = rig();
    rig.negotiate(features::VERSION_1);
    let config = rig.driver.config();
    let used_ring = !7;
    rig.set_queue(
        0,
        QueueConfig {
            used_ring,
            ..config
        },
    );
    rig.w(reg::STATUS, 15);
    assert_eq!((rig.r(reg::STATUS), rig.r(reg::QUEUE_READY)), (15 | 64, 1));
    rig.w(reg::QUEUE_READY, 0);
    assert_eq!(rig.r(reg::QUEUE_READY), 0);
}

#[test]
fn a_notification_reaches_its_queue_only_and_none_before_driver_ok() {
    let mut rig = rig();
    rig.w(reg::QUEUE_NOTIFY, 0);
    assert!(rig.kicks[0].read().is_err());
    let mut rig = Rig::started();
    let _ = (rig.kicks[0].read(), rig.kicks[1].read());
    rig.w(reg::QUEUE_NOTIFY, 1);
    rig.w(reg::QUEUE_NOTIFY, 2);
    rig.w(reg::QUEUE_NOTIFY, u32::MAX);
    assert!(rig.kicks[0].read().is_err());
    assert_eq!(rig.kicks[1].read().unwrap(), 1);
}

#[test]
fn interrupts_show_in_the_status_register_until_acknowledged() {
    let mut rig = Rig::started();
    let irq = rig.mmio.irq.clone();
    irq.signal_queue(0);
    irq.signal_config();
    assert_eq!(rig.line.read().unwrap(), 2);
    assert_eq!(rig.r(reg::INTERRUPT_STATUS), 3);
    rig.w(reg::INTERRUPT_ACK, 1);
    assert_eq!(rig.r(reg::INTERRUPT_STATUS), 2);
    // What is left is an interrupt of its own.
    assert_eq!(rig.line.read().unwrap(), 1);
    rig.w(reg::INTERRUPT_ACK, 2);
    assert_eq!(rig.r(reg::INTERRUPT_STATUS), 0);
    assert!(rig.line.read().is_err());
}

#[test]
fn config_space_reads_of_any_width() {
    let mut rig = rig();
    let mut two = [0; 2];
    rig.mmio.read(reg::CONFIG + 1, &mut two);
    assert_eq!(two, [2, 3]);
    let mut eight = [7; 8];
    rig.mmio.read(reg::CONFIG, &mut eight);
    assert_eq!(eight, [1, 2, 3, 4, 0, 0, 0, 0]);
}

#[test]
fn odd_register_accesses_are_harmless() {
    let mut rig = rig();
    for width in [0, 1, 2, 3, 8] {
        rig.mmio.write(reg::STATUS, &vec![1; width]);
        let mut data = vec![9; width];
        rig.mmio.read(reg::MAGIC_VALUE, &mut data);
        assert!(data.iter().all(|b| *b == 0));
    }
    rig.mmio.write(reg::STATUS + 1, &[1, 0, 0, 0]);
    assert_eq!(rig.r(reg::STATUS), 0);
}

#[test]
fn a_saved_transport_goes_on_in_another_device() {
    let mut first = Rig::started();
    first.mmio.irq.signal_queue(0);
    first.w(reg::QUEUE_SEL, 1);
    first.direct.with(|worker| worker.pause());
    let saved = first.mmio.save();
    let mut states = first.direct.with(|worker| worker.queue_states());
    assert_eq!(states, [(0, QueueState::default())]);
    states[0].1.next_avail = 5;

    let mut second = rig();
    second.mmio.restore(&saved, &states).unwrap();
    assert_eq!(second.mmio.save(), saved);
    assert_eq!(
        (second.r(reg::STATUS), second.r(reg::INTERRUPT_STATUS)),
        (15, 1)
    );
    {
        let seen = second.seen.lock().unwrap();
        assert_eq!((seen.running, seen.features), ([true, false], 1 << 32));
    }
    second.direct.with(|worker| worker.pause());
    assert_eq!(second.direct.with(|worker| worker.queue_states()), states);
    second.w(reg::STATUS, 0);
    assert_eq!(second.r(reg::STATUS), 0);
}

#[test]
fn what_a_driver_wrote_before_features_were_agreed_on_is_restored_and_refused_then() {
    let wrong = features::VERSION_1 | 1 << 6;
    for failed in [0, 0x80] {
        let mut first = rig();
        first.negotiate(wrong);
        first.w(reg::STATUS, 3 | failed);
        let saved = first.mmio.save();
        assert_eq!(saved.transport.features, wrong);
        let mut second = rig();
        second.mmio.restore(&saved, &[]).unwrap();
        assert_eq!(second.mmio.save(), saved);
        second.w(reg::STATUS, 11);
        assert_eq!(second.r(reg::STATUS), 3 | failed);
        second.w(reg::STATUS, 0);
        second.negotiate(features::VERSION_1);
        assert_eq!(second.r(reg::STATUS), 11);
    }
}

#[test]
fn a_saved_transport_that_lies_is_refused_and_changes_nothing() {
    let mut first = Rig::started();
    let saved = first.mmio.save();
    let states = [(0, QueueState::default())];
    type Lie = fn(&mut SavedMmio);
    let lies: [Lie; 9] = [
        |saved| saved.transport.status = 7,
        |saved| saved.transport.status = 0x8f,
        |saved| saved.transport.status = 11,
        |saved| saved.transport.features |= 1 << 6,
        |saved| saved.transport.features = 0,
        |saved| saved.transport.queues.clear(),
        |saved| saved.transport.queues[0].ready = false,
        |saved| saved.transport.queues[0].desc_table = 1 << 40,
        |saved| saved.interrupt_status = 4,
    ];
    for lie in lies {
        let mut lying = saved.clone();
        lie(&mut lying);
        let mut rig = rig();
        let before = rig.mmio.save();
        assert!(rig.mmio.restore(&lying, &states).is_err(), "{lying:?}");
        assert_eq!(rig.mmio.save(), before);
        assert_eq!(rig.seen.lock().unwrap().starts, 0);
        assert!(
            rig.mmio
                .restore(&saved, &[(2, QueueState::default())])
                .is_err()
        );
    }
}

#[test]
fn a_saved_queue_that_runs_more_than_once_is_refused() {
    let mut first = Rig::started();
    let saved = first.mmio.save();
    let queue = |index| (index, QueueState::default());
    let lies = [vec![queue(0), queue(0)], vec![queue(0); 1 << 20]];
    for running in &lies {
        let mut rig = rig();
        assert!(rig.mmio.restore(&saved, running).is_err());
        assert_eq!(rig.seen.lock().unwrap().starts, 0);
        rig.mmio.restore(&saved, &running[..1]).unwrap();
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

#[test]
fn a_driver_whose_queues_are_refused_again_and_again_does_not_fill_the_log() {
    let events = crate::logged::events(|| {
        let mut rig = rig();
        for _ in 0..100 {
            rig.negotiate(features::VERSION_1);
            let mut config = rig.driver.config();
            config.desc_table = u64::MAX - 15;
            rig.set_queue(0, config);
            rig.w(reg::STATUS, 15);
            assert_eq!(rig.r(reg::STATUS) & 64, 64);
            rig.w(reg::STATUS, 0);
        }
        assert_eq!(rig.seen.lock().unwrap().starts, 0);
    });
    assert_eq!(events, 1);
}
