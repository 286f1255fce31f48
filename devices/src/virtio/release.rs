//! Gives guest memory back to the host.
#![allow(unsafe_code)] // madvise on memory that no Rust reference covers

use std::io;

use vm_memory::VolatileSlice;

/// The host's page size.
const PAGE: usize = 4096;

/// Gives the whole pages within `slice` back to the host, and returns how many bytes they are.
/// Reads there then return what was there before the guest ran: zeroes, or the file of the snapshot
/// that the guest is a clone of.
///
/// # Errors
/// Errors of `madvise(2)`: pages that are locked cannot be released.
pub fn release(slice: &VolatileSlice<'_>) -> io::Result<usize> {
    let guard = slice.ptr_guard_mut();
    let start = guard.as_ptr();
    let skipped = start.align_offset(PAGE);
    let len = slice.len().saturating_sub(skipped) & !(PAGE - 1);
    if len == 0 {
        return Ok(0);
    }
    // SAFETY: the range lies within the slice, which keeps its private mapping alive. Its content
    // is the guest's, and no Rust reference to it exists; the mapping stays readable and writable.
    let result = unsafe { libc::madvise(start.add(skipped).cast(), len, libc::MADV_DONTNEED) };
    if result == 0 {
        Ok(len)
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::memory;
    use vm_memory::{Bytes, GuestAddress, GuestMemory};

    #[test]
    fn whole_pages_go_and_what_lies_beside_them_stays() {
        let mem = memory(1 << 20);
        mem.write_slice(&[7; 0x5000], GuestAddress(0x1000)).unwrap();
        let released = |at: u64, len: usize| {
            let slice = mem.get_slice(GuestAddress(at), len).unwrap();
            release(&slice).unwrap()
        };
        assert_eq!(released(0x1800, 0x2800), 0x2000);
        let byte = |at: u64| mem.read_obj::<u8>(GuestAddress(at)).unwrap();
        assert_eq!([byte(0x1fff), byte(0x4000)], [7, 7]);
        assert_eq!([byte(0x2000), byte(0x3fff)], [0, 0]);
        assert_eq!([released(0x1001, 0xffe), released(0x1001, 0x1ffe)], [0, 0]);
        assert_eq!(byte(0x1001), 7);
    }
}
