//! Devices that are added and removed while a guest runs.

use podvisor_devices::blk::{BlockDevice, FileDisk};
use podvisor_devices::mem::{MemDevice, MemRegion};
use podvisor_devices::pci::{NO_VECTOR, PciFunction};
use podvisor_devices::pmem::PmemDevice;
use podvisor_devices::rng::RngDevice;
use podvisor_devices::vsock::VsockDevice;

use super::devices::{BUFFER, RINGS, bytes, fill, request};
use super::pci::on_pci;
use super::*;
use crate::vm::control::Outcome;
use crate::vm::devices::attach::TransportRegisters;
use crate::vm::{Action, HandleError, PlugError, State};
use crate::{PciAddress, Transport, VmExit};

fn disk(byte: u8) -> BlockDevice {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[byte; 8 * 512]).unwrap();
    BlockDevice::new(Box::new(FileDisk::new(file).unwrap()))
}

#[test]
fn a_device_that_does_not_fit_leaves_no_place_behind() {
    let fill = |vm: VmBuilder| (1..=30).fold(vm, |vm, _| vm.rng());
    let guest = on_pci(fill);
    let last = guest.vm.plug(RngDevice::new()).unwrap();
    let places = || {
        let rng = guest.vm.device::<RngDevice>("rng0").unwrap();
        // The loop is asked, between two turns.
        rng.run(|_| ()).unwrap();
        guest.vm.counters().len()
    };
    let before = places();
    for _ in 0..3 {
        let error = guest.vm.plug(RngDevice::new()).unwrap_err();
        assert!(
            matches!(error, PlugError::Build(crate::BuildError::NoPciSlot)),
            "{error}"
        );
    }
    assert_eq!(places(), before);
    // A place that is free again is a device's.
    guest.vm.unplug(&last.name).unwrap();
    let again = guest.vm.plug(RngDevice::new()).unwrap();
    assert_eq!((again.name, again.address), (last.name, last.address));
}

#[test]
fn a_disk_is_plugged_in_used_and_unplugged_again_and_again() {
    let guest = on_pci(VmBuilder::rng);
    let rng = guest.function(1);
    let mut random = rng.start(RINGS, NO_VECTOR);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let least = || (0..20).map(|_| descriptors()).min().unwrap();
    let before = least();
    for round in 0..10u8 {
        // With threads for queues and without.
        let queues = 1 + u16::from(round % 2) * 3;
        let plugged = guest.vm.plug(disk(round).queues(queues)).unwrap();
        assert_eq!(plugged.name, "blk0");
        assert_eq!(plugged.address, PciAddress { slot: 2 });
        assert_eq!(guest.config(2, 0), 0x1042_1af4);
        let function = guest.function(2);
        let mut queue = function.start(RINGS + 0x10_0000, NO_VECTOR);
        assert_eq!(request(function, &mut queue, 0, 512), 0);
        assert_eq!(bytes(&guest, BUFFER, 4), [round; 4]);
        let handle = guest.vm.block("blk0").unwrap();
        fill(rng, &mut random, 8);
        guest.vm.unplug("blk0").unwrap();
        assert_eq!((guest.config(2, 0), function.read(0)), (u32::MAX, u32::MAX));
        assert!(matches!(
            handle.resize(),
            Err(HandleError::NotRunning { .. })
        ));
        assert!(guest.vm.block("blk0").is_err());
    }
    fill(rng, &mut random, 8);
    // Other tests run meanwhile, and have more descriptors and then fewer.
    wait_for("the end of what was plugged in", || {
        descriptors() < before + 10
    });
}

