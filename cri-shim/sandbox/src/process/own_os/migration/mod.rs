//! A container's machine moves to another host, or comes from one.
//!
//! Each migration is a [`Migration`](super::migrations::Migration): what is known of it, and a gate
//! that decides once whether it still can be ended. Who ends it closes the gate and shuts its
//! connection down, so that the thread that carries it out returns; who gives the machine away
//! passes the gate, and nobody ends the migration after that. docs/migration.md has the states, and
//! what a kill leads to.
//!
//! | file | contents |
//! | --- | --- |
//! | `mod.rs` | the requests about one |
//! | `send` | a machine leaves |

mod send;

use std::os::fd::OwnedFd;
use std::time::Duration;

use super::super::super::error::SandboxError;
use super::super::super::types::MigrationState;
use super::connection::prepared;
use super::migrations::refused;
use super::system::OwnOs;
pub(super) use send::send;

/// How long the other side may say nothing. It has a limit of its own for progress.
const SILENCE: Duration = Duration::from_secs(180);

/// Gives the container that waits for a machine the connection over which it comes.
pub(super) fn give_connection(
    system: &OwnOs,
    id: &str,
    migration: &str,
    connection: OwnedFd,
) -> Result<(), SandboxError> {
    let vm = system.vm_that_runs(id)?;
    let migration = vm.migrations.named(migration)?;
    let connection = prepared(connection, SILENCE)?;
    let is_waiting = migration.info.borrow().state == MigrationState::Waiting;
    match is_waiting && migration.connect(connection) {
        true => Ok(()),
        false => Err(refused(
            "the container does not wait for a machine any more".to_owned(),
        )),
    }
}

impl OwnOs {
    /// Decides about a machine that was given away and of which nobody knows: it goes on here, or
    /// has ended.
    pub(super) async fn resolve_migration(
        &self,
        id: &str,
        migration: &str,
        run: bool,
    ) -> Result<(), SandboxError> {
        let vm = self.vm_that_runs(id)?;
        let migration = vm.migrations.named(migration)?;
        let machine = vm.machine()?;
        let (state, reason) = match run {
            true => (
                MigrationState::Failed,
                "it did not arrive at the other side, and goes on here",
            ),
            false => (
                MigrationState::Done,
                "it runs on the other side, as its owner says",
            ),
        };
        if !migration.resolve(state, reason) {
            let info = migration.info();
            return Err(refused(format!(
                "the migration {} is not in doubt: it is {:?}",
                info.migration, info.state
            )));
        }
        match run {
            false => machine.kill(),
            // It was paused before.
            true if self.is_paused() => {}
            true => machine.resume().await.map_err(SandboxError::wrong_state)?,
        }
        Ok(())
    }
}
