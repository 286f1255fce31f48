//! A virtual machine: its configuration, its threads and its life.
//!
//! * [`VmBuilder`] validates a configuration and creates everything.
//! * [`Vm`] is the handle: every call takes `&self`, from any thread.
//! * One thread per vCPU runs guest code and answers its exits by the bus; one I/O thread
//!   serves the devices. They agree through `control`, and never hold its lock while they work.
//!
//! A VM must not know pods, containers or images, and a library must not print, exit, install
//! signal handlers, or panic at what a guest does.

mod attach;
mod builder;
mod bus;
mod control;
mod error;
mod exit;
mod hardware;
mod io_thread;
mod state;
mod threads;
mod vcpu;

use std::fmt;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use kvm_ioctls::{VcpuFd, VmFd};
use podvisor_devices::GuestRam;
use podvisor_devices::virtio::{Counter, VirtioDevice};

pub use builder::VmBuilder;
pub use error::{BuildError, ConfigError, ConfigErrors};
pub use exit::{Exit, Poison, PoisonCause, Registers};
pub use io_thread::DeviceFault;
pub use state::{Action, State};

use control::{Control, Ending, Inner, Request};
use io_thread::{Faults, IoLoop};
use threads::{STACK_SIZE, SignalsBlocked};
use vcpu::VcpuContext;

/// A virtual machine.
///
/// Dropping the handle stops the VM and waits for its threads.
pub struct Vm {
    context: VcpuContext,
    /// What [`Self::start`] moves into threads.
    parts: Mutex<Option<Parts>>,
    devices: Vec<(String, Arc<Mutex<dyn VirtioDevice>>)>,
    faults: Faults,
    /// Both must outlive the threads: KVM reads and writes the memory for as long as there is
    /// a vCPU. Fields are dropped in this order.
    _vm_fd: VmFd,
    _mem: GuestRam,
}

/// What waits for [`Vm::start`].
struct Parts {
    vcpus: Vec<VcpuFd>,
    io_loop: IoLoop,
}

