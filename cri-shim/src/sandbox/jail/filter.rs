//! Seccomp: the calls that a sandbox's process makes once its guest runs. Any other kills it.
//!
//! This is the filter of the whole process; threads of the machine have narrower ones besides,
//! which are the library's. Conditions are on numbers only: what a pointer leads to can change
//! after the check.

use std::collections::BTreeMap;

use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::{Eq, MaskedEq, Ne};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

use super::JailError;

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
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_memfd_create,
    // Sockets that are there; there is no call that makes others than pairs.
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
    // Time and chance.
    libc::SYS_clock_gettime,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    // Threads: their beginning, signals and end.
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

/// Allowed besides when the process serves a shared directory: there, Landlock and the empty
/// root say which files.
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
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_fstatfs,
    libc::SYS_statfs,
    libc::SYS_getxattr,
    libc::SYS_setxattr,
    libc::SYS_listxattr,
    libc::SYS_removexattr,
    libc::SYS_lgetxattr,
    libc::SYS_lsetxattr,
    libc::SYS_llistxattr,
    libc::SYS_lremovexattr,
    libc::SYS_fgetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_flistxattr,
    libc::SYS_fremovexattr,
    libc::SYS_copy_file_range,
    libc::SYS_fchdir,
    libc::SYS_umask,
    // The thread that serves it takes on the users of the guest.
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

/// Requests of ioctl besides KVM's.
const IOCTLS: &[u64] = &[
    0x5401,      // TCGETS: whether a file is a terminal
    0x5421,      // FIONBIO
    0x5451,      // FIOCLEX
    0x4004_54d0, // TUNSETOFFLOAD
    0x4004_54d8, // TUNSETVNETHDRSZ
];

/// The type of KVM's requests of ioctl, in their second byte.
const KVM: u64 = 0xae00;

/// Those that would make another VM or vCPU, or a device in the kernel.
const KVM_CREATES: &[u64] = &[0xae01, 0xae41, 0xae60, 0x4040_ae77, 0xc00c_aee0];

const CLONE_THREAD: u64 = 0x0001_0000;

/// Flags that make namespaces: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, and
/// NEWTIME.
const CLONE_NEW: u64 = 0x7e02_0080;

const PROT_EXEC: u64 = 4;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

type BuildError = Box<dyn std::error::Error + Send + Sync>;

/// Answered with ENOSYS, which is an answer that who asks can live with: none of them is anything
/// that the process itself wants, and the C library and Rust's make them wherever they like. clone3
/// takes its flags by a pointer, which no filter can follow; without it, the C library uses clone.
const MISSING: &[i64] = &[
    libc::SYS_clone3,
    // What a backtrace calls its program, and where that is.
    libc::SYS_readlink,
    libc::SYS_getcwd,
    libc::SYS_stat,
    // What sorting in the C library takes for scratch space.
    libc::SYS_sysinfo,
];

/// Answered so where no file can be opened by path. The C library's allocator looks into
/// `/proc/sys/vm` before it gives memory back, on any thread and at any time.
const MISSING_WITHOUT_SHARE: &[i64] = &[libc::SYS_openat, libc::SYS_readlinkat];

/// Sets the filter for this thread, and so for all that it starts.
pub(super) fn set(has_share: bool) -> Result<(), JailError> {
    let set = || -> Result<(), BuildError> {
        // First the one that does not kill: the other allows no more filters that it would need.
        for program in [missing_calls(has_share)?, allowed_calls(has_share)?] {
            seccompiler::apply_filter(&program)?;
        }
        Ok(())
    };
    set().map_err(JailError::Filter)
}

fn missing(has_share: bool) -> impl Iterator<Item = i64> {
    let without_share = if has_share {
        &[]
    } else {
        MISSING_WITHOUT_SHARE
    };
    MISSING.iter().chain(without_share).copied()
}

fn missing_calls(has_share: bool) -> Result<BpfProgram, BuildError> {
    let rules = missing(has_share).map(|call| (call, Vec::new())).collect();
    let missing = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    program(rules, SeccompAction::Allow, missing)
}

