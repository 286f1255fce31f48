//! The balloon device and its queues.

use std::fmt;
use std::sync::Arc;

use vm_memory::{GuestAddress, GuestMemory};

use super::stats::{BalloonStats, ENTRY_LEN};
use crate::GuestRam;
use crate::virtio::{
    Chain, ConfigSpace, Count, Counter, DeviceInfo, DeviceType, Fault, Progress, Queue, Queues,
    ReadCounters, RestoreError, SavedDevice, StartError, VirtioDevice, release,
};

/// Queue numbers (§5.5.2). The queues after the statistics report free pages: Linux numbers that
/// queue 4 since 6.11, as the specification does, and 3 before.
const INFLATE: u16 = 0;
const DEFLATE: u16 = 1;
const STATS: u16 = 2;
const REPORTS: u16 = 3;
const QUEUES: usize = 5;
const QUEUE_SIZE: u16 = 128;

/// `VIRTIO_BALLOON_F_STATS_VQ`, `_DEFLATE_ON_OOM`, `_REPORTING` (§5.5.3).
const F_STATS_VQ: u64 = 1 << 1;
const F_DEFLATE_ON_OOM: u64 = 1 << 2;
const F_REPORTING: u64 = 1 << 5;

/// The balloon's page size, independent of the guest's.
const PAGE: u64 = 4096;

/// The maximum number of pages that a driver may report in one chain; Linux reports 256.
pub const MAX_PAGES: usize = 16 << 10;

/// Pages that are read per step.
const PIECE: usize = 1024;

/// Bytes before the event loop gets control back. A page of the balloon counts as [`PAGE_COST`] of
/// them; the cost of reported memory is its length divided by [`REPORT_COST`], so that a turn
/// releases 16 MiB.
const BUDGET: usize = 256 << 10;
const PAGE_COST: usize = 256;
const REPORT_COST: usize = 64;

/// The maximum number of pending requests for statistics; the oldest one is dropped.
const MAX_WAITING: usize = 16;

/// Offsets in `struct virtio_balloon_config` (§5.5.4): the pages that the owner wants the balloon
/// to have, and those that it has.
const TARGET: usize = 0;
const ACTUAL: usize = 4;
const CONFIG_LEN: usize = 16;

type Reply = Box<dyn FnOnce(BalloonStats) + Send>;

/// A virtio memory balloon.
pub struct BalloonDevice {
    queues: Queues,
    /// The chain of the driver's last statistics, which is returned to request new ones.
    stats: Option<Chain>,
    /// Reports that are partly released, of each of the two queues.
    reports: [Option<Report>; 2],
    /// Callers that wait for the next statistics.
    waiting: Vec<Reply>,
    config: Arc<ConfigSpace>,
    counters: Arc<Counters>,
}

/// A report of free memory, of which the first `done` bytes are released.
#[derive(Debug)]
struct Report {
    chain: Chain,
    done: usize,
}

#[derive(Debug, Default)]
struct Counters {
    inflated: Count,
    deflated: Count,
    reported: Count,
    ignored: Count,
}

impl ReadCounters for Counters {
    fn read(&self) -> Vec<Counter> {
        vec![
            self.inflated.named("inflated_bytes"),
            self.deflated.named("deflated_bytes"),
            self.reported.named("reported_bytes"),
            self.ignored.named("ignored_bytes"),
        ]
    }
}

impl fmt::Debug for BalloonDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BalloonDevice")
            .field("queues", &self.queues)
            .field("stats", &self.stats)
            .field("reports", &self.reports)
            .field("waiting", &self.waiting.len())
            .field("config", &self.config)
            .field("counters", &self.counters)
            .finish()
    }
}

impl Default for BalloonDevice {
    fn default() -> Self {
        Self::new()
    }
}

impl BalloonDevice {
    /// Creates an empty balloon.
    #[must_use]
    pub fn new() -> Self {
        let config = ConfigSpace::new([0; CONFIG_LEN]).writable(ACTUAL..ACTUAL + 4);
        Self {
            queues: Queues::new(QUEUES),
            stats: None,
            reports: [None, None],
            waiting: Vec::new(),
            config: Arc::new(config),
            counters: Arc::default(),
        }
    }

    /// Asks the driver to give up `bytes` of its guest's memory in total, rounded down to 4 KiB. It
    /// does so as far as its guest can.
    pub fn set_target(&mut self, bytes: u64) {
        let pages = u32::try_from(bytes / PAGE).unwrap_or(u32::MAX);
        self.config.update(TARGET, &pages.to_le_bytes());
    }

    /// Bytes that the driver reports to have given up.
    #[must_use]
    pub fn actual(&self) -> u64 {
        self.number(ACTUAL).saturating_mul(PAGE)
    }

