//! EDK2's CloudHv firmware boots a disk by its EFI system partition. `cargo xtask firmware --test`
//! builds what these tests need, and runs them. The other tests' command does not, since the
//! firmware takes many minutes to build.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use podvisor_test_disks::{Gpt, PartitionType, SMALL_UUID, Small, ext4, vfat};
use podvisor_vmm::{BlockDevice, Firmware, MemorySize, Smbios, Transport, Vm, VmExit};
use support::Console;

/// Hosts that count instructions skip the time in which nothing happens: this says nothing of how
/// long a boot takes, and the limit of the host's command ends a hang.
const PATIENCE: Duration = Duration::from_secs(12 * 3600);

/// What `cargo xtask firmware` builds.
fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/firmware")
}

/// Makes a disk with an EFI system partition, on which GRUB finds the second partition's kernel.
fn disk_with_grub(of: &Path) -> PathBuf {
    let small = Small::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../target")).unwrap();
    let [esp, root] = ["esp", "root"].map(|name| of.join(name));
    for made in [esp.join("EFI/BOOT"), esp.join("EFI/debian")] {
        fs::create_dir_all(made).unwrap();
    }
    fs::copy(
        directory().join("grubx64.efi"),
        esp.join("EFI/BOOT/BOOTX64.EFI"),
    )
    .expect("GRUB: run `cargo xtask firmware --test`");
    let menu = format!(
        "search --no-floppy --fs-uuid --set=root {SMALL_UUID}\n\
         linux /boot/vmlinuz root=UUID={SMALL_UUID} ro cryptomgr.notests console=ttyS0\n\
         initrd /boot/initrd.img\n\
         boot\n"
    );
    fs::write(esp.join("EFI/debian/grub.cfg"), menu).unwrap();
    let copied = std::process::Command::new("cp")
        .arg("-a")
        .args([&small.root(), &root])
        .status();
    assert!(copied.unwrap().success());
    fs::copy(small.kernel(), root.join("boot/vmlinuz")).unwrap();
    fs::copy(small.initrd(), root.join("boot/initrd.img")).unwrap();
    let [esp_image, root_image, disk] =
        ["esp.img", "root.img", "disk.raw"].map(|name| of.join(name));
    vfat(&esp_image, 40, "ESP", &esp).unwrap();
    ext4(&root_image, 64, SMALL_UUID, &root).unwrap();
    Gpt::new()
        .partition(15, PartitionType::Efi, esp_image)
        .partition(1, PartitionType::Linux, root_image)
        .write(&disk)
        .unwrap();
    disk
}

#[test]
fn guest_a_firmware_boots_grub_from_the_efi_system_partition() {
    let dir = tempfile::tempdir().unwrap();
    let disk = disk_with_grub(dir.path());
    let firmware = directory().join("CLOUDHV.fd");
    for last in ["reboot -f", "poweroff -f"] {
        let console = Console::default();
        let vm = Vm::builder()
            .firmware(Firmware::open(&firmware).expect("run `cargo xtask firmware`"))
            .transport(Transport::Pci)
            .memory(MemorySize::mib(256))
            .power_button()
            .smbios(Smbios::new().serial("by-firmware"))
            .rng()
            .block(BlockDevice::open(&disk).unwrap().serial("root"))
            .serial(console.clone())
            .build()
            .unwrap();
        vm.start().unwrap();
        console.wait_for_within("small: ready", PATIENCE);
        let text = console.text();
        assert!(text.contains("root=UUID="), "{text}");
        // The port takes 64 bytes at once.
        vm.serial_input(b"\ncat /sys/firmware/efi/fw_platform_size\n");
        console.wait_for_within("\n64\n", PATIENCE);
        vm.serial_input(b"\ncat /sys/class/dmi/id/product_serial\n");
        console.wait_for_within("\nby-firmware\n", PATIENCE);
        vm.serial_input(format!("\n{last}\n").as_bytes());
        let exit = vm.wait().unwrap();
        let expected = match last {
            "reboot -f" => VmExit::Reset,
            _ => VmExit::Shutdown,
        };
        assert_eq!(exit, expected, "{}", console.text());
    }
}
