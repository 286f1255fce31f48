//! Keeps BARs where guests move them: on the VM's bus, and in KVM's list of notification addresses.
//!
//! Of BARs that overlap, the one that was there first answers; the other one does when the place is
//! free. A BAR that overlaps guest memory, or an APIC, does not answer: KVM finds those first.

use std::collections::BTreeMap;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use podvisor_devices::virtio::RateLimit;
use podvisor_devices::virtio::transport::pci::{BAR_SIZE, NOTIFY, NOTIFY_MULTIPLIER};
use vmm_sys_util::eventfd::EventFd;

use crate::vm::hardware::bus::{AddressMap, BusDevice};

/// The BARs of all functions.
#[derive(Debug)]
pub(super) struct Windows {
    vm: Arc<VmFd>,
    /// Weak, since the map holds functions, and they hold this.
    mmio: Weak<AddressMap>,
    /// By slot.
    windows: Mutex<BTreeMap<u8, BarWindow>>,
}

#[derive(Debug)]
struct BarWindow {
    function: Weak<dyn BusDevice>,
    /// Where the guest wants it to be.
    wanted: Option<u64>,
    /// Where it answers.
    mapped: Option<u64>,
    doorbells: Doorbells,
}

impl Windows {
    pub(super) fn new(vm: &Arc<VmFd>, mmio: &Arc<AddressMap>) -> Self {
        Self {
            vm: vm.clone(),
            mmio: Arc::downgrade(mmio),
            windows: Mutex::new(BTreeMap::new()),
        }
    }

    /// Adds a function with its BAR disabled.
    pub(super) fn add(&self, slot: u8, function: &Arc<dyn BusDevice>, kicks: Vec<Arc<EventFd>>) {
        let window = BarWindow {
            function: Arc::downgrade(function),
            wanted: None,
            mapped: None,
            doorbells: Doorbells::new(kicks),
        };
        self.lock().insert(slot, window);
    }

    /// Removes the function in `slot`. A vCPU that still writes its configuration space then has
    /// nothing to move.
    pub(super) fn remove(&self, slot: u8) {
        let mut windows = self.lock();
        let Some(mut window) = windows.remove(&slot) else {
            return;
        };
        window.doorbells.remove(&self.vm);
        if let (Some(mmio), Some(mapped)) = (self.mmio.upgrade(), window.mapped) {
            mmio.remove(mapped);
            self.map_waiting(&mut windows, &mmio);
        }
    }

    /// Registers notification addresses of a BAR at `address`, which is not enabled yet. Those of a
    /// BAR that answers there stay.
    pub(super) fn prepare(&self, slot: u8, address: u64) {
        let mut windows = self.lock();
        let mut others = windows.iter().filter(|(other, _)| **other != slot);
        if others.all(|(_, other)| other.mapped != Some(address)) {
            self.ring_at(&mut windows, slot, address);
        }
    }

    /// The guest wants the BAR of `function` to be at `wanted`, or nowhere. Its slot may already
    /// have another one.
    pub(super) fn set(&self, slot: u8, function: &dyn BusDevice, wanted: Option<u64>) {
        let mut windows = self.lock();
        let Some(mmio) = self.mmio.upgrade() else {
            return;
        };
        let is_this = |of: &&mut BarWindow| ptr::addr_eq(of.function.as_ptr(), function);
        let Some(window) = windows.get_mut(&slot).filter(is_this) else {
            return;
        };
        window.wanted = wanted;
        if window.mapped != wanted
            && let Some(mapped) = window.mapped.take()
        {
            mmio.remove(mapped);
        }
        self.map_waiting(&mut windows, &mmio);
    }

    /// Maps those that had no place and may have it now.
    fn map_waiting(&self, windows: &mut BTreeMap<u8, BarWindow>, mmio: &AddressMap) {
        let waiting: Vec<(u8, u64)> = windows
            .iter()
            .filter(|(_, window)| window.mapped.is_none())
            .filter_map(|(slot, window)| Some((*slot, window.wanted?)))
            .collect();
        for (slot, address) in waiting {
            let Some(window) = windows.get_mut(&slot) else {
                continue;
            };
            let Some(function) = window.function.upgrade() else {
                continue;
            };
            if mmio.insert(address, BAR_SIZE.into(), function).is_ok() {
                window.mapped = Some(address);
                self.ring_at(windows, slot, address);
            } else {
                tracing::debug!(slot, address, "a BAR lies over another one");
            }
        }
    }

    /// Moves notification addresses. Those of a disabled BAR stay where they are until they are
    /// moved, or until another BAR takes the place: guests disable BARs to find their size, and
    /// enable them again.
    fn ring_at(&self, windows: &mut BTreeMap<u8, BarWindow>, slot: u8, address: u64) {
        let others = windows.iter_mut().filter(|(other, _)| **other != slot);
        for (_, other) in others {
            // All BARs have the same size, and are aligned to it.
            if other.doorbells.at == Some(address) {
                other.doorbells.remove(&self.vm);
            }
        }
        if let Some(window) = windows.get_mut(&slot) {
            window.doorbells.move_to(&self.vm, address);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u8, BarWindow>> {
        self.windows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The notification addresses of a device: KVM writes an eventfd instead of leaving the guest.
#[derive(Debug)]
struct Doorbells {
    /// One per queue.
    kicks: Vec<Arc<EventFd>>,
    /// The BAR's address that they are registered for.
    at: Option<u64>,
    /// Rate-limits a log event, since guests may move BARs often.
    log: RateLimit,
}

impl Doorbells {
    fn new(kicks: Vec<Arc<EventFd>>) -> Self {
        Self {
            kicks,
            at: None,
            log: RateLimit::new(Duration::from_secs(10)),
        }
    }

    fn move_to(&mut self, vm: &VmFd, bar: u64) {
        if self.at == Some(bar) {
            return;
        }
        self.remove(vm);
        for (kick, address) in self.kicks.iter().zip(addresses(bar)) {
            // Any value means the queue of the address: KVM need not decode the instruction.
            if let Err(error) = vm.register_ioevent(kick, &address, NoDatamatch) {
                // Notifications then leave the guest, and are served nevertheless.
                if let Some(suppressed) = self.log.permit() {
                    tracing::warn!(%error, bar, suppressed, "KVM_IOEVENTFD failed");
                }
            }
        }
        self.at = Some(bar);
    }

    fn remove(&mut self, vm: &VmFd) {
        let Some(bar) = self.at.take() else {
            return;
        };
        for (kick, address) in self.kicks.iter().zip(addresses(bar)) {
            // Unregistering one that was not registered fails, which is harmless.
            let _ = vm.unregister_ioevent(kick, &address, NoDatamatch);
        }
    }
}

fn addresses(bar: u64) -> impl Iterator<Item = IoEventAddress> {
    let first = bar + NOTIFY;
    (first..)
        .step_by(NOTIFY_MULTIPLIER as usize)
        .map(IoEventAddress::Mmio)
}
