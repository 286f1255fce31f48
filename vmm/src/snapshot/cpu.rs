//! Checks, feature by feature, whether this host's processor can run a guest that was started on
//! another one, and whether the guest knows all features of this one.

use std::fmt;

use kvm_bindings::kvm_cpuid_entry2;

/// CPUID registers whose bits are features: leaf, sub-leaf, register, and the bits' names from 0 on
/// as Linux shows them in `/proc/cpuinfo`; `-` if there is no name.
#[rustfmt::skip]
const FEATURES: &[(u32, u32, Register, &str)] = &[
    (0x1, 0, Register::Ecx, "pni pclmulqdq dtes64 monitor ds_cpl vmx smx est tm2 ssse3 cid sdbg fma cx16 xtpr pdcm - pcid dca sse4_1 sse4_2 x2apic movbe popcnt tsc_deadline_timer aes xsave - avx f16c rdrand hypervisor"),
    (0x1, 0, Register::Edx, "fpu vme de pse tsc msr pae mce cx8 apic - sep mtrr pge mca cmov pat pse36 pn clflush - ds acpi mmx fxsr sse sse2 ss ht tm ia64 pbe"),
    (0x7, 0, Register::Ebx, "fsgsbase tsc_adjust sgx bmi1 hle avx2 fdp_excptn_only smep bmi2 erms invpcid rtm cqm zero_fcs_fds mpx rdt_a avx512f avx512dq rdseed adx smap avx512ifma - clflushopt clwb intel_pt avx512pf avx512er avx512cd sha_ni avx512bw avx512vl"),
    (0x7, 0, Register::Ecx, "prefetchwt1 avx512vbmi umip pku - waitpkg avx512_vbmi2 shstk gfni vaes vpclmulqdq avx512_vnni avx512_bitalg tme avx512_vpopcntdq - la57 - - - - - rdpid - bus_lock_detect cldemote - movdiri movdir64b enqcmd sgx_lc pks"),
    (0x7, 0, Register::Edx, "- - avx512_4vnniw avx512_4fmaps fsrm uintr - - avx512_vp2intersect srbds_ctrl md_clear rtm_always_abort - tsx_force_abort serialize hybrid tsxldtrk - pconfig arch_lbr ibt - amx_bf16 avx512_fp16 amx_tile amx_int8 spec_ctrl intel_stibp flush_l1d arch_capabilities core_capabilities ssbd"),
    (0x7, 1, Register::Eax, "sha512 sm3 sm4 - avx_vnni avx512_bf16 lass cmpccxadd - - fzrm fsrs fsrc - - - - fred lkgs wrmsrns nmi_src amx_fp16 hreset avx_ifma - - lam"),
    (0x7, 1, Register::Edx, "- - - - avx_vnni_int8 avx_ne_convert - - amx_complex - avx_vnni_int16 - - - prefetchi"),
    (0x7, 2, Register::Edx, "psfd ipred_ctrl rrsba_ctrl ddpd_u bhi_ctrl mcdt_no"),
    (0xd, 0, Register::Eax, "x87_state sse_state avx_state mpx_bndregs mpx_bndcsr avx512_opmask avx512_zmm_hi256 avx512_hi16_zmm pt_state pku_state - cet_user cet_kernel - - - - amx_tilecfg amx_tiledata"),
    (0xd, 1, Register::Eax, "xsaveopt xsavec xgetbv1 xsaves xfd"),
    (0x4000_0001, 0, Register::Eax, "kvm_clocksource kvm_nop_io_delay kvm_mmu_op kvm_clocksource2 kvm_async_pf kvm_steal_time kvm_pv_eoi kvm_pv_unhalt - kvm_pv_tlb_flush kvm_async_pf_vmexit kvm_pv_send_ipi kvm_poll_control kvm_pv_sched_yield kvm_async_pf_int kvm_msi_ext_dest_id - - - - - - - - kvm_clocksource_stable"),
    (0x8000_0001, 0, Register::Ecx, "lahf_lm cmp_legacy svm extapic cr8_legacy abm sse4a misalignsse 3dnowprefetch osvw ibs xop skinit wdt - lwp fma4 tce - nodeid_msr - tbm topoext perfctr_core perfctr_nb - bpext ptsc perfctr_llc mwaitx"),
    (0x8000_0001, 0, Register::Edx, "- - - - - - - - - - - syscall - - - - - - - mp nx - mmxext - - fxsr_opt pdpe1gb rdtscp - lm 3dnowext 3dnow"),
    (0x8000_0007, 0, Register::Edx, "- - - - - - - - constant_tsc"),
    (0x8000_0008, 0, Register::Ebx, "clzero irperf xsaveerptr - rdpru - - - - wbnoinvd - - amd_ibpb - amd_ibrs amd_stibp - amd_stibp_always_on - - - - - amd_ppin amd_ssbd virt_ssbd amd_ssb_no cppc amd_psfd btc_no"),
    (0x8000_0021, 0, Register::Eax, "no_nested_data_bp fsgs_non_serializing lfence_rdtsc - - verw_clear null_sel_clears_base - autoibrs no_smm_ctl_msr - - - - - - - - - - - - - - - - - sbpb ibpb_brtype srso_no"),
    (0x8000_0021, 0, Register::Ecx, "- tsa_sq_no tsa_l1_no"),
];