#[test]
fn a_guest_is_told_of_devices_and_releases_them_when_it_is_asked() {
    use podvisor_devices::legacy::events::{ASKED, Event, INSERTED, PORT, RELEASED};
    let guest = on_pci(|vm| vm.rng().pci_hotplug());
    let port = |at: u8| PORT + u16::from(at);
    let told = || [INSERTED, ASKED].map(|at| guest.carry_out(Order::In32, port(at).into(), 0));
    let release = |slots| {
        guest.carry_out(Order::Out32, port(RELEASED).into(), slots);
    };
    assert_eq!((guest.input(PORT), told()), (0, [0, 0]));
    let plugged = guest.vm.plug(disk(1)).unwrap();
    let bit = 1u32 << plugged.address.slot;
    assert_eq!(guest.input(PORT), Event::PciSlots.bit());
    assert_eq!((told(), told()), ([bit, 0], [0, 0]));
    // What the guest ejects by itself stays.
    release(bit);
    assert!(guest.vm.block("blk0").is_ok());
    // A guest that does not answer.
    let asked = guest.vm.request_unplug("blk0").unwrap();
    assert!(!asked.wait(Duration::ZERO));
    assert_eq!(
        (guest.input(PORT), told()),
        (Event::PciSlots.bit(), [0, bit])
    );
    release(!bit);
    assert!(!asked.wait(Duration::ZERO), "others are not it");
    release(bit);
    assert!(asked.wait(Duration::from_secs(60)));
    guest.vm.unplug("blk0").unwrap();
    let error = guest.vm.request_unplug("blk0").unwrap_err();
    assert!(matches!(error, PlugError::Device(_)), "{error}");
    // One that is taken away before the guest has looked is no news.
    guest.vm.plug(disk(1)).unwrap();
    guest.vm.unplug("blk0").unwrap();
    assert_eq!(told(), [0, 0]);
}

#[test]
fn a_guest_without_slots_cannot_be_asked() {
    let guest = on_pci(|vm| vm.power_button());
    guest.vm.plug(disk(1)).unwrap();
    let error = guest.vm.request_unplug("blk0").unwrap_err();
    assert!(matches!(error, PlugError::NotTold), "{error}");
    assert_eq!(guest.input(podvisor_devices::legacy::events::PORT), 0);
}

#[test]
fn a_slot_that_got_a_disk_is_unplugged_as_any_other() {
    let guest = on_pci(|vm| vm.rng().block(BlockDevice::spare()));
    let function = guest.function(2);
    let mut queue = function.start(RINGS, NO_VECTOR);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[3; 8 * 512]).unwrap();
    let medium = FileDisk::new(file).unwrap();
    guest.vm.insert_disk("blk0", Box::new(medium), "").unwrap();
    assert_eq!(request(function, &mut queue, 0, 512), 0);
    assert_eq!(bytes(&guest, BUFFER, 4), [3; 4]);
    guest.vm.unplug("blk0").unwrap();
    assert!(guest.vm.block("blk0").is_err());
    guest.pause();
    guest.vm.resume().unwrap();
    guest.vm.stop().unwrap();
}

#[test]
fn a_device_that_cannot_work_is_refused_by_name() {
    let guest = on_pci(VmBuilder::rng);
    let region = MemRegion {
        start: 1 << 32,
        len: 128 << 20,
    };
    let error = guest.vm.plug(MemDevice::new(region).unwrap()).unwrap_err();
    assert!(matches!(&error, PlugError::Memory), "{error}");
    let vsock = |cid| VsockDevice::in_process(cid).unwrap();
    guest.vm.plug(vsock(3)).unwrap();
    let error = guest.vm.plug(vsock(4)).unwrap_err();
    assert!(
        matches!(&error, PlugError::SecondSocket { there } if there == "vsock0"),
        "{error}"
    );
    guest.vm.unplug("vsock0").unwrap();
    assert_eq!(guest.vm.plug(vsock(4)).unwrap().name, "vsock0");
}

