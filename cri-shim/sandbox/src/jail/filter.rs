//! Seccomp: the system calls that a sandbox's process makes once its guest runs. Any other kills
//! it.
//!
//! This is the filter of the whole process; the machine's threads have narrower ones in addition,
//! which the VMM library sets. Conditions check values only: memory behind a pointer can change
//! after the check.

use std::collections::BTreeMap;

use podvisor_seccomp::{BpfProgram, Condition, Otherwise, Rule, Verdict, Width, apply, compile};

use super::error::JailError;

/// The system calls that the jail allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallFilter {
    /// Those that a sandbox's process makes; any other kills it.
    Enforced {
        /// What it asks of KVM.
        kvm: KvmCalls,
    },
    /// All that the other layers allow: for testing these on their own.
    Absent,
}

/// What a process in its jail may ask of KVM. The threads of its machines, which a guest talks to,
/// have narrower filters: they may run a vCPU and raise interrupts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvmCalls {
    /// To run the machine that it has.
    Run,
    /// To add vCPUs to its machine, too.
    AddVcpus,
    /// To create machines, too: its guest comes later, or reboots.
    CreateVms,
}

/// Allowed with any arguments.
const ALWAYS: &[i64] = &[
    // Memory. Executable mappings are refused below.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    // Open files.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_memfd_create,
    // Existing sockets; new sockets can only be created in pairs.
    libc::SYS_accept4,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_setsockopt,
    // Waiting.
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_futex,
    libc::SYS_membarrier,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_sched_yield,
    // Time and random numbers.
    libc::SYS_clock_gettime,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    // Threads: their start, signals and end.
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // A narrower filter may be set at any time.
    libc::SYS_seccomp,
];

/// Allowed in addition if the process serves a shared directory: then Landlock and the root, which
/// holds only that directory, limit the files.
const WITH_SHARE: &[i64] = &[
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_getdents64,
    libc::SYS_mknodat,
    libc::SYS_mkdirat,
    libc::SYS_symlinkat,
    libc::SYS_linkat,
    libc::SYS_renameat2,
    libc::SYS_unlinkat,
    libc::SYS_readlinkat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_fstatfs,
    libc::SYS_fgetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_flistxattr,
    libc::SYS_fremovexattr,
    libc::SYS_copy_file_range,
    libc::SYS_syncfs,
    libc::SYS_umask,
    // The thread that serves the directory assumes the guest's users.
    libc::SYS_setgroups,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_geteuid,
    libc::SYS_getegid,
    libc::SYS_getuid,
    libc::SYS_getgid,
];

/// Requests of ioctl in addition to KVM's.
const IOCTLS: &[u64] = &[
    0x5401,      // TCGETS: whether a file is a terminal
    0x5421,      // FIONBIO
    0x5451,      // FIOCLEX
    0x1268,      // BLKSSZGET
    0x1277,      // BLKDISCARD
    0x127b,      // BLKPBSZGET
    0x4004_54d0, // TUNSETOFFLOAD
    0x4004_54d1, // TUNSETTXFILTER
    0x4004_54d8, // TUNSETVNETHDRSZ
];

/// Requests of a process that builds machines in addition.
const IOCTLS_TO_BUILD: &[u64] = &[
    0x8004_54d2, // TUNGETIFF: whether a card is a tap
    0x4004_54dc, // TUNSETVNETLE
    0x4004_9409, // FICLONE: a copy of a disk that shares its blocks
];

/// Commands of fcntl that make other processes wait for this one, make this one wait for others, or
/// cause signals.
const FCNTLS_REFUSED: &[u64] = &[
    7,    // F_SETLKW
    8,    // F_SETOWN
    10,   // F_SETSIG
    15,   // F_SETOWN_EX
    38,   // F_OFD_SETLKW
    1024, // F_SETLEASE
    1026, // F_NOTIFY
];

/// The type of KVM's requests of ioctl, in their second byte.
const KVM: u64 = 0xae00;

/// Requests that create a VM.
const KVM_CREATES_VM: &[u64] = &[
    0xae01, // KVM_CREATE_VM
    0xae60, // KVM_CREATE_IRQCHIP
];

/// Requests that only a machine which moves to another host needs: what its guest writes.
const KVM_LOGS: &[u64] = &[
    0x4010_ae42, // KVM_GET_DIRTY_LOG
];

/// Requests that create a device in the kernel that no machine has.
const KVM_CREATES_DEVICE: &[u64] = &[
    0xae64,      // KVM_CREATE_PIT, the older form
    0x4040_ae77, // KVM_CREATE_PIT2
    0xc00c_aee0, // KVM_CREATE_DEVICE
];

