use std::sync::Mutex;

use proptest::prelude::*;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::*;
use crate::WriteLog;
use crate::pci::{COMMAND_MEMORY, MessageInterrupt, NO_VECTOR};
use crate::rng::RngDevice;
use crate::testing::{DirectLink, DriverQueue, memory};
use crate::virtio::transport::Status;
use crate::virtio::{Interrupt, Progress, VirtioDevice, features};

#[derive(Clone, Debug, Default)]
struct Sent(Arc<Mutex<Vec<u32>>>);

impl MessageInterrupt for Sent {
    fn send(&self, _: u64, data: u32) {
        self.0.lock().unwrap().push(data);
    }
}

struct Rig {
    pci: PciTransport,
    irq: Arc<PciInterrupt>,
    worker: DirectLink,
    kick: Arc<EventFd>,
    driver: DriverQueue,
    sent: Sent,
}

fn rig() -> Rig {
    let mem = memory(1 << 20);
    let sent = Sent::default();
    let irq = Arc::new(PciInterrupt::new(1, sent.clone()));
    let device = RngDevice::new();
    let info = device.info();
    let worker = DirectLink::new(Box::new(device), irq.clone());
    let kick = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
    let parts = TransportParts {
        info,
        link: Arc::new(worker.clone()),
        mem: mem.clone(),
        kicks: vec![kick.clone()],
        writes: WriteLog::default(),
    };
    Rig {
        pci: PciTransport::new(parts, irq.clone()),
        irq,
        worker,
        kick,
        driver: DriverQueue::new(&mem, 0x1_0000, 16),
        sent,
    }
}

impl Rig {
    /// Accesses of the common configuration, with the register's width.
    fn w(&mut self, offset: u64, width: usize, value: u64) {
        self.pci.write_bar(offset, &value.to_le_bytes()[..width]);
    }

    fn r(&mut self, offset: u64, width: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes[..width].fill(0xee);
        self.pci.read_bar(offset, &mut bytes[..width]);
        u64::from_le_bytes(bytes)
    }

    /// A driver that does everything right.
    fn start(&mut self) {
        let config = self.driver.config();
        for (offset, width, value) in [
            (0x14, 1, 0),
            (0x14, 1, 1),
            (0x14, 1, 3),
            (0x08, 4, 1),
            (0x0c, 4, 1),
            (0x14, 1, 11),
            (0x16, 2, 0),
            (0x18, 2, 16),
            (0x1a, 2, 1),
            (0x10, 2, 0),
            (0x20, 8, config.desc_table),
            (0x28, 4, config.avail_ring),
            (0x2c, 4, 0),
            (0x30, 8, config.used_ring),
            (0x1c, 2, 1),
            (0x14, 1, 15),
        ] {
            self.w(offset, width, value);
        }
        assert_eq!(self.r(0x14, 1), 15);
    }

    /// Gives both vectors messages, unmasks them, and enables MSI-X.
    fn vectors(&mut self) {
        for vector in 0..2u64 {
            self.w(MSIX_TABLE + 16 * vector, 8, 0xfee0_0000);
            self.w(MSIX_TABLE + 16 * vector + 8, 8, 70 + vector);
        }
        self.pci.write_config(0x42, &[0, 0x80]);
    }

    fn serve(&mut self) {
        assert!(self.kick.read().is_ok(), "notified");
        let progress = self.worker.with(|worker| worker.on_queue(0)).unwrap();
        assert_eq!(progress, Progress::Idle);
    }

    fn sent(&self) -> Vec<u32> {
        std::mem::take(&mut self.sent.0.lock().unwrap())
    }
}

