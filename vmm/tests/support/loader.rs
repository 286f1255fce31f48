//! Disks of a few files, and machines that boot them through the loader.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use podvisor_test_disks::{Gpt, PartitionType, ext4};
use podvisor_vmm::{BlockDevice, Initramfs, Kernel, MemorySize, Transport, Vm, VmBuilder, VmExit};
use tempfile::TempDir;

use super::{Console, guest_file, in_time, small_bzimage};

pub(crate) const UUID: &str = "11111111-2222-3333-4444-555555555555";

/// A machine that starts the loader, which hands `arguments` over to it.
pub(crate) fn loader(arguments: &str, console: &Console) -> VmBuilder {
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
pub(crate) fn boot(builder: VmBuilder, console: &Console, disks: &[&Path]) -> String {
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

pub(crate) fn booted(arguments: &str, disks: &[&Path]) -> String {
    let console = Console::default();
    boot(loader(arguments, &console), &console, disks)
}

/// Files that become disks.
pub(crate) struct Workshop(TempDir);

impl Workshop {
    pub(crate) fn new() -> Self {
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
    pub(crate) fn tree(&self, name: &str, files: &[(&str, &str)]) -> PathBuf {
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

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A disk whose one partition is ext4 with these files.
    pub(crate) fn ext4_disk(&self, name: &str, files: &[(&str, &str)]) -> PathBuf {
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

pub(crate) fn grub(cmdline: &str) -> String {
    format!("menuentry 'Test' {{\n\tlinux /boot/vmlinuz {cmdline}\n\tinitrd /boot/initrd\n}}\n")
}

/// The console's line after the loader's last one: what the small kernel wrote.
pub(crate) fn kernels_line(text: &str) -> &str {
    let after = text
        .rsplit_once("podvisor-loader: starting")
        .map_or("", |(_, rest)| rest);
    after.split_once('\n').map_or("", |(_, line)| line).trim()
}

pub(crate) fn error_of(text: &str) -> &str {
    let (_, error) = text
        .split_once("podvisor-loader: error: ")
        .unwrap_or(("", text));
    error.lines().next().unwrap_or_default()
}
