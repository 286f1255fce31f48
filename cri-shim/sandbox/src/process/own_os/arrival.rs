//! A machine that comes from another host.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::sleep;
use tracing::{info, warn};

use super::super::super::error::SandboxError;
use super::super::super::types::{IncomingMachine, MigrationState};
use super::connection::again;
use super::migrations::{Gate, Migration};
use super::vm::Vm;
use crate::machine::{Arrival, ArriveError, Machine, causes};

/// How often, and how long, the locks of disks are tried that the other side gives back when its
/// machine has ended.
const LOCK_RETRY: Duration = Duration::from_millis(200);
const LOCK_ATTEMPTS: u32 = 300;

/// Milliseconds before each of the announcements of a machine that has come.
const ANNOUNCEMENTS: [u64; 5] = [0, 50, 150, 250, 350];

/// A machine that is waited for.
#[derive(Debug)]
pub(super) struct Arriving {
    migration: Arc<Migration>,
    limit: Duration,
    /// Set for one that was paused.
    is_paused: Arc<AtomicBool>,
}

impl Arriving {
    pub(super) fn new(
        incoming: &IncomingMachine,
        migration: Arc<Migration>,
        is_paused: Arc<AtomicBool>,
    ) -> Self {
        Self {
            migration,
            limit: incoming.limit,
            is_paused,
        }
    }

    /// Waits for the machine, and takes it.
    ///
    /// # Errors
    /// Why none came.
    pub(super) async fn arrive(&self, vm: &Arc<Vm>) -> Result<(), String> {
        match self.receive(vm).await {
            Ok((machine, is_running)) => {
                vm.takes(machine);
                self.is_paused.store(!is_running, Ordering::Relaxed);
                self.migration.finish(MigrationState::Done, "");
                self.greet(vm, is_running);
                Ok(())
            }
            Err(error) => {
                let (state, reason) = self.migration.outcome(|| causes(&error));
                self.migration.finish(state, reason.clone());
                Err(format!("no machine came: {reason}"))
            }
        }
    }

    async fn receive(&self, vm: &Arc<Vm>) -> Result<(Machine, bool), ReceiveEnd> {
        let connection = tokio::select! {
            connection = self.connection() => connection?,
            () = sleep(self.limit) => {
                let reason = format!("nothing came within {:?}", self.limit);
                self.migration.close(MigrationState::Failed, reason);
                // It may have come in that moment.
                self.connection().await?
            }
            () = vm.is_asked_to_end() => {
                self.stop();
                self.connection().await?
            }
        };
        let (owner, migration) = (Arc::clone(vm), Arc::clone(&self.migration));
        let received = tokio::task::spawn_blocking(move || {
            owner.receive(&connection, |arrival| migration.arrives(arrival))
        });
        tokio::pin!(received);
        let received = tokio::select! {
            received = &mut received => received,
            () = vm.is_asked_to_end() => {
                self.stop();
                received.await
            }
        };
        Ok(received.map_err(|error| ReceiveEnd::Thread(error.to_string()))??)
    }

    fn stop(&self) {
        let reason = "the pod was stopped before its machine had come";
        self.migration.close(MigrationState::Cancelled, reason);
    }

    /// Waits for the connection, or for the end of the migration without one.
    async fn connection(&self) -> Result<UnixStream, ReceiveEnd> {
        let mut changes = self.migration.gate_changes.subscribe();
        loop {
            changes.borrow_and_update();
            match &*self.migration.gate() {
                Gate::Open(None) => {}
                Gate::Open(Some(connection)) => {
                    return again(connection).map_err(ReceiveEnd::Connection);
                }
                Gate::Closed { .. } | Gate::Passed(_) => return Err(ReceiveEnd::Ended),
            }
            if changes.changed().await.is_err() {
                return Err(ReceiveEnd::Ended);
            }
        }
    }

    /// Does for a machine that has come what it needs at its new place.
    fn greet(&self, vm: &Arc<Vm>, is_running: bool) {
        info!(
            container = vm.container.id,
            is_running, "the machine has come"
        );
        if is_running {
            vm.set_clock();
        }
        let announced = Arc::clone(vm);
        tokio::spawn(async move {
            // Some may be lost.
            for pause in ANNOUNCEMENTS {
                sleep(Duration::from_millis(pause)).await;
                announced.announce();
            }
        });
        let vm = Arc::clone(vm);
        tokio::spawn(async move {
            for attempt in 1..=LOCK_ATTEMPTS {
                match vm.lock_disks() {
                    Ok(()) => return,
                    Err(error) if attempt == LOCK_ATTEMPTS => {
                        warn!(%error, "a disk of a machine that has come stays without a lock");
                    }
                    Err(_) => sleep(LOCK_RETRY).await,
                }
                if !vm.is_running() {
                    return;
                }
            }
        });
    }
}

/// Why no machine came.
#[derive(Debug, thiserror::Error)]
enum ReceiveEnd {
    /// Somebody has ended the migration, who said why.
    #[error("the migration was ended")]
    Ended,
    #[error("the connection of the migration cannot be used")]
    Connection(#[source] SandboxError),
    #[error(transparent)]
    Arrive(#[from] ArriveError),
    #[error("the thread that received it ended: {0}")]
    Thread(String),
}

impl Migration {
    fn arrives(&self, arrival: Arrival) {
        self.change(|info| match arrival {
            Arrival::Receiving(bytes) => {
                info.state = MigrationState::Receiving;
                info.bytes_total = bytes;
            }
            Arrival::HandingOver => info.state = MigrationState::HandingOver,
        });
    }
}
