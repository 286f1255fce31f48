//! Registers that a driver reads and writes.

use super::*;

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
