//! How much memory the guest may come to have, and its files with it; and what the kernel remembers
//! in the memory that nothing else takes.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::Path;

use rustix::system::sysinfo;

use super::GuestError;

/// Devices that memory is plugged in by.
const DRIVER: &str = "/sys/bus/virtio/drivers/virtio_mem";
/// Addresses, and what they are for.
const ADDRESSES: &str = "/proc/iomem";

/// Where the kernel is told to drop what it can find again.
const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";
/// What is written there (proc_sys_vm(5)): no message of each time, only of this first one; names
/// and inodes that nothing uses, but not the contents of files.
const ORDERS: [&str; 2] = ["4", "2"];

/// Has the kernel forget files that nothing uses, in all mount namespaces. There is no call for
/// those of one file system that reaches the mounts below a share, each of which is one of its own.
///
/// # Errors
///
/// [`GuestError::Io`].
pub async fn forget_files() -> Result<(), GuestError> {
    // With many names it takes its time.
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

/// What files in memory may take at most, in bytes: all that the guest has or may be given while
/// it runs (memory that was plugged in is counted in both). One that is given no more keeps a
/// quarter for its programs: what is killed for want of memory leaves its files.
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

/// The size of the regions that virtio-mem devices have; 0 when there is none.
fn growth(driver: &Path, addresses: &Path) -> u64 {
    let devices = fs::read_dir(driver).into_iter().flatten().flatten();
    let devices: Vec<_> = devices.map(|entry| entry.file_name()).collect();
    let text = match devices.as_slice() {
        [] => String::new(),
        _ => fs::read_to_string(addresses).unwrap_or_default(),
    };
    // Such a device claims all of its region under its own name.
    let regions = text.lines().filter_map(region);
    let plugged =
        regions.filter(|(name, _)| devices.iter().any(|device| device == OsStr::new(name)));
    plugged.fold(0, |sum: u64, (_, len)| sum.saturating_add(len))
}

/// Name and size in a line `FIRST-LAST : NAME`, of hexadecimal numbers.
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
