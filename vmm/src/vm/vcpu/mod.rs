//! A vCPU and the thread that runs it.
//!
//! `kick.rs` gets a thread out of guest code, `retry.rs` decides how often a `KVM_RUN` that failed
//! is tried again, `spare.rs` keeps a vCPU that has no thread yet.

pub(crate) mod kick;
mod retry;
pub(crate) mod spare;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvm_bindings::{CpuId, KVM_EXIT_NOTIFY, KVM_MP_STATE_UNINITIALIZED};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use podvisor_devices::legacy::power::PowerRequest;

use crate::kvm::{self, KvmError};
use crate::memory::GuestMemory;
use crate::vm::control::{Control, Outcome, Request};
use crate::vm::devices::images::Images;
use crate::vm::exit::{Poison, PoisonCause, Registers, VmExit};
use crate::vm::hardware::bus::Bus;
use crate::vm::hardware::io::Loops;
use crate::vm::hardware::pci::AddressWrites;
use kick::{Kicker, Pending};
use retry::{Refusals, Retry};

/// The state that a vCPU thread shares with the rest of the VM.
#[derive(Clone, Debug)]
pub(crate) struct VcpuContext {
    pub(crate) control: Arc<Control>,
    pub(crate) bus: Arc<Bus>,
    pub(crate) peers: Arc<Kicker>,
    pub(crate) loops: Arc<Loops>,
    pub(crate) counters: Arc<VcpuCounters>,
    /// Writes of the PCI bus's address that KVM collects.
    pub(crate) address_writes: Option<Arc<AddressWrites>>,
    pub(crate) machine: Arc<Machine>,
}

/// The resources that KVM uses for the lifetime of a vCPU. Every thread holds a reference, so that
/// one that does not end in time still finds it when it continues.
pub(crate) struct Machine {
    pub(crate) kvm: Kvm,
    pub(crate) vm_fd: Arc<VmFd>,
    pub(crate) memory: GuestMemory,
    pub(crate) images: Images,
    /// The guest's CPUID, except for the vCPUs' numbers.
    pub(crate) cpuid: CpuId,
    /// The maximum number of vCPUs.
    pub(crate) max_vcpus: u8,
    /// The frequency of their time stamp counters, if KVM reports it.
    pub(crate) tsc_khz: Option<u32>,
    /// The offset of their time stamp counters, if a snapshot set it.
    pub(crate) tsc_offset: Option<u64>,
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine")
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}

/// Exits to user space, of all vCPUs of a VM.
#[derive(Debug, Default)]
pub(crate) struct VcpuCounters {
    pub(crate) mmio: AtomicU64,
    pub(crate) port: AtomicU64,
}

/// The result of a step of a vCPU.
enum Step {
    /// The guest continues.
    Exit,
    /// Guest code was left because of the kick, or was not entered at all.
    Kicked,
    /// The VM ends.
    End(Outcome),
}

/// Runs guest code on this thread, in which the kick signal is blocked, until the VM ends.
pub(crate) fn run(id: u8, mut vcpu: VcpuFd, context: &VcpuContext) {
    // Before the first check of the request: see `Kicker::register`.
    let _kicked = context.peers.register();
    if let Err(KvmError::Ioctl { ioctl, source }) = kvm::set_signal_mask(&vcpu, kick::KICK) {
        let cause = PoisonCause::Ioctl { ioctl, source };
        context.end(Outcome::Poison(Arc::new(Poison {
            vcpu: Some(id),
            cause,
            registers: None,
        })));
        return;
    }
    let mut entered = false;
    let mut refusals = Refusals::default();
    loop {
        match context.control.request() {
            Request::Run => context.control.wait_while_held(),
            Request::End => return,
            Request::Pause => {
                if entered {
                    // An access that user space has answered becomes part of the vCPU's state only
                    // when KVM has completed the instruction.
                    vcpu.set_kvm_immediate_exit(1);
                    let outcome = complete(id, &mut vcpu, context, &mut refusals);
                    vcpu.set_kvm_immediate_exit(0);
                    let outcome = outcome.or_else(|| {
                        let cause = context.apply_address_writes(&mut vcpu).err()?;
                        Some(poison(id, cause, &vcpu))
                    });
                    if let Some(outcome) = outcome {
                        context.end(outcome);
                        return;
                    }
                }
                if !context.control.park(id, &mut vcpu) {
                    return;
                }
                // Tells kvm-clock that the guest did not run, or its watchdogs fire. It is an error
                // for guests that do not use kvm-clock.
                let _ = vcpu.kvmclock_ctrl();
                // There may be another request by now.
                continue;
            }
        }
        if context.control.request() != Request::Run {
            // It came while the vCPU was held.
            continue;
        }
        entered = true;
        if let Step::End(outcome) = step(id, &mut vcpu, context, &mut refusals) {
            context.end(outcome);
            return;
        }
    }
}

