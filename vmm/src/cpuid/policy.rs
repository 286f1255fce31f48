//! The processor features that are hidden from the guest, and those that are added.

use kvm_bindings::kvm_cpuid_entry2;

use super::Guest;

/// A register of CPUID's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}
use Register::{Eax, Ebx, Ecx, Edx};

/// The change of a register, if KVM has the leaf at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// These bits become 0.
    Clear(u32),
    /// All bits but these become 0.
    Keep(u32),
    /// These bits become 1.
    Set(u32),
}
use Change::{Clear, Keep, Set};

/// One line of the policy.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rule {
    pub(super) leaf: u32,
    /// `None` for all sub-leaves, or if the leaf has none.
    pub(super) sub_leaf: Option<u32>,
    pub(super) register: Register,
    pub(super) change: Change,
    /// The reason, for the reader.
    #[cfg_attr(not(test), allow(dead_code))]
    pub(super) why: &'static str,
}

const fn rule(leaf: u32, register: Register, change: Change, why: &'static str) -> Rule {
    Rule {
        leaf,
        sub_leaf: None,
        register,
        change,
        why,
    }
}

/// A rule for one sub-leaf: in leaf 7 the same bit means something else in each.
const fn sub(
    leaf: u32,
    sub_leaf: u32,
    register: Register,
    change: Change,
    why: &'static str,
) -> Rule {
    Rule {
        sub_leaf: Some(sub_leaf),
        ..rule(leaf, register, change, why)
    }
}

/// Returns a mask of the bits with these numbers.
const fn bits<const N: usize>(numbers: [u32; N]) -> u32 {
    let mut mask = 0;
    let mut i = 0;
    while i < N {
        mask |= 1 << numbers[i];
        i += 1;
    }
    mask
}

/// The policy, in order of leaves. Features that no rule names pass through as KVM offers them.
#[rustfmt::skip]
pub(super) const RULES: &[Rule] = &[
    rule(0x1, Ecx, Clear(bits([3])), "MONITOR: an idle guest must HLT, so that the host gets the CPU"),
    rule(0x1, Ecx, Clear(bits([5, 6])), "VMX, SMX: no nested virtualisation"),
    rule(0x1, Ecx, Clear(bits([2, 4, 15])), "DTES64, DS-CPL, PDCM: no performance monitoring"),
    rule(0x1, Ecx, Clear(bits([7, 8, 14, 18])), "EIST, TM2, xTPR, DCA: frequency, heat and chipset are the host's"),
    rule(0x1, Ecx, Set(bits([21])), "x2APIC: KVM emulates it, and it spares MMIO exits"),
    rule(0x1, Ecx, Set(bits([31])), "hypervisor: makes a guest look at leaf 0x40000000"),
    rule(0x1, Edx, Clear(bits([21, 22, 29, 31])), "DS, ACPI, TM, PBE: performance monitoring and heat"),
    rule(0x5, Eax, Keep(0), "MONITOR/MWAIT parameters"),
    rule(0x5, Ebx, Keep(0), "MONITOR/MWAIT parameters"),
    rule(0x5, Ecx, Keep(0), "MONITOR/MWAIT parameters"),
    rule(0x5, Edx, Keep(0), "MONITOR/MWAIT parameters"),
    rule(0x6, Eax, Keep(bits([2])), "power and heat are the host's; ARAT stays: the APIC timer never stops"),
    rule(0x6, Ecx, Keep(0), "power and heat are the host's"),
    sub(0x7, 0, Ebx, Clear(bits([2])), "SGX: no enclaves"),
    sub(0x7, 0, Ebx, Clear(bits([12, 15])), "PQM, PQE: cache and bandwidth quotas are the host's"),
    sub(0x7, 0, Ebx, Clear(bits([14])), "MPX: gone from newer processors and kernels"),
    sub(0x7, 0, Ebx, Clear(bits([25])), "PT: no processor trace"),
    sub(0x7, 0, Ecx, Clear(bits([5])), "WAITPKG: as MONITOR"),
    sub(0x7, 0, Ecx, Clear(bits([7])), "shadow stacks: their pointer is not in a snapshot"),
    sub(0x7, 0, Ecx, Clear(bits([13, 24, 29, 30])), "TME, bus lock detection, ENQCMD, SGX launch control"),
    sub(0x7, 0, Edx, Clear(bits([18, 19])), "PCONFIG, architectural LBR"),
    sub(0x7, 0, Edx, Clear(bits([22, 24, 25])), "AMX: 8 KiB more state for each vCPU, and a permission that the process has not"),
    sub(0x7, 1, Eax, Clear(bits([21])), "AMX-FP16: as AMX"),
    sub(0x7, 1, Edx, Clear(bits([8])), "AMX-COMPLEX: as AMX"),
    rule(0xa, Eax, Keep(0), "no performance monitoring"),
    rule(0xa, Ebx, Keep(0), "no performance monitoring"),
    rule(0xa, Ecx, Keep(0), "no performance monitoring"),
    rule(0xa, Edx, Keep(0), "no performance monitoring"),
    sub(0xd, 0, Eax, Clear(bits([3, 4])), "MPX's registers: as MPX"),
    sub(0xd, 0, Eax, Clear(bits([17, 18])), "AMX's registers: as AMX"),
    rule(0x4000_0001, Eax, Clear(bits([4, 10, 14])), "asynchronous page faults: one in flight would be lost in a snapshot"),
    rule(0x4000_0001, Eax, Clear(bits([15])), "extended MSI destinations: for more CPUs than we have"),
    rule(0x4000_0001, Eax, Clear(bits([16, 17])), "hypercalls that only encrypted guests make, and that nobody answers"),
    rule(0x8000_0001, Ecx, Clear(bits([2, 12])), "SVM, SKINIT: no nested virtualisation"),
    rule(0x8000_0001, Ecx, Clear(bits([10, 15])), "IBS, LWP: no performance monitoring"),
    rule(0x8000_0001, Ecx, Clear(bits([13, 19])), "watchdog, node id MSR: hardware that KVM does not emulate"),
    rule(0x8000_0001, Ecx, Clear(bits([23, 24, 27, 28])), "performance counters"),
    rule(0x8000_0001, Ecx, Clear(bits([29])), "MONITORX: as MONITOR"),
];

