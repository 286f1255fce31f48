//! Clones of a Linux guest that was snapshotted in the middle of its work.

mod support;

use std::io::Write;
use std::path::Path;

use podvisor_vmm::{
    BlockDevice, MacAddress, MemorySize, NetDevice, Snapshot, Transport, VmBuilder, VmExit,
};
use support::tap::tap;
use support::{Console, linux, pause};

/// The guest's endless work: reads its disk, pings its neighbour, and uses a CPU.
const WORK: &str = "ip addr add 10.9.0.2/24 dev eth0; ip link set eth0 up\n\
     (while :; do :; done) &\n\
     n=0\n\
     while :; do\n\
       n=$((n + 1)); echo 3 > /proc/sys/vm/drop_caches\n\
       sum=$(md5sum < /dev/vda)\n\
       ping -c 1 -W 120 -q 10.9.0.1 > /dev/null && net=ok || net=bad\n\
       echo round $n ${sum%% *} $net $(cut -d' ' -f1 /proc/uptime) end\n\
     done";

/// One round of the guest's work, as it reports it.
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
        // A clone's console may start in the middle of a line.
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

fn devices<S>(vm: VmBuilder<S>, disk: &Path) -> VmBuilder<S> {
    let card = NetDevice::tap(tap().into()).unwrap();
    vm.block(BlockDevice::open(disk).unwrap().read_only())
        .block(BlockDevice::spare())
        .net(card.mac(MacAddress([2, 0, 0, 0, 0, 9])))
        .rng()
}

fn goes_on(transport: Transport, clones: usize) {
    let mut disk = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (0..1u32 << 18).flat_map(u32::to_le_bytes).collect();
    disk.write_all(&bytes).unwrap();
    let console = Console::default();
    let vm = linux(WORK, &console).vcpus(2).memory(MemorySize::mib(128));
    let vm = devices(vm.transport(transport), disk.path())
        .build()
        .unwrap();
    vm.start().unwrap();
    console.wait_for("round 2 ");
    pause(&vm);
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
            let vm = devices(snapshot.builder().serial(console.clone()), disk.path())
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
        assert_eq!(vm.wait().unwrap(), VmExit::Stopped);
    }
}
