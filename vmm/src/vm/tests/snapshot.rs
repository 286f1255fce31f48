//! VMs that are restored from a snapshot of another one.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use podvisor_devices::blk::{BlockDevice, FileDisk};
use podvisor_devices::mem::MemDevice;
use podvisor_devices::virtio::{
    DeviceInfo, Fault, Progress, Queue, SavedDevice, StartError, VirtioDevice,
};
use podvisor_devices::vsock::VsockDevice;

use super::devices::{BUFFER, RINGS, bytes, fill, one_queue, request};
use super::*;
use crate::vm::control::Outcome;
use crate::vm::{Action, BuildError, RestoreBuilder, State, TakeSnapshotError, VmExit};
use crate::{SnapshotError, SnapshotFormatError};

/// A disk of `sectors` sectors that are filled with `byte`.
fn disk(byte: u8, sectors: usize) -> BlockDevice {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![byte; sectors * 512]).unwrap();
    BlockDevice::new(Box::new(FileDisk::new(file).unwrap()))
}

fn build_error(builder: RestoreBuilder) -> String {
    let error = builder.build().map(|_| ()).unwrap_err();
    let source = std::error::Error::source(&error);
    let source = source.map(|s| format!(": {s}")).unwrap_or_default();
    format!("{error}{source}")
}

#[test]
fn a_guest_and_its_clones_go_on_from_a_snapshot_each_by_itself() {
    let (_dir, place) = place();
    let guest = Guest::start(|vm| vm.vcpus(2));
    guest.runs_on();
    guest.write(0x30_0000, 7);
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    assert_eq!(guest.vm.state(), State::Paused);
    let ticks = guest.ticks();

    let snapshot = Snapshot::open(&place).unwrap();
    assert_eq!(
        (snapshot.vcpus(), snapshot.memory()),
        (2, MemorySize::mib(32))
    );
    let clones: Vec<Guest> = (0..3).map(|_| Guest::restore(&snapshot, |vm| vm)).collect();
    for (number, clone) in (100u32..).zip(&clones) {
        assert!(clone.ticks().wrapping_sub(ticks) < u32::MAX / 2);
        clone.runs_on();
        assert_eq!(clone.read(0x30_0000), 7);
        clone.write(0x30_0000, number);
    }
    guest.vm.resume().unwrap();
    guest.runs_on();
    assert_eq!(guest.read(0x30_0000), 7);
    for (number, clone) in (100u32..).zip(&clones) {
        assert_eq!(clone.read(0x30_0000), number);
        clone.order(Order::Out8, 0x64, 0xfe);
        assert_eq!(clone.vm.wait().unwrap(), crate::VmExit::Reset);
    }
}

#[test]
fn a_guest_that_does_not_know_what_the_processor_has_is_refused_where_that_is_required() {
    let (_dir, place) = place();
    let guest = Guest::start(|vm| vm);
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let mut snapshot = Snapshot::open(&place).unwrap();
    Guest::restore(&snapshot, RestoreBuilder::require_same_cpu).runs_on();
    // As if the processor had got the feature meanwhile.
    let leaves = snapshot.state_mut().cpuid.as_mut_slice();
    let leaf = leaves.iter_mut().find(|leaf| leaf.function == 1).unwrap();
    leaf.edx &= !(1 << 15);
    let error = build_error(snapshot.builder().require_same_cpu());
    assert!(error.contains("does not know of cmov"), "{error}");
    snapshot.builder().build().unwrap();
}

