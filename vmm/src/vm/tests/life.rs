//! How VMs run, pause and end.

use kvm_bindings::{KVM_CAP_MAX_VCPU_ID, kvm_enable_cap};
use podvisor_devices::blk::BlockDevice;
use tracing::Subscriber;
use tracing::span::Id;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use super::*;
use crate::kvm::{self, KvmError};
use crate::vm::threads::Ahead;
use crate::vm::{Action, BuildError, EarlyVm, PoisonCause, Seccomp, State, VmError, VmExit};

#[test]
fn a_guest_that_spins_is_paused_and_resumed_three_hundred_times() {
    let guest = Guest::start(|vm| vm.vcpus(2));
    for _ in 0..300 {
        guest.pause();
        let before = guest.ticks();
        for _ in 0..10 {
            std::thread::yield_now();
        }
        assert_eq!(guest.ticks(), before, "a paused guest runs");
        let vm = guest.vm.clone();
        in_time("resume", move || vm.resume()).unwrap();
    }
    guest.runs_on();
    let vm = guest.vm.clone();
    in_time("stop", move || vm.stop()).unwrap();
    assert_eq!(guest.vm.wait().unwrap(), VmExit::Stopped);
}

#[test]
fn a_vm_that_was_created_early_is_the_one_that_runs() {
    let (_dir, place) = place();
    let guest = Guest::start(|vm| vm.early(EarlyVm::begin()));
    guest.runs_on();
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let snapshot = Snapshot::open(&place).unwrap();
    Guest::restore(&snapshot, |vm| vm.early(EarlyVm::begin())).runs_on();
    // None could be created early.
    let failed = || EarlyVm(Ahead::begin("early", || kvm::open().and(Err(no_vm()))));
    Guest::start(|vm| vm.early(failed())).runs_on();
    // KVM refuses to set one up that has a vCPU already, so the given one is used.
    let used = || {
        let create = || {
            let vm = kvm::create_vm(&kvm::open()?)?;
            vm.create_vcpu(0)
                .map_err(KvmError::ioctl("KVM_CREATE_VCPU"))?;
            Ok(vm)
        };
        EarlyVm(Ahead::begin("early", create))
    };
    let boot = tiny(OBEY).early(used()).build();
    let restore = snapshot.builder().early(used()).build();
    for built in [boot, restore] {
        let error = built.unwrap_err();
        assert!(
            matches!(&error, BuildError::Kvm(KvmError::Ioctl { .. })),
            "{error:?}"
        );
    }
}

fn no_vm() -> KvmError {
    KvmError::MissingCapability { name: "none" }
}

#[test]
fn the_end_of_a_vm_is_an_event_for_all_who_asked_before_or_after_it() {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let is_readable = |fd: &std::os::fd::OwnedFd, seconds| {
        let timeout = Timespec {
            tv_sec: seconds,
            tv_nsec: 0,
        };
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        poll(&mut fds, Some(&timeout)).unwrap() == 1
    };
    let guest = Guest::start(|vm| vm);
    let before = [guest.vm.exit_fd().unwrap(), guest.vm.exit_fd().unwrap()];
    guest.pause();
    guest.vm.resume().unwrap();
    assert!(!before.iter().any(|fd| is_readable(fd, 0)));
    guest.order(Order::Out8, 0x600, 0x34);
    assert!(before.iter().all(|fd| is_readable(fd, 60)));
    assert!(matches!(guest.vm.wait().unwrap(), VmExit::Shutdown));
    assert!(is_readable(&guest.vm.exit_fd().unwrap(), 0));
    let stopped = tiny(OBEY).build().unwrap();
    let fd = stopped.exit_fd().unwrap();
    stopped.stop().unwrap();
    assert!(is_readable(&fd, 0));
}

#[test]
fn calls_that_are_illegal_in_a_state_are_errors_that_name_it() {
    let vm = tiny(OBEY).build().unwrap();
    let illegal = |result: Result<(), VmError>, expected: Action, found: State| match result {
        Err(VmError::IllegalState { action, state }) => (action, state) == (expected, found),
        _ => false,
    };
    assert!(illegal(vm.pause(), Action::Pause, State::Created));
    assert!(illegal(vm.resume(), Action::Resume, State::Created));
    vm.start().unwrap();
    assert!(illegal(vm.start(), Action::Start, State::Running));
    assert!(illegal(vm.resume(), Action::Resume, State::Running));
    pause(&vm);
    assert_eq!(vm.state(), State::Paused);
    assert!(illegal(vm.pause(), Action::Pause, State::Paused));
    vm.stop().unwrap();
    assert!(illegal(vm.resume(), Action::Resume, State::Stopped));
    vm.stop().unwrap();
    assert_eq!(vm.wait().unwrap(), VmExit::Stopped);
}