const KVM_CREATE_VCPU: u64 = 0xae41;

const CLONE_THREAD: u64 = 0x0001_0000;

/// Flags that create namespaces: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, and
/// NEWTIME.
const CLONE_NEW: u64 = 0x7e02_0080;

const PROT_EXEC: u64 = 4;

/// For `unshare`: a thread's directories and umask.
const CLONE_FS: u64 = 0x200;

/// The part of a socket's type without its flags.
const SOCK_TYPE: u64 = 0xf;

const AT_EMPTY_PATH: u64 = 0x1000;

const ENOSYS: u16 = 38;

/// Answered with ENOSYS, which callers cope with: the process itself needs none of these calls, and
/// the C library and Rust's make them at any place. clone3 takes its flags by a pointer, which no
/// filter can follow; without it, the C library uses clone.
const MISSING: &[i64] = &[
    libc::SYS_clone3,
    // A backtrace looks up the program's path.
    libc::SYS_readlink,
    libc::SYS_getcwd,
    libc::SYS_stat,
    // Sorting in the C library uses it to limit its scratch space.
    libc::SYS_sysinfo,
];

/// Answered with ENOSYS if no file may be opened by path. The C library's allocator looks into
/// `/proc/sys/vm` before it returns memory, on any thread and at any time.
const MISSING_WITHOUT_SHARE: &[i64] = &[libc::SYS_openat, libc::SYS_readlinkat];

/// Sets the filter for this thread, and so for all threads that it starts.
pub(super) fn set(has_share: bool, kvm: KvmCalls) -> Result<(), JailError> {
    let program = program(has_share, kvm, std::process::id());
    apply(&program).map_err(JailError::Filter)
}

/// Builds the filter of the process with this pid, which is that inside its PID namespace.
fn program(has_share: bool, kvm: KvmCalls, process: u32) -> BpfProgram {
    compile(&calls(has_share, kvm, process), Otherwise::Kill)
}

fn calls(has_share: bool, kvm: KvmCalls, process: u32) -> BTreeMap<i64, Verdict> {
    let (more, missing) = if has_share {
        (WITH_SHARE, &[][..])
    } else {
        (&[][..], MISSING_WITHOUT_SHARE)
    };
    let mut calls = BTreeMap::new();
    calls.extend(
        ALWAYS
            .iter()
            .chain(more)
            .map(|call| (*call, Verdict::Allow)),
    );
    let missing = MISSING.iter().chain(missing);
    calls.extend(missing.map(|call| (*call, Verdict::Fail(ENOSYS))));
    if kvm == KvmCalls::CreateVms {
        // How much memory the host has, which limits a machine's.
        calls.insert(libc::SYS_sysinfo, Verdict::Allow);
        // The kernel's copy of a disk is forgotten that another host has written: for a machine
        // that comes. POSIX_FADV_DONTNEED
        calls.insert(libc::SYS_fadvise64, Verdict::AllowIf(vec![vec![is(3, 4)]]));
    }
    let mut allow_if = |call, rules: Vec<Rule>| calls.insert(call, Verdict::AllowIf(rules));
    allow_if(libc::SYS_ioctl, ioctls(kvm));
    // A process that shares a file must not be made to wait for this one's lock or lease, nor this
    // one for it: only a non-blocking shared lock, and unlocking, are allowed.
    allow_if(libc::SYS_flock, vec![vec![is(1, 4 | 1)], vec![is(1, 8)]]);
    let refused = FCNTLS_REFUSED.iter();
    let fcntl = refused.map(|command| Condition::is_not(1, *command));
    allow_if(libc::SYS_fcntl, vec![fcntl.collect()]);
    let not_executable = no_bits(2, PROT_EXEC);
    allow_if(libc::SYS_mmap, vec![vec![not_executable]]);
    allow_if(libc::SYS_mprotect, vec![vec![not_executable]]);
    // Only a thread of this process, in its namespaces.
    let flags = CLONE_THREAD | CLONE_NEW;
    let thread = Condition::masked(0, Width::Double, flags, CLONE_THREAD);
    allow_if(libc::SYS_clone, vec![vec![thread]]);
    // A pair of AF_UNIX and SOCK_STREAM: a datagram socket could send to any socket that has a name
    // in a file system.
    let stream = Condition::masked(1, Width::Word, SOCK_TYPE, 1);
    allow_if(libc::SYS_socketpair, vec![vec![is(0, 1), stream]]);
    // Only to a thread of this process.
    allow_if(libc::SYS_tgkill, vec![vec![is(0, process.into())]]);
    // PR_SET_NAME, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS
    let options = [15, 22, 38].map(|option| vec![is(0, option)]);
    allow_if(libc::SYS_prctl, options.into());
    // To read the process's own limits.
    let asks = Condition::is(2, Width::Double, 0);
    allow_if(libc::SYS_prlimit64, vec![vec![is(0, 0), asks]]);
    if has_share {
        // The thread that serves the directory has its own umask.
        let files_of_its_own = Condition::is(0, Width::Double, CLONE_FS);
        allow_if(libc::SYS_unshare, vec![vec![files_of_its_own]]);
    } else {
        // Only of an open file.
        allow_if(libc::SYS_newfstatat, vec![vec![bits(3, AT_EMPTY_PATH)]]);
        allow_if(libc::SYS_statx, vec![vec![bits(2, AT_EMPTY_PATH)]]);
    }
    calls
}

