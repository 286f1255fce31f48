//! What the loader cannot boot ends in one error that names why, and in a machine that is off.

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use podvisor_test_disks::{btrfs, ext4, vfat, xfs};
use podvisor_vmm::devices::GuestRam;
use podvisor_vmm::devices::blk::{Operation, Submitted};
use podvisor_vmm::{BlockDevice, Disk, FileDisk, MemorySize};
use support::Console;
use support::loader::{UUID, Workshop, boot, booted, error_of, grub, kernels_line, loader};

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
