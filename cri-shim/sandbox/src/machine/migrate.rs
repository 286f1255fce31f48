//! Machines that move to another host.
//!
//! Both sides open the disks that they share. Their locks, where two hosts see the same ones, stay
//! with the side that the machine leaves until it has ended there: the other side opens its disks
//! without, and takes the locks when it can. Disks of one host alone are copied to new ones of the
//! other.

use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;

use podvisor_network::guest::NicKind;
use podvisor_vmm::{
    Disk, IncomingMigration, MemorySize, MigrateError, MigrationLimits, MigrationOptions,
    MigrationProgress, MigrationReport, MovingDisk, PluggedIdentity, ReceiveError, lock_disk,
    unlock_disk,
};
use rustix::fs::{Advice, fadvise};
use tracing::debug;

use super::announce;
use super::error::{MachineError, causes};
use super::machine_disk::{DiskContents, DiskMove, MachineDisk};
use super::own_os::{HostFiles, MachinePlan};
use super::running::Machine;
use super::serial_port::SerialPort;

/// Why a machine did not arrive.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArriveError {
    /// What came is unfit, or the connection failed.
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    /// What came is not the machine that was described here.
    #[error(
        "the machine that comes has {theirs} vCPUs, and the one that is waited for at most {ours}"
    )]
    Vcpus {
        /// Those of what came.
        theirs: u8,
        /// Those of what is waited for.
        ours: u8,
    },
    /// Its disks are other ones.
    #[error(
        "the machine that comes has the disks {theirs:?}, and the one that is waited for {ours:?}"
    )]
    Disks {
        /// Those of what came: devices, and what they are.
        theirs: Vec<(String, String)>,
        /// Those of what is waited for.
        ours: Vec<(String, String)>,
    },
    /// Other disks were plugged in there.
    #[error(
        "the disks {theirs:?} were plugged into the machine that comes, and {ours:?} into the one \
         that is waited for"
    )]
    Plugged {
        /// The serial numbers of those there.
        theirs: Vec<String>,
        /// And here.
        ours: Vec<String>,
    },
    /// It could not be built here.
    #[error(transparent)]
    Machine(#[from] MachineError),
}

/// How far a machine has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// Its memory comes, of so many bytes.
    Receiving(u64),
    /// All of it is here, and it stands still where it was.
    HandingOver,
}

impl Machine {
    /// Moves the guest over a connection; blocks until it has moved, or goes on here. `progress`
    /// may cancel it.
    ///
    /// # Errors
    /// [`MigrateError`]: the guest goes on, except after [`MigrateError::InDoubt`].
    pub(crate) fn migrate(
        &self,
        connection: &UnixStream,
        options: &MigrationOptions,
        progress: impl FnMut(MigrationProgress) -> ControlFlow<()>,
    ) -> Result<MigrationReport, MigrateError> {
        self.vm.migrate(connection, options, progress)
    }
}

impl MachinePlan {
    /// Receives the machine from a connection, and starts it unless it was paused; blocks until it
    /// runs. Returns it, and whether it runs.
    ///
    /// # Errors
    /// [`ArriveError`]: it goes on where it was. Nothing is left of it here.
    pub(crate) fn receive(
        &self,
        host: &HostFiles,
        port: &SerialPort,
        connection: &UnixStream,
        mut tell: impl FnMut(Arrival),
    ) -> Result<(Machine, bool), ArriveError> {
        let limits = MigrationLimits::memory(MemorySize::bytes(self.size.most_memory()));
        let incoming = IncomingMigration::open(connection, limits)?;
        // More may be plugged in here, and some may have been plugged in there.
        let (theirs, ours) = (incoming.vcpus(), self.size.max_cpus);
        if theirs > ours {
            let error = ArriveError::Vcpus { theirs, ours };
            incoming.refuse(&error.to_string());
            return Err(error);
        }
        let disks = match self.new_disks(incoming.disks()) {
            Ok(disks) => disks,
            Err(error) => {
                incoming.refuse(&causes(&error));
                return Err(error);
            }
        };
        let (memory, growth) = (incoming.memory(), incoming.hotplug_memory());
        let copied: u64 = incoming.disks().iter().map(|disk| disk.len).sum();
        let bytes = self.size.all_memory().saturating_add(copied);
        let begins = || tell(Arrival::Receiving(bytes));
        if let Err(error) = self.expect_plugged(incoming.plugged(), begins) {
            incoming.refuse(&error.to_string());
            return Err(error);
        }
        let names = incoming.devices();
        let incoming = incoming.store_disks(disks);
        let arrived = incoming.receive(host.kvm())?;
        tell(Arrival::HandingOver);
        let is_running = arrived.is_running();
        let built = self.rebuild(host, port, &names, |host| host.given_to(arrived.builder()));
        let built = match built {
            Ok(built) => built,
            Err(error) => {
                arrived.refuse(&causes(&error));
                return Err(error.into());
            }
        };
        self.size
            .arrives(theirs, memory.as_bytes(), growth.as_bytes());
        arrived.start(&built.vm)?;
        Ok((built.watch().map_err(ArriveError::Machine)?, is_running))
    }

    /// Makes what the guest has written durable, for another host that opens the same disks.
    ///
    /// # Errors
    /// A disk's, by its serial number.
    pub(crate) fn sync_disks(&self) -> Result<(), MachineError> {
        self.of_shared(|disk, file| {
            file.sync_data().map_err(|source| MachineError::Sync {
                serial: disk.serial.clone(),
                source,
            })
        })
    }

