use super::*;
use crate::testing::{DriverQueue, memory};
use crate::virtio::{Counter, DeviceType, Fault, Progress, StartError};
use proptest::prelude::*;

#[derive(Debug, Default)]
struct Probe {
    running: Option<Resources>,
    starts: u32,
    stops: u32,
    config: [u8; 4],
}

impl VirtioDevice for Probe {
    fn device_type(&self) -> DeviceType {
        DeviceType::Block
    }
    fn queue_sizes(&self) -> &[u16] {
        &[16, 16]
    }
    fn features(&self) -> u64 {
        1 << 5
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        crate::virtio::read_config(&self.config, offset, data);
    }
    fn start(&mut self, mut resources: Resources) -> Result<(), StartError> {
        let first = resources.require(0)?;
        resources.queues[0] = Some(first);
        self.running = Some(resources);
        self.starts += 1;
        Ok(())
    }
    fn stop(&mut self) -> Vec<Option<Queue>> {
        self.stops += 1;
        self.running.take().map(|r| r.queues).unwrap_or_default()
    }
    fn is_running(&self) -> bool {
        self.running.is_some()
    }
    fn on_queue(&mut self, _: u16) -> Result<Progress, Fault> {
        Ok(Progress::Idle)
    }
    fn counters(&self) -> Vec<Counter> {
        Vec::new()
    }
}

struct Rig {
    mmio: MmioTransport,
    probe: Arc<Mutex<Probe>>,
    kicks: Vec<EventFd>,
    line: EventFd,
    driver: DriverQueue,
}

fn rig() -> Rig {
    let mem = memory(1 << 20);
    let probe = Arc::new(Mutex::new(Probe {
        config: [1, 2, 3, 4],
        ..Probe::default()
    }));
    let kicks: Vec<_> = (0..2)
        .map(|_| EventFd::new(libc::EFD_NONBLOCK).unwrap())
        .collect();
    let line = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    let irq = Arc::new(MmioInterrupt::new(line.try_clone().unwrap()));
    let clones = kicks.iter().map(|k| k.try_clone().unwrap()).collect();
    let driver = DriverQueue::new(&mem, 0x10000, 16);
    let mmio = MmioTransport::new(probe.clone(), mem, irq, clones);
    Rig {
        mmio,
        probe,
        kicks,
        line,
        driver,
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
fn identification_registers() {
    let mut rig = rig();
    assert_eq!(rig.r(reg::MAGIC_VALUE), u32::from_le_bytes(*b"virt"));
    assert_eq!(rig.r(reg::VERSION), 2);
    assert_eq!(rig.r(reg::DEVICE_ID), 2);
    rig.w(reg::DEVICE_FEATURES_SEL, 0);
    assert_eq!(rig.r(reg::DEVICE_FEATURES), 1 << 5 | 1 << 28 | 1 << 29);
    rig.w(reg::DEVICE_FEATURES_SEL, 1);
    assert_eq!(rig.r(reg::DEVICE_FEATURES), 1);
    rig.w(reg::DEVICE_FEATURES_SEL, 2);
    assert_eq!(rig.r(reg::DEVICE_FEATURES), 0);
}

#[test]
fn a_driver_in_the_right_order_starts_the_device_and_its_queues_are_looked_at() {
    let mut rig = Rig::started();
    assert_eq!(rig.r(reg::STATUS), 15);
    let probe = rig.probe.lock().unwrap();
    let resources = probe.running.as_ref().unwrap();
    assert!(resources.queues[0].is_some() && resources.queues[1].is_none());
    assert_eq!(resources.features, features::VERSION_1);
    assert_eq!(rig.kicks[0].read().unwrap(), 1);
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
    assert_eq!(rig.probe.lock().unwrap().starts, 0);
    rig.w(reg::STATUS, 0);
    assert_eq!(rig.r(reg::STATUS), 0);
    rig.negotiate(features::VERSION_1);
    rig.set_queue(0, good);
    rig.w(reg::STATUS, 15);
    assert_eq!(
        (rig.r(reg::STATUS), rig.probe.lock().unwrap().starts),
        (15, 1)
    );
}

#[test]
fn a_missing_required_queue_needs_a_reset() {
    let mut rig = rig();
    rig.negotiate(features::VERSION_1);
    rig.w(reg::STATUS, 15);
    assert_eq!(rig.r(reg::STATUS), 15 | 64);
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
    assert_eq!(rig.mmio.queues[0], rig.driver.config());
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
    let generation = rig.r(reg::CONFIG_GENERATION);
    irq.signal_queue(0);
    irq.signal_config();
    assert_eq!(rig.line.read().unwrap(), 2);
    assert_eq!(rig.r(reg::INTERRUPT_STATUS), 3);
    rig.w(reg::INTERRUPT_ACK, 1);
    assert_eq!(rig.r(reg::INTERRUPT_STATUS), 2);
    assert_ne!(rig.r(reg::CONFIG_GENERATION), generation);
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

proptest! {
    /// No sequence of accesses panics, and the device never starts twice without a stop.
    #[test]
    fn any_sequence_of_accesses_is_survived(
        ops in proptest::collection::vec((any::<bool>(), 0u64..0x120, any::<u32>(), 0usize..9), 0..200)
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
            let probe = rig.probe.lock().unwrap();
            prop_assert!(probe.starts <= probe.stops + 1);
        }
    }
}
