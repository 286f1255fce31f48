//! Guest memory that lies in one region, as nearly all that a driver refers to does: found by one
//! search, without the general case of memory in several.

use vm_memory::{GuestAddress, GuestMemory, GuestMemoryRegion, MemoryRegionAddress, VolatileSlice};

use crate::GuestRam;

/// Returns `len` bytes at `addr` if they lie in one region of `mem`.
pub(super) fn slice_in_region(
    mem: &GuestRam,
    addr: GuestAddress,
    len: usize,
) -> Option<VolatileSlice<'_>> {
    let region = mem.find_region(addr)?;
    let offset = addr.0.checked_sub(region.start_addr().0)?;
    region.get_slice(MemoryRegionAddress(offset), len).ok()
}

/// Returns how many bytes there are from `addr` to the end of its region of `mem`.
pub(super) fn bytes_in_region(mem: &GuestRam, addr: GuestAddress) -> Option<u64> {
    let last = mem.find_region(addr)?.last_addr();
    // Regions are never empty: this is at least one byte.
    Some(last.0.saturating_sub(addr.0).saturating_add(1))
}
