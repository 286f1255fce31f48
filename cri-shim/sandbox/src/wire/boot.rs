//! The request for a machine whose guest has an operating system of its own.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::Duration;

use podvisor_network::cni::DhcpServer;
use serde::{Deserialize, Serialize};

use crate::machine::{
    BootProgram, ContinueAs, DiskContents, DiskMove, KeptKernel, MachineDisk, MachineIdentity,
    MachineShare, OverlayFormat, SavedMachine,
};
use crate::types::{BootEvent, BootMachine, IncomingMachine};

/// A machine to be booted. With the frame come: kernel, initramfs if there is one, the files of the
/// disks (of an overlay first the image) and of those that can be unplugged, the sockets of DHCP
/// servers, kernel and initramfs of a kept kernel, state and memory of a saved machine, and the log
/// if there is one.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct BootHeader {
    pub(crate) id: String,
    pub(crate) cmdline: String,
    #[serde(default)]
    pub(crate) program: BootProgram,
    #[serde(default)]
    pub(crate) uuid: Option<[u8; 16]>,
    #[serde(default)]
    pub(crate) identity: MachineIdentity,
    pub(crate) vcpus: u8,
    #[serde(default)]
    pub(crate) max_vcpus: u8,
    pub(crate) memory: u64,
    #[serde(default)]
    pub(crate) growth: u64,
    #[serde(default)]
    pub(crate) grown: u64,
    pub(crate) has_initramfs: bool,
    pub(crate) disks: Vec<DiskHeader>,
    /// Disks that can be unplugged.
    #[serde(default)]
    pub(crate) plugged: Vec<DiskHeader>,
    #[serde(default)]
    pub(crate) shares: Vec<MachineShare>,
    /// What DHCP servers give.
    #[serde(default)]
    pub(crate) dhcp: Vec<podvisor_dhcp::Config>,
    #[serde(default)]
    pub(crate) loader_limit: Option<Duration>,
    #[serde(default)]
    pub(crate) ends_at_reboot: bool,
    #[serde(default)]
    pub(crate) kept: Option<KeptHeader>,
    /// A saved machine is continued.
    #[serde(default)]
    pub(crate) continues: Option<ContinueAs>,
    #[serde(default)]
    pub(crate) incoming: Option<IncomingMachine>,
    #[serde(default)]
    pub(crate) is_idle: bool,
    #[serde(default)]
    pub(crate) before: Vec<BootEvent>,
    pub(crate) has_log: bool,
}

/// A kept kernel.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct KeptHeader {
    pub(crate) cmdline: String,
    pub(crate) title: String,
    pub(crate) has_initramfs: bool,
}

/// A disk of the machine.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct DiskHeader {
    pub(crate) serial: String,
    pub(crate) contents: ContentsHeader,
    #[serde(default)]
    pub(crate) moves: DiskMove,
}

/// What a disk contains.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) enum ContentsHeader {
    /// One file.
    Raw { is_read_only: bool },
    /// One file, from a sector on.
    Part { first: u32 },
    /// An image, and a raw file that shares blocks with it.
    Reflink,
    /// An image, and a qcow2 file with the differences.
    Qcow2,
}

impl DiskHeader {
    /// Takes a disk apart into the header and its files.
    fn new(disk: MachineDisk, fds: &mut Vec<OwnedFd>) -> Self {
        let contents = match disk.contents {
            DiskContents::Raw { file, is_read_only } => {
                fds.push(file.into());
                ContentsHeader::Raw { is_read_only }
            }
            DiskContents::Part { file, first } => {
                fds.push(file.into());
                ContentsHeader::Part { first }
            }
            DiskContents::Overlay {
                base,
                overlay,
                format,
            } => {
                fds.extend([base.into(), overlay.into()]);
                match format {
                    OverlayFormat::Reflink => ContentsHeader::Reflink,
                    _ => ContentsHeader::Qcow2,
                }
            }
        };
        Self {
            serial: disk.serial,
            contents,
            moves: disk.moves,
        }
    }

    /// Puts a disk together from the header and its files, which `next` returns in order.
    fn with_files<E>(self, mut next: impl FnMut() -> Result<OwnedFd, E>) -> Result<MachineDisk, E> {
        let mut file = || next().map(File::from);
        let mut overlay = |format| {
            Ok(DiskContents::Overlay {
                base: file()?,
                overlay: file()?,
                format,
            })
        };
        let contents = match self.contents {
            ContentsHeader::Reflink => overlay(OverlayFormat::Reflink)?,
            ContentsHeader::Qcow2 => overlay(OverlayFormat::Qcow2)?,
            ContentsHeader::Raw { is_read_only } => DiskContents::Raw {
                file: file()?,
                is_read_only,
            },
            ContentsHeader::Part { first } => DiskContents::Part {
                file: file()?,
                first,
            },
        };
        Ok(MachineDisk {
            contents,
            serial: self.serial,
            moves: self.moves,
        })
    }
}

