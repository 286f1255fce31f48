//! Reading directories.

use std::collections::VecDeque;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::sync::PoisonError;

use fuse_backend_rs::api::filesystem::{Context, DirEntry, Entry};
use rustix::fs::{RawDir, SeekFrom, seek};
use rustix::io::Errno;

use super::attributes::Contents;
use super::{Tree, file};

/// Bytes of entries taken from the kernel at once, at most.
const MAX_PIECE: usize = 16 << 10;

/// Bytes of entries taken at least: room for a name of 1,024 bytes, the longest of Linux's clients.
const MIN_PIECE: usize = 1024 + 64;

/// How many times its bytes on the host an entry takes of a reply that tells of objects, or more,
/// unless its name is long.
const ENTRY_PLUS: usize = 4;

/// Maximum bytes of entries per request; the client asks again.
pub(super) const MAX_REPLY: usize = 256 << 10;

/// The receiver of entries; it returns the number of bytes that were used, or 0 if it is full.
pub(super) type Add<'a> = dyn FnMut(DirEntry<'_>, Option<Entry>) -> io::Result<usize> + 'a;

/// An entry that the kernel has returned.
#[derive(Debug)]
struct Listed {
    ino: u64,
    /// The place after it.
    next: u64,
    kind: u32,
    name: CString,
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
    fn seek(
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

    /// Reads more entries; false if there are none.
    fn fill(&mut self, directory: &File, buffer: &mut Buffer) -> io::Result<bool> {
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

/// Room for entries from the kernel.
type Buffer = [MaybeUninit<u8>];

impl Tree {
    /// Passes on entries from `offset` on, for which the client has `size` bytes. With `look_up` it
    /// is told of each object.
    pub(super) fn entries(
        &self,
        context: &Context,
        (object, handle): (u64, u64),
        (size, offset): (u32, u64),
        look_up: bool,
        add: &mut Add<'_>,
    ) -> io::Result<()> {
        let parent = self.object(object)?;
        let handle = self.handle(handle, object)?;
        let directory = file(&handle);
        let listing = &mut *handle
            .listing
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let buffer = &mut *vec![MaybeUninit::uninit(); piece(size, look_up)];
        listing.seek(&directory, parent.contents, offset, buffer)?;
        let mut used = 0usize;
        // Three quarters of what fits.
        let room = (size as usize).min(MAX_REPLY);
        let enough = room.saturating_sub(room / 4);
        while used < MAX_REPLY {
            if listing.rest.is_empty() {
                // Most of the next ones would not fit.
                if used > enough {
                    break;
                }
                match listing.fill(&directory, buffer) {
                    Ok(true) => {}
                    Ok(false) => break,
                    // The client asks for it again, and gets the error then.
                    Err(_) if used > 0 => break,
                    Err(error) => return Err(error),
                }
            }
            let Some(entry) = listing.rest.front() else {
                break;
            };
            // With many objects, the client would immediately forget the looked up ones.
            let tells = look_up && !self.has_many();
            let entry_of_name = tells
                .then(|| self.told(context, &parent, &entry.name))
                .flatten();
            let number = entry_of_name.map(|entry| entry.inode);
            let ino = match entry.name.as_bytes() {
                // What lies above the root is not visible to the client.
                b"." | b".." => parent.id.inode,
                _ => entry.ino,
            };
            let listed = DirEntry {
                ino,
                offset: entry.next,
                type_: entry.kind,
                name: entry.name.as_bytes(),
            };
            let added = add(listed, entry_of_name);
            if !matches!(added, Ok(1..))
                && let Some(number) = number
            {
                self.with_table(|table| table.forget(number, 1));
            }
            match added {
                Ok(0) => break,
                Ok(len) => used = used.saturating_add(len),
                // Earlier entries are in the reply already.
                Err(_) if used > 0 => break,
                Err(error) => return Err(error),
            }
            listing.place = entry.next;
            listing.rest.pop_front();
        }
        Ok(())
    }

    /// Looks up the object of a name; `None` if it was removed or cannot be accessed: then only the
    /// name is listed. So is one where looking it up would have something mounted.
    fn told(&self, context: &Context, parent: &super::Object, name: &CStr) -> Option<Entry> {
        let (fd, attributes) = self.found(context, parent, name).ok()?;
        if attributes.is_automount() {
            return None;
        }
        self.entry_of(parent, fd, &attributes).ok()
    }
}

/// Bytes to take from the kernel at once, for a client that has `size`: what does not fit into its
/// reply would be read once more for the next one.
fn piece(size: u32, look_up: bool) -> usize {
    let size = size as usize;
    let fitting = if look_up { size / ENTRY_PLUS } else { size };
    fitting.clamp(MIN_PIECE, MAX_PIECE)
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
