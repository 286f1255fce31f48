//! The default system calls of a container, as data.
//!
//! An allow list in families. Refused calls fail with EPERM; a call in neither list is newer than
//! both, and fails with ENOSYS, so that C libraries use its predecessor. Refused are calls that
//! serve the machine rather than a program (modules, kexec, clocks, swap, quota), that have a
//! record of kernel bugs with effects beyond the caller (userfaultfd, io_uring, keyrings, BPF,
//! perf), and that create namespaces and mounts. Some are allowed with the capability that the
//! kernel requires anyway.

use oci_spec::OciSpecError;
use oci_spec::runtime::{
    Arch, Capability, LinuxSeccomp, LinuxSeccompAction, LinuxSeccompArg, LinuxSeccompArgBuilder,
    LinuxSeccompBuilder, LinuxSeccompOperator, LinuxSyscall, LinuxSyscallBuilder,
};

/// Families of calls that are safe with any arguments.
#[rustfmt::skip]
const ALLOWED: &[&[&str]] = &[
    // Reading, writing and waiting for descriptors.
    &[
        "read", "readv", "pread64", "preadv", "preadv2", "write", "writev", "pwrite64", "pwritev",
        "pwritev2", "readahead", "lseek", "sendfile", "copy_file_range", "splice", "tee",
        "vmsplice", "close", "close_range", "dup", "dup2", "dup3", "fcntl", "ioctl", "flock",
        "pipe", "pipe2", "eventfd", "eventfd2", "select", "pselect6", "poll", "ppoll",
        "epoll_create", "epoll_create1", "epoll_ctl", "epoll_ctl_old", "epoll_wait",
        "epoll_wait_old", "epoll_pwait", "epoll_pwait2", "signalfd", "signalfd4", "io_setup",
        "io_destroy", "io_submit", "io_cancel", "io_getevents", "io_pgetevents",
    ],
    // Files and directories.
    &[
        "open", "openat", "openat2", "creat", "access", "faccessat", "faccessat2", "stat", "lstat",
        "fstat", "newfstatat", "statx", "statfs", "fstatfs", "truncate",
        "ftruncate", "fallocate", "fadvise64", "sync", "syncfs", "fsync", "fdatasync",
        "sync_file_range", "getdents", "getdents64", "getcwd", "chdir", "fchdir",
        "mkdir", "mkdirat", "rmdir", "rename", "renameat", "renameat2", "link", "linkat", "unlink",
        "unlinkat", "symlink", "symlinkat", "readlink", "readlinkat", "mknod", "mknodat", "chmod",
        "fchmod", "fchmodat", "chown", "fchown", "lchown", "fchownat", "umask",
        "utime", "utimes", "utimensat", "futimesat", "getxattr", "lgetxattr", "fgetxattr",
        "setxattr", "lsetxattr", "fsetxattr", "listxattr",
        "llistxattr", "flistxattr", "removexattr", "lremovexattr", "fremovexattr",
        "name_to_handle_at", "inotify_init", "inotify_init1",
        "inotify_add_watch", "inotify_rm_watch", "fanotify_mark", 
    ],
    // Memory.
    &[
        "brk", "mmap", "munmap", "mremap", "mprotect", "madvise", "process_madvise", "msync",
        "mincore", "mlock", "mlock2", "munlock", "mlockall", "munlockall", 
        "remap_file_pages", "pkey_alloc", "pkey_free", "pkey_mprotect", 
        "memfd_create", "memfd_secret", "membarrier", "process_mrelease",
    ],
    // Processes and threads. `clone`, `clone3` and `personality` have rules of their own.
    &[
        "fork", "vfork", "execve", "execveat", "exit", "exit_group", "wait4", "waitid", "getpid",
        "getppid", "gettid", "getpgid", "getpgrp", "setpgid", "getsid", "setsid", "pidfd_open",
        "pidfd_send_signal", "pidfd_getfd", "process_vm_readv", "process_vm_writev", "ptrace",
        "kcmp", "set_tid_address", "arch_prctl", "prctl", "futex", 
        "futex_waitv", "set_robust_list", "get_robust_list", "rseq",
        "restart_syscall", "set_thread_area", "get_thread_area", "modify_ldt", "seccomp",
        "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self",
        
    ],
    // Users, groups and capabilities.
    &[
        "getuid", "geteuid", "getgid", "getegid", "getresuid", "getresgid", "getgroups", "setuid",
        "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setgroups", "setfsuid",
        "setfsgid", "capget", "capset", "chroot",
    ],
    // Scheduling and limits.
    &[
        "sched_yield", "sched_getaffinity", "sched_setaffinity", "sched_getattr", "sched_setattr",
        "sched_getparam", "sched_setparam", "sched_getscheduler", "sched_setscheduler",
        "sched_get_priority_max", "sched_get_priority_min", "sched_rr_get_interval", "getpriority",
        "setpriority", "ioprio_get", "ioprio_set", "getrlimit", "setrlimit", "prlimit64",
        "getrusage", "times", "getcpu", "sysinfo", "uname",
    ],
    // Signals, timers and clocks; setting the clock is not among them.
    &[
        "rt_sigaction", "rt_sigprocmask", "rt_sigpending", "rt_sigqueueinfo", "rt_sigreturn",
        "rt_sigsuspend", "rt_sigtimedwait", "rt_tgsigqueueinfo", "sigaltstack", "kill", "tkill",
        "tgkill", "pause", "alarm", "getitimer", "setitimer", "timer_create", "timer_delete",
        "timer_settime", "timer_gettime", "timer_getoverrun", "timerfd_create", "timerfd_settime",
        "timerfd_gettime", "nanosleep", "clock_nanosleep", "clock_gettime", "clock_getres",
        "clock_adjtime", "adjtimex", "gettimeofday", "time",
    ],
    // Sockets; `socket` has a rule of its own.
    &[
        "socketpair", "bind", "listen", "accept", "accept4", "connect", "shutdown", "getsockname",
        "getpeername", "getsockopt", "setsockopt", "sendto", "sendmsg", "sendmmsg", "recvfrom",
        "recvmsg", "recvmmsg",
    ],
    // System V and POSIX communication.
    &[
        "shmget", "shmat", "shmctl", "shmdt", "semget", "semctl", "semop", "semtimedop", "msgget",
        "msgctl", "msgsnd", "msgrcv", "mq_open", "mq_unlink", "mq_notify", "mq_timedsend",
        "mq_timedreceive", "mq_getsetattr",
    ],
    // Randomness.
    &["getrandom"],
    // Calls of 32-bit programs in place of the above.
    &[
        "_llseek", "_newselect", "chown32", "clock_adjtime64", "clock_getres_time64",
        "clock_gettime64", "clock_nanosleep_time64", "fadvise64_64", "fchown32", "fcntl64",
        "fstat64", "fstatat64", "fstatfs64", "ftruncate64", "futex_time64", "getegid32",
        "geteuid32", "getgid32", "getgroups32", "getresgid32", "getresuid32", "getuid32",
        "io_pgetevents_time64", "ipc", "lchown32", "lstat64", "mmap2", "mq_timedreceive_time64",
        "mq_timedsend_time64", "nice", "ppoll_time64", "pselect6_time64", "readdir",
        "recvmmsg_time64", "rt_sigtimedwait_time64", "sched_rr_get_interval_time64",
        "semtimedop_time64", "sendfile64", "setfsgid32", "setfsuid32", "setgid32", "setgroups32",
        "setregid32", "setresgid32", "setresuid32", "setreuid32", "setuid32", "sigaction",
        "signal", "sigpending", "sigprocmask", "sigreturn", "sigsuspend", "stat64",
        "statfs64", "timer_gettime64", "timer_settime64", "timerfd_gettime64",
        "timerfd_settime64", "truncate64", "ugetrlimit", "utimensat_time64", "waitpid",
    ],
];

