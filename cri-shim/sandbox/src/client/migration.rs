//! The requests about machines that move to another sandbox.

use std::os::fd::OwnedFd;

use super::super::error::SandboxError;
use super::super::types::{MigrationInfo, SendMachine};
use super::super::wire::{Answer, Call};
use super::SandboxClient;

impl SandboxClient {
    /// Begins to send a machine over a connected stream, at whose other end a sandbox receives it.
    /// The sandbox's process does it, whether or not a client is connected;
    /// [`Self::migration`] tells how far it is. The container has ended with code 0 when the
    /// machine runs there.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn send_machine(
        &self,
        id: &str,
        send: SendMachine,
        connection: OwnedFd,
    ) -> Result<(), SandboxError> {
        let id = id.to_owned();
        let send = Box::new(send);
        self.done(Call::SendMachine { id, send }, vec![connection])
            .await
    }

    /// Gives the container that waits for this migration the connected stream over which its
    /// machine comes.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn receive_machine(
        &self,
        id: &str,
        migration: &str,
        connection: OwnedFd,
    ) -> Result<(), SandboxError> {
        let call = Call::ReceiveMachine {
            id: id.to_owned(),
            migration: migration.to_owned(),
        };
        self.done(call, vec![connection]).await
    }

    /// Ends a migration that was not given away. Returns when it has ended.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn cancel_migration(&self, id: &str, migration: &str) -> Result<(), SandboxError> {
        let call = Call::CancelMigration {
            id: id.to_owned(),
            migration: migration.to_owned(),
        };
        self.done(call, Vec::new()).await
    }

    /// Decides about a machine that was given away and whose other side is silent: it goes on here
    /// (`run`), or ends. Two copies run if the other one does, too.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn resolve_migration(
        &self,
        id: &str,
        migration: &str,
        run: bool,
    ) -> Result<(), SandboxError> {
        let call = Call::ResolveMigration {
            id: id.to_owned(),
            migration: migration.to_owned(),
            run,
        };
        self.done(call, Vec::new()).await
    }

    /// Returns the latest migration of a container's machine, if there was one.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn migration(&self, id: &str) -> Result<Option<MigrationInfo>, SandboxError> {
        let call = Call::Migration {
            id: id.to_owned(),
            seen: None,
        };
        match self.call(call, Vec::new()).await? {
            (Answer::Migration(info), _) => Ok(info.map(|info| *info)),
            _ => Err(self.unfit()),
        }
    }

    /// Waits until there is a migration newer than a version of it (0 for any), without a time
    /// limit.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] if the container is deleted, or the sandbox is gone.
    pub async fn migration_after(
        &self,
        id: &str,
        version: u64,
    ) -> Result<MigrationInfo, SandboxError> {
        let call = Call::Migration {
            id: id.to_owned(),
            seen: Some(version),
        };
        match self.wait_for(call, Vec::new()).await? {
            (Answer::Migration(Some(info)), _) => Ok(*info),
            _ => Err(self.unfit()),
        }
    }
}
