//! Files of the system itself.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

/// Most bytes of a file of the guest that the agent itself reads.
pub(super) const MAX_FILE: u64 = 1 << 20;

/// Reads a file of the system itself, of which more than [`MAX_FILE`] bytes are left out.
pub(super) fn read_text(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_FILE).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