    /// Forgets what this host's kernel remembers of disks that another host has written.
    pub(super) fn forget_cached(&self) {
        let forgotten = self.of_shared(|disk, file| {
            let forgotten = fadvise(file, 0, None, Advice::DontNeed);
            forgotten.map_err(|error| MachineError::Sync {
                serial: disk.serial.clone(),
                source: error.into(),
            })
        });
        if let Err(error) = forgotten {
            debug!(%error, "the kernel was not told to forget a disk");
        }
    }

    /// Takes the locks of disks that were opened without.
    ///
    /// # Errors
    /// Another process has one of them.
    pub(crate) fn lock_disks(&self) -> Result<(), MachineError> {
        self.of_shared(|_, file| Ok(lock_disk(file)?))
    }

    /// Gives back the locks of disks that others have, too, when the last machine is gone.
    pub(crate) fn unlock_disks(&self) {
        let unlocked = self.of_shared(|disk, file| {
            unlock_disk(file).map_err(|source| MachineError::Sync {
                serial: disk.serial.clone(),
                source,
            })
        });
        if let Err(error) = unlocked {
            debug!(%error, "the lock of a disk stays until its file is closed");
        }
    }

    /// Tells the networks of the machine's cards once where they are now.
    pub(crate) fn announce(&self) {
        let taps = self.nics.iter().filter(|nic| nic.kind == NicKind::Tap);
        for nic in taps {
            for frame in announce::frames(nic.mac, nic.addresses.iter().copied()) {
                let bytes = [&announce::TAP_HEADER[..], &frame].concat();
                if let Err(error) = rustix::io::write(&nic.fd, &bytes) {
                    debug!(%error, "a network is not told where the machine is");
                }
            }
        }
    }

    /// Returns the disks whose contents go with the memory.
    pub(crate) fn moving_disks(&self) -> Vec<MovingDisk> {
        let named = |(name, disk): (&str, &MachineDisk)| format!("{}={name}", disk.serial);
        let same = self.disks.iter().filter_map(|disk| match &disk.moves {
            DiskMove::Same(name) => Some((name.as_str(), disk)),
            DiskMove::Shared | DiskMove::Copied(_) => None,
        });
        // Those that are not copied are compared with the first one that is.
        let mut same: String = same.map(|disk| format!(" {}", named(disk))).collect();
        let mut moving = Vec::new();
        for (number, disk) in self.disks.iter().enumerate() {
            if let DiskMove::Copied(name) = &disk.moves {
                moving.push(MovingDisk {
                    device: format!("blk{number}"),
                    identity: named((name, disk)) + &std::mem::take(&mut same),
                    len: 0,
                });
            }
        }
        moving
    }

    /// Returns the disks that were plugged in, in the order of their devices.
    pub(crate) fn plugged_identities(&self) -> Vec<PluggedIdentity> {
        let plugged = self.plugged();
        let named = plugged.iter().map(|one| PluggedIdentity {
            device: one.device.clone(),
            identity: one.disk.serial.clone(),
        });
        named.collect()
    }

    /// Checks that the same disks were plugged in on both sides, and brings those here into the
    /// order of the others. `begins` is called while no other can come.
    fn expect_plugged(
        &self,
        announced: &[PluggedIdentity],
        begins: impl FnOnce(),
    ) -> Result<(), ArriveError> {
        let mut plugged = self.plugged();
        let place = |serial: &str| announced.iter().position(|one| one.identity == serial);
        let places: Option<Vec<usize>> =
            plugged.iter().map(|one| place(&one.disk.serial)).collect();
        if places.is_none_or(|places| places.len() != announced.len()) {
            return Err(ArriveError::Plugged {
                theirs: announced.iter().map(|one| one.identity.clone()).collect(),
                ours: plugged.iter().map(|one| one.disk.serial.clone()).collect(),
            });
        }
        plugged.sort_by_key(|one| place(&one.disk.serial));
        begins();
        Ok(())
    }

    /// Opens the disks whose contents come.
    fn new_disks(&self, announced: &[MovingDisk]) -> Result<Vec<Box<dyn Disk>>, ArriveError> {
        let expected = self.moving_disks();
        let names = |disks: &[MovingDisk]| {
            let named = |disk: &MovingDisk| (disk.device.clone(), disk.identity.clone());
            disks.iter().map(named).collect::<Vec<_>>()
        };
        let (theirs, ours) = (names(announced), names(&expected));
        if theirs != ours {
            return Err(ArriveError::Disks { theirs, ours });
        }
        let copied = self.disks.iter();
        let copied = copied.filter(|disk| matches!(disk.moves, DiskMove::Copied(_)));
        let opened = copied.zip(announced).map(|(disk, moving)| {
            disk.open_new(moving.len)
                .map_err(|source| MachineError::Sync {
                    serial: disk.serial.clone(),
                    source,
                })
        });
        Ok(opened.collect::<Result<_, _>>()?)
    }

    /// Calls `work` with each disk that both hosts have and that the guest may write.
    fn of_shared(
        &self,
        work: impl Fn(&MachineDisk, &File) -> Result<(), MachineError>,
    ) -> Result<(), MachineError> {
        let plugged = self.plugged();
        for disk in self.disks.iter().chain(plugged.iter().map(|one| &one.disk)) {
            let file = match &disk.contents {
                DiskContents::Raw { file, is_read_only } if !is_read_only => file,
                DiskContents::Part { file, .. } => file,
                _ => continue,
            };
            if disk.moves == DiskMove::Shared {
                work(disk, file)?;
            }
        }
        Ok(())
    }
}
