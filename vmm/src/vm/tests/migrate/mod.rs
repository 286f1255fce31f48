//! VMs that move over a connection, and connections that break.
//!
//! * `disks.rs`: disks whose contents move.
//! * `ends.rs`: guests and sides that end while they move.

mod disks;
mod ends;

use std::cell::Cell;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use podvisor_devices::pci::NO_VECTOR;
use podvisor_devices::virtio::{DeviceInfo, Fault, Progress, Queue, StartError, VirtioDevice};

use super::devices::{BUFFER, RINGS, bytes, one_queue, request};
use super::pci::on_pci;
use super::*;
use crate::vm::{MigrateError, State, VmExit};
use crate::{
    ArrivedMigration, BlockDevice, FileDisk, IncomingMigration, KvmDevice, MigrationLimits,
    MigrationOptions, MigrationProgress, MigrationReport, MigrationStep, PluggedIdentity,
    ReceiveError, StreamError,
};

/// As many rounds, whatever is left after each.
fn rounds(count: u32) -> MigrationOptions {
    MigrationOptions {
        downtime: Duration::ZERO,
        max_rounds: count - 1,
        force: true,
        ..MigrationOptions::default()
    }
}

/// As by default, and on a machine of any speed: the guest writes all the time, and on a busy one
/// its pause alone may take longer than the downtime that is allowed.
fn for_sure() -> MigrationOptions {
    MigrationOptions {
        max_rounds: 3,
        force: true,
        ..MigrationOptions::default()
    }
}

/// A connection with time limits, and its other end.
fn connection() -> (UnixStream, UnixStream) {
    let ends = UnixStream::pair().unwrap();
    for end in [&ends.0, &ends.1] {
        end.set_read_timeout(Some(PATIENCE)).unwrap();
        end.set_write_timeout(Some(PATIENCE)).unwrap();
    }
    ends
}

/// The source's end of a connection, which says when an answer has come: 0 is the acceptance, and
/// each later one the end of a round, with its number from 1 on. What was written meanwhile is
/// looked at after that, so that whatever `answered` has the guest do belongs to the next round, on
/// a machine of any speed.
struct Answers<'a, F> {
    stream: UnixStream,
    /// Whether the guest still runs here.
    is_sending: &'a Cell<bool>,
    answered: F,
    read: usize,
}

impl<'a, F: FnMut(u32)> Answers<'a, F> {
    /// The length of an answer: a header.
    const LEN: usize = 16;

    fn new(stream: UnixStream, is_sending: &'a Cell<bool>, answered: F) -> Self {
        Self {
            stream,
            is_sending,
            answered,
            read: 0,
        }
    }
}

impl<F: FnMut(u32)> Read for Answers<'_, F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = self.stream.read(buffer)?;
        self.read += len;
        if len > 0 && self.read.is_multiple_of(Self::LEN) && self.is_sending.get() {
            (self.answered)(u32::try_from(self.read / Self::LEN).unwrap() - 1);
        }
        Ok(len)
    }
}

impl<F> Write for Answers<'_, F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Moves a guest to whoever is at the other end of `stream`; `answered` as by [`Answers`].
fn send(
    vm: &Vm,
    stream: UnixStream,
    options: &MigrationOptions,
    answered: impl FnMut(u32),
    mut progress: impl FnMut(MigrationProgress) -> ControlFlow<()>,
) -> Result<MigrationReport, MigrateError> {
    let is_sending = Cell::new(true);
    let connection = Answers::new(stream, &is_sending, answered);
    vm.migrate(connection, options, |told| {
        is_sending.set(told.step == MigrationStep::Sending);
        progress(told)
    })
}

fn go_on(_: MigrationProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn limits() -> MigrationLimits {
    MigrationLimits::memory(MemorySize::mib(256))
}

type Arrival = Result<Guest, ReceiveError>;

/// Takes a VM on another thread. Before it is started, all of its memory is compared with the one
/// that stands still.
fn receive<S: io::Read + io::Write + Send + 'static>(
    stream: S,
    source: GuestRam,
    configure: impl FnOnce(RestoreBuilder) -> RestoreBuilder + Send + 'static,
) -> JoinHandle<Arrival> {
    std::thread::spawn(move || {
        let incoming = IncomingMigration::open(stream, limits())?;
        let arrived = incoming.receive(&KvmDevice::open().unwrap())?;
        let vm = Arc::new(configure(arrived.builder()).build().unwrap());
        let mem = vm.context.machine.memory.ram().clone();
        assert_same(&source, &mem);
        arrived.start(&vm)?;
        Ok(Guest { vm, mem })
    })
}

