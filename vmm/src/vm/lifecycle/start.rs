//! How a VM's threads start and end.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use kvm_ioctls::VcpuFd;
use podvisor_devices::virtio::DeviceType;
use tracing::Span;

use super::vm::{PAUSE_TIMEOUT, Vm, VmError};
use crate::vm::control::Outcome;
use crate::vm::exit::{Poison, PoisonCause, VmExit};
use crate::vm::hardware::io::{EventLoop, NamedQueue, Service};
use crate::vm::lock::lock;
use crate::vm::seccomp::{self, Seccomp, ThreadKind};
use crate::vm::state::Action;
use crate::vm::threads::{self, STACK_SIZE, SignalsBlocked};
use crate::vm::vcpu::{self, VcpuContext};

/// The work of a thread. The VM cannot continue after an error.
type Body = Box<dyn FnOnce() -> Result<(), PoisonCause> + Send>;

/// A thread to be started. If it is not started, dropping it removes it from the count.
pub(crate) struct NewThread {
    guard: ThreadGuard,
    kind: ThreadKind,
    body: Body,
}

impl NewThread {
    /// Creates the thread of a vCPU, which is already counted among the VM's. It takes the vCPU
    /// itself.
    pub(crate) fn of_vcpu(
        context: &VcpuContext,
        id: u8,
        take: impl FnOnce() -> Option<VcpuFd> + Send + 'static,
    ) -> Self {
        let own = context.clone();
        Self {
            guard: ThreadGuard::new(context, format!("vcpu{id}"), true),
            kind: ThreadKind::Vcpu,
            body: Box::new(move || {
                if let Some(vcpu) = take() {
                    vcpu::run(id, vcpu, &own);
                }
                Ok(())
            }),
        }
    }
}

impl Vm {
    /// Starts the vCPUs and the event loops of devices.
    ///
    /// # Errors
    /// Fails if the VM was started or stopped before, or a thread cannot be started: the VM is then
    /// stopped.
    pub fn start(&self) -> Result<(), VmError> {
        let _transition = lock(&self.transition);
        let parts = {
            let mut inner = self.control().lock();
            let next = self.legal(&inner, Action::Start)?;
            let Some(parts) = lock(&self.parts).take() else {
                return Err(VmError::IllegalState {
                    action: Action::Start,
                    state: inner.state,
                });
            };
            inner.state = next;
            inner.vcpus = parts.vcpus.len();
            let Service { loops, queues } = &parts.service;
            inner.threads = parts.vcpus.len() + loops.len() + queues.len();
            parts
        };
        let mut new: Vec<NewThread> = Vec::new();
        for queue in parts.service.queues {
            new.push(self.queue_thread(queue));
        }
        for event_loop in parts.service.loops {
            new.push(self.loop_thread(event_loop));
        }
        for (id, vcpu) in (0u8..).zip(parts.vcpus) {
            new.push(NewThread::of_vcpu(&self.context, id, move || Some(vcpu)));
        }
        let result = self.spawn(new);
        if result.is_err() {
            self.context.end(Outcome::Exit(VmExit::Stopped));
        }
        result
    }

    /// Creates the thread of an event loop, which is already counted among the VM's.
    pub(crate) fn loop_thread(&self, event_loop: EventLoop) -> NewThread {
        let kind = if event_loop.serves(DeviceType::FileSystem) {
            ThreadKind::Files
        } else if event_loop.uses_paths() {
            ThreadKind::Sockets
        } else {
            ThreadKind::Devices
        };
        let name = event_loop.name().to_owned();
        event_loop.begin();
        NewThread {
            guard: ThreadGuard::new(&self.context, name.clone(), false),
            kind,
            body: Box::new(move || {
                let served = event_loop.run();
                served.map_err(|source| PoisonCause::EventLoop {
                    thread: name,
                    source,
                })
            }),
        }
    }

    /// Creates the thread of a queue that has its own, which is already counted among the VM's.
    pub(crate) fn queue_thread(&self, queue: NamedQueue) -> NewThread {
        let NamedQueue { name, body } = queue;
        NewThread {
            guard: ThreadGuard::new(&self.context, name, false),
            kind: ThreadKind::Devices,
            body: Box::new(move || {
                body.run();
                Ok(())
            }),
        }
    }

    /// Starts threads, confined like all of the VM's, in the caller's span.
    pub(crate) fn spawn(&self, new: Vec<NewThread>) -> Result<(), VmError> {
        let _blocked = SignalsBlocked::new();
        let seccomp = self.seccomp;
        for NewThread { guard, kind, body } in new {
            let name = guard.name.clone();
            let span = Span::current();
            let spawned = thread::Builder::new()
                .name(name.clone())
                .stack_size(STACK_SIZE)
                .spawn(move || {
                    let mut guard = guard;
                    let confined = match seccomp {
                        Seccomp::On => seccomp::confine(kind),
                        Seccomp::Off => Ok(()),
                    };
                    let confined = confined.map_err(|error| PoisonCause::Seccomp {
                        source: Box::new(error),
                    });
                    let _entered = span.enter();
                    if let Err(cause) = confined.and_then(|()| body()) {
                        guard.poison(cause);
                    }
                    guard.completed = true;
                });
            match spawned {
                Ok(thread) => lock(&self.threads).push(thread),
                Err(source) => return Err(VmError::Thread { name, source }),
            }
        }
        Ok(())
    }

    /// Waits for the threads of a VM that has ended, and abandons those that take too long. If the
    /// VM was never started, its devices are dropped, too.
    pub(crate) fn join(&self) {
        let inner = self.control().lock();
        let deadline = Instant::now() + PAUSE_TIMEOUT;
        let nudge = || self.context.peers.kick();
        let (inner, ended) = self
            .control()
            .wait_deadline(inner, deadline, nudge, |inner| inner.threads == 0);
        drop(inner);
        // Parts that were never started: loops end with their mailboxes.
        let parts = lock(&self.parts).take();
        drop(parts);
        for thread in std::mem::take(&mut *lock(&self.threads)) {
            if ended || thread.is_finished() {
                let _ = thread.join();
            } else {
                let name = threads::name(&thread);
                tracing::warn!(name, "abandoned a blocked thread of a stopped VM");
                lock(&self.abandoned).push(thread);
            }
        }
    }
}

/// Counts a thread out when it ends, and poisons the VM if it panicked.
struct ThreadGuard {
    context: VcpuContext,
    name: String,
    is_vcpu: bool,
    completed: bool,
}

impl ThreadGuard {
    fn new(context: &VcpuContext, name: String, is_vcpu: bool) -> Self {
        Self {
            context: context.clone(),
            name,
            is_vcpu,
            completed: false,
        }
    }

    fn poison(&self, cause: PoisonCause) {
        self.context.end(Outcome::Poison(Arc::new(Poison {
            vcpu: None,
            cause,
            registers: None,
        })));
    }
}

impl Drop for ThreadGuard {
    fn drop(&mut self) {
        if !self.completed && thread::panicking() {
            self.poison(PoisonCause::Panic {
                thread: self.name.clone(),
            });
        }
        self.context.control.thread_ended(self.is_vcpu);
    }
}
