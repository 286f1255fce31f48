//! Moves a running VM to another host.
//!
//! | state | here | there | if anything fails |
//! | --- | --- | --- | --- |
//! | announced | runs | knows what is to come | the VM runs on here |
//! | rounds | runs, its writes are logged | receives memory | the same |
//! | paused | stands still | receives the rest, builds the VM | it is resumed here |
//! | given away | stands still for ever | starts it | in doubt, if the connection ends: whoever knows what became of the other side resumes or stops the VM |
//! | moved | has ended ([`VmExit::Moved`]) | runs | – |
//!
//! So at most one copy runs: the other side starts it only after it was told that it is given away,
//! and this side, having begun to say so, does not resume it by itself.

use std::io::{self, Read, Write};
use std::ops::{ControlFlow, Range};
use std::sync::MutexGuard;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use podvisor_devices::blk::read_disk;

use super::save::TakeSnapshotError;
use super::throttle::Throttle;
use super::vm::{PAUSE_TIMEOUT, Vm, VmError};
use crate::kvm::KvmError;
use crate::memory::{MemoryError, MemoryLog, PageSet};
use crate::migration::{
    MessageKind, MigrationOptions, MigrationProgress, MigrationReport, MigrationStep, MovingDisk,
    RunningLog, SECTOR, SendEnd, Sender, SourceDisk, Stream, StreamError, Zeroes, encode_disks,
    encode_plugged,
};
use crate::snapshot::{Identity, MachineState, encode_moving};
use crate::vm::control::Outcome;
use crate::vm::devices::handle::{BlockHandle, HandleError, ask};
use crate::vm::exit::VmExit;
use crate::vm::lock::lock;
use crate::vm::state::State;

