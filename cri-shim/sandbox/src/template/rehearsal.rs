//! The rehearsal: a clone of a new template performs the first steps of every sandbox, and the
//! pages that it writes are stored with the template. Later clones have them copied up front;
//! otherwise their guests would take a nested page fault for each.

use std::fs::File;
use std::path::Path;

use podvisor_agent_protocol::SHARED_DIR;
use rustix::fs::MemfdFlags;

use super::{HostEnds, Shape, Template, TemplateError, macs};
use crate::agent::{GuestConfig, Share};
use crate::error::SandboxError;
use crate::in_process::{BuiltSandbox, Sandbox, SandboxConfig};
use crate::machine::{Boot, Disk, MachineError, NicKind, SHARE_TAG, Snapshot};
use crate::provisional_nics::STREAM_MTU;
use crate::sole_container::{NAME, run_once};
use crate::spec::{ContainerOptions, container_spec};
use crate::types::{GuestNetwork, Interface, Route, StdioFds};

/// The MTU of most pods' networks.
const ETHERNET_MTU: u16 = 1500;

/// The program of the rehearsal's container.
const PROGRAM: &str = "exit";

/// The disk that gets its image.
const FIRST_SLOT: usize = 0;

/// An executable whose only segment is the whole file, and which only calls `exit(0)`.
fn program() -> Vec<u8> {
    const BASE: u64 = 0x40_0000;
    const HEADERS: u16 = 64 + 56;
    const CODE: [u8; 9] = [
        0x31, 0xff, // xor edi, edi
        0xb8, 60, 0, 0, 0, // mov eax, __NR_exit
        0x0f, 0x05, // syscall
    ];
    let size = u64::from(HEADERS) + CODE.len() as u64;
    let mut elf = b"\x7fELF\x02\x01\x01".to_vec();
    elf.resize(16, 0);
    let header16 = |elf: &mut Vec<u8>, values: &[u16]| {
        values
            .iter()
            .for_each(|value| elf.extend(value.to_le_bytes()));
    };
    let header64 = |elf: &mut Vec<u8>, values: &[u64]| {
        values
            .iter()
            .for_each(|value| elf.extend(value.to_le_bytes()));
    };
    // ET_EXEC for EM_X86_64, version 1; entry, program headers, no sections, no flags.
    header16(&mut elf, &[2, 62, 1, 0]);
    header64(&mut elf, &[BASE + u64::from(HEADERS), 64, 0]);
    header16(&mut elf, &[0, 0, 64, 56, 1, 0, 0, 0]);
    // PT_LOAD, readable and executable.
    header16(&mut elf, &[1, 0, 5, 0]);
    header64(&mut elf, &[0, BASE, BASE, size, size, 4096]);
    elf.extend(CODE);
    elf
}

/// Makes a clone of the snapshot in `place`.
pub(super) fn clone(
    shape: &Shape,
    ends: &HostEnds,
    place: &Path,
) -> Result<BuiltSandbox, TemplateError> {
    let boot = Boot::Warm(Template::of_snapshot(place)?.open()?);
    let config = SandboxConfig {
        guest: guest(shape),
        machine: ends.machine(shape, boot)?,
    };
    Ok(BuiltSandbox::new(config)?)
}

/// Runs a container in a clone of the snapshot in `place`, and stores the pages that this wrote.
pub(super) async fn rehearse(
    clone: BuiltSandbox,
    shape: &Shape,
    place: &Path,
) -> Result<(), TemplateError> {
    let sandbox = clone.start().await?;
    if shape.image_slots > 0 {
        run_container(&sandbox).await?;
    }
    let machine = sandbox.machine();
    let written = machine.working_set().map_err(SandboxError::from)?;
    machine.kill();
    tracing::debug!(bytes = written.bytes(), "rehearsed what clones write");
    Snapshot::set_working_set(place, written)
        .map_err(|error| SandboxError::from(MachineError::from(error)))?;
    Ok(())
}

