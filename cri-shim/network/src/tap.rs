//! Taps with a virtio-net header on each frame, by `TUNSETIFF`: the host's ends of a guest's cards.
//! Nothing here knows how they are joined to a network.
#![allow(unsafe_code)] // TUNSETIFF, a network namespace for one thread

use std::ffi::c_short;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use rustix::ioctl::{Updater, ioctl};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Most taps of one pod.
pub const MAX_NICS: usize = 8;

/// The device by which taps are created.
pub const TUN: &str = "/dev/net/tun";

/// `TUNSETIFF` of linux/if_tun.h.
const TUNSETIFF: rustix::ioctl::Opcode = rustix::ioctl::opcode::write::<i32>(b'T', 202);
const IFF_TAP: c_short = 0x0002;
const IFF_NO_PI: c_short = 0x1000;
const IFF_VNET_HDR: c_short = 0x4000;

/// The prefix of taps' names, before a number.
const TAP_NAME: &str = "podvisor";

/// The kernel's `struct ifreq` as `TUNSETIFF` takes it.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; 16],
    flags: c_short,
    rest: [u8; 22],
}

/// Returns the name of a tap.
pub fn tap_name(number: usize) -> String {
    format!("{TAP_NAME}{number}")
}

/// Whether this may be the name of one of our taps.
pub fn is_tap_name(name: &str) -> bool {
    let number = name.strip_prefix(TAP_NAME);
    number.is_some_and(|number| number.parse().is_ok_and(|number: usize| number < MAX_NICS))
}

/// Opens `count` taps in this thread's network namespace, for interfaces that do not exist yet.
pub fn open_taps(count: usize) -> io::Result<Vec<OwnedFd>> {
    (0..count.min(MAX_NICS)).map(open_tap).collect()
}

/// Opens a tap in this thread's network namespace; it is removed when its descriptor is closed.
pub fn open_tap(number: usize) -> io::Result<OwnedFd> {
    let file: File = OpenOptions::new().read(true).write(true).open(TUN)?;
    let mut request = InterfaceRequest {
        name: [0; 16],
        flags: IFF_TAP | IFF_NO_PI | IFF_VNET_HDR,
        rest: [0; 22],
    };
    let name = tap_name(number);
    for (to, from) in request.name.iter_mut().zip(name.bytes()).take(15) {
        *to = from;
    }
    // SAFETY: TUNSETIFF reads and writes one `struct ifreq` (40 bytes), which has the layout of
    // `InterfaceRequest`.
    unsafe { ioctl(file.as_fd(), Updater::<TUNSETIFF, _>::new(&mut request)) }?;
    Ok(file.into())
}

/// Opens taps in a new network namespace, which this thread enters permanently.
pub fn taps_apart(count: u8) -> io::Result<Vec<OwnedFd>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: only the network namespace of this thread changes.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
    (0..usize::from(count)).map(open_tap).collect()
}
