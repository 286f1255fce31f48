//! The block device: its configuration, its queues, and its disk.

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::changes::{ChangeLog, LoggedDisk};
use super::clones::DiskClones;
use super::disk::{Disk, EmptySlot};
use super::engine::Engine;
use super::flight::MAX_QUEUES;
use super::open::{self, Access, BlockDeviceError, IoEngine, open_disk};
use super::overlay::{OverlayFormat, Qcow2Disk};
use super::request::{ID_LEN, MAX_DISCARD_SECTORS, MAX_WRITE_ZEROES_SECTORS};
use super::server::Server;
use super::throttle::Throttle;
use crate::virtio::{
    ConfigSpace, DeviceInfo, DeviceType, Fault, HaltedQueue, Placement, Progress, Queue,
    QueueServer, QueueThread, QueueThreads, Rate, StartError, VirtioDevice,
};

const QUEUE_SIZE: u16 = 256;

/// Size of the queues of an empty slot. A driver allocates memory for each request that it may
/// make, also for slots that stay empty; reading an image needs few requests at a time.
const SPARE_QUEUE_SIZE: u16 = 64;

/// Feature bits (§5.2.3).
mod feature {
    pub(super) const SEG_MAX: u64 = 1 << 2;
    pub(super) const RO: u64 = 1 << 5;
    pub(super) const BLK_SIZE: u64 = 1 << 6;
    pub(super) const FLUSH: u64 = 1 << 9;
    pub(super) const TOPOLOGY: u64 = 1 << 10;
    pub(super) const MQ: u64 = 1 << 12;
    pub(super) const DISCARD: u64 = 1 << 13;
    pub(super) const WRITE_ZEROES: u64 = 1 << 14;
}

/// A virtio block device over any [`Disk`].
///
/// It runs on its own thread, since most disks block; except for [`Self::spare`]. With several
/// queues each of them has a thread and an engine, if the VM gives it one
/// ([`VirtioDevice::queue_threads`]) and the disk can be cloned ([`Disk::try_clone`]).
#[derive(Debug)]
pub struct BlockDevice {
    /// The part that the device's event loop serves: all queues, or the first one.
    server: Server,
    /// The other queues, if threads serve them.
    queue_threads: Vec<Arc<QueueThread<Server>>>,
    config: Arc<ConfigSpace>,
    queue_count: u16,
    queue_size: u16,
    /// A file that will be written to, opened and locked by [`Self::check`].
    file: Option<WantedForWriting>,
    /// Knows what is written while the disk is copied.
    changes: Option<ChangeLog>,
    io: IoEngine,
    placement: Placement,
}

#[derive(Debug)]
struct WantedForWriting {
    file: File,
    path: PathBuf,
    /// Whether it may be opened a second time, by its path.
    by_path: bool,
}

impl BlockDevice {
    /// Creates a device over any backend.
    #[must_use]
    pub fn new(disk: Box<dyn Disk>) -> Self {
        Self::with_queue(disk, QUEUE_SIZE)
    }

    fn with_queue(disk: Box<dyn Disk>, queue_size: u16) -> Self {
        let engine = Engine::new(disk);
        let config = config_space(&engine, 1, queue_size);
        Self {
            config: Arc::new(ConfigSpace::new(config)),
            server: Server::new(engine, 1),
            queue_threads: Vec::new(),
            queue_count: 1,
            queue_size,
            file: None,
            changes: None,
            io: IoEngine::Sync,
            placement: Placement::Own,
        }
    }

