//! What a disk or a partition holds, by its first bytes: the file systems that are mounted, and
//! what is told apart only to be refused by its name.

use std::fmt::{self, Write as _};

/// Bytes at the start that [`identify`] looks at.
pub const START_BYTES: usize = 0x1_1000;

/// What a partition holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// ext2, ext3 or ext4.
    Ext4,
    /// XFS.
    Xfs,
    /// btrfs.
    Btrfs,
    /// FAT with 12, 16 or 32 bits.
    Vfat,
    /// ISO 9660.
    Iso9660,
    /// A physical volume of LVM.
    Lvm,
    /// A container of LUKS.
    Luks,
    /// A member of a Linux RAID.
    Raid,
    /// A partition of BitLocker.
    BitLocker,
    /// NTFS.
    Ntfs,
    /// A swap area.
    Swap,
    /// SquashFS.
    Squashfs,
    /// EROFS.
    Erofs,
    /// F2FS.
    F2fs,
    /// bcachefs.
    Bcachefs,
}

impl Kind {
    /// Whether the loader mounts it.
    #[must_use]
    pub fn is_mountable(self) -> bool {
        matches!(
            self,
            Self::Ext4 | Self::Xfs | Self::Btrfs | Self::Vfat | Self::Iso9660
        )
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "XFS",
            Self::Btrfs => "btrfs",
            Self::Vfat => "vfat",
            Self::Iso9660 => "ISO 9660",
            Self::Lvm => "LVM",
            Self::Luks => "LUKS",
            Self::Raid => "Linux RAID",
            Self::BitLocker => "BitLocker",
            Self::Ntfs => "NTFS",
            Self::Swap => "swap",
            Self::Squashfs => "SquashFS",
            Self::Erofs => "EROFS",
            Self::F2fs => "F2FS",
            Self::Bcachefs => "bcachefs",
        })
    }
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// What it is.
    pub kind: Kind,
    /// Its UUID, of the file systems that are mounted.
    pub uuid: Option<String>,
    /// Its label, of the file systems that are mounted.
    pub label: Option<String>,
}

/// Magic numbers of what has neither UUID nor label here: offset, bytes.
const OTHERS: &[(usize, &[u8], Kind)] = &[
    (0, b"LUKS\xba\xbe", Kind::Luks),
    (3, b"-FVE-FS-", Kind::BitLocker),
    (3, b"NTFS    ", Kind::Ntfs),
    (0, b"hsqs", Kind::Squashfs),
    (1024, b"\xe2\xe1\xf5\xe0", Kind::Erofs),
    (1024, b"\x10\x20\xf5\xf2", Kind::F2fs),
    (
        4096 + 24,
        b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef",
        Kind::Bcachefs,
    ),
    // Versions 1.1 and 1.2 of the superblock; that of 1.0 is at the end, as is 0.90's.
    (0, b"\xfc\x4e\x2b\xa9", Kind::Raid),
    (4096, b"\xfc\x4e\x2b\xa9", Kind::Raid),
    (4096 - 10, b"SWAPSPACE2", Kind::Swap),
    (4096 - 10, b"SWAP-SPACE", Kind::Swap),
];

/// Tells what the device with these first bytes holds; `None` if nothing known.
#[must_use]
pub fn identify(start: &[u8]) -> Option<Signature> {
    // A file system may be made where LVM or RAID was, never the other way round: their own
    // tools clear what was there. But a member of a RAID 1 begins like the file system on it.
    let others = OTHERS
        .iter()
        .find(|(offset, magic, _)| has(start, *offset, magic))
        .map(|(_, _, kind)| *kind);
    let kind = others.or_else(|| {
        (0..4)
            .any(|sector| {
                has(start, sector * 512, b"LABELONE") && has(start, sector * 512 + 24, b"LVM2 001")
            })
            .then_some(Kind::Lvm)
    });
    if let Some(kind) = kind {
        return Some(Signature {
            kind,
            uuid: None,
            label: None,
        });
    }
    ext4(start)
        .or_else(|| xfs(start))
        .or_else(|| btrfs(start))
        .or_else(|| iso9660(start))
        .or_else(|| vfat(start))
}

/// Tells whether these last 128 KiB of a device end with the superblock of a RAID, version 0.90 or
/// 1.0.
#[must_use]
pub fn is_raid_by_its_end(end: &[u8]) -> bool {
    let from_end = |distance: usize| {
        let at = end.len().checked_sub(distance)?;
        // Superblocks are where a multiple of 4 KiB, or of 64 KiB, is.
        end.get(at..)?.get(..4)
    };
    let magic = Some(&b"\xfc\x4e\x2b\xa9"[..]);
    (1..=32).any(|pages| from_end(pages * 4096) == magic)
}

