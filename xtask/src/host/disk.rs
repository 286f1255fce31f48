//! The disk of the test host: an empty ext4, on which its root, `/run` and the directories of
//! kubelets and of podvisor are. Mounts of it have mapped users, as those of a node's disk have; an
//! overlay's have none.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result};

use crate::process;

/// Its size in bytes. It is sparse: what is never written takes no space.
const SIZE: u64 = 16 << 30;

/// What costs time at each boot, or when it is written, and is of use only to a disk that is kept.
const OPTIONS: [&str; 8] = [
    "-q",
    "-F",
    "-t",
    "ext4",
    "-O",
    "^has_journal",
    "-E",
    "lazy_itable_init=1,nodiscard",
];

/// Makes the disk in a new file.
pub(super) fn make(path: &Path) -> Result<()> {
    let made = || -> Result<()> {
        File::create_new(path)?.set_len(SIZE)?;
        process::output(
            process::tied("mke2fs")
                .args(OPTIONS)
                .arg(path)
                .env("PATH", super::build::path_with_sbin()),
        )?;
        Ok(())
    };
    made().with_context(|| format!("the test host's disk {} cannot be made", path.display()))
}

/// Returns QEMU's arguments for the disk. It ends with its host, so nothing is flushed.
pub(super) fn arguments(path: &Path) -> [String; 4] {
    let path = path.display().to_string().replace(',', ",,");
    [
        "-drive".to_owned(),
        format!("file={path},format=raw,if=none,id=disk,cache=unsafe"),
        "-device".to_owned(),
        "virtio-blk-pci,drive=disk".to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_new_disk_is_an_ext4_that_takes_little_space() {
        let dir = process::TempDir::new("disk").unwrap();
        let path = dir.path().join("disk");
        make(&path).unwrap();
        let checked = process::output(
            process::tied("e2fsck")
                .args(["-f", "-n"])
                .arg(&path)
                .env("PATH", super::super::build::path_with_sbin()),
        );
        checked.unwrap();
        let meta = path.metadata().unwrap();
        assert_eq!(meta.len(), SIZE);
        assert!(meta.blocks() * 512 < 8 << 20, "{} blocks", meta.blocks());
        // Nothing that is there is overwritten.
        assert!(make(&path).is_err());
    }
}