#[test]
fn a_driver_negotiates_reads_back_what_it_wrote_and_is_served() {
    let mut rig = rig();
    rig.vectors();
    assert_eq!((rig.r(0x12, 2), rig.r(0x18, 2), rig.r(0x1e, 2)), (1, 64, 0));
    rig.start();
    assert_eq!((rig.r(0x08, 4), rig.r(0x0c, 4)), (1, 1));
    assert_eq!((rig.r(0x18, 2), rig.r(0x1c, 2)), (16, 1));
    let config = rig.driver.config();
    assert_eq!(rig.r(0x20, 8), config.desc_table);
    assert_eq!((rig.r(0x28, 4), rig.r(0x2c, 4)), (config.avail_ring, 0));
    assert_eq!(rig.r(0x30, 8), config.used_ring);
    rig.driver.add(&[], &[(0x8_0000, 32)]);
    rig.w(NOTIFY, 2, 0);
    rig.serve();
    assert_eq!(rig.driver.take_used().unwrap().len, 32);
    assert_eq!(rig.sent(), [71], "by the queue's vector");
    assert_eq!(rig.r(ISR, 1), 0, "not with MSI-X");
}

#[test]
fn each_kind_of_features_has_its_own_selector() {
    let mut rig = rig();
    rig.w(0x14, 1, 1);
    rig.w(0x14, 1, 3);
    // VIRTIO_F_VERSION_1 is bit 0 of the high half; the ring's features are in the low half.
    for (device, driver) in [(0, 1), (1, 0), (2, 3), (0xffff_ffff, 1)] {
        rig.w(0x00, 4, device);
        rig.w(0x08, 4, driver);
        assert_eq!((rig.r(0x00, 4), rig.r(0x08, 4)), (device, driver));
        let offered = match device {
            0 => features::RING & 0xffff_ffff,
            1 => 1,
            _ => 0,
        };
        assert_eq!(rig.r(0x04, 4), offered, "half {device:#x}");
    }
    // What is offered cannot be written.
    rig.w(0x00, 4, 1);
    rig.w(0x04, 4, 0xffff_ffff);
    assert_eq!(rig.r(0x04, 4), 1);
}

#[test]
fn a_driver_without_msix_polls_isr_status_which_reading_clears() {
    let mut rig = rig();
    rig.start();
    let status = |rig: &mut Rig| {
        let mut word = [0; 4];
        rig.pci.read_config(4, &mut word);
        word[2]
    };
    assert_eq!(status(&mut rig), 0x10);
    rig.irq.signal_queue(0);
    assert_eq!(status(&mut rig), 0x18);
    rig.irq.signal_config();
    assert_eq!((rig.r(ISR, 1), rig.r(ISR, 1)), (3, 0));
    assert_eq!(status(&mut rig), 0x10);
    assert!(rig.sent().is_empty());
}

#[test]
fn a_change_of_configuration_shows_in_isr_status_with_msix_too() {
    let mut rig = rig();
    rig.vectors();
    rig.start();
    rig.irq.signal_queue(0);
    rig.irq.signal_config();
    let mut status = [0];
    rig.pci.read_config(6, &mut status);
    assert_eq!(status, [0x10], "no interrupt but messages");
    assert_eq!((rig.r(ISR, 1), rig.r(ISR, 1)), (2, 0));
}

#[test]
fn vectors_and_queues_that_do_not_exist_become_none() {
    let mut rig = rig();
    rig.vectors();
    rig.start();
    for vector in [2, 64, 0x8000, 0xfffe] {
        rig.w(0x10, 2, 0);
        rig.w(0x10, 2, vector);
        rig.w(0x1a, 2, vector);
        assert_eq!(
            (rig.r(0x10, 2), rig.r(0x1a, 2)),
            (0xffff, 0xffff),
            "{vector}"
        );
    }
    rig.irq.signal_queue(0);
    rig.irq.signal_queue(99);
    rig.irq.signal_config();
    assert!(rig.sent().is_empty());
    for queue in [1, 0xffff] {
        rig.w(0x16, 2, queue);
        rig.w(0x1a, 2, 1);
        rig.w(0x1c, 2, 1);
        assert_eq!(
            (rig.r(0x18, 2), rig.r(0x1a, 2), rig.r(0x1c, 2)),
            (0, 0xffff, 0)
        );
        assert_eq!((rig.r(0x1e, 2), rig.r(0x20, 8)), (0, 0));
    }
    rig.w(NOTIFY + 4, 2, 1);
    rig.w(MSIX_TABLE - 4, 2, 1);
    assert!(rig.kick.read().is_err());
}