/// Bits that say nothing of the host: those that follow the guest's own CR4, which some kernels
/// report as the host's, and AMX's configuration, which Linux before 6.4 shows where there is no
/// AMX.
const NOT_OF_THE_HOST: &[(u32, Register, u32)] = &[
    (0x1, Register::Ecx, 1 << 27),
    (0x7, Register::Ecx, 1 << 4),
    (0xd, Register::Eax, 1 << 17),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

/// Features that the guest has and this host lacks; or, for a VM that [requires
/// it](crate::VmBuilder::require_same_cpu), the other way round.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuMismatch {
    /// Names, as in `/proc/cpuinfo`, or the position of the bit in CPUID.
    pub missing: Vec<String>,
    /// Features that this host offers and the guest does not know.
    pub unknown: Vec<String>,
    /// The processor's vendor, in the snapshot and here, if they differ.
    pub vendors: Option<(String, String)>,
}

impl fmt::Display for CpuMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((saved, here)) = &self.vendors {
            write!(
                f,
                "the snapshot is of a {saved} processor, this host has {here}"
            )?;
            if !self.missing.is_empty() {
                f.write_str("; ")?;
            }
        }
        if !self.missing.is_empty() {
            write!(
                f,
                "this host's KVM does not offer {}",
                self.missing.join(", ")
            )?;
        }
        if !self.unknown.is_empty() {
            write!(f, "the guest does not know of {}", self.unknown.join(", "))?;
        }
        Ok(())
    }
}

/// Compares the guest's CPUID with the CPUID that a new guest of the same shape would get `here`.
///
/// # Errors
/// Fails if the guest may use something that is missing here.
pub(super) fn check(
    saved: &[kvm_cpuid_entry2],
    here: &[kvm_cpuid_entry2],
) -> Result<(), CpuMismatch> {
    let vendors = (vendor(saved), vendor(here));
    let mismatch = CpuMismatch {
        missing: lacking(saved, here),
        vendors: (vendors.0 != vendors.1).then_some(vendors),
        ..CpuMismatch::default()
    };
    if mismatch == CpuMismatch::default() {
        Ok(())
    } else {
        Err(mismatch)
    }
}

/// Checks that a new guest would not get more features `here` than this one has.
///
/// # Errors
/// Fails if it would: this guest would never use what microcode or a kernel has added meanwhile.
pub(super) fn check_known(
    saved: &[kvm_cpuid_entry2],
    here: &[kvm_cpuid_entry2],
) -> Result<(), CpuMismatch> {
    let unknown = lacking(here, saved);
    if unknown.is_empty() {
        return Ok(());
    }
    Err(CpuMismatch {
        unknown,
        ..CpuMismatch::default()
    })
}

