//! A tap as a test's private network.
#![allow(unsafe_code)] // TUNSETIFF, a namespace for one thread

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Command;

use rustix::thread::UnshareFlags;

/// The host's address on the tap; a guest uses another one of 10.9.0.0/24.
pub(crate) const HOST: &str = "10.9.0.1";

/// Creates a tap named `tap0` in a private network namespace of the calling thread, with the
/// address [`HOST`].
pub(crate) fn tap() -> File {
    tap_queues(1).remove(0)
}

/// As [`tap`], with this many queues.
pub(crate) fn tap_queues(count: usize) -> Vec<File> {
    // SAFETY: only the thread's network namespace changes.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.expect("run as root");
    let several = match count {
        1 => 0,
        _ => libc::IFF_MULTI_QUEUE,
    };
    let queues = (0..count).map(|_| queue("tap0", several)).collect();
    // The same MAC address in each namespace, or clones would look for the old neighbour at first.
    ip("link set tap0 address 02:00:00:00:00:01");
    ip(&format!("addr add {HOST}/24 dev tap0"));
    ip("link set tap0 up");
    queues
}

/// Opens a queue of the tap `name`, with these flags besides those of every tap.
pub(crate) fn queue(name: &str, flags: libc::c_int) -> File {
    let tap = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .expect("the module `tun`");
    // SAFETY: an ifreq of zeroes is a valid one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.as_bytes()) {
        *to = (*from).cast_signed();
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | flags;
    request.ifr_ifru.ifru_flags = i16::try_from(flags).unwrap();
    // SAFETY: TUNSETIFF reads and writes an ifreq.
    let result = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    tap
}

/// Opens `/dev/vhost-net`.
pub(crate) fn vhost() -> OwnedFd {
    // It may be built in, or loaded already.
    let _ = Command::new("modprobe").arg("vhost_net").status();
    let vhost = File::options()
        .read(true)
        .write(true)
        .open("/dev/vhost-net");
    vhost.expect("the module `vhost_net`").into()
}

fn ip(arguments: &str) {
    let mut command = Command::new("/bin/busybox");
    command.arg("ip").args(arguments.split(' '));
    assert!(command.status().unwrap().success(), "ip {arguments}");
}
