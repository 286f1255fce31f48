//! Simulates a sandbox's process that an attacker has taken over: enters the jail as `podvisor
//! sandbox` does, makes one attempt to escape, and prints the result: `ok`, or the error's number.
//! If the system call filter kills it, it prints nothing. In addition to the attempts, it does the
//! process's everyday work, which the filter must allow, and says whether the kernel has all of
//! Landlock that the jail asks for.
//!
//! `tests/jail.rs` starts it, once for each attempt.
//!
//! ```text
//! hostile ATTEMPT FILTER SHARE HOST-PID PORT
//! hostile volume-ATTEMPT FILTER [mapped:]SHARE HOST-PID PORT  # waits for a line, jailed
//! hostile cost filter "" 1 1      # what closing the jail takes
//! ```
#![allow(unsafe_code)] // Attempts are raw system calls.

use std::env;
use std::ffi::{CString, c_long};
use std::fs::File;
use std::hint::black_box;
use std::io::{self, Write as _};
use std::mem::size_of;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant, SystemTime};
use std::{ptr, thread};

use podvisor_cri::sandbox::jail::{self, CallFilter, KvmCalls, MissingLayer, Share};
use rustix::fs::MemfdFlags;

/// Resources that an attempt needs from before the jail was entered.
struct Before {
    kvm: Option<File>,
    share: Option<Share>,
    /// A process of the host.
    pid: c_long,
    /// A TCP port on the host's loopback with a listener; there is also an abstract socket named
    /// after it.
    port: u16,
}

fn main() -> io::Result<()> {
    let arguments: Vec<String> = env::args().collect();
    let [_, attempt, filter, share, pid, port] = arguments.as_slice() else {
        return Err(io::Error::other("see the documentation of this program"));
    };
    let before = Before {
        kvm: File::open("/dev/kvm").ok(),
        share: match share.as_str() {
            "" => None,
            path => {
                let (mapped, path) = match path.strip_prefix("mapped:") {
                    Some(path) => (true, path),
                    None => (false, path),
                };
                let share = Share::new(File::open(path)?.into())?;
                Some(if mapped {
                    share.with_mapped_users()
                } else {
                    share
                })
            }
        },
        pid: pid.parse().map_err(io::Error::other)?,
        port: port.parse().map_err(io::Error::other)?,
    };
    let filter = match filter.as_str() {
        "filter" => CallFilter::Enforced { kvm: KvmCalls::Run },
        _ => CallFilter::Absent,
    };
    let begin = Instant::now();
    let missing = jail::close(before.share.as_ref(), filter).map_err(io::Error::other)?;
    if attempt == "cost" {
        println!("{} us", begin.elapsed().as_micros());
    }
    if attempt.starts_with("volume-") {
        // Whoever started it mounts a volume meanwhile.
        println!("jailed");
        io::stdin().read_line(&mut String::new())?;
    }
    let answer = match every_day(attempt) {
        Some(done) => done,
        None if attempt == "whole-landlock" => {
            let parts = [MissingLayer::Landlock, MissingLayer::PartOfLandlock];
            let is_whole = !missing.iter().any(|layer| parts.contains(layer));
            if is_whole { 0 } else { -1 }
        }
        None => try_to(attempt, &before),
    };
    let error = io::Error::last_os_error().raw_os_error().unwrap_or(0);
    let text = match answer {
        -1 => format!("{error}\n"),
        _ => "ok\n".to_owned(),
    };
    io::stdout().write_all(text.as_bytes())
}

/// Work unrelated to guests, which a thread may do at any time.
fn every_day(work: &str) -> Option<c_long> {
    let is_done = match work {
        "threads" => {
            let threads: Vec<_> = (0..64).map(|_| thread::spawn(thread::yield_now)).collect();
            threads.into_iter().all(|thread| thread.join().is_ok())
        }
        // More arenas of the allocator than it creates before it queries the number of CPUs, and
        // memory that is released.
        "memory" => {
            let fill = || drop(black_box(vec![1_u8; 64 << 20]));
            let small = move || {
                let kept: Vec<Vec<u8>> = (0..20_000).map(|size| vec![1; size % 4000]).collect();
                drop(black_box(kept));
                fill();
            };
            let threads: Vec<_> = (0..12).map(|_| thread::spawn(small)).collect();
            threads.into_iter().all(|thread| thread.join().is_ok())
        }
        "panic" => {
            // The panic's message and location are written to stderr.
            let panics = thread::spawn(|| panic!("every day"));
            panics.join().is_err()
        }
        "time" => {
            thread::sleep(Duration::from_millis(1));
            SystemTime::now() > SystemTime::UNIX_EPOCH
        }
        "memory-file" => {
            let made = rustix::fs::memfd_create(c"every-day", MemfdFlags::CLOEXEC);
            made.map(File::from).is_ok_and(|file| {
                let text = b"every day";
                file.set_len(1 << 20).is_ok()
                    && file.write_all_at(text, 4096).is_ok()
                    && file.metadata().is_ok_and(|data| data.len() == 1 << 20)
            })
        }
        _ => return None,
    };
    Some(if is_done { 0 } else { -1 })
}