fn assert_same(one: &GuestRam, other: &GuestRam) {
    use vm_memory::{GuestMemory as _, GuestMemoryRegion as _};
    for region in one.iter() {
        for page in (0..region.len()).step_by(4096) {
            let at = GuestAddress(region.start_addr().0 + page);
            let [mut here, mut there] = [[0u8; 4096]; 2];
            one.read_slice(&mut here, at).unwrap();
            other.read_slice(&mut there, at).unwrap();
            assert!(here == there, "the page at {:#x} differs", at.0);
        }
    }
}

/// Moves a guest; `meanwhile` is called in each round in which it runs, before what was written in
/// that round is looked at.
fn migrate(
    guest: &Guest,
    options: &MigrationOptions,
    configure: impl FnOnce(RestoreBuilder) -> RestoreBuilder + Send + 'static,
    mut meanwhile: impl FnMut(u32),
) -> (MigrationReport, Guest) {
    let (here, there) = connection();
    let receiver = receive(there, guest.mem.clone(), configure);
    let answered = |answer: u32| {
        if let Some(round) = answer.checked_sub(1) {
            meanwhile(round);
        }
    };
    let moved = send(&guest.vm, here, options, answered, go_on);
    let arrived = receiver.join().unwrap();
    (moved.unwrap(), arrived.unwrap())
}

#[test]
fn a_guest_that_moves_has_what_was_written_in_every_round() {
    let guest = Guest::start(|vm| vm.vcpus(2));
    for page in 0..100 {
        guest.write(0x80_0000 + page * 0x1000, 1);
    }
    let (report, moved) = migrate(
        &guest,
        &rounds(4),
        |vm| vm,
        |round| {
            let page = u64::from(round) * 0x1000;
            guest.write(0x30_0000 + page, round + 7);
            // One page becomes zero again.
            guest.write(0x80_0000 + page, 0);
        },
    );
    assert_eq!(report.rounds, 4);
    assert!(report.sent > 100 * 4096 && report.downtime <= report.total);
    assert_eq!(guest.vm.wait().unwrap(), VmExit::Moved);
    moved.runs_on();
    for round in 0..4 {
        let page = u64::from(round) * 0x1000;
        assert_eq!(moved.read(0x30_0000 + page), round + 7);
        assert_eq!(moved.read(0x80_0000 + page), 0);
        assert_eq!(moved.read(0x84_0000 + page), 1);
    }
}

#[test]
fn what_devices_write_meanwhile_arrives() {
    let guest = Guest::start(VmBuilder::rng);
    let mut queue = guest.device(0).start(RINGS);
    // Made available in advance: nobody but the device writes afterwards.
    for chain in 0..8 {
        queue.add(&[], &[(BUFFER + chain * 0x3000, 0x1800)]);
    }
    let (_, moved) = migrate(&guest, &rounds(3), RestoreBuilder::rng, |round| {
        if round == 0 {
            guest.device(0).notify();
            wait_for("random bytes", || {
                bytes(&guest, BUFFER + 7 * 0x3000 + 0x17f0, 16) != [0; 16]
            });
        }
    });
    let mut queue = queue.clone_in(&moved.mem);
    for _ in 0..8 {
        wait_for("a chain", || queue.take_used().is_some());
    }
    super::devices::fill(moved.device(0), &mut queue, 16);
}