#[test]
fn memory_that_may_be_plugged_in_is_part_of_a_snapshot() {
    let (_dir, place) = place();
    let most = MemorySize::mib(128);
    let guest = Guest::start(|vm| vm.hotplug_memory(most).rng().balloon());
    // After the hole for devices, as there is no memory above it.
    let region = GuestAddress(1 << 32);
    guest.mem.write_obj(7u32, region).unwrap();
    guest.vm.balloon().unwrap().set_target(most).unwrap();
    let memory = guest.vm.hotplug_memory().unwrap();
    memory.request(MemorySize::mib(5)).unwrap();
    // As a driver would: the first block.
    let plug = |device: &mut MemDevice| {
        let mut saved = device.save();
        saved.bytes[16] = 1;
        device.restore(&saved)
    };
    memory.run(plug).unwrap().unwrap();
    let beyond = GuestAddress(region.0 + (2 << 20));
    guest.mem.write_obj(9u32, beyond).unwrap();
    guest.runs_on();
    guest.pause();
    guest.vm.snapshot(&place).unwrap();

    let snapshot = Snapshot::open(&place).unwrap();
    assert_eq!(snapshot.memory(), MemorySize::mib(32));
    assert_eq!(snapshot.hotplug_memory(), most);
    assert_eq!(snapshot.devices(), ["rng0", "balloon0"]);
    let clone = Guest::restore(&snapshot, |vm| vm.rng().balloon());
    clone.runs_on();
    assert_eq!(clone.mem.read_obj::<u32>(region).unwrap(), 7);
    assert_eq!(
        clone.mem.read_obj::<u32>(beyond).unwrap(),
        0,
        "not plugged in"
    );
    let memory = clone.vm.hotplug_memory().unwrap();
    let requested = memory.run(|device| device.requested()).unwrap();
    assert_eq!(requested, 6 << 20);
    assert_eq!(memory.plugged().unwrap(), MemorySize::mib(2));
    clone.mem.write_obj(8u32, region).unwrap();
    assert_eq!(guest.mem.read_obj::<u32>(region).unwrap(), 7);
}

#[test]
fn an_access_that_was_under_way_is_completed_once_in_each_clone() {
    // The guest reads a port in a loop, so that pauses hit it in the middle.
    let code = [
        0xbe, 0x00, 0x00, 0x20, 0x00, // mov esi, ORDERS
        0xba, 0x70, 0x00, 0x00, 0x00, // mov edx, 0x70, which reads 0
        0xb0, 0xff, // mov al, 0xff
        0xec, // in al, dx
        0x84, 0xc0, // test al, al
        0x75, 0x05, // jnz wrong
        0xff, 0x46, 0x10, // inc dword [esi + 16]
        0xeb, 0xf4, // jmp to mov al
        0xff, 0x46, 0x14, // wrong: inc dword [esi + 20]
        0xeb, 0xef, // jmp to mov al
    ];
    for round in 0..20 {
        let (_dir, place) = place();
        let vm = Arc::new(tiny(&code).build().unwrap());
        vm.start().unwrap();
        let mem = vm.context.machine.memory.ram().clone();
        let guest = Guest { vm, mem };
        guest.runs_on();
        guest.pause();
        guest.vm.snapshot(&place).unwrap();
        let clone = Guest::restore(&Snapshot::open(&place).unwrap(), |vm| vm);
        clone.runs_on();
        clone.runs_on();
        assert_eq!(clone.get(20), 0, "round {round}: a read had no answer");
        // Of the last one, the guest may not have got the answer yet.
        clone.pause();
        let exits = |guest: &Guest| guest.counter("vcpu", "port_exits");
        let more = exits(&guest) + exits(&clone) - u64::from(clone.ticks());
        assert!(more <= 1, "round {round}: {more} reads too many");
    }
}

#[test]
fn what_a_guest_sends_while_it_is_paused_is_sent_once() {
    // The guest sends 0, 1, 2 and so on, so that pauses hit it in the middle.
    let code = [
        0xbe, 0x00, 0x00, 0x20, 0x00, // mov esi, ORDERS
        0xba, 0xf8, 0x03, 0x00, 0x00, // mov edx, COM1
        0x8a, 0x46, 0x10, // mov al, [esi + 16]
        0xee, // out dx, al
        0xff, 0x46, 0x10, // inc dword [esi + 16]
        0xeb, 0xf7, // jmp to mov al
    ];
    for round in 0..20 {
        let (_dir, place) = place();
        let (sent, more) = (Kept::default(), Kept::default());
        let vm = Arc::new(tiny(&code).serial(sent.clone()).build().unwrap());
        vm.start().unwrap();
        let mem = vm.context.machine.memory.ram().clone();
        let guest = Guest { vm, mem };
        guest.runs_on();
        guest.pause();
        guest.vm.snapshot(&place).unwrap();
        let snapshot = Snapshot::open(&place).unwrap();
        let clone = Guest::restore(&snapshot, |vm| vm.serial(more.clone()));
        clone.runs_on();
        clone.runs_on();
        clone.vm.stop().unwrap();
        let mut all = sent.0.lock().unwrap().clone();
        all.extend(&*more.0.lock().unwrap());
        let expected = (0..all.len()).map(|number| (number % 256) as u8);
        assert!(expected.eq(all), "round {round}");
    }
}

