//! Attributes of an object on the host, in the forms that `fuse-backend-rs` takes.

use std::io;
use std::os::fd::AsFd;

use fuse_backend_rs::abi::fuse_abi::Attr;
use rustix::fs::{AtFlags, FileType, StatVfs, Statx, StatxAttributes, StatxFlags, fstatfs, statx};

/// File systems of the kernel's own state, by their magic numbers in linux/magic.h.
const GENERATED: [u32; 12] = [
    0x0000_9fa0, // proc
    0x6265_6572, // sysfs
    0x0027_e0eb, // cgroup
    0x6367_7270, // cgroup2
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0x6265_6570, // configfs
    0x4249_4e4d, // binfmt_misc
    0xf97c_ff8c, // selinuxfs
    0xcafe_4a11, // bpf
    0x0765_5821, // resctrl
];

/// File systems of this host's disks and memory, by their magic numbers: closing a file writes
/// nothing there.
const LOCAL: [u32; 14] = [
    0x0000_ef53, // ext2 to ext4
    0x5846_5342, // xfs
    0x9123_683e, // btrfs
    0xca45_1a4e, // bcachefs
    0x2fc1_2fc1, // zfs
    0xf2f5_2010, // f2fs
    0x0102_1994, // tmpfs
    0x8584_58f6, // ramfs
    0x9584_58f6, // hugetlbfs
    0x794c_7630, // overlay
    0xe0f5_e1e2, // erofs
    0x7371_7368, // squashfs
    0x0000_9660, // iso9660
    0x0000_4d44, // vfat
];

/// Where the contents of a file system come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contents {
    /// A disk or the memory of this host.
    Local,
    /// Generated when read: the size of any file is 0 or a page.
    Generated,
    /// Possibly another host: a write error may be reported when the file is closed.
    Remote,
}

impl Contents {
    /// Returns that of an object's file system.
    pub(super) fn of(fd: impl AsFd) -> Self {
        let kind = fstatfs(fd).ok().map(|about| u32::try_from(about.f_type));
        match kind {
            Some(Ok(kind)) if GENERATED.contains(&kind) => Self::Generated,
            Some(Ok(kind)) if LOCAL.contains(&kind) => Self::Local,
            // Unknown ones, and those that `fstatfs` fails for.
            _ => Self::Remote,
        }
    }
}

/// What tells objects of the host apart. A descriptor of each is held, so that neither of the
/// three is given to another one meanwhile. A server of files may give the inode number of one
/// that it removed to another file all the same: that one then has the id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Id {
    pub(super) device: (u32, u32),
    pub(super) inode: u64,
    pub(super) mount: u64,
}

impl Id {
    /// Whether a directory has to be a mount in the guest: inode numbers may be those of `parent`
    /// again. Subvolumes of btrfs have device numbers of their own and no mount.
    pub(super) fn is_in_other_fs_than(&self, parent: &Self) -> bool {
        self.mount != parent.mount || self.device != parent.device
    }
}

/// An object's attributes and identity.
pub(super) struct Attributes(Statx);

impl Attributes {
    /// Reads those of an open object, however it was opened.
    pub(super) fn of(fd: impl AsFd) -> io::Result<Self> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
        let mask = StatxFlags::BASIC_STATS | StatxFlags::MNT_ID;
        Ok(Self(statx(fd, c"", flags, mask)?))
    }

    pub(super) fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.0.stx_mode.into())
    }

    /// How many names (hard links) it has.
    pub(super) fn names(&self) -> u32 {
        self.0.stx_nlink
    }

    /// Whether it is a directory on which the kernel mounts another one when it is used, and has
    /// not yet: within exports of NFS, for instance.
    pub(super) fn is_automount(&self) -> bool {
        let attributes = self.0.stx_attributes & self.0.stx_attributes_mask;
        attributes.contains(StatxAttributes::AUTOMOUNT) && self.kind() == FileType::Directory
    }

    pub(super) fn id(&self) -> Id {
        Id {
            device: (self.0.stx_dev_major, self.0.stx_dev_minor),
            inode: self.0.stx_ino,
            mount: self.0.stx_mnt_id,
        }
    }

    pub(super) fn stat(&self) -> libc::stat64 {
        let x = &self.0;
        // As Linux encodes it in 32 bits (`new_encode_dev`).
        let rdev = (x.stx_rdev_minor & 0xff)
            | (x.stx_rdev_major & 0xfff) << 8
            | (x.stx_rdev_minor & 0xf_ff00) << 12;
        Attr {
            ino: x.stx_ino,
            size: x.stx_size,
            blocks: x.stx_blocks,
            // Times before 1970 keep their bits.
            atime: x.stx_atime.tv_sec.cast_unsigned(),
            mtime: x.stx_mtime.tv_sec.cast_unsigned(),
            ctime: x.stx_ctime.tv_sec.cast_unsigned(),
            atimensec: x.stx_atime.tv_nsec,
            mtimensec: x.stx_mtime.tv_nsec,
            ctimensec: x.stx_ctime.tv_nsec,
            mode: x.stx_mode.into(),
            nlink: x.stx_nlink,
            uid: x.stx_uid,
            gid: x.stx_gid,
            rdev,
            blksize: x.stx_blksize,
            flags: 0,
        }
        .into()
    }
}

/// The statistics of a file system in the C library's form.
#[allow(unsafe_code)]
pub(super) fn statvfs(from: &StatVfs) -> libc::statvfs64 {
    // SAFETY: a plain C structure of integers, for which zeroes are valid.
    let mut to: libc::statvfs64 = unsafe { std::mem::zeroed() };
    to.f_bsize = from.f_bsize;
    to.f_frsize = from.f_frsize;
    to.f_blocks = from.f_blocks;
    to.f_bfree = from.f_bfree;
    to.f_bavail = from.f_bavail;
    to.f_files = from.f_files;
    to.f_ffree = from.f_ffree;
    to.f_favail = from.f_favail;
    to.f_namemax = from.f_namemax;
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subvolume_is_a_file_system_of_its_own_in_the_mount_of_its_parent() {
        // As btrfs has them: the top of each has the number 256.
        let id = |inode| Id {
            device: (0, 1),
            inode,
            mount: 1,
        };
        let parent = id(256);
        assert!(!id(257).is_in_other_fs_than(&parent));
        let subvolume = Id {
            device: (0, 2),
            ..parent
        };
        assert!(subvolume.is_in_other_fs_than(&parent));
        let bind_mount = Id {
            mount: 2,
            ..id(257)
        };
        assert!(bind_mount.is_in_other_fs_than(&parent));
    }
}
