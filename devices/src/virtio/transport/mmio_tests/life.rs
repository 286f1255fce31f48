//! How a driver starts, gives up and resets the device.

use super::*;

#[test]
fn a_driver_in_the_right_order_starts_the_queues_that_it_enabled() {
    let mut rig = Rig::started();
    assert_eq!(rig.r(reg::STATUS), 15);
    let seen = rig.seen.lock().unwrap();
    assert_eq!((seen.starts, seen.running), (1, [true, false]));
    assert_eq!(seen.features, features::VERSION_1);
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
