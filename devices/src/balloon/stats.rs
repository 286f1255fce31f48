//! Statistics that a driver reports about its guest's memory (§5.5.6.4).

/// The memory usage of a guest, as reported by its driver, which is not trusted. Sizes are in
/// bytes; `None` for values that the driver did not report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BalloonStats {
    /// Memory that was swapped in.
    pub swapped_in: Option<u64>,
    /// Memory that was swapped out.
    pub swapped_out: Option<u64>,
    /// Page faults that read from a disk.
    pub major_faults: Option<u64>,
    /// Other page faults.
    pub minor_faults: Option<u64>,
    /// Unused memory.
    pub free: Option<u64>,
    /// All memory.
    pub total: Option<u64>,
    /// Memory that programs could allocate without swapping.
    pub available: Option<u64>,
    /// Memory of file contents that can be read again.
    pub caches: Option<u64>,
    /// Processes that were killed because memory ran out.
    pub oom_kills: Option<u64>,
}

/// A tag and its value.
pub(super) const ENTRY_LEN: usize = 10;

impl BalloonStats {
    /// Reads one entry; unknown tags are ignored.
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
