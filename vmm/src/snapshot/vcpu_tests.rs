//! The state of vCPUs, gathered from one and set in another, on the KVM that is there.

use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::{Cap, Kvm, VmFd};

use super::*;

const FIRST: CounterSetup = CounterSetup {
    can_scale: true,
    is_first: true,
};

fn machine(kvm: &Kvm) -> (VmFd, [VcpuFd; 2]) {
    let vm = kvm.create_vm().unwrap();
    vm.create_irq_chip().unwrap();
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    let vcpus = [0, 1].map(|id| {
        let vcpu = vm.create_vcpu(id).unwrap();
        vcpu.set_cpuid2(&cpuid).unwrap();
        vcpu
    });
    (vm, vcpus)
}

fn time(vcpu: &VcpuFd) -> u64 {
    read_msrs(vcpu, &[MSR_TSC]).unwrap()[0].1
}

#[test]
fn a_vcpu_that_has_other_capabilities_is_told_apart() {
    let kvm = kvm::open().unwrap();
    let (_vm, [one, other]) = machine(&kvm);
    let mut saved = VcpuState::gather(&one, &msr_numbers(&kvm).unwrap()).unwrap();
    assert!(saved.has_capabilities_of(&other).unwrap());
    saved.msrs.retain(|msr| msr.0 != MSR_ARCH_CAPABILITIES);
    saved.msrs.push((MSR_ARCH_CAPABILITIES, 1 << 63));
    assert!(!saved.has_capabilities_of(&other).unwrap());
}

#[test]
fn an_msr_that_is_missing_here_matters_only_if_the_guest_has_used_it() {
    /// No processor has it.
    const MISSING: u32 = 0x7fff_0000;
    let kvm = kvm::open().unwrap();
    let (_vm, [one, other]) = machine(&kvm);
    let mut saved = VcpuState::gather(&one, &msr_numbers(&kvm).unwrap()).unwrap();
    saved.msrs.push((MISSING, 0));
    saved.set_msrs(&other, CounterWrites::Another).unwrap();
    saved.msrs.push((MISSING, 1));
    let error = saved.set_msrs(&other, CounterWrites::Another).unwrap_err();
    assert!(
        matches!(
            error,
            SnapshotError::Msr {
                number: MISSING,
                value: 1
            }
        ),
        "{error}"
    );
}

#[test]
fn msrs_of_what_no_guest_has_are_neither_saved_nor_set() {
    const PERF_CAPABILITIES: u32 = 0x345;
    const HYPERV_TIME: u32 = 0x4000_0020;
    let kvm = kvm::open().unwrap();
    let (_vm, [one, other]) = machine(&kvm);
    let numbers = msr_numbers(&kvm).unwrap();
    assert!(!numbers.contains(&PERF_CAPABILITIES) && !numbers.contains(&HYPERV_TIME));
    let mut saved = VcpuState::gather(&one, &numbers).unwrap();
    saved.msrs.push((PERF_CAPABILITIES, u64::MAX));
    saved.msrs.push((HYPERV_TIME, 5));
    saved.set_msrs(&other, CounterWrites::Another).unwrap();
}

/// As on Linux 6.13, where a vCPU whose CPUID lacks them has none.
#[test]
fn capabilities_that_no_guest_of_this_host_has_are_not_set() {
    let kvm = kvm::open().unwrap();
    let (_vm, [one, other]) = machine(&kvm);
    let capabilities = |data| {
        let index = MSR_ARCH_CAPABILITIES;
        let entry = kvm_msr_entry {
            index,
            data,
            ..Default::default()
        };
        Msrs::from_entries(&[entry]).unwrap()
    };
    assert_eq!(other.set_msrs(&capabilities(0)).unwrap(), 1);
    let mut saved = VcpuState::gather(&one, &[]).unwrap();
    saved.msrs = vec![(MSR_ARCH_CAPABILITIES, 1 << 6)];
    saved.set_msrs(&other, CounterWrites::Another).unwrap();
    let here = read_msrs(&other, &[MSR_ARCH_CAPABILITIES]).unwrap();
    assert_eq!(here, [(MSR_ARCH_CAPABILITIES, 0)]);
}

#[test]
fn a_processor_without_xsave_has_no_xcr_to_set() {
    let kvm = kvm::open().unwrap();
    let (_vm, [one, other]) = machine(&kvm);
    let mut saved = VcpuState::gather(&one, &msr_numbers(&kvm).unwrap()).unwrap();
    // KVM refuses these, if it is asked.
    saved.xcrs.flags = 1;
    assert!(other.set_xcrs(&saved.xcrs).is_err());
    saved.xcrs.nr_xcrs = 0;
    saved.apply(&other, FIRST, &mut None).unwrap();
}

#[test]
fn a_counter_of_another_frequency_needs_a_processor_that_scales_it() {
    let kvm = kvm::open().unwrap();
    let (_vm, [one, other]) = machine(&kvm);
    let mut saved = VcpuState::gather(&one, &msr_numbers(&kvm).unwrap()).unwrap();
    let here = saved.tsc_khz;
    let counter = CounterSetup {
        can_scale: false,
        ..FIRST
    };
    // The higher one KVM itself would take.
    for khz in [here / 2, here * 2] {
        saved.tsc_khz = khz;
        let error = saved.apply(&other, counter, &mut None).unwrap_err();
        assert!(
            matches!(error, SnapshotError::TscFrequency { .. }),
            "{error}"
        );
    }
    saved.tsc_khz = here + here / 10_000;
    saved.apply(&other, counter, &mut None).unwrap();
}

