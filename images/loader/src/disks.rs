//! The machine's disks and their partitions, as the kernel found them, and what is on each.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use podvisor_boot_entries::signature::{self, Kind, START_BYTES, Signature};

use crate::console::say;
use crate::error::LoaderError;
use crate::sys;
use crate::watchdog::Watchdog;

/// Disks that are looked at, and partitions of each.
const DISKS: usize = 64;
const PARTITIONS: usize = 128;
/// Bytes at the end of a device that some RAIDs are told by.
const END_BYTES: u64 = 128 << 10;

/// A disk.
#[derive(Debug)]
pub(crate) struct Disk {
    /// The order that the machine has it in.
    pub(crate) number: usize,
    /// The name in Linux, such as `vda`.
    name: String,
    /// What the machine calls it.
    serial: String,
    bytes: u64,
    /// What a file system may be on: the disk itself, or its partitions.
    pub(crate) parts: Vec<Part>,
}

/// A disk or a partition that may hold a file system.
#[derive(Debug)]
pub(crate) struct Part {
    /// The number from 1, `None` for the whole disk.
    pub(crate) number: Option<u32>,
    /// The name in Linux, such as `vda1`.
    pub(crate) name: String,
    /// What is on it, if known.
    pub(crate) signature: Option<Signature>,
    /// Why it could not be read.
    pub(crate) fault: Option<String>,
}

impl Part {
    /// Its device node.
    pub(crate) fn device(&self) -> PathBuf {
        Path::new("/dev").join(&self.name)
    }

    fn describe(&self) -> String {
        let mut text = match (&self.signature, &self.fault) {
            (_, Some(fault)) => format!("{} {fault}", self.name),
            (Some(signature), None) => format!("{} {}", self.name, signature.kind),
            (None, None) => format!("{} nothing known", self.name),
        };
        let label = self
            .signature
            .as_ref()
            .and_then(|found| found.label.as_ref());
        if let Some(label) = label {
            let _ = write!(text, " {label:?}");
        }
        text
    }
}

/// Finds the disks, or those with one of these serials, and makes each refuse writes.
pub(crate) fn find(serials: &[String], watchdog: &Watchdog) -> Result<Vec<Disk>, LoaderError> {
    let mut names: Vec<String> = names_in(Path::new("/sys/block"))
        .into_iter()
        .filter(|name| name.starts_with("vd"))
        .collect();
    // vdz is before vdaa.
    names.sort_by_key(|name| (name.len(), name.clone()));
    let mut disks = Vec::new();
    let mut present = Vec::new();
    for (number, name) in names.into_iter().enumerate().take(DISKS) {
        let directory = Path::new("/sys/block").join(&name);
        let bytes = number_in(&directory.join("size")).unwrap_or(0) * 512;
        let serial = text_in(&directory.join("serial"));
        // A slot for a disk that may come.
        if bytes == 0 {
            continue;
        }
        present.push(match serial.as_str() {
            "" => name.clone(),
            serial => format!("{name} with the serial {serial:?}"),
        });
        if !serials.is_empty() && !serials.iter().any(|wanted| is_serial(wanted, &serial)) {
            continue;
        }
        watchdog.step(format!("looking at the disk {name}"));
        let disk = Disk {
            number,
            parts: parts(&name, &directory, bytes),
            name,
            serial,
            bytes,
        };
        say(&disk.describe());
        disks.push(disk);
    }
    if disks.is_empty() {
        let wanted = match serials {
            [] => "the machine has no disk".to_owned(),
            serials => format!("no disk has the serial {}", serials.join(" or ")),
        };
        let present = match present.as_slice() {
            [] => "none".to_owned(),
            names => names.join(", "),
        };
        return Err(LoaderError::NoDisk { wanted, present });
    }
    Ok(disks)
}

/// Finds the disk with a serial, which is neither read nor kept from writes.
pub(crate) fn named(wanted: &str) -> Option<PathBuf> {
    let names = names_in(Path::new("/sys/block")).into_iter();
    let mut disks = names.filter(|name| name.starts_with("vd"));
    let name = disks.find(|name| {
        let directory = Path::new("/sys/block").join(name);
        is_serial(wanted, &text_in(&directory.join("serial")))
    })?;
    Some(Path::new("/dev").join(name))
}

/// virtio-blk cuts serials off after 20 bytes.
fn is_serial(wanted: &str, serial: &str) -> bool {
    let wanted = wanted.as_bytes();
    wanted.get(..20).unwrap_or(wanted) == serial.as_bytes()
}

