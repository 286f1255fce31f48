//! The shared directory: requests of the client, carried out on the host.
//!
//! `fuse-backend-rs` has its own file system for this (`PassthroughFs`). It is not used, since it
//! opens its root by a path whenever a client starts, keeps an entry for every object that was ever
//! looked up, does not report mounts as mounts, and creates a client's objects with the groups of
//! the host's process.

mod acl;
mod attributes;
mod credentials;
mod directory;
mod ids;
mod listing;
mod open;
mod operations;
mod table;
mod xattr;

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fuse_backend_rs::abi::fuse_abi::ATTR_SUBMOUNT;
use fuse_backend_rs::api::filesystem::{Context, Entry};
use rustix::fs::{CWD, FileType, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};
use rustix::path::DecInt;

use crate::descriptors::Quota;
use crate::virtio::Count;
use attributes::{Attributes, Contents};
use credentials::{CredentialGuard, UmaskGuard};
pub use ids::IdMap;
use table::{Handle, Object, Table};

/// How long the client may keep names and attributes: changes by the host become visible within
/// this time.
const CACHE_TIMEOUT: Duration = Duration::from_millis(500);

/// How many objects are checked for their names in one call: it takes some milliseconds.
const LOOK: usize = 4096;

/// Opens an object for its attributes, and for operations by its descriptor.
const PATH_ONLY: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Flags of `open(2)` that the client may set.
const CLIENT_FLAGS: OFlags = OFlags::ACCMODE
    .union(OFlags::APPEND)
    .union(OFlags::TRUNC)
    .union(OFlags::DSYNC)
    .union(OFlags::SYNC);

/// Counters that other threads may read while the tree is served.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) read_bytes: Count,
    pub(super) written_bytes: Count,
    /// The current numbers.
    pub(super) objects: AtomicU64,
    pub(super) handles: AtomicU64,
}

/// Whether the client may change anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    ReadOnly,
    ReadWrite,
    /// It may change what is mounted below the root; names in the root's own mount are only the
    /// host's.
    BelowMounts,
}

/// Opens `/proc/self/fd`, as a separate mount if the process may create one: so an attacker who
/// takes over the serving thread cannot go up from there to the host's files.
fn proc_fds() -> io::Result<OwnedFd> {
    const PATH: &CStr = c"/proc/self/fd";
    let own = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    match open_tree(CWD, PATH, own) {
        Err(Errno::PERM | Errno::NOSYS) => {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            Ok(rustix::fs::open(PATH, flags, Mode::empty())?)
        }
        opened => Ok(opened?),
    }
}

/// What serving directories takes of this process, besides the directories: its open files by their
/// numbers, and whether it may act as the guest's users. A process that builds devices in a jail
/// opens it before.
#[derive(Debug, Clone)]
pub struct FsProcess {
    proc_fds: Arc<OwnedFd>,
    switch_users: bool,
}

impl FsProcess {
    /// Opens it.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn open() -> io::Result<Self> {
        Ok(Self {
            proc_fds: Arc::new(proc_fds()?),
            switch_users: credentials::may_switch(),
        })
    }
}

/// A directory of the host, and the objects and handles that the client has.
#[derive(Debug)]
pub(super) struct Tree {
    /// `/proc/self/fd`, used to reopen `O_PATH` descriptors, which do not permit anything else.
    proc_fds: Arc<OwnedFd>,
    table: Mutex<Table>,
    access: Access,
    /// The mount that the root is in, which its descriptor keeps mounted.
    root_mount: u64,
    /// Objects are created as the guest's users.
    switch_users: bool,
    /// Their ids on the host; `None` if each user has the same id.
    ids: Option<IdMap>,
    counters: Arc<Counters>,
    /// The error of the last list of a directory, 0 for none: [`Self::take_list_error`].
    list_error: AtomicI32,
    /// The client's id of the supplementary group for what the next request makes; [`u32::MAX`] for
    /// none.
    making_group: AtomicU32,
    /// The next request that sets an access control list clears the set-group-ID bit.
    clears_group_bit: AtomicBool,
}

impl Tree {
    /// As [`Self::served_by`], by this process.
    #[cfg(test)]
    pub(super) fn new(
        root: &OwnedFd,
        access: Access,
        quota: Quota,
        ids: Option<IdMap>,
    ) -> io::Result<Self> {
        Self::served_by(&FsProcess::open()?, root, access, quota, ids)
    }

