//! The state machine that all transports share: status, features, queue set-up and reset of one
//! device. A transport maps registers to it.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, sync_channel};
use std::time::Duration;

use vmm_sys_util::eventfd::EventFd;

use super::status::{Status, StatusChange};
use crate::virtio::{
    DeviceInfo, Interrupt, Queue, QueueConfig, QueueResources, QueueState, RateLimit, RestoreError,
    WorkerLink, features,
};
use crate::{GuestRam, WriteLog};

/// How long a vCPU waits for a worker that is being reset. After that the status register reads as
/// non-zero until the worker is done (§2.4), and the driver can only wait or give up.
pub const RESET_TIMEOUT: Duration = Duration::from_millis(250);

/// The interrupt of a transport, with the one status bit that the device sets.
pub trait TransportInterrupt: Interrupt {
    /// Whether [`Interrupt::signal_needs_reset`] was called since the last [`Self::reset`].
    fn needs_reset(&self) -> bool;

    /// Restores that state in a device that is restored, without an interrupt.
    fn restore_needs_reset(&self);

    /// Returns to the initial state, with nothing pending.
    fn reset(&self);
}

/// What a transport connects: the device, its worker, and the guest.
#[derive(Debug)]
pub struct TransportParts {
    /// The info of the device.
    pub info: DeviceInfo,
    /// The command channel to its worker.
    pub link: Arc<dyn WorkerLink>,
    /// Guest memory.
    pub mem: GuestRam,
    /// One eventfd per queue, on which the driver's notifications arrive.
    pub kicks: Vec<Arc<EventFd>>,
    /// Is told of what the device writes to guest memory.
    pub writes: WriteLog,
}

/// What a driver has configured and has been told: a transport's state without its own registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedTransport {
    /// The device status field, without `DEVICE_NEEDS_RESET`.
    pub status: u8,
    /// Whether the device asked for a reset.
    pub needs_reset: bool,
    /// Feature bits that the driver accepted.
    pub features: u64,
    /// The queue registers.
    pub queues: Vec<QueueConfig>,
}

/// The state of one device as its driver sees it, independent of the registers.
#[derive(Debug)]
pub(super) struct TransportCore {
    parts: TransportParts,
    irq: Arc<dyn TransportInterrupt>,
    status: Status,
    acked: u64,
    queues: Vec<QueueConfig>,
    /// Commands were sent that the worker must undo at a reset.
    started: bool,
    /// Receives a message once the worker has carried out a reset.
    resetting: Option<Receiver<()>>,
    /// Queues that the worker was asked to release, each once, with the receiver of the message
    /// that it has.
    stopping: Vec<(usize, Receiver<()>)>,
    patience: Duration,
    log: RateLimit,
}

impl TransportCore {
    pub(super) fn new(parts: TransportParts, irq: Arc<dyn TransportInterrupt>) -> Self {
        let mut core = Self {
            parts,
            irq,
            status: Status::default(),
            acked: 0,
            queues: Vec::new(),
            started: false,
            resetting: None,
            stopping: Vec::new(),
            patience: RESET_TIMEOUT,
            log: RateLimit::new(Duration::from_secs(10)),
        };
        core.clear();
        core
    }

    pub(super) fn info(&self) -> &DeviceInfo {
        &self.parts.info
    }

    /// Feature bits that the driver may accept.
    pub(super) fn offered(&self) -> u64 {
        self.parts.info.features | features::RING
    }

    /// Feature bits that the driver accepted so far.
    pub(super) fn acked(&self) -> u64 {
        self.acked
    }

    /// The driver's bits, while it may still change them.
    pub(super) fn acked_mut(&mut self) -> Option<&mut u64> {
        self.status.negotiating().then_some(&mut self.acked)
    }

    /// The device status field as the driver reads it.
    pub(super) fn status(&mut self) -> u8 {
        self.poll_reset();
        let needs_reset = if self.irq.needs_reset() {
            Status::DEVICE_NEEDS_RESET
        } else {
            0
        };
        self.status.bits() | needs_reset
    }

    /// The largest size of queue `index`; 0 if it does not exist.
    pub(super) fn queue_max(&self, index: u32) -> u16 {
        usize::try_from(index)
            .ok()
            .and_then(|index| self.parts.info.queue_sizes.get(index))
            .copied()
            .unwrap_or(0)
    }

