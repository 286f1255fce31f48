//! What would be started, written to a disk of the host instead.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;

use podvisor_kept_kernel::{BLOCK, Frame};

use crate::disks;
use crate::error::LoaderError;
use crate::image::Image;

/// Bytes that are copied in one step.
const CHUNK: usize = 1 << 20;

/// Writes a kernel, its initial file systems and its command line to the disk with a serial.
pub(crate) fn write(
    image: &Image,
    title: &str,
    line: &str,
    serial: &str,
) -> Result<(), LoaderError> {
    let failed = |what| {
        move |source| LoaderError::HandOver {
            what,
            serial: serial.to_owned(),
            source,
        }
    };
    let bytes = |file: &File| file.metadata().map(|metadata| metadata.len());
    let kernel = bytes(&image.kernel).map_err(failed("the kernel"))?;
    let initrd = image.initrd.as_ref().map_or(Ok(0), bytes);
    let initrd = initrd.map_err(failed("the initial file system"))?;
    let frame = Frame::new(kernel, initrd, line, title).map_err(|source| LoaderError::Frame {
        title: title.to_owned(),
        source,
    })?;
    let disk = disks::named(serial)
        .ok_or_else(|| io::ErrorKind::NotFound.into())
        .and_then(|path| OpenOptions::new().write(true).open(path))
        .map_err(failed("anything"))?;
    copy(&image.kernel, kernel, &disk, frame.kernel().start).map_err(failed("the kernel"))?;
    if let (Some(initrd), Some(at)) = (&image.initrd, frame.initramfs()) {
        copy(initrd, at.end - at.start, &disk, at.start)
            .map_err(failed("the initial file system"))?;
    }
    // What comes before must be there for whoever sees this.
    disk.sync_all()
        .and_then(|()| disk.write_all_at(&frame.to_block(), 0))
        .and_then(|()| disk.sync_all())
        .map_err(failed("the block that describes the kernel"))
}

/// Copies a file of so many bytes to a place on the disk, up to the end of its last block.
fn copy(from: &File, bytes: u64, disk: &File, at: u64) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    let mut done = 0;
    while done < bytes {
        let wanted = usize::try_from(bytes - done).map_or(CHUNK, |left| left.min(CHUNK));
        let Some((chunk, _)) = buffer.split_at_mut_checked(wanted.next_multiple_of(BLOCK)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let (contents, padding) = chunk.split_at_mut(wanted);
        from.read_exact_at(contents, done)?;
        padding.fill(0);
        // Whole blocks: part of one would be read before it is written.
        disk.write_all_at(chunk, at + done)?;
        done += wanted as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_copied_in_whole_blocks() {
        let path = |name: &str| std::env::temp_dir().join(format!("{}-{name}", std::process::id()));
        let (from, to) = (path("from"), path("to"));
        let contents: Vec<u8> = (0..CHUNK + 5000).map(|i| (i % 251) as u8).collect();
        std::fs::write(&from, &contents).unwrap();
        std::fs::write(&to, vec![7; CHUNK + 5 * BLOCK]).unwrap();
        let disk = OpenOptions::new().write(true).open(&to).unwrap();
        let source = File::open(&from).unwrap();
        copy(&source, contents.len() as u64, &disk, BLOCK as u64).unwrap();
        let written = std::fs::read(&to).unwrap();
        let (start, rest) = written.split_at(BLOCK);
        let (copied, rest) = rest.split_at(contents.len());
        let (padding, rest) = rest.split_at(2 * BLOCK - 5000);
        assert!(start.iter().chain(rest).all(|byte| *byte == 7));
        assert!(copied == contents && padding.iter().all(|byte| *byte == 0));
        assert!(
            copy(&source, u64::MAX, &disk, 0).is_err(),
            "the file is shorter"
        );
        for path in [from, to] {
            std::fs::remove_file(path).unwrap();
        }
    }
}