/// Runs no guest code, except the rest of an instruction that needed user space.
fn complete(
    id: u8,
    vcpu: &mut VcpuFd,
    context: &VcpuContext,
    refusals: &mut Refusals,
) -> Option<Outcome> {
    loop {
        match step(id, vcpu, context, refusals) {
            Step::Exit => {}
            Step::Kicked => return None,
            Step::End(outcome) => return Some(outcome),
        }
    }
}

impl VcpuContext {
    /// Ends the VM, unless something else has.
    pub(crate) fn end(&self, outcome: Outcome) {
        let is_first = self.control.end(outcome);
        self.let_go(is_first);
    }

    /// Ends a VM that runs on another host.
    pub(crate) fn end_as_moved(&self) {
        let is_first = self.control.end_as_moved();
        self.let_go(is_first);
    }

    fn let_go(&self, has_ended: bool) {
        if has_ended {
            self.peers.kick();
            self.loops.end();
        }
    }

    /// Does what the guest's accesses before this exit did, if KVM answered them alone.
    fn apply_address_writes(&self, vcpu: &mut VcpuFd) -> Result<(), PoisonCause> {
        let applied = match &self.address_writes {
            Some(writes) => writes.apply(vcpu),
            None => Ok(()),
        };
        applied.map_err(|error| PoisonCause::Ioctl {
            ioctl: "mmap of a vCPU's ring",
            source: error.into(),
        })
    }
}

/// Runs until the next exit and handles it.
fn step(id: u8, vcpu: &mut VcpuFd, context: &VcpuContext, refusals: &mut Refusals) -> Step {
    let result = vcpu.run();
    if !matches!(&result, Err(error) if error.errno() == libc::EAGAIN) {
        refusals.clear();
    }
    let cause = match result {
        Ok(VcpuExit::MmioRead(address, data)) => {
            context.counters.mmio.fetch_add(1, Ordering::Relaxed);
            context.bus.mmio_read(address, data);
            match context.machine.images.truncated(Some(address)) {
                None => return Step::Exit,
                Some(device) => PoisonCause::ImageTruncated {
                    device: device.to_owned(),
                },
            }
        }
        Ok(VcpuExit::MmioWrite(address, data)) => {
            context.counters.mmio.fetch_add(1, Ordering::Relaxed);
            context.bus.mmio_write(address, data);
            return Step::Exit;
        }
        Ok(VcpuExit::IoIn(port, data)) => {
            context.counters.port.fetch_add(1, Ordering::Relaxed);
            let data: *mut [u8] = data;
            let width = port_width(vcpu);
            if let Err(cause) = context.apply_address_writes(vcpu) {
                return Step::End(poison(id, cause, vcpu));
            }
            // SAFETY: the bytes are KVM's, after its `kvm_run`, and stay mapped for the lifetime of
            // the vCPU, which does not run before they are processed; nothing else refers to them.
            #[allow(unsafe_code)]
            let data = unsafe { &mut *data };
            context.bus.port_read(port, width, data);
            return Step::Exit;
        }
        Ok(VcpuExit::IoOut(port, data)) => {
            context.counters.port.fetch_add(1, Ordering::Relaxed);
            let data: *const [u8] = data;
            let width = port_width(vcpu);
            if let Err(cause) = context.apply_address_writes(vcpu) {
                return Step::End(poison(id, cause, vcpu));
            }
            // SAFETY: as above.
            #[allow(unsafe_code)]
            let data = unsafe { &*data };
            return match context.bus.port_write(port, width, data) {
                None => Step::Exit,
                Some(PowerRequest::Reset) => Step::End(Outcome::Exit(VmExit::Reset)),
                Some(PowerRequest::Shutdown) => Step::End(Outcome::Exit(VmExit::Shutdown)),
            };
        }
        Ok(VcpuExit::Intr | VcpuExit::IrqWindowOpen) => return Step::Exit,
        Ok(VcpuExit::Shutdown) => {
            return Step::End(match registers(vcpu) {
                Ok(registers) => Outcome::Exit(VmExit::TripleFault {
                    vcpu: id,
                    registers: Box::new(registers),
                }),
                Err(cause) => poison(id, cause, vcpu),
            });
        }
        Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
            let is_refused = error.errno() == libc::EAGAIN;
            let mut pending = kick::take_pending();
            let mut retry = Retry::AtOnce;
            if is_refused && pending.is_none() {
                retry = refusals.add(|| waits_for_init(vcpu));
            }
            if retry == Retry::Later {
                pending = kick::await_pending(retry::PAUSE);
            }
            match pending {
                Some(Pending::MemoryFailure { address }) => PoisonCause::MemoryFailure { address },
                None if retry == Retry::GiveUp => PoisonCause::NoResources {
                    patience: retry::PATIENCE,
                },
                None | Some(Pending::Kick) => return Step::Kicked,
            }
        }
        Err(error) => match context.machine.images.truncated(None) {
            Some(device) if error.errno() == libc::EFAULT => PoisonCause::ImageTruncated {
                device: device.to_owned(),
            },
            _ => PoisonCause::Ioctl {
                ioctl: "KVM_RUN",
                source: error.into(),
            },
        },
        Ok(VcpuExit::InternalError) => PoisonCause::InternalError {
            suberror: suberror(vcpu),
        },
        Ok(VcpuExit::FailEntry(reason, _)) => PoisonCause::FailEntry { reason },
        Ok(VcpuExit::Exception) => PoisonCause::Exception {
            vector: exception(vcpu),
        },
        Ok(VcpuExit::Unsupported(KVM_EXIT_NOTIFY)) => PoisonCause::StateLost,
        Ok(other) => PoisonCause::UnexpectedExit {
            exit: format!("{other:?}"),
        },
    };
    Step::End(poison(id, cause, vcpu))
}

