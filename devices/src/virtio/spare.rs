//! A list of slices of guest memory that keeps its allocation between uses.

use vm_memory::VolatileSlice;

/// Storage for a `VolatileSlice`, which itself is not `Send`.
type Place = [usize; size_of::<VolatileSlice<'static>>() / size_of::<usize>()];

/// The allocation of a list of slices while it is not in use. Slices borrow guest memory, so they
/// cannot stay in a device.
#[derive(Debug, Default)]
pub(crate) struct SpareList(Vec<Place>);

impl SpareList {
    /// Returns an empty list with the allocation. Without [`Self::put_back`] it is lost, and the
    /// next list has none.
    pub(crate) fn take<'m>(&mut self) -> Vec<VolatileSlice<'m>> {
        recycle(std::mem::take(&mut self.0))
    }

    /// Keeps the allocation of a list.
    pub(crate) fn put_back(&mut self, list: Vec<VolatileSlice<'_>>) {
        self.0 = recycle(list);
    }
}

/// Returns the same list, empty, for elements of another type of the same size: the allocation is
/// kept.
fn recycle<A, B>(mut list: Vec<A>) -> Vec<B> {
    list.clear();
    list.into_iter().filter_map(|_| None).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_keeps_its_allocation() {
        let mut spare = SpareList::default();
        let slices: Vec<VolatileSlice<'_>> = Vec::with_capacity(300);
        let at = slices.as_ptr().addr();
        spare.put_back(slices);
        let slices = spare.take();
        assert_eq!((slices.capacity(), slices.as_ptr().addr()), (300, at));
        assert_eq!(spare.take().capacity(), 0);
    }
}
