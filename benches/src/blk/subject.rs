//! How each monitor is started with a disk.

use std::path::{Path, PathBuf};

use crate::boot::Kind;
use crate::qemu::{self, Boot};

/// The guest of every monitor. One vCPU.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) kernel: PathBuf,
    pub(super) initramfs: PathBuf,
    pub(super) disk: PathBuf,
    pub(super) memory_mib: u64,
}

/// A monitor with a disk on one transport.
#[derive(Debug)]
pub(super) struct Subject {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<String>,
}

const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 reboot=k noreplace-smp";
const NO_PCI: &str = " pci=off";

impl Subject {
    /// `transport` is the argument of `blk-podvisor`.
    pub(super) fn podvisor(program: &Path, transport: &str, guest: &Guest) -> Self {
        let (name, bus) = match transport {
            "mmio" => ("podvisor MMIO", NO_PCI),
            _ => ("podvisor PCI", ""),
        };
        Self {
            name,
            kind: Kind::Podvisor,
            program: program.to_owned(),
            arguments: vec![
                transport.to_owned(),
                text(&guest.kernel),
                text(&guest.initramfs),
                format!("{}MiB", guest.memory_mib),
                format!("{COMMAND_LINE}{bus}"),
                text(&guest.disk),
            ],
        }
    }

    pub(super) fn microvm(program: &Path, guest: &Guest) -> Self {
        Self {
            name: "QEMU microvm, MMIO",
            ..qemu(
                program,
                guest,
                qemu::MICROVM,
                "virtio-blk-device,drive=disk",
                NO_PCI,
            )
        }
    }

    pub(super) fn q35(program: &Path, guest: &Guest) -> Self {
        Self {
            name: "QEMU q35, PCI",
            ..qemu(
                program,
                guest,
                qemu::Q35,
                "virtio-blk-pci,drive=disk,disable-legacy=on",
                "",
            )
        }
    }
}

fn qemu(program: &Path, guest: &Guest, machine: &str, device: &str, bus: &str) -> Subject {
    let boot = Boot {
        kernel: &guest.kernel,
        initramfs: &guest.initramfs,
        memory_mib: guest.memory_mib,
        command_line: &format!("{COMMAND_LINE}{bus}"),
    };
    let mut arguments = qemu::arguments(machine, &boot);
    arguments.extend([
        // The device's work is done by a thread other than the monitor's main thread.
        "-object".to_owned(),
        "iothread,id=io".to_owned(),
        "-drive".to_owned(),
        format!(
            "id=disk,if=none,format=raw,read-only=on,cache=writeback,file={}",
            text(&guest.disk)
        ),
        "-device".to_owned(),
        format!("{device},iothread=io"),
    ]);
    Subject {
        name: "QEMU",
        kind: Kind::Qemu,
        program: program.to_owned(),
        arguments,
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
