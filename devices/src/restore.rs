//! Errors of a device that takes a saved state.

/// Why a saved state is refused. The device is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// Written by another version of the device.
    #[error("the saved state has version {found}, this device reads version {expected}")]
    Version {
        /// The state's version.
        found: u32,
        /// The version that the device reads.
        expected: u32,
    },
    /// Too short, too long, or inconsistent.
    #[error("the saved state is invalid: {what}")]
    Invalid {
        /// What is wrong with it.
        what: &'static str,
    },
}
