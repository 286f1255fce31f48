//! What is known of claims by those who use them.

/// How a claim can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeMode {
    /// As a block device.
    Block,
    /// As a file system.
    Filesystem,
}

/// What is known of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// How it can be used.
    pub mode: VolumeMode,
    /// Several nodes may write it at the same time.
    pub is_shared: bool,
}
