//! The handle of a VM, and how it is paused, resumed and ended.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvm_ioctls::VcpuFd;
use podvisor_devices::legacy::serial::SerialPort;
use rustix::event::{EventfdFlags, eventfd};

use crate::snapshot::Identity;
use crate::vm::control::{Control, Inner, Outcome, Request};
use crate::vm::devices::attach::AttachedDevice;
use crate::vm::exit::{Poison, VmExit};
use crate::vm::hardware::events::EventPort;
use crate::vm::hardware::firmware::FirmwarePorts;
use crate::vm::hardware::io::{Faults, Service};
use crate::vm::hardware::pci::PciRoot;
use crate::vm::lock::lock;
use crate::vm::seccomp::Seccomp;
use crate::vm::state::{Action, State};
use crate::vm::threads;
use crate::vm::vcpu::VcpuContext;
use crate::vm::vcpu::spare::SpareVcpu;

/// How long [`Vm::pause`] and [`Vm::stop`] wait for vCPUs and devices unless told otherwise.
pub(super) const PAUSE_TIMEOUT: Duration = Duration::from_millis(800);

/// The longest time limit of a pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(365 * 24 * 3600);

/// A virtual machine.
///
/// Dropping the handle stops the VM, as [`Self::stop`] does. What that abandons can no longer be
/// asked for: call [`Self::stop`] and [`Self::abandoned`] before.
pub struct Vm {
    pub(crate) context: VcpuContext,
    /// The vCPUs and the service that [`Self::start`] moves into threads.
    pub(crate) parts: Mutex<Option<StartParts>>,
    /// One of `start`, `pause` and `resume` at a time.
    pub(crate) transition: Mutex<()>,
    pub(crate) threads: Mutex<Vec<JoinHandle<()>>>,
    /// Threads that were waited for in vain.
    pub(crate) abandoned: Mutex<Vec<JoinHandle<()>>>,
    pub(crate) spare_vcpu: SpareVcpu,
    /// Locked only for short moments.
    pub(crate) devices: Mutex<Vec<Arc<AttachedDevice>>>,
    pub(crate) pci: Option<PciRoot>,
    pub(crate) serial: Option<Arc<Mutex<SerialPort>>>,
    pub(crate) events: Option<EventPort>,
    /// `None` unless the VM boots by a firmware.
    pub(crate) firmware: Option<FirmwarePorts>,
    pub(crate) faults: Faults,
    pub(crate) seccomp: Seccomp,
    /// The full snapshot that memory comes from.
    pub(crate) origin: Option<(PathBuf, Identity)>,
}

/// The parts that wait for [`Vm::start`].
pub(crate) struct StartParts {
    pub(crate) vcpus: Vec<VcpuFd>,
    pub(crate) service: Service,
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

impl fmt::Debug for Vm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vm")
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

impl Vm {
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
    pub(super) fn pause_in(
        &self,
        _transition: &MutexGuard<'_, ()>,
        limit: Duration,
    ) -> Result<(), VmError> {
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
    pub(super) fn resume_in(&self, _transition: &MutexGuard<'_, ()>) -> Result<(), VmError> {
        let mut inner = self.control().lock();
        inner.state = self.legal(&inner, Action::Resume)?;
        inner.resumes += 1;
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
        abandoned.iter().map(threads::name).collect()
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

    pub(crate) fn control(&self) -> &Control {
        &self.context.control
    }

    pub(crate) fn legal(
        &self,
        inner: &MutexGuard<'_, Inner>,
        action: Action,
    ) -> Result<State, VmError> {
        inner
            .state
            .after(action)
            .ok_or_else(|| self.illegal(inner, action))
    }

    pub(crate) fn illegal(&self, inner: &MutexGuard<'_, Inner>, action: Action) -> VmError {
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
