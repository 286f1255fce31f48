//! A Linux guest under load, which is repeatedly paused, snapshotted and restored, or moves over a
//! connection: the data that it writes, sends and computes stays correct.

mod support;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use podvisor_vmm::{
    BlockDevice, FileDisk, IncomingMigration, Initramfs, KvmDevice, MacAddress, MemorySize,
    MigrationLimits, MigrationOptions, NetDevice, Snapshot, Transport, Vm, VmBuilder, VmExit,
    VsockDevice,
};
use support::tap::{HOST, tap, vhost};
use support::{Console, PATIENCE, busybox_with, linux_with, pause, program};

/// Rounds on each transport, unless `PODVISOR_TEST_ROUNDS` sets another number.
const ROUNDS: usize = 3;
/// The port on which the host echoes, over TCP and over vsock (`load.c`).
const PORT: u16 = 7000;

#[test]
fn guest_under_load_loses_nothing_in_rounds_of_pause_snapshot_and_restore() {
    loses_nothing(Transport::Mmio, card);
}

#[test]
fn guest_under_load_loses_nothing_in_rounds_of_pause_snapshot_and_restore_on_pci() {
    loses_nothing(Transport::Pci, card);
}

#[test]
fn guest_under_load_whose_frames_the_kernel_moves_loses_nothing_in_rounds() {
    loses_nothing(Transport::Pci, |tap| {
        NetDevice::vhost(tap, vhost()).unwrap()
    });
}

fn card(tap: OwnedFd) -> NetDevice {
    NetDevice::tap(tap).unwrap()
}

/// The host sides of the devices of all clones.
struct HostSides {
    disk: PathBuf,
    tap: File,
    card: fn(OwnedFd) -> NetDevice,
    streams: mpsc::Sender<UnixStream>,
}

impl HostSides {
    fn new(dir: &Path, card: fn(OwnedFd) -> NetDevice) -> Self {
        let disk = dir.join("disk");
        File::create_new(&disk).unwrap().set_len(1 << 20).unwrap();
        let tap = tap();
        echo_over_tcp();
        Self {
            disk,
            tap,
            card,
            streams: echo_over_vsock(),
        }
    }

    /// Takes a guest that moves here.
    fn receive(&self, stream: UnixStream, console: &Console) -> Vm {
        let limits = MigrationLimits::memory(MemorySize::mib(64));
        let incoming = IncomingMigration::open(stream, limits).unwrap();
        let arrived = incoming.receive(&KvmDevice::open().unwrap()).unwrap();
        // The other side still holds the disk's lock.
        let disk = File::options().read(true).write(true).open(&self.disk);
        let disk = BlockDevice::new(Box::new(FileDisk::new(disk.unwrap()).unwrap()));
        let builder = arrived.builder().serial(console.clone());
        let vm = self.attach_with(builder, disk).build().unwrap();
        arrived.start(&vm).unwrap();
        vm
    }

    fn attach<S>(&self, vm: VmBuilder<S>) -> VmBuilder<S> {
        self.attach_with(vm, BlockDevice::open(&self.disk).unwrap())
    }

    fn attach_with<S>(&self, vm: VmBuilder<S>, disk: BlockDevice) -> VmBuilder<S> {
        let mut vsock = VsockDevice::in_process(3).unwrap();
        let streams = self.streams.clone();
        vsock.listen(PORT.into(), move |stream| drop(streams.send(stream)));
        let card = (self.card)(self.tap.try_clone().unwrap().into());
        vm.block(disk)
            .net(card.mac(MacAddress([2, 0, 0, 0, 0, 9])))
            .vsock(vsock)
            .rng()
    }
}

#[test]
fn guest_under_load_moves_again_and_again_and_loses_nothing() {
    for transport in [Transport::Mmio, Transport::Pci] {
        moves_and_loses_nothing(transport);
    }
}