impl BootHeader {
    /// Takes a configuration apart into the header and its files.
    pub(crate) fn new(boot: BootMachine) -> (Self, Vec<OwnedFd>) {
        let mut fds = vec![boot.kernel.into()];
        let has_initramfs = boot.initramfs.is_some();
        fds.extend(boot.initramfs.map(OwnedFd::from));
        let mut taken_apart = |disks: Vec<MachineDisk>| -> Vec<DiskHeader> {
            let disks = disks.into_iter();
            disks.map(|disk| DiskHeader::new(disk, &mut fds)).collect()
        };
        let disks = taken_apart(boot.disks);
        let plugged = taken_apart(boot.plugged);
        let mut dhcp = Vec::new();
        for DhcpServer { socket, config } in boot.dhcp {
            dhcp.push(config);
            fds.push(socket);
        }
        let kept = boot.kept.map(|kept| {
            let has_initramfs = kept.initramfs.is_some();
            fds.push(kept.kernel.into());
            fds.extend(kept.initramfs.map(OwnedFd::from));
            KeptHeader {
                cmdline: kept.cmdline,
                title: kept.title,
                has_initramfs,
            }
        });
        let continues = boot.saved.map(|saved| {
            fds.extend([saved.state.into(), saved.memory.into()]);
            saved.continues
        });
        let has_log = boot.log.is_some();
        fds.extend(boot.log);
        let header = Self {
            id: boot.id,
            cmdline: boot.cmdline,
            program: boot.program,
            uuid: boot.uuid,
            identity: boot.identity,
            vcpus: boot.vcpus,
            max_vcpus: boot.max_vcpus,
            memory: boot.memory,
            growth: boot.growth,
            grown: boot.grown,
            has_initramfs,
            disks,
            plugged,
            shares: boot.shares,
            dhcp,
            loader_limit: boot.loader_limit,
            ends_at_reboot: boot.ends_at_reboot,
            kept,
            continues,
            incoming: boot.incoming,
            is_idle: boot.is_idle,
            before: boot.before,
            has_log,
        };
        (header, fds)
    }