#[test]
fn chains_that_nobody_has_served_yet_are_served_in_each_clone() {
    let (_dir, place) = place();
    let guest = Guest::start(VmBuilder::rng);
    let mut queue = guest.device(0).start(RINGS);
    fill(guest.device(0), &mut queue, 64);
    guest.pause();
    // Made available, but not notified yet.
    queue.add(&[], &[(BUFFER, 32)]);
    guest
        .mem
        .write_slice(&[0; 64], GuestAddress(BUFFER))
        .unwrap();
    guest.vm.snapshot(&place).unwrap();
    let snapshot = Snapshot::open(&place).unwrap();
    let mut seen = Vec::new();
    for _ in 0..3 {
        let clone = Guest::restore(&snapshot, RestoreBuilder::rng);
        let mut queue = queue.clone_in(&clone.mem);
        wait_for("the chain", || queue.take_used().is_some());
        let random = bytes(&clone, BUFFER, 32);
        assert!(
            random != [0; 32] && !seen.contains(&random),
            "entropy of its own"
        );
        seen.push(random);
        assert_eq!(clone.device(0).status(), 15);
        fill(clone.device(0), &mut queue, 16);
    }
}

#[test]
fn an_interrupt_that_was_not_acknowledged_is_still_there() {
    let (_dir, place) = place();
    let guest = Guest::start(VmBuilder::rng);
    let rng = guest.device(0);
    let mut queue = rng.start(RINGS);
    fill(rng, &mut queue, 8);
    wait_for("the interrupt", || rng.read(0x60) & 1 != 0);
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let clone = Guest::restore(&Snapshot::open(&place).unwrap(), RestoreBuilder::rng);
    assert_eq!(clone.device(0).read(0x60), 1);
}

#[test]
fn disks_are_bound_anew_and_the_driver_hears_of_another_size() {
    let (_dir, place) = place();
    let guest = Guest::start(|vm| vm.block(disk(1, 8)).rng());
    let mut queue = guest.device(0).start(RINGS);
    assert_eq!(request(guest.device(0), &mut queue, 0, 512), 0);
    guest.device(0).write(0x64, 3);
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let snapshot = Snapshot::open(&place).unwrap();
    assert_eq!(snapshot.devices(), ["blk0", "rng0"]);

    let same = Guest::restore(&snapshot, |vm| vm.block(disk(2, 8)).rng());
    let mut same_queue = queue.clone_in(&same.mem);
    assert_eq!(request(same.device(0), &mut same_queue, 0, 512), 0);
    assert_eq!(bytes(&same, BUFFER, 2), [2, 2]);
    assert_eq!(same.device(0).read(0x60) & 2, 0, "nothing has changed");

    let larger = Guest::restore(&snapshot, |vm| vm.block(disk(3, 16)).rng());
    wait_for("the interrupt", || larger.device(0).read(0x60) & 2 != 0);
    assert_eq!(larger.device(0).read(0x100), 16);
    let mut queue = queue.clone_in(&larger.mem);
    assert_eq!(request(larger.device(0), &mut queue, 0, 512), 0);
    assert_eq!(bytes(&larger, BUFFER, 2), [3, 3]);
}

