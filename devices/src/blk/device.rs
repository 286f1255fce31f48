//! The block device: its configuration, its queue, and the requests in flight.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use super::SECTOR_SIZE;
use super::disk::{Completion, Disk, Operation, Submitted};
use super::file::FileDisk;
use super::request::{ID_LEN, Request, Status, WRITE_DATA};
use crate::GuestRam;
use crate::virtio::{
    Chain, Counter, DeviceType, Fault, Progress, Queue, Resources, StartError, VirtioDevice,
    read_config,
};

const QUEUE_SIZES: [u16; 1] = [256];

/// Segments of data per request that the driver may use: the queue less header and status.
const SEG_MAX: u32 = 254;

/// Requests served before the event loop gets its turn again.
const BUDGET: usize = 256;

/// Feature bits (§5.2.3).
mod feature {
    pub(super) const SEG_MAX: u64 = 1 << 2;
    pub(super) const RO: u64 = 1 << 5;
    pub(super) const BLK_SIZE: u64 = 1 << 6;
    pub(super) const FLUSH: u64 = 1 << 9;
}

/// Why a file cannot be a disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BlockDeviceError {
    /// It could not be opened.
    #[error("opening the disk {}", path.display())]
    Open {
        /// The disk's path.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// Its length could not be found.
    #[error("finding the size of the disk {}", path.display())]
    Size {
        /// The disk's path.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// A folder, a socket, a terminal…
    #[error("the disk {} is neither a regular file nor a block device", path.display())]
    NotADisk {
        /// The path.
        path: PathBuf,
    },
    /// The file can be read only, and the device was not made so.
    #[error("the disk {} may not be written: add `.read_only()`, or change its permissions", path.display())]
    NotWritable {
        /// The disk's path.
        path: PathBuf,
        /// The operating system's answer to opening it for writing.
        #[source]
        source: io::Error,
    },
}

/// A virtio block device over any [`Disk`].
#[derive(Debug)]
pub struct BlockDevice {
    disk: Box<dyn Disk>,
    sectors: u64,
    read_only: bool,
    /// Why the disk's file may not be written, unless the device is read-only anyway.
    not_writable: Option<(PathBuf, io::Error)>,
    id: [u8; ID_LEN],
    config: [u8; 60],
    running: Option<Running>,
    counters: Counters,
}

#[derive(Debug)]
struct Running {
    mem: GuestRam,
    queue: Queue,
    /// Requests that the disk works on, by the chain's head, which is unique while in flight.
    in_flight: HashMap<u16, (Chain, Request)>,
}

#[derive(Debug, Default)]
struct Counters {
    reads: u64,
    read_bytes: u64,
    writes: u64,
    write_bytes: u64,
    flushes: u64,
    errors: u64,
}

impl BlockDevice {
    /// A device over any backend.
    #[must_use]
    pub fn new(disk: Box<dyn Disk>) -> Self {
        let sectors = disk.len().checked_div(SECTOR_SIZE).unwrap_or(0);
        Self {
            disk,
            sectors,
            read_only: false,
            not_writable: None,
            id: [0; ID_LEN],
            config: config_space(sectors),
            running: None,
            counters: Counters::default(),
        }
    }

    /// A device over a regular file or block device.
    ///
    /// The file is opened for writing where that is permitted. A file that can only be read
    /// needs [`Self::read_only`], else [`Self::check`] and the start of the VM fail.
    ///
    /// # Errors
    /// When `path` cannot be opened for reading or is no disk.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, BlockDeviceError> {
        let path = path.as_ref();
        let open_error = |source| BlockDeviceError::Open {
            path: path.into(),
            source,
        };
        let kind = std::fs::metadata(path).map_err(open_error)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(BlockDeviceError::NotADisk { path: path.into() });
        }
        let (file, not_writable) = match OpenOptions::new().read(true).write(true).open(path) {
            Ok(file) => (file, None),
            Err(refused) => (
                File::open(path).map_err(open_error)?,
                Some((path.into(), refused)),
            ),
        };
        let disk = FileDisk::new(file).map_err(|source| BlockDeviceError::Size {
            path: path.into(),
            source,
        })?;
        let mut device = Self::new(Box::new(disk));
        device.not_writable = not_writable;
        Ok(device)
    }

    /// The driver may only read.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.read_only = true;
        self.not_writable = None;
        self
    }

    /// The serial number that the driver reads with `VIRTIO_BLK_T_GET_ID` and Linux shows as
    /// `/sys/block/vd*/serial`; what exceeds 20 bytes is cut off.
    #[must_use]
    pub fn serial(mut self, serial: &str) -> Self {
        self.id = [0; ID_LEN];
        for (to, from) in self.id.iter_mut().zip(serial.bytes()) {
            *to = from;
        }
        self
    }

    /// Whether the device can do what it promises its driver.
    ///
    /// # Errors
    /// [`BlockDeviceError::NotWritable`].
    pub fn check(&mut self) -> Result<(), BlockDeviceError> {
        match self.not_writable.take() {
            Some((path, source)) => Err(BlockDeviceError::NotWritable { path, source }),
            None => Ok(()),
        }
    }

    fn serve(&mut self) -> Result<Progress, Fault> {
        let Some(mut running) = self.running.take() else {
            return Ok(Progress::Idle);
        };
        let result = self.serve_queue(&mut running);
        self.running = Some(running);
        result
    }

    fn serve_queue(&mut self, running: &mut Running) -> Result<Progress, Fault> {
        let mut served = 0usize;
        loop {
            running.queue.disable_kicks()?;
            while served < BUDGET {
                let Some(chain) = running.queue.next()? else {
                    break;
                };
                served = served.saturating_add(1);
                let request = Request::parse(&chain, &running.mem, self.sectors, self.read_only)?;
                self.begin(running, chain, request)?;
            }
            running.queue.notify()?;
            if served >= BUDGET {
                return Ok(Progress::More);
            }
            if !running.queue.enable_kicks()? {
                return Ok(Progress::Idle);
            }
        }
    }

    /// Starts a request, and finishes it when the disk is that fast.
    fn begin(
        &mut self,
        running: &mut Running,
        chain: Chain,
        request: Request,
    ) -> Result<(), Fault> {
        let mem = running.mem.clone();
        let mut slices = Vec::new();
        let operation = match request {
            Request::Read { offset, len } => {
                chain.writable_slices(&mem, 0, len, &mut slices)?;
                Operation::Read {
                    offset,
                    slices: &slices,
                }
            }
            Request::Write { offset, len } => {
                chain.readable_slices(&mem, WRITE_DATA, len, &mut slices)?;
                Operation::Write {
                    offset,
                    slices: &slices,
                }
            }
            Request::Flush => Operation::Flush,
            Request::GetId { len } => {
                chain.write(&mem, 0, self.id.get(..len).unwrap_or(&self.id))?;
                return self.finish(running, chain, request, Status::Ok);
            }
            Request::Refuse(status) => return self.finish(running, chain, request, status),
        };
        match self.disk.submit(&mem, chain.head(), operation) {
            Submitted::Done(result) => {
                let status = self.status_of(request, &result);
                self.finish(running, chain, request, status)
            }
            Submitted::Queued => {
                running.in_flight.insert(chain.head(), (chain, request));
                Ok(())
            }
        }
    }

    fn status_of(&self, request: Request, result: &io::Result<()>) -> Status {
        match result {
            Ok(()) => Status::Ok,
            Err(error) => {
                tracing::warn!(?request, %error, "disk: request failed");
                Status::IoError
            }
        }
    }

    fn finish(
        &mut self,
        running: &mut Running,
        chain: Chain,
        request: Request,
        status: Status,
    ) -> Result<(), Fault> {
        let mut written = 0usize;
        if status == Status::Ok {
            match request {
                Request::Read { len, .. } => {
                    self.counters.reads = self.counters.reads.saturating_add(1);
                    self.counters.read_bytes = self.counters.read_bytes.saturating_add(len as u64);
                    written = len;
                }
                Request::Write { len, .. } => {
                    self.counters.writes = self.counters.writes.saturating_add(1);
                    self.counters.write_bytes =
                        self.counters.write_bytes.saturating_add(len as u64);
                }
                Request::Flush => self.counters.flushes = self.counters.flushes.saturating_add(1),
                Request::GetId { len } => written = len,
                Request::Refuse(_) => {}
            }
        } else {
            self.counters.errors = self.counters.errors.saturating_add(1);
        }
        // The status is the last writable byte, wherever the data ended.
        let status_at = chain.writable_len().saturating_sub(1);
        chain.write(&running.mem, status_at, &[status as u8])?;
        let written = u32::try_from(written.saturating_add(1)).unwrap_or(u32::MAX);
        running.queue.complete(chain, written)?;
        Ok(())
    }

    fn take_completions(&mut self, running: &mut Running) -> Result<(), Fault> {
        while let Some(Completion { token, result }) = self.disk.completed() {
            if let Some((chain, request)) = running.in_flight.remove(&token) {
                let status = self.status_of(request, &result);
                self.finish(running, chain, request, status)?;
            }
        }
        running.queue.notify()?;
        Ok(())
    }

    /// Waits for what is in flight.
    fn drain(&mut self, running: &mut Running) {
        while !running.in_flight.is_empty() {
            let result = self.disk.wait();
            if result.is_err() || self.take_completions(running).is_err() {
                tracing::warn!(
                    lost = running.in_flight.len(),
                    "disk: requests in flight were lost while stopping"
                );
                return;
            }
        }
    }
}

