//! The block device: its configuration, its queue, and the disk behind it.

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::disk::{Disk, EmptySlot};
use super::engine::{Engine, MAX_QUEUES, PIECE};
use super::open::{self, Access, BlockDeviceError, IoEngine, open_disk};
use super::overlay::{OverlayFormat, Qcow2Disk};
use super::pace::Pace;
use super::request::{ID_LEN, MAX_DISCARD_SECTORS, MAX_WRITE_ZEROES_SECTORS};
use crate::virtio::{
    ConfigSpace, DeviceInfo, DeviceType, Fault, Placement, Progress, Queue, Queues, Rate,
    StartError, VirtioDevice,
};

const QUEUE_SIZE: u16 = 256;

/// Segments of data per request that the driver may use: the queue less header and status.
const SEG_MAX: u32 = 254;

/// Bytes before the loop gets its turn again, and the driver its interrupt.
const BUDGET: usize = PIECE;

/// Feature bits (§5.2.3).
mod feature {
    pub(super) const SEG_MAX: u64 = 1 << 2;
    pub(super) const RO: u64 = 1 << 5;
    pub(super) const BLK_SIZE: u64 = 1 << 6;
    pub(super) const FLUSH: u64 = 1 << 9;
    pub(super) const MQ: u64 = 1 << 12;
    pub(super) const DISCARD: u64 = 1 << 13;
    pub(super) const WRITE_ZEROES: u64 = 1 << 14;
}

/// A virtio block device over any [`Disk`].
///
/// It runs on a thread of its own, since most disks block; but for [`Self::spare`].
#[derive(Debug)]
pub struct BlockDevice {
    engine: Engine,
    config: Arc<ConfigSpace>,
    queues: Queues,
    /// A file that is to be written, which [`Self::check`] sees to.
    file: Option<WantedForWriting>,
    io: IoEngine,
    placement: Placement,
}

#[derive(Debug)]
struct WantedForWriting {
    file: File,
    path: PathBuf,
    /// Whether it may be opened a second time.
    by_path: bool,
}

impl BlockDevice {
    /// A device over any backend.
    #[must_use]
    pub fn new(disk: Box<dyn Disk>) -> Self {
        let engine = Engine::new(disk);
        Self {
            config: Arc::new(ConfigSpace::new(config_space(engine.sectors, 1))),
            engine,
            queues: Queues::new(1),
            file: None,
            io: IoEngine::Sync,
            placement: Placement::Own,
        }
    }

    /// A device over a regular file or block device.
    ///
    /// It is opened for reading here. Unless [`Self::read_only`] follows, [`Self::check`], which
    /// the VM's builder calls, opens it for writing and locks it against other writers.
    ///
    /// # Errors
    /// When `path` cannot be opened for reading or is no disk.
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

    /// A device over an open file: nothing is opened later. For a disk that the driver may
    /// write, the file must have been opened for reading and writing; it is locked against other
    /// writers by [`Self::check`], which the VM's builder calls.
    ///
    /// # Errors
    /// When the file is no disk.
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

    /// A disk over an image that stays as it is: what the driver writes is in `overlay`, which
    /// [`create_overlay`](super::create_overlay) made of `base`, in the format that it returned.
    /// The disk's thread carries requests out. The overlay is locked against all others, the image
    /// against writers.
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

    /// An empty slot: a read-only disk of one sector, until [`Self::swap`] gives it another one.
    /// (Linux sends no event when a disk's size changes from or to 0.) Nothing of it blocks: it
    /// needs no thread of its own.
    #[must_use]
    pub fn spare() -> Self {
        Self {
            placement: Placement::Shared,
            ..Self::new(Box::new(EmptySlot)).read_only()
        }
    }

