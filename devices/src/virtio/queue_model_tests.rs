//! A driver and a device at a queue, compared with a model of the rings.

use super::*;
use crate::testing::{
    CountingInterrupt, DriverQueue, F_NEXT, F_WRITE, Used, memory, queue_resources,
};
use proptest::prelude::*;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering::SeqCst;

const BASE: u64 = 0x10000;
const BUF: u64 = 0x40000;
const SIZE: u16 = 8;

/// What a driver and a device do with a queue, in any order.
#[derive(Clone, Debug)]
enum Action {
    /// The driver makes a chain available of this many buffers.
    Add(u16),
    /// The device takes the next chain.
    Next,
    /// The device puts back the chain that it took last.
    Undo,
    /// The device completes some of the chains that it has, beginning with the one at this place,
    /// which become visible together.
    Complete(usize, usize),
    /// The device interrupts the driver, if that wants it.
    Notify,
    /// The driver takes what was used.
    Take,
    /// The driver wants no interrupts, or an interrupt that far beyond what it has taken.
    Want(bool, u16),
    /// The device wants no notifications.
    DisableKicks,
    /// The device wants notifications.
    EnableKicks,
    /// The device wants notifications of what is behind the chains that are available.
    EnableKicksForMore,
    /// The device is stopped and goes on from its positions, without chains.
    Restart,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        6 => (1u16..4).prop_map(Action::Add),
        6 => Just(Action::Next),
        1 => Just(Action::Undo),
        4 => (any::<usize>(), 1usize..4).prop_map(|(at, n)| Action::Complete(at, n)),
        3 => Just(Action::Notify),
        3 => Just(Action::Take),
        2 => (any::<bool>(), 0u16..6).prop_map(|(off, ahead)| Action::Want(off, ahead)),
        1 => Just(Action::DisableKicks),
        1 => Just(Action::EnableKicks),
        1 => Just(Action::EnableKicksForMore),
        1 => Just(Action::Restart),
    ]
}

/// A chain of the model.
#[derive(Clone, Copy, Debug)]
struct Added {
    head: u16,
    /// Bytes of its device-writable part.
    room: usize,
    /// Its place in the available ring.
    place: u16,
}

/// The rings as the specification describes them, with what either side should see.
struct Model {
    event_idx: bool,
    /// Not taken by the device.
    available: VecDeque<Added>,
    /// Taken by the device, in order.
    taken: Vec<(Chain, Added)>,
    /// Completed by the device and not taken by the driver: heads and lengths.
    used: VecDeque<Used>,
    /// Descriptors that no chain in the rings has.
    free: Vec<u16>,
    /// The descriptors of each head.
    chains: HashMap<u16, Vec<u16>>,
    /// The index of the next entry in each ring.
    avail_idx: u16,
    next_avail: u16,
    used_idx: u16,
    /// The used index at the last [`Action::Notify`].
    told_idx: u16,
    interrupts: u64,
}

impl Model {
    /// Whether the driver wants an interrupt now, by `flags` and `used_event` (§2.7.7).
    fn wants_interrupt(&self, flags: u16, used_event: u16) -> bool {
        let completed = self.used_idx.wrapping_sub(self.told_idx);
        if !self.event_idx {
            return completed > 0 && flags & 1 == 0;
        }
        // Whether the entry at this index is among those that were completed.
        (0..completed).any(|n| self.told_idx.wrapping_add(n) == used_event)
    }

    /// Whether the driver has to notify of the chain that it adds now (§2.7.10).
    fn wants_kick(&self, flags: u16, avail_event: u16) -> bool {
        match self.event_idx {
            false => flags & 1 == 0,
            true => self.avail_idx == avail_event,
        }
    }
}

/// A driver, a device and their model.
struct Compared {
    mem: GuestRam,
    driver: DriverQueue,
    queue: Queue,
    irq: Arc<CountingInterrupt>,
    model: Model,
    /// Whether the device wants to be notified of the next chain that is added.
    awaits_kick: Option<bool>,
}

