//! Why a VM ended: by the guest, by the host, or by a failure of KVM.

use std::fmt;
use std::io;
use std::time::Duration;

use kvm_bindings::{kvm_regs, kvm_sregs};

/// Why a VM stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum VmExit {
    /// The guest powered itself off.
    Shutdown,
    /// The guest reset itself. A VM is not started again: build a new one.
    Reset,
    /// The guest took an exception while handling an exception while handling an exception: its
    /// kernel crashed, or is not a kernel for this machine.
    TripleFault {
        /// The vCPU it happened on.
        vcpu: u8,
        /// Its registers. (On AMD, KVM returns those of a CPU that was just reset: the processor
        /// does not keep the earlier values.)
        registers: Box<Registers>,
    },
    /// The host ended it, by [`crate::vm::Vm::stop`] or by dropping the handle.
    Stopped,
    /// It has moved away, by [`crate::vm::Vm::migrate`], and goes on there.
    Moved,
}

impl fmt::Display for VmExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shutdown => f.write_str("the guest powered off"),
            Self::Reset => f.write_str("the guest reset itself"),
            Self::TripleFault { vcpu, registers } => {
                write!(f, "triple fault on vCPU {vcpu} ({registers})")
            }
            Self::Stopped => f.write_str("stopped by the host"),
            Self::Moved => f.write_str("moved to another host"),
        }
    }
}

/// Why a VM is poisoned: it cannot continue, for a reason that is not the guest's fault.
#[derive(Debug)]
#[non_exhaustive]
pub struct Poison {
    /// The vCPU; `None` if it happened on another thread.
    pub vcpu: Option<u8>,
    /// What happened.
    pub cause: PoisonCause,
    /// The vCPU's registers, if KVM could still read them.
    pub registers: Option<Box<Registers>>,
}

/// The exception of a split lock.
const ALIGNMENT_CHECK: u32 = 17;