    /// Asks the driver for memory statistics of its guest. `reply` is called when the driver has
    /// sent them; it is dropped if the driver is reset before that, or if 16 more requests follow.
    /// Returns `false` if there is no driver that supports statistics.
    ///
    /// # Errors
    /// If the queue is not usable.
    pub fn request_stats(
        &mut self,
        reply: impl FnOnce(BalloonStats) + Send + 'static,
    ) -> Result<bool, Fault> {
        if self.queue(STATS).is_none() {
            return Ok(false);
        }
        if self.waiting.len() >= MAX_WAITING {
            drop(self.waiting.remove(0));
        }
        self.waiting.push(Box::new(reply));
        if let (Some(chain), Some(queue)) = (self.stats.take(), self.queue(STATS)) {
            queue.complete(chain, 0)?;
            queue.notify()?;
        }
        Ok(true)
    }

    fn queue(&mut self, index: u16) -> Option<&mut Queue> {
        self.queues.get(index)
    }

    fn number(&self, offset: usize) -> u64 {
        let mut bytes = [0; 4];
        self.config.read(offset as u64, &mut bytes);
        u64::from(u32::from_le_bytes(bytes))
    }

    /// Serves pages that the driver gives up, or takes back.
    fn serve_pages(&mut self, index: u16) -> Result<Progress, Fault> {
        let counters = self.counters.clone();
        let Some(queue) = self.queue(index) else {
            return Ok(Progress::Idle);
        };
        queue.serve(BUDGET, |queue, chain| {
            let pages = chain.readable_len() / 4;
            if pages > MAX_PAGES {
                return Err(Fault::protocol(
                    "a balloon's chain that names too many pages",
                ));
            }
            if index == INFLATE {
                inflate(queue, &chain, pages, &counters)?;
            } else {
                // The driver uses them again: the host allocates pages when they are touched.
                counters.deflated.add((pages as u64).saturating_mul(PAGE));
            }
            queue.complete(chain, 0)?;
            Ok(pages.saturating_mul(PAGE_COST))
        })
    }

    /// Serves reports of free memory, which is the memory of the chain's buffers (§5.5.6.7). A
    /// long one takes several turns; it is the only one of its queue meanwhile.
    fn serve_reports(&mut self, index: u16) -> Result<Progress, Fault> {
        let counters = &self.counters;
        let partial = place(&mut self.reports, index);
        let (Some(queue), Some(partial)) = (self.queues.get(index), partial) else {
            return Ok(Progress::Idle);
        };
        let begun = partial.take();
        let mut room = BUDGET.saturating_mul(REPORT_COST);
        let mut go_on = |queue: &mut Queue, report: Report| {
            let before = room;
            *partial = release_report(queue, report, &mut room, counters)?;
            Ok::<_, Fault>(match partial {
                Some(_) => usize::MAX,
                None => before.saturating_sub(room) / REPORT_COST,
            })
        };
        let spent = match begun {
            Some(report) => go_on(queue, report)?,
            None => 0,
        };
        let budget = BUDGET.saturating_sub(spent);
        queue.serve(budget, |queue, chain| {
            go_on(queue, Report { chain, done: 0 })
        })
    }

    /// Receives statistics. The newest chain is kept until new ones are requested (§5.5.6.3).
    fn serve_stats(&mut self) -> Result<Progress, Fault> {
        let mut kept = self.stats.take();
        let mut newest = None;
        let Some(queue) = self.queue(STATS) else {
            return Ok(Progress::Idle);
        };
        let progress = queue.serve(BUDGET, |queue, chain| {
            newest = Some(read_stats(queue.memory(), &chain)?);
            // A driver has only one; if it sends several, the others are returned.
            if let Some(older) = kept.replace(chain) {
                queue.complete(older, 0)?;
            }
            Ok(0)
        });
        self.stats = kept;
        if let Some(stats) = newest {
            for reply in self.waiting.drain(..) {
                reply(stats);
            }
        }
        progress
    }
}

/// Where a queue's report is kept that is partly released; `None` for queues without reports.
fn place(reports: &mut [Option<Report>; 2], index: u16) -> Option<&mut Option<Report>> {
    reports.get_mut(usize::from(index.checked_sub(REPORTS)?))
}

