//! A vCPU and the thread that runs it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use kvm_ioctls::{VcpuExit, VcpuFd};
use podvisor_devices::legacy::power::PowerRequest;
use vmm_sys_util::signal::{Killable, SIGRTMIN, clear_signal};

use super::bus::Bus;
use super::control::{Control, Ending};
use super::exit::{Exit, Poison, PoisonCause, Registers};
use super::io_thread::IoWaker;
use crate::kvm::{self, KvmError};

/// The signal that gets a vCPU thread out of `KVM_RUN`. It is blocked in that thread and
/// unblocked by KVM only while guest code runs, so it is never delivered: see
/// [`kvm::set_signal_mask`].
pub(crate) fn kick_signal() -> i32 {
    SIGRTMIN()
}

/// What a vCPU thread shares with the rest of the VM.
#[derive(Clone, Debug)]
pub(crate) struct VcpuContext {
    pub(crate) control: Arc<Control>,
    pub(crate) bus: Arc<Bus>,
    pub(crate) peers: Arc<Kicker>,
    pub(crate) io: IoWaker,
    pub(crate) counters: Arc<VcpuCounters>,
}

/// Exits to user space, of all vCPUs of a VM.
#[derive(Debug, Default)]
pub(crate) struct VcpuCounters {
    pub(crate) mmio: AtomicU64,
    pub(crate) port: AtomicU64,
}

/// Gets vCPU threads out of guest code.
#[derive(Debug, Default)]
pub(crate) struct Kicker {
    threads: std::sync::Mutex<Vec<JoinHandle<()>>>,
}

impl Kicker {
    /// Adds a thread to be kicked, and joined in the end.
    pub(crate) fn add(&self, thread: JoinHandle<()>) {
        self.lock().push(thread);
    }

    /// Makes every vCPU look at [`Control::request`] soon.
    pub(crate) fn kick(&self) {
        for thread in self.lock().iter() {
            // Threads stay in the list until they are joined, so the handle is good.
            let _ = thread.kill(kick_signal());
        }
    }

    /// Joins the threads, which are about to end.
    pub(crate) fn join(&self) {
        let threads = std::mem::take(&mut *self.lock());
        for thread in threads {
            let _ = thread.join();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Runs guest code on this thread, in which the kick signal is blocked, until the VM ends.
pub(crate) fn run(id: u8, mut vcpu: VcpuFd, context: &VcpuContext) {
    if let Err(KvmError::Ioctl { ioctl, source }) = kvm::set_signal_mask(&vcpu, kick_signal()) {
        let cause = PoisonCause::Ioctl { ioctl, source };
        context.end(Ending::Poison(Arc::new(Poison {
            vcpu: id,
            cause,
            registers: None,
        })));
        return;
    }
    let mut paused_before = false;
    while context.control.checkpoint() {
        if std::mem::take(&mut paused_before) {
            // Tells kvm-clock that the guest did not run, lest its watchdogs bite. It is an
            // error for guests that do not use kvm-clock.
            let _ = vcpu.kvmclock_ctrl();
        }
        if let Some(ending) = step(id, &mut vcpu, context, &mut paused_before) {
            context.end(ending);
            return;
        }
    }
}

impl VcpuContext {
    fn end(&self, ending: Ending) {
        if self.control.end(ending) {
            self.peers.kick();
        }
        self.io.wake();
    }
}

/// Runs until the next exit and handles that. `Some` when the VM ends with it.
fn step(id: u8, vcpu: &mut VcpuFd, context: &VcpuContext, kicked: &mut bool) -> Option<Ending> {
    let cause = match vcpu.run() {
        Ok(VcpuExit::MmioRead(address, data)) => {
            context.counters.mmio.fetch_add(1, Ordering::Relaxed);
            context.bus.mmio_read(address, data);
            return None;
        }
        Ok(VcpuExit::MmioWrite(address, data)) => {
            context.counters.mmio.fetch_add(1, Ordering::Relaxed);
            context.bus.mmio_write(address, data);
            return None;
        }
        Ok(VcpuExit::IoIn(port, data)) => {
            context.counters.port.fetch_add(1, Ordering::Relaxed);
            context.bus.port_read(port, data);
            return None;
        }
        Ok(VcpuExit::IoOut(port, data)) => {
            context.counters.port.fetch_add(1, Ordering::Relaxed);
            return context.bus.port_write(port, data).map(|request| {
                Ending::Exit(match request {
                    PowerRequest::Reset => Exit::Reset,
                    PowerRequest::Shutdown => Exit::Shutdown,
                })
            });
        }
        Ok(VcpuExit::Intr | VcpuExit::IrqWindowOpen) => return None,
        Ok(VcpuExit::Shutdown) => {
            return Some(match registers(vcpu) {
                Ok(registers) => Ending::Exit(Exit::TripleFault {
                    vcpu: id,
                    registers: Box::new(registers),
                }),
                Err(cause) => poison(id, cause, vcpu),
            });
        }
        Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
            let _ = clear_signal(kick_signal());
            *kicked = true;
            return None;
        }
        Err(error) => PoisonCause::Ioctl {
            ioctl: "KVM_RUN",
            source: error.into(),
        },
        Ok(VcpuExit::InternalError) => PoisonCause::InternalError {
            suberror: suberror(vcpu),
        },
        Ok(VcpuExit::FailEntry(reason, _)) => PoisonCause::FailEntry { reason },
        Ok(other) => PoisonCause::UnexpectedExit {
            exit: format!("{other:?}"),
        },
    };
    Some(poison(id, cause, vcpu))
}

fn poison(id: u8, cause: PoisonCause, vcpu: &VcpuFd) -> Ending {
    let registers = registers(vcpu).ok().map(Box::new);
    Ending::Poison(Arc::new(Poison {
        vcpu: id,
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

#[allow(unsafe_code)] // a union of the kernel's
fn suberror(vcpu: &mut VcpuFd) -> u32 {
    // SAFETY: the exit reason was KVM_EXIT_INTERNAL_ERROR, for which KVM fills this member; any
    // bit pattern is a valid u32.
    unsafe { vcpu.get_kvm_run().__bindgen_anon_1.internal.suberror }
}
