//! The loader boots disks as distributions make them, without firmware, and says what is wrong with
//! those that it cannot boot.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use podvisor_test_disks::{Gpt, PartitionType, Small, btrfs, ext4, vfat, xfs};
use podvisor_vmm::devices::GuestRam;
use podvisor_vmm::devices::blk::{Operation, Submitted};
use podvisor_vmm::{
    BlockDevice, Disk, FileDisk, Initramfs, Kernel, MacAddress, MemorySize, NetDevice, Transport,
    Vm, VmBuilder, VmExit, VsockDevice,
};
use support::tap::{HOST, tap};
use support::{Console, guest_file, in_time, small_bzimage};
use tempfile::TempDir;

const UUID: &str = "11111111-2222-3333-4444-555555555555";

/// A machine that starts the loader, which hands `arguments` over to it.
fn loader(arguments: &str, console: &Console) -> VmBuilder {
    let kernel = guest_file("vmlinux-loader");
    let program = guest_file("loader.cpio");
    Vm::builder()
        .kernel(Kernel::open(kernel).expect("the loader's kernel: run `cargo xtask guest`"))
        .initramfs(Initramfs::open(program).expect("the loader: run `cargo xtask guest`"))
        .cmdline(format!(
            "console=ttyS0 quiet panic=-1 reboot=k -- {arguments}"
        ))
        .memory(MemorySize::mib(256))
        .transport(Transport::Pci)
        .serial(console.clone())
}

/// Boots disks to the end of the machine; returns what was on the console.
fn boot(builder: VmBuilder, console: &Console, disks: &[&Path]) -> String {
    let vm = disks.iter().fold(builder, |builder, disk| {
        builder.block(BlockDevice::open(disk).unwrap())
    });
    let vm = Arc::new(vm.build().unwrap());
    vm.start().unwrap();
    let exit = in_time("the machine", move || vm.wait().unwrap());
    let text = console.text();
    assert_eq!(exit, VmExit::Shutdown, "{text}");
    text
}

fn booted(arguments: &str, disks: &[&Path]) -> String {
    let console = Console::default();
    boot(loader(arguments, &console), &console, disks)
}

/// Files that become disks.
struct Workshop(TempDir);

impl Workshop {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // mkfs.btrfs takes over inode numbers, of which it has the lowest for itself: in a fresh
        // tmpfs, files have those.
        for _ in 0..1000 {
            fs::write(dir.path().join("number"), "").unwrap();
            fs::remove_file(dir.path().join("number")).unwrap();
        }
        Self(dir)
    }

    /// A directory with these files; those whose name holds `vmlinuz` are a kernel that writes its
    /// command line to the console and powers off.
    fn tree(&self, name: &str, files: &[(&str, &str)]) -> PathBuf {
        let root = self.0.path().join(name);
        fs::create_dir_all(&root).unwrap();
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let text = text.as_bytes();
            let kernel = small_bzimage();
            let is_kernel = path.to_string_lossy().contains("vmlinuz") && text.is_empty();
            fs::write(&path, if is_kernel { &kernel } else { text }).unwrap();
        }
        root
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A disk whose one partition is ext4 with these files.
    fn ext4_disk(&self, name: &str, files: &[(&str, &str)]) -> PathBuf {
        let (image, disk) = (
            self.path(&format!("{name}.ext4")),
            self.path(&format!("{name}.raw")),
        );
        ext4(&image, 8, UUID, &self.tree(name, files)).unwrap();
        Gpt::new()
            .partition(1, PartitionType::Linux, image)
            .write(&disk)
            .unwrap();
        disk
    }
}

fn grub(cmdline: &str) -> String {
    format!("menuentry 'Test' {{\n\tlinux /boot/vmlinuz {cmdline}\n\tinitrd /boot/initrd\n}}\n")
}

/// The console's line after the loader's last one: what the small kernel wrote.
fn kernels_line(text: &str) -> &str {
    let after = text
        .rsplit_once("podvisor-loader: starting")
        .map_or("", |(_, rest)| rest);
    after.split_once('\n').map_or("", |(_, line)| line).trim()
}

