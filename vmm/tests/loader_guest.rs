//! Kernels of each kind reach their code, and Linux finds its boot parameters.

mod support;

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use podvisor_vmm::{Kernel, MemorySize, Transport, Vm, VmExit};
use support::{Console, busybox, in_time, linux, small_bzimage};

fn temporary(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn run_to_the_end(vm: Vm) -> VmExit {
    let vm = Arc::new(vm);
    vm.start().unwrap();
    in_time("the guest", move || vm.wait().unwrap())
}

#[test]
fn guest_bzimage_is_entered_in_64_bit_mode_with_its_zero_page() {
    let console = Console::default();
    let vm = Vm::builder()
        .kernel(Kernel::from_file(temporary(&small_bzimage())).unwrap())
        .cmdline("hello from the zero page")
        .memory(MemorySize::mib(32))
        .serial(console.clone())
        .build()
        .unwrap();
    assert_eq!(run_to_the_end(vm), VmExit::Shutdown);
    let text = console.text();
    assert!(text.contains("hello from the zero page"), "{text:?}");
}

#[test]
fn guest_kernel_boots_by_its_pvh_entry() {
    let dir = std::env::var_os("PODVISOR_GUEST_DIR").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/guest")),
        PathBuf::from,
    );
    let mut vmlinux = std::fs::read(dir.join("vmlinux")).expect("run `cargo xtask kernel`");
    // Without the note that it is Linux, it is not entered in 64-bit mode.
    let notes = vmlinux.windows(6).enumerate();
    let notes: Vec<usize> = notes
        .filter(|(_, w)| w == b"Linux\0")
        .map(|(at, _)| at)
        .collect();
    assert!(!notes.is_empty());
    for at in notes {
        vmlinux[at..at + 5].copy_from_slice(b"Other");
    }

    let console = Console::default();
    let vm = Vm::builder()
        .kernel(Kernel::from_file(temporary(&vmlinux)).unwrap())
        .initramfs(busybox("echo MEM $(free -m | awk '/Mem/{print $2}')"))
        .cmdline("console=ttyS0 quiet panic=-1 reboot=k pci=off")
        .serial(console.clone())
        .memory(MemorySize::mib(128))
        .build()
        .unwrap();
    assert_eq!(run_to_the_end(vm), VmExit::Reset);
    let text = console.text();
    let mib = number_behind(&text, "MEM ");
    assert!((80..128).contains(&mib), "{text}");
}

/// Returns what a distribution's kernel prints on a machine with two CPUs and one device, how its
/// VM ended, and how often it left the guest for ports and MMIO.
fn distribution(transport: Transport, cmdline: &str, script: &str) -> (String, VmExit, u64) {
    let vmlinuz = std::env::var_os("PODVISOR_TEST_VMLINUZ").expect("`cargo xtask test` sets it");
    let console = Console::default();
    let vm = Vm::builder()
        .kernel(Kernel::open(vmlinuz).unwrap())
        .initramfs(busybox(script))
        .cmdline(cmdline)
        .serial(console.clone())
        .memory(MemorySize::mib(512))
        .vcpus(2)
        .rng()
        .transport(transport)
        .build()
        .unwrap();
    let vm = Arc::new(vm);
    vm.start().unwrap();
    let running = vm.clone();
    let exit = in_time("the guest", move || running.wait().unwrap());
    let exits = vm.counters()[0].counters.iter().map(|c| c.value).sum();
    (console.text(), exit, exits)
}

#[test]
fn guest_distribution_bzimage_finds_all_by_acpi_and_powers_off() {
    for (transport, device) in [
        (Transport::Mmio, "/sys/bus/platform/devices/LNRO0005:00"),
        (Transport::Pci, "/sys/bus/pci/devices/0000:00:01.0"),
    ] {
        let script = format!(
            "echo INIT of $(uname -r)\necho CPUS $(nproc)\n\
             echo ERRORS $(dmesg | grep -c 'ACPI.*Error')\nls -d {device}\npoweroff -f"
        );
        // Linux has no other way to power off than ACPI.
        let (text, exit, _) = distribution(transport, "console=ttyS0 quiet panic=-1", &script);
        assert_eq!(exit, VmExit::Shutdown, "{text}");
        for line in ["INIT of 6.1.", "CPUS 2\n", "ERRORS 0\n", device] {
            assert!(text.contains(line), "no {line} in {text}");
        }
    }
}

#[test]
fn guest_distribution_bzimage_boots_without_acpi_as_far_as_its_init() {
    let script = "echo INIT of $(uname -r)\necho CPUS $(nproc)";
    let cmdline = "console=ttyS0 quiet panic=-1 reboot=k acpi=off";
    let (text, exit, exits) = distribution(Transport::Mmio, cmdline, script);
    assert_eq!(exit, VmExit::Reset, "{text}");
    assert!(text.contains("INIT of 6.1."), "{text}");
    assert!(text.contains("CPUS 2\n"), "{text}");
    // It would poll a PC's clock 10,000 times.
    assert!(exits < 10_000, "{exits} exits");
}

#[test]
fn guest_sees_one_socket_of_as_many_cores_as_vcpus() {
    let script = "echo CPUS $(nproc); \
        echo SOCKETS $(grep '^physical id' /proc/cpuinfo | sort -u | wc -l); \
        echo CORES $(grep '^core id' /proc/cpuinfo | sort -u | wc -l); \
        echo SIBLINGS $(grep -m1 '^siblings' /proc/cpuinfo | cut -d: -f2); \
        echo APICIDS $(grep '^apicid' /proc/cpuinfo | cut -d: -f2); \
        grep -m1 '^flags' /proc/cpuinfo";
    let console = Console::default();
    let vm = linux(script, &console)
        .vcpus(3)
        .memory(MemorySize::mib(128))
        .build()
        .unwrap();
    assert_eq!(run_to_the_end(vm), VmExit::Reset);
    let text = console.text();
    for line in [
        "CPUS 3",
        "SOCKETS 1",
        "CORES 3",
        "SIBLINGS 3",
        "APICIDS 0 1 2",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}: {text}");
    }
    for flag in ["x2apic", "tsc_deadline_timer", "hypervisor"] {
        assert!(text.contains(&format!(" {flag} ")), "{flag}: {text}");
    }
    for flag in ["monitor", "vmx", "svm"] {
        assert!(!text.contains(&format!(" {flag} ")), "{flag}: {text}");
    }
}

#[test]
fn guest_finds_the_memory_behind_the_hole_for_devices() {
    let console = Console::default();
    let vm = linux("echo MEM $(free -m | awk '/Mem/{print $2}')", &console)
        .memory(MemorySize::mib(3584))
        .build()
        .unwrap();
    assert_eq!(run_to_the_end(vm), VmExit::Reset);
    let text = console.text();
    let mib = number_behind(&text, "MEM ");
    assert!((3300..3584).contains(&mib), "{text}");
}

fn number_behind(text: &str, label: &str) -> u64 {
    text.split(label)
        .nth(1)
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or_else(|| panic!("no {label:?} in {text:?}"))
}