/// Calls that are allowed with a capability, which the kernel checks as well.
#[rustfmt::skip]
const WITH_CAPABILITY: &[(Capability, &[&str])] = &[
    (Capability::DacReadSearch, &["open_by_handle_at"]),
    (Capability::SysAdmin, &[
        "bpf", "clone", "clone3", "fanotify_init", "fsconfig", "fsmount", "fsopen", "fspick",
        "mount", "mount_setattr", "move_mount", "open_tree", "perf_event_open",
        "quotactl", "quotactl_fd", "setdomainname", "sethostname", "setns", "umount", "umount2",
        "unshare",
    ]),
    (Capability::SysBoot, &["reboot"]),
    (Capability::SysModule, &["delete_module", "finit_module", "init_module"]),
    (Capability::SysNice, &[
        "get_mempolicy", "mbind", "set_mempolicy", "set_mempolicy_home_node",
    ]),
    (Capability::SysPacct, &["acct"]),
    (Capability::SysRawio, &["ioperm", "iopl"]),
    (Capability::SysTime, &["clock_settime", "settimeofday"]),
    (Capability::SysTtyConfig, &["vhangup"]),
    (Capability::Syslog, &["syslog"]),
    (Capability::Bpf, &["bpf"]),
    (Capability::Perfmon, &["perf_event_open"]),
];

