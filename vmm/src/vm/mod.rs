//! A virtual machine: its configuration, its threads and its lifecycle.
//!
//! * [`Vm`] is the handle: every call takes `&self`, from any thread.
//! * `builder` validates a configuration and creates everything ([`VmBuilder`]).
//! * `vcpu`: one thread per vCPU runs guest code and handles its exits on the bus.
//! * `hardware` is the machine: bus, interrupt lines, PCI, and the event loops that serve devices.
//! * `devices` attaches devices to it, and has the owner's handles of them ([`DeviceHandle`]).
//! * `lifecycle` is states, threads, the end, snapshots. vCPUs synchronize through its `control`,
//!   loops take commands.
//!
//! Nothing here waits without a limit for a guest, a device or a disk.
//!
//! A VM must not know pods, containers or images, and a library must not print, exit, install
//! signal handlers, or panic at what a guest does.

mod builder;
mod devices;
mod hardware;
mod lifecycle;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod vcpu;

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvm_ioctls::VcpuFd;
use podvisor_devices::balloon::BalloonDevice;
use podvisor_devices::blk::BlockDevice;
use podvisor_devices::console::{ConsoleDevice, PortsDevice};
use podvisor_devices::fs::FsDevice;
use podvisor_devices::legacy::serial::SerialPort;
use podvisor_devices::mem::MemDevice;
use podvisor_devices::net::NetDevice;
use podvisor_devices::pmem::PmemDevice;
use podvisor_devices::virtio::{Counter, ReadCounters, VirtioDevice};
use podvisor_devices::vsock::VsockDevice;
use rustix::event::{EventfdFlags, eventfd};

pub use builder::{
    Boot, BuildError, ConfigError, ConfigErrors, EarlyVm, Restore, RestoreBuilder, VmBuilder,
};
pub use devices::{
    BalloonHandle, BlockHandle, ConsoleHandle, DeviceHandle, FsHandle, HandleError, MemHandle,
    NetHandle, PlugError, PluggedDevice, PmemHandle, PortsHandle, VsockHandle,
};
pub use hardware::events::{PowerButtonError, UnplugRequest};
pub use hardware::io::DeviceFault;
pub use lifecycle::{
    Action, MigrateError, Poison, PoisonCause, Registers, Seccomp, State, TakeSnapshotError, VmExit,
};
pub use vcpu::add::AddVcpusError;

use devices::attach::AttachedDevice;
use hardware::events::EventPort;
use hardware::firmware::FirmwarePorts;
use hardware::io::{Faults, Service};
use hardware::pci::PciRoot;
use lifecycle::control::{Control, Inner, Outcome, Request};
use lifecycle::start;
pub(crate) use lifecycle::threads::SignalsBlocked;
use vcpu::VcpuContext;
use vcpu::add::SpareVcpu;
pub(crate) use vcpu::kick::{KICK, Pending, take_pending};

use crate::snapshot::Identity;

/// How long [`Vm::pause`] and [`Vm::stop`] wait for vCPUs and devices unless told otherwise.
const PAUSE_TIMEOUT: Duration = Duration::from_millis(800);

/// The longest time limit of a pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(365 * 24 * 3600);

/// A virtual machine.
///
/// Dropping the handle stops the VM, as [`Self::stop`] does. What that abandons can no longer be
/// asked for: call [`Self::stop`] and [`Self::abandoned`] before.
pub struct Vm {
    context: VcpuContext,
    /// The vCPUs and the service that [`Self::start`] moves into threads.
    parts: Mutex<Option<StartParts>>,
    /// One of `start`, `pause` and `resume` at a time.
    transition: Mutex<()>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Threads that were waited for in vain.
    abandoned: Mutex<Vec<JoinHandle<()>>>,
    spare_vcpu: SpareVcpu,
    /// Locked only for short moments.
    devices: Mutex<Vec<Arc<AttachedDevice>>>,
    pci: Option<PciRoot>,
    serial: Option<Arc<Mutex<SerialPort>>>,
    events: Option<EventPort>,
    /// `None` unless the VM boots by a firmware.
    firmware: Option<FirmwarePorts>,
    faults: Faults,
    seccomp: Seccomp,
    /// The full snapshot that memory comes from.
    origin: Option<(PathBuf, Identity)>,
}