    /// Creates a device over a regular file or block device.
    ///
    /// It is opened for reading here. Unless [`Self::read_only`] follows, [`Self::check`], which
    /// the VM's builder calls, opens it for writing and locks it against other writers.
    ///
    /// # Errors
    /// If `path` cannot be opened for reading or is not a disk.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, BlockDeviceError> {
        Self::open_with(path, IoEngine::Sync)
    }

    /// As [`Self::open`], with requests carried out by `io`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(path: impl AsRef<Path>, io: IoEngine) -> Result<Self, BlockDeviceError> {
        let path = path.as_ref();
        Self::over(open::open(path)?, path, true, io)
    }

    /// Creates a device over an open file: nothing is opened later. If the driver may write the
    /// disk, the file must have been opened for reading and writing; it is locked against other
    /// writers by [`Self::check`], which the VM's builder calls.
    ///
    /// # Errors
    /// If the file is not a disk.
    pub fn from_file(file: File) -> Result<Self, BlockDeviceError> {
        Self::from_file_with(file, IoEngine::Sync)
    }

    /// As [`Self::from_file`], with requests carried out by `io`.
    ///
    /// # Errors
    /// As [`Self::from_file`].
    pub fn from_file_with(file: File, io: IoEngine) -> Result<Self, BlockDeviceError> {
        let path = open::path_of(&file);
        open::check_kind(&file, &path)?;
        Self::over(file, &path, false, io)
    }

    fn over(
        file: File,
        path: &Path,
        by_path: bool,
        io: IoEngine,
    ) -> Result<Self, BlockDeviceError> {
        let size_error = |source| BlockDeviceError::Size {
            path: path.into(),
            source,
        };
        let own = file.try_clone().map_err(size_error)?;
        let mut device = Self::new(open_disk(own, io).map_err(size_error)?);
        device.io = io;
        device.file = Some(WantedForWriting {
            file,
            path: path.into(),
            by_path,
        });
        Ok(device)
    }

    /// Creates a disk over an image that stays unchanged: what the driver writes goes to `overlay`,
    /// which [`create_overlay`](super::create_overlay) created from `base`, in the format that it
    /// returned. The disk's thread carries requests out. The overlay is locked against all others,
    /// the image against writers.
    ///
    /// # Errors
    /// [`BlockDeviceError::Overlay`], [`BlockDeviceError::NotWritable`] and
    /// [`BlockDeviceError::InUse`].
    pub fn overlay(
        base: File,
        overlay: File,
        format: OverlayFormat,
    ) -> Result<Self, BlockDeviceError> {
        let [base_path, path] = [&base, &overlay].map(open::path_of);
        open::check_kind(&base, &base_path)?;
        if !open::is_writable(&overlay) {
            let source = std::io::Error::from_raw_os_error(libc::EBADF);
            return Err(BlockDeviceError::NotWritable { path, source });
        }
        open::lock(&overlay, &path, Access::Write)?;
        if format == OverlayFormat::Reflink {
            return Self::from_file(overlay);
        }
        open::lock(&base, &base_path, Access::Read)?;
        let disk = Qcow2Disk::open(base, overlay);
        let disk = disk.map_err(|source| BlockDeviceError::Overlay { path, source })?;
        Ok(Self::new(Box::new(disk)))
    }

    /// Creates an empty slot: a read-only disk of one sector, until [`Self::replace_disk`] replaces
    /// it. (Linux sends no event when a disk's size changes from or to 0.) It never blocks, so it
    /// needs no thread of its own. Its queues are shorter than those of other disks, since guests
    /// have more slots than they fill.
    #[must_use]
    pub fn spare() -> Self {
        let mut device = Self::with_queue(Box::new(EmptySlot), SPARE_QUEUE_SIZE).read_only();
        device.placement = Placement::Shared;
        device
    }

    /// Makes the disk read-only for the driver.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.server.engine.read_only = true;
        self.file = None;
        self
    }

    /// Sets the number of request queues, 1 to 8; a guest uses one per vCPU. If the disk is a file,
    /// each has its own engine and thread: a slow request delays only those of its own queue. Other
    /// disks share one engine and one thread among all queues, unless they implement
    /// [`Disk::try_clone`].
    #[must_use]
    pub fn queues(mut self, count: u16) -> Self {
        // MAX_QUEUES is a small number.
        let count = count.clamp(1, u16::try_from(MAX_QUEUES).unwrap_or(1));
        self.queue_count = count;
        self.config = Arc::new(ConfigSpace::new(config_space(
            &self.server.engine,
            count,
            self.queue_size,
        )));
        self.server.set_places(count.into());
        self
    }

    /// Limits the rate of the driver's reads and writes, in bytes and in requests of any kind.
    /// Requests above the rate stay in the driver's queues; a request that was started is carried
    /// out completely.
    ///
    /// # Errors
    /// [`BlockDeviceError::Rate`].
    pub fn limit(
        mut self,
        bytes: Option<Rate>,
        operations: Option<Rate>,
    ) -> Result<Self, BlockDeviceError> {
        let pace = Throttle::new(bytes, operations).and_then(|pace| self.server.engine.keep(pace));
        pace.map_err(BlockDeviceError::Rate)?;
        Ok(self)
    }

    /// Sets the serial number that the driver reads with `VIRTIO_BLK_T_GET_ID` and that Linux shows
    /// as `/sys/block/vd*/serial`; it is truncated to 20 bytes.
    #[must_use]
    pub fn serial(mut self, serial: &str) -> Self {
        self.set_serial(serial);
        self
    }

    fn set_serial(&mut self, serial: &str) {
        self.server.engine.id = id(serial);
    }

    /// Ensures that the device can do what it offers its driver: a file that will be written to is
    /// opened for writing, and locked.
    ///
    /// # Errors
    /// [`BlockDeviceError::NotWritable`] and [`BlockDeviceError::InUse`].
    pub fn check(&mut self) -> Result<(), BlockDeviceError> {
        let Some(wanted) = self.file.take() else {
            return Ok(());
        };
        let WantedForWriting {
            mut file,
            path,
            by_path,
        } = wanted;
        if by_path {
            file = open::reopen_for_writing(&file, &path)?;
        }
        let disk = open::for_writing(file, path, self.io)?;
        self.set_disk(disk);
        Ok(())
    }

    /// Sets the disk of a device that has no queue yet.
    fn set_disk(&mut self, disk: Box<dyn Disk>) {
        let disk = match &self.changes {
            Some(log) => Box::new(LoggedDisk::new(disk, log.clone())),
            None => disk,
        };
        self.server.engine.set_disk(disk);
    }

    /// Lets the disk be copied while its driver uses it: [`Self::changes`] tells what is written
    /// meanwhile. It is not replaced afterwards, and its backend completes requests at once.
    #[must_use]
    pub fn copied(mut self) -> Self {
        if self.changes.is_none() {
            let log = ChangeLog::default();
            self.changes = Some(log.clone());
            let disk = self.server.engine.take_disk();
            self.server
                .engine
                .set_disk(Box::new(LoggedDisk::new(disk, log)));
        }
        self
    }

    /// Returns the log of the disk's changes, if it may be copied.
    #[must_use]
    pub fn changes(&self) -> Option<&ChangeLog> {
        self.changes.as_ref()
    }

    /// Returns the disk for requests that are done at once, between those of the driver.
    pub fn disk_mut(&mut self) -> &mut dyn Disk {
        self.server.engine.disk_mut()
    }

    /// Replaces the disk and its serial number. The driver is notified of the new capacity
    /// (§5.2.5.2); what it had cached of the old disk is not invalidated. A file that it may write
    /// is locked only by [`open_disk_for_writing`](super::open_disk_for_writing).
    pub fn replace_disk(&mut self, disk: Box<dyn Disk>, serial: &str) {
        let count = self.queue_threads.len().saturating_add(1);
        self.replace_disk_clones(DiskClones::new(disk, count), serial);
    }

    /// As [`Self::replace_disk`], for a disk with a copy for each of the device's engines: nothing
    /// is opened here.
    pub fn replace_disk_clones(&mut self, disks: DiskClones, serial: &str) {
        let disks = disks.into_disks(self.queue_threads.len().saturating_add(1));
        let mut disks = disks.into_iter();
        let id = id(serial);
        self.change(|server| {
            if let Some(disk) = disks.next() {
                server.engine.set_disk(disk);
            }
            server.engine.id = id;
        });
        self.tell_capacity();
    }

    /// Reads the disk's size again, and notifies the driver if it changed.
    ///
    /// # Errors
    /// If the size cannot be determined.
    pub fn resize(&mut self) -> std::io::Result<()> {
        let mut result = Ok(());
        self.change(|server| {
            if let Err(error) = server.engine.refresh() {
                result = Err(error);
            }
        });
        result?;
        self.tell_capacity();
        Ok(())
    }

    /// Changes all engines while none of them has anything in flight.
    fn change(&mut self, mut work: impl FnMut(&mut Server)) {
        let mut halted: Vec<_> = self
            .queue_threads
            .iter()
            .map(|thread| thread.halt())
            .collect();
        self.server.drain();
        for server in halted.iter_mut().filter_map(HaltedQueue::server) {
            server.drain();
        }
        work(&mut self.server);
        for thread in &mut halted {
            thread.change(&mut work);
        }
    }

    /// Returns the thread that serves a queue, if the queue has its own thread.
    fn thread(&self, index: u16) -> Option<&QueueThread<Server>> {
        let place = usize::from(index).checked_sub(1)?;
        self.queue_threads.get(place).map(|thread| &**thread)
    }

    /// Clones the engine for each queue but the first; empty if the disk is there only once.
    fn servers(&self) -> std::io::Result<Vec<(u16, Server)>> {
        let engine = &self.server.engine;
        let mut servers = Vec::new();
        for index in 1..self.queue_count {
            let Some(disk) = engine.disk().try_clone()? else {
                return Ok(Vec::new());
            };
            let server = Server::new(engine.try_clone(disk)?, self.queue_count.into());
            servers.push((index, server));
        }
        Ok(servers)
    }

    fn tell_capacity(&self) {
        let sectors = self.server.engine.sectors;
        self.config.update(0, &sectors.to_le_bytes());
    }
}

