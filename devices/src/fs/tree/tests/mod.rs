//! The tree as its client calls it, on directories of this host.

mod access;
mod acls;
mod client;
mod files;
mod host;
mod lists;
mod mapped_ids;
mod names;
mod overlay;
mod parts;
mod users;
mod xattrs;

use super::*;
use fuse_backend_rs::abi::fuse_abi::CreateIn;
use fuse_backend_rs::api::filesystem::{
    DirEntry, FileSystem, FsOptions, GetxattrReply, ListxattrReply, OpenOptions, SetattrValid,
};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::UnshareFlags;
use std::ffi::CString;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

struct Rig {
    dir: tempfile::TempDir,
    tree: Tree,
}

const ROOT: u64 = table::ROOT;

fn rig_with(access: Access, limit: usize) -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let root: OwnedFd = File::open(dir.path()).unwrap().into();
    let tree = Tree::new(&root, access, Quota::own(limit), None).unwrap();
    tree.prepare_thread().unwrap();
    Rig { dir, tree }
}

fn rig() -> Rig {
    rig_with(Access::ReadWrite, 1000)
}

fn me() -> Context {
    Context {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        pid: 1,
    }
}

fn name(name: &str) -> CString {
    CString::new(name).unwrap()
}

fn code<T>(result: io::Result<T>) -> Option<Errno> {
    result
        .err()
        .map(|error| Errno::from_io_error(&error).unwrap())
}

fn creation(flags: i32, mode: u32) -> CreateIn {
    CreateIn {
        flags: flags.cast_unsigned(),
        mode,
        umask: 0,
        fuse_flags: 0,
    }
}

impl Rig {
    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    fn look_up(&self, parent: u64, text: &str) -> io::Result<Entry> {
        let entry = self.tree.lookup(&me(), parent, &name(text))?;
        // Number 0 means that there is no such object.
        if entry.inode == 0 {
            return Err(Errno::NOENT.into());
        }
        Ok(entry)
    }

    fn list(&self, object: u64, plus: bool) -> Vec<(String, u64)> {
        self.list_by(object, plus, 4096)
    }

    /// For a client that has `size` bytes for each reply.
    fn list_by(&self, object: u64, plus: bool, size: u32) -> Vec<(String, u64)> {
        let (handle, _) = self.tree.opendir(&me(), object, 0).unwrap();
        let mut names = Vec::new();
        let mut offset = 0;
        loop {
            let before = names.len();
            // Three at a time.
            self.tree
                .entries(
                    &me(),
                    (object, handle.unwrap()),
                    (size, offset),
                    plus,
                    &mut |listed, entry| {
                        if names.len() == before + 3 {
                            return Ok(0);
                        }
                        offset = listed.offset;
                        let name = String::from_utf8(listed.name.to_vec()).unwrap();
                        names.push((name, entry.map_or(0, |entry| entry.inode)));
                        Ok(100)
                    },
                )
                .unwrap();
            if names.len() == before {
                break;
            }
        }
        self.tree
            .releasedir(&me(), object, 0, handle.unwrap())
            .unwrap();
        names.sort();
        names
    }
}

fn libc_stat() -> libc::stat64 {
    fuse_backend_rs::abi::fuse_abi::Attr::default().into()
}
