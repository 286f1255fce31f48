//! How devices interrupt, and which of that state a snapshot keeps.

use std::sync::OnceLock;

use podvisor_devices::blk::{BlockDevice, FileDisk};
use podvisor_devices::virtio::{
    DeviceInfo, Fault, Placement, Progress, Queue, SavedDevice, StartError, VirtioDevice,
};

use super::*;
use crate::vm::tests::devices::one_queue;
use crate::vm::{BalloonHandle, Seccomp};

#[test]
fn a_driver_starts_a_device_and_is_interrupted_by_a_message() {
    let guest = on_pci(VmBuilder::rng);
    let rng = guest.function(1);
    // The APIC accepts interrupts; the guest does not, so that they stay visible there.
    guest.write(APIC + 0xf0, 0x1ff);
    rng.set_vector(0, 0x50, false);
    rng.set_vector(1, 0x51, false);
    rng.set_msix(MSIX_ON);
    let mut queue = rng.start(RINGS, 1);
    assert_eq!(
        (rng.status(), rng.read16(0x12), rng.read16(0x1a)),
        (15, 1, 1)
    );
    fill(rng, &mut queue, 64);
    assert_eq!(guest.counter("rng0", "random_bytes"), 64);
    wait_for("the message", || guest.requested(0x51));
    assert!(!guest.requested(0x50));
}

#[test]
fn a_message_interrupts_the_processor_that_it_names_and_no_other() {
    // The test sets the state of APICs on threads that may not.
    let guest = on_pci(|vm| vm.vcpus(2).rng().seccomp(Seccomp::Off));
    let rng = guest.function(1);
    // As each of them would allow interrupts: the second one is not brought up.
    guest.pause();
    let allow = |vcpu: &mut kvm_ioctls::VcpuFd| {
        let mut lapic = vcpu.get_lapic().unwrap();
        lapic.regs[0xf1] = 1;
        vcpu.set_lapic(&lapic).unwrap();
    };
    guest.vm.control().with_vcpus(allow).unwrap();
    guest.vm.resume().unwrap();
    rng.set_msix(MSIX_ON);
    for (named, vector) in [(1, 0x50), (0, 0x51)] {
        rng.set_vector(1, vector, false);
        let address = APIC | (named as u64) << 12;
        rng.write(MSIX_TABLE + 16, u32::try_from(address).unwrap());
        let mut queue = rng.start(RINGS, 1);
        fill(rng, &mut queue, 8);
        wait_for("the message", || guest.requested_of(named, vector));
        assert!(!guest.requested_of(1 - named, vector));
    }
}

#[test]
fn a_masked_vector_is_pending_until_it_is_unmasked() {
    let guest = on_pci(VmBuilder::rng);
    let rng = guest.function(1);
    guest.write(APIC + 0xf0, 0x1ff);
    rng.set_vector(1, 0x61, true);
    rng.set_msix(MSIX_ON);
    let mut queue = rng.start(RINGS, 1);
    fill(rng, &mut queue, 8);
    wait_for("the pending bit", || rng.read(PENDING) == 2);
    assert!(!guest.requested(0x61));
    rng.write(MSIX_TABLE + 16 + 12, 0);
    assert_eq!(rng.read(PENDING), 0);
    assert!(guest.requested(0x61));
    // All vectors masked.
    rng.set_vector(1, 0x62, false);
    rng.set_msix(MSIX_ON_MASKED);
    fill(rng, &mut queue, 8);
    wait_for("the pending bit", || rng.read(PENDING) == 2);
    assert!(!guest.requested(0x62));
    rng.set_msix(MSIX_ON);
    assert!(guest.requested(0x62) && rng.read(PENDING) == 0);
}

#[test]
fn a_change_of_configuration_is_a_message_of_its_own() {
    let guest = on_pci(|vm| vm.block(BlockDevice::spare()));
    let slot = guest.function(1);
    guest.write(APIC + 0xf0, 0x1ff);
    slot.set_vector(0, 0x70, false);
    slot.set_msix(MSIX_ON);
    let mut queue = slot.start(RINGS, NO_VECTOR);
    slot.write16(0x10, 0);
    assert_eq!(slot.read(DEVICE), 1, "one sector");
    let generation = guest.carry_out(Order::Read8, slot.bar + 0x15, 0);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[7; 8 * 512]).unwrap();
    let disk = FileDisk::new(file).unwrap();
    guest
        .vm
        .block("blk0")
        .unwrap()
        .replace_disk(Box::new(disk), "x")
        .unwrap();
    wait_for("the message", || guest.requested(0x70));
    assert_ne!(
        guest.carry_out(Order::Read8, slot.bar + 0x15, 0),
        generation
    );
    assert_eq!(slot.read(DEVICE), 8);
    assert_eq!(request(slot, &mut queue, 0, 512), 0);
}

