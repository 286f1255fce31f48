//! PCI devices that the host plugs in and removes. There is no hot-plug controller: the host tells
//! the agent when to scan.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);
const RELEASE_RETRY: Duration = Duration::from_millis(5);

/// Where Linux shows the bus.
const BUS: &str = "/sys/bus/pci";

/// The kernel did not scan the bus, or did not release a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScanError {
    /// Not an address.
    #[error("{0:?} is not a PCI address such as 0000:00:05.0")]
    Address(String),
    /// The guest has no PCI bus; its devices are on MMIO.
    #[error("this guest has no PCI bus")]
    NoBus,
    /// The kernel refused the write.
    #[error("failed to write {path}")]
    Write {
        /// The file.
        path: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// Scans for new devices. They have their drivers when it returns.
///
/// # Errors
///
/// [`ScanError`].
pub fn scan() -> Result<(), ScanError> {
    let path = format!("{BUS}/rescan");
    match fs::write(&path, "1") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(ScanError::NoBus),
        Err(source) => Err(ScanError::Write { path, source }),
        Ok(()) => Ok(()),
    }
}

/// Releases the devices at these addresses; a disk only when no file system is on it any more,
/// which is a moment after its last mount was removed.
///
/// # Errors
///
/// [`ScanError`]; nothing has been done if an address is invalid.
pub async fn remove(addresses: &[String]) -> Result<(), ScanError> {
    if let Some(wrong) = addresses.iter().find(|address| !is_address(address)) {
        return Err(ScanError::Address(wrong.clone()));
    }
    for address in addresses {
        let device = format!("{BUS}/devices/{address}");
        for disk in disks(Path::new(&device)) {
            unused(&disk).await;
        }
        let path = format!("{device}/remove");
        match fs::write(&path, "1") {
            // Gone already.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(ScanError::Write { path, source }),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Returns the nodes of a device's disks.
fn disks(device: &Path) -> Vec<PathBuf> {
    let below = |path: PathBuf| fs::read_dir(path).into_iter().flatten().flatten();
    below(device.to_owned())
        .flat_map(|entry| below(entry.path().join("block")))
        .map(|disk| Path::new("/dev").join(disk.file_name()))
        .collect()
}

/// Waits until no file system claims a disk, up to a timeout.
async fn unused(disk: &Path) {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    let deadline = Instant::now() + RELEASE_TIMEOUT;
    while let Err(Errno::BUSY) = rustix::fs::open(disk, flags, Mode::empty()) {
        if Instant::now() > deadline {
            tracing::warn!(?disk, "a disk is taken away that is still in use");
            return;
        }
        // The kernel does not report when the last use of a file system has ended.
        tokio::time::sleep(RELEASE_RETRY).await;
    }
}

/// `DDDD:BB:SS.F`, in hexadecimal digits.
fn is_address(text: &str) -> bool {
    let shape = b"xxxx:xx:xx.x";
    text.len() == shape.len()
        && text.bytes().zip(shape).all(|(byte, shape)| match shape {
            b'x' => byte.is_ascii_hexdigit(),
            other => byte == *other,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disks_of_a_device_are_found() {
        let device = tempfile::tempdir().unwrap();
        fs::create_dir_all(device.path().join("virtio7/block/vdx")).unwrap();
        fs::create_dir_all(device.path().join("power")).unwrap();
        assert_eq!(disks(device.path()), [Path::new("/dev/vdx")]);
        assert!(disks(Path::new("/nowhere")).is_empty());
    }

    #[tokio::test]
    async fn only_addresses_become_paths() {
        assert!(is_address("0000:00:1f.0"));
        for wrong in [
            "",
            "0000:00:1f",
            "0000:00:1f.0/..",
            "../../../../etc",
            "0000:00:1g.0",
            "0000-00:1f.0",
        ] {
            assert!(!is_address(wrong), "{wrong}");
            let addresses = ["ffff:00:1f.0".to_owned(), wrong.to_owned()];
            assert!(matches!(
                remove(&addresses).await,
                Err(ScanError::Address(_))
            ));
        }
    }
}
