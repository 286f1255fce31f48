//! A VM with one vCPU and 64 KiB, set up for the probe's code.

use std::fmt;

use kvm_bindings::{Msrs, kvm_msi, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use podvisor_devices::GuestRam;
use vm_memory::{Bytes, GuestAddress};

use super::ProbeError;
use super::code;
use crate::kvm::{KvmError, set_signal_mask};
use crate::layout;
use crate::memory::add_memslots;
use crate::vm::{KICK, Pending, take_pending};

/// The initial state of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// In ring 0; HLT leaves the guest.
    Kernel,
    /// In ring 0, with KVM's interrupt controllers; HLT waits inside KVM.
    KernelWithApic,
    /// In ring 3.
    User,
}

/// The reason why the vCPU left the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Event {
    /// Port and value.
    Out(u16, u64),
    /// Address and value of an MMIO write.
    Write(u64, u64),
    /// Address of an MMIO read.
    Read(u64),
    Halt,
    TripleFault,
    /// KVM failed: usually an instruction that its emulator does not know.
    Internal,
    /// The time limit's signal.
    Kicked,
    Other(String),
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Out(port, value) => write!(f, "it wrote {value:#x} to port {port:#x}"),
            Self::Write(code::VECTOR, vector) => {
                write!(f, "{} was raised", code::exception_name(*vector))
            }
            Self::Write(address, value) => write!(f, "it wrote {value:#x} to {address:#x}"),
            Self::Read(address) => write!(f, "it read {address:#x}"),
            Self::Halt => f.write_str("it halted"),
            Self::TripleFault => f.write_str("it ended in a triple fault"),
            Self::Internal => f.write_str("KVM failed to emulate an instruction"),
            Self::Kicked => f.write_str("it ran for ever"),
            Self::Other(exit) => write!(f, "KVM answered {exit}"),
        }
    }
}

/// A guest of the probe. Fields drop in this order: the vCPU first, the memory last.
pub(super) struct Guest {
    vcpu: VcpuFd,
    vm: VmFd,
    memory: GuestRam,
}

impl Guest {
    /// Creates a guest with `kernel` and `user` code, about to execute the one that `mode` selects.
    pub(super) fn new(
        kvm: &Kvm,
        mode: Mode,
        kernel: &[u8],
        user: &[u8],
    ) -> Result<Self, ProbeError> {
        let memory = GuestRam::from_ranges(&[(GuestAddress(0), code::MEMORY)])
            .map_err(|_| ProbeError::Wrong("64 KiB of memory are not to be had".to_owned()))?;
        let vm = kvm.create_vm().map_err(ProbeError::setup("create a VM"))?;
        add_memslots(&vm, &memory).map_err(flaw)?;
        // Intel's KVM needs addresses for its own tables, which the guest does not use.
        let _ = vm.set_identity_map_address(layout::KVM_IDENTITY_MAP);
        let _ = vm.set_tss_address(layout::KVM_TSS as usize);
        if mode == Mode::KernelWithApic {
            vm.create_irq_chip()
                .map_err(ProbeError::setup("create the interrupt controllers"))?;
        }
        let vcpu = vm
            .create_vcpu(0)
            .map_err(ProbeError::setup("create a vCPU"))?;
        set_signal_mask(&vcpu, KICK).map_err(flaw)?;
        let cpuid = kvm
            .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
            .map_err(ProbeError::setup("get the supported CPUID"))?;
        vcpu.set_cpuid2(&cpuid)
            .map_err(ProbeError::setup("set CPUID"))?;

        let guest = Self { vcpu, vm, memory };
        guest.write_memory(kernel, user)?;
        guest.set_registers(mode)?;
        if mode == Mode::KernelWithApic {
            guest.enable_local_apic()?;
        }
        Ok(guest)
    }

    /// Runs until the next exit, which must be `event`; `expected` says what that would show.
    pub(super) fn expect(&mut self, expected: &str, event: Event) -> Result<(), ProbeError> {
        let found = self.run();
        if found == event {
            return Ok(());
        }
        Err(ProbeError::Unexpected {
            expected: format!("expected: {expected}"),
            found: found.to_string(),
        })
    }

    /// Runs until the guest reads `address`, and returns `value` to it.
    pub(super) fn answer_read(&mut self, address: u64, value: u32) -> Result<(), ProbeError> {
        let found = loop {
            match self.vcpu.run() {
                Ok(VcpuExit::MmioRead(read, data)) if read == address && data.len() == 4 => {
                    data.copy_from_slice(&value.to_le_bytes());
                    return Ok(());
                }
                other => {
                    if let Some(found) = event(other) {
                        break found;
                    }
                }
            }
        };
        Err(ProbeError::Unexpected {
            expected: "expected: an MMIO read of 4 bytes".to_owned(),
            found: found.to_string(),
        })
    }

