//! Private mounts for a test.
#![allow(unsafe_code)] // a namespace for one thread

use std::process::Command;

use rustix::thread::UnshareFlags;

/// Gives the calling thread a private mount namespace.
pub(crate) fn own_mounts() {
    // SAFETY: only the thread's mount namespace and working directory change.
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