    /// Puts a configuration together from the header and its files, which `next` returns in order.
    ///
    /// # Errors
    /// Those of `next`.
    pub(crate) fn with_files<E>(
        self,
        mut next: impl FnMut() -> Result<OwnedFd, E>,
    ) -> Result<BootMachine, E> {
        let kernel = next()?.into();
        let initramfs = self.has_initramfs.then(&mut next).transpose()?;
        let mut put_together = |disks: Vec<DiskHeader>| -> Result<Vec<MachineDisk>, E> {
            let disks = disks.into_iter();
            disks.map(|disk| disk.with_files(&mut next)).collect()
        };
        let disks = put_together(self.disks)?;
        let plugged = put_together(self.plugged)?;
        let mut dhcp = Vec::new();
        for config in self.dhcp {
            let socket = next()?;
            dhcp.push(DhcpServer { socket, config });
        }
        let kept = match self.kept {
            Some(kept) => Some(KeptKernel {
                kernel: File::from(next()?),
                initramfs: match kept.has_initramfs {
                    true => Some(File::from(next()?)),
                    false => None,
                },
                cmdline: kept.cmdline,
                title: kept.title,
            }),
            None => None,
        };
        let saved = match self.continues {
            Some(continues) => Some(SavedMachine {
                state: File::from(next()?),
                memory: File::from(next()?),
                continues,
            }),
            None => None,
        };
        let log = self.has_log.then(&mut next).transpose()?;
        Ok(BootMachine {
            id: self.id,
            kernel,
            program: self.program,
            initramfs: initramfs.map(File::from),
            cmdline: self.cmdline,
            uuid: self.uuid,
            identity: self.identity,
            vcpus: self.vcpus,
            max_vcpus: self.max_vcpus,
            memory: self.memory,
            growth: self.growth,
            grown: self.grown,
            disks,
            plugged,
            shares: self.shares,
            dhcp,
            loader_limit: self.loader_limit,
            ends_at_reboot: self.ends_at_reboot,
            kept,
            saved,
            incoming: self.incoming,
            is_idle: self.is_idle,
            before: self.before,
            log,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    /// A file with this content, and what it is found by.
    fn file(content: &str) -> File {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        file.reopen().unwrap()
    }

    fn content(file: impl Into<File>) -> String {
        let mut text = String::new();
        file.into().read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn each_file_of_a_machine_arrives_where_it_belongs() {
        let mut boot = BootMachine::new("vm", file("kernel"));
        boot.initramfs = Some(file("initramfs"));
        boot.log = Some(file("log").into());
        let raw = |content: &str, is_read_only| DiskContents::Raw {
            file: file(content),
            is_read_only,
        };
        let overlay = |format| DiskContents::Overlay {
            base: file("base"),
            overlay: file("overlay"),
            format,
        };
        let part = DiskContents::Part {
            file: file("kept"),
            first: 1,
        };
        for (serial, contents) in [
            ("root", overlay(OverlayFormat::Qcow2)),
            ("seed", raw("seed", true)),
            ("data", raw("data", false)),
            ("kept", part),
            ("last", overlay(OverlayFormat::Reflink)),
        ] {
            let serial = serial.to_owned();
            let moves = DiskMove::Copied(serial.clone());
            boot.disks.push(MachineDisk {
                contents,
                serial,
                moves,
            });
        }
        let share = MachineShare {
            tag: "work".to_owned(),
            name: "v0".to_owned(),
            is_read_only: true,
        };
        boot.shares.push(share.clone());
        boot.program = BootProgram::Firmware;
        let client = podvisor_dhcp::MacAddress([2, 0, 0, 0, 0, 2]);
        let config = podvisor_dhcp::Config::new(client);
        boot.dhcp.push(DhcpServer {
            socket: file("dhcp").into(),
            config: config.clone(),
        });
        boot.kept = Some(KeptKernel {
            kernel: file("kept kernel"),
            initramfs: Some(file("kept initramfs")),
            cmdline: "ro".to_owned(),
            title: "Debian".to_owned(),
        });
        boot.saved = Some(SavedMachine {
            state: file("state"),
            memory: file("memory"),
            continues: ContinueAs::Copy,
        });
        let (header, fds) = BootHeader::new(boot);
        assert_eq!(fds.len(), 15);
        let header = serde_json::to_vec(&header).unwrap();
        let header: BootHeader = serde_json::from_slice(&header).unwrap();
        let mut fds = fds.into_iter();
        let boot = header.with_files(|| fds.next().ok_or(())).unwrap();
        assert_eq!(boot.shares, [share]);
        assert_eq!(boot.program, BootProgram::Firmware);
        assert_eq!(content(boot.kernel), "kernel");
        assert_eq!(content(boot.initramfs.unwrap()), "initramfs");
        assert_eq!(content(boot.log.unwrap()), "log");
        let kept = boot.kept.unwrap();
        assert_eq!(
            (kept.cmdline.as_str(), kept.title.as_str()),
            ("ro", "Debian")
        );
        assert_eq!(content(kept.kernel), "kept kernel");
        assert_eq!(content(kept.initramfs.unwrap()), "kept initramfs");
        let saved = boot.saved.unwrap();
        assert_eq!(saved.continues, ContinueAs::Copy);
        assert_eq!(content(saved.state) + &content(saved.memory), "statememory");
        let mut dhcp = boot.dhcp.into_iter();
        let server = dhcp.next().unwrap();
        assert_eq!(
            (content(server.socket).as_str(), server.config),
            ("dhcp", config)
        );
        for disk in &boot.disks {
            assert_eq!(disk.moves, DiskMove::Copied(disk.serial.clone()));
        }
        let disks = boot.disks.into_iter().map(|disk| match disk.contents {
            DiskContents::Raw { file, is_read_only } => {
                format!("{}: {} {is_read_only}", disk.serial, content(file))
            }
            DiskContents::Part { file, first } => {
                format!("{}: {} after {first}", disk.serial, content(file))
            }
            DiskContents::Overlay {
                base,
                overlay,
                format,
            } => {
                let (base, overlay) = (content(base), content(overlay));
                format!("{}: {base} {overlay} {format:?}", disk.serial)
            }
        });
        assert_eq!(
            disks.collect::<Vec<_>>(),
            [
                "root: base overlay Qcow2",
                "seed: seed true",
                "data: data false",
                "kept: kept after 1",
                "last: base overlay Reflink",
            ]
        );
    }

    #[test]
    fn a_machine_with_fewer_files_than_it_names_is_refused() {
        let (header, fds) = BootHeader::new(BootMachine {
            log: Some(file("log").into()),
            ..BootMachine::new("vm", file("kernel"))
        });
        let mut fds = fds.into_iter().take(1);
        assert!(header.with_files(|| fds.next().ok_or(())).is_err());
    }
}
