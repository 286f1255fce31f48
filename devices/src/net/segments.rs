//! Frames in guest memory in the form that the kernel takes: lists of segments.

use std::io;
use std::mem::MaybeUninit;

use vm_memory::VolatileSlice;

/// The maximum number of segments of a frame that is passed to the kernel without an allocation.
const SEGMENTS_ON_STACK: usize = 64;

/// Guest memory in the form that the kernel takes. The slices borrow the mapping, which therefore
/// stays for the length of a call; guards of a plain mapping have nothing to do beyond that.
pub(super) struct Guards<'s, 'm> {
    slices: &'s [VolatileSlice<'m>],
    writable: bool,
}

impl<'s, 'm> Guards<'s, 'm> {
    pub(super) fn readable(slices: &'s [VolatileSlice<'m>]) -> Self {
        Self {
            slices,
            writable: false,
        }
    }

    pub(super) fn writable(slices: &'s [VolatileSlice<'m>]) -> Self {
        Self {
            slices,
            writable: true,
        }
    }

    fn iovecs(&self) -> impl Iterator<Item = libc::iovec> + '_ {
        self.slices.iter().map(|slice| libc::iovec {
            iov_base: if self.writable {
                slice.ptr_guard_mut().as_ptr().cast()
            } else {
                slice.ptr_guard().as_ptr().cast_mut().cast()
            },
            iov_len: slice.len(),
        })
    }
}

/// Calls `call` with an array of `first` and those of `guards`, and again if it was interrupted.
pub(super) fn with_iovecs(
    first: libc::iovec,
    guards: &Guards<'_, '_>,
    mut call: impl FnMut(*const libc::iovec, libc::c_int) -> isize,
) -> io::Result<usize> {
    let count = guards.slices.len().saturating_add(1);
    let length =
        libc::c_int::try_from(count).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let all = std::iter::once(first).chain(guards.iovecs());
    let mut on_stack = [const { MaybeUninit::uninit() }; SEGMENTS_ON_STACK];
    let on_heap: Vec<libc::iovec>;
    let iovecs = if count <= SEGMENTS_ON_STACK {
        for (to, from) in on_stack.iter_mut().zip(all) {
            to.write(from);
        }
        // The first `count` are initialized.
        on_stack.as_ptr().cast()
    } else {
        on_heap = all.collect();
        on_heap.as_ptr()
    };
    loop {
        if let Ok(done) = usize::try_from(call(iovecs, length)) {
            return Ok(done);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
#[allow(unsafe_code)] // reads the iovecs that were passed
mod tests {
    use super::*;

    #[test]
    fn a_frame_of_many_segments_is_one_call() {
        for count in [0, 1, SEGMENTS_ON_STACK - 1, SEGMENTS_ON_STACK, 500] {
            let mut bytes = vec![7u8; count];
            let slices: Vec<_> = bytes.chunks_mut(1).map(VolatileSlice::from).collect();
            let first = libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 12,
            };
            let mut calls = 0;
            let done = with_iovecs(first, &Guards::readable(&slices), |iovecs, length| {
                calls += 1;
                assert_eq!(length as usize, count + 1);
                // SAFETY: `length` of them were initialized.
                let iovecs = unsafe { std::slice::from_raw_parts(iovecs, length as usize) };
                assert_eq!(iovecs[0].iov_len, 12);
                assert!(iovecs[1..].iter().all(|iovec| iovec.iov_len == 1));
                5
            });
            assert_eq!((done.unwrap(), calls), (5, 1));
        }
    }
}