/// A call that a VM could not do.
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
    /// A thread could not be started.
    #[error("starting the thread {name}")]
    Thread {
        /// The thread's name.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The counters of one device, or of the vCPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceCounters {
    /// The device type and its number among its like, as `blk0`; or `vcpu`.
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
    /// Begins a configuration.
    pub fn builder() -> VmBuilder {
        VmBuilder::default()
    }

    fn new(
        context: VcpuContext,
        parts: Parts,
        devices: Vec<(String, Arc<Mutex<dyn VirtioDevice>>)>,
        faults: Faults,
        vm_fd: VmFd,
        mem: GuestRam,
    ) -> Self {
        let parts = Mutex::new(Some(parts));
        Self {
            context,
            parts,
            devices,
            faults,
            _vm_fd: vm_fd,
            _mem: mem,
        }
    }

    /// The VM's state now.
    #[must_use]
    pub fn state(&self) -> State {
        self.control().lock().state
    }

    /// Starts the vCPUs and the I/O thread.
    ///
    /// # Errors
    /// When the VM was started or stopped before, or a thread cannot be started: the VM is
    /// stopped then.
    pub fn start(&self) -> Result<(), VmError> {
        let parts = {
            let mut inner = self.control().lock();
            let next = self.legal(&inner, Action::Start)?;
            let parts = self
                .parts
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
            let Some(parts) = parts else {
                return Err(VmError::IllegalState {
                    action: Action::Start,
                    state: inner.state,
                });
            };
            inner.state = next;
            inner.threads = parts.vcpus.len() + 1;
            parts
        };
        let mut missing = parts.vcpus.len() + 1;
        let mut spawn = |name: String, body: Box<dyn FnOnce() + Send>| {
            let guard = ThreadGuard {
                context: self.context.clone(),
                completed: false,
            };
            let builder = thread::Builder::new()
                .name(name.clone())
                .stack_size(STACK_SIZE);
            let spawned = builder.spawn(move || {
                let mut guard = guard;
                body();
                guard.completed = true;
            });
            match spawned {
                Ok(handle) => {
                    missing -= 1;
                    self.context.peers.add(handle);
                    Ok(())
                }
                Err(source) => Err(VmError::Thread { name, source }),
            }
        };
        let blocked = SignalsBlocked::new();
        let io_loop = parts.io_loop;
        let mut result = spawn("vm-io".to_owned(), Box::new(move || io_loop.run()));
        for (id, vcpu) in (0u8..).zip(parts.vcpus) {
            if result.is_err() {
                break;
            }
            let context = self.context.clone();
            let body = move || vcpu::run(id, vcpu, &context);
            result = spawn(format!("vcpu{id}"), Box::new(body));
        }
        drop(blocked);
        if result.is_err() {
            // The guard of the thread that failed has already counted itself.
            let mut inner = self.control().lock();
            inner.threads -= missing - 1;
            drop(inner);
            self.end(Ending::Exit(Exit::Stopped));
        }
        result
    }

    /// Stops the guest between two instructions and its devices between two requests. Returns
    /// when all of them stand still.
    ///
    /// # Errors
    /// When the VM is not running, or ends meanwhile.
    pub fn pause(&self) -> Result<(), VmError> {
        let mut inner = self.control().lock();
        inner.state = self.legal(&inner, Action::Pause)?;
        self.control().ask(&mut inner, Request::Pause);
        self.context.peers.kick();
        self.context.io.wake();
        let inner = self.control().wait_until(inner, |inner| {
            inner.ending.is_some() || inner.parked == inner.threads
        });
        match &inner.ending {
            None => Ok(()),
            Some(_) => Err(self.illegal(&inner, Action::Pause)),
        }
    }

    /// Lets a paused VM go on.
    ///
    /// # Errors
    /// When the VM is not paused.
    pub fn resume(&self) -> Result<(), VmError> {
        let mut inner = self.control().lock();
        inner.state = self.legal(&inner, Action::Resume)?;
        self.control().ask(&mut inner, Request::Run);
        // A pause that follows at once must find every thread out of this one.
        let _inner = self
            .control()
            .wait_until(inner, |inner| inner.ending.is_some() || inner.parked == 0);
        Ok(())
    }

    /// Ends the VM as if its power were cut, and returns when its threads have ended. Requests
    /// that devices have taken are completed. A VM that has ended stays as it is.
    ///
    /// # Errors
    /// None today; the signature leaves room for a host that fails.
    pub fn stop(&self) -> Result<(), VmError> {
        self.end(Ending::Exit(Exit::Stopped));
        self.join();
        Ok(())
    }

    /// Waits until the VM has ended and its threads are gone. Any number of threads may wait.
    ///
    /// # Errors
    /// [`VmError::Poisoned`] when KVM failed.
    pub fn wait(&self) -> Result<Exit, VmError> {
        let ending = {
            let inner = self.control().lock();
            let inner = self
                .control()
                .wait_until(inner, |inner| inner.ending.is_some());
            inner.ending.clone()
        };
        self.join();
        match ending {
            Some(Ending::Poison(poison)) => Err(VmError::Poisoned(poison)),
            Some(Ending::Exit(exit)) => Ok(exit),
            None => Ok(Exit::Stopped),
        }
    }

    /// What the devices and vCPUs have counted so far.
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
        all.extend(self.devices.iter().map(|(name, device)| {
            DeviceCounters {
                device: name.clone(),
                counters: device
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .counters(),
            }
        }));
        all
    }

    /// What failed on the host side of devices so far: the last 64 of them. Their drivers saw
    /// `DEVICE_NEEDS_RESET`.
    #[must_use]
    pub fn faults(&self) -> Vec<DeviceFault> {
        self.faults
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
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
        match &inner.ending {
            Some(Ending::Poison(poison)) => VmError::Poisoned(poison.clone()),
            _ => VmError::IllegalState {
                action,
                state: inner.state,
            },
        }
    }

    fn end(&self, ending: Ending) {
        if self.control().end(ending) {
            self.context.peers.kick();
            self.context.io.wake();
        }
    }

    fn join(&self) {
        let inner = self.control().lock();
        drop(self.control().wait_until(inner, |inner| inner.threads == 0));
        self.context.peers.join();
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.end(Ending::Exit(Exit::Stopped));
        self.join();
    }
}

/// Counts a thread out when it ends, and poisons the VM when it panicked.
struct ThreadGuard {
    context: VcpuContext,
    completed: bool,
}

impl Drop for ThreadGuard {
    fn drop(&mut self) {
        if !self.completed && thread::panicking() {
            let poison = Poison {
                vcpu: 0,
                cause: PoisonCause::Panic,
                registers: None,
            };
            if self.context.control.end(Ending::Poison(Arc::new(poison))) {
                self.context.peers.kick();
                self.context.io.wake();
            }
        }
        self.context.control.thread_ended();
    }
}
