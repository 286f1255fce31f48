//! The system calls that a VM's threads may make: a list for each kind of thread.
//!
//! Any call that is not on a thread's list fails with EPERM. A guest that takes over the thread of
//! a vCPU or of devices has no call by which it could start a program, open, rename or remove a
//! file, or create a socket except a pair connected to itself: it has only the open descriptors.
//! The rings of `io_uring` among these are restricted to requests on their disk's file
//! ([`UringDisk`]), and cannot be changed. More is allowed to
//!
//! * the thread of a socket device whose host side uses paths: it creates Unix sockets (of no other
//!   family), connects them to any path that the process may reach, and removes files;
//! * the thread of a shared directory, which performs its guest's requests on files.
//!
//! Filters are compiled once in a process, and apply only to threads of VMs: those of the program
//! that uses this library have none.
//!
//! [`UringDisk`]: podvisor_devices::blk::UringDisk

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use podvisor_seccomp::{BpfProgram, Condition, Otherwise, Rule, Verdict, Width, apply, compile};
use rustix::process::{Pid, getpid};

use super::lock::lock;
use super::vcpu::kick::KICK;

/// Whether threads of a VM are confined to the system calls that they need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Seccomp {
    /// They are.
    #[default]
    On,
    /// They are not: for programs whose writers, disks, devices or listeners do more on these
    /// threads than read, write and signal.
    Off,
}

/// The kind of work that a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThreadKind {
    /// Runs a vCPU.
    Vcpu,
    /// Serves devices whose host sides are open descriptors.
    Devices,
    /// Serves a socket device whose host side uses paths.
    Sockets,
    /// Serves a shared directory.
    Files,
}