/// What was plugged in moves with its slot, and the other side hears what it is before it builds
/// the VM.
#[test]
fn a_disk_that_was_plugged_in_moves_to_its_slot() {
    let disk = |byte: u8| {
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[byte; 4096], 0).unwrap();
        BlockDevice::new(Box::new(FileDisk::new(file).unwrap()))
    };
    let guest = on_pci(|vm| vm.rng().pci_hotplug());
    guest.vm.plug(disk(1)).unwrap();
    let plugged = guest.vm.plug(disk(2)).unwrap();
    // Names and slots are not those that a builder would give.
    guest.vm.unplug("blk0").unwrap();
    let mut queue = guest.function(3).start(RINGS, NO_VECTOR);
    assert_eq!(request(guest.function(3), &mut queue, 0, 512), 0);
    let (one, other) = connection();
    let receiver = std::thread::spawn(move || {
        let incoming = IncomingMigration::open(other, limits()).unwrap();
        assert_eq!(incoming.devices(), ["rng0", "blk1"]);
        let [plugged] = incoming.plugged() else {
            panic!("{:?}", incoming.plugged());
        };
        assert_eq!((&*plugged.device, &*plugged.identity), ("blk1", "data"));
        let arrived = incoming.receive(&KvmDevice::open().unwrap()).unwrap();
        let vm = arrived.builder().rng().block(disk(3)).build().unwrap();
        let vm = Arc::new(vm);
        arrived.start(&vm).unwrap();
        vm
    });
    let mut options = rounds(1);
    options.plugged = vec![PluggedIdentity {
        device: plugged.name,
        identity: "data".to_owned(),
    }];
    let moved = guest
        .vm
        .migrate(one, &options, |_| ControlFlow::Continue(()));
    moved.unwrap();
    let vm = receiver.join().unwrap();
    let mem = vm.context.machine.memory.ram().clone();
    let moved = Guest { vm, mem };
    let address = moved.vm.pci_address("blk1").unwrap();
    assert_eq!(address, Some(plugged.address));
    let mut queue = queue.clone_in(&moved.mem);
    assert_eq!(request(moved.function(3), &mut queue, 0, 512), 0);
    assert_eq!(bytes(&moved, BUFFER, 4), [3; 4]);
    // The next one gets what is free.
    let next = moved.vm.plug(disk(4)).unwrap();
    assert_eq!((&*next.name, next.address.slot), ("blk0", 2));
    moved.vm.unplug("blk1").unwrap();
    assert_eq!(moved.config(3, 0), u32::MAX);
}

#[test]
fn a_guest_may_move_again_and_again() {
    let mut guest = Guest::start(VmBuilder::rng);
    for round in 0..5 {
        guest.write(0x30_0000 + round * 0x1000, 5);
        let options = for_sure();
        guest = migrate(&guest, &options, RestoreBuilder::rng, |_| ()).1;
        guest.runs_on();
    }
    for round in 0..5 {
        assert_eq!(guest.read(0x30_0000 + round * 0x1000), 5);
    }
}

#[test]
fn a_paused_guest_arrives_paused_and_a_clone_moves_with_its_file() {
    let (_dir, place) = place();
    let first = Guest::start(|vm| vm);
    first.write(0x30_0000, 6);
    first.pause();
    first.vm.snapshot(&place).unwrap();
    let clone = Guest::restore(&Snapshot::open(&place).unwrap(), |vm| vm);
    clone.write(0x40_0000, 8);
    clone.pause();
    let (_, moved) = migrate(&clone, &for_sure(), |vm| vm, |_| ());
    assert_eq!(moved.vm.state(), State::Created);
    moved.vm.start().unwrap();
    assert_eq!((moved.read(0x30_0000), moved.read(0x40_0000)), (6, 8));
    assert_eq!(clone.vm.wait().unwrap(), VmExit::Moved);
}

/// A connection that ends after some bytes were written to it, as far as its owner knows.
struct Cut {
    stream: UnixStream,
    left: usize,
}

impl Read for Cut {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.read(buffer)
    }
}