#[test]
fn a_fault_is_a_change_of_configuration_and_a_reset_forgets_vectors() {
    let mut rig = rig();
    rig.vectors();
    rig.start();
    rig.driver.make_available(99);
    rig.w(NOTIFY, 2, 0);
    rig.serve();
    assert_eq!((rig.r(0x14, 1), rig.sent()), (15 | 64, vec![70]));
    rig.w(0x14, 1, 0);
    assert_eq!(
        (rig.r(0x14, 1), rig.r(0x10, 2), rig.r(0x1a, 2)),
        (0, 0xffff, 0xffff)
    );
    rig.driver = DriverQueue::new(&memory(1 << 20), 0x1_0000, 16);
    rig.start();
    assert_eq!(u64::from(rig.pci.status()), 15);
}

#[test]
fn queue_sizes_that_cannot_be_are_not_taken() {
    let mut rig = rig();
    for value in [1, 3, 11] {
        rig.w(0x14, 1, value);
        rig.w(0x08, 4, 1);
        rig.w(0x0c, 4, 1);
    }
    for size in [0, 3, 63, 65, 128, 0xffff] {
        rig.w(0x18, 2, size);
        assert_eq!(rig.r(0x18, 2), 64, "{size}");
    }
    rig.w(0x18, 2, 1);
    assert_eq!(rig.r(0x18, 2), 1);
    let mut state = rig.pci.save();
    for size in [0, 3, 128, 1 << 16] {
        state.transport.queues[0].size = size;
        assert!(super::tests::rig().pci.restore(&state, &[]).is_err());
    }
}

#[test]
fn registers_answer_to_their_own_width_alone() {
    let mut rig = rig();
    rig.start();
    for offset in 0..0x100u64 {
        for width in [0, 1, 2, 3, 4, 5, 8] {
            let sound = match offset {
                0x14 | 0x15 => width == 1,
                0..0x10 => offset % 4 == 0 && width == 4,
                0x10..0x20 => offset % 2 == 0 && width == 2,
                0x20..0x38 => (offset % 4 == 0 && width == 4) || (offset % 8 == 0 && width == 8),
                _ => false,
            };
            if !sound {
                assert_eq!(rig.r(offset, width), 0, "{offset:#x} {width}");
                rig.w(offset, width, u64::MAX);
            }
        }
    }
    assert_eq!(
        (rig.r(0x14, 1), rig.r(0x18, 2)),
        (15, 16),
        "nothing has changed"
    );
    // Wider than any register.
    let mut wide = [0xee; 64];
    rig.pci.read_bar(0x20, &mut wide);
    assert_eq!(wide, [0; 64]);
    for offset in [
        u64::MAX,
        u64::MAX - 7,
        u64::from(BAR_SIZE),
        u64::from(BAR_SIZE) - 1,
    ] {
        rig.w(offset, 8, u64::MAX);
        assert_eq!(rig.r(offset, 8), 0, "{offset:#x}");
    }
}

