//! System calls for which there are no safe wrappers.
#![allow(unsafe_code)] // A few raw system calls; each block states why it is sound.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd as _, OwnedFd};
use std::path::Path;

use podvisor_agent_protocol::limits::ENTROPY_BYTES;
use rustix::fs::CWD;
use rustix::mount::{OpenTreeFlags, open_tree};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Sends `signal` (1 to 64, so real-time signals too) to the process of `pidfd`.
///
/// # Errors
///
/// `ESRCH` if the process has been reaped, `EINVAL` for an invalid signal number.
pub(crate) fn pidfd_send_signal(pidfd: impl AsFd, signal: u8) -> io::Result<()> {
    // SAFETY: the descriptor is borrowed for the call, and a null siginfo is allowed:
    // the kernel then fills it as kill(2) does.
    let result = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_fd().as_raw_fd(),
            libc::c_int::from(signal),
            std::ptr::null::<libc::siginfo_t>(),
            0u32,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Puts a descriptor into the event loop.
///
/// # Errors
///
/// If the descriptor cannot be polled (a regular file).
pub(crate) fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the value owns its descriptor, which stays the same and open until it is dropped.
    let watched = unsafe { AsyncFd::register_with_interest(fd, interest) };
    watched.map_err(Into::into)
}

/// `struct sock_filter`: an instruction of a filter of system calls.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FilterInstruction {
    pub(crate) code: u16,
    pub(crate) jt: u8,
    pub(crate) jf: u8,
    pub(crate) k: u32,
}

/// `struct sock_fprog`.
#[repr(C)]
struct SeccompProgram {
    len: libc::c_ushort,
    filter: *const FilterInstruction,
}

/// Installs a filter of system calls for the calling thread; the kernel checks the filter first.
///
/// # Errors
///
/// `EINVAL` for a filter that the kernel does not accept, `EACCES` without `CAP_SYS_ADMIN` and
/// `no_new_privs`.
pub(crate) fn install_seccomp_filter(flags: u32, filter: &[FilterInstruction]) -> io::Result<()> {
    let program = SeccompProgram {
        len: libc::c_ushort::try_from(filter.len()).unwrap_or(libc::c_ushort::MAX),
        filter: filter.as_ptr(),
    };
    // SAFETY: `program` and the `len` instructions that it points to live until the call returns,
    // which copies them; `FilterInstruction` has the layout of `struct sock_filter`.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            flags,
            &raw const program,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Executes another program directly after `confine`, the last restriction of this process; returns
/// only with an error.
pub(crate) fn execve(
    path: &CString,
    args: &[CString],
    env: &[CString],
    confine: impl FnOnce() -> io::Result<()>,
) -> io::Error {
    let pointers = |list: &[CString]| -> Vec<*const libc::c_char> {
        list.iter()
            .map(|text| text.as_ptr())
            .chain([std::ptr::null()])
            .collect()
    };
    let (args, env) = (pointers(args), pointers(env));
    // Rust's runtime ignores it, and other programs would inherit that. SAFETY: no handler is
    // installed that could run at a bad moment.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    // Nothing runs in between: a filter may allow execve(2) and little else.
    if let Err(error) = confine() {
        return error;
    }
    // SAFETY: `path` and the strings of both arrays live until the call returns, and each array
    // ends with a null pointer.
    unsafe { libc::execve(path.as_ptr(), args.as_ptr(), env.as_ptr()) };
    io::Error::last_os_error()
}

/// Creates /dev/null for PID 1's standard descriptors, before Rust's runtime looks at them.
///
/// A guest without a console starts PID 1 with none open. Rust opens /dev/null in their place and
/// aborts if it is missing, as in an initramfs that contains only the agent; so it is created
/// first. Runs as a constructor of the program, before `main`.
extern "C" fn make_dev_null() {
    // SAFETY: plain system calls on constant, terminated strings; errors change nothing, and
    // nothing else runs in the process yet.
    unsafe {
        if libc::getpid() == 1 {
            libc::mkdir(c"/dev".as_ptr(), 0o755);
            libc::mknod(
                c"/dev/null".as_ptr(),
                libc::S_IFCHR | 0o666,
                libc::makedev(1, 3),
            );
        }
    }
}

// SAFETY: the C library calls the functions of this section once, with arguments that a
// function without parameters ignores under the C calling convention.
#[used]
#[unsafe(link_section = ".init_array")]
static MAKE_DEV_NULL: extern "C" fn() = make_dev_null;

/// The part of `union bpf_attr` that loads a program.
#[repr(C)]
struct BpfProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
}