/// Why a thread could not be confined.
#[derive(Debug, thiserror::Error)]
#[error("failed to install the seccomp filter of a thread")]
pub(crate) struct SeccompError(#[source] podvisor_seccomp::Error);

/// A compiled filter, and the process that it is for: it names it, and a fork has another.
type Filter = (Pid, Arc<BpfProgram>);

/// Confines the calling thread permanently.
pub(crate) fn confine(kind: ThreadKind) -> Result<(), SeccompError> {
    static FILTERS: Mutex<[Option<Filter>; 4]> = Mutex::new([const { None }; 4]);
    let process = getpid();
    let program = {
        let mut filters = lock(&FILTERS);
        let filter = &mut filters[kind as usize];
        match filter {
            Some((of, program)) if *of == process => program.clone(),
            _ => {
                let program = Arc::new(program(kind, process));
                *filter = Some((process, program.clone()));
                program
            }
        }
    };
    apply(&program).map_err(SeccompError)
}

/// Memory, time, locks, signals and the end of a thread: what any Rust code may need.
const COMMON: &[i64] = &[
    libc::SYS_futex,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_sched_yield,
    libc::SYS_membarrier,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // The IDs of a process are those of its threads: the C library makes each of them do the call,
    // and aborts the process if one of them fails.
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    // Writers and disks that an owner passes in.
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_lseek,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
];

const DEVICES: &[i64] = &[
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_ctl,
    // Rates, and turns that were not long enough.
    libc::SYS_timerfd_settime,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_io_uring_enter,
    libc::SYS_accept4,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_fcntl,
    libc::SYS_dup,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_statx,
];

/// Additional calls for a socket device's host side that uses paths: it removes its listener's
/// file.
const SOCKETS: &[i64] = &[libc::SYS_connect, libc::SYS_unlink, libc::SYS_unlinkat];

/// Calls for the requests on a shared directory, always below an open directory, and for acting as
/// the guest's users.
const FILES: &[i64] = &[
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_fstatfs,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_fgetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_flistxattr,
    libc::SYS_fremovexattr,
    libc::SYS_copy_file_range,
    libc::SYS_syncfs,
    libc::SYS_umask,
    libc::SYS_geteuid,
    libc::SYS_getegid,
    libc::SYS_getuid,
    libc::SYS_getgid,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_capget,
    libc::SYS_capset,
];

/// Code in memory: `PROT_EXEC`.
const PROT_EXEC: u64 = libc::PROT_EXEC as u64;

/// The bits of a socket's type that are not flags: `SOCK_TYPE_MASK` of linux/net.h.
const SOCK_TYPE_MASK: u64 = 0xf;

/// The error for calls that are not on a thread's list.
const EPERM: u16 = 1;

/// `_IOC` of linux/ioctl.h.
const fn ioc(direction: u32, kind: u32, number: u32, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | kind << 8 | number
}

const fn kvm_read<T>(number: u32) -> u32 {
    ioc(2, kvm_bindings::KVMIO, number, size_of::<T>())
}

/// Sets the interrupt line of a device: `KVM_IRQ_LINE`.
const IRQ_LINE: u32 = ioc(
    1,
    kvm_bindings::KVMIO,
    0x61,
    size_of::<kvm_bindings::kvm_irq_level>(),
);

/// Sends the MSI of a device: `KVM_SIGNAL_MSI`.
const SIGNAL_MSI: u32 = ioc(
    1,
    kvm_bindings::KVMIO,
    0xa5,
    size_of::<kvm_bindings::kvm_msi>(),
);

/// Sets where a driver notifies a device, after it has moved its BAR: `KVM_IOEVENTFD`.
const IOEVENTFD: u32 = ioc(
    1,
    kvm_bindings::KVMIO,
    0x79,
    size_of::<kvm_bindings::kvm_ioeventfd>(),
);

/// The ioctls of a vCPU's thread on KVM: running, and the state of its vCPU.
const VCPU_IOCTLS: &[u32] = &[
    ioc(0, kvm_bindings::KVMIO, 0x80, 0), // KVM_RUN
    IRQ_LINE,
    SIGNAL_MSI,
    IOEVENTFD,
    ioc(0, kvm_bindings::KVMIO, 0xad, 0), // KVM_KVMCLOCK_CTRL
    ioc(1, kvm_bindings::KVMIO, 0x8b, 4), // KVM_SET_SIGNAL_MASK
    kvm_read::<kvm_bindings::kvm_regs>(0x81),
    kvm_read::<kvm_bindings::kvm_sregs>(0x83),
    ioc(3, kvm_bindings::KVMIO, 0x88, 8), // KVM_GET_MSRS
    kvm_read::<kvm_bindings::kvm_lapic_state>(0x8e),
    kvm_read::<kvm_bindings::kvm_mp_state>(0x98),
    kvm_read::<kvm_bindings::kvm_vcpu_events>(0x9f),
    kvm_read::<kvm_bindings::kvm_debugregs>(0xa1),
    ioc(0, kvm_bindings::KVMIO, 0xa3, 0), // KVM_GET_TSC_KHZ
    kvm_read::<kvm_bindings::kvm_xsave>(0xa4),
    kvm_read::<kvm_bindings::kvm_xcrs>(0xa6),
];

/// The ioctls of devices: their lines and messages, a nonblocking socket, discarding a range of a
/// disk, what a tap offloads and filters, and what the kernel serves by it.
const DEVICE_IOCTLS: &[u32] = &[
    SIGNAL_MSI,
    IRQ_LINE,
    0x5421,                              // FIONBIO
    ioc(0, 0x12, 119, 0),                // BLKDISCARD
    ioc(1, 0x54, 208, size_of::<u32>()), // TUNSETOFFLOAD
    ioc(1, 0x54, 209, size_of::<u32>()), // TUNSETTXFILTER
    ioc(1, 0x54, 216, size_of::<u32>()), // TUNSETVNETHDRSZ
    // vhost: features and memory; size, addresses, position, kick, call and error of a ring; the
    // tap.
    ioc(1, 0xaf, 0x00, 8),
    ioc(1, 0xaf, 0x03, 8),
    ioc(1, 0xaf, 0x10, 8),
    ioc(1, 0xaf, 0x11, 40),
    ioc(1, 0xaf, 0x12, 8),
    ioc(3, 0xaf, 0x12, 8),
    ioc(1, 0xaf, 0x20, 8),
    ioc(1, 0xaf, 0x21, 8),
    ioc(1, 0xaf, 0x22, 8),
    ioc(1, 0xaf, 0x30, 8),
];

fn program(kind: ThreadKind, process: Pid) -> BpfProgram {
    let lists: &[&[i64]] = match kind {
        ThreadKind::Vcpu => &[COMMON],
        ThreadKind::Devices => &[COMMON, DEVICES],
        ThreadKind::Sockets => &[COMMON, DEVICES, SOCKETS],
        ThreadKind::Files => &[COMMON, DEVICES, FILES],
    };
    let listed = lists.iter().copied().flatten();
    let mut calls: BTreeMap<i64, Verdict> = listed.map(|call| (*call, Verdict::Allow)).collect();
    let ioctls = match kind {
        ThreadKind::Vcpu => VCPU_IOCTLS,
        ThreadKind::Devices | ThreadKind::Sockets | ThreadKind::Files => DEVICE_IOCTLS,
    };
    let requests = ioctls.iter().map(|request| argument(1, *request));
    calls.insert(libc::SYS_ioctl, Verdict::AllowIf(requests.collect()));
    // Memory is never code.
    let is_data = vec![Condition::masked(2, Width::Word, PROT_EXEC, 0)];
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        calls.insert(call, Verdict::AllowIf(vec![is_data.clone()]));
    }
    // A thread kicks the vCPUs of its own process, and nobody else.
    let process = process.as_raw_nonzero().get().cast_unsigned();
    let kick = [argument(0, process), argument(2, KICK.cast_unsigned())].concat();
    calls.insert(libc::SYS_tgkill, Verdict::AllowIf(vec![kick]));
    if kind != ThreadKind::Vcpu {
        // Streams within this process: a datagram socket could send to any path.
        let mut stream = argument(0, libc::AF_UNIX.cast_unsigned());
        let kind = libc::SOCK_STREAM.cast_unsigned().into();
        stream.push(Condition::masked(1, Width::Word, SOCK_TYPE_MASK, kind));
        calls.insert(libc::SYS_socketpair, Verdict::AllowIf(vec![stream]));
    }
    if kind == ThreadKind::Sockets {
        // Unix sockets only.
        let family = argument(0, libc::AF_UNIX.cast_unsigned());
        calls.insert(libc::SYS_socket, Verdict::AllowIf(vec![family]));
    }
    if kind == ThreadKind::Files {
        // An own umask for new files; the thread has called it before, or will with its first
        // request.
        let own = argument(0, libc::CLONE_FS.cast_unsigned());
        calls.insert(libc::SYS_unshare, Verdict::AllowIf(vec![own]));
    }
    compile(&calls, Otherwise::Fail(EPERM))
}

