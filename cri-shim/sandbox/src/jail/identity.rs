//! The process becomes another user, with the capabilities and resource limits of its jail.

use rustix::process::{
    DumpableBehavior, Gid, Resource, Rlimit, Uid, getrlimit, set_dumpable_behavior, setrlimit,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};

use super::error::{JailError, MissingLayer, step};
use super::namespaces;
use super::users::MappedUsers;

/// `nobody`, if a user namespace maps only few users.
const NOBODY: u32 = 65534;

/// Most threads of all of the user's processes; each stream of a container is one.
const THREADS: u64 = 8192;

/// Capabilities for serving a shared directory: files belong to the guest's users, whatever their
/// number. Not MKNOD, with which a device of the host could be opened (whiteouts need none), and
/// not DAC_READ_SEARCH, with which files are opened by handle.
const FOR_SHARE: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID);

/// The number of capabilities that a kernel may know.
const NUMBERS: u32 = 64;

/// Sets limits that the process cannot raise any more. Hard limits that are lower already stay.
pub(super) fn limit_resources() -> Result<(), JailError> {
    for (resource, most) in [
        (Resource::Core, 0),
        (Resource::Msgqueue, 0),
        (Resource::Rtprio, 0),
        (Resource::Nice, 0),
        (Resource::Nproc, THREADS),
    ] {
        let limit = lowered(getrlimit(resource), most);
        setrlimit(resource, limit).map_err(step("limit the jail's resources"))?;
    }
    Ok(())
}

/// At most `most`. To raise a hard limit takes CAP_SYS_RESOURCE.
fn lowered(now: Rlimit, most: u64) -> Rlimit {
    let limit = now.maximum.map_or(most, |maximum| maximum.min(most));
    Rlimit {
        current: Some(limit),
        maximum: Some(limit),
    }
}

/// Becomes a user that owns nothing, without capabilities. Its user namespace may be missing.
pub(super) fn switch_to_jail_user(uid: u32) -> Result<Option<MissingLayer>, JailError> {
    drop_bounding_set(CapabilitySet::empty())?;
    set_thread_groups(&[]).map_err(step("leave the supplementary groups"))?;
    let become_user = |id: u32| -> rustix::io::Result<()> {
        let (uid, gid) = (Uid::from_raw(id), Gid::from_raw(id));
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)
    };
    become_user(uid)
        .or_else(|_| become_user(NOBODY))
        .map_err(step("become the jail's user"))?;
    // The creator of a user namespace has all capabilities in it until they are dropped here.
    let missing = namespaces::leave_user_namespace();
    drop_capabilities()?;
    Ok(missing)
}

/// Stays root, with only the capabilities that a shared directory needs.
pub(super) fn keep_for_share() -> Result<(), JailError> {
    drop_bounding_set(FOR_SHARE)?;
    set_thread_groups(&[]).map_err(step("leave the supplementary groups"))?;
    set(FOR_SHARE)?;
    not_dumpable()
}

/// Becomes root of a user namespace for volumes, with only the capabilities that these need. They
/// have no effect on what is the host's.
pub(super) fn become_root_of(users: &MappedUsers) -> Result<(), JailError> {
    set_thread_groups(&[]).map_err(step("leave the supplementary groups"))?;
    users
        .enter()
        .map_err(step("enter the user namespace of the volumes"))?;
    let become_root = || -> rustix::io::Result<()> {
        set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
        set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)
    };
    become_root().map_err(step("become root of the volumes' user namespace"))?;
    drop_bounding_set(FOR_SHARE)?;
    set(FOR_SHARE)?;
    not_dumpable()
}

/// Drops all capabilities.
pub(super) fn drop_capabilities() -> Result<(), JailError> {
    drop_bounding_set(CapabilitySet::empty())?;
    set(CapabilitySet::empty())?;
    not_dumpable()
}

/// Sets no_new_privs: an executed program gets no more privileges than this process has.
pub(super) fn no_new_privileges() -> Result<(), JailError> {
    set_no_new_privs(true).map_err(step("renounce further privileges"))
}

fn set(kept: CapabilitySet) -> Result<(), JailError> {
    clear_ambient_capability_set().map_err(step("clear the ambient capabilities"))?;
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets).map_err(step("drop capabilities"))
}

fn drop_bounding_set(kept: CapabilitySet) -> Result<(), JailError> {
    let may_drop =
        capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SETPCAP));
    if !may_drop {
        // Nothing is executed any more, and no_new_privs limits it anyway.
        return Ok(());
    }
    for number in 0..NUMBERS {
        let one = CapabilitySet::from_bits_retain(1 << number);
        if kept.contains(one) {
            continue;
        }
        match remove_capability_from_bounding_set(one) {
            Ok(()) => {}
            // The kernel knows no more capabilities.
            Err(rustix::io::Errno::INVAL) => break,
            Err(error) => return Err(step("drop capabilities")(error)),
        }
    }
    Ok(())
}

/// Keeps other processes of the same user from reading its memory.
fn not_dumpable() -> Result<(), JailError> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(step("hide the process's memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_lowered_and_never_raised() {
        let limit = |current, maximum| Rlimit { current, maximum };
        let both = |most| limit(Some(most), Some(most));
        assert_eq!(lowered(limit(None, None), 8192), both(8192));
        assert_eq!(lowered(limit(Some(1024), Some(96_000)), 8192), both(8192));
        assert_eq!(lowered(limit(Some(1024), Some(4096)), 8192), both(4096));
        assert_eq!(lowered(limit(Some(0), None), 0), both(0));
    }
}
