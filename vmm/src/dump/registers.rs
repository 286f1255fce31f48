//! The registers of a vCPU in a dump.

use kvm_bindings::{Msrs, kvm_dtable, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::VcpuFd;

use super::notes::note;
use crate::kvm::KvmError;

/// `IA32_KERNEL_GS_BASE`: what `SWAPGS` exchanges with the base of GS.
const MSR_KERNEL_GS_BASE: u32 = 0xc000_0102;

/// `struct elf_prstatus` of Linux on x86-64: its length, and where its parts are.
const PRSTATUS_LEN: usize = 336;
const PRSTATUS_PID: usize = 32;
const PRSTATUS_REGISTERS: usize = 112;
const NT_PRSTATUS: u32 = 1;

/// QEMU's own note, of the vendor "QEMU" and the kind 0: its version and its length.
const QEMU_VERSION: u32 = 1;
const QEMU_LEN: u32 = 440;
const QEMU_KIND: u32 = 0;

/// What a dump says of a vCPU.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DumpedVcpu {
    pub(super) regs: kvm_regs,
    pub(super) sregs: kvm_sregs,
    pub(super) kernel_gs_base: u64,
}

impl DumpedVcpu {
    /// Reads the registers of a vCPU whose thread is not in `KVM_RUN`.
    pub(crate) fn gather(vcpu: &VcpuFd) -> Result<Self, KvmError> {
        let get = KvmError::ioctl;
        let entry = kvm_msr_entry {
            index: MSR_KERNEL_GS_BASE,
            ..Default::default()
        };
        let mut msrs = Msrs::from_entries(&[entry])
            .map_err(|_| get("KVM_GET_MSRS")(kvm_ioctls::Error::new(libc::E2BIG)))?;
        vcpu.get_msrs(&mut msrs).map_err(get("KVM_GET_MSRS"))?;
        Ok(Self {
            regs: vcpu.get_regs().map_err(get("KVM_GET_REGS"))?,
            sregs: vcpu.get_sregs().map_err(get("KVM_GET_SREGS"))?,
            kernel_gs_base: msrs.as_slice().first().map_or(0, |msr| msr.data),
        })
    }

    /// Appends its notes: Linux's, by which debuggers take it for a thread, and QEMU's.
    pub(super) fn note(&self, number: u32, to: &mut Vec<u8>) {
        note("CORE", NT_PRSTATUS, &self.thread(number), to);
        note("QEMU", QEMU_KIND, &self.machine_state(), to);
    }

    /// `struct elf_prstatus`, whose process id is the vCPU's number from 1.
    fn thread(&self, number: u32) -> Vec<u8> {
        let (regs, sregs) = (&self.regs, &self.sregs);
        let selector = |segment: &kvm_segment| u64::from(segment.selector);
        let mut status = vec![0; PRSTATUS_PID];
        status.extend((number + 1).to_le_bytes());
        status.resize(PRSTATUS_REGISTERS, 0);
        for register in [
            regs.r15,
            regs.r14,
            regs.r13,
            regs.r12,
            regs.rbp,
            regs.rbx,
            regs.r11,
            regs.r10,
            regs.r9,
            regs.r8,
            regs.rax,
            regs.rcx,
            regs.rdx,
            regs.rsi,
            regs.rdi,
            // The number of the system call that the thread is in.
            0,
            regs.rip,
            selector(&sregs.cs),
            regs.rflags,
            regs.rsp,
            selector(&sregs.ss),
            sregs.fs.base,
            sregs.gs.base,
            selector(&sregs.ds),
            selector(&sregs.es),
            selector(&sregs.fs),
            selector(&sregs.gs),
        ] {
            status.extend(register.to_le_bytes());
        }
        status.resize(PRSTATUS_LEN, 0);
        status
    }

    /// QEMU's `QEMUCPUState`.
    fn machine_state(&self) -> Vec<u8> {
        let (regs, sregs) = (&self.regs, &self.sregs);
        let mut state = Vec::with_capacity(QEMU_LEN as usize);
        state.extend(QEMU_VERSION.to_le_bytes());
        state.extend(QEMU_LEN.to_le_bytes());
        for register in [
            regs.rax,
            regs.rbx,
            regs.rcx,
            regs.rdx,
            regs.rsi,
            regs.rdi,
            regs.rsp,
            regs.rbp,
            regs.r8,
            regs.r9,
            regs.r10,
            regs.r11,
            regs.r12,
            regs.r13,
            regs.r14,
            regs.r15,
            regs.rip,
            regs.rflags,
        ] {
            state.extend(register.to_le_bytes());
        }
        for of in [
            &sregs.cs, &sregs.ds, &sregs.es, &sregs.fs, &sregs.gs, &sregs.ss, &sregs.ldt, &sregs.tr,
        ] {
            segment(of.selector, of.limit, flags(of), of.base, &mut state);
        }
        for kvm_dtable { base, limit, .. } in [sregs.gdt, sregs.idt] {
            segment(0, limit.into(), 0, base, &mut state);
        }
        for register in [
            sregs.cr0,
            // There is no CR1.
            0,
            sregs.cr2,
            sregs.cr3,
            sregs.cr4,
            self.kernel_gs_base,
        ] {
            state.extend(register.to_le_bytes());
        }
        state
    }
}

fn segment(selector: u16, limit: u32, flags: u32, base: u64, to: &mut Vec<u8>) {
    for half in [u32::from(selector), limit, flags, 0] {
        to.extend(half.to_le_bytes());
    }
    to.extend(base.to_le_bytes());
}

/// A segment's attributes, where the second half of a descriptor has them (Intel SDM 3A §3.4.5).
fn flags(segment: &kvm_segment) -> u32 {
    if segment.unusable != 0 {
        return 0;
    }
    let bit = |value: u8, at: u32| u32::from(value) << at;
    bit(segment.type_, 8)
        | bit(segment.s, 12)
        | bit(segment.dpl, 13)
        | bit(segment.present, 15)
        | bit(segment.avl, 20)
        | bit(segment.l, 21)
        | bit(segment.db, 22)
        | bit(segment.g, 23)
}
