//! What the guest of a migration does.

/// What the guest does, and how long it may stand still.
#[derive(Clone, Copy, Debug, clap::Args, serde::Serialize)]
pub(super) struct Load {
    /// MiB of the guest's memory that have data
    #[arg(long, value_name = "MIB")]
    pub(super) fill: u32,
    /// MiB of them that the guest writes to again and again
    #[arg(long, value_name = "MIB")]
    pub(super) region: u32,
    /// Pages that it writes to per millisecond
    #[arg(long, value_name = "N")]
    pub(super) pages: u32,
    /// For how many milliseconds each monitor may let the guest stand still
    #[arg(long, value_name = "MS")]
    pub(super) downtime: u32,
}
