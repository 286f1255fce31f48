//! Requests in progress: each is carried out in pieces, so that none blocks the device's event loop
//! for longer than one piece takes.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::counters::Counters;
use super::disk::{self, Completion, Disk, EmptySlot, Operation, Submitted, Topology};
use super::flight::{CHUNK_SIZE, FLUSH_COST, Flight, InFlight, MAX_QUEUES};
use super::request::{ID_LEN, Request, Status, WRITE_DATA};
use super::throttle::Throttle;
use crate::GuestRam;
use crate::virtio::{Chain, Fault, MAX_TURN, Queue, Queues, RateLimit, SpareList};

/// A new request is started only while the started ones have fewer bytes than this left to do. A
/// stop has to wait for all of them: only the request that was taken last can be put back.
pub(super) const MAX_UNFINISHED: usize = 16 * CHUNK_SIZE;

/// The state of a request after one of its pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// It is completed.
    Over,
    /// It waits for its next piece.
    Piece,
    /// The disk starts to make it durable at its next commit.
    Queued,
}

/// A disk and its requests in progress.
#[derive(Debug)]
pub(super) struct Engine {
    disk: Box<dyn Disk>,
    pub(super) sectors: u64,
    pub(super) read_only: bool,
    pub(super) id: [u8; ID_LEN],
    /// Requests are completed only once their changes are durable: the driver does not flush.
    pub(super) write_through: bool,
    /// The rates at which requests are started.
    pace: Option<Throttle>,
    /// Requests that the disk is working on.
    in_flight: InFlight,
    /// Requests whose next piece was not submitted yet.
    partial: VecDeque<Flight>,
    /// The sum of [`Flight::left`] of all started requests.
    left: usize,
    /// There are requests in flight that cannot be waited for.
    lost: bool,
    /// The chain that was taken last from each queue, the only one that can be put back.
    last_taken: [Option<u16>; MAX_QUEUES],
    /// When the clock was read first and last in this turn: requests are timed anyway.
    turn: Option<(Instant, Instant)>,
    scratch: SpareList,
    pub(super) counters: Arc<Counters>,
    log: RateLimit,
}

impl Engine {
    pub(super) fn new(disk: Box<dyn Disk>) -> Self {
        let sectors = disk::sectors(&*disk);
        Self {
            disk,
            sectors,
            read_only: false,
            id: [0; ID_LEN],
            write_through: false,
            pace: None,
            in_flight: InFlight::default(),
            partial: VecDeque::new(),
            left: 0,
            lost: false,
            last_taken: [None; MAX_QUEUES],
            turn: None,
            scratch: SpareList::default(),
            counters: Arc::default(),
            log: RateLimit::new(Duration::from_secs(10)),
        }
    }

    /// Creates an engine for another queue of the same device.
    pub(super) fn try_clone(&self, disk: Box<dyn Disk>) -> io::Result<Self> {
        let mut engine = Self::new(disk);
        engine.read_only = self.read_only;
        engine.id = self.id;
        engine.write_through = self.write_through;
        engine.counters = self.counters.clone();
        if let Some(pace) = &self.pace {
            engine.keep(pace.try_clone()?)?;
        }
        Ok(engine)
    }

    /// The blocks of the disk.
    pub(super) fn topology(&self) -> Topology {
        self.disk.topology()
    }

    pub(super) fn disk(&self) -> &dyn Disk {
        &*self.disk
    }

    /// Returns the disk for requests that are done at once.
    pub(super) fn disk_mut(&mut self) -> &mut dyn Disk {
        &mut *self.disk
    }

    /// Reads the disk's size again.
    pub(super) fn refresh(&mut self) -> io::Result<()> {
        self.disk.refresh()?;
        self.sectors = disk::sectors(&*self.disk);
        Ok(())
    }

    /// Replaces the disk, which has nothing in flight.
    pub(super) fn set_disk(&mut self, disk: Box<dyn Disk>) {
        self.sectors = disk::sectors(&*disk);
        self.lost = false;
        let old = std::mem::replace(&mut self.disk, disk);
        if let Some(pace) = &self.pace {
            pace.forget(old.fd());
            if let Err(error) = pace.watch(self.disk.fd()) {
                tracing::error!(%error, "disk: failed to watch for completions");
            }
        }
    }

    /// Takes the disk to put it into another one.
    pub(super) fn take_disk(&mut self) -> Box<dyn Disk> {
        std::mem::replace(&mut self.disk, Box::new(EmptySlot))
    }

