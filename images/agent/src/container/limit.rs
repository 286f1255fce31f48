//! Limits of what the guest has at once.

/// A limit is reached.
#[derive(Debug, thiserror::Error)]
#[error("the guest has {limit} {what}, its limit: delete some")]
pub struct TooMany {
    /// The objects.
    pub what: &'static str,
    /// The limit.
    pub limit: usize,
}