fn has(start: &[u8], offset: usize, magic: &[u8]) -> bool {
    bytes(start, offset, magic.len()) == Some(magic)
}

fn bytes(start: &[u8], offset: usize, len: usize) -> Option<&[u8]> {
    start.get(offset..)?.get(..len)
}

fn text(bytes: Option<&[u8]>) -> Option<String> {
    let bytes = bytes?;
    let end = bytes.iter().position(|byte| *byte == 0);
    let text = String::from_utf8_lossy(bytes.get(..end.unwrap_or(bytes.len()))?).into_owned();
    let text = text.trim_end();
    (!text.is_empty()).then(|| text.to_owned())
}

fn uuid(bytes: Option<&[u8]>) -> Option<String> {
    let bytes = bytes?;
    if bytes.iter().all(|byte| *byte == 0) {
        return None;
    }
    let mut text = String::with_capacity(36);
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        let _ = write!(text, "{byte:02x}");
    }
    Some(text)
}

fn ext4(start: &[u8]) -> Option<Signature> {
    has(start, 1024 + 0x38, b"\x53\xef").then(|| Signature {
        kind: Kind::Ext4,
        uuid: uuid(bytes(start, 1024 + 0x68, 16)),
        label: text(bytes(start, 1024 + 0x78, 16)),
    })
}

fn xfs(start: &[u8]) -> Option<Signature> {
    has(start, 0, b"XFSB").then(|| Signature {
        kind: Kind::Xfs,
        uuid: uuid(bytes(start, 32, 16)),
        label: text(bytes(start, 108, 12)),
    })
}

fn btrfs(start: &[u8]) -> Option<Signature> {
    const SUPERBLOCK: usize = 0x1_0000;
    has(start, SUPERBLOCK + 0x40, b"_BHRfS_M").then(|| Signature {
        kind: Kind::Btrfs,
        uuid: uuid(bytes(start, SUPERBLOCK + 0x20, 16)),
        label: text(bytes(start, SUPERBLOCK + 0x12b, 256)),
    })
}

/// ISO 9660's UUID is its time of creation, as blkid prints it.
fn iso9660(start: &[u8]) -> Option<Signature> {
    const DESCRIPTOR: usize = 0x8000;
    if !has(start, DESCRIPTOR, b"\x01CD001") {
        return None;
    }
    let modified = bytes(start, DESCRIPTOR + 830, 16);
    let created = bytes(start, DESCRIPTOR + 813, 16);
    let digits = [modified, created].into_iter().flatten().find(|time| {
        time.iter().all(u8::is_ascii_digit) && time.iter().any(|digit| *digit != b'0')
    });
    let uuid = digits.map(|digits| {
        let digits = String::from_utf8_lossy(digits);
        let mut text = String::new();
        for (at, digit) in digits.chars().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10 | 12 | 14) {
                text.push('-');
            }
            text.push(digit);
        }
        text
    });
    Some(Signature {
        kind: Kind::Iso9660,
        uuid,
        label: text(bytes(start, DESCRIPTOR + 40, 32)),
    })
}

