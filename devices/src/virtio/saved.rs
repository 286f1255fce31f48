//! State that outlives a process: what snapshots store of a device beyond its queues.

use crate::restore::RestoreError;

/// A device's own state, in a format of the device type.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavedDevice {
    /// The format's version, counted per device type; 0 means that there is no such state.
    pub version: u32,
    /// The state.
    pub bytes: Vec<u8>,
}

/// The configuration space as a driver has seen it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavedConfig {
    /// The configuration generation (virtio 1.3 §2.5.1).
    pub generation: u32,
    /// The bytes.
    pub bytes: Vec<u8>,
}

impl SavedDevice {
    /// Returns the bytes if they have this `version`.
    ///
    /// # Errors
    /// [`RestoreError::Version`].
    pub fn of_version(&self, version: u32) -> Result<&[u8], RestoreError> {
        if self.version == version {
            Ok(&self.bytes)
        } else {
            Err(RestoreError::Version {
                found: self.version,
                expected: version,
            })
        }
    }
}