/// The part of `union bpf_attr` that attaches a program.
#[repr(C)]
struct BpfProgAttach {
    target_fd: u32,
    attach_bpf_fd: u32,
    attach_type: u32,
    attach_flags: u32,
}

const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_PROG_ATTACH: libc::c_int = 8;
const BPF_PROG_TYPE_CGROUP_DEVICE: u32 = 15;
const BPF_CGROUP_DEVICE: u32 = 6;

/// `struct bpf_insn` of `<linux/bpf.h>`: an instruction of a program for accesses to devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct DeviceInstruction {
    pub(crate) code: u8,
    /// Destination in the low four bits, source in the high.
    pub(crate) registers: u8,
    pub(crate) offset: i16,
    pub(crate) immediate: i32,
}

/// Loads a program that the kernel runs for accesses to devices; it verifies the program first.
///
/// # Errors
///
/// `EINVAL` and `EACCES` for a program that the kernel does not accept; `EAGAIN` if a signal
/// arrived during verification.
pub(crate) fn load_device_program(program: &[DeviceInstruction]) -> io::Result<OwnedFd> {
    let attr = BpfProgLoad {
        prog_type: BPF_PROG_TYPE_CGROUP_DEVICE,
        insn_cnt: u32::try_from(program.len()).unwrap_or(u32::MAX),
        insns: program.as_ptr().addr() as u64,
        license: c"Apache-2.0".as_ptr().addr() as u64,
        log_level: 0,
        log_size: 0,
        log_buf: 0,
    };
    // SAFETY: `attr` and what it points at (`insn_cnt` instructions, a terminated string) live
    // until the call returns; bytes of the union past the given size count as zero.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_PROG_LOAD,
            &raw const attr,
            size_of::<BpfProgLoad>(),
        )
    };
    match libc::c_int::try_from(result) {
        // SAFETY: the kernel has just opened this descriptor, and nothing else owns it.
        Ok(fd @ 0..) => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Attaches a device program to a control group, for the lifetime of the group.
///
/// # Errors
///
/// The kernel's error.
pub(crate) fn attach_device_program(cgroup: &OwnedFd, program: &OwnedFd) -> io::Result<()> {
    let number = |fd: &OwnedFd| fd.as_raw_fd().unsigned_abs();
    let attr = BpfProgAttach {
        target_fd: number(cgroup),
        attach_bpf_fd: number(program),
        attach_type: BPF_CGROUP_DEVICE,
        attach_flags: 0,
    };
    // SAFETY: `attr` lives until the call returns, and both descriptors are borrowed for it.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_PROG_ATTACH,
            &raw const attr,
            size_of::<BpfProgAttach>(),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// `struct rand_pool_info` of `<linux/random.h>`, with room for the largest seed.
#[repr(C)]
struct RandPoolInfo {
    entropy_count: libc::c_int,
    buf_size: libc::c_int,
    buf: [u8; ENTROPY_BYTES],
}

/// `RNDADDENTROPY`: `_IOW('R', 0x03, int[2])`.
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;

/// `RNDRESEEDCRNG`: `_IO('R', 0x07)`.
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;

/// Mixes `seed` into the kernel's pool, credits all its bits, and makes every generator reseed from
/// the pool immediately: a cloned guest has the state of the original.
///
/// # Errors
///
/// `EINVAL` for more than [`ENTROPY_BYTES`] bytes; the error of opening /dev/urandom.
pub(crate) fn add_entropy(seed: &[u8]) -> io::Result<()> {
    let mut info = RandPoolInfo {
        entropy_count: 0,
        buf_size: 0,
        buf: [0; ENTROPY_BYTES],
    };
    let (Some(buf), Ok(size)) = (
        info.buf.get_mut(..seed.len()),
        libc::c_int::try_from(seed.len()),
    ) else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    buf.copy_from_slice(seed);
    info.buf_size = size;
    info.entropy_count = size * 8;
    let random = std::fs::OpenOptions::new()
        .write(true)
        .open("/dev/urandom")?;
    // SAFETY: the argument points at a live RandPoolInfo; the kernel reads its two integers
    // and `buf_size` bytes, which lie within `buf`.
    let result = unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, &raw const info) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: this request takes no argument.
    match unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG) } {
        0 => Ok(()),
        _ => match io::Error::last_os_error() {
            // The pool does not have enough entropy yet to have seeded a generator.
            error if error.raw_os_error() == Some(libc::ENODATA) => Ok(()),
            error => Err(error),
        },
    }
}