#[test]
fn the_guest_ends_its_vm_by_ports_and_by_faults() {
    let exit_of = |order: fn(&Guest)| {
        let guest = Guest::start(|vm| vm.vcpus(2));
        order(&guest);
        let vm = guest.vm.clone();
        in_time("stop", move || vm.wait_until_stopped());
        assert_eq!(guest.vm.state(), State::Stopped);
        let vm = guest.vm.clone();
        in_time("wait", move || vm.wait()).unwrap()
    };
    assert_eq!(
        exit_of(|guest| guest.order(Order::Out8, 0x64, 0xfe)),
        VmExit::Reset
    );
    assert_eq!(
        exit_of(|guest| guest.order(Order::Out8, 0x600, 0x34)),
        VmExit::Shutdown
    );
    // ud2, without an interrupt table
    let vm = tiny(&[0x0f, 0x0b]).build().unwrap();
    vm.start().unwrap();
    let exit = in_time("wait", move || vm.wait()).unwrap();
    assert!(
        matches!(exit, VmExit::TripleFault { vcpu: 0, .. }),
        "{exit}"
    );
}

#[test]
fn vms_that_end_while_they_start_leave_nobody_behind() {
    // The guest ends its VM immediately, while other vCPUs are still being started.
    let code = [0xb0, 0xfe, 0xe6, 0x64, 0xeb, 0xfe]; // mov al, 0xfe; out 0x64, al; jmp $
    for _ in 0..50 {
        let vm = tiny(&code).vcpus(4).build().unwrap();
        vm.start().unwrap();
        let vm = Arc::new(vm);
        let waited = vm.clone();
        assert_eq!(
            in_time("wait", move || waited.wait()).unwrap(),
            VmExit::Reset
        );
        wait_for("the threads' end", || vm.control().lock().threads == 0);
    }
}

#[test]
fn a_vm_that_is_paused_or_was_never_started_is_dropped() {
    let guest = Guest::start(|vm| vm.rng());
    guest.pause();
    in_time("drop", move || drop(guest.vm));
    drop(tiny(OBEY).rng().build().unwrap());
    let vm = tiny(OBEY).build().unwrap();
    vm.stop().unwrap();
    assert_eq!(vm.wait().unwrap(), VmExit::Stopped);
    assert!(vm.start().is_err());
}

#[test]
fn a_vm_that_is_stopped_before_its_start_lets_go_of_its_devices() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(512).unwrap();
    let disk = || BlockDevice::open(file.path()).unwrap();
    let build = || tiny(OBEY).block(disk()).build();
    let vm = build().unwrap();
    assert!(build().is_err(), "its disk is in use");
    vm.stop().unwrap();
    build().unwrap();
}

#[test]
fn memory_of_the_host_that_fails_poisons_the_vm() {
    let guest = Guest::start(|vm| vm);
    guest.runs_on();
    guest.vm.context.peers.send(libc::SIGBUS);
    let vm = guest.vm.clone();
    let error = in_time("wait", move || vm.wait()).unwrap_err();
    let VmError::Poisoned(poison) = error else {
        panic!("{error}")
    };
    assert!(
        matches!(poison.cause, PoisonCause::MemoryFailure { .. }),
        "{poison}"
    );
    assert_eq!(poison.vcpu, Some(0));
    assert_eq!(guest.vm.state(), State::Poisoned);
    // The reason is said of later calls, too.
    let error = guest.vm.pause().unwrap_err();
    assert!(matches!(error, VmError::Poisoned(_)), "{error}");
    guest.vm.stop().unwrap();
    assert_eq!(guest.vm.state(), State::Poisoned);
}

#[test]
fn a_kick_that_nobody_asked_for_changes_nothing() {
    let guest = Guest::start(|vm| vm);
    for _ in 0..100 {
        guest.vm.context.peers.kick();
        guest.runs_on();
    }
    guest.write(0x30_0000, 7);
    assert_eq!(guest.read(0x30_0000), 7);
}

#[test]
fn addresses_without_a_device_read_as_ones() {
    let guest = Guest::start(|vm| vm);
    guest.write(layout::VIRTIO_MMIO_START, 5);
    assert_eq!(guest.read(layout::VIRTIO_MMIO_START), u32::MAX);
    guest.output(0x80, 1);
    assert_eq!(guest.input(0x3fd), 0xff);
    assert_eq!(guest.input(0x64), 0xfd);
    assert!(guest.counter("vcpu", "mmio_exits") >= 2);
    assert!(guest.counter("vcpu", "port_exits") >= 3);
}

