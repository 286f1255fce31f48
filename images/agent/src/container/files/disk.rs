//! Finds the device of an image: a virtio-blk device by its serial, or memory (virtio-pmem) by its
//! address.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use podvisor_agent_protocol::limits::SERIAL_BYTES;

use crate::uevent::Uevents;

/// Linux's name of block devices that are memory.
const MEMORY_DEVICE: &str = "pmem";

/// Prefix of the address in the serial of an image in memory. A disk whose serial starts with it is
/// not found.
const MEMORY_PREFIX: &str = "pmem@";

/// How long a disk may take to appear; the host attaches it before it requests it.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(10);

/// There is no disk for an image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The serial is invalid.
    #[error("{0:?} is no virtio-blk serial: use 1 to 20 printable ASCII characters")]
    InvalidSerial(String),
    /// The disk did not appear in time.
    #[error("no virtio-blk device with serial {serial} within {} s: attach the image first", ATTACH_TIMEOUT.as_secs())]
    Missing {
        /// The serial that was looked for.
        serial: String,
    },
    /// The kernel's events cannot be received.
    #[error("cannot watch for block devices")]
    Watch(#[source] io::Error),
}

/// Checks the serial of a request.
///
/// # Errors
///
/// [`DiskError::InvalidSerial`].
pub fn validate_serial(serial: &str) -> Result<(), DiskError> {
    let printable = serial.bytes().all(|b| b.is_ascii_graphic());
    if printable && (1..=SERIAL_BYTES).contains(&serial.len()) {
        Ok(())
    } else {
        Err(DiskError::InvalidSerial(serial.chars().take(64).collect()))
    }
}

/// Returns the device node of the disk with this serial; waits for it to appear.
///
/// # Errors
///
/// [`DiskError`]; the serial is assumed to be valid.
pub async fn find(serial: &str) -> Result<PathBuf, DiskError> {
    let sys_block = Path::new("/sys/block");
    if let Some(node) = scan(sys_block, serial) {
        return Ok(node);
    }
    // Listen first and then look again, so that no event is missed in between.
    let events = Uevents::open().map_err(DiskError::Watch)?;
    let appears = async {
        loop {
            if let Some(node) = scan(sys_block, serial) {
                return Ok(node);
            }
            events.next().await.map_err(DiskError::Watch)?;
        }
    };
    tokio::time::timeout(ATTACH_TIMEOUT, appears)
        .await
        .unwrap_or_else(|_| {
            Err(DiskError::Missing {
                serial: serial.to_owned(),
            })
        })
}

/// Returns whether a device is memory, whose files are read in place.
pub(in crate::container) fn is_memory(node: &Path) -> bool {
    let name = node.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with(MEMORY_DEVICE))
}

/// Returns the guest physical address in a serial of the form `pmem@ADDRESS` (hexadecimal).
fn memory_address(serial: &str) -> Option<u64> {
    u64::from_str_radix(serial.strip_prefix(MEMORY_PREFIX)?, 16).ok()
}

/// Checks each device once. One that cannot be read is skipped.
fn scan(sys_block: &Path, serial: &str) -> Option<PathBuf> {
    let address = memory_address(serial);
    fs::read_dir(sys_block)
        .ok()?
        .filter_map(Result::ok)
        .find_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let is_it = match address {
                Some(address) => {
                    name.starts_with(MEMORY_DEVICE) && starts_at(&entry.path(), address)
                }
                None => {
                    // An empty slot is not asked for its serial, because that is a request to the
                    // disk. Even if the serial matches, the size read before may have been that of
                    // another image in the same slot, so it is checked again.
                    name.starts_with("vd")
                        && is_filled(&entry.path())
                        && read_serial(&entry.path())?.trim_end() == serial
                        && is_filled(&entry.path())
                }
            };
            is_it.then(|| Path::new("/dev").join(name))
        })
}

fn starts_at(device: &Path, address: u64) -> bool {
    let text = fs::read_to_string(device.join("device/resource")).unwrap_or_default();
    let digits = text.trim_end().strip_prefix("0x").unwrap_or_default();
    u64::from_str_radix(digits, 16) == Ok(address)
}