#[test]
fn the_bar_is_reached_through_configuration_space() {
    let mut rig = rig();
    // The last capability: cfg_type 5.
    let mut at = 0x40;
    let start = loop {
        let mut head = [0; 4];
        rig.pci.read_config(at, &mut head);
        if head[0] == 9 && head[3] == 5 {
            break at;
        }
        at = head[1].into();
        assert_ne!(at, 0, "the capability is there");
    };
    let access = |rig: &mut Rig, offset: u32, length: u32| {
        rig.pci.write_config(start + 4, &[0]);
        rig.pci.write_config(start + 8, &offset.to_le_bytes());
        rig.pci.write_config(start + 12, &length.to_le_bytes());
    };
    access(&mut rig, 0x14, 1);
    rig.pci.write_config(start + 16, &[1]);
    rig.pci.write_config(start + 16, &[3]);
    assert_eq!(u64::from(rig.pci.status()), 3);
    let mut byte = [0];
    rig.pci.read_config(start + 16, &mut byte);
    assert_eq!(byte, [3]);
    // The first bytes of a longer access.
    let mut word = [0xee; 4];
    rig.pci.read_config(start + 16, &mut word);
    assert_eq!(word, [3, 0, 0, 0]);
    rig.pci.write_config(start + 16, &[0, 1, 1, 1]);
    assert_eq!(rig.pci.status(), 0);
    rig.pci.write_config(start + 16, &[1, 0]);
    rig.pci.write_config(start + 16, &[3, 0]);
    assert_eq!(rig.pci.status(), 3);
    // Another BAR, misaligned, beyond the end, no width: reads and writes have no effect.
    for (offset, length, bar) in [
        (0x14, 4, 0),
        (0x14, 1, 1),
        (0x11, 2, 0),
        (u32::MAX, 1, 0),
        (0x14, u32::MAX, 0),
        (0x14, 0, 0),
    ] {
        access(&mut rig, offset, length);
        rig.pci.write_config(start + 4, &[bar]);
        rig.pci.write_config(start + 16, &[0]);
        rig.pci.write_config(start + 16, &[0, 0]);
        rig.pci.read_config(start + 16, &mut [0; 4]);
        assert_eq!(u64::from(rig.pci.status()), 3, "{offset:#x} {length} {bar}");
    }
    // Any part of the data may be accessed: the access is as long as was set, and the rest of the
    // data stays.
    access(&mut rig, 0x08, 4);
    rig.pci.write_config(start + 16, &[0x11, 0x22]);
    rig.pci.write_config(start + 18, &[0x33]);
    assert_eq!(rig.r(0x08, 4), 0x0033_2211);
    rig.pci.write_config(start + 19, &[0x44]);
    assert_eq!(rig.r(0x08, 4), 0x4433_2211);
    rig.w(0x08, 4, 0x8877_6655);
    let mut part = [0; 2];
    rig.pci.read_config(start + 18, &mut part);
    assert_eq!(part, [0x77, 0x88]);
    access(&mut rig, 0x08, 0);
    rig.pci.read_config(start + 16, &mut word);
    assert_eq!(word, [0x55, 0x66, 0x77, 0x88]);
    let state = rig.pci.save();
    let mut other = super::tests::rig();
    other.pci.restore(&state, &[]).unwrap();
    other.pci.read_config(start + 16, &mut word);
    assert_eq!(word, [0x55, 0x66, 0x77, 0x88]);
}

#[test]
fn the_window_is_where_and_when_the_driver_wants_it() {
    let mut rig = rig();
    rig.pci.set_bar(0xc000_4000);
    assert_eq!((rig.pci.window(), rig.pci.bar()), (None, 0xc000_4000));
    rig.pci.write_config(4, &COMMAND_MEMORY.to_le_bytes());
    assert_eq!(rig.pci.window(), Some(0xc000_4000));
    rig.pci.write_config(0x10, &0xe000_1234u32.to_le_bytes());
    assert_eq!(rig.pci.window(), Some(0xe000_0000), "aligned");
    rig.pci.write_config(4, &[0]);
    assert_eq!(rig.pci.window(), None);
}

/// A device whose driver has done a lot, with a pending interrupt.
fn saved() -> (SavedPci, Vec<(u16, QueueState)>, Rig) {
    let mut rig = rig();
    rig.pci.set_bar(0xd000_0000);
    rig.pci.write_config(4, &[6]);
    rig.vectors();
    rig.start();
    rig.w(MSIX_TABLE + 16 + 12, 4, 1);
    rig.driver.add(&[], &[(0x8_0000, 32)]);
    rig.w(NOTIFY, 2, 0);
    rig.serve();
    rig.worker.with(|worker| worker.pause());
    let states = rig.worker.with(|worker| worker.queue_states());
    (rig.pci.save(), states, rig)
}

