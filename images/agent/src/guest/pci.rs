//! Devices on PCI that the host plugs in and takes away. There is no hot-plug controller: the host
//! says when to look.

use std::fs;
use std::io;

/// Where Linux has the bus.
const BUS: &str = "/sys/bus/pci";

/// The kernel did not look, or let go.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScanError {
    /// No address.
    #[error("{0:?} is not a PCI address such as 0000:00:05.0")]
    Address(String),
    /// The guest's devices are on MMIO.
    #[error("this guest has no PCI bus")]
    NoBus,
    /// The kernel refused.
    #[error("failed to write {path}")]
    Write {
        /// What was written to.
        path: String,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

/// Looks for new devices. Drivers have found theirs when it returns.
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

/// Lets go of the devices at these addresses.
///
/// # Errors
///
/// [`ScanError`]; nothing has been done if an address is none.
pub fn remove(addresses: &[String]) -> Result<(), ScanError> {
    if let Some(wrong) = addresses.iter().find(|address| !is_address(address)) {
        return Err(ScanError::Address(wrong.clone()));
    }
    for address in addresses {
        let path = format!("{BUS}/devices/{address}/remove");
        match fs::write(&path, "1") {
            // Gone already.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(ScanError::Write { path, source }),
            Ok(()) => {}
        }
    }
    Ok(())
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
    fn only_addresses_become_paths() {
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
            assert!(matches!(remove(&addresses), Err(ScanError::Address(_))));
        }
    }
}
