//! How each monitor is started: with the settings that make it fastest for this guest.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::json;

use super::stage::Stage;
use crate::qemu::{self, Boot};

/// The guest of every monitor. One vCPU.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) kernel: PathBuf,
    pub(super) initramfs: PathBuf,
    pub(super) memory_mib: u64,
    pub(super) cmdline: String,
}

/// The supported monitors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Podvisor,
    Qemu,
    Firecracker,
    CloudHypervisor,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Podvisor => "podvisor",
            Self::Qemu => "QEMU microvm",
            Self::Firecracker => "Firecracker",
            Self::CloudHypervisor => "Cloud Hypervisor",
        }
    }

    /// Returns whether a thread of this name runs the guest.
    pub(crate) fn is_vcpu(self, thread: &str) -> bool {
        match self {
            Self::Podvisor | Self::CloudHypervisor => thread.starts_with("vcpu"),
            Self::Qemu => thread.starts_with("CPU ") && thread.ends_with("/KVM"),
            Self::Firecracker => thread.starts_with("fc_vcpu"),
        }
    }
}

/// A monitor in memory, ready to be started.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) kind: Kind,
    pub(super) program: PathBuf,
    libraries: Option<PathBuf>,
    arguments: Vec<String>,
}

impl Peer {
    /// Copies the monitor to memory with all files that it reads.
    pub(super) fn stage(kind: Kind, program: &Path, guest: &Guest, stage: &Stage) -> Result<Self> {
        let libraries = stage.copy_libraries(program)?;
        let arguments = match kind {
            Kind::Podvisor => vec![
                text(&guest.kernel),
                text(&guest.initramfs),
                format!("{}MiB", guest.memory_mib),
                guest.cmdline.clone(),
            ],
            Kind::Qemu => qemu(guest, program, stage)?,
            Kind::Firecracker => firecracker(guest, stage)?,
            Kind::CloudHypervisor => cloud_hypervisor(guest),
        };
        Ok(Self {
            kind,
            program: stage
                .copy(program)
                .with_context(|| format!("{} cannot be measured", kind.name()))?,
            libraries,
            arguments,
        })
    }

    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments);
        if let Some(directory) = &self.libraries {
            command.env("LD_LIBRARY_PATH", directory);
        }
        command
    }

    /// Returns the arguments, for the report.
    pub(super) fn arguments(&self) -> &[String] {
        &self.arguments
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn qemu(guest: &Guest, program: &Path, stage: &Stage) -> Result<Vec<String>> {
    let boot = Boot {
        kernel: &guest.kernel,
        initramfs: &guest.initramfs,
        memory_mib: guest.memory_mib,
        command_line: &guest.cmdline,
    };
    let mut arguments = qemu::arguments(qemu::MICROVM, &boot);
    let firmware = program
        .parent()
        .and_then(Path::parent)
        .map(|prefix| prefix.join("share/qemu/bios-microvm.bin"))
        .filter(|path| path.is_file());
    if let Some(firmware) = firmware {
        arguments.extend(["-bios".to_owned(), text(&stage.copy(&firmware)?)]);
    }
    Ok(arguments)
}

/// Without its API, like a library.
fn firecracker(guest: &Guest, stage: &Stage) -> Result<Vec<String>> {
    let configuration = json!({
        "boot-source": {
            "kernel_image_path": guest.kernel,
            "initrd_path": guest.initramfs,
            "boot_args": guest.cmdline,
        },
        "machine-config": { "vcpu_count": 1, "mem_size_mib": guest.memory_mib },
        "drives": [],
    });
    let path = stage.write("firecracker.json", &configuration.to_string())?;
    Ok(vec![
        "--no-api".to_owned(),
        "--config-file".to_owned(),
        text(&path),
    ])
}

fn cloud_hypervisor(guest: &Guest) -> Vec<String> {
    [
        "--kernel",
        &text(&guest.kernel),
        "--initramfs",
        &text(&guest.initramfs),
        "--cmdline",
        &guest.cmdline,
        "--cpus",
        "boot=1",
        "--memory",
        &format!("size={}M,thp=on", guest.memory_mib),
        "--console",
        "off",
        "--serial",
        "tty",
    ]
    .map(str::to_owned)
    .into()
}

#[cfg(test)]
mod tests {
    use super::Kind;

    #[test]
    fn vcpu_threads_are_known_by_their_names() {
        assert!(Kind::Podvisor.is_vcpu("vcpu0"));
        assert!(Kind::Qemu.is_vcpu("CPU 0/KVM"));
        assert!(Kind::Firecracker.is_vcpu("fc_vcpu 0"));
        assert!(Kind::CloudHypervisor.is_vcpu("vcpu0"));
        assert!(!Kind::Podvisor.is_vcpu("vm-io"));
        assert!(!Kind::Qemu.is_vcpu("call_rcu"));
        assert!(!Kind::Firecracker.is_vcpu("fc_vmm"));
    }
}
