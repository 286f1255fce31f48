//! Objects and handles that the client refers to by numbers.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::ops::Bound;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use rustix::fs::FileType;
use rustix::io::Errno;

use super::attributes::{Contents, Id};
use super::listing::Listing;
use crate::descriptors::{Permit, Quota};

/// The root's number (`FUSE_ROOT_ID`).
pub(super) const ROOT: u64 = 1;

/// With more objects than this, or than half of the quota if that is less, the client should not
/// cache more names. For each, the host's kernel keeps a file, a name and an inode, nearly 2 KiB in
/// all, which it cannot reclaim and which count as memory of this process.
const MAX_CACHED_OBJECTS: usize = 16_384;

/// An object of the host: a file, a directory, a link or something else that is never opened.
#[derive(Debug)]
pub(super) struct Object {
    pub(super) id: Id,
    pub(super) kind: FileType,
    /// The kind of its file system.
    pub(super) contents: Contents,
    /// Opened with `O_PATH`.
    pub(super) fd: OwnedFd,
}

/// An open file or directory.
#[derive(Debug)]
pub(super) struct Handle {
    object: u64,
    pub(super) file: Mutex<File>,
    /// The user that the thread writes to it as.
    pub(super) writer: u32,
    /// Where the listing of a directory is.
    pub(super) listing: Mutex<Listing>,
    _permit: Permit,
}

#[derive(Debug)]
struct Known {
    object: Arc<Object>,
    /// How often the client looked it up, minus how often it forgot it.
    lookups: u64,
    handles: u64,
    /// How often it was found to have no name.
    nameless: u64,
    _permit: Permit,
}

/// Both tables, which together are limited by a quota: each entry costs a descriptor.
#[derive(Debug)]
pub(super) struct Table {
    root: Arc<Object>,
    objects: BTreeMap<u64, Known>,
    by_id: HashMap<Id, u64>,
    handles: HashMap<u64, Arc<Handle>>,
    /// Numbers are never reused: the client may keep old ones for any time.
    next: u64,
    /// The last one that [`Self::nameless`] has checked.
    looked_at: u64,
    quota: Quota,
}

impl Table {
    pub(super) fn new(root: Object, quota: Quota) -> Self {
        Self {
            root: Arc::new(root),
            objects: BTreeMap::new(),
            by_id: HashMap::new(),
            handles: HashMap::new(),
            next: ROOT.saturating_add(1),
            looked_at: ROOT,
            quota,
        }
    }

    /// Removes everything, when a client starts.
    pub(super) fn clear(&mut self) {
        self.objects.clear();
        self.by_id.clear();
        self.handles.clear();
    }

    pub(super) fn objects(&self) -> usize {
        self.objects.len()
    }

    /// Whether the client knows so many objects that it should forget those that it does not use.
    pub(super) fn has_many(&self) -> bool {
        self.objects.len() > MAX_CACHED_OBJECTS.min(self.quota.most() / 2)
    }

    pub(super) fn handles(&self) -> usize {
        self.handles.len()
    }

    pub(super) fn object(&self, number: u64) -> io::Result<Arc<Object>> {
        if number == ROOT {
            return Ok(self.root.clone());
        }
        match self.objects.get(&number) {
            Some(known) => Ok(known.object.clone()),
            None => Err(Errno::STALE.into()),
        }
    }

    /// Counts a lookup of an object by the client: finds or assigns its number.
    pub(super) fn look_up(&mut self, object: Object) -> io::Result<u64> {
        let id = object.id;
        if id == self.root.id {
            return Ok(ROOT);
        }
        if let Some(number) = self.by_id.get(&id)
            && let Some(known) = self.objects.get_mut(number)
            && known.object.kind == object.kind
        {
            known.lookups = known.lookups.saturating_add(1);
            // The one that is known may be gone on its server (`ESTALE`).
            if object.contents == Contents::Remote {
                known.object = Arc::new(object);
            }
            return Ok(*number);
        }
        let permit = self.permit()?;
        let number = self.number();
        let known = Known {
            object: Arc::new(object),
            lookups: 1,
            handles: 0,
            nameless: 0,
            _permit: permit,
        };
        self.objects.insert(number, known);
        self.by_id.insert(id, number);
        Ok(number)
    }

    /// Forgets `count` of the client's lookups; at most all of them.
    pub(super) fn forget(&mut self, number: u64, count: u64) {
        let Some(known) = self.objects.get_mut(&number) else {
            return;
        };
        known.lookups = known.lookups.saturating_sub(count);
        if known.lookups == 0
            && let Some(known) = self.objects.remove(&number)
            // It may be another object's by now.
            && let Entry::Occupied(owner) = self.by_id.entry(known.object.id)
            && *owner.get() == number
        {
            owner.remove();
        }
    }

