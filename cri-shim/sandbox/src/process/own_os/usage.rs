//! The resource usage of the process, which is its machine's: its vCPUs and its guest's memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use rustix::time::{ClockId, clock_gettime};

use super::super::super::agent::now_ns;
use super::super::super::types::ContainerStats;

/// Reads the process's usage from a file that was opened before the jail was closed.
#[derive(Debug)]
pub(in super::super) struct Usage {
    /// `/proc/self/statm`.
    pages: Option<File>,
    page_size: u64,
}

impl Usage {
    /// Opens what is needed later. Figures of what cannot be opened are 0.
    pub(in super::super) fn open() -> Self {
        Self {
            pages: File::open("/proc/self/statm").ok(),
            page_size: u64::try_from(rustix::param::page_size()).unwrap_or(4096),
        }
    }

    /// Returns the figures of a machine with this memory.
    pub(super) fn stats(&self, memory: u64) -> ContainerStats {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let micros = u64::try_from(time.tv_nsec / 1000).unwrap_or(0);
        let pages = self.resident_pages().unwrap_or_default();
        let (resident, shared) = (
            pages.0.saturating_mul(self.page_size),
            pages.1.saturating_mul(self.page_size),
        );
        let anonymous = resident.saturating_sub(shared);
        ContainerStats {
            timestamp_ns: now_ns(),
            cpu_usage_us: seconds.saturating_mul(1_000_000).saturating_add(micros),
            memory_usage_bytes: resident,
            memory_working_set_bytes: resident,
            memory_limit_bytes: memory,
            memory_anon_bytes: anonymous,
            memory_file_bytes: shared,
            processes: 1,
            ..ContainerStats::default()
        }
    }

    /// Returns the number of resident pages, and of those among them that belong to files.
    fn resident_pages(&self) -> io::Result<(u64, u64)> {
        let Some(file) = &self.pages else {
            return Ok((0, 0));
        };
        let mut text = [0; 256];
        let count = file.read_at(&mut text, 0)?;
        let text = String::from_utf8_lossy(text.get(..count).unwrap_or_default());
        let mut fields = text.split_ascii_whitespace().skip(1);
        let mut field = || fields.next().and_then(|field| field.parse().ok());
        Ok((field().unwrap_or(0), field().unwrap_or(0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_the_process_touches_and_time_that_it_takes_are_counted() {
        let usage = Usage::open();
        let before = usage.stats(1 << 30);
        let touched = vec![1_u8; 64 << 20];
        let sum: u64 = touched.iter().map(|byte| u64::from(*byte)).sum();
        assert_eq!(sum, 64 << 20);
        let after = usage.stats(1 << 30);
        let grown = after.memory_usage_bytes - before.memory_usage_bytes;
        // Other tests run in the process.
        assert!(grown > 16 << 20, "{grown}");
        assert!(after.cpu_usage_us > before.cpu_usage_us);
        assert_eq!(after.memory_limit_bytes, 1 << 30);
    }
}