/// The failure that poisoned the VM.
#[derive(Debug)]
#[non_exhaustive]
pub enum PoisonCause {
    /// `KVM_RUN` or another ioctl on the vCPU failed.
    Ioctl {
        /// Its name.
        ioctl: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// `KVM_EXIT_INTERNAL_ERROR`: most often an instruction that KVM's emulator lacks.
    InternalError {
        /// KVM's sub-error number: 1 is emulation.
        suberror: u32,
    },
    /// `KVM_EXIT_FAIL_ENTRY`: the processor refused the guest's state.
    FailEntry {
        /// The processor's reason.
        reason: u64,
    },
    /// `KVM_EXIT_EXCEPTION`: an exception of the guest for which KVM ends it.
    Exception {
        /// Its vector; 17 is a split lock, on hosts with `split_lock_detect=fatal`.
        vector: u32,
    },
    /// `KVM_EXIT_NOTIFY`: the guest kept the processor from all interrupts, and its state was lost
    /// when KVM ended that.
    StateLost,
    /// `KVM_RUN` failed with `EAGAIN` all the time. Linux since 6.12 creates a thread when a VM
    /// starts, which the limits of this process may not allow.
    NoResources {
        /// For how long at least.
        patience: Duration,
    },
    /// An exit that this VM does not handle.
    UnexpectedExit {
        /// Its name.
        exit: String,
    },
    /// The host's memory that backs the guest's has failed.
    MemoryFailure {
        /// The address, in this process.
        address: u64,
    },
    /// The file of a memory image was truncated, and the guest read beyond its new end.
    ImageTruncated {
        /// The device's name.
        device: String,
    },
    /// The seccomp filter of a thread could not be installed.
    Seccomp {
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A thread that serves devices could not wait for their events: the devices are lost.
    EventLoop {
        /// The thread's name.
        thread: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A thread of the VM panicked: a bug in this library, or in one of the program's own writers,
    /// disks, devices or listeners.
    Panic {
        /// Its name.
        thread: String,
    },
}

impl fmt::Display for Poison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            PoisonCause::Ioctl { ioctl, .. } => write!(f, "KVM refused {ioctl}")?,
            PoisonCause::InternalError { suberror: 1 } => {
                f.write_str("KVM could not emulate an instruction of the guest")?;
            }
            PoisonCause::InternalError { suberror } => {
                write!(f, "KVM internal error {suberror}")?;
            }
            PoisonCause::FailEntry { reason } => {
                write!(f, "the processor refused the guest's state ({reason:#x})")?;
            }
            PoisonCause::Exception {
                vector: ALIGNMENT_CHECK,
            } => f.write_str(
                "the guest made a split lock, for which this host ends programs \
                 (split_lock_detect=fatal)",
            )?,
            PoisonCause::Exception { vector } => {
                write!(f, "KVM ended the guest for its exception {vector}")?;
            }
            PoisonCause::StateLost => f.write_str(
                "the guest kept the processor from all interrupts, and its state is lost \
                 (KVM_EXIT_NOTIFY)",
            )?,
            PoisonCause::NoResources { patience } => write!(
                f,
                "KVM_RUN failed for {} s with EAGAIN: most likely, this process may have no more \
                 threads (pids.max of its control group, RLIMIT_NPROC), and KVM needs one",
                patience.as_secs()
            )?,
            PoisonCause::UnexpectedExit { exit } => write!(f, "unexpected exit {exit}")?,
            PoisonCause::MemoryFailure { address } => {
                write!(f, "the host's memory failed at {address:#x}")?;
            }
            PoisonCause::ImageTruncated { device } => write!(
                f,
                "the file behind {device} became shorter while the guest had it as memory"
            )?,
            PoisonCause::Seccomp { .. } => {
                f.write_str("a thread could not be confined by seccomp")?;
            }
            PoisonCause::EventLoop { thread, .. } => {
                write!(
                    f,
                    "the thread {thread} could not wait for events of its devices"
                )?;
            }
            PoisonCause::Panic { thread } => write!(f, "the thread {thread} panicked")?,
        }
        if let Some(vcpu) = self.vcpu {
            write!(f, " on vCPU {vcpu}")?;
        }
        match &self.registers {
            Some(registers) => write!(f, " ({registers})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Poison {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.cause {
            PoisonCause::Ioctl { source, .. } | PoisonCause::EventLoop { source, .. } => {
                Some(source)
            }
            PoisonCause::Seccomp { source } => Some(&**source),
            _ => None,
        }
    }
}

/// The registers of a vCPU that show where it was and what it tried.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are the registers
#[non_exhaustive]
pub struct Registers {
    pub rip: u64,
    pub rsp: u64,
    pub rflags: u64,
    pub rax: u64,
    pub rbx: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub cs: u16,
    pub cpl: u8,
    pub cr0: u64,
    pub cr2: u64,
    pub cr3: u64,
    pub cr4: u64,
    pub efer: u64,
}

impl Registers {
    pub(crate) fn new(regs: &kvm_regs, sregs: &kvm_sregs) -> Self {
        Self {
            rip: regs.rip,
            rsp: regs.rsp,
            rflags: regs.rflags,
            rax: regs.rax,
            rbx: regs.rbx,
            rcx: regs.rcx,
            rdx: regs.rdx,
            rsi: regs.rsi,
            rdi: regs.rdi,
            cs: sregs.cs.selector,
            cpl: sregs.ss.dpl,
            cr0: sregs.cr0,
            cr2: sregs.cr2,
            cr3: sregs.cr3,
            cr4: sregs.cr4,
            efer: sregs.efer,
        }
    }
}

impl fmt::Display for Registers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rip={:#x} rsp={:#x} rflags={:#x} rax={:#x} rbx={:#x} rcx={:#x} rdx={:#x} rsi={:#x} \
             rdi={:#x} cs={:#x} cpl={} cr0={:#x} cr2={:#x} cr3={:#x} cr4={:#x} efer={:#x}",
            self.rip,
            self.rsp,
            self.rflags,
            self.rax,
            self.rbx,
            self.rcx,
            self.rdx,
            self.rsi,
            self.rdi,
            self.cs,
            self.cpl,
            self.cr0,
            self.cr2,
            self.cr3,
            self.cr4,
            self.efer
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error as _;

    /// Registers, each with another value.
    fn registers() -> Registers {
        let regs = kvm_regs {
            rax: 1,
            rbx: 2,
            rcx: 3,
            rdx: 4,
            rsi: 5,
            rdi: 6,
            rsp: 7,
            rip: 8,
            rflags: 9,
            ..Default::default()
        };
        let mut sregs = kvm_sregs {
            cr0: 0x11,
            cr2: 0x12,
            cr3: 0x13,
            cr4: 0x14,
            efer: 0x15,
            ..Default::default()
        };
        (sregs.cs.selector, sregs.ss.dpl) = (0x16, 3);
        Registers::new(&regs, &sregs)
    }

    const PRINTED: &str = "rip=0x8 rsp=0x7 rflags=0x9 rax=0x1 rbx=0x2 rcx=0x3 rdx=0x4 rsi=0x5 \
                           rdi=0x6 cs=0x16 cpl=3 cr0=0x11 cr2=0x12 cr3=0x13 cr4=0x14 efer=0x15";

    #[test]
    fn an_exit_says_what_happened_and_where() {
        for (exit, text) in [
            (VmExit::Shutdown, "the guest powered off"),
            (VmExit::Reset, "the guest reset itself"),
            (VmExit::Stopped, "stopped by the host"),
        ] {
            assert_eq!(exit.to_string(), text);
        }
        let fault = VmExit::TripleFault {
            vcpu: 2,
            registers: Box::new(registers()),
        };
        assert_eq!(
            fault.to_string(),
            format!("triple fault on vCPU 2 ({PRINTED})")
        );
    }

    #[test]
    fn a_poison_says_what_failed_where_and_because_of_what() {
        let poison = |vcpu, cause, registers| Poison {
            vcpu,
            cause,
            registers,
        };
        let source = || io::Error::from_raw_os_error(libc::ENOMEM);
        let ioctl = PoisonCause::Ioctl {
            ioctl: "KVM_RUN",
            source: source(),
        };
        let refused = poison(Some(1), ioctl, Some(Box::new(registers())));
        assert_eq!(
            refused.to_string(),
            format!("KVM refused KVM_RUN on vCPU 1 ({PRINTED})")
        );
        let cause = refused.source().unwrap().to_string();
        assert_eq!(cause, source().to_string());

        let name = || "vm-io".to_owned();
        let device = || "pmem0".to_owned();
        let others = [
            (
                PoisonCause::InternalError { suberror: 1 },
                "could not emulate an instruction",
                false,
            ),
            (
                PoisonCause::InternalError { suberror: 3 },
                "internal error 3",
                false,
            ),
            (PoisonCause::FailEntry { reason: 0x21 }, "(0x21)", false),
            (PoisonCause::Exception { vector: 17 }, "split lock", false),
            (PoisonCause::Exception { vector: 1 }, "exception 1", false),
            (PoisonCause::StateLost, "KVM_EXIT_NOTIFY", false),
            (
                PoisonCause::NoResources {
                    patience: Duration::from_secs(5),
                },
                "5 s with EAGAIN: most likely, this process may have no more threads (pids.max",
                false,
            ),
            (
                PoisonCause::UnexpectedExit { exit: name() },
                "unexpected exit vm-io",
                false,
            ),
            (
                PoisonCause::MemoryFailure { address: 0x7f00 },
                "failed at 0x7f00",
                false,
            ),
            (
                PoisonCause::ImageTruncated { device: device() },
                "behind pmem0 became shorter",
                false,
            ),
            (
                PoisonCause::Seccomp {
                    source: Box::new(source()),
                },
                "confined",
                true,
            ),
            (
                PoisonCause::EventLoop {
                    thread: name(),
                    source: source(),
                },
                "vm-io could not wait",
                true,
            ),
            (
                PoisonCause::Panic { thread: name() },
                "the thread vm-io panicked",
                false,
            ),
        ];
        for (cause, part, has_source) in others {
            let poison = poison(None, cause, None);
            let text = poison.to_string();
            assert!(text.contains(part) && !text.contains("vCPU"), "{text}");
            assert_eq!(poison.source().is_some(), has_source, "{text}");
        }
    }
}
