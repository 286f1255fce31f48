//! An engine and the queues that it serves: all of a device, or a single one.

use std::os::fd::BorrowedFd;

use super::engine::Engine;
use super::flight::CHUNK_SIZE;
use crate::virtio::{Fault, Progress, Queue, QueueServer, Queues, StartError};

/// Bytes until the event loop gets control back, and the driver its interrupt.
const BUDGET: usize = CHUNK_SIZE;

/// The part of a device that one thread serves.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) engine: Engine,
    queues: Queues,
    /// Chains are waiting in a queue until the engine has room for them. Their driver will not
    /// notify again.
    waiting: bool,
}

impl Server {
    /// Creates a server with slots for this number of queues.
    pub(super) fn new(engine: Engine, queues: usize) -> Self {
        Self {
            engine,
            queues: Queues::new(queues),
            waiting: false,
        }
    }

    /// Sets the number of slots for queues; all are empty.
    pub(super) fn set_places(&mut self, queues: usize) {
        self.queues = Queues::new(queues);
    }

    /// Leaves nothing in flight, for a change of the disk.
    pub(super) fn drain(&mut self) {
        for index in 0..self.queue_count() {
            self.engine.drain(&mut self.queues, index);
        }
        // A request that was put back is in the ring again: it must not be forgotten.
        self.kick_all();
    }

    fn kick_all(&mut self) {
        for queue in self.queues.running() {
            // It fails only when 2^64 - 2 notifications are pending.
            let _ = queue.kick().write(1);
        }
    }

    /// Whether there is room again for chains that waited for it.
    fn may_go_on(&self) -> bool {
        self.waiting && !self.engine.is_full()
    }

    fn serve_all(&mut self) -> Result<Progress, Fault> {
        self.waiting = false;
        let mut progress = Progress::Idle;
        for index in 0..self.queue_count() {
            if self.serve(index, BUDGET)? == Progress::More {
                self.waiting = true;
                progress = Progress::More;
            }
        }
        Ok(progress)
    }

    /// Starts the requests of a queue that runs, within `budget`, the turn's time and the disk's
    /// rates: at least one, so that each queue gets on.
    fn serve(&mut self, index: u16, budget: usize) -> Result<Progress, Fault> {
        let engine = &mut self.engine;
        let Some(queue) = self.queues.get(index) else {
            return Ok(Progress::Idle);
        };
        if engine.is_held() {
            return Ok(Progress::Idle);
        }
        if engine.is_full() {
            self.waiting = true;
            return Ok(Progress::Idle);
        }
        let progress = queue.serve(budget, |queue, chain| engine.begin(queue, chain))?;
        if engine.is_held() {
            // The timer will resume it.
            return Ok(Progress::Idle);
        }
        if engine.is_full() {
            // The disk's completions will resume it.
            self.waiting = true;
            return Ok(Progress::Idle);
        }
        Ok(progress)
    }

    fn unless_behind(&self, progress: Progress) -> Progress {
        match self.engine.is_behind() || self.may_go_on() {
            true => Progress::More,
            false => progress,
        }
    }

    fn queue_count(&self) -> u16 {
        // At most MAX_QUEUES.
        u16::try_from(self.queues.len()).unwrap_or(1)
    }
}

impl QueueServer for Server {
    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        self.queues.start(queue)
    }

    fn stop_queue(&mut self, index: u16) -> Option<Queue> {
        self.queues.get(index)?;
        self.engine.drain(&mut self.queues, index);
        let stopped = self.queues.stop(index);
        if self.waiting || self.engine.is_behind() {
            // The disk may not report any more completions that would make the others continue.
            self.kick_all();
        }
        stopped
    }

    fn queue(&mut self, index: u16) -> Option<&Queue> {
        self.queues.get(index).map(|queue| &*queue)
    }

    fn is_quiet(&self) -> bool {
        self.engine.is_quiet()
    }

    fn backend(&self) -> Option<BorrowedFd<'_>> {
        self.engine.backend()
    }

    fn on_queue(&mut self, index: u16) -> Result<Progress, Fault> {
        self.engine.begin_turn();
        let spent = self.engine.resume(&mut self.queues, BUDGET)?;
        let progress = match BUDGET.checked_sub(spent) {
            None | Some(0) => Progress::More,
            Some(_) if self.may_go_on() => self.serve_all()?,
            Some(rest) => self.serve(index, rest)?,
        };
        self.engine.commit(&mut self.queues)?;
        Ok(self.unless_behind(progress))
    }

    fn on_backend(&mut self) -> Result<Progress, Fault> {
        self.engine.begin_turn();
        self.engine.take_completions(&mut self.queues)?;
        self.engine.resume(&mut self.queues, BUDGET)?;
        let progress = match self.engine.may_go_on() || self.may_go_on() {
            true => self.serve_all()?,
            false => Progress::Idle,
        };
        self.engine.commit(&mut self.queues)?;
        Ok(self.unless_behind(progress))
    }
}