impl Write for Cut {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.left == 0 {
            self.stream.shutdown(std::net::Shutdown::Both)?;
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let len = bytes.len().min(self.left);
        let written = self.stream.write(&bytes[..len])?;
        self.left -= written;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Moves a guest, and returns whether it runs here afterwards, and there.
fn runs_after(guest: &Guest, here: usize, there: usize) -> (bool, bool) {
    let ends = connection();
    let cut = |stream, left| Cut { stream, left };
    let receiver = receive(cut(ends.1, there), guest.mem.clone(), |vm| vm);
    let options = for_sure();
    let moved = guest
        .vm
        .migrate(cut(ends.0, here), &options, |_| ControlFlow::Continue(()));
    let arrived = receiver.join().unwrap();
    match &moved {
        Ok(_) => assert_eq!(guest.vm.wait().unwrap(), VmExit::Moved),
        Err(MigrateError::InDoubt(_)) => assert_eq!(guest.vm.state(), State::Paused),
        Err(_) => guest.runs_on(),
    }
    if let Ok(arrived) = &arrived {
        arrived.runs_on();
    }
    let here = guest.vm.state() == State::Running;
    assert!(here || arrived.is_ok() || matches!(moved, Err(MigrateError::InDoubt(_))));
    (here, arrived.is_ok())
}

#[test]
fn a_connection_that_breaks_anywhere_leaves_one_guest_at_most() {
    // How much each side writes in a whole one.
    let counted = |cut: (usize, usize)| {
        let guest = Guest::start(|vm| vm);
        runs_after(&guest, cut.0, cut.1)
    };
    assert_eq!(counted((usize::MAX, usize::MAX)), (false, true));
    for here in [0, 5, 12, 20, 28, 4000, 20_000] {
        assert_eq!(counted((here, usize::MAX)), (true, false), "{here}");
    }
    // Each answer is a header of 16 bytes: acceptance, rounds, ready, running.
    for there in [0, 3, 16, 20, 32, 40] {
        let (here, arrived) = counted((usize::MAX, there));
        assert!(!(here && arrived), "{there}: it runs twice");
    }
}

#[test]
fn a_guest_that_is_given_away_is_not_resumed_when_nobody_answers() {
    let guest = Guest::start(|vm| vm);
    let (here, there) = connection();
    let receiver = std::thread::spawn(move || {
        let cut = there.try_clone().unwrap();
        let incoming = IncomingMigration::open(there, limits()).unwrap();
        let arrived = incoming.receive(&KvmDevice::open().unwrap()).unwrap();
        let vm = arrived.builder().build().unwrap();
        let taken = arrived.take(|| {
            // Nobody hears that it runs here.
            cut.shutdown(std::net::Shutdown::Both).unwrap();
            vm.start().map_err(Into::into)
        });
        taken.unwrap();
        assert_eq!(vm.state(), State::Running);
    });
    let options = for_sure();
    let error = guest
        .vm
        .migrate(here, &options, |_| ControlFlow::Continue(()));
    receiver.join().unwrap();
    assert!(matches!(error, Err(MigrateError::InDoubt(_))), "{error:?}");
    assert_eq!(guest.vm.state(), State::Paused);
    guest.vm.resume().unwrap();
    guest.runs_on();
}

fn refused_by(
    receive: impl FnOnce(IncomingMigration<UnixStream>) + Send + 'static,
) -> (Guest, String) {
    let guest = Guest::start(|vm| vm);
    let (here, there) = connection();
    let receiver =
        std::thread::spawn(move || receive(IncomingMigration::open(there, limits()).unwrap()));
    let options = for_sure();
    let refused = guest
        .vm
        .migrate(here, &options, |_| ControlFlow::Continue(()));
    receiver.join().unwrap();
    let Err(MigrateError::Stream(StreamError::Refused(reason))) = refused else {
        panic!("{refused:?}");
    };
    (guest, reason)
}

#[test]
fn a_guest_that_is_refused_runs_on_and_its_owner_learns_why() {
    let (guest, reason) = refused_by(|incoming| {
        assert_eq!(
            (incoming.vcpus(), incoming.memory()),
            (1, MemorySize::mib(32))
        );
        incoming.refuse("no room");
    });
    assert_eq!(reason, "no room");
    guest.runs_on();
    let receive = |incoming: IncomingMigration<UnixStream>| -> ArrivedMigration<UnixStream> {
        incoming.receive(&KvmDevice::open().unwrap()).unwrap()
    };
    let (guest, reason) = refused_by(move |incoming| receive(incoming).refuse("no such disk"));
    assert_eq!(reason, "no such disk");
    guest.runs_on();
    // Given away, and handed back by a side that cannot start it.
    let (guest, reason) = refused_by(move |incoming| {
        let error = receive(incoming).take(|| Err("no threads".into()));
        assert!(matches!(error, Err(ReceiveError::Start(_))), "{error:?}");
    });
    assert_eq!(reason, "no threads");
    guest.runs_on();
}

#[test]
fn a_guest_that_needs_too_much_is_refused_before_anything_is_allocated() {
    let guest = Guest::start(|vm| vm);
    let (here, there) = connection();
    let receiver = std::thread::spawn(move || {
        let limits = MigrationLimits::memory(MemorySize::mib(31));
        IncomingMigration::open(there, limits).map(drop)
    });
    let options = for_sure();
    let refused = guest
        .vm
        .migrate(here, &options, |_| ControlFlow::Continue(()));
    let error = receiver.join().unwrap().unwrap_err();
    let words = "the migrated VM has 32 MiB of memory, and may have 31 MiB here";
    assert_eq!(error.to_string(), words);
    let reason = refused.unwrap_err().to_string();
    assert!(reason.ends_with(words), "{reason}");
    guest.runs_on();
}

#[test]
fn a_guest_that_writes_too_fast_or_is_cancelled_runs_on() {
    let options = MigrationOptions {
        downtime: Duration::ZERO,
        max_rounds: 2,
        ..MigrationOptions::default()
    };
    for is_cancelled in [false, true] {
        let guest = Guest::start(|vm| vm);
        let (here, there) = connection();
        let receiver = receive(there, guest.mem.clone(), |vm| vm);
        let answered = |_| guest.runs_on();
        let refused = send(
            &guest.vm,
            here,
            &options,
            answered,
            |_| match is_cancelled {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            },
        );
        match refused.unwrap_err() {
            MigrateError::Busy {
                rounds: 3, left, ..
            } if !is_cancelled => assert!(left > 0),
            MigrateError::Cancelled if is_cancelled => {}
            other => panic!("{other}"),
        }
        let told = receiver.join().unwrap().map(drop).unwrap_err();
        assert!(matches!(
            told,
            ReceiveError::Stream(StreamError::Refused(_))
        ));
        guest.runs_on();
        assert!(!guest.vm.context.machine.memory.writes().is_on());
    }
}

/// A device of which nobody knows what it writes.
#[derive(Debug)]
struct Unlogged;

impl VirtioDevice for Unlogged {
    fn info(&self) -> DeviceInfo {
        one_queue()
    }

    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        drop(queue);
        Ok(())
    }