/// Calls that are always refused, whatever the capabilities.
#[rustfmt::skip]
const REFUSED: &[&str] = &[
    "_sysctl", "add_key", "create_module", "get_kernel_syms", "io_uring_enter",
    "io_uring_register", "io_uring_setup", "kexec_file_load", "kexec_load", "keyctl",
    "lookup_dcookie", "migrate_pages", "move_pages", "nfsservctl", "pivot_root", "query_module",
    "request_key", "socketcall", "stime", "swapoff", "swapon", "sysfs", "uselib", "userfaultfd", "ustat",
    "vm86", "vm86old",
];

/// The flags of `clone` that create namespaces: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER,
/// NEWPID and NEWNET.
const NAMESPACE_FLAGS: [u64; 7] = [
    0x0002_0000,
    0x0200_0000,
    0x0400_0000,
    0x0800_0000,
    0x1000_0000,
    0x2000_0000,
    0x4000_0000,
];

/// AF_VSOCK: reserved for the agent and podvisor, between guest and host. For the same reason,
/// `socketcall` of 32-bit programs is refused, whose arguments a filter cannot see; C libraries
/// have used `socket` instead since Linux 4.3.
const AF_VSOCK: u64 = 40;

/// All address families are below this.
const FAMILIES: u64 = 64;

/// PER_LINUX, PER_LINUX32, each with and without UNAME26, and the query of the present one.
const PERSONALITIES: &[u64] = &[0x0, 0x8, 0x2_0000, 0x2_0008, 0xffff_ffff];

const EPERM: u32 = 1;
const ENOSYS: u32 = 38;
const EAFNOSUPPORT: u32 = 97;

/// Returns the profile of a container with `capabilities`.
pub fn default_profile(capabilities: &[Capability]) -> Result<LinuxSeccomp, OciSpecError> {
    let allowed: Vec<&str> = ALLOWED.iter().copied().flatten().copied().collect();
    let (mut granted, mut refused) = (Vec::new(), REFUSED.to_vec());
    for (capability, names) in WITH_CAPABILITY {
        if capabilities.contains(capability) {
            granted.extend_from_slice(names);
        } else {
            refused.extend_from_slice(names);
        }
    }
    // A call may be allowed by two capabilities; `clone` and `clone3` have rules of their own.
    refused.retain(|name| !granted.contains(name) && !matches!(*name, "clone" | "clone3"));

    let mut rules = vec![
        rule(&allowed, Answer::Allow, None)?,
        rule(&refused, Answer::Fail(EPERM), None)?,
    ];
    if !granted.is_empty() {
        rules.push(rule(&granted, Answer::Allow, None)?);
    }
    if !capabilities.contains(&Capability::SysAdmin) {
        rules.extend(clone_without_namespaces()?);
    }
    for personality in PERSONALITIES {
        let same = argument(LinuxSeccompOperator::ScmpCmpEq, *personality, None)?;
        rules.push(rule(&["personality"], Answer::Allow, Some(same))?);
    }
    rules.extend(socket_without_vsock()?);

    LinuxSeccompBuilder::default()
        .default_action(LinuxSeccompAction::ScmpActErrno)
        .default_errno_ret(ENOSYS)
        .architectures(vec![Arch::ScmpArchX86_64, Arch::ScmpArchX86])
        .syscalls(rules)
        .build()
}