/// A boot sector may belong to a disk with partitions, too: FAT's has a sane block of parameters.
fn vfat(start: &[u8]) -> Option<Signature> {
    let byte = |offset: usize| start.get(offset).copied();
    let half = |offset: usize| {
        let bytes = bytes(start, offset, 2)?;
        Some(u16::from_le_bytes(bytes.try_into().ok()?))
    };
    let is_power = |number: u16| number.is_power_of_two();
    let has_parameters = has(start, 510, b"\x55\xaa")
        && matches!(byte(0), Some(0xeb | 0xe9))
        && half(11).is_some_and(|bytes| is_power(bytes) && (512..=4096).contains(&bytes))
        && byte(13).is_some_and(|sectors| sectors.is_power_of_two())
        && half(14).is_some_and(|reserved| reserved > 0)
        && matches!(byte(16), Some(1 | 2))
        && byte(21).is_some_and(|media| media >= 0xf0);
    // FAT32 has no number of sectors of 16 bits per table.
    let extended = if half(22) == Some(0) { 64 } else { 36 };
    let names_itself = has(start, extended + 18, b"FAT") || has(start, extended + 18, b"MSWIN");
    if !has_parameters || !names_itself {
        return None;
    }
    let serial = bytes(start, extended + 3, 4)?;
    let serial = u32::from_le_bytes(serial.try_into().ok()?);
    let label = text(bytes(start, extended + 7, 11)).filter(|label| label != "NO NAME");
    Some(Signature {
        kind: Kind::Vfat,
        uuid: Some(format!("{:04X}-{:04X}", serial >> 16, serial & 0xffff)),
        label,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn with(parts: &[(usize, &[u8])]) -> Vec<u8> {
        let mut start = vec![0; START_BYTES];
        for (offset, bytes) in parts {
            start[*offset..*offset + bytes.len()].copy_from_slice(bytes);
        }
        start
    }

    #[test]
    fn file_systems_are_told_with_uuid_and_label() {
        let id: Vec<u8> = (1..17).collect();
        let text = "01020304-0506-0708-090a-0b0c0d0e0f10";
        for (kind, parts) in [
            (
                Kind::Ext4,
                vec![
                    (1024 + 0x38, &b"\x53\xef"[..]),
                    (1024 + 0x68, &id),
                    (1024 + 0x78, b"rootfs"),
                ],
            ),
            (Kind::Xfs, vec![(0, b"XFSB"), (32, &id), (108, b"rootfs")]),
            (
                Kind::Btrfs,
                vec![
                    (0x1_0040, b"_BHRfS_M"),
                    (0x1_0020, &id),
                    (0x1_012b, b"rootfs"),
                ],
            ),
        ] {
            let found = identify(&with(&parts)).unwrap();
            assert_eq!(found.kind, kind);
            assert_eq!(found.uuid.as_deref(), Some(text), "{kind}");
            assert_eq!(found.label.as_deref(), Some("rootfs"), "{kind}");
        }
        let mut iso = with(&[
            (0x8000, b"\x01CD001"),
            (0x8028, b"Debian 12   "),
            (0x8000 + 830, b"2026112908302500"),
        ]);
        assert_eq!(
            identify(&iso),
            Some(Signature {
                kind: Kind::Iso9660,
                uuid: Some("2026-11-29-08-30-25-00".to_owned()),
                label: Some("Debian 12".to_owned()),
            })
        );
        iso[0x8006] = 1;
        assert!(identify(&iso).is_some());
    }

    #[test]
    fn a_boot_sector_is_fat_only_with_its_parameters() {
        let sector = with(&[
            (0, b"\xeb\x58\x90mkfs.fat"),
            (11, b"\x00\x02\x01\x01\x00\x02"),
            (21, b"\xf8"),
            (22, b"\x10\x00"),
            (39, b"\x12\x34\xcd\xab"),
            (43, b"cidata     FAT12   "),
            (510, b"\x55\xaa"),
        ]);
        let found = identify(&sector).unwrap();
        assert_eq!(
            (found.kind, found.uuid.as_deref()),
            (Kind::Vfat, Some("ABCD-3412"))
        );
        assert_eq!(found.label.as_deref(), Some("cidata"));
        // GRUB's first sector on a disk with partitions.
        let grub = with(&[(0, b"\xeb\x63\x90"), (510, b"\x55\xaa")]);
        assert_eq!(identify(&grub), None);
    }

    #[test]
    fn what_cannot_be_booted_from_has_a_name() {
        let lvm = with(&[(512, b"LABELONE"), (536, b"LVM2 001")]);
        assert_eq!(identify(&lvm).unwrap().kind, Kind::Lvm);
        assert_eq!(
            identify(&with(&[(0, b"LUKS\xba\xbe\0\x02")])).unwrap().kind,
            Kind::Luks
        );
        // A RAID's member wins over the file system that it begins with.
        let raid = with(&[(4096, b"\xfc\x4e\x2b\xa9"), (1024 + 0x38, b"\x53\xef")]);
        assert_eq!(identify(&raid).unwrap().kind, Kind::Raid);
        for (kind, word) in [
            (Kind::Lvm, "LVM"),
            (Kind::Luks, "LUKS"),
            (Kind::Raid, "Linux RAID"),
        ] {
            assert!(!kind.is_mountable());
            assert_eq!(kind.to_string(), word);
        }
        let mut end = vec![0; 128 << 10];
        assert!(!is_raid_by_its_end(&end));
        end[(128 << 10) - 8192..][..4].copy_from_slice(b"\xfc\x4e\x2b\xa9");
        assert!(is_raid_by_its_end(&end));
    }

    proptest! {
        #[test]
        fn any_start_is_told_without_a_panic(start in proptest::collection::vec(any::<u8>(), 0..2048)) {
            let _ = identify(&start);
            let _ = is_raid_by_its_end(&start);
        }
    }
}
