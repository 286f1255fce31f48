//! Moves a running VM to another host, and starts one that has moved here.
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

use std::error::Error;
use std::io::{Read, Write};
use std::ops::ControlFlow;
use std::sync::MutexGuard;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::control::Outcome;
use super::exit::VmExit;
use super::save::TakeSnapshotError;
use super::state::State;
use crate::kvm::KvmError;
use crate::memory::{MemoryError, MemoryLog, PageSet};
use crate::migration::{
    ArrivedMigration, Kind, MigrationOptions, MigrationProgress, MigrationReport, ReceiveError,
    SendEnd, Sender, Stream, StreamError, Zeroes,
};
use crate::snapshot::{Identity, MachineState, encode_moving};
use crate::vm::devices::handle::ask;
use crate::vm::{RestoreBuilder, Vm, VmError, lock};

/// Why a VM did not move. It is as it was before, except after [`Self::InDoubt`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrateError {
    /// The VM neither runs nor is paused, or has ended meanwhile.
    #[error(transparent)]
    State(#[from] VmError),
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
            SendEnd::Cancelled => Self::Cancelled,
        }
    }
}

/// What is known once a migration has begun.
struct Begun {
    announced: MachineState,
    log: MemoryLog,
    was_running: bool,
    /// For how long the guest stood still, with nothing to send.
    paused: Duration,
}

impl Vm {
    /// Moves this VM over a connection to the [`crate::IncomingMigration`] on its other side: sends
    /// all of its memory while it runs, then what was written since, again and again, until the
    /// rest can be sent within the downtime that `options` allow; then pauses it, sends the rest,
    /// and ends it here ([`VmExit::Moved`]) when it runs there. A VM that is paused arrives paused.
    ///
    /// Disks, directories and the network's addresses do not move: the other side opens the same
    /// ones, or copies. The connection has time limits of its own for reads and writes, and is
    /// encrypted where others can read it: it has all of the guest's memory.
    ///
    /// `progress` may cancel the migration until the VM is paused.
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
        let begun = self.begin_migration()?;
        let stream = Stream::begin(connection)?;
        let mut sender = Sender::new(stream, options.bandwidth);
        let moved = self
            .send_while_running(&mut sender, &begun, options, &mut progress)
            .and_then(|(rest, rounds)| {
                let downtime = self.hand_over(&mut sender, &begun, rest)?;
                Ok((rounds, downtime))
            });
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

    /// Looks at the machine, and begins to log what is written. Nothing is in a device's hands in
    /// that moment, since it is paused.
    fn begin_migration(&self) -> Result<Begun, MigrateError> {
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
        let was_running = pause.was_running;
        drop(pause);
        Ok(Begun {
            announced,
            log,
            was_running,
            paused: paused_at.elapsed(),
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
    ) -> Result<(PageSet, u32), MigrateError> {
        let state = encode_moving(&begun.announced);
        let number = begun.was_running.into();
        sender.stream.send(Kind::Hello, number, &state)?;
        sender.stream.expect(Kind::Accept)?;
        let memory = &self.context.machine.memory;
        let mut pages = memory.touched()?;
        let mut zeroes = Zeroes::Skip;
        let mut round = 0;
        loop {
            let began = Instant::now();
            let mut tell = |sent, left| progress(MigrationProgress { round, sent, left });
            sender.pages(memory, &pages, zeroes, &mut tell)?;
            sender.round(round)?;
            let (bytes, took) = (pages.bytes(), began.elapsed());
            pages = begun.log.take()?;
            zeroes = Zeroes::Send;
            let left = pages.bytes();
            if tell(sender.sent, left).is_break() {
                return Err(MigrateError::Cancelled);
            }
            // What the pause itself takes was seen when the migration began: here, and the same
            // again there.
            let time = options.downtime.saturating_sub(begun.paused * 2);
            let is_last = round >= options.max_rounds;
            if sends_within(left, time, bytes, took) || is_last && options.force {
                return Ok((pages, round + 1));
            }
            if is_last {
                return Err(MigrateError::Busy {
                    rounds: round + 1,
                    left,
                    downtime: options.downtime,
                });
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
        mut rest: PageSet,
    ) -> Result<Duration, MigrateError> {
        let transition = lock(&self.transition);
        let paused_at = Instant::now();
        let mut pause = self.pause_for(&transition)?;
        let time_of_day = match pause.was_running {
            true => SystemTime::now().duration_since(UNIX_EPOCH),
            false => Ok(Duration::ZERO),
        };
        rest.merge(&begun.log.take()?);
        let memory = &self.context.machine.memory;
        sender.pages(
            memory,
            &rest,
            Zeroes::Send,
            |_, _| ControlFlow::Continue(()),
        )?;
        let state = encode_moving(&self.gather(&transition, Identity::default())?);
        let nanos = time_of_day.map_or(1, |time| time.as_nanos() as u64);
        sender.stream.send(Kind::State, nanos, &state)?;
        sender.stream.expect(Kind::Ready)?;
        self.check_not_ended()?;
        // From here on this side does not resume it by itself.
        let was_running = std::mem::take(&mut pause.was_running);
        sender
            .stream
            .send(Kind::Run, 0, &[])
            .map_err(MigrateError::InDoubt)?;
        match sender.stream.expect(Kind::Running) {
            Ok(_) => {}
            Err(StreamError::Refused(reason)) => {
                // It says so only if it has not started it.
                pause.was_running = was_running;
                return Err(StreamError::Refused(reason).into());
            }
            Err(error) => return Err(MigrateError::InDoubt(error)),
        }
        let downtime = paused_at.elapsed();
        self.context.end(Outcome::Exit(VmExit::Moved));
        Ok(downtime)
    }

    /// Pauses the VM if it runs. When the result is dropped, it runs again.
    fn pause_for<'a>(&'a self, transition: &'a MutexGuard<'a, ()>) -> Result<Pause<'a>, VmError> {
        let state = self.control().lock().state;
        let was_running = state != State::Paused;
        if was_running {
            self.pause_in(transition)?;
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

/// Whether `left` bytes can be sent within `time`, if `bytes` took `took`.
fn sends_within(left: u64, time: Duration, bytes: u64, took: Duration) -> bool {
    let needed = u128::from(left) * took.as_nanos();
    left == 0 || needed <= time.as_nanos() * u128::from(bytes)
}

impl<S: Read + Write> ArrivedMigration<S> {
    /// Returns a builder of the VM, which needs the devices that were announced. One VM can be
    /// built. [`Self::start`] starts it.
    pub fn builder(&self) -> RestoreBuilder {
        self.snapshot().builder()
    }

    /// Takes the VM from the other side, which ends it there, and starts `vm`, which was built here
    /// and has not been started; one that arrives paused is left as it is.
    ///
    /// # Errors
    /// See [`ReceiveError`]; `vm` has not been started then.
    pub fn start(self, vm: &Vm) -> Result<(), ReceiveError> {
        self.take(|| {
            vm.start()
                .map_err(|error| -> Box<dyn Error + Send + Sync> { error.into() })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
