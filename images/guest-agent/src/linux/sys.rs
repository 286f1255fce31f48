//! System calls for which there are no safe wrappers.
#![allow(unsafe_code)] // Each block states why it is sound.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::sync::atomic::{AtomicI32, Ordering};

/// `FIFREEZE` and `FITHAW`: `_IOWR('X', 119, int)` and the next one.
const FREEZE: libc::c_ulong = 0xc004_5877;
const THAW: libc::c_ulong = 0xc004_5878;

/// What an interface has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    /// Neither of these.
    Nothing,
    /// A hardware address.
    Mac([u8; 6]),
    /// An address, with the length of its prefix.
    Address(IpAddr, u32),
}

fn done(result: libc::c_int) -> io::Result<()> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

pub(super) fn freeze(file: &File) -> io::Result<()> {
    // SAFETY: the descriptor is open during the call, and FIFREEZE looks at no argument.
    done(unsafe { libc::ioctl(file.as_raw_fd(), FREEZE, 0) })
}

pub(super) fn thaw(file: &File) -> io::Result<()> {
    // SAFETY: as for FIFREEZE.
    done(unsafe { libc::ioctl(file.as_raw_fd(), THAW, 0) })
}

/// Makes the kernel send SIGIO to this process when something happens to a file.
pub(super) fn notify(file: BorrowedFd<'_>) -> io::Result<()> {
    let pid = libc::pid_t::try_from(std::process::id()).unwrap_or(0);
    // SAFETY: the descriptor is open during the call; the argument is a number.
    done(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETOWN, pid) })?;
    // SAFETY: as before.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    done(flags)?;
    // SAFETY: as before.
    done(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags | libc::O_ASYNC) })
}

/// Where signals are written to.
static PIPE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn write_signal(signal: libc::c_int) {
    let byte = u8::try_from(signal).unwrap_or(0);
    // SAFETY: `errno` is the thread's own, and the code that was interrupted may be about to read
    // it.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: `write` may be called by a handler; the descriptor is never closed (see below), and
    // a byte that finds no room is one of many.
    unsafe {
        libc::write(
            PIPE.load(Ordering::Relaxed),
            std::ptr::from_ref(&byte).cast(),
            1,
        );
    }
    // SAFETY: as before.
    unsafe { *libc::__errno_location() = errno };
}

/// Writes each of these signals to a pipe, from now on, as a byte of its number.
pub(super) fn write_signals(pipe: impl AsFd, signals: &[libc::c_int]) -> io::Result<()> {
    // It is this process's for good.
    let kept = pipe.as_fd().try_clone_to_owned()?;
    PIPE.store(kept.as_raw_fd(), Ordering::Relaxed);
    std::mem::forget(kept);
    for signal in signals {
        // SAFETY: all zeroes are a valid `sigaction`: no flags, an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        let handler: extern "C" fn(libc::c_int) = write_signal;
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        // SAFETY: the action is whole, and its handler calls only what a handler may.
        done(unsafe { libc::sigaction(*signal, &action, std::ptr::null_mut()) })?;
    }
    Ok(())
}

/// Does something with the file system rights of a user.
pub(super) fn as_user<T>(uid: u32, gid: u32, what: impl FnOnce() -> T) -> T {
    /// Also if `what` panics.
    struct Back(libc::c_int, libc::c_int);
    impl Drop for Back {
        fn drop(&mut self) {
            // SAFETY: these calls change two numbers of this thread, and cannot fail for numbers
            // that it had.
            unsafe { libc::setfsuid(self.0.cast_unsigned()) };
            // SAFETY: as before.
            unsafe { libc::setfsgid(self.1.cast_unsigned()) };
        }
    }
    // The group first: the user may not change it.
    // SAFETY: as above; each returns the number before, and a process without the right to it
    // keeps its own.
    let group = unsafe { libc::setfsgid(gid) };
    // SAFETY: as before.
    let user = unsafe { libc::setfsuid(uid) };
    let _back = Back(user, group);
    what()
}

/// The name and the offset of the time zone, in seconds before universal time.
pub(super) fn time_zone(seconds: i64) -> Option<(String, i64)> {
    // SAFETY: all zeroes are a valid `tm`: numbers, and no name.
    let mut time: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to values that live through the call.
    let found = unsafe { libc::localtime_r(&seconds, &mut time) };
    if found.is_null() {
        return None;
    }
    let name = match time.tm_zone.is_null() {
        true => String::new(),
        // SAFETY: the C library's name of the zone, which lives as long as the process changes no
        // zone, and it changes none.
        false => unsafe { CStr::from_ptr(time.tm_zone) }
            .to_string_lossy()
            .into_owned(),
    };
    Some((name, time.tm_gmtoff))
}

/// What each interface has, in the kernel's order.
pub(super) fn interfaces() -> io::Result<Vec<(String, Seen)>> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the pointer is to a variable of ours.
    done(unsafe { libc::getifaddrs(&mut first) })?;
    let mut found = Vec::new();
    let mut next = first;
    while !next.is_null() {
        // SAFETY: the list is the C library's, whole until it is freed below.
        let entry = unsafe { &*next };
        // SAFETY: names are terminated, in the same list.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        // SAFETY: an address is null, or of the type that its family says.
        let seen = unsafe { address(entry.ifa_addr, entry.ifa_netmask) };
        found.push((name.to_string_lossy().into_owned(), seen));
        next = entry.ifa_next;
    }
    // SAFETY: it was returned by `getifaddrs`, and nothing points into it any more.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

/// Reads an address and its mask.
///
/// # Safety
/// Each is null, or points to an address of the type that its family says.
unsafe fn address(address: *const libc::sockaddr, mask: *const libc::sockaddr) -> Seen {
    if address.is_null() {
        return Seen::Nothing;
    }
    // SAFETY: every address begins with its family.
    match i32::from(unsafe { (*address).sa_family }) {
        libc::AF_PACKET => {
            // SAFETY: of this family.
            let link = unsafe { address.cast::<libc::sockaddr_ll>().read_unaligned() };
            let [a, b, c, d, e, f, ..] = link.sll_addr;
            match link.sll_halen {
                6 => Seen::Mac([a, b, c, d, e, f]),
                _ => Seen::Nothing,
            }
        }
        libc::AF_INET => {
            let of = |address: *const libc::sockaddr| {
                // SAFETY: of this family.
                let address = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
                u32::from_be(address.sin_addr.s_addr)
            };
            let ip = Ipv4Addr::from(of(address));
            let prefix = match mask.is_null() {
                true => 32,
                false => of(mask).leading_ones(),
            };
            Seen::Address(ip.into(), prefix)
        }
        libc::AF_INET6 => {
            let of = |address: *const libc::sockaddr| {
                // SAFETY: of this family.
                let address = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
                u128::from_be_bytes(address.sin6_addr.s6_addr)
            };
            let ip = Ipv6Addr::from(of(address));
            let prefix = match mask.is_null() {
                true => 128,
                false => of(mask).leading_ones(),
            };
            Seen::Address(ip.into(), prefix)
        }
        _ => Seen::Nothing,
    }
}