#[test]
fn devices_share_a_loop_or_have_their_own_as_those_that_were_built_in() {
    // None of them exists from the start, and so no loop.
    let guest = on_pci(|vm| vm);
    let plugged = [
        guest.vm.plug(RngDevice::new()),
        guest.vm.plug(RngDevice::new()),
        guest.vm.plug(VsockDevice::in_process(3).unwrap()),
        guest.vm.plug(disk(1)),
    ];
    let names = plugged.map(|plugged| plugged.unwrap().name);
    assert_eq!(names, ["rng0", "rng1", "vsock0", "blk0"]);
    let [one, two] = [1, 2].map(|slot| guest.function(slot));
    let mut first = one.start(RINGS, NO_VECTOR);
    let mut second = two.start(RINGS + 0x10_0000, NO_VECTOR);
    fill(one, &mut first, 16);
    fill(two, &mut second, 16);
    // The neighbour keeps working, and a pause reaches all of them.
    guest.vm.unplug("rng0").unwrap();
    guest.pause();
    guest.vm.resume().unwrap();
    fill(two, &mut second, 16);
    assert_eq!(guest.vm.plug(RngDevice::new()).unwrap().name, "rng0");
    let again = guest.function(1);
    let mut first = again.start(RINGS, NO_VECTOR);
    fill(again, &mut first, 16);
    guest.vm.stop().unwrap();
}

#[test]
fn a_device_that_is_unplugged_under_its_driver_is_gone_and_the_guest_runs_on() {
    let guest = on_pci(|vm| vm.rng().rng());
    let (one, two) = (guest.function(1), guest.function(2));
    let mut first = one.start(RINGS, NO_VECTOR);
    let mut second = two.start(RINGS + 0x10_0000, NO_VECTOR);
    first.add(&[], &[(BUFFER, 0x1_0000)]);
    one.notify();
    guest.vm.unplug("rng0").unwrap();
    for offset in [0, 0x14, 0x1000, 0x2000, 0x3000] {
        assert_eq!(one.read(offset), u32::MAX);
        one.write(offset, 0);
    }
    one.notify();
    fill(two, &mut second, 8);
}

#[test]
fn a_late_write_of_a_device_that_is_gone_does_not_move_the_next_one_in_its_slot() {
    let guest = on_pci(VmBuilder::rng);
    guest.function(1);
    let TransportRegisters::Pci(old) = crate::vm::lock::lock(&guest.vm.devices)[0]
        .registers
        .clone()
    else {
        panic!("it is on PCI");
    };
    guest.vm.unplug("rng0").unwrap();
    // As if by a vCPU that was already on its way.
    old.write_config(4, &[0]);
    guest.vm.plug(RngDevice::new()).unwrap();
    let rng = guest.function(1);
    let mut queue = rng.start(RINGS, NO_VECTOR);
    fill(rng, &mut queue, 8);
    for command in [6, 0] {
        old.write_config(4, &[command]);
        fill(rng, &mut queue, 8);
        assert_eq!(
            rng.read(8),
            1,
            "its registers answer: what the driver selected"
        );
    }
}

#[test]
fn what_cannot_be_plugged_or_unplugged_is_an_error_in_words() {
    let guest = Guest::start(VmBuilder::rng);
    let error = guest.vm.plug(RngDevice::new()).unwrap_err();
    assert!(error.to_string().contains("Transport::Pci"), "{error}");
    assert!(matches!(guest.vm.unplug("rng0"), Err(PlugError::NotPci)));

    let vm = tiny(OBEY).transport(Transport::Pci).build().unwrap();
    let error = vm.plug(RngDevice::new()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot plug a device into a VM that is created"
    );
    drop(vm);

    let guest = on_pci(VmBuilder::rng);
    let error = guest.vm.unplug("blk0").unwrap_err();
    assert!(error.to_string().contains("rng0"), "{error}");
    for _ in 0..30 {
        guest.vm.plug(RngDevice::new()).unwrap();
    }
    let error = guest.vm.plug(RngDevice::new()).unwrap_err();
    assert!(error.to_string().contains("no free slot"), "{error}");
    guest.vm.unplug("rng7").unwrap();
    assert_eq!(guest.vm.plug(RngDevice::new()).unwrap().name, "rng7");
    guest.vm.stop().unwrap();
    assert!(guest.vm.plug(RngDevice::new()).is_err());
}

