//! Extended attributes: those of users. The others mean something to the host itself
//! (capabilities of programs, labels, overlays) and do not exist for the client.

use std::ffi::CStr;
use std::io;

use fuse_backend_rs::api::filesystem::{GetxattrReply, ListxattrReply};
use rustix::fs::{OFlags, XattrFlags, fgetxattr, flistxattr, fremovexattr, fsetxattr};
use rustix::io::Errno;

use super::{Object, Tree};

/// The longest value, and the longest list of names (`XATTR_SIZE_MAX`).
const MAX_LEN: usize = 64 << 10;

const PREFIX: &[u8] = b"user.";

impl Tree {
    pub(super) fn set_xattr(
        &self,
        object: u64,
        name: &CStr,
        value: &[u8],
        flags: u32,
    ) -> io::Result<()> {
        let object = self.object(object)?;
        self.check_writable(&object)?;
        let file = self.reopen_for_xattr(&object, name)?;
        let flags = XattrFlags::from_bits(flags).ok_or(Errno::INVAL)?;
        Ok(fsetxattr(&file, name, value, flags)?)
    }

    pub(super) fn get_xattr(
        &self,
        object: u64,
        name: &CStr,
        size: u32,
    ) -> io::Result<GetxattrReply> {
        let file = self.reopen_for_xattr(&*self.object(object)?, name)?;
        let mut value = vec![0; MAX_LEN];
        let len = fgetxattr(&file, name, &mut *value)?;
        value.truncate(len);
        Ok(match fit(value, size)? {
            Fitted::Count(count) => GetxattrReply::Count(count),
            Fitted::Bytes(bytes) => GetxattrReply::Value(bytes),
        })
    }

    pub(super) fn list_xattr(&self, object: u64, size: u32) -> io::Result<ListxattrReply> {
        let file = self.reopen_for_xattr(&*self.object(object)?, c"user.")?;
        let mut names = vec![0; MAX_LEN];
        let len = flistxattr(&file, &mut *names)?;
        names.truncate(len);
        let names = names
            .split_inclusive(|byte| *byte == 0)
            .filter(|name| name.starts_with(PREFIX))
            .flatten()
            .copied()
            .collect();
        Ok(match fit(names, size)? {
            Fitted::Count(count) => ListxattrReply::Count(count),
            Fitted::Bytes(bytes) => ListxattrReply::Names(bytes),
        })
    }

    pub(super) fn remove_xattr(&self, object: u64, name: &CStr) -> io::Result<()> {
        let object = self.object(object)?;
        self.check_writable(&object)?;
        let file = self.reopen_for_xattr(&object, name)?;
        Ok(fremovexattr(&file, name)?)
    }

    fn reopen_for_xattr(&self, object: &Object, name: &CStr) -> io::Result<std::fs::File> {
        if !name.to_bytes().starts_with(PREFIX) {
            return Err(Errno::OPNOTSUPP.into());
        }
        self.reopen(object, OFlags::RDONLY | OFlags::NONBLOCK)
            .map_err(|error| match Errno::from_io_error(&error) {
                // The host's own file systems answer so for what is never opened here.
                Some(Errno::NXIO) => Errno::OPNOTSUPP.into(),
                _ => error,
            })
    }
}

enum Fitted {
    Count(u32),
    Bytes(Vec<u8>),
}

/// A size of 0 asks for the length only.
fn fit(bytes: Vec<u8>, size: u32) -> io::Result<Fitted> {
    if size == 0 {
        // At most MAX_LEN.
        Ok(Fitted::Count(u32::try_from(bytes.len()).unwrap_or(0)))
    } else if bytes.len() > size as usize {
        Err(Errno::RANGE.into())
    } else {
        Ok(Fitted::Bytes(bytes))
    }
}
