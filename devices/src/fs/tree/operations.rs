//! One method per request of the client (decoded by `fuse-backend-rs`).
//!
//! The others are answered with `ENOSYS`, after which a client does not send them any more. `FLUSH`
//! is not needed if no data is held back that could fail when a file is closed, which saves a round
//! trip each time.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::time::Duration;

use fuse_backend_rs::abi::fuse_abi::{CreateIn, FOPEN_IN_KILL_SUIDGID, WRITE_KILL_PRIV};
use fuse_backend_rs::api::filesystem::{
    Context, DirEntry, Entry, FileSystem, FsOptions, GetxattrReply, ListxattrReply, OpenOptions,
    SetattrValid, ZeroCopyReader, ZeroCopyWriter,
};
use rustix::fs::{
    AtFlags, FallocateFlags, FileType, Gid, Mode, OFlags, RenameFlags, SeekFrom, Timespec,
    Timestamps, UTIME_NOW, UTIME_OMIT, Uid, chmodat, chownat, fallocate, fdatasync, fstatvfs,
    fsync, ftruncate, linkat, mkdirat, mknodat, openat, readlinkat, renameat_with, seek, symlinkat,
    syncfs, unlinkat, utimensat,
};
use rustix::io::Errno;
use rustix::path::DecInt;

use super::attributes::{Attributes, Contents, statvfs};
use super::credentials::{QuotaUserGuard, SuidClearGuard};
use super::open::{close_with_result, options, set_appending};
use super::{CACHE_TIMEOUT, Tree, component, file};

/// Maximum bytes of a read or a write, which a client is told when it starts. The kernel would
/// carry out gigabytes without a pause; a client that asks for more reads or writes only this much.
const MAX_DATA: usize = 1 << 20;

/// Mode bits that a client may set.
const MODE_BITS: u32 = 0o7777;

type Opened = (Option<u64>, OpenOptions);

impl FileSystem for Tree {
    type Inode = u64;
    type Handle = u64;

    /// A client starts, without any objects or handles.
    fn init(&self, _capable: FsOptions) -> io::Result<FsOptions> {
        self.forget_all();
        // Locks are handled in the guest. Data may be cached between opening and closing, and is
        // invalidated if the host has changed the file.
        Ok(FsOptions::ASYNC_READ
            | FsOptions::ASYNC_DIO
            | FsOptions::ATOMIC_O_TRUNC
            | FsOptions::AUTO_INVAL_DATA
            | FsOptions::BIG_WRITES
            // The umask is the host's to apply, since a directory's default list goes before it.
            | FsOptions::DONT_MASK
            | FsOptions::DO_READDIRPLUS
            | FsOptions::READDIRPLUS_AUTO
            | FsOptions::MAX_PAGES
            | FsOptions::PARALLEL_DIROPS
            | FsOptions::INIT_EXT
            | FsOptions::HANDLE_KILLPRIV_V2
            | FsOptions::POSIX_ACL
            | FsOptions::SUBMOUNTS)
    }

    fn destroy(&self) {
        self.forget_all();
    }

