//! The migrations of a container's machine: what is known of each, and a gate that decides once
//! whether it still can be ended. `migration` carries them out.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tracing::{debug, info};

use super::super::super::agent::now_ns;
use super::super::super::error::SandboxError;
use super::super::super::types::{
    MigrationDirection, MigrationInfo, MigrationState, RefusalKind, SendMachine,
};

/// A migration of a machine.
#[derive(Debug)]
pub(super) struct Migration {
    pub(super) info: watch::Sender<MigrationInfo>,
    gate: Mutex<Gate>,
    /// Increased when the gate has changed.
    pub(super) gate_changes: watch::Sender<u64>,
}

/// Whether a migration still can be ended.
#[derive(Debug)]
pub(super) enum Gate {
    /// It can; this shuts its connection down, once it has one.
    Open(Option<UnixStream>),
    /// Somebody has ended it.
    Closed {
        state: MigrationState,
        reason: String,
    },
    /// The machine was given away.
    Passed(Option<UnixStream>),
}

impl Migration {
    /// Begins one that is newer than any of the same machine before.
    pub(super) fn new(
        migration: String,
        direction: MigrationDirection,
        state: MigrationState,
        bytes: u64,
        before: Option<&Self>,
    ) -> Self {
        let version = before.map_or(0, |before| before.info.borrow().version);
        Self {
            info: watch::Sender::new(MigrationInfo {
                version: version + 1,
                migration,
                direction,
                state,
                reason: String::new(),
                bytes_total: bytes,
                bytes_left: 0,
                round: 0,
                downtime_ns: 0,
                started_at_ns: now_ns(),
                ended_at_ns: 0,
            }),
            gate: Mutex::new(Gate::Open(None)),
            gate_changes: watch::Sender::new(0),
        }
    }

    pub(super) fn info(&self) -> MigrationInfo {
        self.info.borrow().clone()
    }

    /// Whether something still happens, or has to be decided.
    pub(super) fn is_active(&self) -> bool {
        !self.info.borrow().state.is_final()
    }

    pub(super) fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what is known of it; a final state stays.
    pub(super) fn change(&self, change: impl FnOnce(&mut MigrationInfo)) {
        self.info.send_if_modified(|info| {
            if info.state.is_final() {
                return false;
            }
            change(info);
            info.version += 1;
            true
        });
    }

    /// Closes the connection here: its other end sees that nothing more comes.
    pub(super) fn disconnect(&self) {
        if let Gate::Open(connection) | Gate::Passed(connection) = &mut *self.gate() {
            *connection = None;
        }
    }

    pub(super) fn finish(&self, state: MigrationState, reason: impl Into<String>) {
        self.disconnect();
        let reason = reason.into();
        self.change(|info| {
            info!(
                migration = info.migration,
                ?state,
                reason,
                "a migration has ended"
            );
            info.state = state;
            info.reason = reason;
            info.ended_at_ns = now_ns();
        });
    }

    /// Gives it a connection. False if it has one, or has been ended.
    pub(super) fn connect(&self, connection: UnixStream) -> bool {
        let mut gate = self.gate();
        let Gate::Open(none @ None) = &mut *gate else {
            return false;
        };
        *none = Some(connection);
        drop(gate);
        self.gate_changes.send_modify(|count| *count += 1);
        true
    }

    /// Ends it, unless the machine was given away or it has been ended. It is final a moment later.
    pub(super) fn close(&self, state: MigrationState, reason: impl Into<String>) -> bool {
        let mut gate = self.gate();
        if !matches!(*gate, Gate::Open(_)) {
            return false;
        }
        let reason = reason.into();
        let before = std::mem::replace(&mut *gate, Gate::Closed { state, reason });
        if let Gate::Open(Some(connection)) = before {
            cut(&connection);
        }
        drop(gate);
        self.gate_changes.send_modify(|count| *count += 1);
        true
    }

    pub(super) fn is_closed(&self) -> bool {
        matches!(*self.gate(), Gate::Closed { .. })
    }

    /// Passes the gate; false if it is closed.
    pub(super) fn pass(&self) -> bool {
        let mut gate = self.gate();
        let Gate::Open(connection) = &mut *gate else {
            return false;
        };
        *gate = Gate::Passed(connection.take());
        true
    }

    /// The state in which it ends after a failure: as somebody wanted, who ended it.
    pub(super) fn outcome(&self, failure: impl FnOnce() -> String) -> (MigrationState, String) {
        match &*self.gate() {
            Gate::Closed { state, reason } => (*state, reason.clone()),
            _ => (MigrationState::Failed, failure()),
        }
    }

