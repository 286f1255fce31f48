//! Operations on open files that need more than one system call.

use std::fs::File;
use std::io;
use std::os::fd::IntoRawFd as _;

use fuse_backend_rs::api::filesystem::OpenOptions;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::Object;
use super::attributes::Contents;

/// Whether the next write goes to the file's end rather than to its place: Linux ignores the place
/// where a file appends (`pwrite(2)`, "BUGS"). A program may change that of an open file
/// (`F_SETFL`), of which the client tells with each write; what its cache wrote back has a place.
pub(super) fn set_appending(file: &File, appends: bool) -> io::Result<()> {
    let mut flags = fcntl_getfl(file)?;
    if flags.contains(OFlags::APPEND) != appends {
        flags.set(OFlags::APPEND, appends);
        fcntl_setfl(file, flags)?;
    }
    Ok(())
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
            id: super::super::attributes::Id {
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
