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

fn vendor(max_leaf: u32, name: &[u8; 12]) -> kvm_cpuid_entry2 {
    let word = |i: usize| u32::from_le_bytes(name[i..i + 4].try_into().unwrap());
    entry(0, 0, [max_leaf, word(0), word(8), word(4)])
}

const ALL: [u32; 4] = [u32::MAX; 4];
/// Type and level of a data cache, shared by 4096, in a package of 64.
const fn cache(level: u32) -> [u32; 4] {
    [0xffff_c000 | level << 5 | 1, 0x01c0_003f, 63, 0]
}

fn intel() -> Vec<kvm_cpuid_entry2> {
    vec![
        vendor(0x1f, b"GenuineIntel"),
        entry(1, 0, ALL),
        entry(4, 0, cache(1)),
        entry(4, 1, cache(2)),
        entry(4, 2, cache(3)),
        entry(4, 3, [0; 4]),
        entry(6, 0, ALL),
        entry(7, 0, ALL),
        entry(7, 1, ALL),
        entry(0xa, 0, ALL),
        entry(0xb, 0, [1, 2, 0x100, 9]),
        entry(0xd, 0, [0x600ff, 0x240, 0xa88, 0]),
        entry(0xd, 2, [0x100, 0x240, 0, 0]),
        entry(0xd, 3, [0x40, 0x3c0, 0, 0]),
        entry(0xd, 4, [0x40, 0x400, 0, 0]),
        entry(0xd, 17, [0x40, 0xac0, 2, 0]),
        entry(0xd, 18, [0x2000, 0xb00, 6, 0]),
        entry(0x14, 0, ALL),
        entry(0x4000_0000, 0, [0x4000_0001, 1, 2, 3]),
        entry(0x4000_0001, 0, [u32::MAX, 0, 0, 0]),
        entry(0x8000_0001, 0, ALL),
        entry(0x8000_0008, 0, [0x3027, 0, 0, 0]),
    ]
}

fn amd() -> Vec<kvm_cpuid_entry2> {
    vec![
        vendor(0xd, b"AuthenticAMD"),
        entry(1, 0, ALL),
        entry(7, 0, ALL),
        entry(0x8000_0001, 0, ALL),
        entry(0x8000_0008, 0, [0x3030, 0, u32::MAX, 0]),
        entry(0x8000_000a, 0, ALL),
        entry(0x8000_001d, 0, cache(1)),
        entry(0x8000_001d, 3, cache(3)),
        entry(0x8000_001e, 0, ALL),
        entry(0x8000_0026, 0, ALL),
    ]
}

fn guest(vcpus: u8) -> Guest {
    Guest {
        vcpus,
        tsc_khz: Some(2_600_000),
        tsc_is_unstable: false,
        tsc_deadline: true,
        host: |leaf| [leaf; 4],
    }
}

fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
    *entries
        .iter()
        .find(|e| e.function == function && e.index == index)
        .unwrap_or_else(|| panic!("leaf {function:#x}.{index}"))
}

const fn sharers(eax: u32) -> u32 {
    (eax >> 14 & 0xfff) + 1
}

#[test]
fn guests_get_neither_mwait_nor_nested_virtualisation_nor_counters() {
    let entries = compose(&intel(), &guest(2));
    let features = find(&entries, 1, 0).ecx;
    for bit in [3, 5, 6, 15] {
        assert_eq!(features >> bit & 1, 0, "bit {bit}");
    }
    let counters = find(&entries, 0xa, 0);
    assert_eq!([counters.eax, counters.ebx, counters.edx], [0; 3]);
    assert!(entries.iter().all(|e| e.function != 0x14));

    let entries = compose(&amd(), &guest(2));
    assert_eq!(find(&entries, 0x8000_0001, 0).ecx >> 2 & 1, 0, "SVM");
    assert!(entries.iter().all(|e| e.function != 0x8000_000a));
}

#[test]
fn guests_get_x2apic_the_deadline_timer_and_the_hypervisor_bit() {
    let mut supported = intel();
    supported[1].ecx = 0;
    let ecx = find(&compose(&supported, &guest(1)), 1, 0).ecx;
    assert_eq!(ecx, 1 << 21 | 1 << 24 | 1 << 31);

    let without = Guest {
        tsc_deadline: false,
        ..guest(1)
    };
    let ecx = find(&compose(&intel(), &without), 1, 0).ecx;
    assert_eq!(
        ecx >> 24 & 1,
        0,
        "what the local APIC lacks is not promised"
    );
}

#[test]
fn features_that_no_rule_names_pass_through() {
    let entries = compose(&intel(), &guest(1));
    let seven = find(&entries, 7, 0);
    assert_eq!(seven.ecx >> 3 & 1, 1, "PKU");
    assert_eq!(seven.ebx >> 5 & 1, 1, "AVX2");
    assert_eq!(find(&entries, 6, 0).eax, 1 << 2, "ARAT alone");
    let kvm = find(&entries, 0x4000_0001, 0).eax;
    for bit in [0, 3, 5, 6, 24] {
        assert_eq!(
            kvm >> bit & 1,
            1,
            "kvm-clock, steal time, PV EOI: bit {bit}"
        );
    }
}

