//! Ownership of new objects, and the credentials of the thread that creates them.

use std::cell::Cell;
use std::io;

use rustix::fs::Mode;
use rustix::process::{Gid, Uid, geteuid, getgid, umask};
use rustix::thread::{
    CapabilitySet, CapabilitySets, UnshareFlags, capabilities, set_capabilities, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};

use super::ids::NOBODY;

thread_local! {
    static PREPARED: Cell<bool> = const { Cell::new(false) };
    /// The capabilities of the thread while it trusts the permission checks of the guest's kernel,
    /// if it may have them.
    static TRUSTING: Cell<Option<CapabilitySets>> = const { Cell::new(None) };
}

/// Whether this process may create objects for other users.
pub(super) fn may_switch() -> bool {
    let needed = CapabilitySet::SETUID | CapabilitySet::SETGID;
    geteuid().is_root() && capabilities(None).is_ok_and(|sets| sets.effective.contains(needed))
}

/// Prepares the calling thread to serve: the modes that the guest requests are not restricted by
/// the process's umask, and groups of the process do not become those of the guest's users, which
/// could let them keep set-group-ID bits that are not theirs (CVE-2022-0358).
pub(super) fn prepare_thread(switch: bool) -> io::Result<()> {
    if PREPARED.get() {
        return Ok(());
    }
    own_file_system_attributes()?;
    umask(Mode::empty());
    if switch {
        set_thread_groups(&[])?;
        let sets = capabilities(None)?;
        let effective = CapabilitySet::DAC_OVERRIDE;
        let may = sets.permitted.contains(effective);
        TRUSTING.set(may.then_some(CapabilitySets { effective, ..sets }));
    }
    PREPARED.set(true);
    Ok(())
}

/// Gives this thread its own umask.
#[allow(unsafe_code)]
fn own_file_system_attributes() -> io::Result<()> {
    // SAFETY: CLONE_FS only separates the thread's working directory, root and umask from those of
    // the other threads; no descriptor or mapping is affected.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }?;
    Ok(())
}

/// The thread acts as a user of the guest as long as this exists.
#[derive(Debug)]
#[must_use]
pub(super) struct CredentialGuard {
    group: bool,
    supplementary: bool,
    user: bool,
}

impl CredentialGuard {
    /// Acts without capabilities, unless the user is root, and with one further group at most.
    pub(super) fn as_user(
        switch: bool,
        uid: u32,
        gid: u32,
        supplementary: Option<u32>,
    ) -> io::Result<Self> {
        let mut acting = Self {
            group: false,
            supplementary: false,
            user: false,
        };
        if !switch {
            return Ok(acting);
        }
        // -1 means "leave as it is" to the kernel.
        if uid == u32::MAX || gid == u32::MAX {
            return Err(rustix::io::Errno::INVAL.into());
        }
        // The group first: without the user it may not be changed.
        if gid != getgid().as_raw() {
            set_thread_res_gid(None, Gid::from_raw(gid), None)?;
            acting.group = true;
        }
        if let Some(group) = supplementary {
            set_thread_groups(&[Gid::from_raw(group)])?;
            acting.supplementary = true;
        }
        if uid != 0 {
            set_thread_res_uid(None, Uid::from_raw(uid), None)?;
            acting.user = true;
        }
        Ok(acting)
    }

    /// Trusts the guest's kernel, which has checked permissions, with all groups of the user. The
    /// host's kernel, which knows only one group, does not check them again: only
    /// `CAP_DAC_OVERRIDE` is effective. Objects of a group that is not the user's still lose their
    /// set-group-ID bits. A file server, which checks itself, is told of the supplementary group.
    pub(super) fn trusting_the_guest(self) -> io::Result<Self> {
        if self.user
            && let Some(sets) = TRUSTING.get()
        {
            set_capabilities(None, sets)?;
        }
        Ok(self)
    }
}

impl Drop for CredentialGuard {
    fn drop(&mut self) {
        // Becoming root makes the permitted capabilities effective.
        let user = if self.user {
            set_thread_res_uid(None, Uid::ROOT, None)
        } else {
            Ok(())
        };
        let group = if self.group {
            set_thread_res_gid(None, getgid(), None)
        } else {
            Ok(())
        };
        let supplementary = if self.supplementary {
            set_thread_groups(&[])
        } else {
            Ok(())
        };
        if let Err(error) = user.and(group).and(supplementary) {
            // The real and the saved ones are as before: the kernel permits this.
            tracing::error!(%error, "fs: failed to restore the thread's fsuid and fsgid");
        }
    }
}

/// As long as this exists, the thread, which has its own umask, makes things with this one.
#[derive(Debug)]
#[must_use]
pub(super) struct UmaskGuard(());

impl UmaskGuard {
    pub(super) fn new(mask: u32) -> Self {
        umask(Mode::from_raw_mode(mask & 0o777));
        Self(())
    }
}

impl Drop for UmaskGuard {
    fn drop(&mut self) {
        umask(Mode::empty());
    }
}

/// As long as this exists, files that the thread writes to lose their set-user-ID and set-group-ID
/// bits, as they do when an ordinary user writes.
#[derive(Debug)]
#[must_use]
pub(super) struct SuidClearGuard {
    restore: Option<CapabilitySets>,
}

impl SuidClearGuard {
    /// Drops `CAP_FSETID` if `wanted`; a thread without it is ordinary anyway.
    pub(super) fn when(wanted: bool) -> io::Result<Self> {
        let mut ordinary = Self { restore: None };
        if wanted {
            let sets = capabilities(None)?;
            if sets.effective.contains(CapabilitySet::FSETID) {
                let effective = sets.effective.difference(CapabilitySet::FSETID);
                set_capabilities(None, CapabilitySets { effective, ..sets })?;
                ordinary.restore = Some(sets);
            }
        }
        Ok(ordinary)
    }
}

impl Drop for SuidClearGuard {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.restore.map(|sets| set_capabilities(None, sets)) {
            // It is still permitted: the kernel lets it become effective again.
            tracing::error!(%error, "fs: failed to restore the thread's fsuid and fsgid");
        }
    }
}

/// As long as this exists, the thread allocates space of a file system as a user of the guest: it
/// cannot use the blocks that ext4 reserves for root (`s_resuid`). Permissions of a file that is
/// already open are not checked.
#[derive(Debug)]
#[must_use]
pub(super) struct QuotaUserGuard {
    is_user: bool,
}

impl QuotaUserGuard {
    /// Changes nothing for root.
    pub(super) fn as_user(uid: u32) -> Self {
        let is_user = uid != 0;
        if is_user {
            set_file_system_user(uid);
        }
        Self { is_user }
    }
}

impl Drop for QuotaUserGuard {
    fn drop(&mut self) {
        // This also restores its file system capabilities.
        if self.is_user {
            set_file_system_user(0);
        }
    }
}

/// Sets the user of this thread only (setfsuid(2)). It cannot fail for a thread with `CAP_SETUID`,
/// except for -1, which is replaced by `nobody`.
#[allow(unsafe_code)]
fn set_file_system_user(uid: u32) {
    // SAFETY: the call changes the file system user of this thread, and touches no memory.
    unsafe { libc::setfsuid(uid.min(NOBODY)) };
}
