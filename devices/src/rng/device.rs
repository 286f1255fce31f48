//! The entropy device and its only queue.

use std::io;
use std::sync::Arc;

use rustix::rand::{GetRandomFlags, getrandom};

use crate::GuestRam;
use crate::virtio::{
    Chain, ConfigSpace, Count, Counter, DeviceInfo, DeviceType, Fault, Progress, Queue, Queues,
    ReadCounters, StartError, VirtioDevice,
};

/// The maximum number of bytes per request.
pub const MAX_REQUEST: usize = 64 << 10;

/// Bytes before the event loop gets control back.
const BUDGET: usize = 256 << 10;

/// Bytes read from the kernel per call.
const PIECE: usize = 4096;

const QUEUE_SIZE: u16 = 64;

/// A virtio entropy device.
#[derive(Debug)]
pub struct RngDevice {
    queues: Queues,
    config: Arc<ConfigSpace>,
    counters: Arc<Counters>,
}

#[derive(Debug, Default)]
struct Counters {
    requests: Count,
    bytes: Count,
}

impl ReadCounters for Counters {
    fn read(&self) -> Vec<Counter> {
        vec![
            self.requests.named("requests"),
            self.bytes.named("random_bytes"),
        ]
    }
}

impl Default for RngDevice {
    fn default() -> Self {
        Self::new()
    }
}

impl RngDevice {
    /// Creates a device that returns random bytes of the host's kernel.
    #[must_use]
    pub fn new() -> Self {
        Self {
            queues: Queues::new(1),
            config: Arc::new(ConfigSpace::new([])),
            counters: Arc::default(),
        }
    }
}

/// Fills the chain up to [`MAX_REQUEST`] bytes; returns the number of bytes.
fn fill(mem: &GuestRam, chain: &Chain) -> Result<usize, Fault> {
    let len = chain.writable_len().min(MAX_REQUEST);
    let mut piece = [0u8; PIECE];
    let mut done = 0usize;
    while done < len {
        let want = len.saturating_sub(done).min(PIECE);
        let Some(bytes) = piece.get_mut(..want) else {
            break;
        };
        let got = rustix::io::retry_on_intr(|| getrandom(&mut *bytes, GetRandomFlags::empty()))
            .map_err(|error| Fault::host("failed to read random bytes", io::Error::from(error)))?;
        chain.write(mem, done, bytes.get(..got).unwrap_or(&[]))?;
        done = done.saturating_add(got);
    }
    Ok(done)
}

impl VirtioDevice for RngDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            device_type: DeviceType::Entropy,
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
            let len = fill(queue.memory(), &chain)?;
            // At most MAX_REQUEST.
            queue.complete(chain, u32::try_from(len).unwrap_or(0))?;
            counters.requests.one();
            counters.bytes.add(len as u64);
            Ok(len)
        })
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
