//! The persistent memory device with a hostile driver, whose buffers may lie in the image itself.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;

use arbitrary::Arbitrary;
use podvisor_devices::pmem::PmemDevice;
use podvisor_devices::testing::{memory, with_image};
use podvisor_devices::virtio::VirtioDevice;
use rustix::fs::{MemfdFlags, OFlags, memfd_create};
use vm_memory::{Bytes, GuestAddress};

use crate::driver::{self, Bench, MEMORY, steps};

/// Right after other memory, where some of a driver's addresses lie.
const IMAGE: u64 = MEMORY;
const LEN: usize = 0x3000;
const BYTE: u8 = 0;

#[derive(Arbitrary, Debug)]
enum Step {
    Driver(driver::Step),
    /// A request of this type, which lies in the image if the image contains such a request.
    Request(u32, bool),
    /// Saves the device and continues with another one.
    Migrate(Vec<u8>),
}

/// Creates a read-only image of [`LEN`] times [`BYTE`].
pub(crate) fn image() -> File {
    let written = memfd_create("image", MemfdFlags::CLOEXEC).expect("a file in memory");
    let mut written = File::from(written);
    written.write_all(&[BYTE; LEN]).expect("room");
    let path = format!("/proc/self/fd/{}", written.as_raw_fd());
    let read = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, 0.into());
    File::from(read.expect("a file that is there"))
}

/// Runs the program `data`.
///
/// # Panics
/// If the device misbehaves, for example writes to the image.
pub fn run(data: &[u8]) {
    let mut device = PmemDevice::from_file(image()).expect("an image");
    device.place(1 << 32);
    let ram = memory(usize::try_from(MEMORY).expect("small"));
    let mem = with_image(&ram, IMAGE, LEN, Some(device.file().clone()));
    let mut bench = Bench::in_memory(device, mem.clone());
    for step in steps(data) {
        match step {
            Step::Driver(step) => bench.step(step),
            Step::Request(kind, inside) => {
                let mut place = bench.place(&kind.to_le_bytes());
                if inside && kind == 0 {
                    place.0 = IMAGE + u64::try_from(LEN).expect("small") - 4;
                }
                let answer = driver::BUFFERS;
                mem.write_obj(7u32, GuestAddress(answer)).expect("memory");
                bench.chain(0, &[place], &[(answer, 4)]);
                bench.notify(0);
            }
            Step::Migrate(edits) => {
                let mut saved = bench.device.save();
                let mut other = PmemDevice::from_file(image()).expect("an image");
                other.restore(&saved).expect("what was saved");
                assert_eq!(other.region(), bench.device.region());
                for edit in edits.chunks_exact(2) {
                    let at = usize::from(edit[0]) % saved.bytes.len();
                    saved.bytes[at] = edit[1];
                }
                if other.restore(&saved).is_ok() {
                    let region = other.region();
                    assert!(region.start.checked_add(region.len).is_some());
                }
            }
        }
    }
    driver::finish(bench);
    let mut bytes = [1; LEN];
    mem.read_slice(&mut bytes, GuestAddress(IMAGE))
        .expect("memory");
    assert!(bytes == [BYTE; LEN], "the image was written");
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("pmem", super::run);
    }
}
