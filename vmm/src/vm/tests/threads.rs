//! The threads of a VM: how many there are, what they may do, and when they sleep.

use std::io::ErrorKind;
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::sync::Weak;

use podvisor_devices::blk::{BlockDevice, FileDisk};
use podvisor_devices::fs::FsDevice;
use podvisor_devices::rng::RngDevice;
use podvisor_devices::virtio::VirtioDevice;
use podvisor_devices::vsock::VsockDevice;

use super::pci::on_pci;
use super::*;
use crate::vm::lifecycle::start::NewThread;
use crate::vm::{Seccomp, State};

fn disk() -> FileDisk {
    let file = tempfile::tempfile().unwrap();
    file.set_len(8 * 512).unwrap();
    FileDisk::new(file).unwrap()
}

/// Returns the number of threads that a VM waits for at its end.
fn counted(vm: &Vm) -> usize {
    let counted = vm.control().lock().threads;
    assert_eq!(crate::vm::lock::lock(&vm.threads).len(), counted);
    counted
}

#[test]
fn each_thread_is_counted_whenever_it_came_and_no_more_once_it_is_gone() {
    // One vCPU, and nothing for devices that are not there.
    assert_eq!(counted(&Guest::start(|vm| vm).vm), 1);
    // Two vCPUs, the loop of the entropy device, the disk's own one, and its second queue's.
    let guest = on_pci(|vm| {
        let block = BlockDevice::new(Box::new(disk())).queues(2);
        vm.vcpus(2).max_vcpus(4).rng().block(block)
    });
    assert_eq!(counted(&guest.vm), 5);
    guest.vm.add_vcpus(4).unwrap();
    assert_eq!(counted(&guest.vm), 7);
    let block = BlockDevice::new(Box::new(disk())).queues(3);
    let plugged = guest.vm.plug(block).unwrap().name;
    assert_eq!(counted(&guest.vm), 10);
    guest.vm.plug(RngDevice::new()).unwrap();
    assert_eq!(counted(&guest.vm), 10, "it shares a loop");
    let spare = guest.vm.plug(BlockDevice::spare()).unwrap().name;
    assert_eq!(counted(&guest.vm), 10, "so does this one");
    guest.vm.insert_disk(&spare, Box::new(disk()), "").unwrap();
    assert_eq!(counted(&guest.vm), 11, "until it has a disk");
    guest.vm.insert_disk(&spare, Box::new(disk()), "").unwrap();
    assert_eq!(counted(&guest.vm), 11);

    guest.vm.unplug(&plugged).unwrap();
    wait_for("the end of its threads", || {
        guest.vm.control().lock().threads == 8
    });
    let threads = || crate::vm::lock::lock(&guest.vm.threads).len();
    assert!((8..=11).contains(&threads()));
    wait_for("threads that have ended to be forgotten", || {
        let rng = guest.vm.plug(RngDevice::new()).unwrap().name;
        guest.vm.unplug(&rng).unwrap();
        threads() == 8
    });
    guest.vm.stop().unwrap();
    assert_eq!(counted(&guest.vm), 0);
}

#[test]
fn a_thread_that_did_not_start_is_counted_out_and_ends_nothing() {
    let guest = Guest::start(|vm| vm);
    guest.vm.control().lock().threads += 1;
    drop(NewThread::of_vcpu(&guest.vm.context, 1, || None));
    assert_eq!(counted(&guest.vm), 1);
    assert_eq!(guest.vm.state(), State::Running);
}

#[test]
fn a_vcpu_that_has_ended_is_kicked_no_more() {
    let guest = Guest::start(|vm| vm.vcpus(2));
    guest.runs_on();
    let kicker = guest.vm.context.peers.clone();
    wait_for("both vCPUs", || kicker.threads().len() == 2);
    guest.vm.stop().unwrap();
    assert!(kicker.threads().is_empty());
}

#[test]
fn nothing_is_left_of_a_vm_whose_handle_is_gone() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(512).unwrap();
    let block = || BlockDevice::open(file.path()).unwrap();
    let guest = Guest::start(|vm| vm.rng().block(block()));
    let machine: Weak<_> = Arc::downgrade(&guest.vm.context.machine);
    in_time("drop", move || drop(guest));
    assert!(machine.upgrade().is_none());
    // The disk is locked against other guests as long as it is in use.
    Guest::start(|vm| vm.block(block())).runs_on();
}

/// Whether a device's thread may open files, and whether it may connect sockets.
fn may<D: VirtioDevice>(guest: &Guest, name: &str) -> (bool, bool) {
    let device = guest.vm.device::<D>(name).unwrap();
    let permitted = |result: std::io::Result<()>| match result {
        Err(error) => error.kind() != ErrorKind::PermissionDenied,
        Ok(()) => true,
    };
    let tried = device.run(move |_| {
        let opened = File::open("/dev/null").map(drop);
        // Nobody listens there.
        let connected = UnixStream::connect("/dev/null").map(drop);
        (permitted(opened), permitted(connected))
    });
    tried.unwrap()
}