/// A device that inflates another one's balloon while its own state is saved.
#[derive(Debug)]
struct Inflates(Arc<OnceLock<BalloonHandle>>);

impl VirtioDevice for Inflates {
    fn info(&self) -> DeviceInfo {
        one_queue()
    }
    fn start_queue(&mut self, _: Queue) -> Result<(), StartError> {
        Ok(())
    }
    fn stop_queue(&mut self, _: u16) -> Option<Queue> {
        None
    }
    fn on_queue(&mut self, _: u16) -> Result<Progress, Fault> {
        Ok(Progress::Idle)
    }
    fn placement(&self) -> Placement {
        Placement::Own
    }
    fn save(&self) -> SavedDevice {
        let balloon = self.0.get().unwrap();
        balloon.set_target(MemorySize::mib(1)).unwrap();
        SavedDevice::default()
    }
}

#[test]
fn a_change_of_configuration_during_a_snapshot_is_in_it_with_its_message() {
    let (_dir, place) = place();
    let known = Arc::new(OnceLock::new());
    let guest = on_pci(|vm| vm.device(Inflates(known.clone())).balloon());
    known.set(guest.vm.balloon().unwrap()).unwrap();
    let balloon = guest.function(2);
    guest.write(APIC + 0xf0, 0x1ff);
    balloon.set_vector(0, 0x70, false);
    balloon.set_msix(MSIX_ON);
    balloon.start(RINGS, NO_VECTOR);
    balloon.write16(0x10, 0);
    assert_eq!(balloon.read(DEVICE), 0, "pages that the host wants");
    assert!(!guest.requested(0x70));
    guest.pause();
    guest.vm.snapshot(&place).unwrap();

    let snapshot = Snapshot::open(&place).unwrap();
    let clone = Guest::restore(&snapshot, |vm| vm.device(Inflates(known)).balloon());
    assert_eq!(balloon.of(&clone).read(DEVICE), 256);
    assert!(clone.requested(0x70), "the driver does not hear of it");
}

#[test]
fn a_restored_device_is_where_its_driver_put_it_with_what_was_pending() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("snapshot");
    let guest = on_pci(|vm| vm.rng().rng());
    let mut rng = guest.function(2);
    rng.move_to(0xd123_4000);
    guest.write(APIC + 0xf0, 0x1ff);
    rng.set_vector(1, 0x61, true);
    rng.set_msix(MSIX_ON);
    let mut queue = rng.start(RINGS, 1);
    fill(rng, &mut queue, 8);
    wait_for("the pending bit", || rng.read(PENDING) == 2);
    guest.carry_out(Order::Out32, 0xcf8, 1 << 31 | 2 << 11);
    guest.pause();
    queue.add(&[], &[(BUFFER, 32)]);
    guest.vm.snapshot(&place).unwrap();

    let snapshot = Snapshot::open(&place).unwrap();
    for _ in 0..2 {
        let clone = Guest::restore(&snapshot, |vm| vm.rng().rng());
        let rng = Function {
            guest: &clone,
            ..rng
        };
        let mut queue = queue.clone_in(&clone.mem);
        wait_for("the chain", || queue.take_used().is_some());
        assert_eq!(
            clone.carry_out(Order::In32, 0xcfc, 0),
            0x1044_1af4,
            "the address is kept"
        );
        assert_eq!((rng.status(), rng.read(PENDING)), (15, 2));
        rng.write(MSIX_TABLE + 16 + 12, 0);
        assert!(clone.requested(0x61));
        let exits = clone.counter("vcpu", "mmio_exits");
        fill(rng, &mut queue, 16);
        assert_eq!(clone.counter("vcpu", "mmio_exits"), exits);
        // The other one was never enabled.
        let other = clone.function(1);
        let mut queue = other.start(RINGS + 0x10_0000, NO_VECTOR);
        fill(other, &mut queue, 8);
    }
    let error = snapshot.builder().rng().build().map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("[rng0, rng1]"), "{error}");
}