    fn lookup(&self, context: &Context, parent: u64, name: &CStr) -> io::Result<Entry> {
        match self.entry(context, &*self.object(parent)?, name) {
            // A client that creates something looks it up first, and need not do so twice.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NOENT) => Ok(Entry {
                inode: 0,
                entry_timeout: CACHE_TIMEOUT,
                ..Entry::default()
            }),
            other => other,
        }
    }

    fn forget(&self, _: &Context, inode: u64, count: u64) {
        self.with_table(|table| table.forget(inode, count));
    }

    fn batch_forget(&self, _: &Context, requests: Vec<(u64, u64)>) {
        self.with_table(|table| {
            for (inode, count) in requests {
                table.forget(inode, count);
            }
        });
    }

    fn getattr(
        &self,
        _: &Context,
        inode: u64,
        handle: Option<u64>,
    ) -> io::Result<(libc::stat64, Duration)> {
        let attributes = match handle {
            Some(handle) => Attributes::of(&*file(&*self.handle(handle, inode)?))?,
            None => Attributes::of(&self.object(inode)?.fd)?,
        };
        Ok((self.stat(&attributes), CACHE_TIMEOUT))
    }

    fn setattr(
        &self,
        context: &Context,
        inode: u64,
        attr: libc::stat64,
        handle: Option<u64>,
        valid: SetattrValid,
    ) -> io::Result<(libc::stat64, Duration)> {
        let object = self.object(inode)?;
        self.check_writable(&object)?;
        if valid.contains(SetattrValid::MODE) {
            let name = DecInt::from_fd(&object.fd);
            let mode = Mode::from_raw_mode(attr.st_mode & MODE_BITS);
            self.as_either(context, || {
                Ok(chmodat(
                    &self.proc_fds,
                    name.as_c_str(),
                    mode,
                    AtFlags::empty(),
                )?)
            })?;
        }
        let uid = valid.contains(SetattrValid::UID).then_some(attr.st_uid);
        let gid = valid.contains(SetattrValid::GID).then_some(attr.st_gid);
        if uid.is_some() || gid.is_some() {
            // -1 means "leave as it is" to the kernel.
            if uid == Some(u32::MAX) || gid == Some(u32::MAX) {
                return Err(Errno::INVAL.into());
            }
            let host_id = |id: Option<u32>| id.map(|id| self.host_id(id)).transpose();
            let (uid, gid) = (host_id(uid)?, host_id(gid)?);
            let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
            let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
            self.as_either(context, || Ok(chownat(&object.fd, c"", uid, gid, flags)?))?;
        }
        if valid.contains(SetattrValid::SIZE) {
            let size = u64::try_from(attr.st_size).map_err(|_| Errno::INVAL)?;
            let _ordinary = SuidClearGuard::when(valid.contains(SetattrValid::KILL_SUIDGID))?;
            match handle {
                Some(handle) => ftruncate(&*file(&*self.handle(handle, inode)?), size)?,
                None if object.kind == FileType::RegularFile => {
                    let file = self.as_either(context, || self.reopen(&object, OFlags::WRONLY))?;
                    ftruncate(&file, size)?;
                }
                None => return Err(Errno::INVAL.into()),
            }
        }
        if valid.intersects(SetattrValid::ATIME | SetattrValid::MTIME) {
            let time = |set, now, seconds, nanoseconds| Timespec {
                tv_sec: seconds,
                tv_nsec: if valid.contains(now) {
                    UTIME_NOW
                } else if valid.contains(set) {
                    nanoseconds
                } else {
                    UTIME_OMIT
                },
            };
            let times = Timestamps {
                last_access: time(
                    SetattrValid::ATIME,
                    SetattrValid::ATIME_NOW,
                    attr.st_atime,
                    attr.st_atime_nsec,
                ),
                last_modification: time(
                    SetattrValid::MTIME,
                    SetattrValid::MTIME_NOW,
                    attr.st_mtime,
                    attr.st_mtime_nsec,
                ),
            };
            self.as_either(context, || {
                Ok(utimensat(&object.fd, c"", &times, AtFlags::EMPTY_PATH)?)
            })?;
        }
        self.getattr(context, inode, None)
    }

    fn readlink(&self, _: &Context, inode: u64) -> io::Result<Vec<u8>> {
        let object = self.object(inode)?;
        Ok(readlinkat(&object.fd, c"", Vec::new())?.into_bytes())
    }

    fn symlink(
        &self,
        context: &Context,
        target: &CStr,
        parent: u64,
        name: &CStr,
    ) -> io::Result<Entry> {
        let parent = self.object(parent)?;
        self.check_writable(&parent)?;
        let name = component(name)?;
        self.table().check_room(1)?;
        {
            let _acting = self.making(context, 0)?;
            symlinkat(target, &parent.fd, name)?;
        }
        self.entry(context, &parent, name)
    }

    fn mknod(
        &self,
        context: &Context,
        parent: u64,
        name: &CStr,
        mode: u32,
        rdev: u32,
        umask: u32,
    ) -> io::Result<Entry> {
        let parent = self.object(parent)?;
        self.check_writable(&parent)?;
        let name = component(name)?;
        let kind = FileType::from_raw_mode(mode);
        match kind {
            FileType::RegularFile | FileType::Fifo | FileType::Socket => {}
            // The mark that overlayfs leaves for a removed file (whiteout). It does not open a
            // device.
            FileType::CharacterDevice if rdev == 0 => {}
            // Other devices would be within reach of any process on the host that reads the
            // directory.
            _ => return Err(Errno::PERM.into()),
        }
        self.table().check_room(1)?;
        {
            let _acting = self.making(context, umask)?;
            mknodat(&parent.fd, name, kind, bits(mode), 0)?;
        }
        self.entry(context, &parent, name)
    }

    fn mkdir(
        &self,
        context: &Context,
        parent: u64,
        name: &CStr,
        mode: u32,
        umask: u32,
    ) -> io::Result<Entry> {
        let parent = self.object(parent)?;
        self.check_writable(&parent)?;
        let name = component(name)?;
        self.table().check_room(1)?;
        {
            let _acting = self.making(context, umask)?;
            mkdirat(&parent.fd, name, bits(mode))?;
        }
        self.entry(context, &parent, name)
    }

    fn unlink(&self, context: &Context, parent: u64, name: &CStr) -> io::Result<()> {
        self.remove(context, parent, name, AtFlags::empty())
    }

    fn rmdir(&self, context: &Context, parent: u64, name: &CStr) -> io::Result<()> {
        self.remove(context, parent, name, AtFlags::REMOVEDIR)
    }

    fn rename(
        &self,
        context: &Context,
        old_parent: u64,
        old_name: &CStr,
        new_parent: u64,
        new_name: &CStr,
        flags: u32,
    ) -> io::Result<()> {
        let (old, new) = (self.object(old_parent)?, self.object(new_parent)?);
        self.check_writable(&old)?;
        self.check_writable(&new)?;
        let flags = RenameFlags::from_bits(flags).ok_or(Errno::INVAL)?;
        let (old_name, new_name) = (component(old_name)?, component(new_name)?);
        self.as_either(context, || {
            Ok(renameat_with(&old.fd, old_name, &new.fd, new_name, flags)?)
        })
    }

    fn link(&self, context: &Context, inode: u64, parent: u64, name: &CStr) -> io::Result<Entry> {
        let (object, parent) = (self.object(inode)?, self.object(parent)?);
        self.check_writable(&parent)?;
        let name = component(name)?;
        let from = DecInt::from_fd(&object.fd);
        // It follows the entry of /proc, not the object, which may itself be a link.
        let follow = AtFlags::SYMLINK_FOLLOW;
        self.as_either(context, || {
            Ok(linkat(
                &self.proc_fds,
                from.as_c_str(),
                &parent.fd,
                name,
                follow,
            )?)
        })?;
        self.entry(context, &parent, name)
    }

    fn open(
        &self,
        context: &Context,
        inode: u64,
        flags: u32,
        fuse_flags: u32,
    ) -> io::Result<(Option<u64>, OpenOptions, Option<u32>)> {
        let object = self.object(inode)?;
        self.table().check_room(1)?;
        let opened = {
            let _ordinary = SuidClearGuard::when(fuse_flags & FOPEN_IN_KILL_SUIDGID != 0)?;
            self.as_either(context, || self.open_file(&object, flags))?
        };
        let handle = self.keep(inode, opened, self.writer(context, &object))?;
        Ok((Some(handle), options(&object), None))
    }

    fn create(
        &self,
        context: &Context,
        parent: u64,
        name: &CStr,
        args: CreateIn,
    ) -> io::Result<(Entry, Option<u64>, OpenOptions, Option<u32>)> {
        let parent = self.object(parent)?;
        self.check_writable(&parent)?;
        let name = component(name)?;
        let flags = self.client_flags(&parent, args.flags)?;
        self.table().check_room(2)?;
        let exclusive = OFlags::from_bits_retain(args.flags).contains(OFlags::EXCL);
        let made = {
            let _acting = self.making(context, args.umask)?;
            let always = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            openat(&parent.fd, name, flags | always, bits(args.mode))
        };
        let made: File = match made {
            Ok(made) => made.into(),
            // Another one made it since the client looked. Linux looks again, and then opens what
            // it finds: it follows a link, and checks permissions with all groups of the user.
            Err(Errno::EXIST) if !exclusive => return Err(Errno::STALE.into()),
            Err(error) => return Err(error.into()),
        };
        let path = self.path_of(&made)?;
        let entry = self.entry_of(&parent, path, &Attributes::of(&made)?)?;
        let kept = self.object(entry.inode).and_then(|object| {
            let writer = self.writer(context, &object);
            Ok((self.keep(entry.inode, made, writer)?, options(&object)))
        });
        match kept {
            Ok((handle, options)) => Ok((entry, Some(handle), options, None)),
            Err(error) => {
                self.with_table(|table| table.forget(entry.inode, 1));
                Err(error)
            }
        }
    }

    fn read(
        &self,
        _: &Context,
        inode: u64,
        handle: u64,
        writer: &mut dyn ZeroCopyWriter,
        size: u32,
        offset: u64,
        _lock_owner: Option<u64>,
        _flags: u32,
    ) -> io::Result<usize> {
        let handle = self.handle(handle, inode)?;
        let size = (size as usize).min(writer.available_bytes()).min(MAX_DATA);
        let mut file = file(&handle);
        let mut read = writer.write_from(&mut *file, size, offset)?;
        // To the client less than it asked for is the end of the file, and the rest of its page
        // zeros. The host also returns less before an error, which only the next read tells.
        let is_generated =
            || matches!(self.object(inode), Ok(object) if object.contents == Contents::Generated);
        if (1..size).contains(&read) && !is_generated() {
            while read < size {
                let (rest, place) = (size.saturating_sub(read), after(offset, read));
                match writer.write_from(&mut *file, rest, place)? {
                    0 => break,
                    more => read = read.saturating_add(more),
                }
            }
        }
        self.counters.read_bytes.add(read as u64);
        Ok(read)
    }

    fn write(
        &self,
        _: &Context,
        inode: u64,
        handle: u64,
        reader: &mut dyn ZeroCopyReader,
        size: u32,
        offset: u64,
        _lock_owner: Option<u64>,
        delayed_write: bool,
        flags: u32,
        fuse_flags: u32,
    ) -> io::Result<usize> {
        let handle = self.handle(handle, inode)?;
        let size = (size as usize).min(MAX_DATA);
        let appends = OFlags::from_bits_retain(flags).contains(OFlags::APPEND);
        let _ordinary = SuidClearGuard::when(fuse_flags & WRITE_KILL_PRIV != 0)?;
        let _writing = QuotaUserGuard::as_user(handle.writer);
        let mut file = file(&handle);
        set_appending(&file, appends && !delayed_write)?;
        let mut written = reader.read_to(&mut *file, size, offset)?;
        // The client takes what its cache wrote back for written unless there is an error, which
        // the host returns only for the next write if there was room for a part.
        while delayed_write && written < size {
            let (rest, place) = (size.saturating_sub(written), after(offset, written));
            match reader.read_to(&mut *file, rest, place)? {
                0 => return Err(Errno::IO.into()),
                more => written = written.saturating_add(more),
            }
        }
        self.counters.written_bytes.add(written as u64);
        Ok(written)
    }

    /// Closes a duplicate of the file: later, when the handle is released, the client would not get
    /// a file server's write errors.
    fn flush(&self, _: &Context, inode: u64, handle: u64, _lock_owner: u64) -> io::Result<()> {
        let handle = self.handle(handle, inode)?;
        if self.object(inode)?.contents == Contents::Remote {
            close_with_result(file(&handle).try_clone()?)?;
        }
        Ok(())
    }

    fn fsync(&self, _: &Context, inode: u64, datasync: bool, handle: u64) -> io::Result<()> {
        let handle = self.handle(handle, inode)?;
        let file = file(&handle);
        Ok(if datasync {
            fdatasync(&*file)
        } else {
            fsync(&*file)
        }?)
    }

    fn fallocate(
        &self,
        _: &Context,
        inode: u64,
        handle: u64,
        mode: u32,
        offset: u64,
        length: u64,
    ) -> io::Result<()> {
        self.check_writable(&*self.object(inode)?)?;
        let mode = FallocateFlags::from_bits(mode).ok_or(Errno::OPNOTSUPP)?;
        let handle = self.handle(handle, inode)?;
        let _writing = QuotaUserGuard::as_user(handle.writer);
        Ok(fallocate(&*file(&handle), mode, offset, length)?)
    }

    fn release(
        &self,
        _: &Context,
        inode: u64,
        _flags: u32,
        handle: u64,
        _flush: bool,
        _flock_release: bool,
        _lock_owner: Option<u64>,
    ) -> io::Result<()> {
        self.with_table(|table| table.close(handle, inode))
    }

    fn statfs(&self, _: &Context, inode: u64) -> io::Result<libc::statvfs64> {
        Ok(statvfs(&fstatvfs(&self.object(inode)?.fd)?))
    }

    fn setxattr(
        &self,
        context: &Context,
        inode: u64,
        name: &CStr,
        value: &[u8],
        flags: u32,
    ) -> io::Result<()> {
        self.set_xattr(context, inode, name, value, flags)
    }

    fn getxattr(
        &self,
        context: &Context,
        inode: u64,
        name: &CStr,
        size: u32,
    ) -> io::Result<GetxattrReply> {
        self.get_xattr(context, inode, name, size)
    }

    fn listxattr(&self, context: &Context, inode: u64, size: u32) -> io::Result<ListxattrReply> {
        self.list_xattr(context, inode, size)
    }

    fn removexattr(&self, context: &Context, inode: u64, name: &CStr) -> io::Result<()> {
        self.remove_xattr(context, inode, name)
    }

    fn opendir(&self, context: &Context, inode: u64, _flags: u32) -> io::Result<Opened> {
        let object = self.object(inode)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let directory = self.as_either(context, || self.reopen(&object, flags))?;
        let handle = self.keep(inode, directory, 0)?;
        Ok((Some(handle), OpenOptions::empty()))
    }

    fn readdir(
        &self,
        context: &Context,
        inode: u64,
        handle: u64,
        size: u32,
        offset: u64,
        add_entry: &mut dyn FnMut(DirEntry<'_>) -> io::Result<usize>,
    ) -> io::Result<()> {
        let (of, part) = ((inode, handle), (size, offset));
        let listed = self.entries(context, of, part, false, &mut |listed, _| add_entry(listed));
        self.keep_list_error(listed)
    }

    fn readdirplus(
        &self,
        context: &Context,
        inode: u64,
        handle: u64,
        size: u32,
        offset: u64,
        add_entry: &mut dyn FnMut(DirEntry<'_>, Entry) -> io::Result<usize>,
    ) -> io::Result<()> {
        let (of, part) = ((inode, handle), (size, offset));
        let listed = self.entries(context, of, part, true, &mut |listed, entry| {
            add_entry(listed, entry.unwrap_or_default())
        });
        self.keep_list_error(listed)
    }

    fn fsyncdir(&self, context: &Context, inode: u64, data: bool, handle: u64) -> io::Result<()> {
        self.fsync(context, inode, data, handle)
    }

    fn releasedir(&self, _: &Context, inode: u64, _flags: u32, handle: u64) -> io::Result<()> {
        self.with_table(|table| table.close(handle, inode))
    }

    /// Seeks to holes and data; everything else is handled by the client itself.
    fn lseek(
        &self,
        _: &Context,
        inode: u64,
        handle: u64,
        offset: u64,
        whence: u32,
    ) -> io::Result<u64> {
        let to = match i32::try_from(whence) {
            Ok(libc::SEEK_DATA) => SeekFrom::Data(offset),
            Ok(libc::SEEK_HOLE) => SeekFrom::Hole(offset),
            _ => return Err(Errno::INVAL.into()),
        };
        let handle = self.handle(handle, inode)?;
        Ok(seek(&*file(&handle), to)?)
    }
}

impl Tree {
    fn remove(
        &self,
        context: &Context,
        parent: u64,
        name: &CStr,
        flags: AtFlags,
    ) -> io::Result<()> {
        let parent = self.object(parent)?;
        self.check_writable(&parent)?;
        let name = component(name)?;
        self.as_either(context, || Ok(unlinkat(&parent.fd, name, flags)?))
    }

    /// Writes data that the file system of an object holds back to its disk (`FUSE_SYNCFS`, which
    /// `fuse-backend-rs` does not know).
    pub(in crate::fs) fn sync_file_system(&self, inode: u64) -> io::Result<()> {
        let object = self.object(inode)?;
        Ok(syncfs(self.reopen(&object, OFlags::RDONLY)?)?)
    }
}

/// The place in a file after `count` bytes from `offset`.
fn after(offset: u64, count: usize) -> u64 {
    offset.saturating_add(count as u64)
}

/// The permissions of a new object, before the umask.
fn bits(mode: u32) -> Mode {
    Mode::from_raw_mode(mode & MODE_BITS)
}
