//! Copies of raw disks, without their holes.

use std::fs::File;
use std::io::{self, Seek as _};
use std::os::unix::fs::FileExt as _;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;

/// Bytes copied at a time.
const CHUNK: usize = 1 << 20;

/// The bytes of a file or a block device.
pub(super) fn device_size(mut device: &File) -> io::Result<u64> {
    device.seek(io::SeekFrom::End(0))
}

/// Makes all bytes of a device zeros.
pub(super) fn zero(device: &File) -> io::Result<()> {
    let size = device_size(device)?;
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match fallocate(device, mode, 0, size) {
        Ok(()) => return Ok(()),
        Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {}
        Err(error) => return Err(error.into()),
    }
    let zeros = vec![0; CHUNK];
    let mut at = 0;
    while at < size {
        let length = usize::try_from(size - at).unwrap_or(CHUNK).min(CHUNK);
        device.write_all_at(&zeros[..length], at)?;
        at += length as u64;
    }
    Ok(())
}

/// Is told how many bytes of how many are done.
pub(super) type Tell<'a> = &'a dyn Fn(u64, u64);

/// Blocks of zeros of this size are not written.
const BLOCK: usize = 64 << 10;

/// Copies what `from` has from `start` on. What are zeros in it must be zeros in `to`.
pub(super) fn copy_from(from: &File, to: &File, start: u64, tell: Tell<'_>) -> io::Result<()> {
    let size = device_size(from)?;
    let mut buffer = vec![0; CHUNK];
    let mut at = start;
    while at < size {
        at = match seek(from, SeekFrom::Data(at)) {
            Ok(data) => data,
            // There is no more data.
            Err(Errno::NXIO) => return Ok(()),
            // A file system or a device that does not tell.
            Err(Errno::INVAL) => at,
            Err(error) => return Err(error.into()),
        };
        let end = seek(from, SeekFrom::Hole(at)).unwrap_or(size).min(size);
        while at < end {
            let length = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            let got = from.read_at(&mut buffer[..length], at)?;
            if got == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            for (index, block) in buffer[..got].chunks(BLOCK).enumerate() {
                if block.iter().any(|byte| *byte != 0) {
                    to.write_all_at(block, at + (index * BLOCK) as u64)?;
                }
            }
            at += got as u64;
            tell(at, size);
        }
    }
    Ok(())
}