    fn stop_queue(&mut self, _: u16) -> Option<Queue> {
        None
    }

    fn logs_writes(&self) -> bool {
        false
    }

    fn on_queue(&mut self, _: u16) -> Result<Progress, Fault> {
        Ok(Progress::Idle)
    }
}

#[test]
fn a_guest_that_writes_too_fast_is_slowed_down_and_goes_on_as_fast_as_before() {
    let options = MigrationOptions {
        downtime: Duration::ZERO,
        max_rounds: 5,
        throttle: true,
        ..MigrationOptions::default()
    };
    let guest = Guest::start(|vm| vm.vcpus(2));
    let (here, there) = connection();
    let receiver = receive(there, guest.mem.clone(), |vm| vm);
    let mut slowed = Vec::new();
    // As much in each round.
    let answered = |answer| {
        for page in 0..8 {
            guest.write(0x80_0000 + page * 0x1000, answer + 1);
        }
    };
    let refused = send(&guest.vm, here, &options, answered, |progress| {
        slowed.push(progress.throttle);
        ControlFlow::Continue(())
    });
    assert!(
        matches!(refused, Err(MigrateError::Busy { .. })),
        "{refused:?}"
    );
    assert!(receiver.join().unwrap().is_err());
    assert!(
        slowed.contains(&0) && slowed.contains(&20) && slowed.contains(&30),
        "{slowed:?}"
    );
    assert!(slowed.is_sorted());
    guest.runs_on();
    // It is not held any more, and can be paused as ever.
    guest.pause();
}

#[test]
fn a_device_that_does_not_tell_what_it_writes_does_not_move() {
    let guest = Guest::start(|vm| vm.device(Unlogged));
    let (here, _there) = connection();
    let options = for_sure();
    let error = guest
        .vm
        .migrate(here, &options, |_| ControlFlow::Continue(()));
    let error = error.unwrap_err();
    assert!(
        matches!(&error, MigrateError::Unlogged { device } if device == "rng0"),
        "{error}"
    );
    guest.runs_on();
}