    fn run(&mut self) -> Event {
        loop {
            if let Some(found) = event(self.vcpu.run()) {
                return found;
            }
        }
    }

    /// Returns the registers, after an exit.
    pub(super) fn state(&self) -> Result<(kvm_regs, kvm_sregs), ProbeError> {
        let regs = self
            .vcpu
            .get_regs()
            .map_err(ProbeError::setup("read registers"))?;
        let sregs = self
            .vcpu
            .get_sregs()
            .map_err(ProbeError::setup("read special registers"))?;
        Ok((regs, sregs))
    }

    /// Checks that a handler runs in ring 0, on the kernel's stack, with a frame that says that
    /// ring 3 was interrupted at `rip`.
    pub(super) fn check_frame(&self, rip: u64) -> Result<(), ProbeError> {
        let (regs, sregs) = self.state()?;
        if sregs.cs.selector != code::KERNEL_CODE || sregs.ss.dpl != 0 {
            return Err(ProbeError::Wrong(format!(
                "the handler runs with CS={:#x} and CPL {}",
                sregs.cs.selector, sregs.ss.dpl
            )));
        }
        let mut frame = [0u64; 5];
        for (i, word) in (0u64..).zip(&mut frame) {
            *word = self
                .memory
                .read_obj(GuestAddress(regs.rsp.wrapping_add(i * 8)))
                .map_err(|_| {
                    ProbeError::Wrong(format!("the handler's stack is {:#x}", regs.rsp))
                })?;
        }
        let [at, cs, _flags, rsp, ss] = frame;
        let user = (
            rip,
            code::USER_CODE.into(),
            code::USER_STACK,
            code::USER_DATA.into(),
        );
        if (at, cs, rsp, ss) == user {
            Ok(())
        } else {
            Err(ProbeError::Wrong(format!(
                "the handler's frame holds RIP={at:#x} CS={cs:#x} RSP={rsp:#x} SS={ss:#x}"
            )))
        }
    }

    /// Sends `vector` to the vCPU as a message-signalled interrupt.
    pub(super) fn signal(&self, vector: u8) -> Result<(), ProbeError> {
        let message = kvm_msi {
            address_lo: layout::LOCAL_APIC,
            data: vector.into(),
            ..Default::default()
        };
        match self.vm.signal_msi(message) {
            Ok(delivered) if delivered > 0 => Ok(()),
            Ok(_) => Err(ProbeError::Wrong(
                "an interrupt was not delivered".to_owned(),
            )),
            Err(error) => Err(ProbeError::setup("send an interrupt")(error)),
        }
    }

    fn write_memory(&self, kernel: &[u8], user: &[u8]) -> Result<(), ProbeError> {
        // Present, writable, accessible to ring 3; the last level maps 2 MiB at 0.
        const TABLE: u64 = 0b111;
        const LARGE_PAGE: u64 = 1 << 7 | TABLE;
        let words = |words: &[u64]| {
            words
                .iter()
                .flat_map(|w| w.to_le_bytes())
                .collect::<Vec<_>>()
        };
        let all_vectors = 0..=u8::MAX;
        let handlers: Vec<u8> = all_vectors.clone().flat_map(code::handler).collect();
        let gates: Vec<u64> = all_vectors.flat_map(code::gate).collect();
        // RSP0 lies at offset 4 of a 64-bit TSS.
        let stack = [code::KERNEL_STACK];
        for (address, bytes) in [
            (code::PML4, words(&[code::PDPT | TABLE])),
            (code::PDPT, words(&[code::DIRECTORY | TABLE])),
            (code::DIRECTORY, words(&[LARGE_PAGE])),
            (code::KERNEL, kernel.to_vec()),
            (code::USER, user.to_vec()),
            (code::HANDLERS, handlers),
            (code::GDT, words(&code::GDT_ENTRIES)),
            (code::IDT, words(&gates)),
            (code::TSS + 4, words(&stack)),
        ] {
            self.memory
                .write_slice(&bytes, GuestAddress(address))
                .map_err(|_| {
                    ProbeError::Wrong("the guest's memory cannot be written".to_owned())
                })?;
        }
        Ok(())
    }

