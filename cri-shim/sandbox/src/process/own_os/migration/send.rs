//! A machine leaves.

use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::sleep;
use tracing::{info, warn};

use super::super::super::super::error::SandboxError;
use super::super::super::super::types::{
    MigrationDirection, MigrationInfo, MigrationState, RefusalKind, SendMachine,
};
use super::super::connection::{again, prepared};
use super::super::migrations::{Migration, refused};
use super::super::system::OwnOs;
use super::super::vm::Vm;
use crate::machine::{
    Machine, MigrateError, MigrationOptions, MigrationProgress, MigrationReport, MigrationStep,
    causes,
};

/// How often progress is told.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Longest downtime that may be asked for.
const MAX_DOWNTIME: Duration = Duration::from_secs(60);

/// Most rounds.
const MAX_ROUNDS: u32 = 10_000;

/// Begins to send a machine over a connection.
pub(in super::super) fn send(
    system: &Arc<OwnOs>,
    id: &str,
    send: SendMachine,
    connection: OwnedFd,
) -> Result<(), SandboxError> {
    let vm = system.vm_that_runs(id)?;
    vm.migrations.must_be_over()?;
    let machine = vm.machine()?;
    vm.may_leave()?;
    if send.downtime > MAX_DOWNTIME || send.max_rounds > MAX_ROUNDS {
        return Err(SandboxError::refused(
            RefusalKind::InvalidArgument,
            format!(
                "at most {MAX_DOWNTIME:?} of downtime and {MAX_ROUNDS} rounds can be asked for"
            ),
        ));
    }
    let connection = prepared(connection, send.progress_timeout)?;
    let (direction, state) = (MigrationDirection::Out, MigrationState::Sending);
    let migration = vm
        .migrations
        .begin(&send.migration, direction, state, vm.memory())?;
    let for_ends = again(&connection).inspect_err(|error| {
        migration.finish(MigrationState::Failed, error.to_string());
    })?;
    migration.connect(for_ends);
    info!(
        container = id,
        migration = send.migration,
        "the machine is sent"
    );
    tokio::spawn(async move {
        let limit = send.completion_timeout;
        let leaving = Leaving {
            vm: Arc::clone(&vm),
            migration: Arc::clone(&migration),
            told: None,
            round: 0,
        };
        let left =
            tokio::task::spawn_blocking(move || leaving.carry_out(&machine, &connection, &send));
        tokio::pin!(left);
        let too_long = async {
            match limit {
                Some(limit) => sleep(limit).await,
                None => std::future::pending().await,
            }
        };
        let left = tokio::select! {
            left = &mut left => left,
            () = too_long => {
                let limit = limit.unwrap_or_default();
                let reason = format!("it took longer than {limit:?}");
                migration.close(MigrationState::Failed, reason);
                left.await
            }
        };
        match left {
            Ok(left) => migration.left(left),
            Err(error) => migration.finish(
                MigrationState::Failed,
                format!("the thread that sent the machine ended: {error}"),
            ),
        }
    });
    Ok(())
}

/// What is needed while a machine is sent.
struct Leaving {
    vm: Arc<Vm>,
    migration: Arc<Migration>,
    told: Option<Instant>,
    round: u32,
}

impl Leaving {
    fn carry_out(
        mut self,
        machine: &Machine,
        connection: &UnixStream,
        send: &SendMachine,
    ) -> Result<MigrationReport, MigrateError> {
        let options = MigrationOptions {
            downtime: send.downtime,
            max_rounds: send.max_rounds,
            force: send.force,
            bandwidth: send.bandwidth,
            throttle: send.throttle,
            disks: self.vm.moving_disks(),
            plugged: self.vm.plan().plugged_identities(),
        };
        machine.migrate(connection, &options, |progress| self.reached(progress))
    }

    fn reached(&mut self, progress: MigrationProgress) -> ControlFlow<()> {
        let is_next_round = progress.round != self.round;
        self.round = progress.round;
        match progress.step {
            MigrationStep::HandingOver => {
                self.tell(progress, MigrationState::HandingOver);
                self.sync()
            }
            MigrationStep::GivingAway => match self.migration.pass() {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            },
            _ if self.migration.is_closed() => ControlFlow::Break(()),
            // So that little is left to be written while the guest stands still.
            _ if is_next_round => {
                self.tell(progress, MigrationState::Sending);
                self.sync()
            }
            _ => {
                if self.told.is_none_or(|told| told.elapsed() >= TELL_EVERY) {
                    self.tell(progress, MigrationState::Sending);
                }
                ControlFlow::Continue(())
            }
        }
    }

    fn tell(&mut self, progress: MigrationProgress, state: MigrationState) {
        self.told = Some(Instant::now());
        self.migration.change(|info: &mut MigrationInfo| {
            info.state = state;
            info.round = progress.round;
            info.bytes_left = progress.left;
            if progress.round == 0 {
                // How much is in use is known when it is sent.
                info.bytes_total = info.bytes_total.max(progress.sent + progress.left);
            }
        });
    }

    fn sync(&self) -> ControlFlow<()> {
        match self.vm.sync_disks() {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                self.migration.close(MigrationState::Failed, causes(&error));
                ControlFlow::Break(())
            }
        }
    }
}

impl Migration {
    /// Notes what became of a machine that was sent.
    fn left(&self, left: Result<MigrationReport, MigrateError>) {
        match left {
            Ok(report) => {
                let downtime = u64::try_from(report.downtime.as_nanos()).unwrap_or(u64::MAX);
                self.change(|info| {
                    info.downtime_ns = downtime;
                    info.bytes_left = 0;
                });
                self.finish(MigrationState::Done, "");
            }
            Err(error @ MigrateError::InDoubt(_)) => {
                let reason = causes(&error);
                warn!(
                    reason,
                    "nobody knows whether the machine runs on the other side"
                );
                self.disconnect();
                self.change(|info| {
                    info.state = MigrationState::InDoubt;
                    info.reason = reason;
                });
            }
            Err(error) => {
                let (state, reason) = self.outcome(|| causes(&error));
                self.finish(state, reason);
            }
        }
    }
}

impl Vm {
    /// Refuses a machine that has what cannot move.
    fn may_leave(&self) -> Result<(), SandboxError> {
        self.must_share_nothing()?;
        if self.is_frozen() {
            let why = "the guest's file systems are frozen: thaw them first";
            return Err(refused(why.to_owned()));
        }
        if self.is_to_end() {
            return Err(refused("the guest was asked to end".to_owned()));
        }
        Ok(())
    }
}