fn try_to(attempt: &str, before: &Before) -> c_long {
    let path = |text: &str| CString::new(text).unwrap_or_default();
    let none: *const libc::c_void = ptr::null();
    let share = before
        .share
        .as_ref()
        .map_or(-1, |share| share.as_fd().as_raw_fd());
    // SAFETY: each call has arguments of the kinds that it takes, and pointers to what lives
    // until it returns; none of them changes memory that Rust relies on. `fork`'s child ends at
    // once.
    unsafe {
        match attempt {
            "nothing" | "cost" => libc::syscall(libc::SYS_getpid),
            "open-file" => {
                let file = path("/etc/passwd");
                libc::syscall(
                    libc::SYS_openat,
                    libc::AT_FDCWD,
                    file.as_ptr(),
                    libc::O_RDONLY,
                )
            }
            "open-proc" => {
                let file = path(&format!("/proc/{}/environ", before.pid));
                libc::syscall(
                    libc::SYS_openat,
                    libc::AT_FDCWD,
                    file.as_ptr(),
                    libc::O_RDONLY,
                )
            }
            "list-root" => {
                let root = path("/");
                let flags = libc::O_RDONLY | libc::O_DIRECTORY;
                libc::syscall(libc::SYS_openat, libc::AT_FDCWD, root.as_ptr(), flags)
            }
            "create-file" => {
                let file = path("/file");
                let flags = libc::O_CREAT | libc::O_WRONLY;
                libc::syscall(
                    libc::SYS_openat,
                    libc::AT_FDCWD,
                    file.as_ptr(),
                    flags,
                    0o600,
                )
            }
            "make-device" => {
                let file = path("/device");
                let disk = libc::makedev(8, 0);
                libc::syscall(
                    libc::SYS_mknodat,
                    libc::AT_FDCWD,
                    file.as_ptr(),
                    libc::S_IFBLK | 0o600,
                    disk,
                )
            }
            "leave-share" => {
                let file = path("../../../../../../../../../../etc/passwd");
                libc::syscall(libc::SYS_openat, share, file.as_ptr(), libc::O_RDONLY)
            }
            "change-mode-above-share" => {
                let file = path("../../../../../../../../../../etc/passwd");
                libc::syscall(libc::SYS_fchmodat, share, file.as_ptr(), 0o644)
            }
            "change-owner-above-share" => {
                let file = path("../../../../../../../../../../etc/passwd");
                libc::syscall(libc::SYS_fchownat, share, file.as_ptr(), 0, 0, 0)
            }
            "change-times-above-share" => {
                let file = path("../../../../../../../../../../etc/passwd");
                let time = |tv_nsec| libc::timespec { tv_sec: 0, tv_nsec };
                // Only the access time.
                let times = [time(libc::UTIME_NOW), time(libc::UTIME_OMIT)];
                libc::syscall(libc::SYS_utimensat, share, file.as_ptr(), times.as_ptr(), 0)
            }
            "look-above-share" => {
                let mut about: libc::stat = std::mem::zeroed();
                let file = path("../../../../../../../../../../etc/passwd");
                let about = (&raw mut about).cast::<libc::c_void>();
                libc::syscall(libc::SYS_newfstatat, share, file.as_ptr(), about, 0)
            }
            "datagram-pair" => {
                let mut pair = [0_i32; 2];
                libc::syscall(
                    libc::SYS_socketpair,
                    libc::AF_UNIX,
                    libc::SOCK_DGRAM,
                    0,
                    pair.as_mut_ptr(),
                )
            }
            "make-device-in-share" => {
                let file = path("device");
                let disk = libc::makedev(8, 0);
                let mode = libc::S_IFBLK | 0o600;
                libc::syscall(libc::SYS_mknodat, share, file.as_ptr(), mode, disk)
            }
            "make-null-in-share" => {
                let file = path("null");
                let null = libc::makedev(1, 3);
                let mode = libc::S_IFCHR | 0o600;
                libc::syscall(libc::SYS_mknodat, share, file.as_ptr(), mode, null)
            }
            "open-handle" => {
                // The root directory of an ext4.
                let mut handle = [0_u8; 16];
                handle[0] = 8;
                handle[4] = 1;
                handle[8] = 2;
                let here = path(".");
                let open = libc::syscall(libc::SYS_openat, share, here.as_ptr(), libc::O_RDONLY);
                libc::syscall(
                    libc::SYS_open_by_handle_at,
                    open,
                    handle.as_ptr(),
                    libc::O_RDONLY,
                )
            }
            "use-share" => {
                let file = path("inside");
                let flags = libc::O_CREAT | libc::O_WRONLY;
                libc::syscall(libc::SYS_openat, share, file.as_ptr(), flags, 0o600)
            }
            "volume-use" => {
                let (new, given) = (path("volume/new"), path("volume/given"));
                let as_user = |id: c_long| {
                    if id != 0 {
                        libc::syscall(libc::SYS_setresgid, -1, id, -1);
                    }
                    let done = libc::syscall(libc::SYS_setresuid, -1, id, -1);
                    match id {
                        0 => libc::syscall(libc::SYS_setresgid, -1, 0, -1),
                        _ => done,
                    }
                };
                if as_user(1000) == -1 {
                    return -1;
                }
                let flags = libc::O_CREAT | libc::O_WRONLY;
                let made = libc::syscall(libc::SYS_openat, share, new.as_ptr(), flags, 0o600);
                if made == -1 || as_user(0) == -1 {
                    return -1;
                }
                let read = libc::O_RDONLY;
                match libc::syscall(libc::SYS_openat, share, given.as_ptr(), read) {
                    -1 => -1,
                    _ => libc::syscall(libc::SYS_fchownat, share, given.as_ptr(), 1234, 1234, 0),
                }
            }
            "volume-read-secret" => {
                let file = path("secret");
                libc::syscall(libc::SYS_openat, share, file.as_ptr(), libc::O_RDONLY)
            }
            "volume-give-secret" => {
                let file = path("secret");
                libc::syscall(libc::SYS_fchownat, share, file.as_ptr(), 1234, 1234, 0)
            }
            "volume-open-secret-to-all" => {
                let file = path("secret");
                libc::syscall(libc::SYS_fchmodat, share, file.as_ptr(), 0o666)
            }
            "volume-make-beside" => {
                let file = path("beside");
                let flags = libc::O_CREAT | libc::O_WRONLY;
                libc::syscall(libc::SYS_openat, share, file.as_ptr(), flags, 0o600)
            }
            "signal" => libc::syscall(libc::SYS_kill, before.pid, 0),
            "signal-thread" => libc::syscall(libc::SYS_tgkill, before.pid, before.pid, 0),
            "open-process" => libc::syscall(libc::SYS_pidfd_open, before.pid, 0),
            "trace" => libc::syscall(libc::SYS_ptrace, libc::PTRACE_SEIZE, before.pid, 0, 0),
            "read-memory" => {
                let mut byte = 0_u8;
                let local = libc::iovec {
                    iov_base: (&raw mut byte).cast(),
                    iov_len: 1,
                };
                libc::syscall(
                    libc::SYS_process_vm_readv,
                    before.pid,
                    &raw const local,
                    1_usize,
                    &raw const local,
                    1_usize,
                    // On the stack, whose other half would be anything.
                    0_usize,
                )
            }
            "limit-process" => {
                let limit = libc::rlimit {
                    rlim_cur: 0,
                    rlim_max: 0,
                };
                libc::syscall(
                    libc::SYS_prlimit64,
                    before.pid,
                    libc::RLIMIT_CORE,
                    &raw const limit,
                    none,
                )
            }
            "tcp" => {
                let socket = libc::syscall(libc::SYS_socket, libc::AF_INET, libc::SOCK_STREAM, 0);
                if socket == -1 {
                    return -1;
                }
                connect_loopback(socket, before.port)
            }
            "udp" => {
                let socket = libc::syscall(libc::SYS_socket, libc::AF_INET, libc::SOCK_DGRAM, 0);
                if socket == -1 {
                    return -1;
                }
                connect_loopback(socket, before.port)
            }
            "raw-socket" => {
                let protocol = libc::c_int::from(3_u16.to_be().cast_signed());
                libc::syscall(libc::SYS_socket, libc::AF_PACKET, libc::SOCK_RAW, protocol)
            }
            "abstract-socket" => {
                let socket = libc::syscall(libc::SYS_socket, libc::AF_UNIX, libc::SOCK_STREAM, 0);
                if socket == -1 {
                    return -1;
                }
                let mut name: libc::sockaddr_un = std::mem::zeroed();
                name.sun_family = libc::AF_UNIX.unsigned_abs() as u16;
                let text = format!("podvisor-test-{}", before.port);
                for (to, from) in name.sun_path.iter_mut().skip(1).zip(text.bytes()) {
                    *to = from.cast_signed();
                }
                let length = size_of::<libc::sa_family_t>() + 1 + text.len();
                libc::syscall(libc::SYS_connect, socket, &raw const name, length)
            }
            "mount" => {
                let (source, target) = (path("x"), path("/"));
                let kind = path("tmpfs");
                libc::syscall(
                    libc::SYS_mount,
                    source.as_ptr(),
                    target.as_ptr(),
                    kind.as_ptr(),
                    0,
                    none,
                )
            }
            "unmount" => {
                let root = path("/");
                libc::syscall(libc::SYS_umount2, root.as_ptr(), libc::MNT_DETACH)
            }
            "chroot" => {
                let root = path("/");
                libc::syscall(libc::SYS_chroot, root.as_ptr())
            }
            "user-namespace" => libc::syscall(libc::SYS_unshare, libc::CLONE_NEWUSER),
            "namespace" => libc::syscall(libc::SYS_unshare, libc::CLONE_NEWNS),
            "load-module" => {
                let parameters = path("");
                libc::syscall(libc::SYS_init_module, none, 0, parameters.as_ptr())
            }
            "load-kernel" => libc::syscall(libc::SYS_kexec_load, 0, 0, none, 0),
            "load-bpf" => {
                let attributes = [0_u64; 16];
                libc::syscall(
                    libc::SYS_bpf,
                    0,
                    attributes.as_ptr(),
                    size_of_val(&attributes),
                )
            }
            "execute" => {
                let program = path("/bin/sh");
                let arguments = [program.as_ptr(), ptr::null()];
                libc::syscall(
                    libc::SYS_execve,
                    program.as_ptr(),
                    arguments.as_ptr(),
                    arguments[1..].as_ptr(),
                )
            }
            "fork" => match libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) {
                0 => libc::_exit(0),
                other => other,
            },
            "become-root" => libc::syscall(libc::SYS_setresuid, 0, 0, 0),
            "reboot" => libc::syscall(libc::SYS_reboot, 0, 0, 0, none),
            "set-host-name" => {
                let name = path("evil");
                libc::syscall(libc::SYS_sethostname, name.as_ptr(), 4)
            }
            "set-clock" => {
                let time = libc::timespec {
                    tv_sec: 0,
                    tv_nsec: 0,
                };
                libc::syscall(
                    libc::SYS_clock_settime,
                    libc::CLOCK_REALTIME,
                    &raw const time,
                )
            }
            "ports" => libc::syscall(libc::SYS_iopl, 3),
            "keyring" => libc::syscall(libc::SYS_keyctl, 0, -4, 0, 0, 0),
            "shared-memory" => libc::syscall(libc::SYS_shmget, 0x7064_7673, 1, 0),
            "io-uring" => {
                let mut parameters = [0_u64; 32];
                libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr())
            }
            "executable-memory" => libc::syscall(
                libc::SYS_mmap,
                none,
                4096,
                libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            ),
            // On a file from its launcher: its stdin.
            "lock" => libc::syscall(libc::SYS_flock, 0, libc::LOCK_EX),
            "lease" => libc::syscall(libc::SYS_fcntl, 0, libc::F_SETLEASE, libc::F_RDLCK),
            "another-vm" => {
                let kvm = before.kvm.as_ref().map_or(-1, |kvm| kvm.as_raw_fd());
                libc::syscall(libc::SYS_ioctl, kvm, 0xae01, 0)
            }
            "terminal-input" => {
                let key = b'x';
                libc::syscall(libc::SYS_ioctl, 1, libc::TIOCSTI, &raw const key)
            }
            other => {
                // The test fails on it, since it expects a line.
                eprintln!("no attempt {other:?}");
                libc::_exit(2)
            }
        }
    }
}

/// SAFETY: `socket` is an open socket of `AF_INET`.
unsafe fn connect_loopback(socket: c_long, port: u16) -> c_long {
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET.unsigned_abs() as u16,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from_ne_bytes([127, 0, 0, 1]),
        },
        sin_zero: [0; 8],
    };
    // SAFETY: the address is valid for the call.
    unsafe {
        libc::syscall(
            libc::SYS_connect,
            socket,
            &raw const address,
            size_of::<libc::sockaddr_in>(),
        )
    }
}
