//! The entropy device and its only queue.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

use crate::GuestRam;
use crate::virtio::{
    Chain, Counter, DeviceType, Fault, Progress, Queue, Resources, StartError, VirtioDevice,
};

/// Bytes that one request gets at most.
pub const MAX_REQUEST: usize = 64 << 10;

/// Bytes before the event loop gets its turn again.
const BUDGET: usize = 256 << 10;

/// What a request counts for at least, so that empty ones are bounded too.
const REQUEST_COST: usize = 256;

/// Bytes taken from the kernel at once.
const PIECE: usize = 4096;

const QUEUE_SIZES: [u16; 1] = [64];

/// A virtio entropy device.
#[derive(Debug, Default)]
pub struct RngDevice {
    running: Option<Running>,
    requests: u64,
    bytes: u64,
}

#[derive(Debug)]
struct Running {
    mem: GuestRam,
    queue: Queue,
}

impl RngDevice {
    /// A device that answers from the host's kernel.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

impl Running {
    /// Fills the chain as far as [`MAX_REQUEST`] goes; returns how far.
    fn fill(&self, chain: &Chain) -> Result<usize, Fault> {
        let len = chain.writable_len().min(MAX_REQUEST);
        let mut piece = [0u8; PIECE];
        let mut done = 0usize;
        while done < len {
            let want = len.saturating_sub(done).min(PIECE);
            let Some(bytes) = piece.get_mut(..want) else {
                break;
            };
            let got = rustix::io::retry_on_intr(|| getrandom(&mut *bytes, GetRandomFlags::empty()))
                .map_err(|error| Fault::host("reading random bytes", io::Error::from(error)))?;
            chain.write(&self.mem, done, bytes.get(..got).unwrap_or(&[]))?;
            done = done.saturating_add(got);
        }
        Ok(done)
    }
}

impl VirtioDevice for RngDevice {
    fn device_type(&self) -> DeviceType {
        DeviceType::Entropy
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        0
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn start(&mut self, mut resources: Resources) -> Result<(), StartError> {
        if self.running.is_some() {
            return Err(StartError::Running);
        }
        let queue = resources.require(0)?;
        self.running = Some(Running {
            mem: resources.mem,
            queue,
        });
        Ok(())
    }

    fn stop(&mut self) -> Vec<Option<Queue>> {
        match self.running.take() {
            Some(running) => vec![Some(running.queue)],
            None => Vec::new(),
        }
    }

    fn is_running(&self) -> bool {
        self.running.is_some()
    }

    fn on_queue(&mut self, _index: u16) -> Result<Progress, Fault> {
        let Some(running) = &mut self.running else {
            return Ok(Progress::Idle);
        };
        let mut spent = 0usize;
        loop {
            running.queue.disable_kicks()?;
            while spent < BUDGET {
                let Some(chain) = running.queue.next()? else {
                    break;
                };
                let len = running.fill(&chain)?;
                // At most MAX_REQUEST.
                running
                    .queue
                    .complete(chain, u32::try_from(len).unwrap_or(0))?;
                self.requests = self.requests.saturating_add(1);
                self.bytes = self.bytes.saturating_add(len as u64);
                spent = spent.saturating_add(len.max(REQUEST_COST));
            }
            running.queue.notify()?;
            if spent >= BUDGET {
                return Ok(Progress::More);
            }
            if !running.queue.enable_kicks()? {
                return Ok(Progress::Idle);
            }
        }
    }

    fn counters(&self) -> Vec<Counter> {
        vec![
            Counter {
                name: "requests",
                value: self.requests,
            },
            Counter {
                name: "random_bytes",
                value: self.bytes,
            },
        ]
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
