//! The power button and the generation ID, for a guest that reads the register itself.

use kvm_bindings::{KVM_IRQCHIP_IOAPIC, kvm_irqchip};
use podvisor_devices::legacy::events::{IRQ, PORT};

use super::*;
use crate::boot::Smbios;
use crate::vm::{Action, BuildError, State};
use crate::{PowerButtonError, Transport};

const BUTTON: u8 = 1;
const GENERATION: u8 = 2;

/// Returns whether the line of events is high.
fn is_high(guest: &Guest) -> bool {
    let mut chip = kvm_irqchip {
        chip_id: KVM_IRQCHIP_IOAPIC,
        ..Default::default()
    };
    let vm = &guest.vm.context.machine.vm_fd;
    vm.get_irqchip(&mut chip).unwrap();
    // SAFETY: this chip's state is the union's member of that name; integers are valid for any bit
    // pattern.
    #[allow(unsafe_code)]
    let requests = unsafe { chip.chip.ioapic.irr };
    requests & 1 << IRQ != 0
}

fn generation_id(vm: &Vm) -> [u8; 16] {
    let mut id = [0; 16];
    assert_eq!(vm.read_memory(layout::GENERATION_ID, &mut id), 16);
    id
}

#[test]
fn a_press_is_one_bit_and_a_line_that_is_high_until_the_guest_has_read_it() {
    let guest = Guest::start(VmBuilder::power_button);
    assert_eq!((guest.input(PORT), is_high(&guest)), (0, false));
    guest.vm.press_power_button().unwrap();
    guest.vm.press_power_button().unwrap();
    assert!(is_high(&guest));
    guest.output(PORT, 0xff);
    assert!(is_high(&guest), "a write changes nothing");
    assert_eq!((guest.input(PORT), is_high(&guest)), (BUTTON, false));
    assert_eq!(guest.input(PORT), 0);
    guest.vm.press_power_button().unwrap();
    assert_eq!((is_high(&guest), guest.input(PORT)), (true, BUTTON));
}

#[test]
fn a_button_that_is_not_there_or_whose_vm_does_not_run_is_an_error() {
    let guest = Guest::start(|vm| vm);
    let error = guest.vm.press_power_button().unwrap_err();
    assert!(matches!(error, PowerButtonError::NoButton), "{error}");
    assert_eq!(guest.input(PORT), 0xff, "no register either");
    let other = Guest::start(VmBuilder::generation_id);
    let error = other.vm.press_power_button().unwrap_err();
    assert!(matches!(error, PowerButtonError::NoButton), "{error}");

    let illegal = |vm: &Vm, expected| {
        let error = vm.press_power_button().unwrap_err();
        let PowerButtonError::State(VmError::IllegalState { action, state }) = error else {
            panic!("{error}");
        };
        assert_eq!((action, state), (Action::PressPowerButton, expected));
    };
    let vm = tiny(OBEY).power_button().build().unwrap();
    illegal(&vm, State::Created);
    let guest = Guest::start(VmBuilder::power_button);
    guest.pause();
    illegal(&guest.vm, State::Paused);
    guest.vm.resume().unwrap();
    assert_eq!(guest.input(PORT), 0);
    guest.vm.stop().unwrap();
    illegal(&guest.vm, State::Stopped);
}

#[test]
fn what_a_guest_has_not_read_its_clone_reads_and_each_clone_is_of_a_new_generation() {
    let (_dir, place) = place();
    let guest = Guest::start(|vm| vm.power_button().generation_id());
    let first = generation_id(&guest.vm);
    assert_ne!(first, [0; 16]);
    assert_eq!(guest.input(PORT), 0, "a new machine is no news");
    guest.vm.press_power_button().unwrap();
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let snapshot = Snapshot::open(&place).unwrap();
    let clones = [(); 2].map(|()| Guest::restore(&snapshot, |vm| vm));
    let ids = clones.each_ref().map(|clone| generation_id(&clone.vm));
    assert!(ids[0] != ids[1] && !ids.contains(&first));
    for clone in clones {
        assert!(is_high(&clone));
        assert_eq!(clone.input(PORT), BUTTON | GENERATION);
        assert!(!is_high(&clone));
        clone.vm.press_power_button().unwrap();
        assert_eq!(clone.input(PORT), BUTTON);
    }
    guest.vm.resume().unwrap();
    assert_eq!(
        (guest.input(PORT), generation_id(&guest.vm)),
        (BUTTON, first)
    );
}

