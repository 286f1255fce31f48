//! The block device with a hostile driver.

use std::os::unix::fs::FileExt;

use arbitrary::Arbitrary;
use podvisor_devices::blk::{BlockDevice, IoEngine, open_disk};

use crate::driver::{self, Addr, BUFFERS, Bench, Len, buffers, steps};

/// The size of the disk: 40 sectors and a part of one, which the guest does not see.
const DISK: u64 = 40 * 512 + 100;

#[derive(Arbitrary, Debug)]
enum Step {
    Driver(driver::Step),
    /// A request with a valid header.
    Request {
        kind: u8,
        sector: u8,
        data: Vec<(Addr, Len)>,
        device_writes: bool,
        status: bool,
    },
}

/// Runs the driver's program `data`; its first byte selects whether the disk is read-only, the I/O
/// engine, and the number of queues.
///
/// # Panics
/// If the device misbehaves, or no temporary file can be created.
pub fn run(data: &[u8]) {
    let Some((mode, data)) = data.split_first() else {
        return;
    };
    // In memory if there is such a directory: flushing to a real disk takes most of the time.
    let file = tempfile::tempfile_in("/dev/shm")
        .or_else(|_| tempfile::tempfile())
        .expect("a temporary file");
    file.set_len(DISK).expect("a small file");
    let check = file.try_clone().expect("a descriptor");
    let engine = if mode & 2 == 0 {
        IoEngine::Sync
    } else {
        IoEngine::Uring
    };
    let disk = open_disk(file, engine).expect("a regular file");
    let mut device = BlockDevice::new(disk).queues(if mode & 4 == 0 { 1 } else { 3 });
    let read_only = mode & 1 != 0;
    if read_only {
        device = device.read_only();
    }
    let mut bench = Bench::new(device);
    for step in steps(data) {
        match step {
            Step::Driver(step) => bench.step(step),
            Step::Request {
                kind,
                sector,
                data,
                device_writes,
                status,
            } => {
                let mut header = [0; 16];
                header[0] = kind % 16;
                header[8] = sector % 48;
                let mut readable = vec![bench.place(&header)];
                let mut writable = Vec::new();
                if device_writes {
                    writable = buffers(&data);
                } else {
                    readable.extend(buffers(&data));
                }
                if status {
                    writable.push((BUFFERS, 1));
                }
                bench.chain(0, &readable, &writable);
                bench.notify(0);
                bench.take_used();
            }
        }
    }
    driver::finish(bench);
    assert_eq!(check.metadata().expect("metadata").len(), DISK);
    if read_only {
        let mut all = vec![0; usize::try_from(DISK).expect("small")];
        check.read_exact_at(&mut all, 0).expect("the whole disk");
        assert!(
            all.iter().all(|byte| *byte == 0),
            "a read-only disk was written"
        );
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("blk", super::run);
    }
}