impl Compared {
    fn new(event_idx: bool, start: u16) -> Self {
        let mem = memory(1 << 20);
        let mut driver = DriverQueue::new(&mem, BASE, SIZE);
        // Indices wrap around.
        driver.begin_at(start);
        let irq = Arc::new(CountingInterrupt::default());
        let state = QueueState {
            next_avail: start,
            next_used: start,
        };
        let model = Model {
            event_idx,
            available: Default::default(),
            taken: Vec::new(),
            used: Default::default(),
            free: (0..SIZE).collect(),
            chains: Default::default(),
            avail_idx: start,
            next_avail: start,
            used_idx: start,
            told_idx: start,
            interrupts: 0,
        };
        let queue = Self::queue(&mem, &driver, irq.clone(), event_idx, state);
        Self {
            mem,
            driver,
            queue,
            irq,
            model,
            awaits_kick: None,
        }
    }

    fn queue(
        mem: &GuestRam,
        driver: &DriverQueue,
        irq: Arc<CountingInterrupt>,
        event_idx: bool,
        state: QueueState,
    ) -> Queue {
        let mut resources = queue_resources(mem, irq);
        resources.event_idx = event_idx;
        resources.state = state;
        Queue::new(0, SIZE, &driver.config(), resources).unwrap()
    }

    fn half(&self, at: u64) -> u16 {
        self.mem.read_obj(GuestAddress(at)).unwrap()
    }

    /// Makes a chain available in descriptors that are free, in an order that is not theirs.
    fn add(&mut self, buffers: u16) {
        let count = usize::from(buffers);
        if self.model.free.len() < count {
            return;
        }
        let config = self.driver.config();
        let avail_event = self.half(config.used_ring + 4 + 8 * u64::from(SIZE));
        let kick = self
            .model
            .wants_kick(self.half(config.used_ring), avail_event);
        if let Some(awaits) = self.awaits_kick {
            // With event indices, off is only a hint: an old event may be passed again.
            let matters = awaits || !self.model.event_idx;
            assert!(!matters || kick == awaits, "kick {kick}, awaited {awaits}");
        }
        let at = self.model.free.len() - count;
        let descriptors = self.model.free.split_off(at);
        let room = 10 * usize::from(buffers);
        for (n, descriptor) in descriptors.iter().enumerate() {
            let next = descriptors.get(n + 1);
            let flags = F_WRITE | next.map_or(0, |_| F_NEXT);
            self.driver
                .descriptor(*descriptor, BUF, 10, flags, next.copied().unwrap_or(0));
        }
        let head = descriptors[0];
        self.driver.make_available(head);
        let place = self.model.avail_idx;
        self.model.available.push_back(Added { head, room, place });
        self.model.avail_idx = place.wrapping_add(1);
        self.model.chains.insert(head, descriptors);
        if self.model.event_idx {
            // An index is passed once.
            self.awaits_kick = None;
        }
    }

    /// Puts the chain that was taken last back, if the device still has it.
    fn undo(&mut self) -> bool {
        let last = self.model.next_avail.wrapping_sub(1);
        let is_last = |(_, added): &mut (Chain, Added)| added.place == last;
        let Some((chain, added)) = self.model.taken.pop_if(is_last) else {
            return false;
        };
        self.queue.undo_pop(chain);
        self.model.next_avail = added.place;
        self.model.available.push_front(added);
        true
    }

    fn complete(&mut self, at: usize, count: usize) {
        let taken = &mut self.model.taken;
        let mut chains = Vec::new();
        for _ in 0..count.min(taken.len()) {
            let (chain, Added { head, room, .. }) = taken.remove(at % taken.len());
            let len = u32::try_from((at ^ usize::from(head)) % (room + 1)).unwrap();
            let id = u32::from(head);
            self.model.used.push_back(Used { id, len });
            self.model.used_idx = self.model.used_idx.wrapping_add(1);
            chains.push((chain, len));
        }
        self.queue.complete_all(chains).unwrap();
    }