#[test]
fn what_the_guest_writes_to_its_serial_port_reaches_the_writer() {
    let kept = Kept::default();
    let writer = kept.clone();
    let guest = Guest::start(move |vm| vm.serial(writer));
    assert_ne!(guest.input(0x3fd) & 0x20, 0, "ready");
    for byte in b"hello" {
        guest.output(0x3f8, *byte);
    }
    assert_eq!(*kept.0.lock().unwrap(), b"hello");
}

/// A writer that tries to open a file for each byte.
#[derive(Clone, Default)]
struct Opens(Arc<Mutex<Vec<bool>>>);
impl Write for Opens {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let opened = File::open("/dev/null").is_ok();
        self.0.lock().unwrap().push(opened);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn threads_of_a_vm_open_no_files_unless_its_owner_wants_them_to() {
    for (seccomp, expected) in [(Seccomp::On, false), (Seccomp::Off, true)] {
        let opens = Opens::default();
        let writer = opens.clone();
        let guest = Guest::start(move |vm| vm.serial(writer).seccomp(seccomp));
        guest.output(0x3f8, b'x');
        assert_eq!(*opens.0.lock().unwrap(), [expected], "{seccomp:?}");
    }
}

#[test]
fn an_instruction_that_kvm_cannot_execute_poisons_the_vm() {
    let jump = [0xb8, 0x00, 0x00, 0x00, 0xd0, 0xff, 0xe0]; // mov eax, 0xd0000000; jmp eax
    let vm = Arc::new(tiny(&jump).build().unwrap());
    vm.start().unwrap();
    // There is nothing at that address.
    let error = in_time("wait", move || vm.wait()).unwrap_err();
    let VmError::Poisoned(poison) = error else {
        panic!("{error}")
    };
    assert!(
        matches!(poison.cause, PoisonCause::InternalError { suberror: 1 }),
        "{poison}"
    );
    assert_eq!(poison.registers.as_ref().unwrap().rip, 0xd000_0000);
}

/// Where vCPUs that the guest brings up count, each in its own counter.
const COUNTS: u64 = 0x8000;

impl Guest {
    /// Makes the boot CPU send INIT and SIPI to another one, which starts to count.
    fn bring_up(&self, id: u8) {
        let icr = u64::from(layout::LOCAL_APIC) + 0x300;
        let count = COUNTS + 4 * u64::from(id);
        // Real mode: `again: inc dword [count]; jmp again`, on a separate page.
        let [low, high, ..] = count.to_le_bytes();
        let vector = 9 + id;
        let code = [0x66, 0xff, 0x06, low, high, 0xeb, 0xf9];
        let page = GuestAddress(u64::from(vector) << 12);
        self.mem.write_slice(&code, page).unwrap();
        for command in [0x4500, 0x4600 | u32::from(vector)] {
            self.write(icr + 0x10, u32::from(id) << 24);
            self.write(icr, command);
        }
    }

    fn count(&self, id: u8) -> u32 {
        let count = GuestAddress(COUNTS + 4 * u64::from(id));
        self.mem.load(count, Ordering::SeqCst).unwrap()
    }

    fn counts_on(&self, id: u8) {
        let before = self.count(id);
        wait_for("another vCPU", || self.count(id) != before);
    }
}

#[test]
fn vcpus_are_added_up_to_the_most_that_were_said_in_clones_too() {
    let guest = Guest::start(|vm| vm.max_vcpus(3));
    assert_eq!((guest.vm.vcpus(), guest.vm.max_vcpus()), (1, 3));
    guest.vm.add_vcpus(2).unwrap();
    guest.vm.add_vcpus(1).unwrap();
    assert_eq!(guest.vm.vcpus(), 2);
    guest.runs_on();
    let refused = guest.vm.add_vcpus(4).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "cannot have 4 vCPUs: the VM was built for at most 3"
    );
    guest.pause();
    let refused = guest.vm.add_vcpus(3).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "cannot add vCPUs to a VM that is paused"
    );
    let (_dir, place) = place();
    guest.vm.snapshot(&place).unwrap();
    guest.vm.stop().unwrap();
    assert!(guest.vm.add_vcpus(3).is_err());

    // A VM that is restored has the added vCPUs, and can get the others.
    let snapshot = Snapshot::open(&place).unwrap();
    assert_eq!((snapshot.vcpus(), snapshot.max_vcpus()), (2, 3));
    let clone = Guest::restore(&snapshot, |vm| vm);
    clone.vm.add_vcpus(3).unwrap();
    clone.runs_on();
    clone.pause();
    clone.vm.resume().unwrap();
    let vm = clone.vm.clone();
    in_time("stop", move || vm.stop()).unwrap();
    assert_eq!((clone.vm.vcpus(), clone.vm.max_vcpus()), (0, 3));
}

