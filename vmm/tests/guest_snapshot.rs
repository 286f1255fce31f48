//! Clones of a Linux guest that was snapshotted in the middle of its work.
#![allow(unsafe_code)] // TUNSETIFF, namespaces for one thread

mod support;

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::process::Command;

use podvisor_vmm::{
    BlockDevice, Exit, MacAddress, MemorySize, NetDevice, Snapshot, Transport, VmBuilder,
};
use rustix::thread::UnshareFlags;
use support::{Console, linux};

/// What the guest does for ever: reads its disk, asks its neighbour, and uses a CPU besides.
const WORK: &str = "ip addr add 10.9.0.2/24 dev eth0; ip link set eth0 up\n\
     (while :; do :; done) &\n\
     n=0\n\
     while :; do\n\
       n=$((n + 1)); echo 3 > /proc/sys/vm/drop_caches\n\
       sum=$(md5sum < /dev/vda)\n\
       ping -c 1 -W 30 -q 10.9.0.1 > /dev/null && net=ok || net=bad\n\
       echo round $n ${sum%% *} $net $(cut -d' ' -f1 /proc/uptime) end\n\
     done";

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}");
}

/// A tap with the address 10.9.0.1/24 in a network namespace of its own.
fn tap() -> File {
    // SAFETY: the thread's network namespace alone changes.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.expect("run as root");
    let tap = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .expect("the module `tun`");
    // SAFETY: an ifreq of zeroes is a valid one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"tap0") {
        *to = (*from).cast_signed();
    }
    request.ifr_ifru.ifru_flags =
        i16::try_from(libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR).unwrap();
    // SAFETY: TUNSETIFF reads and writes an ifreq.
    let result = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    let ip = |arguments: &str| {
        let words: Vec<&str> = arguments.split(' ').collect();
        run("/bin/busybox", &words);
    };
    // The same neighbour in each namespace, or guests would look for the old one at first.
    ip("ip link set tap0 address 02:00:00:00:00:01");
    ip("ip addr add 10.9.0.1/24 dev tap0");
    ip("ip link set tap0 up");
    tap
}

/// One round of the guest's work, as it tells it.
#[derive(Debug, PartialEq)]
struct Round {
    number: u32,
    sum: String,
    net: String,
    uptime: f64,
}

fn rounds(console: &Console) -> Vec<Round> {
    let text = console.text();
    let lines = text.lines().filter(|line| line.ends_with(" end"));
    let round = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        // A clone's console may begin in the middle of a line.
        let start = words.iter().position(|word| *word == "round")?;
        Some(Round {
            number: words.get(start + 1)?.parse().ok()?,
            sum: (*words.get(start + 2)?).to_owned(),
            net: (*words.get(start + 3)?).to_owned(),
            uptime: words.get(start + 4)?.parse().ok()?,
        })
    };
    lines.filter_map(round).collect()
}

#[test]
fn guest_linux_and_its_clones_go_on_with_disk_network_and_load() {
    goes_on(Transport::Mmio, 1);
}

#[test]
fn guest_linux_and_its_clones_go_on_on_pci_with_disk_network_and_load() {
    goes_on(Transport::Pci, 2);
}

fn goes_on(transport: Transport, clones: usize) {
    let mut disk = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (0..1u32 << 18).flat_map(u32::to_le_bytes).collect();
    disk.write_all(&bytes).unwrap();
    let devices = |vm: VmBuilder| {
        vm.block(BlockDevice::open(disk.path()).unwrap().read_only())
            .block(BlockDevice::spare())
            .net(
                NetDevice::tap(tap().into())
                    .unwrap()
                    .mac(MacAddress([2, 0, 0, 0, 0, 9])),
            )
            .rng()
    };
    let console = Console::default();
    let vm = linux(WORK, &console).vcpus(2).memory(MemorySize::mib(128));
    let vm = devices(vm.transport(transport)).build().unwrap();
    vm.start().unwrap();
    console.wait_for("round 2 ");
    vm.pause().unwrap();
    let parent = tempfile::tempdir().unwrap();
    let place = parent.path().join("warm");
    vm.snapshot(&place).unwrap();
    let before = rounds(&console);
    let last = before.last().unwrap().number;

    let snapshot = Snapshot::open(&place).unwrap();
    assert_eq!(snapshot.devices(), ["blk0", "blk1", "net0", "rng0"]);
    let clones: Vec<_> = (0..clones)
        .map(|_| {
            let console = Console::default();
            let vm = devices(snapshot.builder().serial(console.clone()))
                .build()
                .unwrap();
            vm.start().unwrap();
            (vm, console)
        })
        .collect();
    vm.resume().unwrap();
    let all: Vec<_> = std::iter::once((vm, console)).chain(clones).collect();
    for (vm, console) in &all {
        console.wait_for(&format!("round {} ", last + 3));
        for pair in rounds(console).windows(2) {
            let [a, b] = pair else { unreachable!() };
            assert_eq!((b.number, &b.sum), (a.number + 1, &before[0].sum));
            assert_eq!(b.net, "ok", "{}", console.text());
            assert!((0.0..600.0).contains(&(b.uptime - a.uptime)), "{a:?} {b:?}");
        }
        let text = console.text();
        for bad in ["BUG", "soft lockup", "rcu_", "Call Trace", "timed out"] {
            assert!(!text.contains(bad), "{text}");
        }
        assert!(vm.faults().is_empty());
        vm.stop().unwrap();
        assert_eq!(vm.wait().unwrap(), Exit::Stopped);
    }
}