/// Why a VM did not move. It is as it was before, except after [`Self::InDoubt`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrateError {
    /// The VM neither runs nor is paused.
    #[error(transparent)]
    State(#[from] VmError),
    /// The guest or its owner ended the VM before it was given away.
    #[error("the VM has ended and does not move: {exit}")]
    Ended {
        /// How it ended.
        exit: VmExit,
    },
    /// A device, or KVM, did not return the VM's state.
    #[error(transparent)]
    Save(#[from] TakeSnapshotError),
    /// A device has a server that does not tell what it writes.
    #[error(
        "{device} is served by the host's kernel (vhost), which does not tell what it writes to \
         guest memory: build the VM without vhost to migrate it"
    )]
    Unlogged {
        /// The device.
        device: String,
    },
    /// The kernel does not tell which memory is in use, or memory cannot be read.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// KVM does not log what is written.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The connection failed, or the other side refused.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The guest writes faster than its memory is sent.
    #[error(
        "the guest writes faster than its memory is sent: after {rounds} rounds {left} bytes are \
         left, which take longer than the downtime of {downtime:?} that is allowed; allow more, or \
         force it"
    )]
    Busy {
        /// How many rounds there were.
        rounds: u32,
        /// Bytes that would have to be sent while it is paused.
        left: u64,
        /// What was allowed.
        downtime: Duration,
    },
    /// A disk was not built to be copied.
    #[error("the disk {device} does not move: it was built without a log of its changes")]
    NotCopied {
        /// The device.
        device: String,
    },
    /// A disk cannot be read.
    #[error("failed to read a disk that moves")]
    Disk(#[source] std::io::Error),
    /// A disk's device does not answer.
    #[error(transparent)]
    Device(#[from] HandleError),
    /// The caller cancelled it.
    #[error("the migration was cancelled")]
    Cancelled,
    /// The connection ended while the VM was given away. It is paused here, and may run there:
    /// resume it only when it is certain that it does not.
    #[error("the migration broke off while the VM was given away: it may run on the other side")]
    InDoubt(#[source] StreamError),
}

impl From<SendEnd> for MigrateError {
    fn from(end: SendEnd) -> Self {
        match end {
            SendEnd::Failed(error) => Self::Stream(error),
            SendEnd::Memory(error) => Self::Memory(error),
            SendEnd::Disk(error) => Self::Disk(error),
            SendEnd::Cancelled => Self::Cancelled,
        }
    }
}

/// Rounds before a guest is slowed down.
const UNTHROTTLED_ROUNDS: u32 = 2;

/// Attempts to pause a VM.
const PAUSE_ATTEMPTS: u32 = 5;

/// What is known once a migration has begun.
struct Begun {
    announced: MachineState,
    log: MemoryLog,
    disks: Vec<LoggedDevice>,
    was_running: bool,
    /// For how long the guest stood still, with nothing to send.
    paused: Duration,
}

/// A disk that moves, and the log of what is written to it.
struct LoggedDevice {
    index: u32,
    handle: BlockHandle,
    log: RunningLog,
    moving: MovingDisk,
}

impl SourceDisk for LoggedDevice {
    fn read(&self, range: Range<u64>) -> io::Result<Vec<u8>> {
        let read = self.handle.run(move |device| {
            let len = usize::try_from(range.end - range.start).unwrap_or(0);
            let mut bytes = vec![0; len];
            read_disk(device.disk_mut(), range.start, &mut bytes).map(|()| bytes)
        });
        read.map_err(io::Error::other)?
    }

    fn next_change(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let found = self
            .handle
            .run(move |device| device.disk_mut().next_change(from));
        found.map_err(io::Error::other)?
    }
}

/// What was written since it was sent.
struct Written {
    pages: PageSet,
    /// Of each disk; none before the first round, in which all of it is sent.
    blocks: Vec<Vec<Range<u64>>>,
}

impl Written {
    fn bytes(&self) -> u64 {
        let blocks = self.blocks.iter().flatten();
        let blocks: u64 = blocks.map(|range| range.end - range.start).sum();
        self.pages.bytes() + blocks
    }

    fn merge(&mut self, other: Self) {
        self.pages.merge(&other.pages);
        for (blocks, more) in self.blocks.iter_mut().zip(other.blocks) {
            // What is in both is sent twice.
            blocks.extend(more);
        }
    }
}

impl Begun {
    /// Takes what was written since the last call.
    fn written(&self) -> Result<Written, MigrateError> {
        Ok(Written {
            pages: self.log.take()?,
            blocks: self.disks.iter().map(|disk| disk.log.0.take()).collect(),
        })
    }
}

impl Vm {
    /// Moves this VM over a connection to the [`crate::IncomingMigration`] on its other side: sends
    /// all of its memory while it runs, then what was written since, again and again, until the
    /// rest can be sent within the downtime that `options` allow; then pauses it, sends the rest,
    /// and ends it here ([`VmExit::Moved`]) when it runs there. A VM that is paused arrives paused.
    ///
    /// Directories, the network's addresses, and disks that `options` do not name do not move: the
    /// other side opens the same ones. The connection has time limits of its own for reads and
    /// writes, and is encrypted where others can read it: it has all of the guest's memory.
    ///
    /// `progress` may cancel the migration until the VM was given away
    /// ([`MigrationStep::GivingAway`] is its last chance).
    ///
    /// # Errors
    /// See [`MigrateError`]; the VM goes on here, except after [`MigrateError::InDoubt`].
    pub fn migrate(
        &self,
        connection: impl Read + Write,
        options: &MigrationOptions,
        mut progress: impl FnMut(MigrationProgress) -> ControlFlow<()>,
    ) -> Result<MigrationReport, MigrateError> {
        let began = Instant::now();
        let begun = self.begin_migration(options)?;
        let stream = Stream::begin(connection)?;
        let mut sender = Sender::new(stream, options.bandwidth);
        let moved = self
            .send_while_running(&mut sender, &begun, options, &mut progress)
            .and_then(|(rest, rounds)| {
                let mut step = |step, sent, left| {
                    let round = rounds;
                    progress(MigrationProgress {
                        step,
                        round,
                        sent,
                        left,
                        throttle: 0,
                    })
                };
                let downtime = self.hand_over(&mut sender, &begun, rest, &mut step)?;
                Ok((rounds, downtime))
            });
        let moved = moved.map_err(|error| self.or_ended(error));
        let (rounds, downtime) = moved.inspect_err(|error| {
            if !matches!(
                error,
                MigrateError::InDoubt(_) | MigrateError::Stream(StreamError::Refused(_))
            ) {
                sender.stream.refuse(&error.to_string());
            }
        })?;
        drop(begun);
        self.join();
        Ok(MigrationReport {
            downtime,
            total: began.elapsed(),
            rounds,
            sent: sender.sent,
        })
    }

    /// Returns how the VM has ended, if that is why it does not move.
    fn or_ended(&self, error: MigrateError) -> MigrateError {
        let outcome = match error {
            MigrateError::State(_)
            | MigrateError::Save(_)
            | MigrateError::Device(_)
            | MigrateError::Cancelled => self.control().lock().outcome.clone(),
            _ => None,
        };
        match outcome {
            Some(Outcome::Exit(exit)) => MigrateError::Ended { exit },
            Some(Outcome::Poison(poison)) => VmError::Poisoned(poison).into(),
            None => error,
        }
    }

    /// Looks at the machine, and begins to log what is written. Nothing is in a device's hands in
    /// that moment, since it is paused.
    fn begin_migration(&self, options: &MigrationOptions) -> Result<Begun, MigrateError> {
        let transition = lock(&self.transition);
        let paused_at = Instant::now();
        let pause = self.pause_for(&transition)?;
        let devices = lock(&self.devices).clone();
        for device in devices {
            if !ask(&device.name, &device.link, |worker| {
                worker.device().logs_writes()
            })
            .map_err(TakeSnapshotError::from)?
            {
                let device = device.name.clone();
                return Err(MigrateError::Unlogged { device });
            }
        }
        let announced = self.gather(&transition, Identity::default())?;
        let log = MemoryLog::start(&self.context.machine.vm_fd, &self.context.machine.memory)?;
        let disks = options.disks.iter().zip(0..);
        let disks = disks.map(|(disk, index)| self.log_disk(disk, index));
        let disks = disks.collect::<Result<_, _>>()?;
        let was_running = pause.was_running;
        drop(pause);
        Ok(Begun {
            announced,
            log,
            disks,
            was_running,
            paused: paused_at.elapsed(),
        })
    }

    /// Begins to log what is written to a disk.
    fn log_disk(&self, disk: &MovingDisk, index: u32) -> Result<LoggedDevice, MigrateError> {
        let handle = self.block(&disk.device)?;
        let found = handle.run(|device| {
            let log = device.changes().cloned();
            (log, device.disk_mut().len())
        })?;
        let (Some(log), len) = found else {
            let device = disk.device.clone();
            return Err(MigrateError::NotCopied { device });
        };
        log.start();
        Ok(LoggedDevice {
            index,
            handle,
            log: RunningLog(log),
            moving: MovingDisk {
                len: len - len % SECTOR,
                ..disk.clone()
            },
        })
    }

    /// Announces the VM, and sends its memory until the rest is small enough. Returns the rest, and
    /// the number of rounds.
    fn send_while_running<S: Read + Write>(
        &self,
        sender: &mut Sender<S>,
        begun: &Begun,
        options: &MigrationOptions,
        progress: &mut impl FnMut(MigrationProgress) -> ControlFlow<()>,
    ) -> Result<(Written, u32), MigrateError> {
        let state = encode_moving(&begun.announced);
        let number = begun.was_running.into();
        sender.stream.send(MessageKind::Hello, number, &state)?;
        if !options.plugged.is_empty() {
            let plugged = encode_plugged(&options.plugged);
            sender.stream.send(MessageKind::Plugged, 0, &plugged)?;
        }
        let moving: Vec<_> = begun.disks.iter().map(|disk| disk.moving.clone()).collect();
        let list = encode_disks(&moving);
        sender.stream.send(MessageKind::Disks, 0, &list)?;
        sender.stream.expect(MessageKind::Accept)?;
        let memory = &self.context.machine.memory;
        let mut rest = Written {
            pages: memory.touched()?,
            blocks: Vec::new(),
        };
        let mut zeroes = Zeroes::Skip;
        let (mut round, mut throttle, mut slowed) = (0, Throttle::new(), 0);
        loop {
            let began = Instant::now();
            let mut tell = |sent, left| {
                if self.check_not_ended().is_err() {
                    // Nobody waits for the memory of a guest that has ended.
                    return ControlFlow::Break(());
                }
                progress(MigrationProgress {
                    step: MigrationStep::Sending,
                    round,
                    sent,
                    left,
                    throttle: slowed,
                })
            };
            sender.pages(memory, &rest.pages, zeroes, &mut tell)?;
            let mut bytes = rest.pages.bytes();
            for (at, disk) in begun.disks.iter().enumerate() {
                let (index, len) = (disk.index, disk.moving.len);
                bytes += match rest.blocks.get(at) {
                    Some(ranges) => sender.disk(index, len, disk, ranges, &mut tell)?,
                    None => sender.whole_disk(index, len, disk, &mut tell)?,
                };
            }
            sender.round(round)?;
            let took = began.elapsed();
            rest = begun.written()?;
            zeroes = Zeroes::Send;
            let left = rest.bytes();
            if tell(sender.sent, left).is_break() {
                return Err(MigrateError::Cancelled);
            }
            let time = time_to_send(options.downtime, begun.paused);
            let is_last = round >= options.max_rounds;
            let is_enough = sends_within(left, time, bytes, took)
                && (is_last || !shrinks(left, begun.paused, bytes, took));
            if is_enough || is_last && options.force {
                return Ok((rest, round + 1));
            }
            if is_last {
                return Err(MigrateError::Busy {
                    rounds: round + 1,
                    left,
                    downtime: options.downtime,
                });
            }
            // It does not get less by itself.
            if options.throttle && round >= UNTHROTTLED_ROUNDS && left > bytes / 2 {
                match throttle.more(&self.context) {
                    Ok(percent) => slowed = percent,
                    Err(error) => tracing::warn!(%error, "the guest is not slowed down"),
                }
            }
            round += 1;
        }
    }

    /// Pauses the VM, sends what is left and gives it away. Returns for how long the guest stood
    /// still.
    fn hand_over<S: Read + Write>(
        &self,
        sender: &mut Sender<S>,
        begun: &Begun,
        mut rest: Written,
        tell: &mut impl FnMut(MigrationStep, u64, u64) -> ControlFlow<()>,
    ) -> Result<Duration, MigrateError> {
        let mut reached = |step, sent, left| match tell(step, sent, left) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(MigrateError::Cancelled),
        };
        let transition = lock(&self.transition);
        let paused_at = Instant::now();
        let mut pause = self.pause_for(&transition)?;
        let time_of_day = match pause.was_running {
            true => SystemTime::now().duration_since(UNIX_EPOCH),
            false => Ok(Duration::ZERO),
        };
        rest.merge(begun.written()?);
        reached(MigrationStep::HandingOver, sender.sent, rest.bytes())?;
        let memory = &self.context.machine.memory;
        sender.pages(memory, &rest.pages, Zeroes::Send, |_, _| {
            ControlFlow::Continue(())
        })?;
        for (disk, ranges) in begun.disks.iter().zip(&rest.blocks) {
            let mut tell = |_, _| ControlFlow::Continue(());
            sender.disk(disk.index, disk.moving.len, disk, ranges, &mut tell)?;
        }
        let state = encode_moving(&self.gather(&transition, Identity::default())?);
        let nanos = time_of_day.map_or(1, |time| time.as_nanos() as u64);
        sender.stream.send(MessageKind::State, nanos, &state)?;
        sender.stream.expect(MessageKind::Ready)?;
        reached(MigrationStep::GivingAway, sender.sent, 0)?;
        self.check_not_ended()?;
        // From here on this side does not resume it by itself.
        let was_running = std::mem::take(&mut pause.was_running);
        let given = sender.stream.send(MessageKind::Run, 0, &[]);
        match given.and_then(|()| sender.stream.expect(MessageKind::Running)) {
            Ok(_) => {
                let downtime = paused_at.elapsed();
                self.context.end_as_moved();
                Ok(downtime)
            }
            Err(error @ StreamError::Refused(_)) => {
                // It says so only if it has not started it.
                pause.was_running = was_running;
                Err(error.into())
            }
            Err(error) => Err(MigrateError::InDoubt(error)),
        }
    }

    /// Pauses the VM, also on a busy host, whose threads may not be scheduled in time.
    fn pause_patiently(&self, transition: &MutexGuard<'_, ()>) -> Result<(), VmError> {
        for _ in 1..PAUSE_ATTEMPTS {
            match self.pause_in(transition, PAUSE_TIMEOUT) {
                Err(VmError::Busy { .. }) => {}
                paused => return paused,
            }
        }
        self.pause_in(transition, PAUSE_TIMEOUT)
    }

    /// Pauses the VM if it runs. When the result is dropped, it runs again.
    fn pause_for<'a>(&'a self, transition: &'a MutexGuard<'a, ()>) -> Result<Pause<'a>, VmError> {
        let state = self.control().lock().state;
        let was_running = state != State::Paused;
        if was_running {
            self.pause_patiently(transition)?;
        }
        Ok(Pause {
            vm: self,
            transition,
            was_running,
        })
    }
}

