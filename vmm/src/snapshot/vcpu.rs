//! The state of a vCPU: gathered by its thread while it is parked, and applied to a new one.
#![allow(unsafe_code)] // KVM_SET_XSAVE reads as much as KVM says

use std::ops::RangeInclusive;
use std::time::Duration;

use kvm_bindings::{
    Msrs, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs,
    kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;

use super::error::SnapshotError;
use super::format::{Reader, Writer};
use crate::kvm::{self, KvmError};

/// The version of the record.
pub(super) const VERSION: u32 = 1;
/// The versions that can be read.
pub(super) const READABLE: RangeInclusive<u32> = 1..=VERSION;

/// The maximum number of MSRs of a vCPU: KVM lists some 200, and none of those of which a processor
/// may have thousands.
const MAX_MSRS: usize = 1024;

const MSR_TSC: u32 = 0x10;
const MSR_TSC_DEADLINE: u32 = 0x6e0;
/// The processor's vulnerabilities and mitigations.
const MSR_ARCH_CAPABILITIES: u32 = 0x10a;
/// Memory types, which are missing from KVM's list of MSRs before Linux 6.6: the default type,
/// fixed ranges, variable ranges.
const MTRRS: [std::ops::RangeInclusive<u32>; 5] = [
    0x2ff..=0x2ff,
    0x250..=0x250,
    0x258..=0x259,
    0x268..=0x26f,
    0x200..=0x20f,
];

/// MSRs of KVM's list that belong to interfaces no guest has, by its CPUID: the performance
/// monitor, VMX, and Hyper-V's. KVM gives some of them values all the same, which differ between
/// processors and kernels, and which another one refuses.
const HIDDEN: [std::ops::RangeInclusive<u32>; 14] = [
    // Intel's counters, their selectors, fixed counters, PERF_CAPABILITIES, controls, PEBS.
    0xc1..=0xc8,
    0x186..=0x18d,
    0x309..=0x30c,
    0x329..=0x329,
    0x345..=0x345,
    0x38d..=0x390,
    0x3f1..=0x3f2,
    0x480..=0x493,
    0x4c1..=0x4c8,
    // Branch records.
    0x14ce..=0x14cf,
    0x4000_0000..=0x4000_01ff,
    // AMD's global controls, old counters, new counters.
    0xc000_0300..=0xc000_0303,
    0xc001_0000..=0xc001_0007,
    0xc001_0200..=0xc001_020b,
];

fn is_hidden(number: u32) -> bool {
    HIDDEN.iter().any(|range| range.contains(&number))
}

/// The local APIC's timer register, and its mode that fires at a time stamp.
const LVT_TIMER: usize = 0x320;
const LVT_MODE: u32 = 3 << 17;
const LVT_MODE_DEADLINE: u32 = 2 << 17;

/// All state that a vCPU needs to continue where it was.
#[derive(Clone, Debug)]
pub(crate) struct VcpuState {
    tsc_khz: u32,
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xcrs: kvm_xcrs,
    /// `struct kvm_xsave` of 4 KiB.
    xsave: Box<[u32; 1024]>,
    debug_regs: kvm_debugregs,
    lapic: Box<kvm_lapic_state>,
    /// Number and value.
    msrs: Vec<(u32, u64)>,
    events: kvm_vcpu_events,
}

/// Returns the MSRs that a vCPU may have: those of KVM's list without hidden ones, and those
/// missing from it.
pub(crate) fn msr_numbers(kvm: &kvm_ioctls::Kvm) -> Result<Vec<u32>, KvmError> {
    let list = kvm
        .get_msr_index_list()
        .map_err(KvmError::ioctl("KVM_GET_MSR_INDEX_LIST"))?;
    let mut numbers = list.as_slice().to_vec();
    numbers.retain(|number| !is_hidden(*number));
    numbers.extend(MTRRS.into_iter().flatten());
    numbers.sort_unstable();
    numbers.dedup();
    Ok(numbers)
}

/// How a vCPU's time stamp counter is set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CounterSetup {
    /// The processor scales counters (`KVM_CAP_TSC_CONTROL`).
    pub(crate) can_scale: bool,
    /// No vCPU of the machine has been set before.
    pub(crate) is_first: bool,
}

/// Which time stamp counter is set by its MSR, for lack of offsets (Linux before 5.16).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CounterWrites {
    None,
    First,
    Another,
}