#[test]
fn a_builder_that_does_not_fit_the_snapshot_is_told_in_words() {
    let (_dir, place) = place();
    let guest = Guest::start(|vm| vm.block(disk(1, 8)).rng());
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let snapshot = Snapshot::open(&place).unwrap();
    let missing = build_error(snapshot.builder().rng());
    assert!(
        missing.contains("[blk0, rng0]") && missing.contains("[rng0]"),
        "{missing}"
    );
    let order = build_error(snapshot.builder().rng().block(disk(1, 8)));
    assert!(order.contains("in this order"), "{order}");
    let serial = build_error(snapshot.builder().serial(std::io::sink()));
    assert!(serial.contains("serial"), "{serial}");
    drop(guest);

    // A read-only disk has one more feature, which the driver has accepted.
    let (_dir, place) = self::place();
    let guest = Guest::start(|vm| vm.block(disk(1, 8).read_only()));
    let block = guest.device(0);
    for (register, value) in [
        (0x70, 1),
        (0x70, 3),
        (0x24, 1),
        (0x20, 1),
        (0x24, 0),
        (0x20, 1 << 5),
    ] {
        block.write(register, value);
    }
    block.write(0x70, 11);
    assert_eq!(block.status(), 11);
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let snapshot = Snapshot::open(&place).unwrap();
    let writable = build_error(snapshot.builder().block(disk(1, 8)));
    assert!(writable.contains("features"), "{writable}");
}

#[test]
fn a_device_has_the_id_that_its_program_chose_also_in_snapshots() {
    let (_dir, place) = place();
    let guest = Guest::start(|vm| vm.rng().device_as("root", disk(1, 8)).block(disk(2, 8)));
    let named = |guest: &Guest| -> Vec<String> {
        let counters = guest.vm.counters().into_iter();
        counters.map(|counters| counters.device).collect()
    };
    assert_eq!(named(&guest), ["vcpu", "rng0", "root", "blk0"]);
    assert_eq!(guest.vm.block("root").unwrap().name(), "root");
    let error = guest.vm.block("swap").unwrap_err().to_string();
    assert!(error.contains("rng0, root, blk0"), "{error}");
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let snapshot = Snapshot::open(&place).unwrap();
    assert_eq!(snapshot.devices(), ["rng0", "root", "blk0"]);
    for other in [None, Some("boot")] {
        let builder = snapshot.builder().rng();
        let builder = match other {
            None => builder.block(disk(1, 8)),
            Some(id) => builder.device_as(id, disk(1, 8)),
        };
        let error = build_error(builder.block(disk(2, 8)));
        assert!(error.contains("[rng0, root, blk0]"), "{error}");
    }
    let clone = Guest::restore(&snapshot, |vm| {
        vm.rng().device_as("root", disk(1, 8)).block(disk(2, 8))
    });
    assert_eq!(named(&clone), ["vcpu", "rng0", "root", "blk0"]);
    clone.runs_on();
}

#[test]
fn snapshots_are_taken_of_paused_vms_and_replace_nothing() {
    let (_dir, place) = place();
    let guest = Guest::start(|vm| vm);
    let error = guest.vm.snapshot(&place).unwrap_err();
    assert!(
        matches!(
            error,
            TakeSnapshotError::State(VmError::IllegalState {
                action: Action::Snapshot,
                state: State::Running
            })
        ),
        "{error}"
    );
    guest.pause();
    fs::create_dir(&place).unwrap();
    let error = guest.vm.snapshot(&place).unwrap_err();
    assert!(
        matches!(
            error,
            TakeSnapshotError::Snapshot(SnapshotError::Exists { .. })
        ),
        "{error}"
    );
    let nowhere = place.join("not").join("there");
    let error = guest.vm.snapshot(nowhere).unwrap_err();
    assert!(
        matches!(
            error,
            TakeSnapshotError::Snapshot(SnapshotError::Write { .. })
        ),
        "{error}"
    );
    let error = guest.vm.snapshot_difference(place.join("x")).unwrap_err();
    assert!(
        matches!(error, TakeSnapshotError::Snapshot(SnapshotError::NoBase)),
        "{error}"
    );
    assert_eq!(fs::read_dir(&place).unwrap().count(), 0);
    guest.vm.resume().unwrap();
    guest.runs_on();
}