fn error_of(text: &str) -> &str {
    let (_, error) = text
        .split_once("podvisor-loader: error: ")
        .unwrap_or(("", text));
    error.lines().next().unwrap_or_default()
}

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
fn guest_a_disk_that_cannot_be_booted_is_a_named_error() {
    let shop = Workshop::new();
    let with_kernel = |name: &str, kernel: &str, menu: &str| {
        shop.ext4_disk(
            name,
            &[
                ("boot/k", kernel),
                ("boot/initrd", "i"),
                ("boot/grub/grub.cfg", menu),
            ],
        )
    };
    let start = "menuentry a {\n linux /boot/k\n}\n";
    let cases: Vec<(PathBuf, &[&str])> = vec![
        (
            shop.ext4_disk("none", &[("etc/fstab", "x")]),
            &[
                "no file system has anything to boot",
                "vda1 (ext4)",
                "boot/grub/grub.cfg",
                "vmlinuz*",
            ],
        ),
        (
            with_kernel("empty", "", start),
            &["/boot/k on vda1", "the file is empty"],
        ),
        (
            with_kernel("script", "#!/bin/sh\n", start),
            &["this is no kernel but a script"],
        ),
        (
            with_kernel("loop", "x", "\nsource /boot/grub/grub.cfg\n"),
            &["line 2 of boot/grub/grub.cfg", "includes itself"],
        ),
        (
            with_kernel("missing", "x", "menuentry a {\n linux /boot/none\n}\n"),
            &[
                "failed to read /boot/none on vda1 of the entry \"a\"",
                "no such file",
            ],
        ),
        (
            with_kernel("up", "x", "menuentry a {\n linux /../../etc/shadow\n}\n"),
            &["line 2 of boot/grub/grub.cfg", "`..`"],
        ),
        (
            {
                let disk = shop.path("broken.raw");
                let whole = shop.ext4_disk("table", &[("boot/k", "x")]);
                fs::copy(whole, &disk).unwrap();
                let mut bytes = fs::read(&disk).unwrap();
                // Both tables' headers, and the first sector.
                let end = bytes.len() - 512;
                bytes[..1024].fill(0x5a);
                bytes[end..].fill(0x5a);
                fs::write(&disk, bytes).unwrap();
                disk
            },
            &[
                "no disk has a file system to boot from",
                "vda: neither a file system nor a partition table",
            ],
        ),
        (
            {
                let disk = shop.path("lvm.raw");
                let mut bytes = vec![0; 1 << 20];
                bytes[512..520].copy_from_slice(b"LABELONE");
                bytes[536..544].copy_from_slice(b"LVM2 001");
                fs::write(&disk, bytes).unwrap();
                disk
            },
            &["vda: is LVM, from which the loader cannot boot"],
        ),
    ];
    for (disk, parts) in cases {
        let text = booted("", &[&disk]);
        let error = error_of(&text);
        for part in parts {
            assert!(error.contains(part), "{part:?} in {text}");
        }
        assert_eq!(text.matches("podvisor-loader: error:").count(), 1, "{text}");
    }
    let text = booted("", &[]);
    assert!(
        error_of(&text).contains("the machine has no disk"),
        "{text}"
    );
}

#[test]
fn guest_hostile_disks_end_in_an_error() {
    let shop = Workshop::new();
    let mut disks: Vec<PathBuf> = Vec::new();
    let mut damaged = |name: &str, of: &Path, damage: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = fs::read(of).unwrap();
        damage(&mut bytes);
        let disk = shop.path(&format!("{name}.damaged"));
        fs::write(&disk, bytes).unwrap();
        disks.push(disk);
    };
    // The same noise each time.
    let noise = |bytes: &mut [u8], seed: u32| {
        let mut state = seed;
        for byte in bytes {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = (state >> 24) as u8;
        }
    };
    let files = [
        ("etc/fstab", "x"),
        ("boot/a", "y"),
        ("EFI/Linux/a.efi", "MZ"),
    ];
    let tree = shop.tree("tree", &files);
    let ext = shop.path("plain.ext4");
    ext4(&ext, 8, UUID, &tree).unwrap();
    let x = shop.path("plain.xfs");
    xfs(&x, 320, UUID, &tree).unwrap();
    let b = shop.path("plain.btrfs");
    btrfs(&b, 128, UUID, &tree).unwrap();
    let v = shop.path("plain.vfat");
    vfat(&v, 40, "ESP", &tree).unwrap();

    for (number, seed) in (0..).zip([1, 2, 3]) {
        damaged(&format!("ext4-groups-{number}"), &ext, &|bytes| {
            noise(&mut bytes[4096..8192], seed)
        });
        damaged(&format!("ext4-all-{number}"), &ext, &|bytes| {
            noise(&mut bytes[4096..], seed)
        });
        damaged(&format!("ext4-superblock-{number}"), &ext, &|bytes| {
            noise(&mut bytes[1024..1024 + 0x38], seed)
        });
        damaged(&format!("xfs-superblock-{number}"), &x, &|bytes| {
            noise(&mut bytes[4..32], seed)
        });
        damaged(&format!("xfs-rest-{number}"), &x, &|bytes| {
            noise(&mut bytes[512..1 << 20], seed)
        });
        damaged(&format!("btrfs-superblock-{number}"), &b, &|bytes| {
            noise(&mut bytes[0x1_0048..0x1_0200], seed);
        });
        damaged(&format!("btrfs-trees-{number}"), &b, &|bytes| {
            noise(&mut bytes[0x2_0000..], seed)
        });
    }
    damaged("ext4-cut", &ext, &|bytes| bytes.truncate(1 << 20));
    damaged("xfs-cut", &x, &|bytes| bytes.truncate(1 << 20));
    damaged("vfat-tables", &v, &|bytes| {
        noise(&mut bytes[512..1 << 20], 1)
    });
    damaged("vfat-cut", &v, &|bytes| bytes.truncate(4096));
    damaged("zeros", &v, &|bytes| bytes.fill(0));
    damaged("noise", &v, &|bytes| noise(bytes, 7));
    damaged("mbr-of-itself", &v, &|bytes| {
        bytes.fill(0);
        // An extended partition whose table is the same sector again.
        bytes[446 + 4] = 5;
        bytes[446 + 12..446 + 16].copy_from_slice(&70_000_u32.to_le_bytes());
        bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
    });

    // Links that leave the disk or lead in circles, and files that are none.
    let linked = shop.tree("linked", &[("boot/grub/x", "x")]);
    for (to, from) in [
        ("../../../../../proc/kcore", "boot/vmlinuz"),
        ("grub.cfg", "boot/grub/grub.cfg"),
        ("/proc/self/environ", "extlinux.conf"),
        ("vmlinuz-1", "vmlinuz-1"),
    ] {
        std::os::unix::fs::symlink(to, linked.join(from)).unwrap();
    }
    fs::create_dir_all(linked.join("boot/vmlinuz-2")).unwrap();
    fs::create_dir_all(linked.join("loader/entries/a.conf")).unwrap();
    let disk = shop.path("linked.ext4");
    ext4(&disk, 8, UUID, &linked).unwrap();
    disks.push(disk);
    let large = shop.tree(
        "large",
        &[("boot/grub/grub.cfg", &"echo\n".repeat(300_000))],
    );
    let disk = shop.path("large.ext4");
    ext4(&disk, 8, UUID, &large).unwrap();
    disks.push(disk);

    assert!(disks.len() >= 25, "{}", disks.len());
    // Several at once: what one does to the loader is seen in what it says of the others.
    for disks in disks.chunks(8) {
        let all: Vec<&Path> = disks.iter().map(PathBuf::as_path).collect();
        let text = booted("", &all);
        assert!(
            text.contains("podvisor-loader: error: "),
            "{disks:?} {text}"
        );
        for (_, letter) in disks.iter().zip('a'..) {
            let line = format!("disk vd{letter} (");
            assert!(text.contains(&line), "vd{letter} of {disks:?} {text}");
        }
    }
}