impl VirtioDevice for BlockDevice {
    fn info(&self) -> DeviceInfo {
        let access = if self.server.engine.read_only {
            feature::RO
        } else {
            feature::FLUSH | feature::DISCARD | feature::WRITE_ZEROES
        };
        let several = if self.queue_count > 1 { feature::MQ } else { 0 };
        DeviceInfo {
            device_type: DeviceType::Block,
            queue_sizes: vec![self.queue_size; self.queue_count.into()],
            features: feature::SEG_MAX | feature::BLK_SIZE | feature::TOPOLOGY | access | several,
            config: self.config.clone(),
            counters: self.server.engine.counters.clone(),
        }
    }

    fn placement(&self) -> Placement {
        self.placement
    }

    fn queue_threads(&mut self) -> QueueThreads {
        let created = self.servers().and_then(QueueThreads::new);
        match created {
            Ok((threads, known)) => {
                self.queue_threads = threads;
                known
            }
            Err(error) => {
                tracing::warn!(
                    %error,
                    "disk: failed to create queue threads; one thread serves all queues"
                );
                QueueThreads::default()
            }
        }
    }

    fn negotiated(&mut self, features: u64) {
        // §5.2.6.2: for a driver that does not flush, writes are durable once they are completed.
        let write_through = features & feature::FLUSH == 0;
        self.server.engine.write_through = write_through;
        for thread in &self.queue_threads {
            if let Some(server) = thread.halt().server() {
                server.engine.write_through = write_through;
            }
        }
    }

    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        match self.thread(queue.index()) {
            Some(thread) => thread.halt().start(queue),
            None => self.server.start_queue(queue),
        }
    }

    fn stop_queue(&mut self, index: u16) -> Option<Queue> {
        match self.thread(index) {
            Some(thread) => thread.halt().stop(),
            None => self.server.stop_queue(index),
        }
    }

    fn is_quiet(&self) -> bool {
        let mut queue_threads = self.queue_threads.iter();
        self.server.is_quiet() && queue_threads.all(|thread| thread.halt().is_quiet())
    }

    fn on_queue(&mut self, index: u16) -> Result<Progress, Fault> {
        self.server.on_queue(index)
    }

    fn backend(&self) -> Option<BorrowedFd<'_>> {
        self.server.backend()
    }

    fn on_backend(&mut self) -> Result<Progress, Fault> {
        self.server.on_backend()
    }
}

