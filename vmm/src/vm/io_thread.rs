//! The I/O thread of a VM: waits for notifications of drivers and for the host side of
//! devices, and calls the devices.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use podvisor_devices::virtio::{Fault, Interrupt, Progress, RateLimit, VirtioDevice};
use vmm_sys_util::eventfd::EventFd;

use super::control::{Control, Request};

/// Event data of a device's backend; queues use their index.
const BACKEND: u32 = u32::MAX;

/// The most device faults that are kept for the owner.
const FAULTS_KEPT: usize = 64;

/// Makes the I/O thread look at [`Control::request`].
#[derive(Clone, Debug)]
pub(crate) struct IoWaker(Arc<EventFd>);

impl IoWaker {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(EventFd::new(
            libc::EFD_NONBLOCK | libc::EFD_CLOEXEC,
        )?)))
    }

    pub(crate) fn wake(&self) {
        let _ = self.0.write(1);
    }
}

/// A failure of a device's host side, for the owner of the VM.
#[derive(Clone, Debug)]
pub struct DeviceFault {
    /// The device's name, as in [`super::Vm::counters`].
    pub device: String,
    /// What failed, with its causes.
    pub fault: Arc<Fault>,
}

/// The faults so far; the oldest go when there are too many.
pub(crate) type Faults = Arc<Mutex<Vec<DeviceFault>>>;

/// One device and the eventfds that its driver's notifications arrive on.
#[derive(Debug)]
pub(crate) struct DeviceRunner {
    pub(crate) name: String,
    pub(crate) device: Arc<Mutex<dyn VirtioDevice>>,
    pub(crate) irq: Arc<dyn Interrupt>,
    pub(crate) kicks: Vec<EventFd>,
    pub(crate) faults: Faults,
    backend_polled: bool,
    complaints: RateLimit,
}

impl DeviceRunner {
    pub(crate) fn new(
        name: String,
        device: Arc<Mutex<dyn VirtioDevice>>,
        irq: Arc<dyn Interrupt>,
        kicks: Vec<EventFd>,
        faults: Faults,
    ) -> Self {
        let complaints = RateLimit::new(Duration::from_secs(10));
        Self {
            name,
            device,
            irq,
            kicks,
            faults,
            backend_polled: false,
            complaints,
        }
    }

    fn lock(&self) -> MutexGuard<'_, dyn VirtioDevice + 'static> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the backend's registration in step with whether the device runs.
    fn poll_backend(&mut self, wanted: bool, ops: &mut EventOps<'_>) {
        if wanted == self.backend_polled {
            return;
        }
        let Some(fd) = self.lock().backend().map(|fd| fd.as_raw_fd()) else {
            return;
        };
        let events = Events::with_data_raw(fd, BACKEND, EventSet::IN);
        let result = if wanted {
            ops.add(events)
        } else {
            ops.remove(events)
        };
        match result {
            Ok(()) => self.backend_polled = wanted,
            Err(error) => tracing::error!(device = self.name, ?error, "epoll on a backend"),
        }
    }

    fn settle(&mut self, result: Result<Progress, Fault>, again: Option<usize>) {
        match result {
            Ok(Progress::Idle) => {}
            // The eventfd comes round after the other devices had their turn. A backend that
            // has more stays readable by itself.
            Ok(Progress::More) => {
                if let Some(kick) = again.and_then(|queue| self.kicks.get(queue)) {
                    let _ = kick.write(1);
                }
            }
            Err(fault) => {
                self.lock().stop();
                self.irq.signal_needs_reset();
                if let Some(suppressed) = self.complaints.permit() {
                    tracing::warn!(
                        device = self.name,
                        suppressed,
                        fault = &fault as &dyn std::error::Error,
                        "device parked until its driver resets it"
                    );
                }
                if matches!(fault, Fault::Host(_)) {
                    let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
                    if faults.len() == FAULTS_KEPT {
                        faults.remove(0);
                    }
                    let device = self.name.clone();
                    faults.push(DeviceFault {
                        device,
                        fault: Arc::new(fault),
                    });
                }
            }
        }
    }
}

impl MutEventSubscriber for DeviceRunner {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        for (queue, kick) in (0u32..).zip(&self.kicks) {
            if let Err(error) = ops.add(Events::with_data(kick, queue, EventSet::IN)) {
                tracing::error!(device = self.name, ?error, "epoll on a notification");
            }
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        if events.data() == BACKEND {
            let (running, result) = {
                let mut device = self.lock();
                (device.is_running(), device.on_backend())
            };
            self.settle(result, None);
            if !running {
                self.poll_backend(false, ops);
            }
            return;
        }
        let index = events.data() as usize;
        if let Some(kick) = self.kicks.get(index) {
            let _ = kick.read();
        }
        let (running, result) = {
            let mut device = self.lock();
            let queue = u16::try_from(index).unwrap_or(u16::MAX);
            (device.is_running(), device.on_queue(queue))
        };
        self.settle(result, Some(index));
        self.poll_backend(running, ops);
    }
}

/// Wakes the loop, and holds it up while the VM is paused.
#[derive(Debug)]
struct Gate {
    waker: IoWaker,
    control: Arc<Control>,
}

impl MutEventSubscriber for Gate {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        if let Err(error) = ops.add(Events::new(&*self.waker.0, EventSet::IN)) {
            tracing::error!(?error, "epoll on the control eventfd");
        }
    }

    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {
        let _ = self.waker.0.read();
        self.control.checkpoint();
    }
}

/// The loop, ready to run on its thread.
pub(crate) struct IoLoop {
    manager: EventManager<Box<dyn MutEventSubscriber + Send>>,
    devices: Vec<Arc<Mutex<dyn VirtioDevice>>>,
    control: Arc<Control>,
}

impl IoLoop {
    pub(crate) fn new(
        control: Arc<Control>,
        waker: IoWaker,
        runners: Vec<DeviceRunner>,
    ) -> Result<Self, event_manager::Error> {
        let mut manager = EventManager::<Box<dyn MutEventSubscriber + Send>>::new()?;
        let devices = runners.iter().map(|runner| runner.device.clone()).collect();
        manager.add_subscriber(Box::new(Gate {
            waker,
            control: control.clone(),
        }));
        for runner in runners {
            manager.add_subscriber(Box::new(runner));
        }
        Ok(Self {
            manager,
            devices,
            control,
        })
    }

    /// Serves the devices until the VM ends, then drains them.
    pub(crate) fn run(mut self) {
        while self.control.request() != Request::End {
            if let Err(error) = self.manager.run() {
                tracing::error!(?error, "epoll: the devices of this VM are lost");
                break;
            }
        }
        for device in &self.devices {
            device.lock().unwrap_or_else(PoisonError::into_inner).stop();
        }
    }
}