#[test]
fn a_guest_reads_how_many_cpus_there_are_and_is_told_of_more() {
    use podvisor_devices::legacy::events::{CPUS, Event};
    let count = PORT + u16::from(CPUS);
    let guest = Guest::start(|vm| vm.max_vcpus(4).cpu_hotplug());
    assert_eq!((guest.input(PORT), guest.input(count)), (0, 1));
    guest.vm.add_vcpus(3).unwrap();
    assert!(is_high(&guest));
    guest.output(count, 200);
    assert_eq!(guest.input(count), 3, "a write changes nothing");
    assert_eq!(
        (guest.input(PORT), is_high(&guest)),
        (Event::Cpus.bit(), false)
    );
    guest.vm.add_vcpus(3).unwrap();
    assert_eq!(guest.input(PORT), 0, "there are no more than before");
    guest.vm.add_vcpus(5).unwrap_err();
    assert_eq!((guest.input(PORT), guest.input(count)), (0, 3));

    // What the guest has not read, its clone reads.
    let (_dir, place) = place();
    guest.vm.add_vcpus(4).unwrap();
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let clone = Guest::restore(&Snapshot::open(&place).unwrap(), |vm| vm);
    assert!(is_high(&clone));
    assert_eq!(
        (clone.input(count), clone.input(PORT)),
        (4, Event::Cpus.bit())
    );
}

#[test]
fn accesses_of_any_width_to_any_port_of_events_change_no_number_of_cpus() {
    use podvisor_devices::legacy::events::{CPUS, Event, PORTS_WITH_SLOTS};
    let count = PORT + u16::from(CPUS);
    let alone = Guest::start(|vm| vm.max_vcpus(4).cpu_hotplug());
    let slots = Guest::start(|vm| {
        let vm = vm.transport(Transport::Pci).pci_hotplug();
        vm.max_vcpus(4).cpu_hotplug()
    });
    for guest in [alone, slots] {
        std::thread::scope(|scope| {
            let adder = scope.spawn(|| (2..4).for_each(|to| guest.vm.add_vcpus(to).unwrap()));
            for port in PORT..PORT + PORTS_WITH_SLOTS {
                for value in [0, 0x8000_0001, u32::MAX] {
                    for order in [Order::Out8, Order::In8, Order::Out32, Order::In32] {
                        guest.carry_out(order, port.into(), value);
                    }
                }
            }
            adder.join().unwrap();
        });
        guest.runs_on();
        guest.input(PORT);
        assert_eq!((guest.input(count), is_high(&guest)), (3, false));
        guest.vm.add_vcpus(4).unwrap();
        assert!(is_high(&guest));
        assert_eq!(guest.input(PORT), Event::Cpus.bit());
        assert_eq!(guest.input(count), 4);
    }
}

#[test]
fn a_guest_that_is_not_told_of_cpus_has_no_register_of_them() {
    use podvisor_devices::legacy::events::CPUS;
    let guest = Guest::start(|vm| vm.max_vcpus(2).power_button());
    guest.vm.add_vcpus(2).unwrap();
    assert_eq!(guest.input(PORT), 0);
    assert_eq!(guest.input(PORT + u16::from(CPUS)), 0xff);
}

#[test]
fn the_tables_name_the_machine_below_one_mebibyte_only_if_asked_to() {
    let tables = |vm: VmBuilder| {
        let vm = vm.build().unwrap();
        let mut all = vec![0; 0x1_0000];
        assert_eq!(vm.read_memory(layout::MP_TABLE, &mut all), all.len());
        all
    };
    let has = |all: &[u8], what: &[u8]| all.chunks(16).any(|bytes| bytes.starts_with(what));
    let without = tables(tiny(OBEY));
    assert!(has(&without, b"RSD PTR ") && !has(&without, b"_SM3_"));
    let identity = Smbios::new().serial("one");
    let with = tables(tiny(OBEY).smbios(identity).power_button().generation_id());
    assert!(has(&with, b"RSD PTR ") && has(&with, b"_SM3_"));
    let wrong = Smbios::new().serial("a\0b");
    let error = tiny(OBEY).smbios(wrong).build().unwrap_err();
    assert!(
        matches!(error, BuildError::Config(_)) && error.to_string().contains("serial"),
        "{error}"
    );
}