fn ioctls(calls: KvmCalls) -> Vec<Rule> {
    let mut kvm = vec![Condition::masked(1, Width::Word, 0xff00, KVM)];
    let (vm, logs) = match calls {
        KvmCalls::CreateVms => (&[][..], &[][..]),
        KvmCalls::Run | KvmCalls::AddVcpus => (KVM_CREATES_VM, KVM_LOGS),
    };
    let vcpu = (calls == KvmCalls::Run).then_some(&KVM_CREATE_VCPU);
    let refused = KVM_CREATES_DEVICE.iter().chain(vm).chain(logs).chain(vcpu);
    kvm.extend(refused.map(|request| Condition::is_not(1, *request)));
    let to_build = match calls {
        KvmCalls::CreateVms => IOCTLS_TO_BUILD,
        KvmCalls::Run | KvmCalls::AddVcpus => &[],
    };
    let others = IOCTLS.iter().chain(to_build);
    let others = others.map(|request| vec![is(1, *request)]);
    std::iter::once(kvm).chain(others).collect()
}

fn is(argument: u32, value: u64) -> Condition {
    Condition::is(argument, Width::Word, value)
}

fn bits(argument: u32, set: u64) -> Condition {
    Condition::masked(argument, Width::Word, set, set)
}

fn no_bits(argument: u32, unset: u64) -> Condition {
    Condition::masked(argument, Width::Word, unset, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_is_short_and_finds_a_call_by_few_comparisons() {
        for has_share in [false, true] {
            let program = program(has_share, KvmCalls::Run, 1);
            // A call takes about as many steps as the list can be halved.
            assert!(program.len() < 400, "{}", program.len());
        }
    }

    #[test]
    fn a_process_may_wait_for_its_hosts_clock_to_be_set() {
        for has_share in [false, true] {
            let calls = calls(has_share, KvmCalls::Run, 1);
            for call in [
                libc::SYS_timerfd_create,
                libc::SYS_timerfd_settime,
                libc::SYS_epoll_ctl,
                libc::SYS_read,
            ] {
                assert_eq!(calls.get(&call), Some(&Verdict::Allow), "{call}");
            }
        }
    }

    #[test]
    fn without_a_share_no_call_takes_a_path() {
        let calls = calls(false, KvmCalls::Run, 1);
        for call in [
            libc::SYS_open,
            libc::SYS_openat2,
            libc::SYS_execve,
            libc::SYS_unlinkat,
            libc::SYS_socket,
            libc::SYS_connect,
        ] {
            assert_eq!(calls.get(&call), None, "{call}");
        }
        assert_eq!(calls[&libc::SYS_openat], Verdict::Fail(ENOSYS));
        assert_eq!(
            super::calls(true, KvmCalls::Run, 1)[&libc::SYS_openat],
            Verdict::Allow
        );
    }

    #[test]
    fn only_a_process_whose_machine_comes_later_creates_one_or_lets_it_go() {
        let refused = |kvm| {
            let rules = ioctls(kvm);
            let of_kvm = rules.first().unwrap().clone();
            [
                KVM_CREATES_VM[0],
                KVM_LOGS[0],
                KVM_CREATE_VCPU,
                KVM_CREATES_DEVICE[0],
            ]
            .map(|request| of_kvm.contains(&Condition::is_not(1, request)))
        };
        assert_eq!(refused(KvmCalls::Run), [true, true, true, true]);
        assert_eq!(refused(KvmCalls::AddVcpus), [true, true, false, true]);
        assert_eq!(refused(KvmCalls::CreateVms), [false, false, false, true]);
    }
}
