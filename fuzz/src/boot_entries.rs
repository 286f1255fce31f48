//! Disks whose boot loaders' files, first sectors and kernels are anything.
//!
//! An input is a list of files: each begins with a line `=== VOLUME/PATH`, where the volume is 0 or
//! 1. An input without such a line is every file in turn.

use podvisor_boot_entries::memory::MemoryVolumes;
use podvisor_boot_entries::{
    BootEntry, FileRef, Files, VolumeId, cmdline, find, grub, kernel, signature,
};

const MARK: &[u8] = b"=== ";

/// Where a file without a place is tried.
const PLACES: &[&str] = &[
    "boot/grub/grub.cfg",
    "boot/extlinux.conf",
    "loader/entries/fuzz.conf",
    "EFI/Linux/fuzz.efi",
];

/// The search ends, and what it finds is within its disk.
pub fn run(data: &[u8]) {
    if data.starts_with(MARK) {
        search(&files(data));
        return;
    }
    for place in PLACES {
        search(&[(0, (*place).to_owned(), data.to_vec())]);
    }
    let _ = signature::identify(data);
    let _ = signature::is_raid_by_its_end(data);
    let _ = kernel::check(data, data.len() as u64);
    let _ = grub::parse_environment(&String::from_utf8_lossy(data));
}

type Placed = (usize, String, Vec<u8>);

fn files(data: &[u8]) -> Vec<Placed> {
    let mut files: Vec<Placed> = Vec::new();
    for line in data.split_inclusive(|byte| *byte == b'\n') {
        let place = line.strip_prefix(MARK).map(String::from_utf8_lossy);
        match (
            place
                .as_deref()
                .and_then(|place| place.trim().split_once('/')),
            files.last_mut(),
        ) {
            (Some((volume, path)), _) => {
                files.push((usize::from(volume == "1"), path.to_owned(), Vec::new()));
            }
            (None, Some((_, _, bytes))) => bytes.extend_from_slice(line),
            (None, None) => {}
        }
    }
    files
}

fn search(files: &[Placed]) {
    let of = |wanted: usize| -> Vec<(&str, &[u8])> {
        let files = files.iter().filter(|(volume, ..)| *volume == wanted);
        files
            .map(|(_, path, bytes)| (path.as_str(), bytes.as_slice()))
            .collect()
    };
    let volumes = MemoryVolumes::new()
        .ext4("aaaa-bbbb", &of(0))
        .ext4("cccc-dddd", &of(1));
    match find(&volumes) {
        Ok(found) => check(&found.entry),
        Err(error) => assert!(error.to_string().contains("was looked for")),
    }
    // Also where another format comes first.
    let menu = Files::new(&volumes);
    if let Ok(entry) = grub::load(&menu, VolumeId(0), "boot/grub/grub.cfg") {
        check(&entry);
    }
}

fn check(entry: &BootEntry) {
    let is_inside = |file: &FileRef| {
        let parts = file.path.split('/').all(|part| part != ".." && part != ".");
        parts && !file.path.starts_with('/') && file.volume.0 < 2
    };
    assert!(
        is_inside(&entry.kernel) && entry.initrds.iter().all(is_inside),
        "{entry:?}"
    );
    let line = cmdline::complete(&entry.cmdline, &["pci=conf1".to_owned()]);
    assert!(
        line.contains("console=ttyS0") && line.contains("pci=conf1"),
        "{line}"
    );
}

#[cfg(test)]
mod tests {
    #[test]
    fn any_disk_has_an_entry_or_an_error() {
        crate::smoke::run("boot_entries", super::run);
    }
}