/// The parts that wait for [`Vm::start`].
struct StartParts {
    vcpus: Vec<VcpuFd>,
    service: Service,
}

/// Error of a call on a [`Vm`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmError {
    /// The call is not legal in this state.
    #[error("cannot {action} a VM that is {state}")]
    IllegalState {
        /// The call.
        action: Action,
        /// The VM's state.
        state: State,
    },
    /// KVM failed, now or earlier.
    #[error("the VM is poisoned")]
    Poisoned(#[source] Arc<Poison>),
    /// Something did not stop in time; the VM keeps running.
    #[error("the VM was not paused: {what} did not stop in time")]
    Busy {
        /// The name of a thread: `vcpu`, `vm-io`, or `vm-` with the name of a device.
        what: String,
    },
    /// A thread could not be started.
    #[error("failed to start the thread {name}")]
    Thread {
        /// The thread's name.
        name: String,
        /// The operating system's answer.
        #[source]
        source: std::io::Error,
    },
}

/// The counters of one device, or of the vCPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceCounters {
    /// The device type and its number among devices of that type, such as `blk0`; or `vcpu`.
    pub device: String,
    /// The counters.
    pub counters: Vec<Counter>,
}

impl fmt::Debug for Vm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vm")
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

impl Vm {
    /// Starts a configuration.
    pub fn builder() -> VmBuilder {
        VmBuilder::new()
    }

    /// Returns the VM's current state.
    #[must_use]
    pub fn state(&self) -> State {
        self.control().lock().state
    }

    /// Stops the guest between two instructions, then its devices. When it returns, nothing is in
    /// flight, no device reads or writes guest memory, and no request is lost: [`Self::resume`]
    /// continues from there.
    ///
    /// # Errors
    /// Fails if the VM is not running, or ends meanwhile. [`VmError::Busy`] if something does not
    /// stop within 800 ms, most often a disk that blocks; the VM then keeps running.
    pub fn pause(&self) -> Result<(), VmError> {
        self.pause_within(PAUSE_TIMEOUT)
    }

    /// As [`Self::pause`], with another time limit than 800 ms.
    ///
    /// # Errors
    /// As [`Self::pause`].
    pub fn pause_within(&self, limit: Duration) -> Result<(), VmError> {
        self.pause_in(&lock(&self.transition), limit)
    }

    /// As [`Self::pause_within`], in a transition that has begun.
    fn pause_in(&self, _transition: &MutexGuard<'_, ()>, limit: Duration) -> Result<(), VmError> {
        let deadline = Instant::now() + limit.min(LONGEST_PAUSE);
        let mut inner = self.control().lock();
        let next = self.legal(&inner, Action::Pause)?;
        self.control().ask(&mut inner, Request::Pause);
        self.context.peers.kick();
        // vCPUs first: one that waits for a device to be reset needs the device's loop.
        let nudge = || self.context.peers.kick();
        let (inner, parked) = self
            .control()
            .wait_deadline(inner, deadline, nudge, |inner| {
                inner.outcome.is_some() || inner.parked == inner.vcpus
            });
        drop(inner);
        let quiet = if parked {
            self.context.loops.pause(deadline)
        } else {
            Err("vcpu".to_owned())
        };
        let mut inner = self.control().lock();
        if inner.outcome.is_some() {
            return Err(self.illegal(&inner, Action::Pause));
        }
        if let Err(what) = quiet {
            self.control().ask(&mut inner, Request::Run);
            return Err(VmError::Busy { what });
        }
        inner.state = next;
        Ok(())
    }

    /// Resumes a paused VM.
    ///
    /// # Errors
    /// Fails if the VM is not paused.
    pub fn resume(&self) -> Result<(), VmError> {
        self.resume_in(&lock(&self.transition))
    }