/// Whether the guest has not brought the vCPU up.
fn waits_for_init(vcpu: &VcpuFd) -> bool {
    vcpu.get_mp_state()
        .is_ok_and(|state| state.mp_state == KVM_MP_STATE_UNINITIALIZED)
}

fn poison(id: u8, cause: PoisonCause, vcpu: &VcpuFd) -> Outcome {
    let registers = registers(vcpu).ok().map(Box::new);
    Outcome::Poison(Arc::new(Poison {
        vcpu: Some(id),
        cause,
        registers,
    }))
}

fn registers(vcpu: &VcpuFd) -> Result<Registers, PoisonCause> {
    let failed = |ioctl| {
        move |error: kvm_ioctls::Error| PoisonCause::Ioctl {
            ioctl,
            source: io::Error::from(error),
        }
    };
    let regs = vcpu.get_regs().map_err(failed("KVM_GET_REGS"))?;
    let sregs = vcpu.get_sregs().map_err(failed("KVM_GET_SREGS"))?;
    Ok(Registers::new(&regs, &sregs))
}

/// The size of one access to a port, of which a string instruction has several.
#[allow(unsafe_code)] // a union of the kernel's
fn port_width(vcpu: &mut VcpuFd) -> usize {
    // SAFETY: the exit reason was KVM_EXIT_IO, for which KVM fills this member; any bit pattern is
    // a valid u8.
    unsafe { vcpu.get_kvm_run().__bindgen_anon_1.io.size }.into()
}

#[allow(unsafe_code)] // a union of the kernel's
fn exception(vcpu: &mut VcpuFd) -> u32 {
    // SAFETY: the exit reason was KVM_EXIT_EXCEPTION, for which KVM fills this member; any bit
    // pattern is a valid u32.
    unsafe { vcpu.get_kvm_run().__bindgen_anon_1.ex.exception }
}

#[allow(unsafe_code)] // a union of the kernel's
fn suberror(vcpu: &mut VcpuFd) -> u32 {
    // SAFETY: the exit reason was KVM_EXIT_INTERNAL_ERROR, for which KVM fills this member; any
    // bit pattern is a valid u32.
    unsafe { vcpu.get_kvm_run().__bindgen_anon_1.internal.suberror }
}