/// Like the kernel, these rules only use the lower 32 bits of the address family.
fn socket_without_vsock() -> Result<Vec<LinuxSyscall>, OciSpecError> {
    const FAMILY: u64 = 0xffff_ffff;
    let masked = |mask, left| argument(LinuxSeccompOperator::ScmpCmpMaskedEq, mask, Some(left));
    let vsock = masked(FAMILY, AF_VSOCK)?;
    let mut rules = vec![rule(&["socket"], Answer::Fail(EAFNOSUPPORT), Some(vsock))?];
    // There is no masked comparison for "not equal": another family differs in one of its bits.
    let too_large = FAMILY & !(FAMILIES - 1);
    let bits = (0..FAMILIES.ilog2()).map(|bit| 1 << bit);
    for bit in bits {
        let differs = masked(too_large | bit, !AF_VSOCK & bit)?;
        rules.push(rule(&["socket"], Answer::Allow, Some(differs))?);
    }
    Ok(rules)
}

fn clone_without_namespaces() -> Result<Vec<LinuxSyscall>, OciSpecError> {
    let masked = |mask, left| argument(LinuxSeccompOperator::ScmpCmpMaskedEq, mask, Some(left));
    let any = NAMESPACE_FLAGS.iter().fold(0, |all, flag| all | flag);
    let mut rules = vec![rule(&["clone"], Answer::Allow, Some(masked(any, 0)?))?];
    for flag in NAMESPACE_FLAGS {
        rules.push(rule(
            &["clone"],
            Answer::Fail(EPERM),
            Some(masked(flag, flag)?),
        )?);
    }
    // `clone3` has its flags in memory, which a filter cannot see: it fails with ENOSYS by default,
    // and C libraries fall back on `clone`.
    Ok(rules)
}

/// The verdict on a call.
#[derive(Debug, Clone, Copy)]
enum Answer {
    Allow,
    /// It fails with this errno.
    Fail(u32),
}

fn rule(
    names: &[&str],
    answer: Answer,
    argument: Option<LinuxSeccompArg>,
) -> Result<LinuxSyscall, OciSpecError> {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let rule = LinuxSyscallBuilder::default().names(names);
    let mut rule = match answer {
        Answer::Allow => rule.action(LinuxSeccompAction::ScmpActAllow),
        Answer::Fail(errno) => rule
            .action(LinuxSeccompAction::ScmpActErrno)
            .errno_ret(errno),
    };
    if let Some(argument) = argument {
        rule = rule.args(vec![argument]);
    }
    rule.build()
}

