//! Disks that come and go while the guest runs. They are in the list of what machines are built
//! from, so that a guest that reboots keeps them; the list is locked while a machine is built or
//! changed, so that it says what the machine has. A machine that comes from another host
//! gets its disks before it comes.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::super::super::error::SandboxError;
use super::super::super::types::{BootMachine, RefusalKind, Unplugged};
use super::super::blocking::blocking;
use super::refusals::invalid;
use super::system::OwnOs;
use super::vm::Vm;
use crate::machine::{DiskContents, DiskMove, MachineDisk, MachineError, PluggedIn, causes};

/// Longest serial number of a disk, in bytes (virtio 1.3 §5.2.6.1).
const MAX_SERIAL: usize = 20;

/// Longest time that a guest may take to release a disk.
const MAX_LIMIT: Duration = Duration::from_secs(600);

/// Returns the disk that a request describes.
pub(super) fn disk(
    serial: String,
    file: File,
    is_read_only: bool,
) -> Result<MachineDisk, SandboxError> {
    if serial.is_empty() || serial.len() > MAX_SERIAL {
        return Err(invalid(format!(
            "the serial number {serial:?} must have 1 to {MAX_SERIAL} bytes"
        )));
    }
    Ok(MachineDisk {
        contents: DiskContents::Raw { file, is_read_only },
        serial,
        moves: DiskMove::Shared,
    })
}

impl OwnOs {
    /// Gives the guest a disk.
    pub(super) async fn plug_disk(
        &self,
        vm: &Arc<Vm>,
        disk: MachineDisk,
    ) -> Result<(), SandboxError> {
        // Nobody pauses, saves or unplugs meanwhile.
        let _turn = self.pausing.lock().await;
        if !vm.migrations.is_awaited() {
            vm.migrations.must_be_over()?;
            vm.must_not_be_saved()?;
        }
        let vm = Arc::clone(vm);
        blocking(move || vm.plug(disk)).await?
    }

    /// Takes a disk from the guest, which may release it before.
    pub(super) async fn unplug_disk(
        &self,
        vm: &Arc<Vm>,
        serial: &str,
        limit: Duration,
    ) -> Result<Unplugged, SandboxError> {
        let Some(device) = vm.device_of(serial)? else {
            return Ok(Unplugged::Released);
        };
        if vm.forget_awaited(serial) {
            return Ok(Unplugged::Released);
        }
        let machine = vm.machine()?;
        let asked = machine
            .request_unplug(&device)
            .map_err(SandboxError::wrong_state)?;
        let limit = limit.min(MAX_LIMIT);
        let is_released = match asked {
            None => false,
            Some(asked) => tokio::select! {
                waited = blocking(move || asked.wait(limit)) => waited?,
                _ = machine.ended() => {
                    let why = "the guest has ended or reboots just now: try it again";
                    return Err(SandboxError::refused(RefusalKind::WrongState, why));
                }
            },
        };
        let _turn = self.pausing.lock().await;
        vm.migrations.must_be_over()?;
        vm.must_not_be_saved()?;
        let (vm, serial) = (Arc::clone(vm), serial.to_owned());
        blocking(move || vm.unplug(&serial, is_released)).await?
    }
}

impl Vm {
    /// Refuses to save a machine with other plugged disks than those that whoever continues it
    /// knows of.
    pub(super) fn must_have_plugged(&self, expected: &[String]) -> Result<(), SandboxError> {
        let plugged = self.plan().plugged();
        let serials = plugged.iter().map(|one| one.disk.serial.as_str());
        let serials: Vec<&str> = serials.collect();
        match serials == expected {
            true => Ok(()),
            false => Err(SandboxError::refused(
                RefusalKind::WrongState,
                format!(
                    "the disks {serials:?} are plugged into the machine, and it was to be saved \
                     with {expected:?}: plug in or unplug those that are not in both again"
                ),
            )),
        }
    }