#[test]
fn a_device_is_plugged_in_and_unplugged_by_the_id_of_its_program() {
    let guest = on_pci(|vm| vm.device_as("root", disk(1)));
    assert_eq!(guest.vm.plug_as("data", disk(2)).unwrap().name, "data");
    assert_eq!(guest.vm.plug(disk(3)).unwrap().name, "blk0");
    for (id, why) in [
        ("root", "another device"),
        ("data", "another device"),
        ("blk7", "without an id"),
        ("a b", "letters"),
    ] {
        let error = guest.vm.plug_as(id, disk(4)).unwrap_err().to_string();
        assert!(error.contains(id) && error.contains(why), "{error}");
    }
    guest.vm.unplug("data").unwrap();
    assert_eq!(guest.vm.plug_as("data", disk(5)).unwrap().name, "data");
}

#[test]
fn memory_and_images_stay_and_so_a_guest_can_be_saved_and_restored() {
    let (_dir, place) = place();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(0x3000).unwrap();
    let image = || PmemDevice::open(file.path()).unwrap();
    let guest = on_pci(|vm| vm.rng().pmem(image()).hotplug_memory(MemorySize::mib(128)));
    for name in ["mem0", "pmem0"] {
        let error = guest.vm.unplug(name).unwrap_err();
        assert!(
            matches!(&error, PlugError::Permanent { device } if device == name),
            "{error}"
        );
    }
    guest.vm.unplug("rng0").unwrap();
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let snapshot = Snapshot::open(&place).unwrap();
    assert_eq!(snapshot.devices(), ["pmem0"]);
    Guest::restore(&snapshot, |vm| vm.pmem(image()));
}

#[test]
fn a_snapshot_has_what_is_plugged_in_by_then_where_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("snapshot");
    let guest = on_pci(|vm| vm.rng().rng());
    guest.vm.plug(disk(7)).unwrap();
    let block = guest.function(3);
    let mut queue = block.start(RINGS, NO_VECTOR);
    assert_eq!(request(block, &mut queue, 0, 512), 0);
    guest.vm.unplug("rng0").unwrap();
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let snapshot = Snapshot::open(&place).unwrap();
    assert_eq!(snapshot.devices(), ["rng1", "blk0"]);
    let clone = Guest::restore(&snapshot, |vm| vm.rng().block(disk(8)));
    let mut queue = queue.clone_in(&clone.mem);
    let block = block.of(&clone);
    assert_eq!(request(block, &mut queue, 0, 512), 0);
    assert_eq!(bytes(&clone, BUFFER, 4), [8; 4]);
    assert_eq!(clone.config(1, 0), u32::MAX);
    assert_eq!(clone.vm.plug(RngDevice::new()).unwrap().name, "rng0");
    assert_eq!(
        clone.vm.pci_address("rng1").unwrap(),
        Some(PciAddress { slot: 2 })
    );
}

#[test]
fn a_vm_that_ends_while_a_device_is_plugged_in_says_so() {
    let guest = on_pci(VmBuilder::rng);
    let rng = guest.vm.device::<RngDevice>("rng0").unwrap();
    let (busy, is_busy) = mpsc::channel();
    let (free, is_free) = mpsc::channel::<()>();
    let held = std::thread::spawn(move || {
        rng.run(move |_| {
            busy.send(()).unwrap();
            let _ = is_free.recv();
        })
    });
    is_busy.recv().unwrap();
    let vm = guest.vm.clone();
    let plugged = std::thread::spawn(move || vm.plug(RngDevice::new()));
    wait_for("a plug", || guest.vm.transition.try_lock().is_err());
    guest.vm.context.end(Outcome::Exit(VmExit::Stopped));
    free.send(()).unwrap();
    held.join().unwrap().unwrap();
    let error = plugged.join().unwrap().unwrap_err();
    let ended = VmError::IllegalState {
        action: Action::Plug,
        state: State::Stopped,
    };
    assert_eq!(error.to_string(), ended.to_string());
}
