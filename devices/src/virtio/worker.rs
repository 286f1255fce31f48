//! A device as its event loop owns it: starts and stops its queues, and parks it after a fault.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use super::{
    Count, DeviceInfo, Fault, HostFault, Interrupt, Progress, Queue, QueueState, QueueThreadBody,
    QueueThreads, RateLimit, VirtioDevice,
};

/// A request to a worker from another thread; carried out by the event loop that owns it.
pub type Command = Box<dyn FnOnce(&mut Worker) + Send>;

/// A worker's command channel for other threads.
pub trait WorkerLink: fmt::Debug + Send + Sync {
    /// Sends `command`, to be carried out after those that were sent before. Never waits. A command
    /// to a worker that no longer exists is dropped.
    fn send(&self, command: Command);
}

/// A device and what its event loop knows about it.
///
/// All methods are called by one thread at a time. A fault stops all queues before the call that
/// caused it returns, so that it can never affect a device that the driver has restarted since.
#[derive(Debug)]
pub struct Worker {
    name: String,
    device: Box<dyn VirtioDevice>,
    info: DeviceInfo,
    irq: Arc<dyn Interrupt>,
    /// The driver set `DRIVER_OK` and has not reset the device since.
    live: bool,
    /// Queues run.
    serving: bool,
    /// Queues of a paused device.
    held: Option<Vec<Queue>>,
    /// Those of the device's queues that are served elsewhere.
    threads: QueueThreads,
    faults: Arc<Count>,
    log: RateLimit,
}

impl Worker {
    /// Creates a worker for `device`, which is called `name` in logs and interrupts its driver with
    /// `irq`.
    #[must_use]
    pub fn new(name: String, device: Box<dyn VirtioDevice>, irq: Arc<dyn Interrupt>) -> Self {
        let info = device.info();
        Self {
            name,
            device,
            info,
            irq,
            live: false,
            serving: false,
            held: None,
            threads: QueueThreads::default(),
            faults: Arc::default(),
            log: RateLimit::new(Duration::from_secs(10)),
        }
    }

    /// Lets queues of the device that want so be served by threads of their own
    /// ([`VirtioDevice::queue_threads`]). Called before any queue is started; the caller runs each
    /// on a thread.
    pub fn begin_threads(&mut self) -> Vec<QueueThreadBody> {
        self.threads = self.device.queue_threads();
        self.threads.bodies()
    }

    /// Whether notifications of queue `index` must be waited for: nobody else does.
    #[must_use]
    pub fn watches(&self, index: u16) -> bool {
        !self.threads.serve(index) && self.device.watches(index)
    }