    /// Serves `root`, with at most `quota` objects and handles open.
    pub(super) fn served_by(
        process: &FsProcess,
        root: &OwnedFd,
        access: Access,
        quota: Quota,
        ids: Option<IdMap>,
    ) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = openat(root, c".", flags, Mode::empty())?;
        let attributes = Attributes::of(&fd)?;
        let root = Object {
            id: attributes.id(),
            kind: attributes.kind(),
            contents: Contents::of(&fd),
            fd,
        };
        Ok(Self {
            proc_fds: Arc::clone(&process.proc_fds),
            root_mount: root.id.mount,
            table: Mutex::new(Table::new(root, quota)),
            access,
            switch_users: process.switch_users,
            ids,
            counters: Arc::default(),
            list_error: AtomicI32::new(0),
            making_group: AtomicU32::new(u32::MAX),
            clears_group_bit: AtomicBool::new(false),
        })
    }

    /// Keeps the error of a list for [`Self::take_list_error`].
    fn keep_list_error(&self, listed: io::Result<()>) -> io::Result<()> {
        let error = listed.err();
        let error = error.map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO));
        self.list_error.store(error, Ordering::Relaxed);
        Ok(())
    }

    /// Takes the error of the list that was asked for last. `readdir` and `readdirplus` do not
    /// return errors, since `fuse-backend-rs` would log each.
    pub(super) fn take_list_error(&self) -> Option<Errno> {
        let error = self.list_error.swap(0, Ordering::Relaxed);
        (error != 0).then(|| Errno::from_raw_os_error(error))
    }

    /// Sets the supplementary group that the user of the next request makes something with.
    pub(super) fn make_with_group(&self, group: Option<u32>) {
        self.making_group
            .store(group.unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// Sets whether the access control list of the next request takes the set-group-ID bit away.
    pub(super) fn clear_group_bit(&self, clear: bool) {
        self.clears_group_bit.store(clear, Ordering::Relaxed);
    }

    fn take_clearing_of_group_bit(&self) -> bool {
        self.clears_group_bit.swap(false, Ordering::Relaxed)
    }

    pub(super) fn counters(&self) -> Arc<Counters> {
        self.counters.clone()
    }

    /// Prepares the thread that will serve; must be called on it first.
    pub(super) fn prepare_thread(&self) -> io::Result<()> {
        credentials::prepare_thread(self.switch_users)
    }

    /// Closes everything when the client is gone.
    pub(super) fn forget_all(&self) {
        self.with_table(Table::clear);
    }

    /// Returns the number that the next object or handle will get.
    pub(super) fn next_number(&self) -> u64 {
        self.table().next_number()
    }

    /// Starts numbers at `next`, since those before were assigned by the saved device; `false` if
    /// that is not possible.
    pub(super) fn begin_numbers_at(&self, next: u64) -> bool {
        self.table().begin_numbers_at(next)
    }

    /// Checks some of the objects that the client knows, different ones each time, and counts those
    /// that the host has removed and only keeps for the client (see [`Table::nameless`]).
    pub(super) fn nameless(&self) -> usize {
        let has_name =
            |object: &Object| !Attributes::of(&object.fd).is_ok_and(|about| about.names() == 0);
        self.table().nameless(LOOK, has_name)
    }

    /// Whether the client knows so many objects that it should forget those that it does not use.
    fn has_many(&self) -> bool {
        self.table().has_many()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the table, and publishes its size.
    fn with_table<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        let mut table = self.table();
        let result = change(&mut table);
        let Counters {
            objects, handles, ..
        } = &*self.counters;
        objects.store(table.objects() as u64, Ordering::Relaxed);
        handles.store(table.handles() as u64, Ordering::Relaxed);
        result
    }

    fn object(&self, number: u64) -> io::Result<Arc<Object>> {
        self.table().object(number)
    }

    fn handle(&self, handle: u64, object: u64) -> io::Result<Arc<Handle>> {
        self.table().handle(handle, object)
    }

    /// Checks whether the client may change an object, or what is in a directory.
    fn check_writable(&self, object: &Object) -> io::Result<()> {
        match self.access {
            Access::ReadWrite => Ok(()),
            Access::BelowMounts if object.id.mount != self.root_mount => Ok(()),
            Access::BelowMounts | Access::ReadOnly => Err(Errno::ROFS.into()),
        }
    }

    fn acting(&self, context: &Context, group: Option<u32>) -> io::Result<CredentialGuard> {
        let (uid, gid) = (self.host_id(context.uid)?, self.host_id(context.gid)?);
        CredentialGuard::as_user(self.switch_users, uid, gid, group)
    }

    /// Returns the host's id for one of the client.
    fn host_id(&self, id: u32) -> io::Result<u32> {
        let Some(ids) = self.ids else { return Ok(id) };
        // The same error as the kernel's for a mount with mapped ids.
        Ok(ids.to_host(id).ok_or(Errno::OVERFLOW)?)
    }

    /// Returns attributes in the client's form.
    fn stat(&self, attributes: &Attributes) -> libc::stat64 {
        let mut stat = attributes.stat();
        if let Some(ids) = self.ids {
            stat.st_uid = ids.to_guest(stat.st_uid);
            stat.st_gid = ids.to_guest(stat.st_gid);
        }
        stat
    }

    /// Acts as the user to create something in a directory, with the user's umask: it does not
    /// count where the directory has a default access control list.
    fn making(&self, context: &Context, umask: u32) -> io::Result<(CredentialGuard, UmaskGuard)> {
        // One that is not mapped is nobody's.
        let group = match self.making_group.load(Ordering::Relaxed) {
            u32::MAX => None,
            group => self.host_id(group).ok(),
        };
        let acting = self.acting(context, group)?.trusting_the_guest()?;
        Ok((acting, UmaskGuard::new(umask)))
    }

    /// Retries as the guest's user what the host has denied to this process: for a file server, the
    /// root user of this host may be `nobody` (`root_squash` of NFS).
    fn as_either<T>(
        &self,
        context: &Context,
        mut act: impl FnMut() -> io::Result<T>,
    ) -> io::Result<T> {
        match act() {
            Err(error)
                if self.switch_users
                    && context.uid != 0
                    && error.kind() == io::ErrorKind::PermissionDenied =>
            {
                // If the user may not either, the first error is returned.
                let Ok(_acting) = self.acting(context, None) else {
                    return Err(error);
                };
                act().map_err(|_| error)
            }
            done => done,
        }
    }

    /// Opens what `name` in `parent` is, with `O_PATH`.
    fn found(
        &self,
        context: &Context,
        parent: &Object,
        name: &CStr,
    ) -> io::Result<(OwnedFd, Attributes)> {
        let name = component(name)?;
        let fd = self.as_either(context, || {
            Ok(openat(&parent.fd, name, PATH_ONLY, Mode::empty())?)
        })?;
        let attributes = Attributes::of(&fd)?;
        Ok((fd, attributes))
    }

    /// Finds `name` in `parent` and returns its entry for the client.
    fn entry(&self, context: &Context, parent: &Object, name: &CStr) -> io::Result<Entry> {
        let (fd, attributes) = self.found(context, parent, name)?;
        if attributes.is_automount() {
            // To open it as a directory has it mounted, which `O_PATH` alone has not.
            let mounted = self.as_either(context, || {
                let flags = PATH_ONLY | OFlags::DIRECTORY;
                Ok(openat(&parent.fd, name, flags, Mode::empty())?)
            });
            // Where that fails it is as empty as it is.
            if let Ok(mounted) = mounted {
                let attributes = Attributes::of(&mounted)?;
                return self.entry_of(parent, mounted, &attributes);
            }
        }
        self.entry_of(parent, fd, &attributes)
    }

    /// Tells the client of an object in `parent` that was opened with `O_PATH`.
    fn entry_of(&self, parent: &Object, fd: OwnedFd, attributes: &Attributes) -> io::Result<Entry> {
        let (id, kind) = (attributes.id(), attributes.kind());
        // All objects of a mount are of one file system, and the parent's is still mounted.
        let crosses = id.mount != parent.id.mount;
        let object = Object {
            id,
            kind,
            contents: if crosses {
                Contents::of(&fd)
            } else {
                parent.contents
            },
            fd,
        };
        let inode = self.with_table(|table| table.look_up(object))?;
        let is_submount = kind == FileType::Directory && id.is_in_other_fs_than(&parent.id);
        // Linux drops a name that it may not keep once nobody uses it, and forgets its object
        // (`fuse_dentry_delete`). It keeps what is open, and what is mounted. As long as it keeps
        // one of a mount below a volume, the host cannot unmount that.
        let is_below_volume = crosses && parent.id.mount != self.root_mount;
        let keep_name = match is_below_volume || self.has_many() && !crosses {
            true => Duration::ZERO,
            false => CACHE_TIMEOUT,
        };
        Ok(Entry {
            inode,
            generation: 0,
            attr: self.stat(attributes),
            attr_flags: if is_submount { ATTR_SUBMOUNT } else { 0 },
            attr_timeout: CACHE_TIMEOUT,
            entry_timeout: keep_name,
        })
    }

    /// Reopens an object for more than its path. Only regular files and directories are allowed:
    /// opening anything else would act on a device, a pipe or a socket of the host
    /// (CVE-2020-35517).
    fn reopen(&self, object: &Object, flags: OFlags) -> io::Result<File> {
        if !matches!(object.kind, FileType::RegularFile | FileType::Directory) {
            return Err(Errno::NXIO.into());
        }
        let name = DecInt::from_fd(&object.fd);
        let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
        Ok(openat(&self.proc_fds, name, flags, Mode::empty())?.into())
    }

    /// Opens a regular file with the client's flags.
    fn open_file(&self, object: &Object, flags: u32) -> io::Result<File> {
        let mut flags = self.client_flags(object, flags)?;
        // Reads of some files block until something happens (`trace_pipe`): all other requests
        // would wait for that. For writes the flag would change the meaning of some files
        // (`memory.max`).
        let reads = flags & OFlags::ACCMODE != OFlags::WRONLY;
        let generated = object.contents == Contents::Generated;
        flags.set(OFlags::NONBLOCK, generated && reads);
        if object.kind == FileType::Directory {
            return Err(Errno::ISDIR.into());
        }
        let file = self.reopen(object, flags)?;
        if flags.contains(OFlags::TRUNC) {
            xattr::drop_capability(&file);
        }
        Ok(file)
    }

    /// Returns those of the client's flags that it may set, if it may use them on an object, or on
    /// what it creates in one.
    fn client_flags(&self, object: &Object, flags: u32) -> io::Result<OFlags> {
        let flags = OFlags::from_bits_retain(flags) & CLIENT_FLAGS;
        let access = flags & OFlags::ACCMODE;
        if access == OFlags::ACCMODE {
            return Err(Errno::INVAL.into());
        }
        if access != OFlags::RDONLY || flags.contains(OFlags::TRUNC) {
            self.check_writable(object)?;
        }
        Ok(flags)
    }

    /// Stores an open file as a handle of the client.
    fn keep(&self, object: u64, file: File, writer: u32) -> io::Result<u64> {
        self.with_table(|table| table.open(object, file, writer))
    }

    /// Returns as which user the thread writes to a file that a user opens: the client's id, not
    /// the host's, which would be root's for the root of a range of ids. Later writes from the
    /// client's cache do not carry a user. File systems that are not local may check the writer.
    fn writer(&self, context: &Context, object: &Object) -> u32 {
        match self.switch_users && object.contents == Contents::Local {
            true => context.uid,
            false => 0,
        }
    }

    /// Returns the object of an open file, opened with `O_PATH`.
    fn path_of(&self, file: &File) -> io::Result<OwnedFd> {
        let name = DecInt::from_fd(file.as_fd());
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        Ok(openat(&self.proc_fds, name, flags, Mode::empty())?)
    }
}

/// A name within a directory: neither empty, nor a path, nor `.` or `..`.
fn component(name: &CStr) -> io::Result<&CStr> {
    let bytes = name.to_bytes();
    if bytes.is_empty() || bytes == b"." || bytes == b".." || bytes.contains(&b'/') {
        return Err(Errno::INVAL.into());
    }
    Ok(name)
}

/// The file of a handle.
fn file(handle: &Handle) -> MutexGuard<'_, File> {
    handle.file.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
