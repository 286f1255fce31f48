//! Devices as a Linux guest sees them.

mod support;

use std::io::Write;
use std::os::unix::net::UnixStream;

use podvisor_vmm::devices::net::MemoryNic;
use podvisor_vmm::{
    BlockDevice, ConsoleDevice, IoEngine, LinkState, NetDevice, Transport, VmExit, VsockDevice,
};
use support::{Console, linux};

/// A disk of 1 MiB whose words are their own indices.
fn disk() -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (0..1u32 << 18)
        .flat_map(|word| word.to_le_bytes())
        .collect();
    file.write_all(&bytes).unwrap();
    file
}

/// The transports that every test of a device runs on.
const TRANSPORTS: [Transport; 2] = [Transport::Mmio, Transport::Pci];

#[test]
fn guest_reads_and_writes_its_disks_on_both_transports() {
    TRANSPORTS.into_iter().for_each(reads_and_writes);
}

fn reads_and_writes(transport: Transport) {
    let (one, two) = (disk(), disk());
    let console = Console::default();
    let script = "cat /sys/block/vda/serial; echo; cat /sys/block/vda/ro /sys/block/vdb/ro\n\
         cmp /dev/vda /dev/vdb && echo same\n\
         dd if=/dev/zero of=/dev/vdb bs=4096 count=3 seek=7 conv=fsync 2>/dev/null && echo written\n\
         dd if=/dev/zero of=/dev/vda bs=512 count=1 2>/dev/null || echo refused\n\
         cmp /dev/vda /dev/vdb >/dev/null || echo different";
    let vm = linux(script, &console)
        .transport(transport)
        .block(
            BlockDevice::open(one.path())
                .unwrap()
                .read_only()
                .serial("one"),
        )
        .block(BlockDevice::open(two.path()).unwrap())
        .build()
        .unwrap();
    vm.start().unwrap();
    assert_eq!(vm.wait().unwrap(), VmExit::Reset);
    let text = console.text();
    let lines: Vec<_> = text.lines().skip_while(|line| *line != "one").collect();
    assert_eq!(
        lines[..7],
        ["one", "1", "0", "same", "written", "refused", "different"],
        "{text}"
    );
    let bytes = std::fs::read(two.path()).unwrap();
    assert!(bytes[7 * 4096..10 * 4096].iter().all(|b| *b == 0));
    assert_ne!(bytes[10 * 4096 + 4..10 * 4096 + 8], [0; 4]);
    assert!(vm.faults().is_empty());
    let counters = vm.counters();
    let blk1 = counters.iter().find(|c| c.device == "blk1").unwrap();
    let written = blk1
        .counters
        .iter()
        .find(|c| c.name == "write_bytes")
        .unwrap();
    assert!(written.value >= 3 * 4096, "{counters:?}");
}

#[test]
fn guest_reads_and_writes_its_console_on_both_transports() {
    for transport in TRANSPORTS {
        let (serial, shown) = (Console::default(), Console::default());
        let (typed, mut keys) = UnixStream::pair().unwrap();
        let script = "until [ -c /dev/hvc0 ]; do sleep 0.1; done; exec < /dev/hvc0 > /dev/hvc0\n\
             echo ready; read line; echo got $line\n\
             until [ \"$(stty size)\" = '43 132' ]; do :; done\n\
             stty size; dmesg -n 1; seq 1 3000; echo over";
        let console = ConsoleDevice::new(Box::new(shown.clone()));
        let vm = linux(script, &serial)
            .transport(transport)
            .console(console.input(typed.into()).unwrap())
            .build()
            .unwrap();
        vm.start().unwrap();
        shown.wait_for("ready");
        vm.console().unwrap().resize(132, 43).unwrap();
        keys.write_all(b"what was typed\n").unwrap();
        assert_eq!(vm.wait().unwrap(), VmExit::Reset);
        let text = shown.text();
        assert!(text.contains("\ngot what was typed\n"), "{text}");
        assert!(text.contains("\n43 132\n"), "{transport:?}: {text}");
        let numbers: Vec<String> = (1..=3000).map(|number| number.to_string()).collect();
        assert!(text.contains(&numbers.join("\n")), "{transport:?}");
        assert!(text.ends_with("over\n"), "{text}");
        assert!(vm.faults().is_empty());
    }
}

#[test]
fn guest_uses_disks_of_every_engine_with_several_queues_on_both_transports() {
    // On PCI there is a vector for each queue, on MMIO a line for each device.
    several_queues(Transport::Mmio, "0");
    several_queues(Transport::Pci, "4");
}