/// Gives up to `room` bytes of a report's memory back to the host. Returns the report if there is
/// more of it; otherwise it is completed.
fn release_report(
    queue: &mut Queue,
    report: Report,
    room: &mut usize,
    counters: &Counters,
) -> Result<Option<Report>, Fault> {
    let Report { chain, done } = report;
    let mut slices = Vec::new();
    let len = chain.writable_len().saturating_sub(done).min(*room);
    chain.writable_slices(queue.memory(), done, len, &mut slices)?;
    for slice in &slices {
        let released = release(slice).unwrap_or(0);
        counters.reported.add(released as u64);
        let ignored = slice.len().saturating_sub(released);
        counters.ignored.add(ignored as u64);
    }
    drop(slices);
    *room = room.saturating_sub(len);
    let done = done.saturating_add(len);
    if done < chain.writable_len() {
        return Ok(Some(Report { chain, done }));
    }
    queue.complete(chain, 0)?;
    Ok(None)
}

/// Gives the pages that the driver reports back to the host.
fn inflate(queue: &Queue, chain: &Chain, pages: usize, counters: &Counters) -> Result<(), Fault> {
    let mut bytes = [0; 4 * PIECE];
    let mut done = 0usize;
    while done < pages {
        let count = pages.saturating_sub(done).min(PIECE);
        let Some(piece) = bytes.get_mut(..count.saturating_mul(4)) else {
            break;
        };
        chain.read(queue.memory(), done.saturating_mul(4), piece)?;
        done = done.saturating_add(count);
        let (numbers, _) = piece.as_chunks::<4>();
        let mut numbers: Vec<u32> = numbers.iter().map(|n| u32::from_le_bytes(*n)).collect();
        // Adjacent pages are released with one call.
        numbers.sort_unstable();
        for run in numbers.chunk_by(|a, b| b.saturating_sub(*a) <= 1) {
            release_run(queue.ram(), run, counters);
        }
    }
    Ok(())
}

/// Releases adjacent pages, which are sorted and may contain duplicates.
fn release_run(mem: &GuestRam, run: &[u32], counters: &Counters) {
    let (Some(first), Some(last)) = (run.first(), run.last()) else {
        return;
    };
    let start = GuestAddress(u64::from(*first).saturating_mul(PAGE));
    let count = u64::from(last.saturating_sub(*first)).saturating_add(1);
    let len = count.saturating_mul(PAGE);
    let mut released = 0u64;
    // The range may continue in another region.
    for slice in mem.get_slices(start, usize::try_from(len).unwrap_or(usize::MAX)) {
        let Ok(slice) = slice else {
            break;
        };
        released = released.saturating_add(release(&slice).unwrap_or(0) as u64);
    }
    counters.inflated.add(released);
    counters.ignored.add(len.saturating_sub(released));
}

fn read_stats(mem: &GuestRam, chain: &Chain) -> Result<BalloonStats, Fault> {
    let mut stats = BalloonStats::default();
    let mut bytes = [0; 64 * ENTRY_LEN];
    let len = chain.readable_len().min(bytes.len());
    let bytes = bytes.get_mut(..len).unwrap_or(&mut []);
    chain.read(mem, 0, bytes)?;
    let (entries, _) = bytes.as_chunks::<ENTRY_LEN>();
    entries.iter().for_each(|entry| stats.entry(*entry));
    Ok(stats)
}

impl VirtioDevice for BalloonDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            device_type: DeviceType::Balloon,
            queue_sizes: vec![QUEUE_SIZE; QUEUES],
            features: F_STATS_VQ | F_DEFLATE_ON_OOM | F_REPORTING,
            config: self.config.clone(),
            counters: self.counters.clone(),
        }
    }

    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        self.queues.start(queue)
    }

    fn stop_queue(&mut self, index: u16) -> Option<Queue> {
        let mut queue = self.queues.stop(index)?;
        if index == STATS
            && let Some(chain) = self.stats.take()
        {
            queue.undo_pop(chain);
        }
        if let Some(report) = place(&mut self.reports, index).and_then(Option::take) {
            // It begins anew when the queue runs again, here or in a clone.
            queue.undo_pop(report.chain);
        }
        Some(queue)
    }

    fn reset(&mut self) {
        // A driver that starts again has all its guest's memory.
        self.config.update(ACTUAL, &[0; 4]);
        self.waiting.clear();
    }

    fn on_queue(&mut self, index: u16) -> Result<Progress, Fault> {
        match index {
            INFLATE | DEFLATE => self.serve_pages(index),
            STATS => self.serve_stats(),
            _ => self.serve_reports(index),
        }
    }

    fn save(&self) -> SavedDevice {
        let mut bytes = vec![0; 4];
        self.config.read(TARGET as u64, &mut bytes);
        SavedDevice { version: 1, bytes }
    }

    fn restore(&mut self, saved: &SavedDevice) -> Result<(), RestoreError> {
        let target =
            <[u8; 4]>::try_from(saved.of_version(1)?).map_err(|_| RestoreError::Invalid {
                what: "a balloon's target is four bytes",
            })?;
        self.config.update(TARGET, &target);
        Ok(())
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