    /// The driver may only read.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.engine.read_only = true;
        self.file = None;
        self
    }

    /// Gives the driver so many request queues, 1 to 8; a guest uses one per vCPU. The disk works
    /// on the requests of all of them together.
    #[must_use]
    pub fn queues(mut self, count: u16) -> Self {
        let count = usize::from(count).clamp(1, MAX_QUEUES);
        self.queues = Queues::new(count);
        self.config = Arc::new(ConfigSpace::new(config_space(self.engine.sectors, count)));
        self
    }

    /// Limits what the driver reads and writes, in bytes and in requests of any kind. What exceeds
    /// the rate stays in the driver's queues; a request that has begun is carried out whole.
    ///
    /// # Errors
    /// [`BlockDeviceError::Rate`].
    pub fn limit(
        mut self,
        bytes: Option<Rate>,
        operations: Option<Rate>,
    ) -> Result<Self, BlockDeviceError> {
        let pace = Pace::new(bytes, operations).and_then(|pace| self.engine.keep(pace));
        pace.map_err(BlockDeviceError::Rate)?;
        Ok(self)
    }

    /// The serial number that the driver reads with `VIRTIO_BLK_T_GET_ID` and Linux shows as
    /// `/sys/block/vd*/serial`; what exceeds 20 bytes is cut off.
    #[must_use]
    pub fn serial(mut self, serial: &str) -> Self {
        self.set_serial(serial);
        self
    }

    fn set_serial(&mut self, serial: &str) {
        self.engine.id = [0; ID_LEN];
        for (to, from) in self.engine.id.iter_mut().zip(serial.bytes()) {
            *to = from;
        }
    }

    /// Sees to it that the device can do what it promises its driver: a file that is to be
    /// written is opened for that, and locked.
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
        } else if !open::is_writable(&file) {
            let source = std::io::Error::from_raw_os_error(libc::EBADF);
            return Err(BlockDeviceError::NotWritable { path, source });
        }
        open::lock(&file, &path, Access::Write)?;
        let disk =
            open_disk(file, self.io).map_err(|source| BlockDeviceError::Size { path, source })?;
        self.engine.set_disk(disk);
        Ok(())
    }

    /// Puts another disk with another serial number in the place of this one. The driver hears
    /// of the new capacity (§5.2.5.2); what it had cached of the old disk is its affair.
    pub fn swap(&mut self, disk: Box<dyn Disk>, serial: &str) {
        self.settle_queues();
        self.engine.set_disk(disk);
        self.set_serial(serial);
        self.tell_capacity();
    }

    /// Looks at the disk's size again, and tells the driver when it changed.
    ///
    /// # Errors
    /// When the size cannot be found.
    pub fn resize(&mut self) -> std::io::Result<()> {
        self.settle_queues();
        self.engine.disk_mut().refresh()?;
        self.engine.sectors = super::sectors(self.engine.disk());
        self.tell_capacity();
        Ok(())
    }

    fn settle_queues(&mut self) {
        for index in 0..self.queue_count() {
            self.engine.drain(&mut self.queues, index);
        }
        for queue in self.queues.running() {
            // A request that was put back waits in the ring: it must not be forgotten.
            let _ = queue.kick().write(1);
        }
    }

    /// Begins the requests of a queue that runs, as far as `budget` and the disk's rates go.
    fn serve(&mut self, index: u16, budget: usize) -> Result<Progress, Fault> {
        let engine = &mut self.engine;
        let Some(queue) = self.queues.get(index) else {
            return Ok(Progress::Idle);
        };
        if engine.is_held() {
            return Ok(Progress::Idle);
        }
        let progress = queue.serve(budget, |queue, chain| engine.begin(queue, chain))?;
        Ok(match engine.is_held() {
            // The timer calls again.
            true => Progress::Idle,
            false => progress,
        })
    }

    fn queue_count(&self) -> u16 {
        // At most MAX_QUEUES.
        u16::try_from(self.queues.len()).unwrap_or(1)
    }

    fn tell_capacity(&self) {
        self.config.update(0, &self.engine.sectors.to_le_bytes());
    }
}

impl VirtioDevice for BlockDevice {
    fn info(&self) -> DeviceInfo {
        let access = if self.engine.read_only {
            feature::RO
        } else {
            feature::FLUSH | feature::DISCARD | feature::WRITE_ZEROES
        };
        let several = if self.queues.len() > 1 {
            feature::MQ
        } else {
            0
        };
        DeviceInfo {
            device_type: DeviceType::Block,
            queue_sizes: vec![QUEUE_SIZE; self.queues.len()],
            features: feature::SEG_MAX | feature::BLK_SIZE | access | several,
            config: self.config.clone(),
            counters: self.engine.counters.clone(),
        }
    }

    fn placement(&self) -> Placement {
        self.placement
    }

    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        self.queues.start(queue)
    }

    fn stop_queue(&mut self, index: u16) -> Option<Queue> {
        self.queues.get(index)?;
        self.engine.drain(&mut self.queues, index);
        self.queues.stop(index)
    }

    fn on_queue(&mut self, index: u16) -> Result<Progress, Fault> {
        let spent = self.engine.resume(&mut self.queues, BUDGET)?;
        let progress = match BUDGET.checked_sub(spent) {
            None | Some(0) => Progress::More,
            Some(rest) => self.serve(index, rest)?,
        };
        self.engine.commit(&mut self.queues)?;
        Ok(if self.engine.is_behind() {
            Progress::More
        } else {
            progress
        })
    }

    fn backend(&self) -> Option<BorrowedFd<'_>> {
        self.engine.backend()
    }

    fn on_backend(&mut self) -> Result<Progress, Fault> {
        self.engine.take_completions(&mut self.queues)?;
        self.engine.resume(&mut self.queues, BUDGET)?;
        if self.engine.may_go_on() {
            for index in 0..self.queue_count() {
                if self.serve(index, BUDGET)? == Progress::More {
                    self.engine.go_on_soon();
                }
            }
        }
        self.engine.commit(&mut self.queues)?;
        Ok(if self.engine.is_behind() {
            Progress::More
        } else {
            Progress::Idle
        })
    }
}

/// `struct virtio_blk_config` (§5.2.4).
fn config_space(sectors: u64, queues: usize) -> [u8; 60] {
    let mut config = [0; 60];
    let mut put = |at: usize, bytes: &[u8]| {
        for (to, from) in config.iter_mut().skip(at).zip(bytes) {
            *to = *from;
        }
    };
    put(0, &sectors.to_le_bytes());
    put(12, &SEG_MAX.to_le_bytes());
    put(20, &512u32.to_le_bytes());
    // At most MAX_QUEUES.
    put(34, &u16::try_from(queues).unwrap_or(1).to_le_bytes());
    // Discarding: sectors, ranges, alignment; zeroes: sectors, ranges, whether they may unmap.
    put(36, &MAX_DISCARD_SECTORS.to_le_bytes());
    put(40, &1u32.to_le_bytes());
    put(44, &1u32.to_le_bytes());
    put(48, &MAX_WRITE_ZEROES_SECTORS.to_le_bytes());
    put(52, &1u32.to_le_bytes());
    put(56, &[1]);
    config
}

#[cfg(test)]
#[path = "device_tests/mod.rs"]
mod tests;