    /// As [`Self::resume`], in a transition that has begun.
    fn resume_in(&self, _transition: &MutexGuard<'_, ()>) -> Result<(), VmError> {
        let mut inner = self.control().lock();
        inner.state = self.legal(&inner, Action::Resume)?;
        self.context.loops.resume();
        self.control().ask(&mut inner, Request::Run);
        // A pause that follows immediately must find every thread out of this one.
        let _inner = self
            .control()
            .wait_until(inner, |inner| inner.outcome.is_some() || inner.parked == 0);
        Ok(())
    }

    /// Ends the VM as if its power were cut, and returns when its threads have ended. Requests that
    /// devices have taken are completed, except those that take longer than 800 ms: they are
    /// abandoned, with the thread that executes them, and guest memory stays mapped for it until it
    /// returns ([`Self::abandoned`]). A VM that has already ended stays as it is.
    ///
    /// One that is being given away by [`Self::migrate`] may run on the other side, which this does
    /// not end: the migration's result says so, and from then on [`Self::wait`] too
    /// ([`VmExit::Moved`]).
    ///
    /// # Errors
    /// None today; the signature leaves room for a host that fails.
    pub fn stop(&self) -> Result<(), VmError> {
        self.context.end(Outcome::Exit(VmExit::Stopped));
        self.join();
        Ok(())
    }

    /// Waits until the VM has ended and its threads are gone, or abandoned as by [`Self::stop`].
    /// Any number of threads may wait.
    ///
    /// # Errors
    /// [`VmError::Poisoned`] if KVM failed.
    pub fn wait(&self) -> Result<VmExit, VmError> {
        let outcome = self.outcome();
        self.join();
        match outcome {
            Some(Outcome::Poison(poison)) => Err(VmError::Poisoned(poison)),
            Some(Outcome::Exit(exit)) => Ok(exit),
            None => Ok(VmExit::Stopped),
        }
    }

    /// Waits until the VM is [`State::Stopped`] or [`State::Poisoned`]. It reaches that state
    /// before its threads end and its devices release their resources; [`Self::wait`] waits for
    /// those, too. Any number of threads may wait.
    pub fn wait_until_stopped(&self) {
        let _ = self.outcome();
    }

    /// Returns a descriptor that is readable, and stays so, when the VM is [`State::Stopped`] or
    /// [`State::Poisoned`]: for an event loop that waits for several VMs. [`Self::wait`] then
    /// returns how it ended, soon. Each call returns another one, which is closed by dropping it;
    /// the VM keeps its own end until it ends.
    ///
    /// # Errors
    /// If the process has too many descriptors.
    pub fn exit_fd(&self) -> io::Result<OwnedFd> {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let theirs = event.try_clone()?;
        self.control().add_exit_event(event);
        Ok(theirs)
    }

    /// Returns the names of the threads that [`Self::stop`] or [`Self::wait`] has abandoned and
    /// that still run: `vcpu` with a number, `vm-io`, or `vm-` with the name of a device. Until
    /// they end, they keep the guest's memory and the resources of their devices, such as a disk's
    /// lock. Empty if all have ended, or the VM has not.
    #[must_use]
    pub fn abandoned(&self) -> Vec<String> {
        let mut abandoned = lock(&self.abandoned);
        abandoned.retain(|thread| !thread.is_finished());
        abandoned.iter().map(start::thread_name).collect()
    }

    /// Waits until the threads that [`Self::abandoned`] names have ended, and names them no more:
    /// what they had of the host is free then. It does not return as long as one hangs.
    pub fn wait_abandoned(&self) {
        let abandoned = std::mem::take(&mut *lock(&self.abandoned));
        for thread in abandoned {
            let _ = thread.join();
        }
    }

    /// Waits for the outcome and returns it.
    fn outcome(&self) -> Option<Outcome> {
        let inner = self.control().lock();
        let inner = self
            .control()
            .wait_until(inner, |inner| inner.outcome.is_some());
        inner.outcome.clone()
    }