    /// Waits until nothing more happens by itself.
    pub(super) async fn settled(&self) -> MigrationInfo {
        let mut info = self.info.subscribe();
        let settled =
            |info: &MigrationInfo| info.state.is_final() || info.state == MigrationState::InDoubt;
        let known = info.wait_for(settled).await;
        known.map_or_else(|_| self.info(), |info| info.clone())
    }

    /// Decides about a machine that was given away. False if there is nothing to decide.
    pub(super) fn resolve(&self, state: MigrationState, reason: &str) -> bool {
        self.info.send_if_modified(|info| {
            let is_open = info.state == MigrationState::InDoubt;
            if is_open {
                info!(
                    migration = info.migration,
                    ?state,
                    reason,
                    "a migration is resolved"
                );
                info.state = state;
                info.reason = reason.to_owned();
                info.ended_at_ns = now_ns();
                info.version += 1;
            }
            is_open
        })
    }

    /// Ends it for a machine that has ended here, in the words of its end, and waits for that.
    /// Returns whether the machine runs elsewhere.
    pub(super) async fn end_with_machine(&self, how: &str) -> bool {
        if self.is_active() {
            self.close(
                MigrationState::Failed,
                format!("the machine ended while it was sent: it {how}"),
            );
            if let Gate::Passed(Some(connection)) = &*self.gate() {
                // Nobody waits for the other side any more.
                cut(connection);
            }
            self.settled().await;
            let reason = "the machine was ended here after it had been given away: it may run on \
                          the other side";
            self.resolve(MigrationState::Failed, reason);
        }
        let info = self.info.borrow();
        (info.direction, info.state) == (MigrationDirection::Out, MigrationState::Done)
    }

    /// Ends it for a guest that is to end, unless it was given away.
    pub(super) async fn end_for_stop(&self) {
        let (state, reason) = match self.info.borrow().direction {
            MigrationDirection::Out => (
                MigrationState::Failed,
                "the guest was asked to end while it was sent",
            ),
            _ => (
                MigrationState::Cancelled,
                "the pod was stopped before its machine had come",
            ),
        };
        if self.is_active() && self.close(state, reason) {
            self.settled().await;
        }
    }

    /// Ends it on request.
    pub(super) async fn cancel(&self) -> Result<(), SandboxError> {
        if self.is_active() && self.close(MigrationState::Cancelled, "on request") {
            let info = self.settled().await;
            if info.state != MigrationState::Done {
                return Ok(());
            }
        }
        let info = self.info();
        Err(refused(match info.state {
            MigrationState::Done => format!("the migration {} is done", info.migration),
            state if state.is_final() => {
                format!(
                    "the migration {} has ended: {}",
                    info.migration, info.reason
                )
            }
            MigrationState::InDoubt => format!(
                "the machine was given away by the migration {}: ask the other side, and resolve \
                 it",
                info.migration
            ),
            _ => format!(
                "the machine is given away just now by the migration {}",
                info.migration
            ),
        }))
    }
}

/// The migrations of a machine.
#[derive(Debug)]
pub(super) struct Migrations {
    latest: watch::Sender<Option<Arc<Migration>>>,
}

impl Default for Migrations {
    fn default() -> Self {
        Self {
            latest: watch::Sender::new(None),
        }
    }
}

impl Migrations {
    pub(super) fn latest(&self) -> Option<Arc<Migration>> {
        self.latest.borrow().clone()
    }

    /// Refuses what a machine that moves cannot do.
    pub(super) fn must_be_over(&self) -> Result<(), SandboxError> {
        match self.latest().filter(|migration| migration.is_active()) {
            None => Ok(()),
            Some(migration) => Err(refused(format!(
                "the machine moves by the migration {}: wait for its end, or cancel it",
                migration.info.borrow().migration
            ))),
        }
    }

    /// Whether a machine is waited for of which nothing has come yet.
    pub(super) fn is_awaited(&self) -> bool {
        self.latest().is_some_and(|latest| {
            let info = latest.info.borrow();
            (info.direction, info.state) == (MigrationDirection::In, MigrationState::Waiting)
        })
    }