impl VcpuState {
    /// Reads everything of a vCPU whose thread is not in `KVM_RUN`, and whose last exit has been
    /// completed.
    pub(crate) fn gather(vcpu: &VcpuFd, msr_numbers: &[u32]) -> Result<Self, KvmError> {
        let get = KvmError::ioctl;
        // KVM processes a pending INIT or SIPI here, which changes the state read below.
        let mp_state = vcpu.get_mp_state().map_err(get("KVM_GET_MP_STATE"))?;
        // It stores the payload of a pending exception in CR2 or DR6, which are read next.
        vcpu.get_vcpu_events().map_err(get("KVM_GET_VCPU_EVENTS"))?;
        let mut state = Self {
            tsc_khz: vcpu.get_tsc_khz().unwrap_or(0),
            mp_state,
            regs: vcpu.get_regs().map_err(get("KVM_GET_REGS"))?,
            sregs: vcpu.get_sregs().map_err(get("KVM_GET_SREGS"))?,
            xcrs: vcpu.get_xcrs().map_err(get("KVM_GET_XCRS"))?,
            // 4 KiB: guests are not offered states that take more (AMX).
            xsave: Box::new(vcpu.get_xsave().map_err(get("KVM_GET_XSAVE"))?.region),
            debug_regs: vcpu.get_debug_regs().map_err(get("KVM_GET_DEBUGREGS"))?,
            lapic: Box::new(vcpu.get_lapic().map_err(get("KVM_GET_LAPIC"))?),
            msrs: read_msrs(vcpu, msr_numbers)?,
            // Last: the calls above may queue or deliver events.
            events: vcpu.get_vcpu_events().map_err(get("KVM_GET_VCPU_EVENTS"))?,
        };
        state.mend_deadline();
        Ok(state)
    }

    /// Returns whether `vcpu`, which is new, has the `IA32_ARCH_CAPABILITIES` that this one had.
    pub(crate) fn has_capabilities_of(&self, vcpu: &VcpuFd) -> Result<bool, KvmError> {
        let wanted = |msr: &&(u32, u64)| msr.0 == MSR_ARCH_CAPABILITIES;
        let Some(saved) = self.msrs.iter().find(wanted) else {
            // KVM did not list it.
            return Ok(true);
        };
        let here = read_msrs(vcpu, &[MSR_ARCH_CAPABILITIES])?;
        Ok(here.first() == Some(saved))
    }

    /// A timer that has fired, but whose interrupt KVM has not delivered yet, may read as one that
    /// is not set. One interrupt too many is harmless, one too few hangs a guest.
    fn mend_deadline(&mut self) {
        let timer: Vec<u8> = self
            .lapic
            .regs
            .iter()
            .skip(LVT_TIMER)
            .take(4)
            .map(|byte| *byte as u8)
            .collect();
        let timer = <[u8; 4]>::try_from(timer).map_or(0, u32::from_le_bytes);
        if timer & LVT_MODE != LVT_MODE_DEADLINE {
            return;
        }
        let value = |wanted| {
            let found = self.msrs.iter().find(|(number, _)| *number == wanted);
            found.map_or(0, |(_, value)| *value)
        };
        let now = value(MSR_TSC);
        for (number, value) in &mut self.msrs {
            if *number == MSR_TSC_DEADLINE && *value == 0 {
                *value = now;
            }
        }
    }

    /// Sets all state of a vCPU that was just created and has its CPUID. `offset` is that of the
    /// machine's time stamp counters, which the first vCPU sets for all.
    pub(crate) fn apply(
        &self,
        vcpu: &VcpuFd,
        counter: CounterSetup,
        offset: &mut Option<u64>,
    ) -> Result<(), SnapshotError> {
        let set = KvmError::ioctl;
        self.set_frequency(vcpu, counter.can_scale)?;
        vcpu.set_mp_state(self.mp_state)
            .map_err(set("KVM_SET_MP_STATE"))?;
        vcpu.set_regs(&self.regs).map_err(set("KVM_SET_REGS"))?;
        vcpu.set_sregs(&self.sregs).map_err(set("KVM_SET_SREGS"))?;
        let xsave = kvm_xsave {
            region: *self.xsave,
            ..Default::default()
        };
        // SAFETY: KVM reads as many bytes as KVM_CAP_XSAVE2 says. That is more than the 4 KiB of
        // this structure only if the process has requested AMX (arch_prctl), which nothing here
        // does.
        unsafe { vcpu.set_xsave(&xsave) }.map_err(set("KVM_SET_XSAVE"))?;
        // None on a processor without XSAVE, where KVM refuses the call.
        if self.xcrs.nr_xcrs > 0 {
            vcpu.set_xcrs(&self.xcrs).map_err(set("KVM_SET_XCRS"))?;
        }
        vcpu.set_debug_regs(&self.debug_regs)
            .map_err(set("KVM_SET_DEBUGREGS"))?;
        // After the APIC's base, which is one of the special registers, and before its deadline.
        vcpu.set_lapic(&self.lapic).map_err(set("KVM_SET_LAPIC"))?;
        let has_time = self.set_time(vcpu, offset)?;
        let counts = match (has_time, counter.is_first) {
            (true, _) => CounterWrites::None,
            (false, true) => CounterWrites::First,
            (false, false) => CounterWrites::Another,
        };
        self.set_msrs(vcpu, counts)?;
        vcpu.set_vcpu_events(&self.events)
            .map_err(set("KVM_SET_VCPU_EVENTS"))?;
        // Tells kvm-clock that the guest did not run, or its watchdogs fire. It is an error for
        // guests that do not use kvm-clock.
        let _ = vcpu.kvmclock_ctrl();
        Ok(())
    }