/// Returns the features of `wanted` that are not in `found`.
fn lacking(wanted: &[kvm_cpuid_entry2], found: &[kvm_cpuid_entry2]) -> Vec<String> {
    let mut lacking = Vec::new();
    for (leaf, index, register, names) in FEATURES {
        let bits = |entries| value(entries, *leaf, *index, *register);
        let own = NOT_OF_THE_HOST
            .iter()
            .filter(|own| (own.0, own.1) == (*leaf, *register));
        let ignored = own.fold(0, |mask, own| mask | own.2);
        let missing = bits(wanted) & !bits(found) & !ignored;
        let mut names = names.split(' ');
        for bit in 0..32 {
            let name = names.next().unwrap_or("-");
            if missing >> bit & 1 == 0 {
                continue;
            }
            lacking.push(match name {
                "-" => format!("CPUID {leaf:#x}.{index} {register:?} bit {bit}"),
                name => name.to_owned(),
            });
        }
    }
    lacking
}

fn value(entries: &[kvm_cpuid_entry2], leaf: u32, index: u32, register: Register) -> u32 {
    let entry = entries
        .iter()
        .find(|e| (e.function, e.index) == (leaf, index));
    entry.map_or(0, |entry| match register {
        Register::Eax => entry.eax,
        Register::Ebx => entry.ebx,
        Register::Ecx => entry.ecx,
        Register::Edx => entry.edx,
    })
}

fn vendor(entries: &[kvm_cpuid_entry2]) -> String {
    let part = |register| value(entries, 0, 0, register).to_le_bytes();
    let name = [Register::Ebx, Register::Edx, Register::Ecx]
        .map(part)
        .concat();
    // The content of a damaged file may be shown to users.
    let printable = |byte: &u8| {
        if byte.is_ascii_graphic() {
            char::from(*byte)
        } else {
            '?'
        }
    };
    name.iter().map(printable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            index,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        }
    }

    fn intel() -> kvm_cpuid_entry2 {
        let word = |text: &[u8; 4]| u32::from_le_bytes(*text);
        entry(0, 0, [7, word(b"Genu"), word(b"ntel"), word(b"ineI")])
    }

    #[test]
    fn each_feature_that_is_missing_is_named() {
        let saved = [intel(), entry(7, 0, [0, 1 << 5 | 1 << 16, 0, 1 << 17])];
        let here = [intel(), entry(7, 0, [0, 1 << 16, 0, 0])];
        assert_eq!(check(&saved, &saved), Ok(()));
        let text = check(&saved, &here).unwrap_err().to_string();
        assert!(text.contains("avx2") && !text.contains("avx512f"), "{text}");
        assert!(text.contains("CPUID 0x7.0 Edx bit 17"), "{text}");
        // More than the guest knows is harmless.
        assert_eq!(check(&here, &saved), Ok(()));
        // A missing leaf.
        assert!(check(&saved, &[intel()]).is_err());
    }

    #[test]
    fn a_guest_that_does_not_know_of_a_new_feature_is_told_apart() {
        let saved = [intel(), entry(7, 0, [0, 1 << 5, 0, 0])];
        let here = [intel(), entry(7, 0, [0, 1 << 5, 0, 1 << 10])];
        assert_eq!(check(&saved, &here), Ok(()));
        let text = check_known(&saved, &here).unwrap_err().to_string();
        assert_eq!(text, "the guest does not know of md_clear");
        assert_eq!(check_known(&here, &here), Ok(()));
        // Whether it may use missing features is checked separately.
        assert_eq!(check_known(&here, &saved), Ok(()));
    }

    #[test]
    fn what_the_guest_switched_on_itself_is_no_feature() {
        let saved = [intel(), entry(1, 0, [0, 0, 1 << 27, 0])];
        assert_eq!(check(&saved, &[intel()]), Ok(()));
    }

    #[test]
    fn another_vendor_is_named() {
        let mut here = intel();
        here.ebx = u32::from_le_bytes(*b"Auth");
        let error = check(&[intel()], &[here]).unwrap_err();
        assert!(error.to_string().contains("GenuineIntel"), "{error}");
    }

    #[test]
    fn no_register_has_more_than_32_names() {
        for (leaf, index, register, names) in FEATURES {
            let count = names.split(' ').count();
            assert!(count <= 32, "{leaf:#x}.{index} {register:?} has {count}");
        }
    }
}
