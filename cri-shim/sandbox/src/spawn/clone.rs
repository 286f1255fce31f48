//! `clone3` with a control group, and the execution of a program.
#![allow(unsafe_code)] // clone3, and what the child calls until it executes the program

use std::arch::asm;
use std::ffi::{CString, c_char, c_int};
use std::io;
use std::mem;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr;

use rustix::process::{Pid, WaitOptions, waitpid};

/// Flags of `clone3` that do not fit the type that the C library's binding gives them.
const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Size of the child's stack in units of 16 bytes, to which a stack is aligned: 16 KiB for six
/// system calls.
const STACK_UNITS: usize = 1024;

/// The exit status of a child that did not become the program. Nobody sees it.
const FAILED: c_int = 127;

/// What a child does. It blocks no signal, whatever the thread that starts it blocks.
pub(super) struct Execution {
    pub(super) program: CString,
    pub(super) arguments: Vec<CString>,
    pub(super) environment: Vec<CString>,
    /// What becomes its standard files; none of them is one now.
    pub(super) standard: [OwnedFd; 3],
}

/// An execution as the child needs it, which cannot allocate.
struct Plan {
    program: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
    standard: [c_int; 3],
    /// No signal.
    blocked: libc::sigset_t,
    /// The error of the step that failed.
    error: c_int,
}

impl Execution {
    /// Starts the program in the control group of the directory `group`, with `new_pids` as the
    /// first process of a PID namespace. Returns its PID and a descriptor of it.
    pub(super) fn clone_into(
        &self,
        group: BorrowedFd<'_>,
        new_pids: bool,
    ) -> io::Result<(Pid, OwnedFd)> {
        let arguments = list(&self.arguments);
        let environment = list(&self.environment);
        let mut plan = Plan {
            program: self.program.as_ptr(),
            arguments: arguments.as_ptr(),
            environment: environment.as_ptr(),
            standard: self.standard.each_ref().map(|fd| fd.as_raw_fd()),
            // SAFETY: a set of bits, none of which is set.
            blocked: unsafe { mem::zeroed() },
            error: 0,
        };
        let mut process: c_int = -1;
        let mut stack = vec![0u128; STACK_UNITS];
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD;
        let flags = match new_pids {
            true => flags | libc::CLONE_NEWPID,
            false => flags,
        };
        let arguments = libc::clone_args {
            flags: u64::from(flags.unsigned_abs()) | CLONE_CLEAR_SIGHAND | CLONE_INTO_CGROUP,
            pidfd: (&raw mut process) as u64,
            child_tid: 0,
            parent_tid: 0,
            exit_signal: u64::from(libc::SIGCHLD.unsigned_abs()),
            stack: stack.as_mut_ptr() as u64,
            stack_size: size_of_val(stack.as_slice()) as u64,
            tls: 0,
            set_tid: 0,
            set_tid_size: 0,
            cgroup: group.as_raw_fd().unsigned_abs().into(),
        };
        // SAFETY: `execute` never returns, needs little stack, and gets a plan whose pointers are
        // valid until this thread goes on, which is after the child has executed the program or
        // has ended (CLONE_VFORK).
        let pid = unsafe { clone3(&arguments, execute, (&raw mut plan).cast()) }?;
        // SAFETY: the kernel has made the descriptor for this call (CLONE_PIDFD).
        let process = unsafe { OwnedFd::from_raw_fd(process) };
        match plan.error {
            0 => Ok((pid, process)),
            error => {
                // It has ended.
                let _ = waitpid(Some(pid), WaitOptions::empty());
                Err(io::Error::from_raw_os_error(error))
            }
        }
    }
}

/// Returns a list of strings as `execve` expects it, which is valid as long as they are.
fn list(strings: &[CString]) -> Vec<*const c_char> {
    let strings = strings.iter().map(|string| string.as_ptr());
    strings.chain([ptr::null()]).collect()
}

/// Calls `clone3`. The child calls `run` with `argument`, on the stack of `arguments`.
///
/// # Safety
/// The stack is aligned to 16 bytes and large enough for `run`, which does not return and does
/// only what a signal handler may do. If the child shares this process's memory, then the caller
/// is suspended meanwhile (`CLONE_VFORK`).
unsafe fn clone3(
    arguments: &libc::clone_args,
    run: unsafe extern "C" fn(*mut libc::c_void) -> !,
    argument: *mut libc::c_void,
) -> io::Result<Pid> {
    let result: i64;
    // SAFETY: the parent goes on behind the jump with all its registers but the result and the two
    // that any system call changes. The child has a stack of its own, and never gets there.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            // The end of the child's chain of frames.
            "xor ebp, ebp",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") ptr::from_ref(arguments),
            in("rsi") size_of::<libc::clone_args>(),
            in("r12") run,
            in("r13") argument,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    let pid = c_int::try_from(result).ok().filter(|pid| *pid > 0);
    pid.and_then(Pid::from_raw)
        .ok_or_else(|| io::Error::from_raw_os_error((-result) as c_int))
}

/// Becomes the program. Runs in the child, with its parent's memory.
unsafe extern "C" fn execute(plan: *mut libc::c_void) -> ! {
    // SAFETY: the parent's plan, which nobody else uses while its thread is suspended; calls that
    // are safe in a signal handler, with pointers that it keeps valid.
    unsafe {
        let plan = &mut *plan.cast::<Plan>();
        let [input, output, errors] = plan.standard;
        let is_ready = libc::dup2(input, libc::STDIN_FILENO) >= 0
            && libc::dup2(output, libc::STDOUT_FILENO) >= 0
            && libc::dup2(errors, libc::STDERR_FILENO) >= 0
            && libc::chdir(c"/".as_ptr()) == 0
            && libc::sigprocmask(libc::SIG_SETMASK, &raw const plan.blocked, ptr::null_mut()) == 0;
        if is_ready {
            libc::execve(plan.program, plan.arguments, plan.environment);
        }
        plan.error = *libc::__errno_location();
        libc::_exit(FAILED)
    }
}
