//! Queues that are taken out of service one by one.

use super::*;

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
