//! POSIX access control lists, in the form of the attributes that the kernel keeps them in
//! (`linux/posix_acl_xattr.h`): a version, and entries of 8 bytes, some of which name a user or a
//! group.
//!
//! The client's kernel checks permissions by them and changes them; the host's applies a
//! directory's default list to what is made there, and keeps lists and modes in step. Only ids are
//! changed on the way.

use std::ffi::CStr;

use rustix::io::Errno;

use super::ids::IdMap;

/// The list that applies to an object.
pub(super) const ACCESS: &CStr = c"system.posix_acl_access";

/// The list of what is made in a directory.
pub(super) const DEFAULT: &CStr = c"system.posix_acl_default";

const HEADER_LEN: usize = 4;
const ENTRY_LEN: usize = 8;

/// Tags of entries that have an id: `ACL_USER` and `ACL_GROUP`.
const WITH_ID: [u16; 2] = [0x02, 0x08];

/// Whether an attribute is a list.
pub(super) fn is_list(name: &CStr) -> bool {
    [ACCESS, DEFAULT].contains(&name)
}

/// Changes the client's ids of a list to the host's.
///
/// # Errors
/// `EINVAL`, as for ids that a mount does not map, if one may not own anything.
pub(super) fn to_host(list: &mut [u8], ids: IdMap) -> Result<(), Errno> {
    change(list, |id| ids.to_host(id).ok_or(Errno::INVAL))
}

/// Changes the host's ids of a list to the client's.
pub(super) fn to_client(list: &mut [u8], ids: IdMap) {
    // It cannot fail.
    let _ = change(list, |id| Ok(ids.to_guest(id)));
}

/// A list of another form stays as it is: the kernel refuses it.
fn change(list: &mut [u8], map: impl Fn(u32) -> Result<u32, Errno>) -> Result<(), Errno> {
    let entries = list.get_mut(HEADER_LEN..).unwrap_or_default();
    let (entries, _) = entries.as_chunks_mut::<ENTRY_LEN>();
    for [tag_low, tag_high, _, _, id @ ..] in entries {
        if WITH_ID.contains(&u16::from_le_bytes([*tag_low, *tag_high])) {
            *id = map(u32::from_le_bytes(*id))?.to_le_bytes();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A list of the owner, a user, the owning group, a group and the mask.
    fn list(user: u32, group: u32) -> Vec<u8> {
        let mut list = 2u32.to_le_bytes().to_vec();
        let none = u32::MAX;
        let entries = [
            (0x01, none),
            (0x02, user),
            (0x04, none),
            (0x08, group),
            (0x10, none),
        ];
        for (tag, id) in entries {
            list.extend(u16::to_le_bytes(tag));
            list.extend(u16::to_le_bytes(6));
            list.extend(u32::to_le_bytes(id));
        }
        list
    }

    #[test]
    fn ids_of_users_and_groups_are_mapped_both_ways_and_nothing_else() {
        let ids = IdMap::new(65_536, 1000).unwrap();
        let mut changed = list(65_536 + 7, 0);
        to_host(&mut changed, ids).unwrap();
        assert_eq!(changed, list(7, 0));
        to_client(&mut changed, ids);
        assert_eq!(changed, list(65_536 + 7, 65_536));
        // Nobody stands for what is not mapped, which a client may not name.
        let mut others = list(5000, 70_000);
        to_client(&mut others, ids);
        assert_eq!(others, list(u32::MAX - 1, u32::MAX - 1));
        assert_eq!(to_host(&mut list(5, 65_536), ids), Err(Errno::INVAL));
        assert_eq!(to_host(&mut list(65_536, 66_536), ids), Err(Errno::INVAL));
    }

    #[test]
    fn lists_of_any_length_are_left_to_the_kernel() {
        let ids = IdMap::new(65_536, 1000).unwrap();
        for len in 0..list(0, 0).len() {
            let mut cut = list(65_537, 65_538)[..len].to_vec();
            to_host(&mut cut, ids).unwrap();
            assert_eq!(cut.len(), len);
        }
    }
}
