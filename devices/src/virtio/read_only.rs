//! Guest memory that devices may read but not write: files that are mapped into the guest's address
//! space.
//!
//! Such memory is a mapping without `PROT_WRITE`. Rings, and buffers that a device writes, must lie
//! elsewhere: a write there would make this process fault.

use vm_memory::{GuestAddress, GuestMemory, GuestMemoryRegion, GuestRegionMmap};

use crate::GuestRam;

/// The unit of mappings: the rest of a file's last page, beyond the end of the file, can be read
/// too.
const PAGE: u64 = 4096;

/// The part of `mem` that devices may write.
pub(super) fn writable_part(mem: &GuestRam) -> GuestRam {
    let read_only = mem.iter().filter(|region| is_read_only(region));
    let mut ram = mem.clone();
    for region in read_only {
        // The region exists.
        if let Ok((rest, _)) = ram.remove_region(region.start_addr(), region.len()) {
            ram = rest;
        }
    }
    ram
}

/// Whether a device may read `len` bytes at `addr`, all of which exist. Beyond the end of a file
/// that was truncated nothing is mapped, and a read there kills the process: such addresses are not
/// memory, which the driver is told instead.
pub(super) fn is_readable(mem: &GuestRam, addr: GuestAddress, len: u32) -> bool {
    let end = addr.0.saturating_add(len.into());
    mem.check_range(addr, len as usize)
        && mem
            .iter()
            .filter(|region| is_read_only(region))
            .all(|region| {
                let start = region.start_addr().0;
                let inside = end.min(start.saturating_add(region.len()));
                addr.0 >= inside || inside <= start || holds(region, inside.saturating_sub(start))
            })
}

fn is_read_only(region: &GuestRegionMmap) -> bool {
    region.prot() & libc::PROT_WRITE == 0
}

/// Whether the file of `region`, if it has one, has its first `len` bytes now.
fn holds(region: &GuestRegionMmap, len: u64) -> bool {
    let Some(behind) = region.file_offset() else {
        return true;
    };
    let now = rustix::fs::fstat(behind.file()).map_or(0, |stat| stat.st_size);
    let there = u64::try_from(now).unwrap_or(0).next_multiple_of(PAGE);
    behind.start().saturating_add(len) <= there
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{CountingInterrupt, DriverQueue, memory, queue_resources, with_image};
    use crate::virtio::{Queue, QueueConfigError, QueueFault};
    use std::fs::File;
    use std::io::Write;
    use std::sync::Arc;
    use vm_memory::Bytes;

    /// The address of the file: after a mebibyte of memory.
    const IMAGE: u64 = 1 << 20;
    const PADDING: u64 = IMAGE + 0x3000;

    /// Memory with a file of 0x2800 bytes after it, and a page of zeroes after that.
    fn image() -> (GuestRam, File) {
        let mut image = tempfile::NamedTempFile::new().unwrap();
        image.write_all(&[7; 0x2800]).unwrap();
        let reader = image.reopen().unwrap();
        let mem = with_image(&memory(1 << 20), IMAGE, 0x3000, Some(Arc::new(reader)));
        (with_image(&mem, PADDING, 0x1000, None), image.into_file())
    }

    fn queue(mem: &GuestRam) -> (DriverQueue, Queue) {
        let driver = DriverQueue::new(mem, 0x1_0000, 16);
        let queue = driver.device_queue(0, Arc::new(CountingInterrupt::default()));
        (driver, queue)
    }

    #[test]
    fn devices_read_what_lies_in_a_file() {
        let (mem, _file) = image();
        let (mut driver, mut queue) = queue(&mem);
        driver.add(
            &[(0x8_0000, 16), (IMAGE + 0x2700, 0x1000)],
            &[(0x9_0000, 4)],
        );
        let chain = queue.next().unwrap().unwrap();
        let mut bytes = [1; 0x1010];
        chain.read(queue.memory(), 0, &mut bytes).unwrap();
        assert_eq!(bytes[..16], [0; 16]);
        assert_eq!(bytes[16..0x110], [7; 0x100]);
        assert_eq!(bytes[0x110..], [0; 0xf00]);
        queue.complete(chain, 0).unwrap();
    }

    #[test]
    fn nothing_that_a_device_writes_lies_in_a_file() {
        let (mem, _file) = image();
        for at in [IMAGE, PADDING, IMAGE - 8, PADDING - 8] {
            let (mut driver, mut queue) = queue(&mem);
            driver.add(&[], &[(at, 16)]);
            let fault = queue.next().unwrap_err();
            assert!(matches!(fault, QueueFault::SegmentMemory { .. }), "{fault}");
            assert!(!queue.ram().check_range(GuestAddress(at), 16));
        }
    }

    #[test]
    fn neither_rings_nor_indirect_tables_lie_in_a_file() {
        let (mem, _file) = image();
        let (mut driver, _) = queue(&mem);
        let sound = driver.config();
        for part in 0..3 {
            let mut config = sound;
            match part {
                0 => config.desc_table = IMAGE,
                1 => config.avail_ring = IMAGE,
                _ => config.used_ring = IMAGE,
            }
            let resources = queue_resources(&mem, Arc::new(CountingInterrupt::default()));
            let error = Queue::new(0, 16, &config, resources).unwrap_err();
            assert!(matches!(error, QueueConfigError::Memory { .. }), "{error}");
        }
        let (_, mut queue) = queue(&mem);
        driver.descriptor(0, IMAGE, 32, crate::testing::F_INDIRECT, 0);
        driver.make_available(0);
        assert!(queue.next().is_err());
    }

    #[test]
    fn a_file_that_became_shorter_is_no_memory_any_more() {
        let (mem, file) = image();
        let readable = |at: u64, len: u32| is_readable(&mem, GuestAddress(at), len);
        assert!(readable(IMAGE, 0x4000) && !readable(IMAGE, 0x4001));
        file.set_len(0x1001).unwrap();
        assert!(readable(IMAGE, 0x2000) && readable(PADDING, 0x1000));
        assert!(!readable(IMAGE + 0x1fff, 2) && !readable(IMAGE + 0x2000, 1));
        assert!(readable(IMAGE - 8, 16) && readable(0, 0x10_2000));
        let (mut driver, mut queue) = queue(&mem);
        driver.add(&[(IMAGE + 0x2000, 16)], &[]);
        let fault = queue.next().unwrap_err();
        assert!(matches!(fault, QueueFault::SegmentMemory { .. }), "{fault}");
    }

    #[test]
    fn memory_without_files_is_all_writable() {
        let mem = memory(1 << 20);
        assert_eq!(writable_part(&mem).num_regions(), 1);
        let (mem, _file) = image();
        let ram = writable_part(&mem);
        assert_eq!((mem.num_regions(), ram.num_regions()), (3, 1));
        assert!(ram.read_obj::<u8>(GuestAddress(IMAGE - 1)).is_ok());
    }
}
