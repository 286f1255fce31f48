//! Values in the transport's registers.

use super::*;

/// Checks that a device that gets `tell` instead of being started asks for a reset, and works after
/// it.
fn refused(tell: impl Fn(&mut Rig)) {
    refused_on(|_| true, tell);
}

/// As [`refused`], except on transports that ignore these values: there the device starts.
fn refused_on(takes: impl Fn(On) -> bool, tell: impl Fn(&mut Rig)) {
    for subject in subjects() {
        let needs_reset = if takes(subject.on) { NEEDS_RESET } else { 0 };
        let mut rig = Rig::new(subject);
        rig.negotiate();
        rig.lay_rings();
        tell(&mut rig);
        rig.write(reg::STATUS, DRIVER_OK);
        let name = rig.subject.name;
        assert_eq!(rig.status(), DRIVER_OK | needs_reset, "{name}");
        rig.notify(0);
        rig.restart();
        rig.works();
    }
}

#[test]
fn queue_sizes_that_cannot_be_are_refused() {
    for size in [0, 3, 24, 1 << 15, 0x1_0010, u32::MAX] {
        let takes = |on| matches!(on, On::Mmio);
        refused_on(takes, |rig| {
            let config = rig.drivers[0].config();
            rig.set_queue(0, &QueueConfig { size, ..config });
        });
    }
}

#[test]
fn rings_that_are_misaligned_or_not_guest_memory_are_refused() {
    for at in [MEMORY, MEMORY - 16, u64::MAX - 15, 0xc000_0000, 1 << 52] {
        refused(|rig| {
            let config = rig.drivers[0].config();
            let desc_table = at;
            rig.set_queue(
                0,
                &QueueConfig {
                    desc_table,
                    ..config
                },
            );
        });
        refused(|rig| {
            let config = rig.drivers[0].config();
            let avail_ring = at;
            rig.set_queue(
                0,
                &QueueConfig {
                    avail_ring,
                    ..config
                },
            );
        });
        refused(|rig| {
            let config = rig.drivers[0].config();
            let used_ring = at;
            rig.set_queue(
                0,
                &QueueConfig {
                    used_ring,
                    ..config
                },
            );
        });
    }
    refused(|rig| {
        let mut config = rig.drivers[0].config();
        config.desc_table += 8;
        rig.set_queue(0, &config);
    });
    refused(|rig| {
        let mut config = rig.drivers[0].config();
        config.avail_ring += 1;
        rig.set_queue(0, &config);
    });
    refused(|rig| {
        let mut config = rig.drivers[0].config();
        config.used_ring += 2;
        rig.set_queue(0, &config);
    });
}

#[test]
fn rings_that_overlap_each_other_and_the_data_are_survived() {
    for subject in subjects() {
        let mut rig = Rig::new(subject);
        rig.negotiate();
        rig.lay_rings();
        let size = u32::from(QUEUE);
        let config = QueueConfig {
            size,
            ready: true,
            desc_table: DATA,
            avail_ring: DATA,
            used_ring: DATA,
        };
        for queue in 0..rig.kicks.len() {
            rig.set_queue(u32::try_from(queue).unwrap(), &config);
        }
        rig.write(reg::STATUS, DRIVER_OK);
        for byte in 0..=u8::MAX {
            rig.mem
                .write_slice(&[byte; 512], GuestAddress(DATA))
                .unwrap();
            rig.queues().into_iter().for_each(|queue| rig.poke(queue));
        }
        rig.restart();
        rig.works();
    }
}

#[test]
fn sizes_and_addresses_written_after_driver_ok_change_nothing() {
    survives(|rig| {
        for index in 0..rig.drivers.len() {
            let config = QueueConfig {
                size: 0,
                desc_table: u64::MAX,
                avail_ring: u64::MAX,
                used_ring: u64::MAX,
                ready: true,
            };
            rig.set_queue(u32::try_from(index).unwrap(), &config);
        }
        rig.works();
    });
}

#[test]
fn status_bits_that_are_skipped_or_cleared_are_not_taken() {
    for subject in subjects() {
        let mut rig = Rig::new(subject);
        for status in [2, 4, 8, 15, 64, 7, 0xff & !128] {
            rig.write(reg::STATUS, status);
            assert_eq!(rig.status(), 0, "{} {status}", rig.subject.name);
        }
        rig.restart();
        for status in [1, 3, 11, 7, 14] {
            rig.write(reg::STATUS, status);
            assert_eq!(rig.status(), DRIVER_OK, "{} {status}", rig.subject.name);
        }
        rig.works();
    }
}

