//! Devices as a Linux guest sees them.

mod support;

use std::io::Write;

use podvisor_vmm::{BlockDevice, Exit};
use support::{Console, linux};

/// A disk of 1 MiB whose bytes say where they are.
fn disk() -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (0..1u32 << 18)
        .flat_map(|word| word.to_le_bytes())
        .collect();
    file.write_all(&bytes).unwrap();
    file
}

#[test]
fn guest_reads_and_writes_its_disks() {
    let (one, two) = (disk(), disk());
    let console = Console::default();
    let script = "cat /sys/block/vda/serial; echo; cat /sys/block/vda/ro /sys/block/vdb/ro\n\
         cmp /dev/vda /dev/vdb && echo same\n\
         dd if=/dev/zero of=/dev/vdb bs=4096 count=3 seek=7 conv=fsync 2>/dev/null && echo written\n\
         dd if=/dev/zero of=/dev/vda bs=512 count=1 2>/dev/null || echo refused\n\
         cmp /dev/vda /dev/vdb >/dev/null || echo different";
    let vm = linux(script, &console)
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
    assert_eq!(vm.wait().unwrap(), Exit::Reset);
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