/// Makes the wall clock run faster or slower until it has gained `microseconds` (adjtime(3));
/// replaces an earlier adjustment.
///
/// # Errors
///
/// `EPERM` without the right to set the clock.
pub(crate) fn slew_clock(microseconds: i32) -> io::Result<()> {
    adjust_clock(|adjustment| {
        adjustment.modes = libc::ADJ_OFFSET_SINGLESHOT;
        adjustment.offset = microseconds.into();
    })
}

/// Steps the wall clock by `microseconds`.
///
/// # Errors
///
/// `EPERM` without the right to set the clock; `EINVAL` if the result is not a valid time.
pub(crate) fn step_clock(microseconds: i64) -> io::Result<()> {
    const PER_SECOND: i64 = 1_000_000;
    adjust_clock(|adjustment| {
        adjustment.modes = libc::ADJ_SETOFFSET;
        adjustment.time.tv_sec = microseconds.div_euclid(PER_SECOND);
        adjustment.time.tv_usec = microseconds.rem_euclid(PER_SECOND);
    })
}

fn adjust_clock(set: impl FnOnce(&mut libc::timex)) -> io::Result<()> {
    // SAFETY: every field of `struct timex` is an integer, for which zero is a value.
    let mut adjustment: libc::timex = unsafe { std::mem::zeroed() };
    set(&mut adjustment);
    // SAFETY: the kernel reads and writes the structure, which lives until the call returns.
    match unsafe { libc::adjtimex(&raw mut adjustment) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Makes the kernel reap this process's children without notification.
pub(crate) fn ignore_children() {
    // SAFETY: no handler is installed that could run at a bad moment.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Moves this thread into new namespaces of these kinds.
fn unshare(kinds: i32) -> io::Result<()> {
    // SAFETY: the call changes the thread's namespaces and its rights in them, and touches no
    // memory.
    match unsafe { libc::unshare(kinds) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Runs `start` such that the process it starts is the first of a new pid namespace.
///
/// # Errors
///
/// The kernel's error. If it says that this thread could not return to its own namespace, no other
/// process could be started: the caller has to end the namespace's first process then.
pub(crate) fn in_new_pid_namespace<T>(start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let own = std::fs::File::open("/proc/self/ns/pid")?;
    unshare(libc::CLONE_NEWPID)?;
    let started = start();
    // SAFETY: the call sets the namespace of this thread's children, and touches no memory; the
    // descriptor is open.
    if unsafe { libc::setns(own.as_raw_fd(), libc::CLONE_NEWPID) } != 0 {
        return Err(io::Error::last_os_error());
    }
    started
}

/// Runs `run` such that files it creates belong to root, whatever the thread's user. It takes
/// `CAP_SETUID` and `CAP_SETGID`.
pub(crate) fn as_root_of_files<T>(run: impl FnOnce() -> T) -> T {
    // SAFETY: the calls change the owner of files that this thread creates, and touch no memory.
    let (uid, gid) = unsafe { (libc::setfsuid(0), libc::setfsgid(0)) };
    let done = run();
    // SAFETY: as above; the ids are those that the thread had.
    unsafe {
        libc::setfsgid(gid.cast_unsigned());
        libc::setfsuid(uid.cast_unsigned());
    }
    done
}

/// Moves this process, which must have one thread, into a new user namespace.
///
/// # Errors
///
/// `EINVAL` with more than one thread; `ENOSPC` if there are too many namespaces.
pub(crate) fn unshare_users() -> io::Result<()> {
    unshare(libc::CLONE_NEWUSER)
}

/// Gives this process copies of its mounts and its view of control groups: they belong to its user
/// namespace.
///
/// # Errors
///
/// `EPERM` without `CAP_SYS_ADMIN` in its user namespace.
pub(crate) fn own_mounts_and_cgroups() -> io::Result<()> {
    unshare(libc::CLONE_NEWNS | libc::CLONE_NEWCGROUP)
}

/// Returns a copy of the mount at `path`, attached nowhere, in which ids are those of a user
/// namespace: 0 in the file system is the namespace's 0.
///
/// # Errors
///
/// `EINVAL` for a file system whose ids cannot be mapped.
pub(crate) fn map_mount(path: &Path, users: impl AsFd) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let copy = open_tree(CWD, path, flags)?;
    let userns_fd = u64::try_from(users.as_fd().as_raw_fd()).unwrap_or(u64::MAX);
    let wanted = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        attr_clr: 0,
        propagation: 0,
        userns_fd,
    };
    // SAFETY: the path is a C string, the structure has the given size, and the kernel writes to
    // neither.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            copy.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const wanted,
            size_of::<libc::mount_attr>(),
        )
    };
    match result {
        0 => Ok(copy),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Moves this thread into a new network namespace.
#[cfg(test)]
pub(crate) fn unshare_network() -> io::Result<()> {
    unshare(libc::CLONE_NEWNET)
}

/// Returns the output and the exit status of a process that runs `run`, which is to execute another
/// program.
#[cfg(test)]
pub(crate) fn output_of(
    run: impl FnMut() -> io::Result<()> + Send + Sync + 'static,
) -> std::process::Output {
    use std::os::unix::process::CommandExt as _;
    let mut command = std::process::Command::new("/bin/false");
    // SAFETY: the tests run on glibc, whose allocator can be used after a fork.
    unsafe { command.pre_exec(run) };
    command.output().unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    #[test]
    fn a_real_time_signal_reaches_the_process() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        pidfd_send_signal(&pidfd, 64).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(64));
        let error = pidfd_send_signal(&pidfd, 9).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
    }

    #[test]
    fn an_impossible_signal_and_an_oversized_seed_are_errors() {
        let me = pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap();
        assert_eq!(
            pidfd_send_signal(&me, 65).unwrap_err().raw_os_error(),
            Some(libc::EINVAL)
        );
        assert_eq!(
            add_entropy(&[0; ENTROPY_BYTES + 1])
                .unwrap_err()
                .raw_os_error(),
            Some(libc::EINVAL)
        );
    }

    #[test]
    fn a_program_does_not_inherit_what_rusts_runtime_ignores() {
        let text = |text: &str| CString::new(text).unwrap();
        let (path, args) = (text("/bin/cat"), [text("cat"), text("/proc/self/status")]);
        let output = output_of(move || {
            // SAFETY: no handler is installed.
            unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
            Err(execve(&path, &args, &[], || Ok(())))
        });
        let status = String::from_utf8(output.stdout).unwrap();
        let mask = status
            .lines()
            .find_map(|line| line.strip_prefix("SigIgn:\t"));
        let mask = u64::from_str_radix(mask.unwrap(), 16).unwrap();
        assert_eq!(mask >> (libc::SIGPIPE - 1) & 1, 0, "{status}");
    }
}
