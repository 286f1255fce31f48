mod begun;
mod blocks;
mod durable;
mod files;
mod flight;
mod log;
mod queue_threads;
mod ranges;
mod rates;
mod requests;
mod turns;

use super::*;
use crate::GuestRam;
use crate::blk::overlay::create_qcow2;
use crate::blk::{Completion, FileDisk, Operation, Submitted};
use crate::testing::{
    CountingInterrupt, DriverQueue, backend_readable, memory, memory_in_pieces, start, stop,
};
use crate::virtio::Counter;
use proptest::prelude::*;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use vm_memory::{Bytes, GuestAddress, VolatileSlice};

const HEADER: u64 = 0x40000;

const DATA: u64 = 0x50000;

const STATUS: u64 = 0x90000;

struct Rig {
    mem: GuestRam,
    driver: DriverQueue,
    device: BlockDevice,
    irq: Arc<CountingInterrupt>,
}

/// `VIRTIO_BLK_F_FLUSH`.
const FLUSH: u64 = 1 << 9;

impl Rig {
    fn over(device: BlockDevice) -> Self {
        Self::with_features(device, FLUSH)
    }

    fn with_features(device: BlockDevice, features: u64) -> Self {
        Self::in_memory(memory(1 << 20), device, features)
    }

    fn in_memory(mem: GuestRam, mut device: BlockDevice, features: u64) -> Self {
        let driver = DriverQueue::new(&mem, 0x10000, 16);
        let irq = Arc::new(CountingInterrupt::default());
        start(&mut device, &[&driver], &irq, features);
        Self {
            mem,
            driver,
            device,
            irq,
        }
    }

    /// A disk of 8 sectors, each filled with its number.
    fn new() -> Self {
        Self::over(disk_of_8_sectors())
    }

    fn header(&self, kind: u32, sector: u64) {
        self.mem.write_obj(kind, GuestAddress(HEADER)).unwrap();
        self.mem
            .write_obj(sector, GuestAddress(HEADER + 8))
            .unwrap();
        self.mem.write_obj(0xffu8, GuestAddress(STATUS)).unwrap();
    }

    fn status(&self) -> u8 {
        self.mem.read_obj(GuestAddress(STATUS)).unwrap()
    }

    fn read(&mut self, sector: u64, len: u32) -> u8 {
        self.header(0, sector);
        self.driver
            .add(&[(HEADER, 16)], &[(DATA, len), (STATUS, 1)]);
        assert_eq!(self.device.on_queue(0).unwrap(), Progress::Idle);
        self.status()
    }

    fn write(&mut self, sector: u64, len: u32) -> u8 {
        self.header(1, sector);
        self.driver
            .add(&[(HEADER, 16), (DATA, len)], &[(STATUS, 1)]);
        assert_eq!(self.device.on_queue(0).unwrap(), Progress::Idle);
        self.status()
    }
}

fn disk_of_8_sectors() -> BlockDevice {
    let mut file = tempfile::tempfile().unwrap();
    for n in 0..8u8 {
        file.write_all(&[n; 512]).unwrap();
    }
    BlockDevice::new(Box::new(FileDisk::new(file).unwrap()))
}

impl Rig {
    /// A request with one range.
    fn range(&mut self, kind: u32, sector: u64, count: u32, flags: u32) -> u8 {
        self.header(kind, 0);
        let at = GuestAddress(DATA);
        self.mem.write_obj(sector, at).unwrap();
        self.mem
            .write_slice(
                &[count.to_le_bytes(), flags.to_le_bytes()].concat(),
                GuestAddress(DATA + 8),
            )
            .unwrap();
        self.driver.add(&[(HEADER, 16), (DATA, 16)], &[(STATUS, 1)]);
        assert_eq!(self.device.on_queue(0).unwrap(), Progress::Idle);
        self.status()
    }

    fn first_byte(&mut self, sector: u64) -> u8 {
        assert_eq!(self.read(sector, 512), 0);
        self.mem.read_obj(GuestAddress(DATA)).unwrap()
    }
}

const DISCARD: u32 = 11;

const WRITE_ZEROES: u32 = 13;

/// A disk whose requests complete when it is ready, or waited for.
#[derive(Debug, Default)]
struct Later {
    tokens: Vec<u16>,
    ready: Arc<std::sync::atomic::AtomicBool>,
}

impl Disk for Later {
    fn len(&self) -> u64 {
        1 << 20
    }
    fn submit(&mut self, _: &GuestRam, token: u16, operation: Operation<'_, '_>) -> Submitted {
        if let Operation::Read { slices, .. } = operation {
            slices
                .iter()
                .for_each(|s: &VolatileSlice<'_>| s.copy_from(&vec![5u8; s.len()]));
        }
        self.tokens.push(token);
        Submitted::Queued
    }
    fn completed(&mut self) -> Option<Completion> {
        let token = self
            .ready
            .load(SeqCst)
            .then(|| self.tokens.pop())
            .flatten()?;
        let result = Ok(());
        Some(Completion { token, result })
    }
    fn wait(&mut self) -> std::io::Result<()> {
        self.ready.store(true, SeqCst);
        Ok(())
    }
}

/// A disk that records the lengths of its requests.
#[derive(Clone, Debug, Default)]
struct Noting(Arc<std::sync::Mutex<Vec<(u64, usize)>>>);

impl Disk for Noting {
    fn len(&self) -> u64 {
        64 << 20
    }
    fn submit(&mut self, _: &GuestRam, _: u16, operation: Operation<'_, '_>) -> Submitted {
        if let Operation::Read { offset, slices } | Operation::Write { offset, slices } = operation
        {
            let len = slices.iter().map(VolatileSlice::len).sum();
            self.0.lock().unwrap().push((offset, len));
        }
        Submitted::Done(Ok(()))
    }
}

/// A rig with a request of 5.5 MiB, from sector 2 on, of overlapping pieces of memory.
fn long_request(disk: Noting) -> Rig {
    long_request_of(BlockDevice::new(Box::new(disk)))
}

fn long_request_of(device: BlockDevice) -> Rig {
    let mut rig = Rig::over(device);
    rig.header(0, 2);
    let piece = (DATA, 0x8_0000);
    let mut writable = vec![piece; 11];
    writable.push((STATUS, 1));
    rig.driver.add(&[(HEADER, 16)], &writable);
    rig
}

proptest! {
    /// With any header, the request is completed once and the disk keeps its size.
    #[test]
    fn any_header_is_answered(kind in 0u32..16, sector: u64, len in 0u32..5000, write: bool) {
        let mut rig = Rig::new();
        rig.header(kind, sector);
        let data = [(DATA, len)];
        if write {
            rig.driver.add(&[(HEADER, 16), data[0]], &[(STATUS, 1)]);
        } else {
            rig.driver.add(&[(HEADER, 16)], &[data[0], (STATUS, 1)]);
        }
        prop_assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
        prop_assert!(rig.status() <= 2);
        prop_assert!(rig.driver.take_used().is_some());
        prop_assert!(rig.driver.take_used().is_none());
    }
}

fn tempfile_of(len: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(len).unwrap();
    file
}