    pub(super) fn open(&mut self, object: u64, file: File, writer: u32) -> io::Result<u64> {
        let handle = Handle {
            object,
            file: Mutex::new(file),
            writer,
            listing: Mutex::default(),
            _permit: self.permit()?,
        };
        if let Some(known) = self.objects.get_mut(&object) {
            known.handles = known.handles.saturating_add(1);
        }
        let number = self.number();
        self.handles.insert(number, Arc::new(handle));
        Ok(number)
    }

    /// Fails if the quota does not have `most` more entries. To be asked before a system call whose
    /// effect would stay if its result cannot be kept.
    pub(super) fn check_room(&self, most: usize) -> io::Result<()> {
        match self.quota.has_room(most) {
            true => Ok(()),
            false => Err(Errno::NFILE.into()),
        }
    }

    /// Returns a handle if it belongs to that object.
    pub(super) fn handle(&self, handle: u64, object: u64) -> io::Result<Arc<Handle>> {
        match self.handles.get(&handle) {
            Some(found) if found.object == object => Ok(found.clone()),
            _ => Err(Errno::BADF.into()),
        }
    }

    pub(super) fn close(&mut self, handle: u64, object: u64) -> io::Result<()> {
        self.handle(handle, object)?;
        self.handles.remove(&handle);
        if let Some(known) = self.objects.get_mut(&object) {
            known.handles = known.handles.saturating_sub(1);
        }
        Ok(())
    }

    /// Checks the next `most` objects, and counts those that are files of this host's disks or
    /// memory, have no name there any more and are not open: they are kept only because the client
    /// remembers a name. One that stays so is counted when it is found for the 1st, 2nd, 4th, 8th
    /// time and so on: the client may have a use for it that is not visible here.
    pub(super) fn nameless(&mut self, most: usize, has_name: impl Fn(&Object) -> bool) -> usize {
        let after = (Bound::Excluded(self.looked_at), Bound::Unbounded);
        let mut found = 0usize;
        let mut last = None;
        let mut looked = 0usize;
        for (number, known) in self.objects.range_mut(after).take(most) {
            last = Some(*number);
            looked = looked.saturating_add(1);
            let is_kept = known.handles == 0 && known.object.contents == Contents::Local;
            if !is_kept || has_name(&known.object) {
                continue;
            }
            known.nameless = known.nameless.saturating_add(1);
            if known.nameless.is_power_of_two() {
                found = found.saturating_add(1);
            }
        }
        // Starts from the first again, once all were checked.
        self.looked_at = last.filter(|_| looked == most).unwrap_or(ROOT);
        found
    }

    pub(super) fn next_number(&self) -> u64 {
        self.next
    }

    pub(super) fn begin_numbers_at(&mut self, next: u64) -> bool {
        let possible = (self.next..u64::MAX / 2).contains(&next);
        if possible {
            self.next = next;
        }
        possible
    }

    fn number(&mut self) -> u64 {
        let number = self.next;
        // Enough for a billion a second for 500 years.
        self.next = self.next.wrapping_add(1);
        number
    }

