//! The persistent memory device and its only queue.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use super::file::{self, PMEM_ALIGNMENT, PmemError};
use crate::GuestRam;
use crate::virtio::{
    Chain, ConfigSpace, Count, Counter, DeviceInfo, DeviceType, Fault, Progress, Queue, Queues,
    ReadCounters, RestoreError, SavedDevice, StartError, VirtioDevice,
};

const QUEUE_SIZE: u16 = 64;

/// Bytes before the event loop gets control back; a request costs its descriptors.
const BUDGET: usize = 256 << 10;

/// `VIRTIO_PMEM_REQ_TYPE_FLUSH`, and the results (§5.19.6, §5.19.7).
const FLUSH: u32 = 0;
const SUCCESS: i32 = 0;
const FAILURE: i32 = -1;
const REQUEST_LEN: usize = 4;
const ANSWER_LEN: u32 = 4;

/// Offset in `struct virtio_pmem_config` (§5.19.4); the size follows.
const START: usize = 0;

/// The location of a file in the guest's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmemRegion {
    /// Guest physical address.
    pub start: u64,
    /// Bytes: those of the file, and zeroes up to a multiple of [`PMEM_ALIGNMENT`].
    pub len: u64,
}

/// A virtio persistent memory device that is read-only.
#[derive(Debug)]
pub struct PmemDevice {
    queues: Queues,
    file: Arc<File>,
    /// In bytes.
    file_len: u64,
    region: PmemRegion,
    config: Arc<ConfigSpace>,
    counters: Arc<Counters>,
}

#[derive(Debug, Default)]
struct Counters {
    flushes: Count,
    refused: Count,
    refused_writes: Count,
}

impl ReadCounters for Counters {
    fn read(&self) -> Vec<Counter> {
        vec![
            self.flushes.named("flushes"),
            self.refused.named("refused_requests"),
            self.refused_writes.named("refused_writes"),
        ]
    }
}

/// Counts the guest's attempts to write to the region.
#[derive(Clone, Debug)]
pub struct Refusals(Arc<Counters>);

impl Refusals {
    /// Counts one write of the guest to the region, which had no effect.
    pub fn one(&self) {
        self.0.refused_writes.one();
    }
}

impl PmemDevice {
    /// Creates a device over the file at `path`.
    ///
    /// # Errors
    /// See [`PmemError`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, PmemError> {
        Self::from_file(file::open(path.as_ref())?)
    }

    /// Creates a device over a file that is open read-only. Its contents and its length must not
    /// change: guests cache what they have read.
    ///
    /// # Errors
    /// See [`PmemError`].
    pub fn from_file(file: File) -> Result<Self, PmemError> {
        let file_len = file::check(&file)?;
        // At most 2⁴⁶.
        let len = file_len.next_multiple_of(PMEM_ALIGNMENT);
        let words = [0, len];
        let config: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        Ok(Self {
            queues: Queues::new(1),
            file: Arc::new(file),
            file_len,
            region: PmemRegion { start: 0, len },
            config: Arc::new(ConfigSpace::new(config)),
            counters: Arc::default(),
        })
    }

    /// Sets the guest physical address of the region, before the guest runs.
    pub fn place(&mut self, start: u64) {
        self.region.start = start;
        // No driver could have seen another address.
        self.config.update_quietly(START, &start.to_le_bytes());
    }

    /// The region in the guest's address space. It starts at 0 until it is placed.
    #[must_use]
    pub fn region(&self) -> PmemRegion {
        self.region
    }

    /// The file in the region.
    #[must_use]
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// How many bytes of the region belong to the file.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    /// Returns the counter for the code that handles the guest's attempts to write.
    #[must_use]
    pub fn refusals(&self) -> Refusals {
        Refusals(self.counters.clone())
    }
}

/// Handles one request: nothing was written, so there is nothing to flush.
fn answer(mem: &GuestRam, chain: &Chain, counters: &Counters) -> Result<(), Fault> {
    let mut request = [0; REQUEST_LEN];
    chain.read(mem, 0, &mut request)?;
    let result = match u32::from_le_bytes(request) {
        FLUSH => {
            counters.flushes.one();
            SUCCESS
        }
        _ => {
            counters.refused.one();
            FAILURE
        }
    };
    Ok(chain.write(mem, 0, &result.to_le_bytes())?)
}

impl VirtioDevice for PmemDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            device_type: DeviceType::Pmem,
            queue_sizes: vec![QUEUE_SIZE],
            features: 0,
            config: self.config.clone(),
            counters: self.counters.clone(),
        }
    }

    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        self.queues.start(queue)
    }

    fn stop_queue(&mut self, index: u16) -> Option<Queue> {
        self.queues.stop(index)
    }

    fn on_queue(&mut self, index: u16) -> Result<Progress, Fault> {
        let Some(queue) = self.queues.get(index) else {
            return Ok(Progress::Idle);
        };
        let counters = &self.counters;
        queue.serve(BUDGET, |queue, chain| {
            answer(queue.memory(), &chain, counters)?;
            queue.complete(chain, ANSWER_LEN)?;
            Ok(0)
        })
    }

    fn save(&self) -> SavedDevice {
        let mut bytes = self.region.start.to_le_bytes().to_vec();
        bytes.extend(self.file_len.to_le_bytes());
        SavedDevice { version: 1, bytes }
    }

    fn restore(&mut self, saved: &SavedDevice) -> Result<(), RestoreError> {
        let invalid = |what| RestoreError::Invalid { what };
        let (words, rest) = saved.of_version(1)?.as_chunks::<8>();
        let ([start, len], []) = (words, rest) else {
            return Err(invalid("a memory image's place is 16 bytes"));
        };
        let (start, len) = (u64::from_le_bytes(*start), u64::from_le_bytes(*len));
        if len != self.file_len {
            return Err(invalid(
                "the memory image has another length than the one that the guest had",
            ));
        }
        if !start.is_multiple_of(PMEM_ALIGNMENT) || start.checked_add(self.region.len).is_none() {
            return Err(invalid("a memory image where none can be"));
        }
        self.place(start);
        Ok(())
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