/// A VM that is paused for a moment.
struct Pause<'a> {
    vm: &'a Vm,
    transition: &'a MutexGuard<'a, ()>,
    was_running: bool,
}

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        if self.was_running
            && let Err(error) = self.vm.resume_in(self.transition)
        {
            // It has ended meanwhile: whoever waits for it learns how.
            tracing::debug!(%error, "a VM that does not move was not resumed");
        }
    }
}

/// Returns for how long the rest may be sent, of the downtime that is allowed: what the pause
/// itself takes was seen when the migration began, here, and it is the same again there. A quarter
/// is left in any case: a host that was busy in that moment is not as busy for ever, and without
/// any time a guest that writes at all would never be given away.
fn time_to_send(downtime: Duration, paused: Duration) -> Duration {
    downtime
        .saturating_sub(paused.saturating_mul(2))
        .max(downtime / 4)
}

/// Whether `left` bytes can be sent within `time`, if `bytes` took `took`.
fn sends_within(left: u64, time: Duration, bytes: u64, took: Duration) -> bool {
    let needed = u128::from(left) * took.as_nanos();
    left == 0 || needed <= time.as_nanos() * u128::from(bytes)
}

/// Whether another round shortens the downtime: the last one left half of what it sent at most, and
/// that takes longer than the pause does anyway.
fn shrinks(left: u64, paused: Duration, bytes: u64, took: Duration) -> bool {
    left <= bytes / 2 && !sends_within(left, paused, bytes, took)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_pause_leaves_a_quarter_of_the_downtime_to_send_the_rest() {
        let time = |paused| time_to_send(Duration::from_millis(300), Duration::from_millis(paused));
        assert_eq!(time(0), Duration::from_millis(300));
        assert_eq!(time(50), Duration::from_millis(200));
        assert_eq!(time(140), Duration::from_millis(75));
        assert_eq!(time(u64::MAX / 4), Duration::from_millis(75));
    }

    #[test]
    fn the_rest_is_small_enough_if_it_is_sent_within_the_downtime() {
        let second = Duration::from_secs(1);
        let within = |left, millis| sends_within(left, Duration::from_millis(millis), 1000, second);
        assert!(within(300, 300) && !within(301, 300));
        assert!(within(0, 0) && !within(1, 0));
        // Nothing was sent: nothing is known.
        assert!(!sends_within(1, second, 0, second));
        assert!(!sends_within(u64::MAX, second, 1, second));
    }

    #[test]
    fn rounds_go_on_while_they_halve_what_costs_more_than_the_pause() {
        let second = Duration::from_secs(1);
        let shrinks = |left, paused| shrinks(left, Duration::from_millis(paused), 1000, second);
        assert!(shrinks(500, 100) && !shrinks(501, 100));
        assert!(shrinks(101, 100) && !shrinks(100, 100));
        assert!(!shrinks(0, 0));
    }
}