fn several_queues(transport: Transport, vectors: &str) {
    let console = Console::default();
    // Four readers and a writer in parallel, over each whole disk; then holes and zeroes.
    let script = "for disk in vda vdb; do\n\
         ls /sys/block/$disk/mq | wc -l\n\
         for n in 0 1 2 3; do dd if=/dev/$disk bs=64k skip=$n count=16 iflag=direct 2>/dev/null | sha256sum > /sum$n & done\n\
         dd if=/dev/$disk of=/dev/$disk bs=4k count=16 iflag=direct oflag=direct conv=notrunc,fsync 2>/dev/null\n\
         wait; cat /sum0 /sum1 /sum2 /sum3 | sha256sum\n\
         blkdiscard -o 65536 -l 65536 /dev/$disk && echo discarded\n\
         blkdiscard -z -o 262144 -l 4096 /dev/$disk 2>/dev/null; sync\n\
         sha256sum < /dev/$disk; done; echo over; grep -c virtio.-req /proc/interrupts";
    let disks = [disk(), disk()];
    let open = |n: usize, io| BlockDevice::open_with(disks[n].path(), io).unwrap();
    let vm = linux(script, &console)
        .transport(transport)
        .vcpus(2)
        .block(open(0, IoEngine::Sync).queues(2))
        .block(open(1, IoEngine::Uring).queues(2))
        .build()
        .unwrap();
    vm.start().unwrap();
    assert_eq!(vm.wait().unwrap(), VmExit::Reset);
    let text = console.text();
    let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('[')).collect();
    assert_eq!(
        (lines.len(), lines[8], lines[9]),
        (10, "over", vectors),
        "{text}"
    );
    assert_eq!((lines[0], lines[2]), ("2", "discarded"), "{text}");
    assert_eq!(lines[..4], lines[4..8], "{text}");
    let [one, two] = [0, 1].map(|n: usize| std::fs::read(disks[n].path()).unwrap());
    assert!(one == two, "both disks went through the same");
    assert!(one[65536..131_072].iter().all(|byte| *byte == 0));
    assert_eq!(one[131_076..131_080], 32769u32.to_le_bytes());
    assert!(vm.faults().is_empty());
}

#[test]
fn guest_finds_what_is_plugged_in_and_lets_go_of_it() {
    let disk = disk();
    let console = Console::default();
    // Twice: a disk, a card and the socket device are added, and the disk is removed.
    let script = "pci=/sys/bus/pci; virtio=/sys/bus/virtio/drivers\n\
         echo ready; until [ -e /sys/class/net/eth0 ]; do sleep 0.1; echo 1 > $pci/rescan; done\n\
         ip link set eth0 up\n\
         ls $virtio/virtio_blk $virtio/vmw_vsock_virtio_transport | grep -c virtio.$\n\
         sha256sum < /dev/vda; cat /sys/block/vda/serial; echo\n\
         echo 1 > $pci/devices/0000:00:02.0/remove; ls /sys/block | wc -l; echo removed\n\
         until [ $(cat /sys/class/net/eth0/carrier) = 0 ]; do sleep 0.1; done; echo 1 > $pci/rescan\n\
         sha256sum < /dev/vda; cat /sys/block/vda/serial; echo\n\
         ls $pci/devices | wc -l; echo over";
    let vm = linux(script, &console)
        .transport(Transport::Pci)
        .rng()
        .build()
        .unwrap();
    vm.start().unwrap();
    console.wait_for("ready");
    let open = || BlockDevice::open(disk.path()).unwrap();
    let plugged = vm.plug(open().serial("first")).unwrap();
    assert_eq!(plugged.address.to_string(), "0000:00:02.0");
    vm.plug(VsockDevice::in_process(3).unwrap()).unwrap();
    let (nic, _wire) = MemoryNic::pair();
    vm.plug(NetDevice::new(Box::new(nic)).unwrap()).unwrap();
    console.wait_for("removed");
    vm.unplug(&plugged.name).unwrap();
    // The lock on the file was released with the device.
    let again = vm.plug(open().serial("second")).unwrap();
    assert_eq!(again, plugged);
    // A signal to the guest that it may rescan.
    vm.net("net0").unwrap().set_link(LinkState::Down).unwrap();
    assert_eq!(vm.wait().unwrap(), VmExit::Reset);
    let text = console.text();
    let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('[')).collect();
    let sum = lines[2];
    assert_eq!(
        lines[1..],
        [
            "2", sum, "first", "0", "removed", sum, "second", "5", "over"
        ],
        "{text}"
    );
    assert!(vm.faults().is_empty());
}