/// Runs a container in a machine that is about to be a template, and removes it. Clones do not have
/// to repeat work that a kernel and an agent only do for the first container (patching branches in
/// the kernel's text, creating caches, reading the agent's file).
pub(super) async fn warm_up(sandbox: &Sandbox) -> Result<(), TemplateError> {
    run_container(sandbox).await?;
    sandbox
        .agent()
        .delete(NAME)
        .await
        .map_err(SandboxError::from)?;
    let ejected = sandbox.machine().eject_disk(FIRST_SLOT).await;
    ejected.map_err(SandboxError::from)?;
    Ok(())
}

/// Runs the program in a container, from the first disk without a medium.
async fn run_container(sandbox: &Sandbox) -> Result<(), TemplateError> {
    let inserted = sandbox.machine().insert_disk(FIRST_SLOT, disk()?).await;
    inserted.map_err(SandboxError::from)?;
    let options = ContainerOptions {
        command: vec![format!("/{PROGRAM}")],
        ..ContainerOptions::default()
    };
    let spec = container_spec(NAME, NAME, None, &options).map_err(SandboxError::from)?;
    run_once(sandbox, spec, nowhere()?, &ContainerOptions::default()).await?;
    Ok(())
}

/// The configuration that every guest gets: a host name, and all its devices. (The addresses are
/// for documentation, RFC 5737.)
fn guest(shape: &Shape) -> GuestConfig {
    let interface = |(card, mac)| Interface {
        name: format!("eth{card}"),
        mac,
        mtu: match shape.nic_kind {
            NicKind::Tap => ETHERNET_MTU,
            NicKind::Stream => STREAM_MTU,
        },
        addresses: vec![format!("192.0.2.{}/24", card + 2)],
        no_arp: false,
        is_down: false,
    };
    let cards = (0..shape.nics).zip(macs());
    let route = Route {
        destination: "0.0.0.0/0".to_owned(),
        gateway: Some("192.0.2.1".to_owned()),
        interface: "eth0".to_owned(),
        ..Route::default()
    };
    let share = shape.shares.then(|| Share {
        tag: SHARE_TAG.to_owned(),
        path: SHARED_DIR.to_owned(),
    });
    GuestConfig {
        hostname: NAME.to_owned(),
        network: GuestNetwork {
            interfaces: cards.map(interface).collect(),
            routes: (shape.nics > 0).then_some(route).into_iter().collect(),
            neighbours: Vec::new(),
        },
        shares: share.into_iter().collect(),
        ..GuestConfig::default()
    }
}

/// Creates a disk with the program.
fn disk() -> Result<Disk, TemplateError> {
    let made = || -> Result<File, MachineError> {
        let failed = |source| MachineError::Disk {
            serial: NAME.to_owned(),
            source,
        };
        let memory = rustix::fs::memfd_create(c"rehearsal", MemfdFlags::CLOEXEC)
            .map_err(|error| failed(error.into()))?;
        let file = File::from(memory);
        let target = file.try_clone().map_err(failed)?;
        podvisor_images::write_program_rootfs(target, PROGRAM, &program())
            .map_err(|error| failed(std::io::Error::other(error)))?;
        Ok(file)
    };
    let file = made().map_err(SandboxError::from)?;
    let serial = NAME.to_owned();
    Ok(Disk { file, serial })
}

/// Opens standard streams that are not read.
fn nowhere() -> Result<StdioFds, TemplateError> {
    let null = || -> std::io::Result<Option<std::os::fd::OwnedFd>> {
        let file = File::options().read(true).write(true).open("/dev/null")?;
        Ok(Some(file.into()))
    };
    let fds = || -> std::io::Result<StdioFds> {
        Ok(StdioFds {
            stdin: None,
            stdout: null()?,
            stderr: null()?,
        })
    };
    fds().map_err(super::file("open", "/dev/null"))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::process::Command;

    use super::*;

    #[test]
    fn the_program_is_one_that_linux_runs() {
        let dir = tempfile::tempdir().unwrap();
        let (bytes, path) = (dir.path().join("bytes"), dir.path().join(PROGRAM));
        std::fs::write(&bytes, program()).unwrap();
        let run = |program: &OsStr, arguments: &[&OsStr]| {
            let status = Command::new(program).args(arguments).status();
            assert!(status.unwrap().success());
        };
        // Copied by another process, so that no process that is started meanwhile has it open for
        // writing.
        run("install".as_ref(), &[bytes.as_ref(), path.as_ref()]);
        run(path.as_ref(), &[]);
    }
}