/// A condition on a call's first argument.
fn argument(
    op: LinuxSeccompOperator,
    value: u64,
    value_two: Option<u64>,
) -> Result<LinuxSeccompArg, OciSpecError> {
    let mut argument = LinuxSeccompArgBuilder::default()
        .index(0_usize)
        .op(op)
        .value(value);
    if let Some(value_two) = value_two {
        argument = argument.value_two(value_two);
    }
    argument.build()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules_for<'a>(profile: &'a LinuxSeccomp, name: &str) -> Vec<&'a LinuxSyscall> {
        let syscalls = profile.syscalls().as_ref().unwrap();
        let named = |rule: &&LinuxSyscall| rule.names().iter().any(|n| n == name);
        syscalls.iter().filter(named).collect()
    }

    #[test]
    fn no_call_is_named_twice() {
        let mut names: Vec<&str> = ALLOWED
            .iter()
            .flat_map(|family| family.iter().copied())
            .collect();
        names.extend(["clone", "clone3", "personality", "socket"]);
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn what_reaches_beyond_a_container_is_refused() {
        let profile = default_profile(&[Capability::Chown]).unwrap();
        for name in [
            "mount",
            "umount2",
            "unshare",
            "setns",
            "bpf",
            "keyctl",
            "add_key",
            "kexec_load",
            "init_module",
            "reboot",
            "userfaultfd",
            "io_uring_setup",
            "perf_event_open",
            "pivot_root",
            "swapon",
            "settimeofday",
            "open_by_handle_at",
        ] {
            let rules = rules_for(&profile, name);
            assert_eq!(rules.len(), 1, "{name}");
            assert_eq!(
                rules[0].action(),
                LinuxSeccompAction::ScmpActErrno,
                "{name}"
            );
            assert_eq!(rules[0].errno_ret(), Some(EPERM), "{name}");
        }
    }

    #[test]
    fn what_is_newer_than_the_lists_is_not_there() {
        let profile = default_profile(&[]).unwrap();
        assert_eq!(profile.default_action(), LinuxSeccompAction::ScmpActErrno);
        assert_eq!(profile.default_errno_ret(), Some(ENOSYS));
        for name in ["clone3", "a_call_of_next_year"] {
            assert!(rules_for(&profile, name).is_empty(), "{name}");
        }
    }

    #[test]
    fn a_capability_brings_its_calls() {
        let profile = default_profile(&[Capability::SysAdmin]).unwrap();
        for name in ["mount", "clone", "clone3", "bpf", "perf_event_open"] {
            let rules = rules_for(&profile, name);
            assert_eq!(rules.len(), 1, "{name}");
            assert_eq!(
                rules[0].action(),
                LinuxSeccompAction::ScmpActAllow,
                "{name}"
            );
        }
        let reboot = rules_for(&profile, "reboot");
        assert_eq!(reboot[0].errno_ret(), Some(EPERM));
    }

    /// Returns a runtime's verdict on a call with this first argument.
    fn answer(profile: &LinuxSeccomp, name: &str, first: u64) -> Option<u32> {
        let matches = |argument: &LinuxSeccompArg| match argument.op() {
            LinuxSeccompOperator::ScmpCmpEq => first == argument.value(),
            LinuxSeccompOperator::ScmpCmpNe => first != argument.value(),
            LinuxSeccompOperator::ScmpCmpMaskedEq => {
                first & argument.value() == argument.value_two().unwrap()
            }
            other => panic!("{other:?}"),
        };
        let fits = |rule: &&LinuxSyscall| rule.args().iter().flatten().all(matches);
        match rules_for(profile, name).into_iter().find(fits) {
            None => profile.default_errno_ret(),
            Some(rule) if rule.action() == LinuxSeccompAction::ScmpActAllow => None,
            Some(rule) => rule.errno_ret(),
        }
    }

    #[test]
    fn vsock_is_refused_in_every_guise_that_the_kernel_takes_for_it() {
        let profile = default_profile(&[]).unwrap();
        // The kernel only looks at the lower 32 bits.
        for high in [0, 1, 1 << 31, u64::from(u32::MAX)] {
            let family = AF_VSOCK | high << 32;
            let refused = Some(EAFNOSUPPORT);
            assert_eq!(answer(&profile, "socket", family), refused, "{family:#x}");
            assert_eq!(answer(&profile, "socket", 2 | high << 32), None);
        }
        assert_eq!(answer(&profile, "socket", AF_VSOCK | 64), Some(ENOSYS));
        assert_eq!(answer(&profile, "socketcall", 1), Some(EPERM));
    }

    #[test]
    fn new_namespaces_are_told_by_their_arguments() {
        const SIGCHLD: u64 = 17;
        const CLONE_VM: u64 = 0x100;
        let profile = default_profile(&[]).unwrap();
        assert_eq!(answer(&profile, "clone", SIGCHLD | CLONE_VM), None);
        for flag in NAMESPACE_FLAGS {
            assert_eq!(answer(&profile, "clone", SIGCHLD | flag), Some(EPERM));
        }
        for family in (0..FAMILIES).filter(|family| *family != AF_VSOCK) {
            assert_eq!(answer(&profile, "socket", family), None, "{family}");
        }
        assert_eq!(answer(&profile, "personality", 8), None);
        assert_eq!(answer(&profile, "personality", 0x0400_0000), Some(ENOSYS));
    }
}