    fn plug(&self, disk: MachineDisk) -> Result<(), SandboxError> {
        let mut plugged = self.plan().plugged();
        let serial = disk.serial.clone();
        if let Some(there) = plugged.iter().find(|one| one.disk.serial == serial) {
            return match is_same(&there.disk, &disk) {
                Ok(true) => Ok(()),
                Ok(false) => Err(taken(&serial)),
                Err(error) => Err(SandboxError::wrong_state(MachineError::Disk {
                    serial,
                    source: error,
                })),
            };
        }
        if self.plan().disks.iter().any(|one| one.serial == serial) {
            return Err(taken(&serial));
        }
        if self.migrations.is_awaited() {
            // Which disks it has is compared when it comes, under the same lock.
            if self.plan().disks.len() + plugged.len() >= BootMachine::MOST_DISKS {
                let error = MachineError::Full;
                return Err(SandboxError::refused(
                    RefusalKind::ResourceExhausted,
                    causes(&error),
                ));
            }
            plugged.push(PluggedIn::new(disk));
            return Ok(());
        }
        let machine = self.machine()?;
        let plug = || machine.plug_device(disk.locked_device()?);
        let device = plug().map_err(|error| {
            let kind = match error {
                MachineError::Full => RefusalKind::ResourceExhausted,
                _ => RefusalKind::WrongState,
            };
            SandboxError::refused(kind, causes(&error))
        })?;
        info!(
            container = self.container.id,
            serial, device, "a disk is plugged in"
        );
        plugged.push(PluggedIn { disk, device });
        Ok(())
    }

    /// Returns the device of a disk that was plugged in, if there is one.
    fn device_of(&self, serial: &str) -> Result<Option<String>, SandboxError> {
        let plugged = self.plan().plugged();
        if let Some(there) = plugged.iter().find(|one| one.disk.serial == serial) {
            return Ok(Some(there.device.clone()));
        }
        match self.plan().disks.iter().any(|one| one.serial == serial) {
            true => Err(invalid(format!(
                "the machine was booted with the disk {serial:?}: only disks that were plugged in \
                 can be unplugged"
            ))),
            false => Ok(None),
        }
    }

    /// Takes a disk from a machine that has not come yet; `false` if it is there, or on its way.
    fn forget_awaited(&self, serial: &str) -> bool {
        let mut plugged = self.plan().plugged();
        let is_awaited = self.migrations.is_awaited();
        if is_awaited {
            plugged.retain(|one| one.disk.serial != serial);
        }
        is_awaited
    }

    fn unplug(&self, serial: &str, is_released: bool) -> Result<Unplugged, SandboxError> {
        let mut plugged = self.plan().plugged();
        let at = plugged.iter().position(|one| one.disk.serial == serial);
        let Some(at) = at else {
            return Ok(Unplugged::Released);
        };
        let machine = self.machine()?;
        let unplugged = machine.unplug_device(&plugged[at].device);
        if let Err(error @ MachineError::Start(_)) = unplugged {
            return Err(SandboxError::wrong_state(error));
        }
        // The guest has lost it, even if its host side still has to end.
        drop(plugged.remove(at));
        unplugged.map_err(SandboxError::wrong_state)?;
        let container = &self.container.id;
        match is_released {
            true => {
                info!(container, serial, "a disk is unplugged");
                Ok(Unplugged::Released)
            }
            false => {
                warn!(
                    container,
                    serial, "a disk is taken away that the guest has not released"
                );
                Ok(Unplugged::Forced)
            }
        }
    }
}

/// Whether both are the same file, and are used alike.
fn is_same(one: &MachineDisk, other: &MachineDisk) -> io::Result<bool> {
    let identity = |disk: &MachineDisk| match (&disk.contents, disk.raw_file()) {
        (DiskContents::Raw { is_read_only, .. }, Some(file)) => {
            let file = file.metadata()?;
            Ok(Some((file.dev(), file.ino(), file.rdev(), *is_read_only)))
        }
        _ => Ok::<_, io::Error>(None),
    };
    Ok(identity(one)? == identity(other)?)
}

fn taken(serial: &str) -> SandboxError {
    SandboxError::refused(
        RefusalKind::AlreadyExists,
        format!("another disk of the machine has the serial number {serial:?}"),
    )
}
