//! The system and VM side of KVM: opening `/dev/kvm`, and creating a VM with its interrupt
//! controllers.
//!
//! Errors name the ioctl. Nothing here knows memory, devices or vCPU threads.

mod device;
mod signal_mask;
mod tsc_offset;

use std::io;

use kvm_bindings::{
    KVM_CAP_MAX_VCPU_ID, KVM_CAP_PMU_CAPABILITY, KVM_CAP_X86_NOTIFY_VMEXIT, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KVM_PMU_CAP_DISABLE, KVM_X86_NOTIFY_VMEXIT_ENABLED, kvm_enable_cap,
    kvm_irqchip,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};

pub use device::KvmDevice;
pub(crate) use signal_mask::set_signal_mask;
pub(crate) use tsc_offset::{set_tsc_offset, tsc_offset};

use crate::boot::MAX_CPUS;
use crate::layout;

/// A failure of KVM.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvmError {
    /// `/dev/kvm` could not be opened.
    #[error("failed to open /dev/kvm")]
    Open(#[source] io::Error),
    /// A capability is missing.
    #[error("this host's KVM lacks {name}")]
    MissingCapability {
        /// The capability's name in the kernel's documentation.
        name: &'static str,
    },
    /// An ioctl failed.
    #[error("KVM refused {ioctl}")]
    Ioctl {
        /// The ioctl's name.
        ioctl: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

impl KvmError {
    /// For `map_err` on an ioctl.
    pub(crate) fn ioctl(ioctl: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |error| Self::Ioctl {
            ioctl,
            source: error.into(),
        }
    }
}

/// Opens `/dev/kvm` and checks that it has what every VM here uses.
pub(crate) fn open() -> Result<Kvm, KvmError> {
    check(Kvm::new().map_err(|error| KvmError::Open(error.into()))?)
}

/// Checks that it has what every VM here uses.
fn check(kvm: Kvm) -> Result<Kvm, KvmError> {
    let needed = [
        (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
        (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
        (Cap::SignalMsi, "KVM_CAP_SIGNAL_MSI"),
        (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
        (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
        (Cap::SetIdentityMapAddr, "KVM_CAP_SET_IDENTITY_MAP_ADDR"),
        (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
        (Cap::MpState, "KVM_CAP_MP_STATE"),
    ];
    match needed
        .into_iter()
        .find(|(cap, _)| !kvm.check_extension(*cap))
    {
        Some((_, name)) => Err(KvmError::MissingCapability { name }),
        None => Ok(kvm),
    }
}

/// Makes the time stamp counter of a new vCPU run at the host's frequency, as it should by default.
///
/// If the kernel measures the host's frequency again after KVM was loaded and the result differs by
/// more than 250 parts per million, KVM treats a new vCPU as one that wants the old frequency. On a
/// processor that cannot scale the counter, KVM then always reads it as 0 (seen with Linux 6.1): a
/// guest's first timer interrupt, and with it all of its ticks, is late by the host's uptime.
pub(crate) fn count_as_the_host(vcpu: &VcpuFd) {
    // 0 is the host's own frequency. If KVM refuses, the counter stays as it was created.
    let _ = vcpu.set_tsc_khz(0);
}

/// Makes the time stamp counter of a new vCPU run at the frequency of its machine's others, and
/// agree with them: KVM gives a new vCPU their counter only if it runs at the host's frequency, and
/// otherwise lets it start at 0. `offset` is that of the others, if it is known.
pub(crate) fn count_as_the_others(
    vcpu: &VcpuFd,
    khz: u32,
    offset: Option<u64>,
) -> Result<(), KvmError> {
    if vcpu.get_tsc_khz().is_ok_and(|here| here == khz) {
        return Ok(());
    }
    vcpu.set_tsc_khz(khz)
        .map_err(KvmError::ioctl("KVM_SET_TSC_KHZ"))?;
    offset.map_or(Ok(()), |offset| set_tsc_offset(vcpu, offset))
}

/// Returns the maximum number of vCPUs of one VM: the limit of the host's KVM and of an MP table.
pub(crate) fn max_vcpus(kvm: &Kvm) -> u8 {
    u8::try_from(kvm.get_max_vcpus())
        .unwrap_or(u8::MAX)
        .min(MAX_CPUS)
}

/// Creates a VM without memory.
pub(crate) fn create_vm(kvm: &Kvm) -> Result<VmFd, KvmError> {
    loop {
        match kvm.create_vm() {
            // The kernel's allocations here are interruptible.
            Err(error) if error.errno() == libc::EINTR => {}
            other => return other.map_err(KvmError::ioctl("KVM_CREATE_VM")),
        }
    }
}

/// Creates a VM's in-kernel interrupt controllers. There is no PIT: a guest's timers are those of
/// its local APICs, whose frequency it knows, and to stop a PIT's reinjection of ticks (for which
/// KVM watches each end of interrupt) a VM would wait for all of KVM's readers.
pub(crate) fn create_chips(vm: &VmFd) -> Result<(), KvmError> {
    vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
        .map_err(KvmError::ioctl("KVM_SET_IDENTITY_MAP_ADDR"))?;
    let tss = usize::try_from(layout::KVM_TSS).unwrap_or(usize::MAX);
    vm.set_tss_address(tss)
        .map_err(KvmError::ioctl("KVM_SET_TSS_ADDR"))?;
    vm.create_irq_chip()
        .map_err(KvmError::ioctl("KVM_CREATE_IRQCHIP"))?;
    mask_pics(vm)?;
    disable_pmu(vm);
    notice_hangs(vm);
    Ok(())
}

/// Masks all lines of both 8259s, as firmware leaves them. KVM's come out of reset with all lines
/// open, and pass a device's interrupt on as ExtINT to a guest that does not know them: Linux 4.1
/// to 5.3 does not mask them if ACPI says that the hardware is reduced. A guest that uses them
/// initialises them, which opens the lines.
fn mask_pics(vm: &VmFd) -> Result<(), KvmError> {
    for chip_id in [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE] {
        let mut chip = kvm_irqchip {
            chip_id,
            ..Default::default()
        };
        vm.get_irqchip(&mut chip)
            .map_err(KvmError::ioctl("KVM_GET_IRQCHIP"))?;
        chip.chip.pic.imr = 0xff;
        vm.set_irqchip(&chip)
            .map_err(KvmError::ioctl("KVM_SET_IRQCHIP"))?;
    }
    Ok(())
}

/// Saves the host the emulation of performance counters, which the guest's CPUID does not show
/// anyway. It must be called before the first vCPU is created; kernels before 5.18 do not support
/// it.
fn disable_pmu(vm: &VmFd) {
    enable(
        vm,
        "KVM_CAP_PMU_CAPABILITY",
        KVM_CAP_PMU_CAPABILITY,
        u64::from(KVM_PMU_CAP_DISABLE),
    );
}

/// Ends what a guest does to keep a processor from all interrupts, such as an endless nesting of
/// exceptions, which would otherwise hang one of the host's. Only a guest whose state is lost by
/// that leaves `KVM_RUN`. It must be called before the first vCPU is created; only newer Intel
/// processors and Linux 6.0 support it.
fn notice_hangs(vm: &VmFd) {
    // The window in the upper half: 0 is the shortest that the processor finds safe.
    enable(
        vm,
        "KVM_CAP_X86_NOTIFY_VMEXIT",
        KVM_CAP_X86_NOTIFY_VMEXIT,
        u64::from(KVM_X86_NOTIFY_VMEXIT_ENABLED),
    );
}

/// Tells KVM that the numbers of all vCPUs will be below `max`, so that its tables of vCPUs are no
/// larger than that. It must be called before the first vCPU is created; kernels before 6.0 do not
/// support it.
pub(crate) fn limit_vcpus(vm: &VmFd, max: u8) {
    enable(
        vm,
        "KVM_CAP_MAX_VCPU_ID",
        KVM_CAP_MAX_VCPU_ID,
        u64::from(max),
    );
}

/// Enables a capability of a VM that works without.
fn enable(vm: &VmFd, name: &'static str, cap: u32, argument: u64) {
    let wanted = kvm_enable_cap {
        cap,
        args: [argument, 0, 0, 0],
        ..Default::default()
    };
    if let Err(error) = vm.enable_cap(&wanted) {
        tracing::debug!(%error, name, "a capability is not supported");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_8259s_pass_on_nothing_until_a_guest_initialises_them() {
        let vm = create_vm(&open().unwrap()).unwrap();
        create_chips(&vm).unwrap();
        for chip_id in [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE] {
            let mut chip = kvm_irqchip {
                chip_id,
                ..Default::default()
            };
            vm.get_irqchip(&mut chip).unwrap();
            // SAFETY: this chip's state is the union's member of that name; integers are valid for
            // any bit pattern.
            #[allow(unsafe_code)]
            let pic = unsafe { chip.chip.pic };
            assert_eq!(pic.imr, 0xff);
            assert_ne!(pic.elcr_mask, 0, "the rest is as it was");
        }
    }
}