#[test]
fn features_that_were_not_offered_are_not_accepted() {
    for subject in subjects() {
        let mut rig = Rig::new(subject);
        rig.write(reg::STATUS, 1);
        rig.write(reg::STATUS, 3);
        for half in [0, 1] {
            rig.write(reg::DRIVER_FEATURES_SEL, half);
            rig.write(reg::DRIVER_FEATURES, u32::MAX);
        }
        rig.write(reg::DRIVER_FEATURES_SEL, u32::MAX);
        rig.write(reg::DRIVER_FEATURES, u32::MAX);
        rig.write(reg::STATUS, 11);
        assert_eq!(rig.status(), 3, "{}", rig.subject.name);
        rig.restart();
        rig.works();
    }
}

#[test]
fn notifications_before_driver_ok_do_nothing() {
    for subject in subjects() {
        let mut rig = Rig::new(subject);
        rig.negotiate();
        rig.lay_rings();
        for queue in rig.queues() {
            let config = rig.drivers[usize::from(queue)].config();
            rig.set_queue(queue.into(), &config);
            rig.add_sound(queue);
            rig.notify(queue);
            let used = rig.drivers[usize::from(queue)].take_used();
            assert_eq!(used, None, "{} {queue}", rig.subject.name);
        }
        rig.restart();
        rig.works();
    }
}

#[test]
fn a_reset_with_chains_in_the_rings_forgets_them() {
    survives(|rig| {
        for _ in 0..3 {
            for queue in rig.queues() {
                (0..4).for_each(|_| rig.add_sound(queue));
            }
            rig.restart();
            for queue in rig.queues() {
                rig.poke(queue);
                let used = rig.drivers[usize::from(queue)].take_used();
                assert_eq!(used, None, "{} {queue}", rig.subject.name);
            }
            // Frames that arrived are no longer available for the chains that follow.
            rig.restart();
        }
    });
}

#[test]
fn configuration_space_takes_accesses_of_any_width_and_place() {
    survives(|rig| {
        let name = rig.subject.name;
        let (config, room) = rig.driver.config();
        for offset in [0, 1, 3, 8, 35, 36, 59, 60, 100, 0xdef, 0x1000] {
            if offset >= room {
                continue;
            }
            for width in 0..17 {
                let mut bytes = vec![0xee; width];
                rig.driver.read(config + offset, &mut bytes);
                if offset >= 0x100 {
                    assert_eq!(bytes, vec![0; width], "{name}: nothing beyond its end");
                }
                rig.driver.write(config + offset, &vec![0xff; width]);
            }
        }
        for offset in [u64::MAX, u64::MAX - 3, u64::MAX - config, 1 << 63] {
            for width in [0, 1, 3, 4, 8, 9] {
                let mut bytes = vec![0xee; width];
                rig.driver.read(offset, &mut bytes);
                assert_eq!(bytes, vec![0; width], "{name} {offset:#x}");
                rig.driver.write(offset, &bytes);
            }
        }
    });
}

#[test]
fn queues_that_do_not_exist_are_selected_and_notified_in_vain() {
    survives(|rig| {
        let count = u32::try_from(rig.kicks.len()).unwrap();
        for queue in [count, 0xffff, 0x1_0000, u32::MAX] {
            rig.write(reg::QUEUE_SEL, queue);
            assert_eq!(rig.read(reg::QUEUE_SIZE_MAX), 0, "{}", rig.subject.name);
            assert_eq!(rig.read(reg::QUEUE_READY), 0);
            rig.write(reg::QUEUE_SIZE, 16);
            rig.write(reg::QUEUE_READY, 1);
            assert_eq!(rig.read(reg::QUEUE_READY), 0);
            rig.write(reg::QUEUE_NOTIFY, queue);
        }
    });
}

#[test]
fn registers_take_accesses_of_any_width_and_value() {
    survives(|rig| {
        for offset in 0..0x100 {
            for width in [0, 1, 2, 3, 4, 5, 8, 16] {
                rig.driver.read(offset, &mut vec![0; width]);
                // A status of ones is FAILED, from which the restart below recovers.
                rig.driver.write(offset, &vec![0xff; width]);
            }
        }
        rig.restart();
    });
}
