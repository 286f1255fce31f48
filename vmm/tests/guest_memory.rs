//! Memory that is added and removed while a Linux guest runs.

mod support;

use std::thread;
use std::time::{Duration, Instant};

use podvisor_vmm::{MemorySize, Transport, Vm, VmExit};
use support::{Console, PATIENCE, linux};

const BALLOON: MemorySize = MemorySize::mib(32);
const MOST: MemorySize = MemorySize::mib(512);

/// SHA-256 of 100 MiB of zeroes.
const ZEROES: &str = "20492a4d0d84f8beb1767f6616229f85d44c2827b64bdbfb260ee12fa1109e0e";

/// Each step starts when the previous one is over, and reports that.
const SCRIPT: &str = "\
total() { awk '/MemTotal/ { print $2 }' /proc/meminfo; }
first=$(total)
until grep -q '^balloon_inflate 8192$' /proc/vmstat; do sleep 0.1; done; echo inflated
until grep -q '^balloon_deflate 8192$' /proc/vmstat; do sleep 0.1; done; echo deflated
until [ $(total) -eq $((first + 512 * 1024)) ]; do sleep 0.1; done; echo grown
mount -t tmpfs -o size=200m tmpfs /mnt
dd if=/dev/zero of=/mnt/file bs=1M count=100 2>/dev/null && sha256sum /mnt/file
rm /mnt/file; echo used
until [ $(total) -lt $((first + 32 * 1024)) ]; do sleep 0.1; done; echo shrunk";

fn counter(vm: &Vm, device: &str, name: &str) -> u64 {
    let all = vm.counters();
    let device = all.iter().find(|c| c.device == device).unwrap();
    let counter = device.counters.iter().find(|c| c.name == name).unwrap();
    counter.value
}

/// Waits for a condition that no event reports.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(50));
    }
}

fn comes_and_goes(transport: Transport) {
    let console = Console::default();
    let vm = linux(SCRIPT, &console)
        .transport(transport)
        .memory(MemorySize::mib(128))
        .balloon()
        .hotplug_memory(MOST)
        .build()
        .unwrap();
    vm.start().unwrap();
    let (balloon, memory) = (vm.balloon().unwrap(), vm.hotplug_memory().unwrap());
    // The driver is notified once it is loaded.
    balloon.set_target(BALLOON).unwrap();
    console.wait_for("inflated");
    until("the driver told its balloon's size", || {
        balloon.actual().unwrap() == BALLOON
    });
    assert_eq!(counter(&vm, "balloon0", "inflated_bytes"), 32 << 20);
    balloon.set_target(MemorySize::bytes(0)).unwrap();
    console.wait_for("deflated");

    let before = balloon.stats(PATIENCE).unwrap();
    assert_eq!(memory.request_and_wait(MOST, PATIENCE).unwrap(), MOST);
    console.wait_for("grown");
    let after = balloon.stats(PATIENCE).unwrap();
    let grown = after.total.unwrap() - before.total.unwrap();
    assert_eq!(grown, 512 << 20, "{before:?} {after:?}");
    assert!(after.free.unwrap() > 400 << 20, "{after:?}");
    assert!(after.available.is_some() && after.oom_kills == Some(0));

    console.wait_for("used");
    // The memory of the file is free again, and the driver reports it.
    until("free memory was reported", || {
        counter(&vm, "balloon0", "reported_bytes") > 90 << 20
    });
    memory.request(MemorySize::bytes(0)).unwrap();
    assert_eq!(vm.wait().unwrap(), VmExit::Reset);
    let text = console.text();
    assert!(text.contains("shrunk"), "{text}");
    assert!(text.contains(ZEROES), "{text}");
    // The guest's kernel may have put some of its own data there, which stays.
    let unplugged = counter(&vm, "mem0", "unplugged_bytes");
    assert!(unplugged >= 448 << 20, "{unplugged}");
    assert!(vm.faults().is_empty());
}

#[test]
fn guest_memory_grows_and_shrinks_on_mmio() {
    comes_and_goes(Transport::Mmio);
}

#[test]
fn guest_memory_grows_and_shrinks_on_pci() {
    comes_and_goes(Transport::Pci);
}
