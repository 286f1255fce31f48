//! Guests of a few dozen bytes that show whether this KVM executes a kernel's instructions
//! correctly.
//!
//! Each step has its own VM ([`guest`]) with its own code ([`code`]), so that a failure names
//! exactly what failed. A step runs on its own thread and is kicked out of KVM if it takes too
//! long; a KVM that does not even release the thread is reported as such.
#![allow(unsafe_code)] // pthread_kill

mod code;
mod guest;

use std::os::unix::thread::JoinHandleExt as _;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kvm_ioctls::Kvm;

use super::{Item, Status};
use crate::vm::{KICK, SignalsBlocked};
use code::{REPORT, VECTOR};
use guest::{Event, Guest, Mode};

/// No step needs more than some milliseconds, except on a busy host that emulates guests.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// The time that KVM may take to return after a kick.
const KICK_TIMEOUT: Duration = Duration::from_secs(20);

const REMEDY: &str = "this KVM cannot run Linux guests: use a machine with VT-x or AMD-V, \
                      or a virtual machine with nested virtualisation";

/// Something that KVM must do right.
struct Probe {
    name: &'static str,
    run: fn(&Kvm) -> Result<(), ProbeError>,
}

/// Ordered by how well they identify the problem: the first one that fails is the verdict.
const STEPS: &[Probe] = &[
    Probe {
        name: "guest: long mode",
        run: long_mode,
    },
    Probe {
        name: "guest: SYSCALL",
        run: syscall,
    },
    Probe {
        name: "guest: IRETQ",
        run: iretq,
    },
    Probe {
        name: "guest: exception",
        run: exception,
    },
    Probe {
        name: "guest: INT n",
        run: software_interrupt,
    },
    Probe {
        name: "guest: ring 0 code",
        run: ring_0_code,
    },
    Probe {
        name: "guest: MMIO",
        run: mmio,
    },
    Probe {
        name: "guest: interrupt",
        run: interrupt,
    },
];

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
enum ProbeError {
    #[error("cannot {what}: {source}")]
    Setup {
        what: &'static str,
        source: std::io::Error,
    },
    #[error("{expected}; instead {found}")]
    Unexpected { expected: String, found: String },
    #[error("{0}")]
    Wrong(String),
    #[error("the vCPU thread hangs in KVM_RUN")]
    Stuck,
}

impl ProbeError {
    fn setup(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |error| Self::Setup {
            what,
            source: error.into(),
        }
    }

