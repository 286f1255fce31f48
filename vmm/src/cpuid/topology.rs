//! One socket with a core for each vCPU and one thread in each core; APIC ids 0, 1, 2, …
//!
//! Intel's leaves 1, 4, 0xB and 0x1F (SDM vol. 2, CPUID), AMD's 0x80000008, 0x8000001D, 0x8000001E
//! and 0x80000026 (APM vol. 3, appendix E).

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

const EXTENDED_TOPOLOGY: [u32; 2] = [0xb, 0x1f];
const HTT: u32 = 1 << 28;
const CMP_LEGACY: u32 = 1 << 1;
const LEVEL_THREAD: u32 = 1 << 8;
const LEVEL_CORE: u32 = 2 << 8;

/// Rewrites everything about sockets, cores, threads and cache sharing.
pub(super) fn lay_out(entries: &mut Vec<kvm_cpuid_entry2>, vcpus: u8) {
    let vcpus = u32::from(vcpus);
    // Bits of an APIC id that number the cores.
    let id_bits = vcpus.next_power_of_two().trailing_zeros();
    let several = vcpus > 1;
    let amd = is_amd(entries);
    let max_leaf = entries
        .iter()
        .find(|e| e.function == 0)
        .map_or(0, |e| e.eax);

    // AMD's newest form of 0xB; leaf 0xB itself suffices.
    entries.retain(|e| !EXTENDED_TOPOLOGY.contains(&e.function) && e.function != 0x8000_0026);
    for entry in entries.iter_mut() {
        match entry.function {
            0x1 => {
                let ids = (1u32 << id_bits).min(0xff);
                entry.ebx = entry.ebx & 0xff00_ffff | ids << 16;
                set_if(&mut entry.edx, HTT, several);
            }
            0x4 if entry.eax & 0x1f != 0 => {
                entry.eax = shared_by(entry.eax, vcpus) & 0x03ff_ffff;
                entry.eax |= ((1u32 << id_bits) - 1).min(0x3f) << 26;
            }
            0x8000_0001 if amd => set_if(&mut entry.ecx, CMP_LEGACY, several),
            0x8000_0008 if amd => {
                entry.ecx = entry.ecx & !0xf0ff | (vcpus - 1) | id_bits << 12;
            }
            0x8000_001d if entry.eax & 0x1f != 0 => entry.eax = shared_by(entry.eax, vcpus),
            // One node; the core is the vCPU's own, see `number`.
            0x8000_001e => (entry.ebx, entry.ecx) = (0, 0),
            _ => {}
        }
    }
    for leaf in EXTENDED_TOPOLOGY
        .into_iter()
        .filter(|leaf| *leaf <= max_leaf)
    {
        entries.extend([
            level(leaf, 0, [0, 1, LEVEL_THREAD]),
            level(leaf, 1, [id_bits, vcpus, LEVEL_CORE]),
            level(leaf, 2, [0, 0, 0]),
        ]);
    }
}

/// Sets the vCPU's APIC id wherever CPUID reports it.
pub(super) fn number(entry: &mut kvm_cpuid_entry2, id: u8) {
    let id = u32::from(id);
    match entry.function {
        0x1 => entry.ebx = entry.ebx & 0x00ff_ffff | id << 24,
        0xb | 0x1f => entry.edx = id,
        0x8000_001e => {
            entry.eax = id;
            entry.ebx = entry.ebx & !0xff | id;
        }
        _ => {}
    }
}

/// Returns a cache leaf's EAX with its number of sharers: the first two levels belong to a core,
/// the third to the socket. The field holds the number of APIC ids minus one.
fn shared_by(eax: u32, vcpus: u32) -> u32 {
    let level = eax >> 5 & 0b111;
    let sharers = if level >= 3 {
        vcpus.next_power_of_two()
    } else {
        1
    };
    eax & !(0xfff << 14) | (sharers - 1) << 14
}

fn level(function: u32, index: u32, [eax, ebx, ecx]: [u32; 3]) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 {
        function,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax,
        ebx,
        ecx: ecx | index,
        ..Default::default()
    }
}

fn set_if(register: &mut u32, bit: u32, condition: bool) {
    if condition {
        *register |= bit;
    } else {
        *register &= !bit;
    }
}

/// AMD, or the compatible Hygon.
fn is_amd(entries: &[kvm_cpuid_entry2]) -> bool {
    entries.iter().filter(|e| e.function == 0).any(|e| {
        let vendor: Vec<u8> = [e.ebx, e.edx, e.ecx]
            .into_iter()
            .flat_map(u32::to_le_bytes)
            .collect();
        matches!(vendor.as_slice(), b"AuthenticAMD" | b"HygonGenuine")
    })
}
