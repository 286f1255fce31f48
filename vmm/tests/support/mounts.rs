//! Mounts of a test's own.
#![allow(unsafe_code)] // a namespace for one thread

use std::process::Command;

use rustix::thread::UnshareFlags;

/// Gives the calling thread mounts of its own, which nobody else sees.
pub(crate) fn own_mounts() {
    // SAFETY: the thread's mount namespace and working directory alone change.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }
        .expect("run as root");
    mount(&["--make-rprivate", "/"]);
}

/// Runs busybox's `mount`.
pub(crate) fn mount(arguments: &[&str]) {
    let mut command = Command::new("/bin/busybox");
    let status = command.arg("mount").args(arguments).status();
    assert!(status.unwrap().success(), "mount {arguments:?}");
}