impl VirtioDevice for BlockDevice {
    fn device_type(&self) -> DeviceType {
        DeviceType::Block
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        let access = if self.read_only {
            feature::RO
        } else {
            feature::FLUSH
        };
        feature::SEG_MAX | feature::BLK_SIZE | access
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config(&self.config, offset, data);
    }

    fn start(&mut self, mut resources: Resources) -> Result<(), StartError> {
        if self.running.is_some() {
            return Err(StartError::Running);
        }
        let queue = resources.require(0)?;
        self.running = Some(Running {
            mem: resources.mem,
            queue,
            in_flight: HashMap::new(),
        });
        Ok(())
    }

    fn stop(&mut self) -> Vec<Option<Queue>> {
        let Some(mut running) = self.running.take() else {
            return Vec::new();
        };
        self.drain(&mut running);
        vec![Some(running.queue)]
    }

    fn is_running(&self) -> bool {
        self.running.is_some()
    }

    fn on_queue(&mut self, _index: u16) -> Result<Progress, Fault> {
        self.serve()
    }

    fn backend(&self) -> Option<BorrowedFd<'_>> {
        self.disk.fd()
    }

    fn on_backend(&mut self) -> Result<Progress, Fault> {
        let Some(mut running) = self.running.take() else {
            return Ok(Progress::Idle);
        };
        let result = self.take_completions(&mut running);
        self.running = Some(running);
        result.map(|()| Progress::Idle)
    }

    fn counters(&self) -> Vec<Counter> {
        let c = &self.counters;
        vec![
            Counter {
                name: "reads",
                value: c.reads,
            },
            Counter {
                name: "read_bytes",
                value: c.read_bytes,
            },
            Counter {
                name: "writes",
                value: c.writes,
            },
            Counter {
                name: "write_bytes",
                value: c.write_bytes,
            },
            Counter {
                name: "flushes",
                value: c.flushes,
            },
            Counter {
                name: "errors",
                value: c.errors,
            },
        ]
    }
}

/// `struct virtio_blk_config` (§5.2.4).
fn config_space(sectors: u64) -> [u8; 60] {
    let mut config = [0; 60];
    let mut put = |at: usize, bytes: &[u8]| {
        for (to, from) in config.iter_mut().skip(at).zip(bytes) {
            *to = *from;
        }
    };
    put(0, &sectors.to_le_bytes());
    put(12, &SEG_MAX.to_le_bytes());
    put(20, &512u32.to_le_bytes());
    config
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