/// Leaves that the guest does not have at all.
#[rustfmt::skip]
pub(super) const ABSENT: &[(u32, &str)] = &[
    (0xf, "cache and bandwidth monitoring"),
    (0x10, "cache and bandwidth quotas"),
    (0x12, "SGX"),
    (0x14, "processor trace"),
    (0x1b, "PCONFIG"),
    (0x1c, "architectural LBR"),
    (0x1d, "AMX"),
    (0x1e, "AMX"),
    (0x23, "performance monitoring"),
    (0x8000_000a, "SVM"),
    (0x8000_001b, "IBS"),
    (0x8000_001c, "LWP"),
    (0x8000_001f, "memory encryption"),
    (0x8000_0020, "cache and bandwidth quotas"),
    (0x8000_0022, "performance monitoring"),
];

/// Sub-leaves that the guest does not have.
#[rustfmt::skip]
pub(super) const ABSENT_SUB_LEAVES: &[(u32, u32, &str)] = &[
    (0xd, 3, "MPX's bound registers"),
    (0xd, 4, "MPX's configuration registers"),
    (0xd, 17, "AMX's configuration register"),
    (0xd, 18, "AMX's tiles"),
];

/// Leaves that KVM answers with zeroes, where the host's own answer is right for its guests.
#[rustfmt::skip]
pub(super) const FROM_HOST: &[(u32, &str)] = &[
    (0x8000_0002, "the processor's name, which people and bug reports look for"),
    (0x8000_0003, "the processor's name"),
    (0x8000_0004, "the processor's name"),
    (0x8000_0005, "AMD's first-level caches"),
];

/// The leaf where KVM announces itself.
const KVM_SIGNATURE: u32 = 0x4000_0000;
/// Frequencies, in the layout that VMware introduced and QEMU, FreeBSD and others share.
const TIMING: u32 = 0x4000_0010;
/// KVM's local APIC counts nanoseconds.
const APIC_BUS_KHZ: u32 = 1_000_000;
const TSC_DEADLINE: u32 = 1 << 24;
/// Leaf 7: the MSR `IA32_ARCH_CAPABILITIES`. KVM emulates it on every host, but no AMD processor
/// has it: a guest would apply its bits to a processor that they do not describe.
const ARCH_CAPABILITIES: u32 = 1 << 29;