    fn remedy(&self) -> &'static str {
        match self.errno() {
            Some(libc::EBUSY) => {
                "another hypervisor (VirtualBox, VMware) uses the processor's virtualisation: end \
                 its machines"
            }
            Some(libc::ENOMEM) => "free memory, or raise the limit of this process's memory",
            _ => REMEDY,
        }
    }

    fn errno(&self) -> Option<i32> {
        match self {
            Self::Setup { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    /// Whether every step would fail in the same way.
    fn prevents_any_vm(&self) -> bool {
        matches!(self.errno(), Some(libc::EBUSY | libc::ENOMEM))
    }
}

/// Runs all steps.
pub(super) fn check(items: &mut Vec<Item>) {
    run_steps(STEPS, TIME_LIMIT, items);
}

/// Runs steps up to one that takes longer than `limit`. Others would as likely do, and a thread
/// that KVM holds takes a processor from them. Where no VM can be created now, the first step is
/// the last as well.
fn run_steps(steps: &[Probe], limit: Duration, items: &mut Vec<Item>) {
    for step in steps {
        let begin = Instant::now();
        let done = within(limit, step.run);
        let is_last =
            done.as_ref().is_err_and(ProbeError::prevents_any_vm) || begin.elapsed() >= limit;
        let item = match done {
            Ok(()) => Item::ok(step.name, "works"),
            Err(flaw) => Item::bad(step.name, Status::Broken, flaw.to_string(), flaw.remedy()),
        };
        items.push(item.required());
        if is_last {
            return;
        }
    }
}

/// Runs a step on its own thread, for at most `limit`.
fn within(limit: Duration, run: fn(&Kvm) -> Result<(), ProbeError>) -> Result<(), ProbeError> {
    let (answer, answers) = mpsc::channel();
    // The kick has an effect only inside KVM_RUN, see `kvm::signal_mask`, and the thread must not
    // take signals of the program.
    let blocked = SignalsBlocked::new();
    let thread = thread::Builder::new()
        .name("podvisor-probe".to_owned())
        .spawn(move || {
            let result = Kvm::new()
                .map_err(ProbeError::setup("open /dev/kvm"))
                .and_then(|kvm| run(&kvm));
            // The receiver is gone after the time limit.
            let _ = answer.send(result);
        })
        .map_err(|source| ProbeError::Setup {
            what: "start a thread",
            source,
        })?;
    drop(blocked);
    if let Ok(result) = answers.recv_timeout(limit) {
        let _ = thread.join();
        return result;
    }
    if kick(&thread)
        && let Ok(result) = answers.recv_timeout(KICK_TIMEOUT)
    {
        let _ = thread.join();
        return result;
    }
    Err(ProbeError::Stuck)
}

/// Makes a thread that blocks the signal leave guest code.
fn kick(thread: &JoinHandle<()>) -> bool {
    // SAFETY: the thread has not been joined, so that its ID is still valid.
    unsafe { libc::pthread_kill(thread.as_pthread_t(), KICK) == 0 }
}

/// Ring 0 in 64-bit mode computes, and its port write leaves the guest.
fn long_mode(kvm: &Kvm) -> Result<(), ProbeError> {
    let mut guest = Guest::new(kvm, Mode::Kernel, code::COMPUTE, &[])?;
    guest.expect("6 × 7 on port 0x10", Event::Out(0x10, 42))?;
    guest.expect("HLT", Event::Halt)
}

/// Ring 3 calls the kernel, which returns to it.
fn syscall(kvm: &Kvm) -> Result<(), ProbeError> {
    let mut guest = Guest::new(kvm, Mode::User, code::SYSCALL_ENTRY, code::SYSCALL)?;
    guest.expect(
        "SYSCALL reaches the kernel's entry",
        Event::Write(REPORT, code::TOKEN),
    )?;
    let (regs, sregs) = guest.state()?;
    let (cs, ss) = (sregs.cs.selector, sregs.ss.selector);
    let cpl = sregs.ss.dpl;
    if (cs, ss, cpl) != (code::KERNEL_CODE, code::KERNEL_DATA, 0) {
        return Err(ProbeError::Wrong(format!(
            "SYSCALL from ring 3 leaves CS={cs:#x} and SS={ss:#x} as they were: CPL stays {cpl}, \
             so that a kernel faults at its first system call"
        )));
    }
    if regs.rcx != code::AFTER_SYSCALL || regs.r11 & code::RFLAGS_IF == 0 {
        return Err(ProbeError::Wrong(format!(
            "SYSCALL saves RIP={:#x} and RFLAGS={:#x}, which are wrong",
            regs.rcx, regs.r11
        )));
    }
    let user = u64::from(code::USER_CODE);
    guest.expect("SYSRET returns to ring 3", Event::Write(REPORT, user))
}

/// The kernel enters ring 3 by IRETQ.
fn iretq(kvm: &Kvm) -> Result<(), ProbeError> {
    let mut guest = Guest::new(kvm, Mode::Kernel, code::ENTER_RING_3, code::TELL_CS)?;
    let user = u64::from(code::USER_CODE);
    guest.expect("IRETQ enters ring 3", Event::Write(REPORT, user))
}

/// An undefined instruction in ring 3 reaches the kernel's handler with a correct frame.
fn exception(kvm: &Kvm) -> Result<(), ProbeError> {
    let mut guest = Guest::new(kvm, Mode::User, &[], code::UNDEFINED)?;
    guest.expect(
        "#UD from ring 3 reaches its handler",
        Event::Write(VECTOR, 6),
    )?;
    guest.check_frame(code::USER)?;
    guest.expect("HLT in the handler", Event::Halt)
}

/// INT 0x80 in ring 3 reaches its handler.
fn software_interrupt(kvm: &Kvm) -> Result<(), ProbeError> {
    let mut guest = Guest::new(kvm, Mode::User, &[], code::INT_80)?;
    let vector = u64::from(code::SYSTEM_CALL_VECTOR);
    guest.expect(
        "INT 0x80 from ring 3 reaches its handler",
        Event::Write(VECTOR, vector),
    )?;
    guest.check_frame(code::AFTER_INT_80)
}

/// Instructions that Linux uses in ring 0 and that software KVMs lack.
fn ring_0_code(kvm: &Kvm) -> Result<(), ProbeError> {
    let mut guest = Guest::new(kvm, Mode::Kernel, code::POPCNT_CMPXCHG16B, &[])?;
    guest.expect("POPCNT in ring 0", Event::Write(REPORT, 8))?;
    guest.expect("CMPXCHG16B in ring 0", Event::Write(REPORT, 1))
}

/// Reads and writes where there is no memory leave the guest and return to it.
fn mmio(kvm: &Kvm) -> Result<(), ProbeError> {
    let mut guest = Guest::new(kvm, Mode::Kernel, code::READ_ADD_WRITE, &[])?;
    guest.answer_read(REPORT, 0x1234_5677)?;
    guest.expect(
        "an MMIO write of the value read, plus 1",
        Event::Write(REPORT, 0x1234_5678),
    )
}

/// An interrupt of the in-kernel controllers wakes a CPU from HLT.
fn interrupt(kvm: &Kvm) -> Result<(), ProbeError> {
    let mut guest = Guest::new(kvm, Mode::KernelWithApic, code::WAIT, &[])?;
    guest.expect("an MMIO write", Event::Write(REPORT, 0))?;
    guest.signal(code::INTERRUPT_VECTOR)?;
    let vector = u64::from(code::INTERRUPT_VECTOR);
    guest.expect(
        "the interrupt wakes the vCPU from HLT",
        Event::Write(VECTOR, vector),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_probe_finds_nothing_wrong_with_a_sound_kvm() {
        let mut items = Vec::new();
        check(&mut items);
        for item in &items {
            assert_eq!(item.status, Status::Ok, "{item:?}");
        }
        assert_eq!(items.len(), STEPS.len());
    }

    #[test]
    fn guest_that_hangs_is_kicked_and_named() {
        fn hang(kvm: &Kvm) -> Result<(), ProbeError> {
            let mut guest = Guest::new(kvm, Mode::Kernel, code::HANG, &[])?;
            guest.expect("an end", Event::Halt)
        }
        let flaw = within(Duration::from_millis(200), hang).unwrap_err();
        assert!(flaw.to_string().contains("ran for ever"), "{flaw}");
    }

    #[test]
    fn the_first_step_that_hangs_is_the_last() {
        fn hang(_: &Kvm) -> Result<(), ProbeError> {
            while guest::interruption().is_none() {
                thread::yield_now();
            }
            Err(ProbeError::Wrong("it hangs".to_owned()))
        }
        fn fail(_: &Kvm) -> Result<(), ProbeError> {
            Err(ProbeError::Wrong("it fails".to_owned()))
        }
        let step = |name, run| Probe { name, run };
        let steps = [step("one", fail), step("two", hang), step("three", fail)];
        let mut items = Vec::new();
        run_steps(&steps, Duration::from_secs(1), &mut items);
        let names: Vec<_> = items.iter().map(|item| item.name).collect();
        assert_eq!(names, ["one", "two"]);
    }

    #[test]
    fn a_processor_that_another_hypervisor_has_is_no_broken_kvm() {
        fn refused(errno: i32) -> ProbeError {
            ProbeError::setup("create a VM")(kvm_ioctls::Error::new(errno))
        }
        fn busy(_: &Kvm) -> Result<(), ProbeError> {
            Err(refused(libc::EBUSY))
        }
        let step = |name, run| Probe { name, run };
        let mut items = Vec::new();
        run_steps(
            &[step("one", busy), step("two", busy)],
            TIME_LIMIT,
            &mut items,
        );
        let [item] = items.as_slice() else {
            panic!("{items:?}");
        };
        assert!(
            item.remedy.as_ref().unwrap().contains("VirtualBox"),
            "{item:?}"
        );
        assert!(item.prevents_guests());
        assert!(refused(libc::ENOMEM).remedy().contains("memory"));
        assert_eq!(refused(libc::EINVAL).remedy(), REMEDY);
    }

    #[test]
    fn a_guest_runs_on_unless_it_was_the_kick_that_interrupted_it() {
        fn interrupted(_: &Kvm) -> Result<(), ProbeError> {
            assert_eq!(guest::interruption(), None);
            // SAFETY: it is this thread.
            unsafe { libc::pthread_kill(libc::pthread_self(), KICK) };
            assert_eq!(guest::interruption(), Some(Event::Kicked));
            Ok(())
        }
        within(TIME_LIMIT, interrupted).unwrap();
    }

    #[test]
    fn guest_that_faults_says_which_exception() {
        fn fault(kvm: &Kvm) -> Result<(), ProbeError> {
            let mut guest = Guest::new(kvm, Mode::Kernel, code::UNDEFINED, &[])?;
            guest.expect("HLT", Event::Halt)
        }
        let flaw = within(TIME_LIMIT, fault).unwrap_err();
        assert!(flaw.to_string().contains("#UD"), "{flaw}");
    }
}