fn moves_and_loses_nothing(transport: Transport) {
    let moves = std::env::var("PODVISOR_TEST_ROUNDS").map_or(2, |n| n.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let hosts = HostSides::new(dir.path(), card);
    let mut console = Console::default();
    let vm = linux_with(initramfs(), &console)
        .vcpus(2)
        .memory(MemorySize::mib(64));
    let mut vm = hosts.attach(vm.transport(transport)).build().unwrap();
    vm.start().unwrap();
    let mut done = goes_on(&vm, &console, [0; 4]);
    // The load writes all the time, on an emulated processor.
    let options = MigrationOptions {
        max_rounds: 3,
        force: true,
        ..MigrationOptions::default()
    };
    for _ in 0..moves {
        let (here, there) = UnixStream::pair().unwrap();
        for end in [&here, &there] {
            end.set_read_timeout(Some(PATIENCE)).unwrap();
            end.set_write_timeout(Some(PATIENCE)).unwrap();
        }
        console = Console::default();
        let (report, moved) = thread::scope(|scope| {
            let receiver = scope.spawn(|| hosts.receive(there, &console));
            let report = vm.migrate(here, &options, |_| ControlFlow::Continue(()));
            (report.unwrap(), receiver.join().unwrap())
        });
        println!("{report:?}");
        assert_eq!(vm.wait().unwrap(), VmExit::Moved);
        vm = moved;
        done = goes_on(&vm, &console, done);
    }
}

fn loses_nothing(transport: Transport, card: fn(OwnedFd) -> NetDevice) {
    let rounds = std::env::var("PODVISOR_TEST_ROUNDS").map_or(ROUNDS, |n| n.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let hosts = HostSides::new(dir.path(), card);
    let mut console = Console::default();
    let vm = linux_with(initramfs(), &console)
        .vcpus(2)
        .memory(MemorySize::mib(64));
    let mut vm = hosts.attach(vm.transport(transport)).build().unwrap();
    vm.start().unwrap();
    let mut done = goes_on(&vm, &console, [0; 4]);
    let mut first = None;
    for round in 0..rounds {
        pause(&vm);
        let place = dir.path().join(round.to_string());
        vm.snapshot(&place).unwrap();
        nothing_changes_while_paused(&vm, &place);
        vm.resume().unwrap();
        done = goes_on(&vm, &console, done);

        pause(&vm);
        let place = dir.path().join(format!("{round}.last"));
        vm.snapshot(&place).unwrap();
        vm.stop().unwrap();
        drop(vm);
        let snapshot = Snapshot::open(&place).unwrap();
        fs::remove_dir_all(&place).unwrap();
        console = Console::default();
        let clone = snapshot.builder().serial(console.clone());
        vm = hosts.attach(clone).build().unwrap();
        vm.start().unwrap();
        drop(snapshot);
        done = goes_on(&vm, &console, done);
        // A clone holds no more resources than the previous one.
        let first = *first.get_or_insert_with(held);
        let deadline = Instant::now() + PATIENCE;
        while held() != first {
            assert!(Instant::now() < deadline, "{first:?}, now {:?}", held());
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Creates an initramfs whose init becomes the load.
fn initramfs() -> Initramfs {
    let script = "ip addr add 10.9.0.2/24 dev eth0; ip link set eth0 up; exec load";
    busybox_with(script, &[("load", &program("load.c"))])
}

/// Waits until each of the guest's jobs has made progress since `done`, also on this console,
/// beyond what may have been in flight by then, and returns their progress.
fn goes_on(vm: &Vm, console: &Console, done: [u64; 4]) -> [u64; 4] {
    let deadline = Instant::now() + PATIENCE;
    let mut text = String::new();
    while Instant::now() < deadline {
        text = console.text();
        for wrong in [
            "bad ",
            "BUG",
            "soft lockup",
            "rcu_",
            "Call Trace",
            "timed out",
        ] {
            assert!(!text.contains(wrong), "{text}");
        }
        let mut told = text.lines().filter_map(|line| {
            let numbers = line.strip_prefix("at ")?.strip_suffix(" end")?;
            let numbers: Option<Vec<u64>> = numbers.split(' ').map(|n| n.parse().ok()).collect();
            <[u64; 4]>::try_from(numbers?).ok()
        });
        // A clone's first report may be entirely the work of the guest that it was cloned from.
        if let Some(first) = told.next()
            && let Some(now) = told.next_back()
            && (0..4).all(|job| now[job] > done[job].max(first[job]) + 1)
        {
            assert!(vm.faults().is_empty());
            return now;
        }
        console.wait_for_more(&text, deadline);
    }
    panic!("more than {done:?} by now: {text}");
}

/// Checks that another snapshot has the same memory as the one in `place`.
fn nothing_changes_while_paused(vm: &Vm, place: &Path) {
    let again = place.with_extension("again");
    vm.snapshot(&again).unwrap();
    let memory = |place: &Path| fs::read(place.join("memory")).unwrap();
    assert!(memory(place) == memory(&again), "memory changed in a pause");
    for place in [place, &again] {
        fs::remove_dir_all(place).unwrap();
    }
}

/// Returns the numbers of descriptors and threads of this process.
fn held() -> (usize, usize) {
    let count = |what| fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
    (count("fd"), count("task"))
}

/// Echoes on the connections of the calling thread's network namespace.
fn echo_over_tcp() {
    let listener = TcpListener::bind((HOST, PORT)).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            echo(&mut stream);
        }
    });
}

/// Echoes on the streams that are sent to it, one after the other: the guest has one at a time.
fn echo_over_vsock() -> mpsc::Sender<UnixStream> {
    let (streams, all) = mpsc::channel();
    thread::spawn(move || {
        for mut stream in all {
            echo(&mut stream);
        }
    });
    streams
}

/// Echoes until the other side ends, or is cut off.
fn echo(stream: &mut (impl Read + Write)) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = stream.read(&mut bytes) {
        if stream.write_all(&bytes[..count]).is_err() {
            return;
        }
    }
}
