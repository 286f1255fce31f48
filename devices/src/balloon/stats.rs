//! What a driver tells of its guest's memory (§5.5.6.4).

/// How a guest's memory is used, as its driver says, which is not to be trusted. Sizes are in
/// bytes; `None` is what the driver did not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BalloonStats {
    /// Swapped in.
    pub swapped_in: Option<u64>,
    /// Swapped out.
    pub swapped_out: Option<u64>,
    /// Page faults that read from a disk.
    pub major_faults: Option<u64>,
    /// Other page faults.
    pub minor_faults: Option<u64>,
    /// Memory that is used for nothing.
    pub free: Option<u64>,
    /// All memory.
    pub total: Option<u64>,
    /// What programs could get without swapping.
    pub available: Option<u64>,
    /// What files take that can be read again.
    pub caches: Option<u64>,
    /// Processes that were killed because memory ran out.
    pub oom_kills: Option<u64>,
}

/// A tag and its value.
pub(super) const ENTRY_LEN: usize = 10;

impl BalloonStats {
    /// Reads one entry; tags that are not known are left out.
    pub(super) fn entry(&mut self, entry: [u8; ENTRY_LEN]) {
        let [t0, t1, value @ ..] = entry;
        let value = u64::from_le_bytes(value);
        let place = match u16::from_le_bytes([t0, t1]) {
            0 => &mut self.swapped_in,
            1 => &mut self.swapped_out,
            2 => &mut self.major_faults,
            3 => &mut self.minor_faults,
            4 => &mut self.free,
            5 => &mut self.total,
            6 => &mut self.available,
            7 => &mut self.caches,
            10 => &mut self.oom_kills,
            _ => return,
        };
        *place = Some(value);
    }
}