/// By its name it runs where KVM is a distribution's, which is older than the one here.
#[test]
fn guest_clocks_are_set_without_offsets_to_what_is_near_a_new_machines() {
    let kvm = kvm::open().unwrap();
    let (_vm, [one, _]) = machine(&kvm);
    let mut saved = VcpuState::gather(&one, &msr_numbers(&kvm).unwrap()).unwrap();
    let second = u64::from(saved.tsc_khz) * 1000;
    let (_vm, [first, another]) = machine(&kvm);
    let wanted = time(&first) + second / 2;
    saved.msrs.retain(|msr| msr.0 != MSR_TSC);
    saved.msrs.push((MSR_TSC, wanted));
    saved.set_msrs(&first, CounterWrites::First).unwrap();
    saved.set_msrs(&another, CounterWrites::Another).unwrap();
    for vcpu in [&first, &another] {
        assert!(time(vcpu) >= wanted);
    }
    assert!(time(&first).abs_diff(time(&another)) < second);
}

#[test]
fn a_new_vcpus_counter_runs_as_the_hosts_does() {
    let kvm = kvm::open().unwrap();
    let (_vm, [vcpu, _]) = machine(&kvm);
    kvm::count_as_the_host(&vcpu);
    let begin = time(&vcpu);
    std::thread::sleep(std::time::Duration::from_millis(1));
    assert!(time(&vcpu) > begin);
}

/// By its name it runs where KVM has offsets. Without a processor that scales the counter, KVM
/// refuses less than the host's frequency, and so there is no machine to add a vCPU to.
#[test]
fn guest_clocks_of_vcpus_that_come_later_agree_with_scaled_ones() {
    let kvm = kvm::open().unwrap();
    let numbers = msr_numbers(&kvm).unwrap();
    let (_vm, vcpus) = machine(&kvm);
    let here = vcpus[0].get_tsc_khz().unwrap();
    let counter = CounterSetup {
        can_scale: kvm.check_extension(Cap::TscControl),
        is_first: true,
    };
    for khz in [here, here / 2, here * 2] {
        let mut saved = VcpuState::gather(&vcpus[0], &numbers).unwrap();
        // An hour of uptime.
        saved.tsc_khz = khz;
        saved.msrs.retain(|msr| msr.0 != MSR_TSC);
        saved.msrs.push((MSR_TSC, u64::from(khz) * 3_600_000));
        let clone = kvm.create_vm().unwrap();
        clone.create_irq_chip().unwrap();
        let first = clone.create_vcpu(0).unwrap();
        first
            .set_cpuid2(&vcpus[0].get_cpuid2(KVM_MAX_CPUID_ENTRIES).unwrap())
            .unwrap();
        let mut offset = None;
        match saved.apply(&first, counter, &mut offset) {
            Err(SnapshotError::TscFrequency { .. }) if khz != here => {
                if khz < here {
                    let late = clone.create_vcpu(1).unwrap();
                    kvm::count_as_the_others(&late, khz, offset).unwrap_err();
                }
                eprintln!("KVM refuses a time stamp counter of {khz} kHz on one of {here} kHz");
                continue;
            }
            applied => applied.unwrap(),
        }
        let late = clone.create_vcpu(1).unwrap();
        kvm::count_as_the_others(&late, khz, offset).unwrap();
        assert_eq!(late.get_tsc_khz().unwrap(), khz);
        let offsets = [&first, &late].map(|vcpu| kvm::tsc_offset(vcpu).unwrap());
        assert_eq!(offsets[0], offsets[1], "{khz} kHz");
        let (before, now, after) = (time(&first), time(&late), time(&first));
        assert!(
            before <= now && now <= after,
            "{khz} kHz: {before} {now} {after}"
        );
    }
}

/// By its name it runs where KVM is a distribution's, which is older than the one here.
#[test]
fn guest_clocks_go_on_from_where_they_were_saved_and_agree() {
    let kvm = kvm::open().unwrap();
    let numbers = msr_numbers(&kvm).unwrap();
    let (_vm, vcpus) = machine(&kvm);
    let second = u64::from(vcpus[0].get_tsc_khz().unwrap()) * 1000;
    while time(&vcpus[0]) < second / 2 {
        std::hint::spin_loop();
    }
    let saved = vcpus.map(|vcpu| VcpuState::gather(&vcpu, &numbers).unwrap());
    let before = saved[0].msrs.iter().find(|msr| msr.0 == MSR_TSC).unwrap().1;

    let (_vm, vcpus) = machine(&kvm);
    let mut offset = None;
    for (vcpu, saved) in vcpus.iter().zip(&saved) {
        saved.apply(vcpu, FIRST, &mut offset).unwrap();
    }
    for vcpu in &vcpus {
        let now = time(vcpu);
        assert!(
            now >= before && now - before < 10 * second,
            "{before} {now}"
        );
        assert_eq!(kvm::tsc_offset(vcpu).unwrap(), offset);
    }
}

#[test]
fn time_that_passes_moves_the_counter_on_at_its_frequency() {
    let kvm = kvm::open().unwrap();
    let (_vm, [one, _]) = machine(&kvm);
    let mut saved = VcpuState::gather(&one, &msr_numbers(&kvm).unwrap()).unwrap();
    let counter = |state: &VcpuState| {
        let mut msrs = state.msrs.iter();
        msrs.find(|(number, _)| *number == MSR_TSC).unwrap().1
    };
    let before = counter(&saved);
    saved.tsc_khz = 2_000_000;
    saved.advance(std::time::Duration::from_micros(5));
    assert_eq!(counter(&saved).wrapping_sub(before), 10_000);
}