/// Names what is on these disks and is no file system to boot from.
pub(crate) fn unusable(disks: &[Disk]) -> String {
    let parts = disks.iter().flat_map(|disk| &disk.parts);
    let others: Vec<String> = parts
        .filter(|part| {
            !part
                .signature
                .as_ref()
                .is_some_and(|found| found.kind.is_mountable())
        })
        .map(
            |part| match part.signature.as_ref().map(|found| found.kind) {
                Some(kind @ (Kind::Lvm | Kind::Luks | Kind::Raid | Kind::BitLocker)) => {
                    format!("{} is {kind}, from which the loader cannot boot", part.name)
                }
                _ => part.describe(),
            },
        )
        .collect();
    if others.is_empty() {
        return String::new();
    }
    format!("; not looked at: {}", others.join(", "))
}

impl Disk {
    fn describe(&self) -> String {
        let serial = match self.serial.as_str() {
            "" => String::new(),
            serial => format!("serial {serial:?}, "),
        };
        let parts: Vec<String> = self.parts.iter().map(Part::describe).collect();
        let mib = self.bytes >> 20;
        format!(
            "disk {} ({serial}{mib} MiB): {}",
            self.name,
            parts.join(", ")
        )
    }
}

fn parts(disk: &str, directory: &Path, bytes: u64) -> Vec<Part> {
    let whole = part(disk, None, bytes);
    let is_whole = whole.signature.is_some();
    let mut parts: Vec<Part> = names_in(directory)
        .into_iter()
        .filter(|name| name.starts_with(disk))
        .filter_map(|name| {
            let directory = directory.join(&name);
            let number = number_in(&directory.join("partition"))?;
            let bytes = number_in(&directory.join("size"))? * 512;
            Some((u32::try_from(number).ok()?, name, bytes))
        })
        // A disk with a file system of its own has partitions only by what its first sector
        // happens to hold, as images for USB sticks and FAT's boot sectors do.
        .filter(|_| !is_whole)
        .map(|(number, name, bytes)| part(&name, Some(number), bytes))
        .collect();
    parts.sort_by_key(|part| part.number);
    parts.truncate(PARTITIONS);
    if parts.is_empty() {
        return vec![whole];
    }
    parts
}

fn part(name: &str, number: Option<u32>, bytes: u64) -> Part {
    let mut part = Part {
        number,
        name: name.to_owned(),
        signature: None,
        fault: None,
    };
    match look(&part.device(), bytes) {
        Ok(signature) => part.signature = signature,
        Err(error) => part.fault = Some(format!("cannot be read ({error})")),
    }
    part
}

fn look(device: &Path, bytes: u64) -> std::io::Result<Option<Signature>> {
    let file = File::open(device)?;
    sys::set_read_only(&file)?;
    let start = read(&file, 0, START_BYTES)?;
    let found = signature::identify(&start);
    let begin = bytes.saturating_sub(END_BYTES);
    let end = read(&file, begin, usize::try_from(END_BYTES).unwrap_or(0))?;
    if signature::is_raid_by_its_end(&end) {
        return Ok(Some(Signature {
            kind: Kind::Raid,
            uuid: None,
            label: None,
        }));
    }
    Ok(found)
}

/// Reads up to `len` bytes; fewer where the device ends.
fn read(file: &File, offset: u64, len: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, offset + filled as u64)? {
            0 => break,
            more => filled += more,
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

fn text_in(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.trim().to_owned()
}

fn number_in(path: &Path) -> Option<u64> {
    text_in(path).parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_serial_is_compared_as_far_as_a_disk_tells_it() {
        assert!(is_serial("root", "root"));
        assert!(!is_serial("root", "root2"));
        assert!(is_serial("0123456789012345678901", "01234567890123456789"));
    }

    #[test]
    fn what_the_loader_cannot_boot_from_is_named() {
        let part = |name: &str, kind| Part {
            number: Some(1),
            name: name.to_owned(),
            signature: Some(Signature {
                kind,
                uuid: None,
                label: None,
            }),
            fault: None,
        };
        let disk = Disk {
            number: 0,
            name: "vda".to_owned(),
            serial: String::new(),
            bytes: 1 << 30,
            parts: vec![part("vda1", Kind::Ext4), part("vda2", Kind::Lvm)],
        };
        assert_eq!(disk.describe(), "disk vda (1024 MiB): vda1 ext4, vda2 LVM");
        let text = unusable(&[disk]);
        assert_eq!(
            text,
            "; not looked at: vda2 is LVM, from which the loader cannot boot"
        );
    }
}