#[test]
fn a_guest_brings_up_vcpus_that_came_while_it_ran() {
    let guest = Guest::start(|vm| vm.max_vcpus(3));
    guest.vm.add_vcpus(2).unwrap();
    guest.runs_on();
    guest.bring_up(1);
    guest.counts_on(1);
    guest.runs_on();
    guest.pause();
    let before = guest.count(1);
    std::thread::yield_now();
    assert_eq!(guest.count(1), before, "a paused guest runs");
    let (_dir, place) = place();
    guest.vm.snapshot(&place).unwrap();
    guest.vm.stop().unwrap();

    let clone = Guest::restore(&Snapshot::open(&place).unwrap(), |vm| vm);
    clone.counts_on(1);
    // For a vCPU that comes later, if KVM has offsets at all (Linux 5.16).
    let machine = &clone.vm.context.machine;
    let one = kvm::create_vm(&machine.kvm).unwrap();
    let one = one.create_vcpu(0).unwrap();
    let has_offsets = kvm::tsc_offset(&one).unwrap().is_some();
    assert_eq!(machine.tsc_offset.is_some(), has_offsets);
    clone.vm.add_vcpus(3).unwrap();
    clone.bring_up(2);
    clone.counts_on(2);
    clone.counts_on(1);
    clone.runs_on();
}

#[test]
fn kvm_knows_how_many_vcpus_a_machine_may_get() {
    let vm = tiny(OBEY).vcpus(2).max_vcpus(3).build().unwrap();
    let machine = &vm.context.machine;
    let has_limit = {
        let limit = kvm_enable_cap {
            cap: KVM_CAP_MAX_VCPU_ID,
            args: [3, 0, 0, 0],
            ..Default::default()
        };
        let other = kvm::create_vm(&machine.kvm).unwrap();
        other.enable_cap(&limit).is_ok()
    };
    let errno = |id| machine.vm_fd.create_vcpu(id).err().map(|e| e.errno());
    assert_eq!(errno(3), has_limit.then_some(libc::EINVAL));
    assert_eq!(errno(2), None);
}

#[test]
fn a_vcpu_that_was_made_in_vain_is_used_the_next_time() {
    let guest = Guest::start(|vm| vm.max_vcpus(3));
    // As if the host had no memory for a later step, or no thread: KVM keeps the vCPU.
    drop(guest.vm.new_vcpu(1).unwrap());
    drop(guest.vm.new_vcpu(1).unwrap());
    guest.vm.add_vcpus(3).unwrap();
    assert_eq!(guest.vm.vcpus(), 3);
    for id in [1, 2] {
        guest.bring_up(id);
        guest.counts_on(id);
    }
    guest.vm.stop().unwrap();
}

#[test]
fn a_vm_may_not_get_fewer_vcpus_than_it_begins_with() {
    let error = tiny(OBEY).vcpus(2).max_vcpus(1).build().unwrap_err();
    assert!(
        error
            .to_string()
            .contains("at most 1 vCPUs: it must be 2 to"),
        "{error}"
    );
}

/// Reports which threads enter a span.
struct Entered(mpsc::Sender<Option<String>>);

impl<S: Subscriber> Layer<S> for Entered {
    fn on_enter(&self, _: &Id, _: Context<'_, S>) {
        let name = std::thread::current().name().map(str::to_owned);
        // The receiver is gone once the test has seen enough.
        let _ = self.0.send(name);
    }
}

#[test]
fn threads_of_a_vm_are_in_the_span_that_it_was_started_in() {
    let (entered, names) = mpsc::channel();
    let guest = tracing::subscriber::with_default(
        tracing_subscriber::registry().with(Entered(entered)),
        || tracing::error_span!("vm", id = 7).in_scope(|| Guest::start(VmBuilder::rng)),
    );
    guest.vm.stop().unwrap();
    let names: Vec<_> = names.try_iter().flatten().collect();
    for thread in ["vm-io", "vcpu0"] {
        assert!(names.iter().any(|name| name == thread), "{names:?}");
    }
}