#[test]
fn a_rule_for_one_sub_leaf_leaves_the_others_alone() {
    let entries = compose(&intel(), &guest(1));
    let one = find(&entries, 7, 1);
    assert_eq!(one.eax, !(1 << 21), "AMX-FP16 goes, AVX-VNNI stays");
    assert_eq!(one.edx, !(1 << 8), "AMX-COMPLEX goes, AVX10 (bit 19) stays");
    assert_eq!(one.ebx, u32::MAX);
    assert_eq!(
        find(&entries, 7, 0).edx >> 19 & 1,
        0,
        "architectural LBR is bit 19 of sub-leaf 0"
    );
}

#[test]
fn guests_get_neither_mpx_nor_amx_nor_their_state() {
    let entries = compose(&intel(), &guest(1));
    assert_eq!(find(&entries, 7, 0).ebx >> 14 & 1, 0);
    assert_eq!(find(&entries, 7, 0).edx >> 24 & 1, 0);
    assert_eq!(find(&entries, 0xd, 0).eax, 0xff & !(1 << 3 | 1 << 4));
    let states = entries.iter().filter(|entry| entry.function == 0xd);
    let states: Vec<u32> = states.map(|entry| entry.index).collect();
    assert_eq!(states, [0, 2], "AVX stays");
}

#[test]
fn only_processors_that_have_it_show_arch_capabilities() {
    let bit = |entries: &[kvm_cpuid_entry2]| find(entries, 7, 0).edx >> 29 & 1;
    assert_eq!(bit(&compose(&intel(), &guest(1))), 1);
    assert_eq!(bit(&compose(&amd(), &guest(1))), 0);
}

#[test]
fn the_time_stamp_counters_frequency_is_told() {
    let entries = compose(&intel(), &guest(1));
    let timing = find(&entries, 0x4000_0010, 0);
    assert_eq!((timing.eax, timing.ebx), (2_600_000, 1_000_000));
    assert_eq!(find(&entries, 0x4000_0000, 0).eax, 0x4000_0010);

    let unknown = Guest {
        tsc_khz: None,
        ..guest(1)
    };
    let entries = compose(&intel(), &unknown);
    assert!(entries.iter().all(|e| e.function != 0x4000_0010));
    assert_eq!(find(&entries, 0x4000_0000, 0).eax, 0x4000_0001);
}

#[test]
fn the_time_stamp_counter_is_no_clock_of_guests_where_it_is_none_of_the_host() {
    let unstable = Guest {
        tsc_is_unstable: true,
        ..guest(1)
    };
    for mut supported in [intel(), amd()] {
        assert!(!policy::has_invariant_tsc(&supported));
        supported.push(entry(0x8000_0007, 0, [0, 0, 0, 1 << 8]));
        assert!(policy::has_invariant_tsc(&supported));
        let edx = |guest: &Guest| find(&compose(&supported, guest), 0x8000_0007, 0).edx;
        assert_eq!(edx(&guest(1)), 1 << 8);
        assert_eq!(edx(&unstable), 0);
    }
}

#[test]
fn an_amd_processor_whose_guests_get_no_automatic_ibrs_is_known_by_the_leaf_of_that_bit() {
    let with = |mut supported: Vec<_>, eax| {
        supported.push(entry(0x8000_0021, 0, [eax, 0, 0, 0]));
        policy::lacks_automatic_ibrs(&supported)
    };
    assert!(policy::lacks_automatic_ibrs(&amd()));
    assert!(with(amd(), !(1 << 8)));
    assert!(!with(amd(), 1 << 8));
    assert!(with(vec![vendor(1, b"HygonGenuine")], 0));
    assert!(!with(intel(), 0));
}

#[test]
fn an_intel_guest_is_one_socket_of_as_many_cores_as_vcpus() {
    let entries = compose(&intel(), &guest(3));
    let one = find(&entries, 1, 0);
    assert_eq!(one.ebx >> 16 & 0xff, 4, "ids, rounded up to a power of two");
    assert_eq!(one.edx >> 28 & 1, 1, "HTT");
    for leaf in [0xb, 0x1f] {
        let (threads, cores) = (find(&entries, leaf, 0), find(&entries, leaf, 1));
        assert_eq!([threads.eax, threads.ebx, threads.ecx], [0, 1, 0x100]);
        assert_eq!([cores.eax, cores.ebx, cores.ecx], [2, 3, 0x201]);
        assert_eq!(find(&entries, leaf, 2).ecx, 2);
    }
    assert_eq!(sharers(find(&entries, 4, 0).eax), 1);
    assert_eq!(sharers(find(&entries, 4, 1).eax), 1);
    assert_eq!(sharers(find(&entries, 4, 2).eax), 4);
    assert_eq!(find(&entries, 4, 0).eax >> 26, 3);
    assert_eq!(find(&entries, 4, 3).eax, 0, "the end of the list stays one");
    assert_eq!(find(&entries, 0x8000_0008, 0).ecx, 0, "AMD's field");
}