    fn permit(&self) -> io::Result<Permit> {
        self.quota.take().ok_or_else(|| Errno::NFILE.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fd() -> OwnedFd {
        File::open("/").unwrap().into()
    }

    fn id(inode: u64) -> Id {
        Id {
            device: (0, 1),
            inode,
            mount: 1,
        }
    }

    fn table(limit: usize) -> Table {
        let root = Object {
            id: id(0),
            kind: FileType::Directory,
            contents: Contents::Local,
            fd: fd(),
        };
        Table::new(root, Quota::own(limit))
    }

    fn object(inode: u64) -> Object {
        Object {
            id: id(inode),
            kind: FileType::RegularFile,
            contents: Contents::Local,
            fd: fd(),
        }
    }

    fn add(table: &mut Table, inode: u64) -> io::Result<u64> {
        table.look_up(object(inode))
    }

    #[test]
    fn an_object_has_one_number_until_it_is_forgotten_as_often_as_it_was_told() {
        let mut table = table(10);
        let number = add(&mut table, 5).unwrap();
        assert_eq!(add(&mut table, 5).unwrap(), number);
        assert_ne!(add(&mut table, 6).unwrap(), number);
        table.forget(number, 1);
        assert!(table.object(number).is_ok());
        table.forget(number, 1);
        assert!(table.object(number).is_err());
        assert_ne!(
            add(&mut table, 5).unwrap(),
            number,
            "numbers are never given twice"
        );
        assert_eq!(table.objects(), 2);
    }

    #[test]
    fn of_an_id_that_a_server_gave_to_another_file_the_newer_is_kept() {
        use std::os::fd::AsRawFd as _;
        let mut table = table(10);
        for contents in [Contents::Local, Contents::Generated, Contents::Remote] {
            let files = [(), ()].map(|()| Object {
                contents,
                ..object(contents as u64 + 1)
            });
            let fds = [&files[0], &files[1]].map(|file| file.fd.as_raw_fd());
            let numbers = files.map(|file| table.look_up(file).unwrap());
            assert_eq!(numbers[0], numbers[1]);
            let kept = table.object(numbers[0]).unwrap().fd.as_raw_fd();
            let newer = usize::from(contents == Contents::Remote);
            assert_eq!(kept, fds[newer], "{contents:?}");
        }
    }

    #[test]
    fn an_object_of_another_kind_is_another_one_whatever_its_id() {
        let mut table = table(10);
        let file = add(&mut table, 5).unwrap();
        let directory = Object {
            kind: FileType::Directory,
            ..object(5)
        };
        let directory = table.look_up(directory).unwrap();
        assert_ne!(directory, file);
        table.forget(file, 1);
        assert!(table.object(directory).is_ok());
        assert_eq!(table.by_id.get(&id(5)), Some(&directory));
        table.forget(directory, 1);
        assert_eq!((table.objects(), table.by_id.len()), (0, 0));
    }

    #[test]
    fn forgetting_too_much_is_forgetting_all() {
        let mut table = table(10);
        let number = add(&mut table, 5).unwrap();
        table.forget(number, u64::MAX);
        table.forget(number, u64::MAX);
        table.forget(99, 1);
        table.forget(ROOT, u64::MAX);
        assert!(table.object(ROOT).is_ok());
        assert_eq!((table.objects(), table.by_id.len()), (0, 0));
    }

    #[test]
    fn the_root_is_one_object_under_any_name() {
        let mut table = table(10);
        assert_eq!(add(&mut table, 0).unwrap(), ROOT);
        assert_eq!(table.objects(), 0);
    }

    #[test]
    fn handles_belong_to_their_object() {
        let mut table = table(10);
        let (one, two) = (add(&mut table, 1).unwrap(), add(&mut table, 2).unwrap());
        let handle = table.open(one, fd().into(), 0).unwrap();
        assert!(table.handle(handle, one).is_ok());
        assert!(table.handle(handle, two).is_err());
        assert!(table.close(handle, two).is_err());
        assert!(table.close(handle, one).is_ok());
        assert!(table.close(handle, one).is_err());
    }

    #[test]
    fn objects_without_a_name_and_a_handle_are_found_less_and_less_often() {
        let mut table = table(10);
        let gone = add(&mut table, 1).unwrap();
        add(&mut table, 2).unwrap();
        let open = add(&mut table, 3).unwrap();
        let handle = table.open(open, fd().into(), 0).unwrap();
        let looks = |table: &mut Table, most| {
            let has_name = |object: &Object| object.id.inode == 2;
            table.nameless(most, has_name)
        };
        let found: Vec<_> = (0..9).map(|_| looks(&mut table, 10)).collect();
        assert_eq!(found, [1, 1, 0, 1, 0, 0, 0, 1, 0]);
        table.close(handle, open).unwrap();
        table.forget(gone, 1);
        // One at a time: the last one is checked too, then the first again.
        assert_eq!(looks(&mut table, 1), 0);
        assert_eq!(looks(&mut table, 1), 1);
        assert_eq!(looks(&mut table, 1), 0);
        let remote = Object {
            contents: Contents::Remote,
            ..object(4)
        };
        table.look_up(remote).unwrap();
        table.forget(open, 1);
        assert_eq!((0..4).map(|_| looks(&mut table, 10)).sum::<usize>(), 0);
    }

    #[test]
    fn objects_and_handles_have_one_limit() {
        let mut table = table(3);
        let one = add(&mut table, 1).unwrap();
        let handle = table.open(one, fd().into(), 0).unwrap();
        add(&mut table, 2).unwrap();
        let full = add(&mut table, 3).unwrap_err();
        assert_eq!(full.raw_os_error(), Some(Errno::NFILE.raw_os_error()));
        assert!(table.open(one, fd().into(), 0).is_err());
        assert!(add(&mut table, 2).is_ok(), "what is known costs nothing");
        table.close(handle, one).unwrap();
        assert!(add(&mut table, 3).is_ok());
        table.clear();
        assert_eq!((table.objects(), table.handles()), (0, 0));
    }

    proptest! {
        #[test]
        fn both_tables_agree_whatever_the_client_does(
            steps in proptest::collection::vec((0u64..6, 0u64..4, any::<bool>()), 0..200),
        ) {
            let mut table = table(4);
            let mut numbers = vec![ROOT];
            for (inode, count, forget) in steps {
                if forget {
                    let at = usize::try_from(inode).unwrap() % numbers.len();
                    table.forget(numbers[at], count);
                } else if let Ok(number) = add(&mut table, inode) {
                    numbers.push(number);
                }
                prop_assert_eq!(table.by_id.len(), table.objects.len());
                prop_assert!(table.objects.len() <= 4);
                for (id, number) in &table.by_id {
                    prop_assert_eq!(table.objects[number].object.id, *id);
                    prop_assert!(table.objects[number].lookups > 0);
                }
            }
        }
    }
}
