//! The loader boots disks as distributions make them, without firmware.

mod support;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use podvisor_test_disks::{Gpt, PartitionType, Small, btrfs, ext4, vfat, xfs};
use podvisor_vmm::{
    BlockDevice, MacAddress, MemorySize, NetDevice, Transport, VmExit, VsockDevice,
};
use support::loader::{UUID, Workshop, boot, booted, error_of, grub, kernels_line, loader};
use support::tap::{HOST, tap};
use support::{Console, in_time};

#[test]
fn guest_debians_kernel_boots_from_its_own_menu() {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    let small = Small::open(&target).unwrap();
    for transport in [Transport::Pci, Transport::Mmio] {
        let copy = tempfile::NamedTempFile::new().unwrap();
        fs::copy(small.disk(), copy.path()).unwrap();
        let console = Console::default();
        let vm = loader("--append \"small.test=1\"", &console)
            .transport(transport)
            .rng()
            .block(BlockDevice::open(copy.path()).unwrap().serial("root"));
        let vm = Arc::new(vm.build().unwrap());
        vm.start().unwrap();
        console.wait_for("small: ready");
        let text = console.text();
        assert!(
            text.contains("podvisor-loader: disk vda (serial \"root\""),
            "{text}"
        );
        assert!(
            text.contains("entry \"Small system\" (grub.cfg in /boot/grub/grub.cfg on vda1)"),
            "{text}"
        );
        assert!(
            text.contains(&format!("small: Linux {}", small.release)),
            "{text}"
        );
        let line = text
            .lines()
            .find(|line| line.starts_with("small: cmdline"))
            .unwrap();
        assert!(line.contains("root=UUID="), "{line}");
        assert!(line.contains("small.test=1"), "{line}");
        assert!(line.contains("console=ttyS0"), "{line}");
        let of_transport = match transport {
            Transport::Pci => "pci=conf1",
            _ => "virtio_mmio.device=",
        };
        assert!(line.contains(of_transport), "{line}");
        // What it costs, for `--nocapture`.
        for line in text
            .lines()
            .filter(|line| line.contains("podvisor-loader: starting"))
        {
            eprintln!("{transport:?}: {line}");
        }
        vm.serial_input(b"\npoweroff -f\n").unwrap();
        let exit = in_time("the power-off", move || vm.wait().unwrap());
        assert_eq!(exit, VmExit::Shutdown, "{}", console.text());
    }
}

#[test]
fn guest_the_loader_boots_each_format_from_each_file_system() {
    let shop = Workshop::new();
    let menu = grub("root=UUID=x ro");
    let files = [
        ("boot/vmlinuz", ""),
        ("boot/initrd", "i"),
        ("boot/grub/grub.cfg", menu.as_str()),
    ];
    let before = |disk: &Path| fs::read(disk).unwrap();

    let disk = shop.ext4_disk("ext4", &files);
    let unbooted = before(&disk);
    let text = booted("--append pci=other", &[&disk]);
    assert_eq!(
        kernels_line(&text),
        "root=UUID=x ro pci=conf1 pci=other console=ttyS0",
        "{text}"
    );
    assert!(unbooted == before(&disk), "the loader wrote to the disk");

    // A root of XFS without a partition table, with entries of the Boot Loader Specification.
    let disk = shop.path("xfs.raw");
    let entry = "title Test\nversion 1\nlinux /boot/vmlinuz\ninitrd /boot/initrd\noptions by=bls console=ttyS0,115200\n";
    let tree = shop.tree(
        "xfs",
        &[
            ("boot/vmlinuz", ""),
            ("boot/initrd", "i"),
            ("boot/loader/entries/t.conf", entry),
        ],
    );
    xfs(&disk, 320, UUID, &tree).unwrap();
    let text = booted("", &[&disk]);
    assert_eq!(
        kernels_line(&text),
        "by=bls console=ttyS0,115200 pci=conf1",
        "{text}"
    );

    // btrfs with its root in `@`, without anything that says what to boot.
    let disk = shop.path("btrfs.raw");
    let tree = shop.tree(
        "btrfs",
        &[
            ("@/boot/vmlinuz-6.1", ""),
            ("@/boot/initrd.img-6.1", "i"),
            ("@/etc/os-release", ""),
        ],
    );
    btrfs(&disk, 128, UUID, &tree).unwrap();
    let text = booted("", &[&disk]);
    let expected = format!("root=UUID={UUID} rootflags=subvol=@ ro pci=conf1 console=ttyS0");
    assert_eq!(kernels_line(&text), expected, "{text}");

    // An EFI system partition for systemd-boot, and two initial file systems.
    let (image, disk) = (shop.path("esp.img"), shop.path("esp.raw"));
    let entry = "title Test\nlinux /vmlinuz\ninitrd /one\ninitrd /two\noptions by=esp\n";
    let tree = shop.tree(
        "esp",
        &[
            ("vmlinuz", ""),
            ("one", "1"),
            ("two", "2"),
            ("loader/entries/a.conf", entry),
        ],
    );
    vfat(&image, 40, "ESP", &tree).unwrap();
    Gpt::new()
        .partition(15, PartitionType::Efi, image)
        .write(&disk)
        .unwrap();
    let text = booted("", &[&disk]);
    assert_eq!(
        kernels_line(&text),
        "by=esp pci=conf1 console=ttyS0",
        "{text}"
    );
    assert!(
        text.contains("/one on vda15, /two on vda15 (8 bytes)"),
        "{text}"
    );

    // extlinux on a boot partition, the root beside it.
    let (boot, root, disk) = (
        shop.path("boot.img"),
        shop.path("root.img"),
        shop.path("two.raw"),
    );
    let conf =
        "DEFAULT menu.c32\nLABEL a\n MENU DEFAULT\n LINUX vmlinuz-virt\n APPEND by=extlinux\n";
    ext4(
        &boot,
        8,
        UUID,
        &shop.tree("boot", &[("vmlinuz-virt", ""), ("extlinux.conf", conf)]),
    )
    .unwrap();
    ext4(
        &root,
        8,
        UUID,
        &shop.tree("root", &[("etc/os-release", "")]),
    )
    .unwrap();
    let gpt = Gpt::new().partition(1, PartitionType::Linux, root);
    gpt.partition(2, PartitionType::Linux, boot)
        .write(&disk)
        .unwrap();
    let text = booted("", &[&disk]);
    assert_eq!(
        kernels_line(&text),
        "by=extlinux pci=conf1 console=ttyS0",
        "{text}"
    );
}

