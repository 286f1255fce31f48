//! A file that is memory of a Linux guest: an EROFS image that is read in place.

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;

use podvisor_vmm::{PmemDevice, Transport, Vm, VmExit};
use support::{Console, linux};

/// The size of the large file, whose pages all differ.
const LEN: u32 = 16 << 20;

/// Creates an EROFS image of two files, and returns the digests of both.
fn image(dir: &Path) -> Vec<String> {
    let tree = dir.join("tree");
    fs::create_dir(&tree).unwrap();
    let words: Vec<u8> = (0..LEN / 4).flat_map(u32::to_le_bytes).collect();
    fs::write(tree.join("large"), words).unwrap();
    fs::write(tree.join("small"), b"a tail\n").unwrap();
    let made = Command::new("mkfs.erofs")
        .arg(dir.join("image"))
        .arg(&tree)
        .output()
        .expect("mkfs.erofs: run `cargo xtask setup`");
    assert!(made.status.success(), "{made:?}");
    let sums = Command::new("sha256sum")
        .args(["large", "small"])
        .current_dir(&tree)
        .output()
        .unwrap();
    let text = String::from_utf8(sums.stdout).unwrap();
    text.lines().map(str::to_owned).collect()
}

/// The growth of the guest's page cache is reported in KiB.
const SCRIPT: &str = "\
cached() { awk '/^Cached/ { print $2 }' /proc/meminfo; }
cat /sys/block/pmem0/queue/dax
mount -t erofs -o ro,dax=always /dev/pmem0 /mnt && grep -c 'erofs.*dax=always' /proc/mounts
before=$(cached)
cd /mnt && sha256sum large small
echo cache $(($(cached) - before))
cd / && umount /mnt
dd if=/dev/zero of=/dev/pmem0 bs=4096 count=1 conv=fsync 2>/dev/null
echo over";

fn counter(vm: &Vm, name: &str) -> u64 {
    let all = vm.counters();
    let device = all.iter().find(|c| c.device == "pmem0").unwrap();
    let counter = device.counters.iter().find(|c| c.name == name).unwrap();
    counter.value
}

fn is_read_where_it_lies(transport: Transport) {
    let dir = tempfile::tempdir().unwrap();
    let expected = image(dir.path());
    let path = dir.path().join("image");
    let before = fs::read(&path).unwrap();
    let console = Console::default();
    let vm = linux(SCRIPT, &console)
        .transport(transport)
        .pmem(PmemDevice::open(&path).unwrap())
        .build()
        .unwrap();
    vm.start().unwrap();
    assert_eq!(vm.wait().unwrap(), VmExit::Reset, "{}", console.text());
    let text = console.text();
    let lines: Vec<&str> = text.lines().collect();
    let start = lines.iter().position(|line| *line == "1").expect(&text);
    assert_eq!(lines[start + 1], "1", "{text}");
    assert_eq!(lines[start + 2..start + 4], expected, "{text}");
    let cache = lines[start + 4].strip_prefix("cache ").expect(&text);
    let cache: i64 = cache.parse().unwrap();
    assert!(
        cache < 1024,
        "{cache} KiB of the guest's page cache\n{text}"
    );
    assert!(text.contains("over"), "{text}");
    // Root of the guest may try: it wrote zeroes, including over the superblock.
    assert!(counter(&vm, "refused_writes") > 0);
    assert!(counter(&vm, "flushes") > 0);
    assert_eq!(fs::read(&path).unwrap(), before);
    assert!(vm.faults().is_empty());
}

#[test]
fn guest_reads_an_image_that_is_memory_on_mmio() {
    is_read_where_it_lies(Transport::Mmio);
}

#[test]
fn guest_reads_an_image_that_is_memory_on_pci() {
    is_read_where_it_lies(Transport::Pci);
}