#[test]
fn the_thread_of_a_device_has_the_system_calls_of_its_host_side() {
    let dir = tempfile::tempdir().unwrap();
    let share = FsDevice::open("share", dir.path()).unwrap();
    let mux = VsockDevice::unix_mux(3, dir.path().join("vsock")).unwrap();
    let guest = on_pci(|vm| vm.rng().fs(share).vsock(mux));
    assert_eq!(may::<RngDevice>(&guest, "rng0"), (false, false));
    assert_eq!(may::<FsDevice>(&guest, "fs0"), (true, false));
    assert_eq!(may::<VsockDevice>(&guest, "vsock0"), (false, true));
    // The same for those that come later.
    guest.vm.unplug("vsock0").unwrap();
    let share = FsDevice::open("other", dir.path()).unwrap();
    let plugged = guest.vm.plug(share).unwrap().name;
    assert_eq!(may::<FsDevice>(&guest, &plugged), (true, false));
    let inner = VsockDevice::in_process(3).unwrap();
    let plugged = guest.vm.plug(inner).unwrap().name;
    assert_eq!(may::<VsockDevice>(&guest, &plugged), (false, false));
}

/// The calling thread's processor time, and how often it slept.
#[allow(unsafe_code)] // getrusage
fn usage() -> (Duration, i64) {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the structure is valid, and any bit pattern of it is.
    let usage = unsafe {
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()), 0);
        usage.assume_init()
    };
    let time = |time: libc::timeval| {
        let micros = time.tv_sec * 1_000_000 + time.tv_usec;
        Duration::from_micros(micros.cast_unsigned())
    };
    (time(usage.ru_utime) + time(usage.ru_stime), usage.ru_nvcsw)
}

#[test]
fn a_loop_without_anything_to_do_sleeps_also_during_a_pause() {
    let guest = Guest::start(|vm| vm.rng().seccomp(Seccomp::Off));
    let rng = guest.vm.device::<RngDevice>("rng0").unwrap();
    let sleeps = |when: &str| {
        let (time, slept) = rng.run(|_| usage()).unwrap();
        std::thread::sleep(Duration::from_millis(500));
        let (later, more) = rng.run(|_| usage()).unwrap();
        assert!(later - time < Duration::from_millis(4), "busy {when}");
        assert!(more - slept < 100, "{} times {when}", more - slept);
    };
    sleeps("while it runs");
    guest.pause();
    sleeps("during a pause");
    guest.vm.resume().unwrap();
    sleeps("afterwards");
}

/// In a separate process, which a shell would stop and continue in the same way.
#[test]
fn a_process_that_was_stopped_and_continued_has_its_vm_still() {
    crate::vm::testing::in_own_process(
        "vm::tests::threads::a_process_that_was_stopped_and_continued_has_its_vm_still",
        is_stopped,
    );
}

fn is_stopped() {
    let guest = Guest::start(VmBuilder::rng);
    guest.runs_on();
    let own = std::process::id().to_string();
    for _ in 0..3 {
        let both = format!("kill -STOP {own}; sleep 0.05; kill -CONT {own}");
        let shell = std::process::Command::new("sh")
            .args(["-c", &both])
            .status();
        assert!(shell.unwrap().success());
        guest.runs_on();
        let rng = guest.vm.device::<RngDevice>("rng0").unwrap();
        rng.run(|_| ()).unwrap();
        guest.pause();
        guest.vm.resume().unwrap();
    }
    assert_eq!(guest.vm.state(), State::Running);
}

/// In a separate process, whose limit it is.
#[test]
fn a_vm_is_paused_and_stopped_where_no_signal_may_be_pending() {
    crate::vm::testing::in_own_process(
        "vm::tests::threads::a_vm_is_paused_and_stopped_where_no_signal_may_be_pending",
        || {
            use rustix::process::{Resource, Rlimit, setrlimit};
            let none = Rlimit {
                current: Some(0),
                maximum: Some(0),
            };
            setrlimit(Resource::Sigpending, none).unwrap();
            let guest = Guest::start(|vm| vm.vcpus(2));
            for _ in 0..20 {
                guest.runs_on();
                guest.pause();
                guest.vm.resume().unwrap();
            }
            in_time("the VM's end", move || drop(guest));
        },
    );
}

/// In a separate process, whose ids they are.
#[test]
#[allow(unsafe_code)] // setuid
fn the_program_changes_its_ids_while_a_guest_runs() {
    crate::vm::testing::in_own_process(
        "vm::tests::threads::the_program_changes_its_ids_while_a_guest_runs",
        || {
            let guest = Guest::start(|vm| vm.vcpus(2));
            guest.runs_on();
            let changed = in_time("setuid", || {
                // SAFETY: they take no pointers. All threads carry it out, in a signal's handler.
                unsafe { libc::setuid(libc::getuid()) }
            });
            assert_eq!(changed, 0);
            guest.runs_on();
        },
    );
}

#[test]
fn what_is_printed_for_debugging_names_states_devices_and_threads() {
    let guest = Guest::start(VmBuilder::rng);
    let rng = guest.vm.device::<RngDevice>("rng0").unwrap();
    let context = &guest.vm.context;
    let link = crate::vm::lock::lock(&guest.vm.devices)[0].link.clone();
    for (printed, part) in [
        (format!("{:?}", guest.vm), "state: Running"),
        (format!("{:?}", *context.control.lock()), "parked: 0"),
        (format!("{:?}", context.loops), "\"vm-io\""),
        (format!("{:?}", context.machine), "memory: "),
        (format!("{link:?}"), "pending: "),
        (format!("{rng:?}"), "name: \"rng0\""),
    ] {
        assert!(printed.contains(part), "{part} in {printed}");
    }
    assert_eq!(rng.name(), "rng0");
}
