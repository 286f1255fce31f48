//! Reading directories.

use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::sync::PoisonError;

use fuse_backend_rs::api::filesystem::{Context, DirEntry, Entry};

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
            if listing.first().is_none() {
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
            let Some(entry) = listing.first() else {
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
            listing.pass_first();
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