    /// Returns the current counters of the devices and vCPUs. Never blocks. Each device counts its
    /// `faults`; after each of them it was parked until its driver reset it.
    #[must_use]
    pub fn counters(&self) -> Vec<DeviceCounters> {
        let counters = &self.context.counters;
        let vcpu = vec![
            Counter {
                name: "mmio_exits",
                value: counters.mmio.load(Ordering::Relaxed),
            },
            Counter {
                name: "port_exits",
                value: counters.port.load(Ordering::Relaxed),
            },
        ];
        let mut all = vec![DeviceCounters {
            device: "vcpu".to_owned(),
            counters: vcpu,
        }];
        all.extend(lock(&self.devices).iter().map(|device| DeviceCounters {
            device: device.name.clone(),
            counters: device.counters.read(),
        }));
        all
    }

    /// Returns the block device named `name`, as in [`Self::counters`]: by its id, or `blk0` for
    /// the first without one.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`].
    pub fn block(&self, name: &str) -> Result<BlockHandle, HandleError> {
        DeviceHandle::<BlockDevice>::find(&lock(&self.devices), "block device", Some(name))
    }

    /// Returns the network card named `name`: `net0` is the first.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`].
    pub fn net(&self, name: &str) -> Result<NetHandle, HandleError> {
        DeviceHandle::<NetDevice>::find(&lock(&self.devices), "network card", Some(name))
    }

    /// Returns the shared directory named `name`: `fs0` is the first.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`].
    pub fn fs(&self, name: &str) -> Result<FsHandle, HandleError> {
        DeviceHandle::<FsDevice>::find(&lock(&self.devices), "shared directory", Some(name))
    }

    /// Returns the memory image named `name`: `pmem0` is the first.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`].
    pub fn pmem(&self, name: &str) -> Result<PmemHandle, HandleError> {
        DeviceHandle::<PmemDevice>::find(&lock(&self.devices), "memory image", Some(name))
    }

    /// Returns the first console.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`].
    pub fn console(&self) -> Result<ConsoleHandle, HandleError> {
        DeviceHandle::<ConsoleDevice>::find(&lock(&self.devices), "console", None)
    }

    /// Returns the first device of named ports.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`].
    pub fn ports(&self) -> Result<PortsHandle, HandleError> {
        DeviceHandle::<PortsDevice>::find(&lock(&self.devices), "device of named ports", None)
    }

    /// Returns the socket device.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`].
    pub fn vsock(&self) -> Result<VsockHandle, HandleError> {
        DeviceHandle::<VsockDevice>::find(&lock(&self.devices), "socket device", None)
    }

    /// Returns the memory balloon.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`].
    pub fn balloon(&self) -> Result<BalloonHandle, HandleError> {
        DeviceHandle::<BalloonDevice>::find(&lock(&self.devices), "balloon", None)
    }

    /// Returns the device by which memory is plugged and unplugged.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`] for a VM that was built without
    /// [`VmBuilder::hotplug_memory`].
    pub fn hotplug_memory(&self) -> Result<MemHandle, HandleError> {
        DeviceHandle::<MemDevice>::find(&lock(&self.devices), "memory device", None)
    }

    /// Returns a device of any type, by its name.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`], also if it is of another type.
    pub fn device<D: VirtioDevice>(&self, name: &str) -> Result<DeviceHandle<D>, HandleError> {
        DeviceHandle::find(&lock(&self.devices), "device of this type", Some(name))
    }

    /// Returns the failures on the host side of devices so far: the last 64 of them. Their drivers
    /// saw `DEVICE_NEEDS_RESET`.
    #[must_use]
    pub fn faults(&self) -> Vec<DeviceFault> {
        lock(&self.faults).clone()
    }

    fn control(&self) -> &Control {
        &self.context.control
    }

    fn legal(&self, inner: &MutexGuard<'_, Inner>, action: Action) -> Result<State, VmError> {
        inner
            .state
            .after(action)
            .ok_or_else(|| self.illegal(inner, action))
    }

    fn illegal(&self, inner: &MutexGuard<'_, Inner>, action: Action) -> VmError {
        match &inner.outcome {
            Some(Outcome::Poison(poison)) => VmError::Poisoned(poison.clone()),
            _ => VmError::IllegalState {
                action,
                state: inner.state,
            },
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.context.end(Outcome::Exit(VmExit::Stopped));
        self.join();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section leaves what it guards consistent, even one that panicked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
