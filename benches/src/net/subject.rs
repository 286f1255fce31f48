//! How each monitor is started with a network card.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use crate::boot::Kind;
use crate::qemu::{self, Boot};

/// The guest of every monitor. One vCPU.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) kernel: PathBuf,
    pub(super) initramfs: PathBuf,
    /// The file descriptor of the open tap.
    pub(super) tap: RawFd,
    pub(super) memory_mib: u64,
}

/// A monitor with a network card on one transport.
#[derive(Debug)]
pub(super) struct Subject {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<String>,
}

const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 reboot=k noreplace-smp";
const NO_PCI: &str = " pci=off";

/// The same for all, so that the host's neighbour entry stays valid.
const MAC: &str = "02:00:00:00:00:09";

impl Subject {
    /// `transport` is the argument of `net-podvisor`.
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
                MAC.to_owned(),
                guest.tap.to_string(),
            ],
        }
    }

    pub(super) fn microvm(program: &Path, guest: &Guest) -> Self {
        Self {
            name: "QEMU microvm, MMIO",
            ..qemu(program, guest, qemu::MICROVM, "virtio-net-device", NO_PCI)
        }
    }

    pub(super) fn q35(program: &Path, guest: &Guest) -> Self {
        Self {
            name: "QEMU q35, PCI",
            ..qemu(
                program,
                guest,
                qemu::Q35,
                "virtio-net-pci,disable-legacy=on,romfile=",
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
        // In its own process, as podvisor's device is.
        "-netdev".to_owned(),
        format!("tap,id=net,fd={},vhost=off", guest.tap),
        "-device".to_owned(),
        format!("{device},netdev=net,mac={MAC}"),
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
