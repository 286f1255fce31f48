//! Entries of an open directory, as the kernel returns them.

use std::collections::VecDeque;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;

use rustix::fs::{RawDir, SeekFrom, seek};
use rustix::io::Errno;

use super::attributes::Contents;

/// Room for entries from the kernel.
type Buffer = [MaybeUninit<u8>];

/// An entry that the kernel has returned.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) ino: u64,
    /// The place after it.
    pub(super) next: u64,
    pub(super) kind: u32,
    pub(super) name: CString,
}

/// What was read of an open directory and did not fit into the last reply. Reading goes on from
/// there without a seek, if the client does: each seek makes btrfs list names again that were
/// renamed since, so that who renames what he lists would never end.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// The place of the first of `rest`; without one, where the kernel reads on.
    place: u64,
    rest: VecDeque<Listed>,
}

impl Listing {
    /// Goes to a place that the client was told.
    pub(super) fn seek(
        &mut self,
        directory: &File,
        contents: Contents,
        place: u64,
        buffer: &mut Buffer,
    ) -> io::Result<()> {
        if place == self.place {
            return Ok(());
        }
        match seek(directory, SeekFrom::Start(place)) {
            // Places of some file servers have 64 bits, and as a file's offset they are negative.
            Err(Errno::INVAL) if contents == Contents::Remote && i64::try_from(place).is_err() => {
                seek(directory, SeekFrom::Start(0))?;
                self.rest.clear();
                self.place = 0;
                while self.place != place {
                    if self.rest.is_empty() && !self.fill(directory, buffer)? {
                        return Err(Errno::INVAL.into());
                    }
                    self.place = self.rest.pop_front().map_or(place, |listed| listed.next);
                }
            }
            done => drop(done?),
        }
        // Kept if the seek failed: the kernel would not return them again.
        self.rest.clear();
        self.place = place;
        Ok(())
    }

    /// Returns the next entry that was read.
    pub(super) fn first(&self) -> Option<&Listed> {
        self.rest.front()
    }

    /// Goes on behind the first entry.
    pub(super) fn pass_first(&mut self) {
        if let Some(listed) = self.rest.pop_front() {
            self.place = listed.next;
        }
    }

    /// Reads more entries; false if there are none.
    pub(super) fn fill(&mut self, directory: &File, buffer: &mut Buffer) -> io::Result<bool> {
        let mut entries = RawDir::new(directory, buffer);
        while let Some(entry) = entries.next() {
            let entry = entry?;
            self.rest.push_back(Listed {
                ino: entry.ino(),
                next: entry.next_entry_cookie(),
                kind: kind(entry.file_type()),
                name: entry.file_name().to_owned(),
            });
            if entries.is_buffer_empty() {
                break;
            }
        }
        Ok(!self.rest.is_empty())
    }
}

/// As in `struct dirent` (`DT_*`).
fn kind(kind: rustix::fs::FileType) -> u32 {
    use rustix::fs::FileType as T;
    let kind = match kind {
        T::RegularFile => libc::DT_REG,
        T::Directory => libc::DT_DIR,
        T::Symlink => libc::DT_LNK,
        T::Fifo => libc::DT_FIFO,
        T::Socket => libc::DT_SOCK,
        T::CharacterDevice => libc::DT_CHR,
        T::BlockDevice => libc::DT_BLK,
        T::Unknown => libc::DT_UNKNOWN,
    };
    kind.into()
}
