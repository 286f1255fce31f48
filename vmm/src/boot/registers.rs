//! The initial state of vCPUs.
//!
//! KVM creates a vCPU as a processor after RESET, with its FPU initialised as Linux expects it, so
//! that only the differences are set: on the boot CPU the registers of the boot protocol and the
//! two lines of its local APIC, on every CPU the MSRs of [`BOOT_MSRS`]. The other CPUs wait in KVM
//! for the kernel's INIT and SIPI.

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use podvisor_devices::GuestRam;

use super::{BootError, Entry, Protocol, write as put};
use crate::layout;

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// The bit of RFLAGS that is always set.
const RFLAGS_RESERVED: u64 = 2;

/// Linux's `__BOOT_CS`, `__BOOT_DS` and `__BOOT_TSS`.
const CODE_SELECTOR: u16 = 0x10;
const DATA_SELECTOR: u16 = 0x18;
const TASK_SELECTOR: u16 = 0x20;

/// Flat segments: base 0, 4 GiB, present, accessed.
const CODE_32: u64 = 0x00cf_9b00_0000_ffff;
const CODE_64: u64 = 0x00af_9b00_0000_ffff;
const DATA: u64 = 0x00cf_9300_0000_ffff;
/// A busy TSS at 0 of the smallest size, which VT-x requires but which is not used.
const TASK: u64 = 0x0000_8b00_0000_0067;

/// Model specific registers that differ from their reset value: index, value, why.
pub(crate) const BOOT_MSRS: &[(u32, u64, &str)] = &[
    (
        0x1a0,
        1,
        "IA32_MISC_ENABLE: fast strings, without which Linux turns `rep movsb` off",
    ),
    (
        0x2ff,
        1 << 11 | 6,
        "IA32_MTRR_DEF_TYPE: MTRRs on, write-back: after RESET all memory is uncached",
    ),
];

/// Sets a vCPU's initial state: the boot CPU's with the kernel's `entry`, any other CPU's with
/// `None`. CPUID must have been set before.
///
/// # Errors
///
/// Fails if KVM refuses.
pub(crate) fn boot_registers(vcpu: &VcpuFd, entry: Option<&Entry>) -> Result<(), BootError> {
    set_msrs(vcpu)?;
    if let Some(entry) = entry {
        set_special_registers(vcpu, entry.protocol)?;
        vcpu.set_regs(&registers(entry))
            .map_err(failed("set the registers"))?;
        set_interrupt_lines(vcpu)?;
    }
    Ok(())
}

/// Writes the descriptor table that the boot CPU's selectors refer to.
pub(super) fn write_gdt(mem: &GuestRam, protocol: Protocol) -> Result<(), BootError> {
    let bytes: Vec<u8> = gdt(protocol)
        .iter()
        .flat_map(|descriptor| descriptor.to_le_bytes())
        .collect();
    put(mem, "the descriptor table", layout::GDT, &bytes)
}

fn gdt(protocol: Protocol) -> [u64; 6] {
    [0, 0, code(protocol), DATA, TASK, 0]
}

fn code(protocol: Protocol) -> u64 {
    match protocol {
        Protocol::Pvh => CODE_32,
        Protocol::Linux64 => CODE_64,
    }
}

fn registers(entry: &Entry) -> kvm_regs {
    let mut regs = kvm_regs {
        rip: entry.address,
        rflags: RFLAGS_RESERVED,
        ..Default::default()
    };
    match entry.protocol {
        Protocol::Pvh => regs.rbx = layout::PVH_START_INFO,
        Protocol::Linux64 => {
            regs.rsi = layout::ZERO_PAGE;
            regs.rsp = layout::BOOT_STACK;
            regs.rbp = layout::BOOT_STACK;
        }
    }
    regs
}

fn set_special_registers(vcpu: &VcpuFd, protocol: Protocol) -> Result<(), BootError> {
    let mut sregs = vcpu
        .get_sregs()
        .map_err(failed("get the special registers"))?;
    sregs.cs = segment(CODE_SELECTOR, code(protocol));
    let data = segment(DATA_SELECTOR, DATA);
    (sregs.ds, sregs.es, sregs.ss) = (data, data, data);
    (sregs.fs, sregs.gs) = (data, data);
    sregs.tr = segment(TASK_SELECTOR, TASK);
    sregs.gdt.base = layout::GDT;
    sregs.gdt.limit = (size_of_val(&gdt(protocol)) - 1) as u16;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    sregs.cr0 = CR0_PE | CR0_ET;
    if protocol == Protocol::Linux64 {
        sregs.cr0 |= CR0_PG;
        sregs.cr3 = layout::PAGE_TABLES;
        sregs.cr4 |= CR4_PAE;
        sregs.efer |= EFER_LME | EFER_LMA;
    }
    vcpu.set_sregs(&sregs)
        .map_err(failed("set the special registers"))
}

/// Returns what the processor would hold after loading `selector`, which refers to `descriptor`.
fn segment(selector: u16, descriptor: u64) -> kvm_segment {
    let bits = |from: u32, count: u32| ((descriptor >> from) & ((1 << count) - 1)) as u8;
    let base = (descriptor >> 16 & 0xff_ffff) | (descriptor >> 56 << 24);
    let limit = (descriptor & 0xffff) as u32 | (descriptor >> 32 & 0xf_0000) as u32;
    let g = bits(55, 1);
    kvm_segment {
        base,
        limit: if g == 1 { limit << 12 | 0xfff } else { limit },
        selector,
        type_: bits(40, 4),
        s: bits(44, 1),
        dpl: bits(45, 2),
        present: bits(47, 1),
        avl: bits(52, 1),
        l: bits(53, 1),
        db: bits(54, 1),
        g,
        unusable: 0,
        padding: 0,
    }
}

fn set_msrs(vcpu: &VcpuFd) -> Result<(), BootError> {
    let entries: Vec<_> = BOOT_MSRS
        .iter()
        .map(|&(index, data, _)| kvm_msr_entry {
            index,
            data,
            ..Default::default()
        })
        .collect();
    let msrs = Msrs::from_entries(&entries).map_err(|_| BootError::Vcpu {
        what: "set the MSRs",
        source: kvm_ioctls::Error::new(libc::E2BIG),
    })?;
    let set = vcpu.set_msrs(&msrs).map_err(failed("set the MSRs"))?;
    if set == entries.len() {
        Ok(())
    } else {
        // KVM stops at the first one that it rejects.
        Err(BootError::Vcpu {
            what: "set all MSRs",
            source: kvm_ioctls::Error::new(libc::EINVAL),
        })
    }
}

/// LINT0 delivers the 8259's interrupts and LINT1 NMIs, as the MP table says.
fn set_interrupt_lines(vcpu: &VcpuFd) -> Result<(), BootError> {
    const LVT_LINT0: usize = 0x350;
    const LVT_LINT1: usize = 0x360;
    const MODE_NMI: u32 = 4 << 8;
    const MODE_EXT_INT: u32 = 7 << 8;
    let mut lapic = vcpu.get_lapic().map_err(failed("get the local APIC"))?;
    for (register, value) in [(LVT_LINT0, MODE_EXT_INT), (LVT_LINT1, MODE_NMI)] {
        for (byte, value) in lapic.regs[register..].iter_mut().zip(value.to_le_bytes()) {
            *byte = value as std::ffi::c_char;
        }
    }
    vcpu.set_lapic(&lapic).map_err(failed("set the local APIC"))
}

fn failed(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> BootError {
    move |source| BootError::Vcpu { what, source }
}