    fn notify(&mut self) {
        let avail = self.driver.config().avail_ring;
        let used_event = self.half(avail + 4 + 2 * u64::from(SIZE));
        if self.model.wants_interrupt(self.half(avail), used_event) {
            self.model.interrupts += 1;
        }
        self.model.told_idx = self.model.used_idx;
        self.queue.notify().unwrap();
    }

    fn take(&mut self) {
        while let Some(used) = self.driver.take_used() {
            assert_eq!(Some(used), self.model.used.pop_front());
            let head = u16::try_from(used.id).unwrap();
            self.model
                .free
                .extend(self.model.chains.remove(&head).unwrap());
        }
        assert!(self.model.used.is_empty(), "{:?}", self.model.used);
    }

    fn act(&mut self, action: &Action) {
        match *action {
            Action::Add(buffers) => self.add(buffers),
            Action::Next => match (self.queue.next().unwrap(), self.model.available.pop_front()) {
                (Some(chain), Some(added)) => {
                    let took = (chain.head(), chain.writable_len());
                    assert_eq!(took, (added.head, added.room));
                    self.model.next_avail = added.place.wrapping_add(1);
                    self.model.taken.push((chain, added));
                }
                (None, None) => {}
                (chain, added) => panic!("{chain:?} instead of {added:?}"),
            },
            Action::Undo => {
                self.undo();
            }
            Action::Complete(at, count) => self.complete(at, count),
            Action::Notify => self.notify(),
            Action::Take => self.take(),
            Action::Want(off, ahead) => {
                let avail = self.driver.config().avail_ring;
                self.mem
                    .write_obj(u16::from(off), GuestAddress(avail))
                    .unwrap();
                let event = self.model.used_idx.wrapping_add(ahead).wrapping_sub(2);
                let at = avail + 4 + 2 * u64::from(SIZE);
                self.mem.write_obj(event, GuestAddress(at)).unwrap();
            }
            Action::DisableKicks => {
                self.queue.disable_kicks().unwrap();
                self.awaits_kick = Some(false);
            }
            Action::EnableKicks => {
                let more = self.queue.enable_kicks().unwrap();
                assert_eq!(more, !self.model.available.is_empty());
                // If there are more, it polls instead.
                self.awaits_kick = (!more).then_some(true);
            }
            Action::EnableKicksForMore => {
                let available = self.queue.enable_kicks_for_more().unwrap();
                assert_eq!(usize::from(available), self.model.available.len());
                self.awaits_kick = Some(true);
            }
            Action::Restart => {
                while self.undo() {}
                self.complete(0, usize::from(SIZE));
                self.notify();
                let (irq, state) = (self.irq.clone(), self.queue.state());
                let event_idx = self.model.event_idx;
                self.queue = Self::queue(&self.mem, &self.driver, irq, event_idx, state);
                self.awaits_kick = None;
            }
        }
    }
}

proptest! {
    /// Chains come out in order, come back once with their lengths, and either side is notified
    /// exactly when it asked for that.
    #[test]
    fn a_queue_is_what_the_specification_says(
        event_idx: bool,
        start: u16,
        actions in proptest::collection::vec(action(), 1..200),
    ) {
        let mut compared = Compared::new(event_idx, start);
        for action in &actions {
            compared.act(action);
            let interrupts = compared.irq.queue.load(SeqCst);
            prop_assert_eq!(interrupts, compared.model.interrupts, "after {:?}", action);
            let state = compared.queue.state();
            let model = &compared.model;
            prop_assert_eq!(
                (state.next_avail, state.next_used),
                (model.next_avail, model.used_idx)
            );
        }
        compared.complete(0, usize::from(SIZE));
        compared.take();
    }
}