fn allowed_calls(has_share: bool) -> Result<BpfProgram, BuildError> {
    let with_share = if has_share { WITH_SHARE } else { &[] };
    let calls = ALWAYS.iter().chain(with_share);
    let mut rules: Rules = calls.map(|call| (*call, Vec::new())).collect();
    // Let through to the other filter's answer.
    rules.extend(missing(has_share).map(|call| (call, Vec::new())));
    rules.extend([
        (libc::SYS_ioctl, ioctls()?),
        (libc::SYS_mmap, vec![all([no_bits(2, PROT_EXEC)?])?]),
        (libc::SYS_mprotect, vec![all([no_bits(2, PROT_EXEC)?])?]),
        // A thread of this process, in its namespaces.
        (
            libc::SYS_clone,
            vec![all([SeccompCondition::new(
                0,
                Qword,
                MaskedEq(CLONE_THREAD | CLONE_NEW),
                CLONE_THREAD,
            )?])?],
        ),
        // A pair, of AF_UNIX.
        (libc::SYS_socketpair, vec![all([is(0, 1)?])?]),
        // To a thread of this process; its number is another inside its PID namespace.
        (
            libc::SYS_tgkill,
            vec![all([is(0, std::process::id().into())?])?],
        ),
        (
            libc::SYS_prctl,
            [15, 22, 38] // PR_SET_NAME, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS
                .into_iter()
                .map(|option| all([is(0, option)?]))
                .collect::<Result<_, _>>()?,
        ),
        // To ask for limits, of itself.
        (
            libc::SYS_prlimit64,
            vec![all([is(0, 0)?, SeccompCondition::new(2, Qword, Eq, 0)?])?],
        ),
    ]);
    if has_share {
        // The thread that serves the directory has its own umask.
        let files_of_its_own = all([SeccompCondition::new(0, Qword, Eq, 0x200)?])?;
        rules.insert(libc::SYS_unshare, vec![files_of_its_own]);
    } else {
        // Of an open file, by AT_EMPTY_PATH.
        let open_file = |argument| all([bits(argument, 0x1000)?]);
        rules.insert(libc::SYS_newfstatat, vec![open_file(3)?]);
        rules.insert(libc::SYS_statx, vec![open_file(2)?]);
    }
    program(rules, SeccompAction::KillProcess, SeccompAction::Allow)
}

fn ioctls() -> Result<Vec<SeccompRule>, BuildError> {
    let mut kvm = vec![SeccompCondition::new(1, Dword, MaskedEq(0xff00), KVM)?];
    for request in KVM_CREATES {
        kvm.push(SeccompCondition::new(1, Dword, Ne, *request)?);
    }
    let mut rules = vec![SeccompRule::new(kvm)?];
    for request in IOCTLS {
        rules.push(all([is(1, *request)?])?);
    }
    Ok(rules)
}

fn is(argument: u8, value: u64) -> Result<SeccompCondition, BuildError> {
    Ok(SeccompCondition::new(argument, Dword, Eq, value)?)
}

fn bits(argument: u8, set: u64) -> Result<SeccompCondition, BuildError> {
    Ok(SeccompCondition::new(argument, Dword, MaskedEq(set), set)?)
}

fn no_bits(argument: u8, unset: u64) -> Result<SeccompCondition, BuildError> {
    Ok(SeccompCondition::new(argument, Dword, MaskedEq(unset), 0)?)
}

fn all<const N: usize>(conditions: [SeccompCondition; N]) -> Result<SeccompRule, BuildError> {
    Ok(SeccompRule::new(conditions.into())?)
}

fn program(
    rules: Rules,
    otherwise: SeccompAction,
    matched: SeccompAction,
) -> Result<BpfProgram, BuildError> {
    let filter = SeccompFilter::new(rules, otherwise, matched, TargetArch::x86_64)?;
    Ok(filter.try_into()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_filters_can_be_built_and_fit_the_kernel() {
        for has_share in [false, true] {
            assert!(missing_calls(has_share).unwrap().len() < 4096);
            // BPF_MAXINSNS
            assert!(allowed_calls(has_share).unwrap().len() < 4096);
        }
    }

    #[test]
    fn without_a_share_no_call_takes_a_path() {
        for call in [
            libc::SYS_openat,
            libc::SYS_open,
            libc::SYS_execve,
            libc::SYS_socket,
        ] {
            assert!(!ALWAYS.contains(&call));
        }
    }
}