    fn set_registers(&self, mode: Mode) -> Result<(), ProbeError> {
        let user = mode == Mode::User;
        let (_, mut sregs) = self.state()?;
        let (cs, ss) = if user {
            (code::USER_CODE, code::USER_DATA)
        } else {
            (code::KERNEL_CODE, code::KERNEL_DATA)
        };
        sregs.cs = flat_segment(cs, Kind::Code);
        sregs.ss = flat_segment(ss, Kind::Data);
        (sregs.ds, sregs.es) = (sregs.ss, sregs.ss);
        (sregs.fs, sregs.gs) = (sregs.ss, sregs.ss);
        sregs.tr = kvm_segment {
            base: code::TSS,
            limit: 0x67,
            selector: code::TASK,
            type_: 11,
            present: 1,
            ..Default::default()
        };
        sregs.ldt = kvm_segment {
            unusable: 1,
            ..Default::default()
        };
        (sregs.gdt.base, sregs.gdt.limit) = (code::GDT, size_of_val(&code::GDT_ENTRIES) as u16 - 1);
        (sregs.idt.base, sregs.idt.limit) = (code::IDT, 256 * 16 - 1);
        sregs.cr3 = code::PML4;
        sregs.cr4 = 1 << 5 | 1 << 9; // PAE, OSFXSR
        sregs.cr0 = 1 << 31 | 1 << 5 | 1 << 4 | 1; // PG, NE, ET, PE
        sregs.efer = 1 << 10 | 1 << 8 | 1; // LMA, LME, SCE
        self.vcpu
            .set_sregs(&sregs)
            .map_err(ProbeError::setup("set special registers"))?;

        let regs = kvm_regs {
            rip: if user { code::USER } else { code::KERNEL },
            rsp: if user {
                code::USER_STACK
            } else {
                code::KERNEL_STACK
            },
            rax: code::TOKEN,
            rflags: if user { code::RFLAGS_IF | 2 } else { 2 },
            ..Default::default()
        };
        self.vcpu
            .set_regs(&regs)
            .map_err(ProbeError::setup("set registers"))?;

        let msr = |index, data| kvm_msr_entry {
            index,
            data,
            ..Default::default()
        };
        let entries = [
            msr(0xc000_0081, code::STAR),
            msr(0xc000_0082, code::KERNEL),    // LSTAR
            msr(0xc000_0084, code::RFLAGS_IF), // FMASK
        ];
        let msrs = Msrs::from_entries(&entries)
            .map_err(|_| ProbeError::Wrong("three MSRs are too many".to_owned()))?;
        match self
            .vcpu
            .set_msrs(&msrs)
            .map_err(ProbeError::setup("set MSRs"))?
        {
            3 => Ok(()),
            n => Err(ProbeError::Wrong(format!(
                "KVM took {n} of the 3 MSRs of SYSCALL"
            ))),
        }
    }

    fn enable_local_apic(&self) -> Result<(), ProbeError> {
        const SPURIOUS: usize = 0xf0;
        const ENABLED: u32 = 1 << 8;
        let mut lapic = self
            .vcpu
            .get_lapic()
            .map_err(ProbeError::setup("read the local APIC"))?;
        let value = (ENABLED | 0xff).to_le_bytes();
        for (register, byte) in lapic.regs[SPURIOUS..].iter_mut().zip(value) {
            *register = byte as std::ffi::c_char;
        }
        self.vcpu
            .set_lapic(&lapic)
            .map_err(ProbeError::setup("set the local APIC"))
    }
}

/// `None` if the vCPU is to continue.
fn event(exit: Result<VcpuExit<'_>, kvm_ioctls::Error>) -> Option<Event> {
    let value = |data: &[u8]| {
        data.iter()
            .rev()
            .fold(0u64, |value, byte| value << 8 | u64::from(*byte))
    };
    Some(match exit {
        Ok(VcpuExit::IoOut(port, data)) => Event::Out(port, value(data)),
        Ok(VcpuExit::MmioWrite(address, data)) => Event::Write(address, value(data)),
        Ok(VcpuExit::MmioRead(address, _)) => Event::Read(address),
        Ok(VcpuExit::Hlt) => Event::Halt,
        Ok(VcpuExit::Shutdown) => Event::TripleFault,
        Ok(VcpuExit::InternalError) => Event::Internal,
        Ok(VcpuExit::Intr) => return interruption(),
        Ok(other) => Event::Other(format!("{other:?}")),
        Err(error) if error.errno() == libc::EINTR => return interruption(),
        Err(error) => Event::Other(error.to_string()),
    })
}

/// Returns why a signal interrupted guest code: `None` for a debugger, or a process that was
/// stopped temporarily, which interrupt it, too.
pub(super) fn interruption() -> Option<Event> {
    match take_pending()? {
        Pending::Kick => Some(Event::Kicked),
        Pending::MemoryFailure { .. } => Some(Event::Other("that memory failed".to_owned())),
    }
}

enum Kind {
    Code,
    Data,
}

fn flat_segment(selector: u16, kind: Kind) -> kvm_segment {
    let (type_, l, db) = match kind {
        Kind::Code => (11, 1, 0),
        Kind::Data => (3, 0, 1),
    };
    kvm_segment {
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        dpl: (selector & 3) as u8,
        s: 1,
        l,
        db,
        g: 1,
        ..Default::default()
    }
}

fn flaw(error: KvmError) -> ProbeError {
    match error {
        KvmError::Ioctl { ioctl, source } => ProbeError::Setup {
            what: ioctl,
            source,
        },
        other => ProbeError::Wrong(other.to_string()),
    }
}