/// The leaf of [`INVARIANT_TSC`].
const POWER: u32 = 0x8000_0007;
/// Leaf 0x80000007: the time stamp counter is invariant. KVM reports it as the processor does, even
/// if the kernel has found the counter unstable.
const INVARIANT_TSC: u32 = 1 << 8;
/// Leaf 0x80000021: automatic IBRS.
const AUTOMATIC_IBRS: u32 = 1 << 8;

/// Applies the policy.
pub(super) fn apply(entries: &mut Vec<kvm_cpuid_entry2>, guest: &Guest) {
    entries.retain(|entry| {
        let (leaf, sub_leaf) = (entry.function, entry.index);
        let has_leaf = ABSENT.iter().all(|absent| absent.0 != leaf);
        let mut absent = ABSENT_SUB_LEAVES.iter();
        has_leaf && absent.all(|absent| (absent.0, absent.1) != (leaf, sub_leaf))
    });
    let amd = is_amd(entries);
    for entry in entries.iter_mut() {
        let leaf = entry.function;
        let sub_leaf = entry.index;
        for rule in RULES.iter().filter(|rule| rule.names(leaf, sub_leaf)) {
            change(entry, rule);
        }
        if amd && leaf == 0x7 && sub_leaf == 0 {
            entry.edx &= !ARCH_CAPABILITIES;
        }
        if guest.tsc_is_unstable && leaf == POWER {
            entry.edx &= !INVARIANT_TSC;
        }
        if entry.function == 1 {
            entry.ecx &= !TSC_DEADLINE;
            if guest.tsc_deadline {
                entry.ecx |= TSC_DEADLINE;
            }
        }
    }
    for entry in entries.iter_mut() {
        let wanted = FROM_HOST.iter().any(|(leaf, _)| *leaf == entry.function);
        if wanted && [entry.eax, entry.ebx, entry.ecx, entry.edx] == [0; 4] {
            let host = (guest.host)(entry.function);
            [entry.eax, entry.ebx, entry.ecx, entry.edx] = host;
        }
    }
    announce_frequencies(entries, guest.tsc_khz);
}

/// Whether KVM offers guests an invariant time stamp counter.
pub(super) fn has_invariant_tsc(supported: &[kvm_cpuid_entry2]) -> bool {
    let mut entries = supported.iter();
    entries.any(|entry| entry.function == POWER && entry.edx & INVARIANT_TSC != 0)
}

/// Whether the processor is AMD's, and KVM does not offer guests its automatic IBRS.
pub(super) fn lacks_automatic_ibrs(supported: &[kvm_cpuid_entry2]) -> bool {
    let mut entries = supported.iter();
    let has =
        |entry: &kvm_cpuid_entry2| entry.function == 0x8000_0021 && entry.eax & AUTOMATIC_IBRS != 0;
    is_amd(supported) && !entries.any(has)
}

impl Rule {
    fn names(&self, leaf: u32, sub_leaf: u32) -> bool {
        self.leaf == leaf && self.sub_leaf.is_none_or(|only| only == sub_leaf)
    }
}

/// Returns whether the vendor is AMD, or Hygon, whose processors are AMD designs.
fn is_amd(entries: &[kvm_cpuid_entry2]) -> bool {
    // "Auth", "Hygo": the first word of the vendor's name.
    const VENDORS: [u32; 2] = [u32::from_le_bytes(*b"Auth"), u32::from_le_bytes(*b"Hygo")];
    entries
        .iter()
        .any(|entry| entry.function == 0 && VENDORS.contains(&entry.ebx))
}

fn change(entry: &mut kvm_cpuid_entry2, rule: &Rule) {
    let register = match rule.register {
        Eax => &mut entry.eax,
        Ebx => &mut entry.ebx,
        Ecx => &mut entry.ecx,
        Edx => &mut entry.edx,
    };
    match rule.change {
        Clear(bits) => *register &= !bits,
        Keep(bits) => *register &= bits,
        Set(bits) => *register |= bits,
    }
}

fn announce_frequencies(entries: &mut Vec<kvm_cpuid_entry2>, tsc_khz: Option<u32>) {
    let Some(tsc_khz) = tsc_khz else { return };
    let signature = entries.iter_mut().find(|e| e.function == KVM_SIGNATURE);
    let Some(signature) = signature else { return };
    signature.eax = signature.eax.max(TIMING);
    entries.retain(|e| e.function != TIMING);
    entries.push(kvm_cpuid_entry2 {
        function: TIMING,
        eax: tsc_khz,
        ebx: APIC_BUS_KHZ,
        ..Default::default()
    });
}