    /// Takes a running queue out of service for the driver: it reads as ready until the worker has
    /// released it (§4.2.2.2), which drivers wait for.
    pub(super) fn stop_queue(&mut self, index: u32) {
        self.poll_stop();
        let at = usize::try_from(index).ok();
        let at = at.filter(|at| self.queues.get(*at).is_some_and(|queue| queue.ready));
        let (Some(at), Ok(number)) = (at, u16::try_from(index)) else {
            return;
        };
        let again = self.stopping.iter().any(|(stopping, _)| *stopping == at);
        if self.status.failed() || again || self.resetting.is_some() {
            self.log_guest_error("queue stopped at the wrong time", None);
            return;
        }
        if !self.started {
            // A queue was refused at `DRIVER_OK`: the worker has none.
            self.stopped(at);
            return;
        }
        let (done, wait) = sync_channel(1);
        self.parts.link.send(Box::new(move |worker| {
            worker.stop_queue(number);
            // The receiver is gone if the VM has ended.
            let _ = done.send(());
        }));
        // A worker that no longer exists serves nothing any more.
        if wait.recv_timeout(self.patience) == Err(RecvTimeoutError::Timeout) {
            self.stopping.push((at, wait));
        } else {
            self.stopped(at);
        }
    }

    /// Records which queues the worker has released by now.
    pub(super) fn poll_stop(&mut self) {
        for (at, wait) in std::mem::take(&mut self.stopping) {
            if wait.try_recv() == Err(TryRecvError::Empty) {
                self.stopping.push((at, wait));
            } else {
                self.stopped(at);
            }
        }
    }

    fn stopped(&mut self, at: usize) {
        if let Some(queue) = self.queues.get_mut(at) {
            queue.ready = false;
        }
    }

    pub(super) fn queue(&self, index: u32) -> Option<&QueueConfig> {
        self.queues.get(usize::try_from(index).ok()?)
    }

    /// Returns the registers of queue `index`, while the driver may write them.
    pub(super) fn queue_mut(&mut self, index: u32) -> Option<&mut QueueConfig> {
        if !self.status.configuring_queues() || self.status.failed() {
            return None;
        }
        self.queues.get_mut(usize::try_from(index).ok()?)
    }

    /// Handles a driver's write of the device status field.
    pub(super) fn write_status(&mut self, value: u8) {
        self.poll_reset();
        if self.resetting.is_some() {
            self.log_guest_error("status written during a reset", None);
            return;
        }
        match self.status.change(value) {
            StatusChange::Reset => self.reset(),
            StatusChange::Fail => {
                if self.started {
                    self.parts.link.send(Box::new(|worker| {
                        worker.stop();
                    }));
                }
                self.status = self.status.with_failed();
            }
            StatusChange::Stay => {}
            StatusChange::Advance(next) => self.status = next,
            // §3.1.1: FEATURES_OK stays clear when the device cannot work with the features.
            StatusChange::Features(next)
                if self.acked & !self.offered() == 0 && self.acked & features::VERSION_1 != 0 =>
            {
                self.status = next;
            }
            StatusChange::Features(_) => {
                self.log_guest_error("features that were not offered", None)
            }
            StatusChange::Start(next) => {
                self.status = next;
                self.start();
            }
            StatusChange::Illegal => self.log_guest_error("status bits out of order", None),
        }
    }

    /// Sends the queues that the driver enabled to the worker, without waiting for it.
    fn start(&mut self) {
        let mut queues = Vec::with_capacity(self.queues.len());
        let sizes = &self.parts.info.queue_sizes;
        let all = self.queues.iter().zip(sizes).zip(&self.parts.kicks);
        for (index, ((config, max), kick)) in (0u16..).zip(all) {
            if !config.ready {
                continue;
            }
            let resources = QueueResources {
                mem: self.parts.mem.clone(),
                irq: self.irq.clone(),
                kick: kick.clone(),
                event_idx: self.acked & features::EVENT_IDX != 0,
                indirect_desc: self.acked & features::INDIRECT_DESC != 0,
                state: QueueState::default(),
                writes: self.parts.writes.clone(),
            };
            match Queue::new(index, *max, config, resources) {
                Ok(queue) => queues.push(queue),
                Err(error) => {
                    self.irq.signal_needs_reset();
                    if let Some(suppressed) = self.log.permit() {
                        tracing::warn!(
                            device = self.parts.info.device_type.name(),
                            queue = index,
                            suppressed,
                            error = &error as &dyn std::error::Error,
                            "queue refused: the device needs a reset"
                        );
                    }
                    return;
                }
            }
        }
        self.started = true;
        let acked = self.acked;
        self.parts
            .link
            .send(Box::new(move |worker| worker.start(acked, queues)));
    }

    fn reset(&mut self) {
        if self.started {
            let (done, wait) = sync_channel(1);
            self.parts.link.send(Box::new(move |worker| {
                worker.reset();
                // The receiver is gone if the VM has ended.
                let _ = done.send(());
            }));
            if wait.recv_timeout(self.patience) == Err(RecvTimeoutError::Timeout) {
                self.resetting = Some(wait);
                return;
            }
        }
        self.clear();
    }

