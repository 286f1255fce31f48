//! Extended attributes: those of users, access control lists (`acl`), and those that need
//! privileges in the guest (`trusted.*` of overlays, capabilities of programs). The latter would
//! have a meaning on the host itself, or need privileges there: so on the host they are stored
//! under names of user attributes, and the client sees its own names. All others (labels) do not
//! exist for the client.

use std::borrow::Cow;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use fuse_backend_rs::api::filesystem::{Context, GetxattrReply, ListxattrReply};
use rustix::fs::{
    Mode, OFlags, XattrFlags, fchmod, fgetxattr, fgetxattr_query, flistxattr, fremovexattr,
    fsetxattr, fstat,
};
use rustix::io::Errno;

use super::attributes::Contents;
use super::{Object, Tree, acl};

/// The longest value, and the longest list of names (`XATTR_SIZE_MAX`).
const MAX_LEN: usize = 64 << 10;

const PREFIX: &[u8] = b"user.";

/// The prefix on the host of the client's attributes that are not user attributes. Names of the
/// client that start with it get it twice.
const MAPPED: &[u8] = b"user.podvisor.";

const TRUSTED: &[u8] = b"trusted.";

const CAPABILITY: &[u8] = b"security.capability";

/// [`CAPABILITY`] on the host.
const CAPABILITY_ON_HOST: &CStr = c"user.podvisor.security.capability";

impl Tree {
    pub(super) fn set_xattr(
        &self,
        context: &Context,
        object: u64,
        name: &CStr,
        value: &[u8],
        flags: u32,
    ) -> io::Result<()> {
        let object = self.object(object)?;
        self.check_writable(&object)?;
        let flags = XattrFlags::from_bits(flags).ok_or(Errno::INVAL)?;
        let clears_group_bit = self.take_clearing_of_group_bit();
        if acl::is_list(name) {
            return self.set_list(
                context,
                &object,
                name,
                value.to_vec(),
                flags,
                clears_group_bit,
            );
        }
        let name = host_name(name)?;
        let file = self.reopen_for_xattr(context, &object)?;
        Ok(fsetxattr(&file, &*name, value, flags)?)
    }

    /// Sets an access control list. If `clears_group_bit`, the object loses its set-group-ID bit
    /// before: the client's user is not in its group, and this process may be.
    fn set_list(
        &self,
        context: &Context,
        object: &Object,
        name: &CStr,
        mut list: Vec<u8>,
        flags: XattrFlags,
        clears_group_bit: bool,
    ) -> io::Result<()> {
        if object.contents == Contents::Generated {
            return Err(Errno::OPNOTSUPP.into());
        }
        if let Some(ids) = self.ids {
            acl::to_host(&mut list, ids)?;
        }
        let file = self.reopen_for_xattr(context, object)?;
        self.as_either(context, || {
            let mode = Mode::from_raw_mode(fstat(&file)?.st_mode);
            if clears_group_bit && mode.contains(Mode::SGID) {
                fchmod(&file, mode.difference(Mode::SGID))?;
            }
            Ok(fsetxattr(&file, name, &list, flags)?)
        })
    }

    /// Reads an access control list. The client asks of its own accord, whenever it checks
    /// permissions, and any other error than that there is none would be the check's.
    fn list(&self, context: &Context, object: &Object, name: &CStr) -> io::Result<Vec<u8>> {
        if object.contents == Contents::Generated {
            return Err(Errno::NODATA.into());
        }
        let read = || {
            let file = self.reopen_for_xattr(context, object)?;
            let mut list = vec![0; MAX_LEN];
            let len = fgetxattr(&file, name, &mut *list)?;
            list.truncate(len);
            Ok(list)
        };
        let mut list = read().map_err(|error: io::Error| match Errno::from_io_error(&error) {
            // A file system without lists, an object that is never opened here, or a server of
            // files that denies it to the host's root.
            Some(Errno::OPNOTSUPP | Errno::ACCESS | Errno::PERM) => Errno::NODATA.into(),
            _ => error,
        })?;
        if let Some(ids) = self.ids {
            acl::to_client(&mut list, ids);
        }
        Ok(list)
    }

