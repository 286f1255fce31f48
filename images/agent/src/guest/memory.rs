//! Memory limits of files in the guest, and the kernel's caches of files.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::Path;

use rustix::system::sysinfo;

use super::GuestError;

/// The driver whose devices plug in memory.
const DRIVER: &str = "/sys/bus/virtio/drivers/virtio_mem";
/// The list of address ranges and their use.
const ADDRESSES: &str = "/proc/iomem";

/// The file that makes the kernel drop caches.
const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";
/// The values that are written there (proc_sys_vm(5)): 4 disables the log message for later writes,
/// 2 drops unused names and inodes, but not the contents of files.
const ORDERS: [&str; 2] = ["4", "2"];

/// Makes the kernel forget unused files, in all mount namespaces. No call for the files of one file
/// system reaches the mounts below a share, each of which is a separate file system.
///
/// # Errors
///
/// [`GuestError::Io`].
pub async fn forget_files() -> Result<(), GuestError> {
    // With many names it takes a while.
    let write = || {
        ORDERS
            .into_iter()
            .try_for_each(|order| fs::write(DROP_CACHES, order))
    };
    let dropped = tokio::task::spawn_blocking(write).await;
    let dropped = dropped.map_err(io::Error::other).flatten();
    dropped.map_err(|source| GuestError::Io {
        action: "drop the names of files that nothing uses",
        source,
    })
}

/// Returns how many bytes files in memory may take at most: all memory that the guest has or may be
/// given while it runs (memory that was plugged in is counted in both). A guest that cannot grow
/// keeps a quarter for its programs: a program that is killed for lack of memory leaves its files
/// behind.
#[must_use]
pub fn room_for_files() -> u64 {
    let has = sysinfo();
    let has = has.totalram.saturating_mul(u64::from(has.mem_unit.max(1)));
    room(has, growth(Path::new(DRIVER), Path::new(ADDRESSES)))
}

fn room(has: u64, growth: u64) -> u64 {
    match growth {
        0 => has - has / 4,
        growth => has.saturating_add(growth),
    }
}

/// Returns the size of the regions of all virtio-mem devices; 0 if there are none.
fn growth(driver: &Path, addresses: &Path) -> u64 {
    let devices = fs::read_dir(driver).into_iter().flatten().flatten();
    let devices: Vec<_> = devices.map(|entry| entry.file_name()).collect();
    let text = match devices.as_slice() {
        [] => String::new(),
        _ => fs::read_to_string(addresses).unwrap_or_default(),
    };
    // Such a device claims its entire region under its own name.
    let regions = text.lines().filter_map(region);
    let plugged =
        regions.filter(|(name, _)| devices.iter().any(|device| device == OsStr::new(name)));
    plugged.fold(0, |sum: u64, (_, len)| sum.saturating_add(len))
}

/// Parses name and size from a line `FIRST-LAST : NAME` with hexadecimal numbers.
fn region(line: &str) -> Option<(&str, u64)> {
    let (range, name) = line.trim_start().split_once(" : ")?;
    let (first, last) = range.split_once('-')?;
    let [first, last] = [first, last].map(|number| u64::from_str_radix(number, 16).ok());
    let len = last?.checked_sub(first?)?.checked_add(1)?;
    Some((name, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    const IOMEM: &str = "\
00001000-0009fbff : System RAM
100000000-10fffffff : virtio-pmem
140000000-53fffffff : virtio3
  140000000-147ffffff : System RAM (virtio_mem)
c0000000-c0000fff : virtio30
";

    #[test]
    fn growth_is_the_region_of_devices_that_plug_memory() {
        let dir = tempfile::tempdir().unwrap();
        let (driver, addresses) = (dir.path().join("driver"), dir.path().join("iomem"));
        fs::write(&addresses, IOMEM).unwrap();
        assert_eq!(growth(&driver, &addresses), 0);
        fs::create_dir(&driver).unwrap();
        fs::write(driver.join("uevent"), "").unwrap();
        assert_eq!(growth(&driver, &addresses), 0);
        fs::write(driver.join("virtio3"), "").unwrap();
        assert_eq!(growth(&driver, &addresses), 16 << 30);
    }

    #[test]
    fn lines_of_another_form_have_no_size() {
        for line in [
            "",
            "x",
            "1-2",
            "2-1 : a",
            "x-y : a",
            "0-ffffffffffffffff : a",
        ] {
            assert_eq!(region(line), None, "{line}");
        }
        assert_eq!(region("  0-fff : a : b"), Some(("a : b", 4096)));
    }

    #[test]
    fn files_have_all_that_a_guest_may_be_given_and_not_all_of_one_that_is_given_nothing() {
        assert_eq!(room(256 << 20, 16 << 30), (16 << 30) + (256 << 20));
        assert_eq!(room(256 << 20, 0), 192 << 20);
        assert!(room_for_files() > 0);
    }
}