#[test]
fn a_restored_transport_goes_on_with_the_same_driver() {
    let (state, states, old) = saved();
    let mut new = rig();
    new.pci.restore(&state, &states).unwrap();
    assert_eq!(new.pci.save(), state);
    assert_eq!(new.pci.window(), Some(0xd000_0000));
    assert_eq!(
        (new.r(0x14, 1), new.r(0x1a, 2), new.r(PENDING, 8)),
        (15, 1, 2)
    );
    assert!(new.sent().is_empty());
    new.w(MSIX_TABLE + 16 + 12, 4, 0);
    assert_eq!(new.sent(), [71]);
    drop(old);
}

#[test]
fn a_restored_transport_has_the_selections_of_its_driver() {
    let (_, states, mut old) = saved();
    // The halves of both kinds of features, and a queue.
    let selections = [(0x00, 4, 5), (0x08, 4, 6), (0x16, 2, 7)];
    for (register, width, value) in selections {
        old.w(register, width, value);
    }
    let mut new = rig();
    new.pci.restore(&old.pci.save(), &states).unwrap();
    for (register, width, value) in selections {
        assert_eq!(new.r(register, width), value, "{register:#x}");
    }
}

#[test]
fn states_that_no_driver_can_have_made_are_refused_and_change_nothing() {
    let (state, states, _old) = saved();
    let damage: [fn(&mut SavedPci); 12] = [
        |s| s.transport.status = 4,
        |s| s.transport.features |= 1 << 60,
        |s| s.transport.queues.clear(),
        |s| s.transport.queues[0].desc_table = 1 << 40,
        |s| s.config[0] ^= 1,
        |s| s.config.truncate(255),
        |s| s.msix.pending = 4,
        |s| s.msix.table.clear(),
        |s| s.config_vector = 2,
        |s| s.queue_vectors[0] = 9,
        |s| s.queue_vectors.push(NO_VECTOR),
        |s| s.isr = 4,
    ];
    for (number, damage) in damage.into_iter().enumerate() {
        let mut rig = rig();
        let before = rig.pci.save();
        let mut bad = state.clone();
        damage(&mut bad);
        assert!(rig.pci.restore(&bad, &states).is_err(), "{number}");
        assert_eq!(rig.pci.save(), before, "{number}");
    }
    let mut rig = rig();
    assert!(
        rig.pci
            .restore(&state, &[(1, QueueState::default())])
            .is_err()
    );
}

#[test]
fn one_that_needed_a_reset_still_does() {
    let mut old = rig();
    old.vectors();
    old.start();
    old.irq.signal_needs_reset();
    let state = old.pci.save();
    let mut new = rig();
    new.pci.restore(&state, &[]).unwrap();
    assert_eq!(new.pci.status(), 15 | Status::DEVICE_NEEDS_RESET);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// After any reads and writes, with any width, status, queues and vectors are in a state that a
    /// driver can have caused, which a restore accepts; and a correct driver works afterwards.
    #[test]
    fn any_accesses_leave_a_state_that_can_be(
        accesses in prop::collection::vec(
            (any::<bool>(), any::<u16>(), any::<bool>(), prop::collection::vec(any::<u8>(), 0..9)),
            0..200,
        ),
    ) {
        let mut rig = rig();
        for (config, offset, read, mut data) in accesses {
            let bar = if offset & 0x4000 == 0 { offset & 0x3f } else { offset };
            match (config, read) {
                (true, true) => rig.pci.read_config((offset & 0x1ff).into(), &mut data),
                (true, false) => rig.pci.write_config((offset & 0x1ff).into(), &data),
                (false, true) => rig.pci.read_bar(bar.into(), &mut data),
                (false, false) => rig.pci.write_bar(bar.into(), &data),
            }
        }
        rig.worker.with(|worker| worker.pause());
        let states = rig.worker.with(|worker| worker.queue_states());
        let state = rig.pci.save();
        let mut other = super::tests::rig();
        prop_assert!(other.pci.restore(&state, &states).is_ok());
        rig.worker.with(|worker| worker.resume());
        rig.vectors();
        rig.start();
        rig.driver.add(&[], &[(0x8_0000, 8)]);
        rig.w(NOTIFY, 2, 0);
        rig.serve();
        prop_assert!(rig.driver.take_used().is_some());
    }
}