    /// Finishes a reset that the worker has carried out by now. A worker that no longer exists
    /// serves nothing any more, which is equivalent.
    fn poll_reset(&mut self) {
        if let Some(wait) = &self.resetting
            && wait.try_recv() != Err(TryRecvError::Empty)
        {
            self.resetting = None;
            self.clear();
        }
    }

    fn clear(&mut self) {
        self.status = Status::default();
        self.acked = 0;
        self.started = false;
        self.stopping.clear();
        let sizes = &self.parts.info.queue_sizes;
        self.queues = sizes
            .iter()
            .map(|max| QueueConfig {
                size: u32::from(*max),
                ..QueueConfig::default()
            })
            .collect();
        self.irq.reset();
    }

    /// Handles a notification that no ioeventfd took. (KVM normally takes them all.)
    pub(super) fn notify(&mut self, queue: u32) {
        if !self.status.live() {
            self.log_guest_error("notification before DRIVER_OK", None);
            return;
        }
        let kick = usize::try_from(queue)
            .ok()
            .and_then(|queue| self.parts.kicks.get(queue));
        match kick {
            Some(kick) => {
                // It fails only when 2^64 - 2 notifications are pending.
                let _ = kick.write(1);
            }
            None => self.log_guest_error("notification of an unknown queue", None),
        }
    }

    /// Returns the state of a paused device.
    pub(super) fn save(&mut self) -> SavedTransport {
        self.poll_reset();
        self.poll_stop();
        SavedTransport {
            status: self.status.bits(),
            needs_reset: self.irq.needs_reset(),
            features: self.acked,
            queues: self.queues.clone(),
        }
    }

    /// Restores a state, which is not trusted, in a device that no driver has touched. Queues whose
    /// positions in the rings are in `running` continue from there.
    ///
    /// # Errors
    /// If the state cannot be one of this device. Then nothing has changed.
    pub(super) fn restore(
        &mut self,
        saved: &SavedTransport,
        running: &[(u16, QueueState)],
    ) -> Result<(), RestoreError> {
        let invalid = |what| Err(RestoreError::Invalid { what });
        let Some(status) = Status::from_bits(saved.status) else {
            return invalid("a device status that no driver can have set");
        };
        // Before that, a driver may write anything: FEATURES_OK is what is refused.
        let settled = status.live() || status.configuring_queues();
        let unknown = saved.features & !self.offered() != 0;
        if settled && (unknown || saved.features & features::VERSION_1 == 0) {
            return invalid("features that this device does not offer");
        }
        if saved.queues.len() != self.queues.len() {
            return invalid("a number of queues that this device does not have");
        }
        if !running.is_empty() && (!status.live() || status.failed()) {
            return invalid("queues that run without DRIVER_OK, or after FAILED");
        }
        if running.len() > saved.queues.len() {
            return invalid("more running queues than this device has");
        }
        let twice = |(place, (index, _)): (usize, &(u16, QueueState))| {
            running.iter().take(place).any(|(other, _)| other == index)
        };
        if running.iter().enumerate().any(twice) {
            return invalid("a queue that runs twice");
        }
        let mut queues = Vec::with_capacity(running.len());
        for (index, state) in running {
            let at = usize::from(*index);
            let sizes = &self.parts.info.queue_sizes;
            let (Some(config), Some(max), Some(kick)) = (
                saved.queues.get(at).filter(|config| config.ready),
                sizes.get(at),
                self.parts.kicks.get(at),
            ) else {
                return invalid("a running queue that the driver did not enable");
            };
            let resources = QueueResources {
                mem: self.parts.mem.clone(),
                irq: self.irq.clone(),
                kick: kick.clone(),
                event_idx: saved.features & features::EVENT_IDX != 0,
                indirect_desc: saved.features & features::INDIRECT_DESC != 0,
                state: *state,
                writes: self.parts.writes.clone(),
            };
            match Queue::new(*index, *max, config, resources) {
                Ok(queue) => queues.push(queue),
                Err(_) => return invalid("a running queue outside guest memory"),
            }
        }
        self.status = status;
        self.acked = saved.features;
        self.queues.clone_from(&saved.queues);
        if saved.needs_reset {
            self.irq.restore_needs_reset();
        }
        if status.live() {
            self.started = true;
            let acked = self.acked;
            self.parts
                .link
                .send(Box::new(move |worker| worker.start(acked, queues)));
        }
        Ok(())
    }

    pub(super) fn log_guest_error(&mut self, what: &'static str, offset: Option<u64>) {
        if let Some(suppressed) = self.log.permit() {
            let device = self.parts.info.device_type.name();
            tracing::warn!(device, offset, suppressed, "driver: {what}");
        }
    }
}

#[cfg(test)]
impl TransportCore {
    pub(super) fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Whether the driver has made no error that was, or would have been, logged.
    pub(super) fn has_logged_nothing(&self) -> bool {
        self.log.is_unused()
    }
}