    /// Begins one, unless another one is not over.
    pub(super) fn begin(
        &self,
        migration: &str,
        direction: MigrationDirection,
        state: MigrationState,
        bytes: u64,
    ) -> Result<Arc<Migration>, SandboxError> {
        if !SendMachine::is_id(migration) {
            return Err(SandboxError::refused(
                RefusalKind::InvalidArgument,
                "the migration's id must have 1 to 128 printable characters of ASCII",
            ));
        }
        let mut begun = None;
        self.latest.send_if_modified(|latest| {
            if latest.as_ref().is_some_and(|before| before.is_active()) {
                return false;
            }
            let id = migration.to_owned();
            let new = Migration::new(id, direction, state, bytes, latest.as_deref());
            let new = Arc::new(new);
            *latest = Some(Arc::clone(&new));
            begun = Some(new);
            true
        });
        match begun {
            Some(begun) => Ok(begun),
            None => Err(self.must_be_over().err().unwrap_or_else(|| {
                refused("another migration of the machine ends just now".to_owned())
            })),
        }
    }

    /// Returns the latest one, if it has this id.
    pub(super) fn named(&self, id: &str) -> Result<Arc<Migration>, SandboxError> {
        let latest = self.latest();
        let found = latest.filter(|latest| latest.info.borrow().migration == id);
        found.ok_or_else(|| {
            let shown: String = id.chars().take(SendMachine::MAX_ID).collect();
            refused(format!(
                "the machine does not move by the migration {shown:?}"
            ))
        })
    }

    /// Waits for news after this version.
    pub(super) async fn after(&self, seen: u64) -> MigrationInfo {
        let mut latest = self.latest.subscribe();
        loop {
            let migration = latest.borrow_and_update().clone();
            let known = async {
                let Some(migration) = migration else {
                    return std::future::pending().await;
                };
                let mut info = migration.info.subscribe();
                let newer = info.wait_for(|info| info.version > seen).await;
                newer.map_or_else(|_| migration.info(), |info| info.clone())
            };
            tokio::select! {
                info = known => return info,
                // It is of this machine, which is there for as long as this is.
                _ = latest.changed() => {}
            }
        }
    }
}

/// Refuses what the state of a migration does not allow.
pub(super) fn refused(why: String) -> SandboxError {
    SandboxError::refused(RefusalKind::WrongState, why)
}

fn cut(connection: &UnixStream) {
    if let Err(error) = connection.shutdown(Shutdown::Both) {
        debug!(%error, "the connection of a migration has ended already");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun(migrations: &Migrations) -> Arc<Migration> {
        let (direction, state) = (MigrationDirection::Out, MigrationState::Sending);
        migrations.begin("m", direction, state, 1).unwrap()
    }

    #[tokio::test]
    async fn a_migration_is_ended_or_given_away_and_never_both() {
        let migrations = Migrations::default();
        let migration = begun(&migrations);
        let second = migrations.begin("n", MigrationDirection::Out, MigrationState::Sending, 1);
        assert_eq!(second.unwrap_err().kind(), Some(RefusalKind::WrongState));
        assert!(migration.close(MigrationState::Cancelled, "on request"));
        assert!(!migration.pass());
        let (state, reason) = migration.outcome(|| unreachable!("it was ended"));
        migration.finish(state, reason);
        assert!(migrations.must_be_over().is_ok());

        let migration = begun(&migrations);
        assert!(migration.pass());
        assert!(!migration.close(MigrationState::Cancelled, "too late"));
        let late = migration.cancel().await.unwrap_err();
        assert!(late.to_string().contains("given away"), "{late}");
    }

    #[tokio::test]
    async fn only_one_in_doubt_is_resolved_and_only_once() {
        let migrations = Migrations::default();
        let migration = begun(&migrations);
        assert!(!migration.resolve(MigrationState::Failed, "early"));
        migration.change(|info| info.state = MigrationState::InDoubt);
        assert!(migration.is_active());
        assert!(migration.resolve(MigrationState::Done, "asked"));
        assert!(!migration.resolve(MigrationState::Failed, "again"));
        // A final state stays.
        migration.finish(MigrationState::Failed, "late");
        assert_eq!(migration.info().state, MigrationState::Done);
        assert!(migration.end_with_machine("was killed").await);
    }

    #[tokio::test]
    async fn news_of_a_later_migration_are_newer() {
        let migrations = Migrations::default();
        let first = begun(&migrations);
        let seen = migrations.after(0).await.version;
        first.finish(MigrationState::Failed, "no room");
        let failed = migrations.after(seen).await;
        assert_eq!(
            (failed.state, failed.reason.as_str()),
            (MigrationState::Failed, "no room")
        );
        begun(&migrations);
        let next = migrations.after(failed.version).await;
        assert_eq!(next.state, MigrationState::Sending);
        assert!(next.version > failed.version);
    }
}