    /// Makes the guest's time stamp counter run at the frequency that the guest knows.
    fn set_frequency(&self, vcpu: &VcpuFd, can_scale: bool) -> Result<(), SnapshotError> {
        let here = vcpu.get_tsc_khz().unwrap_or(0);
        // KVM's own tolerance: 250 parts per million.
        let near = u64::from(here.abs_diff(self.tsc_khz)) * 4000 <= u64::from(here);
        if self.tsc_khz == 0 || near {
            return Ok(());
        }
        let refused = SnapshotError::TscFrequency {
            saved: self.tsc_khz,
            here,
        };
        // Without scaling, KVM takes a higher frequency, too: it then moves the counter ahead each
        // time the guest is entered, and vCPUs disagree.
        if !can_scale {
            return Err(refused);
        }
        vcpu.set_tsc_khz(self.tsc_khz).map_err(|_| refused)
    }

    /// Makes the time stamp counter continue from where it was; false if KVM does not support
    /// offsets.
    fn set_time(&self, vcpu: &VcpuFd, offset: &mut Option<u64>) -> Result<bool, SnapshotError> {
        let Some(here) = kvm::tsc_offset(vcpu)? else {
            return Ok(false);
        };
        let tsc = |msrs: &[(u32, u64)]| {
            let found = msrs.iter().find(|(number, _)| *number == MSR_TSC);
            found.map(|(_, value)| *value)
        };
        let (Some(saved), Some(now)) = (tsc(&self.msrs), tsc(&read_msrs(vcpu, &[MSR_TSC])?)) else {
            return Ok(false);
        };
        let own = here.wrapping_add(saved).wrapping_sub(now);
        // vCPUs were not saved at the same instant: counters less than a second apart, which is
        // KVM's limit, were synchronized, and are set to agree to the cycle.
        let second = u64::from(self.tsc_khz) * 1000;
        let agreed = offset.filter(|first| {
            let apart = own.wrapping_sub(*first);
            apart.min(apart.wrapping_neg()) < second
        });
        let wanted = agreed.unwrap_or(own);
        kvm::set_tsc_offset(vcpu, wanted)?;
        offset.get_or_insert(wanted);
        Ok(true)
    }