    pub(super) fn get_xattr(
        &self,
        context: &Context,
        object: u64,
        name: &CStr,
        size: u32,
    ) -> io::Result<GetxattrReply> {
        let object = self.object(object)?;
        if acl::is_list(name) {
            let list = self.list(context, &object, name)?;
            return match size {
                0 => Ok(GetxattrReply::Count(count(list.len()))),
                size if list.len() > size as usize => Err(Errno::RANGE.into()),
                _ => Ok(GetxattrReply::Value(list)),
            };
        }
        let name = host_name(name)?;
        let opened = self.reopen_for_xattr(context, &object);
        let file = match opened {
            // The client itself asks for capabilities when it executes a program, which fails with
            // any other error. A file server may deny that to the host's root.
            Err(error)
                if *name == *CAPABILITY_ON_HOST
                    && error.kind() == io::ErrorKind::PermissionDenied =>
            {
                return Err(Errno::OPNOTSUPP.into());
            }
            opened => opened?,
        };
        // The client asks so of its own accord, too: before each write, where it cannot remember
        // that a file has no capabilities.
        if size == 0 {
            let len = fgetxattr_query(&file, &*name)?;
            return Ok(GetxattrReply::Count(count(len)));
        }
        let mut value = vec![0; MAX_LEN.min(size as usize)];
        let len = fgetxattr(&file, &*name, &mut *value)?;
        value.truncate(len);
        Ok(GetxattrReply::Value(value))
    }

    pub(super) fn list_xattr(
        &self,
        context: &Context,
        object: u64,
        size: u32,
    ) -> io::Result<ListxattrReply> {
        let file = self.reopen_for_xattr(context, &*self.object(object)?)?;
        let mut names = vec![0; MAX_LEN];
        let len = flistxattr(&file, &mut *names)?;
        names.truncate(len);
        let names: Vec<u8> = names
            .split_inclusive(|byte| *byte == 0)
            .filter_map(client_name)
            // Nor does the client let others read them.
            .filter(|name| context.uid == 0 || !name.starts_with(TRUSTED))
            .flatten()
            .copied()
            .collect();
        if size == 0 {
            Ok(ListxattrReply::Count(count(names.len())))
        } else if names.len() > size as usize {
            Err(Errno::RANGE.into())
        } else {
            Ok(ListxattrReply::Names(names))
        }
    }

    pub(super) fn remove_xattr(
        &self,
        context: &Context,
        object: u64,
        name: &CStr,
    ) -> io::Result<()> {
        let object = self.object(object)?;
        self.check_writable(&object)?;
        let name = host_name(name)?;
        let file = self.reopen_for_xattr(context, &object)?;
        Ok(fremovexattr(&file, &*name)?)
    }

    fn reopen_for_xattr(&self, context: &Context, object: &Object) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        self.as_either(context, || self.reopen(object, flags))
            .map_err(|error| match Errno::from_io_error(&error) {
                // The same error as the host's own file systems return for objects that are never
                // opened here.
                Some(Errno::NXIO) => Errno::OPNOTSUPP.into(),
                _ => error,
            })
    }
}

/// Removes a program's capabilities, as the kernel does when its contents change. The client, which
/// leaves that to the server (`HANDLE_KILLPRIV_V2`), does it itself when it writes, truncates or
/// changes the owner, but not when it opens a file with `O_TRUNC`.
pub(super) fn drop_capability(file: impl AsFd) {
    // Reading is much cheaper than removing, and there is hardly ever one.
    if fgetxattr_query(&file, CAPABILITY_ON_HOST).is_ok() {
        // The contents are changed, whether this succeeds or not.
        let _ = fremovexattr(&file, CAPABILITY_ON_HOST);
    }
}

fn is_mapped(name: &[u8]) -> bool {
    name.starts_with(TRUSTED) || name == CAPABILITY || name.starts_with(MAPPED)
}

/// Returns the host's name for an attribute of the client. A name that becomes too long is refused
/// by the host (`ERANGE`).
fn host_name(name: &CStr) -> io::Result<Cow<'_, CStr>> {
    let bytes = name.to_bytes();
    if is_mapped(bytes) {
        return Ok(CString::new([MAPPED, bytes].concat())?.into());
    }
    if !bytes.starts_with(PREFIX) && !acl::is_list(name) {
        return Err(Errno::OPNOTSUPP.into());
    }
    Ok(name.into())
}

/// Returns the client's name for one of the host, with the NUL at its end; `None` if it has none.
fn client_name(name: &[u8]) -> Option<&[u8]> {
    match name.strip_prefix(MAPPED) {
        Some(inner) => is_mapped(inner.strip_suffix(b"\0")?).then_some(inner),
        None => {
            let is_list = |name| CStr::from_bytes_with_nul(name).is_ok_and(acl::is_list);
            (name.starts_with(PREFIX) || is_list(name)).then_some(name)
        }
    }
}

/// The length of a value or a list, for a client that asks for no more: at most [`MAX_LEN`].
fn count(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(0)
}