#[test]
fn a_difference_holds_what_was_written_since_and_needs_its_full_snapshot() {
    let (dir, full) = place();
    let guest = Guest::start(|vm| vm);
    guest.write(0x30_0000, 1);
    guest.write(0x40_0000, 1);
    guest.pause();
    guest.vm.snapshot(&full).unwrap();
    let clone = Guest::restore(&Snapshot::open(&full).unwrap(), |vm| vm);
    clone.write(0x40_0000, 2);
    clone.pause();
    let difference = dir.path().join("difference");
    clone.vm.snapshot_difference(&difference).unwrap();
    drop(clone);

    let again = Guest::restore(&Snapshot::open(&difference).unwrap(), |vm| vm);
    assert_eq!((again.read(0x30_0000), again.read(0x40_0000)), (1, 2));
    again.write(0x30_0000, 3);
    again.pause();
    let second = dir.path().join("second");
    again.vm.snapshot_difference(&second).unwrap();
    let again = Guest::restore(&Snapshot::open(&second).unwrap(), |vm| vm);
    assert_eq!((again.read(0x30_0000), again.read(0x40_0000)), (3, 2));
    use std::os::unix::fs::MetadataExt;
    let blocks = |place: &Path| fs::metadata(place.join("memory")).unwrap().blocks();
    assert!(blocks(&difference) <= 16, "{}", blocks(&difference));

    // A new full snapshot in the same place has another identity.
    fs::remove_dir_all(&full).unwrap();
    guest.vm.snapshot(&full).unwrap();
    let error = Snapshot::open(&difference).unwrap_err();
    assert!(matches!(error, SnapshotError::OtherBase { .. }), "{error}");
    fs::remove_dir_all(&full).unwrap();
    assert!(matches!(
        Snapshot::open(&difference).unwrap_err(),
        SnapshotError::Read { .. }
    ));
}

#[test]
fn connections_of_the_socket_device_are_reset() {
    let (_dir, place) = place();
    let vsock = |cid| VsockDevice::in_process(cid).unwrap();
    let guest = Guest::start(|vm| vm.vsock(vsock(3)));
    let device = guest.device(0);
    // For this test the event queue suffices.
    let mut event = device.start_queue(2, RINGS);
    event.add(&[], &[(BUFFER, 4)]);
    guest
        .mem
        .write_slice(&[9; 4], GuestAddress(BUFFER))
        .unwrap();
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let clone = Guest::restore(&Snapshot::open(&place).unwrap(), |vm| vm.vsock(vsock(77)));
    let mut event = event.clone_in(&clone.mem);
    wait_for("the event", || event.take_used().is_some());
    assert_eq!(bytes(&clone, BUFFER, 4), [0; 4], "transport reset");
    assert_eq!(clone.device(0).read(0x100), 77);
}

#[test]
fn a_memory_file_that_is_too_short_and_files_that_are_none_are_refused() {
    let (_dir, place) = place();
    let guest = Guest::start(|vm| vm);
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let memory = fs::File::options()
        .write(true)
        .open(place.join("memory"))
        .unwrap();
    let len = memory.metadata().unwrap().len();
    let whole = fs::read(place.join("memory")).unwrap();
    for wrong in [0, len - 1, len + 1] {
        memory.set_len(wrong).unwrap();
        let error = Snapshot::open(&place).unwrap_err();
        assert!(
            matches!(
                error,
                SnapshotError::Format {
                    source: SnapshotFormatError::Length { .. },
                    ..
                }
            ),
            "{error}"
        );
    }
    fs::write(place.join("memory"), whole).unwrap();
    let open = |name| fs::File::open(place.join(name)).unwrap();
    let files = Snapshot::from_files(open("state"), open("memory")).unwrap();
    Guest::restore(&files, |vm| vm).runs_on();
    fs::remove_file(place.join("state")).unwrap();
    fs::create_dir(place.join("state")).unwrap();
    assert!(Snapshot::open(&place).is_err());
}