/// Returns whether a disk has an image. A slot for images gets its serial immediately and its
/// capacity by an interrupt, which the kernel announces after it has processed it; an empty slot
/// has a single sector.
fn is_filled(disk: &Path) -> bool {
    let sectors = fs::read_to_string(disk.join("size")).unwrap_or_default();
    sectors
        .trim_end()
        .parse::<u64>()
        .is_ok_and(|sectors| sectors > 1)
}

fn read_serial(disk: &Path) -> Option<String> {
    let mut text = String::new();
    let limit = u64::try_from(SERIAL_BYTES).ok()?.saturating_add(2);
    File::open(disk.join("serial"))
        .ok()?
        .take(limit)
        .read_to_string(&mut text)
        .ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::io::Write as _;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn serials_that_virtio_cannot_hold_are_refused() {
        for bad in ["", "has space", "tab\t", "äöü", "123456789012345678901"] {
            assert!(validate_serial(bad).is_err(), "{bad:?}");
        }
        validate_serial("12345678901234567890").unwrap();
    }

    #[test]
    fn the_disk_with_the_serial_is_found_among_others_once_it_is_filled() {
        let sys = tempfile::tempdir().unwrap();
        for (name, serial) in [
            ("vda", "img0"),
            ("vdb", "img1"),
            ("loop0", "img2"),
            ("vdc", ""),
            ("vde", "empty"),
        ] {
            fs::create_dir(sys.path().join(name)).unwrap();
            fs::write(sys.path().join(name).join("serial"), serial).unwrap();
            let sectors = if serial == "empty" { "1\n" } else { "2048\n" };
            fs::write(sys.path().join(name).join("size"), sectors).unwrap();
        }
        fs::create_dir(sys.path().join("vdd")).unwrap();
        assert_eq!(scan(sys.path(), "img1"), Some("/dev/vdb".into()));
        assert_eq!(scan(sys.path(), "img"), None);
        assert_eq!(scan(sys.path(), "img2"), None);
        assert_eq!(scan(sys.path(), "empty"), None);
        assert_eq!(scan(&sys.path().join("none"), "img1"), None);
    }

    #[test]
    fn an_empty_disk_is_not_asked_for_its_serial() {
        let sys = tempfile::tempdir().unwrap();
        let disk = sys.path().join("vda");
        fs::create_dir(&disk).unwrap();
        fs::write(disk.join("size"), "1\n").unwrap();
        // A reader consumes its content.
        let serial = disk.join("serial");
        mknodat(CWD, &serial, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let mut pipe = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&serial)
            .unwrap();
        let text = [b'x'; SERIAL_BYTES + 2];
        pipe.write_all(&text).unwrap();
        assert_eq!(scan(sys.path(), "img1"), None);
        assert_eq!(
            rustix::io::ioctl_fionread(&pipe).unwrap(),
            text.len() as u64
        );
    }

    #[test]
    fn an_image_that_is_memory_is_found_by_its_address() {
        let sys = tempfile::tempdir().unwrap();
        for (name, resource) in [
            ("pmem0", "0x108000000\n"),
            ("pmem1", "0x100000000\n"),
            ("pmem2", "nonsense\n"),
            ("loop0", "0x110000000\n"),
        ] {
            let device = sys.path().join(name).join("device");
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("resource"), resource).unwrap();
        }
        // A disk with that serial does not match.
        let disk = sys.path().join("vda");
        fs::create_dir(&disk).unwrap();
        fs::write(disk.join("serial"), "pmem@110000000").unwrap();
        fs::write(disk.join("size"), "2048\n").unwrap();
        let found = |serial| scan(sys.path(), serial);
        assert_eq!(found("pmem@100000000"), Some("/dev/pmem1".into()));
        assert_eq!(found("pmem@108000000"), Some("/dev/pmem0".into()));
        for serial in ["pmem@110000000", "pmem@0", "pmem@", "pmem0", "pmem@x"] {
            assert_eq!(found(serial), None, "{serial}");
        }
        assert!(is_memory(Path::new("/dev/pmem1")) && !is_memory(Path::new("/dev/vda")));
        validate_serial("pmem@fffffffffffffff").unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_never_comes_is_missing_after_the_deadline() {
        let error = find("no-such-serial").await.unwrap_err();
        assert!(matches!(error, DiskError::Missing { .. }), "{error:?}");
    }
}
