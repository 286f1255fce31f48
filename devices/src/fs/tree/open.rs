//! Operations on open files that need more than one system call.

use std::fs::File;
use std::io;
use std::os::fd::IntoRawFd as _;

use fuse_backend_rs::api::filesystem::OpenOptions;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::Object;
use super::attributes::Contents;

/// Writes data from the client's cache at its offset in the file, even if the file was opened to
/// append: Linux ignores the offset of such a write (`pwrite(2)`, "BUGS").
pub(super) fn in_place<T>(
    file: &mut File,
    write: impl FnOnce(&mut File) -> io::Result<T>,
) -> io::Result<T> {
    let flags = fcntl_getfl(&*file)?;
    if !flags.contains(OFlags::APPEND) {
        return write(file);
    }
    fcntl_setfl(&*file, flags.difference(OFlags::APPEND))?;
    let written = write(file);
    fcntl_setfl(&*file, flags)?;
    written
}

/// Closes a file, and returns the kernel's result.
#[allow(unsafe_code)]
pub(super) fn close_with_result(file: File) -> io::Result<()> {
    // SAFETY: the descriptor is owned, and not used any more.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// `FOPEN_NOFLUSH` of linux/fuse.h: closing the file sends no request.
const NO_FLUSH: u32 = 1 << 5;

/// Returns how the client treats an open file. A file that is generated when read has a size of 0,
/// at which reads through the client's cache would end.
#[allow(unsafe_code)]
pub(super) fn options(file: &Object) -> OpenOptions {
    let bits = match file.contents {
        Contents::Local => NO_FLUSH,
        Contents::Generated => OpenOptions::DIRECT_IO.bits() | NO_FLUSH,
        Contents::Remote => 0,
    };
    // SAFETY: any bits are valid there; `fuse-backend-rs` passes them on unchanged.
    unsafe { OpenOptions::from_bits_unchecked(bits) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::os::unix::fs::FileExt as _;

    #[test]
    fn a_file_appends_again_once_something_was_written_in_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "old text").unwrap();
        let mut file = File::options().append(true).open(&path).unwrap();
        in_place(&mut file, |file| file.write_at(b"new", 0)).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new text");
        let failed = in_place(&mut file, |_| Err::<(), _>(io::Error::other("full")));
        failed.unwrap_err();
        file.write_all(b"s").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new texts");
    }

    #[test]
    fn files_whose_end_may_fail_are_told_apart() {
        let kinds = ["/proc/version", "/dev/shm"].map(|path| File::open(path).unwrap());
        assert_eq!(
            kinds.map(Contents::of),
            [Contents::Generated, Contents::Local]
        );
        // Not a local disk: a file system that is not on any list.
        let (pipe, _) = io::pipe().unwrap();
        assert_eq!(Contents::of(&pipe), Contents::Remote);
        let object = |contents| Object {
            id: super::super::table::Id {
                device: (0, 0),
                inode: 1,
                mount: 1,
            },
            kind: rustix::fs::FileType::RegularFile,
            contents,
            fd: File::open("/").unwrap().into(),
        };
        let bits = |contents| options(&object(contents)).bits();
        assert_eq!(bits(Contents::Local), NO_FLUSH);
        assert_eq!(bits(Contents::Remote), 0);
        assert_eq!(bits(Contents::Generated), NO_FLUSH | 1);
        close_with_result(File::open("/").unwrap()).unwrap();
    }
}