    /// A descriptor that is readable when [`Self::on_alarm`] is to be called, if any queue has a
    /// thread. The same at every call once the worker is on its loop.
    #[must_use]
    pub fn alarm(&self) -> Option<BorrowedFd<'_>> {
        self.threads.alarm()
    }

    /// The device's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How often the device was parked until a reset, readable at any time.
    #[must_use]
    pub fn faults(&self) -> Arc<Count> {
        self.faults.clone()
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &dyn VirtioDevice {
        &*self.device
    }

    /// Runs `work` with the device. The driver is notified of changes of the configuration.
    pub fn with_device<R>(&mut self, work: impl FnOnce(&mut dyn VirtioDevice) -> R) -> R {
        let result = work(&mut *self.device);
        self.tell_changes();
        result
    }

    /// Number of queues of the device type.
    #[must_use]
    pub fn queue_count(&self) -> u16 {
        // Indices are u16s: a device has no more.
        u16::try_from(self.info.queue_sizes.len()).unwrap_or(u16::MAX)
    }

    /// Whether queues run, so that notifications and the backend must be waited for.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.serving
    }

    /// Starts these queues after the driver set `DRIVER_OK`. While paused they are held until
    /// [`Self::resume`].
    pub fn start(&mut self, features: u64, queues: Vec<Queue>) {
        self.stop();
        self.device.negotiated(features);
        self.live = true;
        if let Some(held) = &mut self.held {
            *held = queues;
        } else {
            self.start_queues(queues);
        }
        self.tell_changes();
    }

    fn start_queues(&mut self, queues: Vec<Queue>) {
        self.serving = true;
        for queue in queues {
            if let Err(error) = self.device.start_queue(queue) {
                self.stop();
                self.faults.one();
                self.irq.signal_needs_reset();
                if let Some(suppressed) = self.log.permit() {
                    tracing::warn!(
                        device = self.name,
                        suppressed,
                        error = &error as &dyn std::error::Error,
                        "start refused: the device needs a reset"
                    );
                }
                return;
            }
        }
    }

    /// Stops all queues and returns those that ran, with their positions, in order.
    pub fn stop(&mut self) -> Vec<Queue> {
        self.serving = false;
        let mut queues: Vec<_> = (0..self.queue_count())
            .filter_map(|index| self.device.stop_queue(index))
            .collect();
        if let Some(held) = &mut self.held {
            queues.append(held);
        }
        queues
    }

    /// Stops one queue for the driver; it stays stopped until a reset.
    pub fn stop_queue(&mut self, index: u16) {
        self.device.stop_queue(index);
        if let Some(held) = &mut self.held {
            held.retain(|queue| queue.index() != index);
        }
    }

    /// Resets the device for the driver.
    pub fn reset(&mut self) {
        self.stop();
        self.live = false;
        self.device.reset();
        // It is of the driver's last session.
        self.threads.take_fault();
        // The driver reads configuration space again.
        self.info.config.take_changed();
    }

    /// Stops all queues and holds them: nothing is in flight, and guest memory is not touched
    /// until [`Self::resume`]. Returns `false` if the device cannot promise that
    /// ([`VirtioDevice::is_quiet`]); its queues are held all the same. A device that was at fault
    /// before is parked and has none to hold; what failed of the host is returned.
    pub fn pause(&mut self) -> (bool, Option<HostFault>) {
        let mut failed = None;
        if self.held.is_none() {
            let mut queues = self.stop();
            if let Some(fault) = self.threads.take_fault() {
                failed = self.handle_result(Err(fault)).err();
                queues.clear();
            }
            self.held = Some(queues);
        }
        (self.device.is_quiet(), failed)
    }

    /// Continues with the queues that [`Self::pause`] held. Returns `true` if there are any: then
    /// the caller must poll them, since notifications may have been missed.
    pub fn resume(&mut self) -> bool {
        let Some(held) = self.held.take() else {
            return false;
        };
        let any = !held.is_empty();
        if any {
            self.start_queues(held);
        }
        any
    }

    /// The queues of a paused device.
    #[must_use]
    pub fn held(&self) -> &[Queue] {
        self.held.as_deref().unwrap_or(&[])
    }

    /// The positions of a paused device's queues in their rings.
    #[must_use]
    pub fn queue_states(&self) -> Vec<(u16, QueueState)> {
        let held = self.held().iter();
        held.map(|queue| (queue.index(), queue.state())).collect()
    }

    /// Serves queue `index` after a notification by the driver.
    ///
    /// # Errors
    /// If the host side failed; the device is parked then.
    pub fn on_queue(&mut self, index: u16) -> Result<Progress, HostFault> {
        // A queue with a thread is looked at by that.
        if !self.serving || self.threads.wake(index) {
            return Ok(Progress::Idle);
        }
        let result = self.device.on_queue(index);
        self.handle_result(result)
    }

    /// Serves the backend, which is readable.
    ///
    /// # Errors
    /// If the host side failed; the device is parked then.
    pub fn on_backend(&mut self) -> Result<Progress, HostFault> {
        if !self.serving {
            return Ok(Progress::Idle);
        }
        let result = self.device.on_backend();
        self.handle_result(result)
    }

    /// Stops all queues after a fault of one that has a thread.
    ///
    /// # Errors
    /// If the host side failed; the device is parked then.
    pub fn on_alarm(&mut self) -> Result<Progress, HostFault> {
        if !self.threads.is_raised() || !self.serving {
            return Ok(Progress::Idle);
        }
        let fault = self.threads.take_fault();
        self.handle_result(fault.map_or(Ok(Progress::Idle), Err))
    }

    fn handle_result(&mut self, result: Result<Progress, Fault>) -> Result<Progress, HostFault> {
        self.tell_changes();
        let fault = match result {
            Ok(progress) => return Ok(progress),
            Err(fault) => fault,
        };
        self.stop();
        self.faults.one();
        self.irq.signal_needs_reset();
        if let Some(suppressed) = self.log.permit() {
            tracing::warn!(
                device = self.name,
                suppressed,
                fault = &fault as &dyn std::error::Error,
                "device parked until its driver resets it"
            );
        }
        match fault {
            Fault::Guest(_) => Ok(Progress::Idle),
            Fault::Host(fault) => Err(fault),
        }
    }

    fn tell_changes(&self) {
        if self.live && self.info.config.take_changed() {
            self.irq.signal_config();
        }
    }
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
