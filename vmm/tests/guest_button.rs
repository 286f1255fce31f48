//! A distribution's kernel, unmodified, on the machine for foreign guests: it finds its power button
//! and its identity in the tables that VMs have only if they are asked for.

mod support;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use podvisor_test_disks::Small;
use podvisor_vmm::{BlockDevice, Initramfs, Kernel, MemorySize, Smbios, Transport, Vm, VmExit};
use support::{Console, in_time};

const UUID: [u8; 16] = *b"\x3f\x2a\x10\x00\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff";

#[test]
fn guest_of_a_distribution_knows_its_name_and_powers_off_by_its_button() {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    let small = Small::open(&target).unwrap();
    let disk = tempfile::NamedTempFile::new().unwrap();
    fs::copy(small.disk(), disk.path()).unwrap();
    let console = Console::default();
    let identity = Smbios::new()
        .uuid(UUID)
        .serial("ds=nocloud;h=one")
        .manufacturer("Example")
        .product("Machine");
    let vm = Vm::builder()
        .kernel(Kernel::open(small.kernel()).unwrap())
        .initramfs(Initramfs::open(small.initrd()).unwrap())
        .cmdline("console=ttyS0 quiet panic=-1 reboot=k root=/dev/vda1")
        .memory(MemorySize::mib(256))
        .transport(Transport::Pci)
        .block(BlockDevice::open(disk.path()).unwrap())
        .rng()
        .serial(console.clone())
        .smbios(identity)
        .power_button()
        .generation_id()
        .build()
        .unwrap();
    let vm = Arc::new(vm);
    vm.start().unwrap();
    console.wait_for("small: ready");
    // Lines of at most 64 bytes, which fit into the serial port at once.
    let enter = |line: &str| assert_eq!(vm.serial_input(line.as_bytes()), Some(line.len()));
    enter("cd /sys/class/dmi/id; echo =$(cat product_uuid)=\n");
    console.wait_for("=3f2a1000-4455-6677-8899-aabbccddeeff=");
    enter("echo =$(cat sys_vendor product_name product_serial)=\n");
    console.wait_for("=Example Machine ds=nocloud;h=one=");
    vm.press_power_button().unwrap();
    console.wait_for("small: power button");
    let exit = in_time("the power-off", move || vm.wait().unwrap());
    assert_eq!(exit, VmExit::Shutdown, "{}", console.text());
}