#[test]
fn guest_a_machine_that_is_too_small_is_told_how_much_it_needs() {
    let shop = Workshop::new();
    let tree = shop.tree(
        "big",
        &[("boot/vmlinuz", ""), ("boot/grub/grub.cfg", &grub("a"))],
    );
    fs::File::create(tree.join("boot/initrd"))
        .unwrap()
        .set_len(60 << 20)
        .unwrap();
    let disk = shop.path("big.ext4");
    ext4(&disk, 80, UUID, &tree).unwrap();
    let console = Console::default();
    let vm = loader("", &console).memory(MemorySize::mib(96));
    let text = boot(vm, &console, &[&disk]);
    let error = error_of(&text);
    assert!(error.contains("not enough memory"), "{text}");
    assert!(
        error.contains("initial file systems (60.0 MiB) need 128.0 MiB"),
        "{text}"
    );
    let text = booted("", &[&disk]);
    assert!(kernels_line(&text).starts_with('a'), "{text}");
}

/// A disk that answers some requests and then none.
#[derive(Debug)]
struct FallsSilent {
    disk: FileDisk,
    left: u32,
}

impl Disk for FallsSilent {
    fn len(&self) -> u64 {
        self.disk.len()
    }
    fn submit(&mut self, mem: &GuestRam, token: u16, operation: Operation<'_, '_>) -> Submitted {
        if matches!(operation, Operation::Read { .. }) {
            match self.left.checked_sub(1) {
                Some(left) => self.left = left,
                None => return Submitted::Queued,
            }
        }
        self.disk.submit(mem, token, operation)
    }
    fn wait(&mut self) -> std::io::Result<()> {
        Err(std::io::ErrorKind::BrokenPipe.into())
    }
}

#[test]
fn guest_a_disk_that_never_answers_is_an_error() {
    let shop = Workshop::new();
    let menu = grub("a");
    let disk = shop.ext4_disk(
        "silent",
        &[("boot/vmlinuz", ""), ("boot/grub/grub.cfg", &menu)],
    );
    let file = fs::File::open(&disk).unwrap();
    // Enough for the partition table, too little for the file system.
    let disk = FallsSilent {
        disk: FileDisk::new(file).unwrap(),
        left: 12,
    };
    let console = Console::default();
    let vm = loader("--timeout 3", &console).block(BlockDevice::new(Box::new(disk)));
    let text = boot(vm, &console, &[]);
    let error = error_of(&text);
    assert!(error.contains("did not end within 3 s"), "{text}");
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