    /// Whether nothing is in flight while all queues are stopped.
    pub(super) fn is_quiet(&self) -> bool {
        !self.lost
    }

    /// Limits the rate at which requests are started from now on.
    pub(super) fn keep(&mut self, pace: Throttle) -> io::Result<()> {
        pace.watch(self.disk.fd())?;
        self.pace = Some(pace);
        Ok(())
    }

    /// The descriptor that the event loop waits for.
    pub(super) fn backend(&self) -> Option<BorrowedFd<'_>> {
        match &self.pace {
            Some(pace) => Some(pace.backend()),
            None => self.disk.fd(),
        }
    }

    /// Whether no request may be started now, because of the rate limit. [`Self::may_go_on`]
    /// reports when it may.
    pub(super) fn is_held(&mut self) -> bool {
        let held = self.pace.as_mut().is_some_and(Throttle::is_over);
        if held {
            self.counters.limited.one();
        }
        held
    }

    /// Whether requests that were held back may be started now.
    pub(super) fn may_go_on(&self) -> bool {
        self.pace.as_ref().is_some_and(Throttle::expired)
    }

    /// Whether no other request may be started before some of the started ones are done.
    pub(super) fn is_full(&self) -> bool {
        self.left >= MAX_UNFINISHED
    }

    /// Begins a turn, which also ends by time.
    pub(super) fn begin_turn(&mut self) {
        self.turn = None;
    }

    fn note_time(&mut self, now: Instant) {
        let first = self.turn.map_or(now, |(first, _)| first);
        self.turn = Some((first, now));
    }

    /// Whether the turn has taken long enough.
    fn is_late(&self) -> bool {
        let taken = self.turn.map(|(first, last)| last.duration_since(first));
        taken.is_some_and(|taken| taken >= MAX_TURN)
    }

    /// Starts the request of a chain. Returns its cost: the rest of any budget if the next request
    /// has to wait.
    pub(super) fn begin(&mut self, queue: &mut Queue, chain: Chain) -> Result<usize, Fault> {
        let request = Request::parse(&chain, queue.memory(), self.sectors, self.read_only)?;
        if let Some(last) = self.last_taken.get_mut(usize::from(queue.index())) {
            *last = Some(chain.head());
        }
        let since = Instant::now();
        self.note_time(since);
        self.counters.begun.one();
        let flight = Flight {
            queue: queue.index(),
            chain,
            request,
            since,
            done: 0,
            piece: 0,
            flushing: false,
        };
        if let Some(pace) = &mut self.pace {
            pace.charge(flight.rated());
        }
        self.left = self.left.saturating_add(flight.left());
        let cost = self.advance(queue, flight)?;
        let must_wait = self.pace.as_mut().is_some_and(Throttle::is_over)
            || self.is_full()
            || (self.is_late() && queue.available()? > 0);
        Ok(match must_wait {
            true => usize::MAX,
            false => cost,
        })
    }

    /// Continues requests that are partly done, within `budget` and the turn's time. Returns the
    /// cost: `budget` or more if some are left.
    pub(super) fn resume(&mut self, queues: &mut Queues, budget: usize) -> Result<usize, Fault> {
        let mut spent = 0usize;
        while spent < budget {
            let Some(flight) = self.partial.pop_front() else {
                return Ok(spent);
            };
            let Some(queue) = queues.get(flight.queue) else {
                continue;
            };
            spent = spent.saturating_add(self.advance(queue, flight)?);
            if self.is_late() && self.is_behind() {
                return Ok(usize::MAX);
            }
        }
        Ok(spent)
    }

    /// Submits the next piece, and finishes the request if it was the last one and the disk
    /// completes it immediately. Returns the cost: the rest of any budget if more pieces follow.
    fn advance(&mut self, queue: &mut Queue, mut flight: Flight) -> Result<usize, Fault> {
        let cost = match flight.request {
            Request::GetId { len } => {
                let id = self.id.get(..len).unwrap_or(&self.id);
                flight.chain.write(queue.memory(), 0, id)?;
                self.finish(queue, flight, Status::Ok)?;
                return Ok(0);
            }
            Request::Refuse(status) => {
                self.finish(queue, flight, status)?;
                return Ok(0);
            }
            _ if self.lost => {
                self.finish(queue, flight, Status::IoError)?;
                return Ok(0);
            }
            Request::Flush | Request::Discard { .. } | Request::WriteZeroes { .. } => FLUSH_COST,
            _ => flight.len().saturating_sub(flight.done).min(CHUNK_SIZE),
        };
        flight.piece = cost;
        let flush = match self.write_through && flight.changes() {
            true => FLUSH_COST,
            false => 0,
        };
        let cost = cost.saturating_add(flush);
        match self.submit(queue.memory(), &flight)? {
            Submitted::Done(result) => Ok(match self.complete_piece(queue, flight, &result)? {
                Next::Piece => usize::MAX,
                Next::Over | Next::Queued => cost,
            }),
            Submitted::Queued => {
                self.in_flight.insert(flight);
                Ok(cost)
            }
        }
    }

    fn submit(&mut self, mem: &GuestRam, flight: &Flight) -> Result<Submitted, Fault> {
        let mut slices = self.scratch.take();
        let Flight {
            chain, done, piece, ..
        } = flight;
        let operation = match flight.request {
            Request::Read { offset, .. } => {
                chain.writable_slices(mem, *done, *piece, &mut slices)?;
                Operation::Read {
                    offset: offset.saturating_add(*done as u64),
                    slices: &slices,
                }
            }
            Request::Write { offset, .. } => {
                let start = WRITE_DATA.saturating_add(*done);
                chain.readable_slices(mem, start, *piece, &mut slices)?;
                Operation::Write {
                    offset: offset.saturating_add(*done as u64),
                    slices: &slices,
                }
            }
            Request::Discard { offset, len } => Operation::Discard { offset, len },
            Request::WriteZeroes { offset, len, unmap } => {
                Operation::WriteZeroes { offset, len, unmap }
            }
            _ => Operation::Flush,
        };
        let submitted = self.disk.submit(mem, flight.token(), operation);
        self.scratch.put_back(slices);
        Ok(submitted)
    }

    /// Handles the completion of a piece, or of the flush that makes the request durable.
    fn complete_piece(
        &mut self,
        queue: &mut Queue,
        mut flight: Flight,
        result: &io::Result<()>,
    ) -> Result<Next, Fault> {
        if let Err(error) = result {
            if is_unsupported(error) && !flight.flushing {
                self.finish(queue, flight, Status::Unsupported)?;
                return Ok(Next::Over);
            }
            if let Some(suppressed) = self.log.permit() {
                tracing::warn!(request = ?flight.request, %error, suppressed, "disk: request failed");
            }
            self.finish(queue, flight, Status::IoError)?;
            return Ok(Next::Over);
        }
        let left = flight.left();
        flight.done = flight.done.saturating_add(flight.piece);
        let now_done = left.saturating_sub(flight.left());
        self.left = self.left.saturating_sub(now_done);
        if flight.done < flight.len() {
            self.partial.push_back(flight);
            return Ok(Next::Piece);
        }
        if self.write_through && flight.changes() && !flight.flushing {
            return self.make_durable(queue, flight);
        }
        self.finish(queue, flight, Status::Ok)?;
        Ok(Next::Over)
    }

    /// Flushes what a request changed, before it is completed to its driver.
    fn make_durable(&mut self, queue: &mut Queue, mut flight: Flight) -> Result<Next, Fault> {
        flight.flushing = true;
        flight.piece = 0;
        let (mem, token) = (queue.memory(), flight.token());
        match self.disk.submit(mem, token, Operation::Flush) {
            Submitted::Done(result) => self.complete_piece(queue, flight, &result),
            Submitted::Queued => {
                self.in_flight.insert(flight);
                Ok(Next::Queued)
            }
        }
    }

    fn finish(&mut self, queue: &mut Queue, flight: Flight, status: Status) -> Result<(), Fault> {
        self.left = self.left.saturating_sub(flight.left());
        let now = Instant::now();
        self.note_time(now);
        let counters = &self.counters;
        counters.latency.add(now.duration_since(flight.since));
        let mut written = 0usize;
        if status == Status::Ok {
            match flight.request {
                Request::Read { len, .. } => {
                    counters.reads.one();
                    counters.read_bytes.add(len as u64);
                    written = len;
                }
                Request::Write { len, .. } => {
                    counters.writes.one();
                    counters.write_bytes.add(len as u64);
                }
                Request::Flush => counters.flushes.one(),
                Request::Discard { len, .. } => {
                    counters.discards.one();
                    counters.discard_bytes.add(len);
                }
                Request::WriteZeroes { len, .. } => counters.zeroed_bytes.add(len),
                Request::GetId { len } => written = len,
                Request::Refuse(_) => {}
            }
        } else {
            counters.errors.one();
        }
        let chain = flight.chain;
        // The status is the last writable byte, wherever the data ends.
        let status_at = chain.writable_len().saturating_sub(1);
        chain.write(queue.memory(), status_at, &[status as u8])?;
        // §2.7.8.2: the status counts as written only if all bytes before it were written.
        let gap = usize::from(written != status_at);
        let written = written.saturating_add(1).saturating_sub(gap);
        let written = u32::try_from(written).unwrap_or(u32::MAX);
        queue.complete(chain, written)?;
        Ok(())
    }

    /// Submits the collected requests to the disk, and takes its completions. Drivers are
    /// interrupted.
    pub(super) fn commit(&mut self, queues: &mut Queues) -> Result<(), Fault> {
        self.start()?;
        self.take_completions(queues)?;
        for queue in queues.running() {
            queue.notify()?;
        }
        Ok(())
    }

    fn start(&mut self) -> Result<(), Fault> {
        let started = self.disk.commit();
        started.map_err(|error| Fault::host("failed to submit disk requests", error))
    }

    /// Whether requests are waiting for their next piece.
    pub(super) fn is_behind(&self) -> bool {
        !self.partial.is_empty()
    }

    /// Takes the disk's completions.
    pub(super) fn take_completions(&mut self, queues: &mut Queues) -> Result<(), Fault> {
        loop {
            let mut queued = false;
            while let Some(Completion { token, result }) = self.disk.completed() {
                if let Some(flight) = self.in_flight.remove(token)
                    && let Some(queue) = queues.get(flight.queue)
                {
                    queued |= self.complete_piece(queue, flight, &result)? == Next::Queued;
                }
            }
            if !queued {
                return Ok(());
            }
            self.start()?;
        }
    }

    /// Waits for the requests of a queue that the disk is working on.
    fn wait_for(&mut self, queues: &mut Queues, index: u16) {
        loop {
            let before = self.in_flight.of_queue(index);
            if before == 0 {
                return;
            }
            let waited = self.disk.commit().and_then(|()| self.disk.wait());
            if self.take_completions(queues).is_err() {
                // The others are still waited for.
                self.log_lost();
            }
            if let Err(error) = waited
                && self.in_flight.of_queue(index) == before
            {
                let lost = self.in_flight.len();
                tracing::error!(%error, lost, "disk: requests in flight cannot be waited for");
                self.in_flight.clear();
                self.lost = true;
            }
        }
    }

    /// Leaves nothing of a queue in flight: waits for the disk, completes started requests, and
    /// puts back the one that was taken last if it is unfinished, as if it had not been taken.
    pub(super) fn drain(&mut self, queues: &mut Queues, index: u16) {
        loop {
            self.wait_for(queues, index);
            let first = self.partial.iter().position(|flight| flight.queue == index);
            let Some(flight) = first.and_then(|first| self.partial.remove(first)) else {
                break;
            };
            let Some(queue) = queues.get(flight.queue) else {
                continue;
            };
            let last = self.last_taken.get(usize::from(index)).copied().flatten();
            if last == Some(flight.chain.head()) {
                self.left = self.left.saturating_sub(flight.left());
                if let Some(pace) = &mut self.pace {
                    pace.refund(flight.rated());
                }
                queue.undo_pop(flight.chain);
            } else if self.advance(queue, flight).is_err() {
                self.log_lost();
            }
        }
        if self.in_flight.len() == 0 && self.partial.is_empty() {
            // Requests that were dropped by a fault are gone, too.
            self.left = 0;
        }
        if let Err(error) = self.disk.settle()
            && let Some(suppressed) = self.log.permit()
        {
            tracing::error!(
                %error,
                suppressed,
                "disk: failed to write metadata; recent writes are only in memory"
            );
        }
        // The driver is notified of completions when the queue runs again, or it has reset the
        // queue.
        if let Some(queue) = queues.get(index) {
            let _ = queue.notify();
        }
    }

    fn log_lost(&mut self) {
        if let Some(suppressed) = self.log.permit() {
            tracing::warn!(suppressed, "disk: a request was lost while stopping");
        }
    }
}

/// Whether the host does not support the operation for this disk.
fn is_unsupported(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported || error.raw_os_error() == Some(libc::EOPNOTSUPP)
}
