//! A GUID partition table (UEFI 2.10 §5) around images of partitions.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

const SECTOR: u64 = 512;
/// Entries of a table, and bytes of one.
const ENTRIES: u64 = 128;
const ENTRY: u64 = 128;
/// Partitions begin at multiples of this.
const ALIGNMENT: u64 = 1 << 20;

/// The type of a partition, as its GUID is on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartitionType {
    /// Linux's data.
    Linux,
    /// The system partition of EFI.
    Efi,
}

impl PartitionType {
    fn guid(self) -> [u8; 16] {
        match self {
            Self::Linux => *b"\xaf\x3d\xc6\x0f\x83\x84\x72\x47\x8e\x79\x3d\x69\xd8\x47\x7d\xe4",
            Self::Efi => *b"\x28\x73\x2a\xc1\x1f\xf8\xd2\x11\xba\x4b\x00\xa0\xc9\x3e\xc9\x3b",
        }
    }
}

/// A disk to be written.
#[derive(Clone, Debug, Default)]
pub struct Gpt {
    /// Number, type and image.
    partitions: Vec<(u32, PartitionType, PathBuf)>,
}

impl Gpt {
    /// A disk without partitions.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a partition with this number, from 1 to 128, which holds a copy of an image. The order
    /// of calls is that on the disk.
    #[must_use]
    pub fn partition(
        mut self,
        number: u32,
        kind: PartitionType,
        image: impl Into<PathBuf>,
    ) -> Self {
        self.partitions.push((number, kind, image.into()));
        self
    }

    /// Writes the disk; what is zero in the images is not written.
    ///
    /// # Errors
    ///
    /// If an image cannot be read or the disk not be written.
    pub fn write(&self, disk: &Path) -> io::Result<()> {
        let mut out = File::create(disk)?;
        let mut entries = vec![0_u8; (ENTRIES * ENTRY) as usize];
        let mut next = ALIGNMENT;
        for (number, kind, image) in &self.partitions {
            let mut image = File::open(image)?;
            let len = image.metadata()?.len().next_multiple_of(SECTOR);
            out.seek(SeekFrom::Start(next))?;
            copy_sparsely(&mut image, &mut out)?;
            let slot = number
                .checked_sub(1)
                .filter(|slot| u64::from(*slot) < ENTRIES);
            let slot =
                slot.ok_or_else(|| io::Error::other("partitions have the numbers 1 to 128"))?;
            let entry = &mut entries[slot as usize * ENTRY as usize..][..ENTRY as usize];
            entry[..16].copy_from_slice(&kind.guid());
            entry[16..32].copy_from_slice(&unique(*number));
            entry[32..40].copy_from_slice(&(next / SECTOR).to_le_bytes());
            entry[40..48].copy_from_slice(&((next + len) / SECTOR - 1).to_le_bytes());
            next = (next + len).next_multiple_of(ALIGNMENT);
        }
        let sectors = next / SECTOR + ALIGNMENT / SECTOR;
        out.set_len(sectors * SECTOR)?;
        let table = ENTRIES * ENTRY / SECTOR;
        let last = sectors - 1;
        let crc = crc32fast::hash(&entries);
        for (own, other, at) in [(1, last, 2), (last, 1, last - table)] {
            let header = header(own, other, at, last, crc);
            out.seek(SeekFrom::Start(own * SECTOR))?;
            out.write_all(&header)?;
            out.seek(SeekFrom::Start(at * SECTOR))?;
            out.write_all(&entries)?;
        }
        out.seek(SeekFrom::Start(0))?;
        out.write_all(&protective(last))
    }
}

/// A GUID that the number makes; of a fixed kind, so that the same parts give the same disk.
fn unique(number: u32) -> [u8; 16] {
    let mut guid = *b"podvisor-part\0\0\0";
    guid[12..].copy_from_slice(&number.to_be_bytes());
    guid
}

fn header(own: u64, other: u64, entries: u64, last: u64, crc: u32) -> Vec<u8> {
    let first_usable = 2 + ENTRIES * ENTRY / SECTOR;
    let last_usable = last - ENTRIES * ENTRY / SECTOR - 1;
    let mut header = Vec::with_capacity(92);
    header.extend(b"EFI PART");
    header.extend(0x1_0000_u32.to_le_bytes());
    header.extend(92_u32.to_le_bytes());
    header.extend([0; 8]); // its own checksum, and a reserved word
    for word in [own, other, first_usable, last_usable] {
        header.extend(word.to_le_bytes());
    }
    header.extend(unique(0));
    header.extend(entries.to_le_bytes());
    for word in [ENTRIES as u32, ENTRY as u32, crc] {
        header.extend(word.to_le_bytes());
    }
    let checksum = crc32fast::hash(&header);
    header[16..20].copy_from_slice(&checksum.to_le_bytes());
    header
}

/// The first sector: one partition of all, so that old tools leave the disk alone.
fn protective(last: u64) -> [u8; 512] {
    let mut sector = [0; 512];
    let entry = &mut sector[446..462];
    entry[4] = 0xee;
    entry[8..12].copy_from_slice(&1_u32.to_le_bytes());
    let size = u32::try_from(last).unwrap_or(u32::MAX);
    entry[12..16].copy_from_slice(&size.to_le_bytes());
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

fn copy_sparsely(from: &mut File, to: &mut File) -> io::Result<()> {
    let mut block = vec![0; 64 << 10];
    loop {
        let mut filled = 0;
        while filled < block.len() {
            match from.read(&mut block[filled..])? {
                0 => break,
                more => filled += more,
            }
        }
        if filled == 0 {
            return Ok(());
        }
        let part = &block[..filled];
        if part.iter().all(|byte| *byte == 0) {
            to.seek(SeekFrom::Current(filled as i64))?;
        } else {
            to.write_all(part)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn other_tools_read_the_table() {
        let dir = std::env::temp_dir().join(format!("podvisor-gpt-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (one, two, disk) = (dir.join("one"), dir.join("two"), dir.join("disk"));
        std::fs::write(&one, vec![1; 3 << 20]).unwrap();
        std::fs::write(&two, vec![2; 1000]).unwrap();
        let gpt = Gpt::new()
            .partition(15, PartitionType::Efi, &two)
            .partition(1, PartitionType::Linux, &one);
        gpt.write(&disk).unwrap();
        let listed = Command::new("/usr/sbin/sfdisk")
            .arg("-d")
            .arg(&disk)
            .output()
            .unwrap();
        let bytes = std::fs::read(&disk).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
        let text = String::from_utf8_lossy(&listed.stdout);
        assert!(text.contains("label: gpt"), "{text} {listed:?}");
        assert!(
            text.contains("disk1 : start=        4096, size=        6144"),
            "{text}"
        );
        assert!(
            text.contains("disk15 : start=        2048, size=           2"),
            "{text}"
        );
        assert!(listed.stderr.is_empty(), "{listed:?}");
        assert_eq!(bytes[4096 * 512..][..3 << 20], vec![1; 3 << 20]);
    }
}