/// Matches if the low half of an argument, which is all that the kernel uses of these, has this
/// value.
fn argument(index: u32, value: u32) -> Rule {
    vec![Condition::is(index, Width::Word, value.into())]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;

    const ALL: [ThreadKind; 4] = [
        ThreadKind::Vcpu,
        ThreadKind::Devices,
        ThreadKind::Sockets,
        ThreadKind::Files,
    ];

    /// Runs `work` on a confined thread.
    fn confined<T: Send + 'static>(
        kind: ThreadKind,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let thread = std::thread::spawn(move || {
            confine(kind).unwrap();
            work()
        });
        thread.join().unwrap()
    }

    #[test]
    fn files_are_opened_by_shared_directories_alone() {
        for (kind, may) in [
            (ThreadKind::Vcpu, false),
            (ThreadKind::Devices, false),
            (ThreadKind::Sockets, false),
            (ThreadKind::Files, true),
        ] {
            let opened = confined(kind, || std::fs::File::open("/dev/null").map(drop));
            match opened {
                Ok(()) => assert!(may, "{kind:?}"),
                Err(error) => {
                    assert!(
                        !may && error.kind() == ErrorKind::PermissionDenied,
                        "{error}"
                    );
                }
            }
        }
    }

    #[test]
    fn no_thread_starts_programs_or_threads_or_reaches_the_network() {
        for kind in ALL {
            confined(kind, move || {
                assert!(std::process::Command::new("/bin/true").status().is_err());
                assert!(std::thread::Builder::new().spawn(|| ()).is_err());
                assert!(std::net::UdpSocket::bind("127.0.0.1:0").is_err());
            });
        }
    }

    #[test]
    #[allow(unsafe_code)] // calls that are refused, and a mapping that is given back
    fn memory_is_never_code_and_signals_are_kicks_of_this_process() {
        for kind in ALL {
            confined(kind, move || {
                let map = |protection| {
                    // SAFETY: a new mapping, which nothing else refers to.
                    let at = unsafe {
                        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                        libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0)
                    };
                    (at != libc::MAP_FAILED).then_some(at)
                };
                assert!(map(libc::PROT_READ | libc::PROT_EXEC).is_none(), "{kind:?}");
                let at = map(libc::PROT_READ | libc::PROT_WRITE).unwrap();
                // SAFETY: the mapping is this test's.
                unsafe {
                    assert_eq!(libc::mprotect(at, 4096, libc::PROT_EXEC), -1, "{kind:?}");
                    assert_eq!(libc::mprotect(at, 4096, libc::PROT_READ), 0, "{kind:?}");
                    assert_eq!(libc::munmap(at, 4096), 0);
                }
                // SAFETY: the kick is ignored by default; the other calls are refused.
                let send = |process: u32, signal: i32| unsafe {
                    libc::syscall(libc::SYS_tgkill, process, libc::gettid(), signal)
                };
                let own = std::process::id();
                assert_eq!(send(own, KICK), 0, "{kind:?}");
                assert_eq!(send(own, libc::SIGTERM), -1, "{kind:?}");
                assert_eq!(send(1, KICK), -1, "{kind:?}");
                // SAFETY: the name is not changed: the call is refused.
                let renamed = unsafe { libc::prctl(libc::PR_SET_NAME, c"x".as_ptr()) };
                assert_eq!(renamed, -1, "{kind:?}");
            });
        }
    }

    #[test]
    fn pairs_of_sockets_are_streams_of_threads_of_devices() {
        use std::os::unix::net::{UnixDatagram, UnixStream};
        for kind in ALL {
            let (streams, datagrams) = confined(kind, || {
                (UnixStream::pair().is_ok(), UnixDatagram::pair().is_ok())
            });
            assert_eq!(streams, kind != ThreadKind::Vcpu, "{kind:?}");
            assert!(!datagrams, "{kind:?}");
        }
    }

    #[test]
    fn sockets_are_connected_by_the_threads_of_such_host_sides_alone() {
        use std::os::unix::net::{UnixListener, UnixStream};
        let dir = tempfile::tempdir().unwrap();
        for kind in ALL {
            let path = dir.path().join("socket");
            let _listener = UnixListener::bind(&path).unwrap();
            let connected = confined(kind, {
                let path = path.clone();
                move || UnixStream::connect(path).map(drop)
            });
            assert_eq!(connected.is_ok(), kind == ThreadKind::Sockets, "{kind:?}");
            let removed = confined(kind, {
                let path = path.clone();
                move || std::fs::remove_file(path)
            });
            assert_eq!(removed.is_ok(), kind == ThreadKind::Sockets, "{kind:?}");
            if removed.is_err() {
                std::fs::remove_file(path).unwrap();
            }
        }
    }

    #[test]
    fn a_ring_that_is_there_works_and_no_other_is_made() {
        use podvisor_devices::blk::{Disk, Operation, Submitted, UringDisk};
        use vm_memory::{Bytes, GuestAddress, GuestMemory};
        for kind in [ThreadKind::Devices, ThreadKind::Sockets, ThreadKind::Files] {
            let file = tempfile::tempfile().unwrap();
            file.set_len(512).unwrap();
            let mut disk = UringDisk::new(file.try_clone().unwrap()).unwrap();
            confined(kind, move || {
                let mem = podvisor_devices::testing::memory(1 << 16);
                mem.write_obj(1u8, GuestAddress(0)).unwrap();
                let slices = [mem.get_slice(GuestAddress(0), 512).unwrap()];
                let read = Operation::Read {
                    offset: 0,
                    slices: &slices,
                };
                assert!(matches!(disk.submit(&mem, 0, read), Submitted::Queued));
                disk.commit().unwrap();
                disk.wait().unwrap();
                disk.completed().unwrap().result.unwrap();
                assert_eq!(mem.read_obj::<u8>(GuestAddress(0)).unwrap(), 0);
                let error = UringDisk::new(file).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::PermissionDenied);
            });
        }
    }

    #[test]
    fn devices_set_their_timers() {
        use rustix::time::{
            Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
            timerfd_settime,
        };
        for kind in [ThreadKind::Devices, ThreadKind::Files] {
            let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).unwrap();
            let soon = Timespec {
                tv_sec: 0,
                tv_nsec: 1,
            };
            let spec = Itimerspec {
                it_interval: Timespec::default(),
                it_value: soon,
            };
            let fired = confined(kind, move || {
                timerfd_settime(&timer, TimerfdTimerFlags::empty(), &spec)?;
                rustix::io::read(&timer, &mut [0; 8])
            });
            assert_eq!(fired, Ok(8), "{kind:?}");
        }
    }

    /// In a separate process, which the C library aborts if threads disagree.
    #[test]
    fn the_program_changes_its_ids_while_threads_are_confined() {
        crate::vm::testing::in_own_process(
            "vm::seccomp::tests::the_program_changes_its_ids_while_threads_are_confined",
            change_ids,
        );
    }

    #[allow(unsafe_code)] // the C library's calls for all threads
    fn change_ids() {
        let (confined, ready) = std::sync::mpsc::channel();
        for kind in ALL {
            let confined = confined.clone();
            std::thread::spawn(move || {
                confine(kind).unwrap();
                confined.send(()).unwrap();
                loop {
                    std::thread::park();
                }
            });
        }
        ALL.iter().for_each(|_| ready.recv().unwrap());
        // SAFETY: none takes a pointer but the last, which is to read no groups.
        let changed = unsafe {
            let (user, group) = (libc::getuid(), libc::getgid());
            // Without privileges, all threads fail.
            libc::setgroups(0, std::ptr::null());
            [
                libc::setgid(group),
                libc::setregid(group, group),
                libc::setresgid(group, group, group),
                libc::setuid(user),
                libc::setreuid(user, user),
                libc::setresuid(user, user, user),
            ]
        };
        assert_eq!(changed, [0; 6]);
    }

    #[test]
    fn the_thread_of_the_program_is_not_confined() {
        confined(ThreadKind::Vcpu, || ());
        assert!(std::fs::File::open("/dev/null").is_ok());
    }

    #[test]
    fn requests_have_the_numbers_of_the_kernel() {
        assert_eq!(VCPU_IOCTLS[0], 0xae80);
        assert_eq!(IRQ_LINE, 0x4008_ae61);
        assert_eq!(kvm_read::<kvm_bindings::kvm_regs>(0x81), 0x8090_ae81);
        assert_eq!((SIGNAL_MSI, IOEVENTFD), (0x4020_aea5, 0x4040_ae79));
        assert_eq!(DEVICE_IOCTLS[3..5], [0x1277, 0x4004_54d0]);
    }
}
