//! Writes guest memory to the file of a dump.

use std::fs::File;
use std::ops::ControlFlow;

use vm_memory::GuestMemory as _;

use super::save::failed;
use super::{CHUNK, GuestMemory, MemoryError, SaveScope, Span, spans};

/// So much is written at once, before progress is told.
const STEP: u64 = 16 << 20;

impl GuestMemory {
    /// Returns the parts of memory that the guest has, of which a dump has the contents: of the
    /// memory that may be plugged in, the first `plugged` bytes.
    pub(crate) fn dumped(&self, plugged: u64) -> Vec<Span> {
        let hotplug = self.shape().hotplug_region().map(|region| region.start);
        let of_guest = spans(self.shape()).map(|span| match Some(span.start) == hotplug {
            true => Span {
                len: span.len.min(plugged),
                ..span
            },
            false => span,
        });
        of_guest.filter(|span| span.len > 0).collect()
    }

    /// Writes the parts of memory of [`Self::dumped`] to a file, one after the other from `base`
    /// on. Pages of zeroes become holes. `progress` gets the bytes of memory that were passed;
    /// `false` if it broke off.
    ///
    /// Nothing may write to guest memory meanwhile.
    pub(crate) fn dump_to(
        &self,
        file: &File,
        base: u64,
        plugged: u64,
        mut progress: impl FnMut(u64) -> ControlFlow<()>,
    ) -> Result<bool, MemoryError> {
        let map = self.page_map()?;
        let dumped = self.dumped(plugged);
        let total: u64 = dumped.iter().map(|span| span.len).sum();
        file.set_len(base + total).map_err(failed("write", 0))?;
        let mut buffer = vec![0; CHUNK as usize];
        let mut passed = 0;
        // What is left out is at the end.
        for (span, region) in dumped.into_iter().zip(self.ram().iter()) {
            let at = Span {
                offset: base + passed,
                ..span
            };
            // Where the file behind memory has data goes by the span's own offset.
            for range in self.wanted(&map, SaveScope::All, span, region)? {
                for start in range.clone().step_by(STEP as usize) {
                    if progress(passed + start).is_break() {
                        return Ok(false);
                    }
                    let step = start..range.end.min(start + STEP);
                    self.write_range(file, at, &step, &mut buffer)?;
                }
            }
            passed += span.len;
        }
        Ok(progress(passed).is_continue())
    }
}
