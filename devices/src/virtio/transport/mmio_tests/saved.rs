//! Transports that are saved and restored.

use super::*;

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