#[test]
fn damage_behind_a_mended_checksum_is_an_error_or_a_vm_that_ends_well() {
    let (_dir, place) = place();
    let guest = Guest::start(|vm| vm.block(disk(1, 8)).rng());
    guest.device(0).start(RINGS);
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let path = place.join("state");
    let sound = fs::read(&path).unwrap();
    let records = crate::snapshot::testing::decode(&sound).unwrap();
    let all = std::env::var_os("PODVISOR_TEST_EVERY_BYTE").is_some();
    let mut ran = 0;
    for (number, record) in records.iter().enumerate() {
        for at in 0..record.bytes.len() {
            // Each byte of this library's own layouts; a part of the kernel's structures, unless
            // there is time for all.
            let is_large = record.bytes.len() > 600 && !all;
            if is_large && at % 41 != number % 41 {
                continue;
            }
            let mut records = records.clone();
            records[number].bytes[at] ^= 1 << (at % 8);
            fs::write(&path, crate::snapshot::testing::encode(&records)).unwrap();
            let Ok(snapshot) = Snapshot::open(&place) else {
                continue;
            };
            let built = snapshot.builder().block(disk(1, 8)).rng().build();
            let vm = match built {
                Ok(vm) => Arc::new(vm),
                Err(BuildError::Config(_) | BuildError::Snapshot(_)) => continue,
                Err(error) => panic!("{error}"),
            };
            vm.start().unwrap();
            ran += 1;
            let stopped = vm.clone();
            in_time("stop", move || stopped.stop()).unwrap();
        }
    }
    assert!(ran > 10, "{ran} damaged snapshots were run");
    for len in (0..sound.len()).step_by(97) {
        fs::write(&path, &sound[..len]).unwrap();
        assert!(Snapshot::open(&place).is_err(), "{len} bytes");
    }
}

#[test]
fn a_hundred_rounds_of_pause_snapshot_and_restore_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    fn configure<S>(vm: VmBuilder<S>) -> VmBuilder<S> {
        vm.block(disk(5, 64)).rng()
    }
    let mut guest = Guest::start(configure);
    let mut block = guest.device(0).start(RINGS);
    let mut rng = guest.device(1).start(RINGS + 0x10_0000);
    let mut place = dir.path().join("0");
    for round in 1..=100u32 {
        // Requests are in flight when the pause comes.
        let (header, status) = (BUFFER + 0x10_0000, BUFFER + 0x11_0000);
        guest
            .mem
            .write_slice(&[0; 16], GuestAddress(header))
            .unwrap();
        guest
            .mem
            .write_slice(&[0; 512], GuestAddress(BUFFER))
            .unwrap();
        block.add(&[(header, 16)], &[(BUFFER, 512), (status, 1)]);
        rng.add(&[], &[(BUFFER + 0x20_0000, 4096)]);
        guest.device(0).notify();
        guest.order(Order::Write32, guest.device(1).window + 0x50, 0);
        guest.pause();
        guest.vm.snapshot(&place).unwrap();
        let snapshot = Snapshot::open(&place).unwrap();
        fs::remove_dir_all(&place).unwrap();
        let clone = Guest::restore(&snapshot, configure);
        drop(guest);
        guest = clone;
        (block, rng) = (block.clone_in(&guest.mem), rng.clone_in(&guest.mem));
        wait_for("the disk's answer", || block.take_used().is_some());
        wait_for("random bytes", || rng.take_used().is_some());
        assert!(bytes(&guest, BUFFER, 512) == [5; 512], "round {round}");
        wait_for("an order's end", || guest.obeyed());
        place = dir.path().join(round.to_string());
    }
}

/// A device that ends its VM when its state is saved.
#[derive(Debug)]
struct EndsItsVm(Arc<OnceLock<Arc<Vm>>>);

impl VirtioDevice for EndsItsVm {
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
    fn save(&self) -> SavedDevice {
        let vm = self.0.get().unwrap();
        vm.context.end(Outcome::Exit(VmExit::Stopped));
        SavedDevice::default()
    }
}

#[test]
fn nothing_is_there_of_a_snapshot_whose_vm_ended_meanwhile() {
    let (dir, place) = place();
    let known = Arc::new(OnceLock::new());
    let guest = Guest::start(|vm| vm.device(EndsItsVm(known.clone())));
    known.set(guest.vm.clone()).unwrap();
    guest.pause();
    let vm = guest.vm.clone();
    let error = in_time("snapshot", move || vm.snapshot(&place)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot take a snapshot of a VM that is stopped"
    );
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}