    /// Sets the MSRs that differ from a new vCPU's; the time stamp counter only if it is not set
    /// yet, and none of the hidden ones, which older snapshots have. An MSR that was 0 and that
    /// this host lacks belongs to a feature that the guest does not have, or has not used.
    fn set_msrs(&self, vcpu: &VcpuFd, counts: CounterWrites) -> Result<(), SnapshotError> {
        let numbers: Vec<u32> = self.msrs.iter().map(|(number, _)| *number).collect();
        let fresh = read_msrs(vcpu, &numbers)?;
        let mut wanted: Vec<kvm_msr_entry> = self
            .msrs
            .iter()
            .filter(|msr| match msr.0 {
                MSR_TSC => counts != CounterWrites::None,
                number if is_hidden(number) => false,
                _ => match fresh.iter().find(|here| here.0 == msr.0) {
                    // Of a guest that does not have it: before Linux 6.13 it reads as KVM's own all
                    // the same, and since then takes nothing but 0.
                    Some(here) if msr.0 == MSR_ARCH_CAPABILITIES && here.1 == 0 => false,
                    Some(here) => here.1 != msr.1,
                    None => msr.1 != 0,
                },
            })
            .map(|(index, data)| kvm_msr_entry {
                index: *index,
                data: *data,
                ..Default::default()
            })
            .collect();
        // KVM takes a value near a counter's own for an attempt to synchronize it, and changes
        // nothing. The counters of a new machine are at 0, and may have to be near it.
        let first = wanted.iter().find(|msr| msr.index == MSR_TSC).copied();
        if let Some(first) = first.filter(|_| counts == CounterWrites::First) {
            let away = 4 * 1000 * u64::from(self.tsc_khz);
            let data = first.data.wrapping_add(away);
            wanted.insert(0, kvm_msr_entry { data, ..first });
        }
        // The time stamp counter first, since others depend on it; a deadline last, when its clock
        // is right.
        wanted.sort_by_key(|msr| match msr.index {
            MSR_TSC => 0,
            MSR_TSC_DEADLINE => 2,
            _ => 1,
        });
        let ioctl = KvmError::ioctl;
        let entries = Msrs::from_entries(&wanted)
            .map_err(|_| ioctl("KVM_SET_MSRS")(kvm_ioctls::Error::new(libc::E2BIG)))?;
        let set = vcpu.set_msrs(&entries).map_err(ioctl("KVM_SET_MSRS"))?;
        match wanted.get(set) {
            // KVM stops at the first one that it rejects.
            Some(refused) => Err(SnapshotError::Msr {
                number: refused.index,
                value: refused.data,
            }),
            None => Ok(()),
        }
    }

    /// Moves the time stamp counter on.
    pub(super) fn advance(&mut self, time: Duration) {
        let ticks = time.as_nanos() * u128::from(self.tsc_khz) / 1_000_000;
        for (number, value) in &mut self.msrs {
            if *number == MSR_TSC {
                *value = value.wrapping_add(ticks as u64);
            }
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.u32(self.tsc_khz);
        out.u32(u32::try_from(self.msrs.len()).unwrap_or(u32::MAX));
        for (number, value) in &self.msrs {
            out.u32(*number);
            out.u64(*value);
        }
        out.abi(&self.mp_state);
        out.abi(&self.regs);
        out.abi(&self.sregs);
        out.abi(&self.xcrs);
        out.abi(&*self.xsave);
        out.abi(&self.debug_regs);
        out.abi(&*self.lapic);
        out.abi(&self.events);
        out.finish()
    }

    pub(super) fn decode(input: &mut Reader<'_>) -> Result<Self, &'static str> {
        let tsc_khz = input.u32()?;
        let msrs = input.short_list(MAX_MSRS, |msr| Ok((msr.u32()?, msr.u64()?)))?;
        let mut numbers: Vec<u32> = msrs.iter().map(|(number, _)| *number).collect();
        numbers.sort_unstable();
        if !numbers.is_sorted_by(|one, next| one < next) {
            return Err("an MSR that is there twice");
        }
        Ok(Self {
            tsc_khz,
            msrs,
            mp_state: input.abi()?,
            regs: input.abi()?,
            sregs: input.abi()?,
            xcrs: input.abi()?,
            xsave: Box::new(input.abi()?),
            debug_regs: input.abi()?,
            lapic: Box::new(input.abi()?),
            events: input.abi()?,
        })
    }
}

/// Returns the values of those MSRs that this vCPU has.
fn read_msrs(vcpu: &VcpuFd, numbers: &[u32]) -> Result<Vec<(u32, u64)>, KvmError> {
    let ioctl = KvmError::ioctl;
    let mut values = Vec::with_capacity(numbers.len());
    let mut rest = numbers;
    while !rest.is_empty() {
        let batch = rest.len().min(kvm_bindings::KVM_MAX_MSR_ENTRIES);
        let entries: Vec<_> = rest[..batch]
            .iter()
            .map(|index| kvm_msr_entry {
                index: *index,
                ..Default::default()
            })
            .collect();
        let mut msrs = Msrs::from_entries(&entries)
            .map_err(|_| ioctl("KVM_GET_MSRS")(kvm_ioctls::Error::new(libc::E2BIG)))?;
        let read = vcpu.get_msrs(&mut msrs).map_err(ioctl("KVM_GET_MSRS"))?;
        values.extend(
            msrs.as_slice()
                .iter()
                .take(read)
                .map(|msr| (msr.index, msr.data)),
        );
        // KVM stops at the first one that this vCPU does not have.
        rest = &rest[(read + usize::from(read < batch)).min(rest.len())..];
    }
    Ok(values)
}

#[cfg(test)]
#[path = "vcpu_tests.rs"]
mod tests;