#[test]
fn an_amd_guest_is_one_socket_of_as_many_cores_as_vcpus() {
    let entries = compose(&amd(), &guest(6));
    let size = find(&entries, 0x8000_0008, 0).ecx;
    assert_eq!((size & 0xff, size >> 12 & 0xf), (5, 3));
    assert_eq!(find(&entries, 0x8000_0001, 0).ecx >> 1 & 1, 1, "CMP legacy");
    assert_eq!(sharers(find(&entries, 0x8000_001d, 0).eax), 1);
    assert_eq!(sharers(find(&entries, 0x8000_001d, 3).eax), 8);
    assert_eq!(find(&entries, 0xb, 1).ebx, 6);
    assert!(
        entries.iter().all(|e| e.function != 0x1f),
        "beyond its last leaf"
    );
    assert!(entries.iter().all(|e| e.function != 0x8000_0026));
}

#[test]
fn a_single_vcpu_is_no_multiprocessor() {
    let entries = compose(&amd(), &guest(1));
    assert_eq!(find(&entries, 1, 0).edx >> 28 & 1, 0, "HTT");
    assert_eq!(find(&entries, 1, 0).ebx >> 16 & 0xff, 1);
    assert_eq!(find(&entries, 0x8000_0001, 0).ecx >> 1 & 1, 0);
}

#[test]
fn each_vcpu_finds_its_own_number() {
    for supported in [intel(), amd()] {
        let base = CpuId::from_entries(&compose(&supported, &guest(254))).unwrap();
        for id in [0, 1, 127, 253] {
            let cpuid = for_vcpu(&base, id);
            let entries = cpuid.as_slice();
            assert_eq!(find(entries, 1, 0).ebx >> 24, u32::from(id));
            assert_eq!(find(entries, 0xb, 0).edx, u32::from(id));
            assert_eq!(find(entries, 0xb, 1).edx, u32::from(id));
        }
    }
    let base = CpuId::from_entries(&compose(&amd(), &guest(8))).unwrap();
    let entries = for_vcpu(&base, 5);
    let own = find(entries.as_slice(), 0x8000_001e, 0);
    assert_eq!([own.eax, own.ebx, own.ecx], [5, 5, 0]);
}

#[test]
fn physical_addresses_have_as_many_bits_as_the_processor_tells() {
    let bits = |entries: &[kvm_cpuid_entry2]| physical_bits(&CpuId::from_entries(entries).unwrap());
    assert_eq!(bits(&intel()), 39);
    assert_eq!(bits(&amd()), 48);
    assert_eq!(bits(&[]), 36);
    assert_eq!(bits(&[entry(0x8000_0008, 0, [0x3000, 0, 0, 0])]), 36);
}

#[test]
fn the_processors_name_is_the_hosts_unless_kvm_gives_one() {
    let mut supported = amd();
    supported.extend([entry(0x8000_0002, 0, [0; 4]), entry(0x8000_0003, 0, [7; 4])]);
    let entries = compose(&supported, &guest(1));
    assert_eq!(find(&entries, 0x8000_0002, 0).ecx, 0x8000_0002);
    assert_eq!(find(&entries, 0x8000_0003, 0).ecx, 7);
    assert!(
        entries.iter().all(|e| e.function != 0x8000_0004),
        "not offered, not made up"
    );
}

#[test]
fn counts_at_the_limit_fit_their_fields() {
    let entries = compose(&intel(), &guest(254));
    assert_eq!(find(&entries, 1, 0).ebx >> 16 & 0xff, 0xff);
    assert_eq!(find(&entries, 4, 0).eax >> 26, 0x3f);
    assert_eq!(sharers(find(&entries, 4, 2).eax), 256);
    assert_eq!(find(&entries, 4, 2).eax & 0x3fff, cache(3)[0] & 0x3fff);
}

#[test]
fn every_rule_gives_its_reason_and_no_two_fight() {
    for (i, a) in policy::RULES.iter().enumerate() {
        assert!(!a.why.is_empty());
        for b in &policy::RULES[i + 1..] {
            let same_place = a.leaf == b.leaf && a.register == b.register;
            let touched = |c| match c {
                policy::Change::Clear(bits) | policy::Change::Set(bits) => bits,
                policy::Change::Keep(bits) => !bits,
            };
            let both = touched(a.change) & touched(b.change);
            assert!(
                !same_place || both == 0,
                "leaf {:#x}: {} / {}",
                a.leaf,
                a.why,
                b.why
            );
        }
    }
}