impl Drop for BlockDevice {
    /// The disk is closed when this returns, and its threads exit.
    fn drop(&mut self) {
        for thread in &self.queue_threads {
            thread.halt().end();
        }
    }
}

/// The serial number as the driver reads it.
fn id(serial: &str) -> [u8; ID_LEN] {
    let mut id = [0; ID_LEN];
    for (to, from) in id.iter_mut().zip(serial.bytes()) {
        *to = from;
    }
    id
}

/// `struct virtio_blk_config` (§5.2.4).
fn config_space(engine: &Engine, queues: u16, queue_size: u16) -> [u8; 60] {
    // Segments of data per request that the driver may use: the queue size minus header and status.
    let seg_max = u32::from(queue_size.saturating_sub(2));
    let mut config = [0; 60];
    let mut put = |at: usize, bytes: &[u8]| {
        for (to, from) in config.iter_mut().skip(at).zip(bytes) {
            *to = *from;
        }
    };
    put(0, &engine.sectors.to_le_bytes());
    put(12, &seg_max.to_le_bytes());
    put(20, &512u32.to_le_bytes());
    // Topology: the physical block as a power of two, its first sector, and in sectors the minimum
    // and the optimal size of a request.
    let topology = engine.topology();
    let physical = (topology.physical_block / 512).max(1);
    let optimal = topology.optimal / 512;
    put(24, &[u8::try_from(physical.ilog2()).unwrap_or(0), 0]);
    put(26, &u16::try_from(physical).unwrap_or(0).to_le_bytes());
    put(28, &optimal.to_le_bytes());
    put(34, &queues.to_le_bytes());
    // Discarding: sectors, ranges, alignment; zeroes: sectors, ranges, whether they may unmap.
    put(36, &MAX_DISCARD_SECTORS.to_le_bytes());
    put(40, &1u32.to_le_bytes());
    put(44, &physical.to_le_bytes());
    put(48, &MAX_WRITE_ZEROES_SECTORS.to_le_bytes());
    put(52, &1u32.to_le_bytes());
    put(56, &[1]);
    config
}

#[cfg(test)]
#[path = "device_tests/mod.rs"]
mod tests;