#[test]
fn guest_the_loader_boots_the_disk_that_is_named() {
    let shop = Workshop::new();
    let named = |name: &str| {
        let menu = grub(&format!("from={name}"));
        shop.ext4_disk(
            name,
            &[
                ("boot/vmlinuz", ""),
                ("boot/initrd", "i"),
                ("boot/grub/grub.cfg", &menu),
            ],
        )
    };
    let (one, two) = (named("one"), named("two"));
    let run = |arguments: &str| {
        let console = Console::default();
        let vm = loader(arguments, &console)
            .block(BlockDevice::open(&one).unwrap().serial("one"))
            .block(BlockDevice::open(&two).unwrap().serial("two"));
        boot(vm, &console, &[])
    };
    assert!(
        kernels_line(&run("")).starts_with("from=one"),
        "the first disk"
    );
    assert!(kernels_line(&run("--root two")).starts_with("from=two"));
    let text = run("--root three");
    let error = error_of(&text);
    assert!(error.contains("no disk has the serial three"), "{text}");
    assert!(
        error.contains("vda with the serial \"one\", vdb with the serial \"two\""),
        "{text}"
    );
}

#[test]
fn guest_nothing_is_written_into_the_next_kernel_by_devices_that_are_busy() {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    let small = Small::open(&target).unwrap();
    let copy = tempfile::NamedTempFile::new().unwrap();
    fs::copy(small.disk(), copy.path()).unwrap();
    let tap = tap();
    // Frames for everyone, all the time that the kernels change.
    let flood = std::net::UdpSocket::bind((HOST, 0)).unwrap();
    flood.set_broadcast(true).unwrap();
    let is_over = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stop = Arc::clone(&is_over);
    let sender = std::thread::spawn(move || {
        let mut sent = 0_u64;
        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
            // A full queue of the tap refuses.
            sent += u64::from(flood.send_to(&[0x5a; 1400], "10.9.0.255:9").is_ok());
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        sent
    });
    let console = Console::default();
    let vm = loader("", &console)
        .vcpus(2)
        .memory(MemorySize::mib(256))
        .rng()
        .net(
            NetDevice::tap(tap.into())
                .unwrap()
                .mac(MacAddress([2, 0, 0, 0, 0, 9])),
        )
        .vsock(VsockDevice::in_process(3).unwrap())
        .block(BlockDevice::open(copy.path()).unwrap());
    let vm = Arc::new(vm.build().unwrap());
    vm.start().unwrap();
    // Input for a console that changes its kernel.
    for _ in 0..100 {
        let _ = vm.serial_input(b"#\n");
    }
    console.wait_for("small: ready");
    let text = console.text();
    assert!(text.contains("2 CPUs"), "{text}");
    vm.serial_input(b"\nmd5sum /bin/busybox; poweroff -f\n")
        .unwrap();
    let exit = in_time("the power-off", move || vm.wait().unwrap());
    is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    let sent = sender.join().unwrap();
    assert_eq!(exit, VmExit::Shutdown, "{}", console.text());
    assert!(sent > 100, "{sent} frames");
}
