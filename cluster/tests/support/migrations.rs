//! Plays what `podvisor serve` does of migrations: two machines that speak over the stream.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::{StreamExt, stream::BoxStream};
use podvisor_node_api::messages::{
    Data, MigrationDirection, MigrationState, SendMigrationOpen, VmMigration, VmName, VmPhase,
};
use tokio::sync::mpsc;
use tonic::Status;

use super::machines::StandIn;

/// Where a migration goes wrong.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Fault {
    /// Nowhere.
    #[default]
    None,
    /// The source does not begin.
    Refused,
    /// The connection is cut while memory is sent.
    CutEarly,
    /// The target runs the VM and is cut off before it can say so.
    CutLate,
    /// The target cannot start the VM and is cut off before it can say so.
    CutAndFailed,
    /// The source sends until it is cancelled.
    Endless,
}

/// What goes wrong, and how migrations were asked for.
#[derive(Debug, Clone, Default)]
pub struct Migrations {
    fault: Arc<Mutex<Fault>>,
    asked: Arc<Mutex<Vec<SendMigrationOpen>>>,
}

impl Migrations {
    /// From now on that goes wrong.
    pub fn set(&self, fault: Fault) {
        *self.fault.lock().expect("no panic") = fault;
    }

    /// How a VM was asked to be sent, each time.
    pub fn asked(&self) -> Vec<SendMigrationOpen> {
        self.asked.lock().expect("no panic").clone()
    }

    pub(super) fn fault(&self) -> Fault {
        *self.fault.lock().expect("no panic")
    }
}

/// Memory, in pieces.
const PIECES: usize = 8;
const PIECE: usize = 100_000;

fn data(bytes: impl Into<Bytes>) -> Result<Data, Status> {
    Ok(Data { data: bytes.into() })
}

impl StandIn {
    /// Has a machine wait for one of another node.
    pub fn await_migration(&self, vm: &VmName, migration: &str) {
        self.start(vm, None);
        self.note(vm, VmPhase::Incoming, |found| {
            migration.clone_into(&mut found.migration);
            found.direction = MigrationDirection::In.into();
            found.state = MigrationState::Waiting.into();
        });
    }

    /// The latest migration of a machine.
    pub fn migration(&self, vm: &VmName) -> Option<VmMigration> {
        self.machine(vm).migration
    }

    pub(super) fn note(&self, vm: &VmName, phase: VmPhase, change: impl FnOnce(&mut VmMigration)) {
        self.update(vm, |machine| {
            machine.phase = phase;
            change(machine.migration.get_or_insert_default());
        });
    }

    fn state(&self, vm: &VmName, phase: VmPhase, state: MigrationState) {
        self.note(vm, phase, |found| found.state = state.into());
    }

    fn is_cancelled(&self, vm: &VmName) -> bool {
        let migration = self.migration(vm);
        migration.is_some_and(|found| found.state() == MigrationState::Cancelled)
    }

    /// The source's side.
    pub(super) async fn send(
        self,
        open: SendMigrationOpen,
        mut heard: BoxStream<'static, Bytes>,
        says: mpsc::Sender<Result<Data, Status>>,
    ) {
        let vm = open.vm.clone().expect("a name");
        self.migrations
            .asked
            .lock()
            .expect("no panic")
            .push(open.clone());
        self.note(&vm, VmPhase::Running, |found| {
            *found = VmMigration {
                migration: open.migration,
                direction: MigrationDirection::Out.into(),
                state: MigrationState::Sending.into(),
                bytes_total: (PIECES * PIECE) as u64,
                ..VmMigration::default()
            };
        });
        let _ = says.send(data(Bytes::new())).await;
        let fault = self.migrations.fault();
        let failed = || self.state(&vm, VmPhase::Running, MigrationState::Failed);
        for piece in 0.. {
            if self.is_cancelled(&vm) {
                return;
            }
            if fault == Fault::CutEarly && piece == PIECES / 2 {
                self.note(&vm, VmPhase::Running, |found| {
                    "cut off".clone_into(&mut found.reason)
                });
                return failed();
            }
            if says.send(data(vec![1; PIECE])).await.is_err() {
                return failed();
            }
            if piece + 1 >= PIECES && fault != Fault::Endless {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        self.state(&vm, VmPhase::Running, MigrationState::HandingOver);
        let _ = says.send(data(vec![2; 1])).await;
        match heard.next().await {
            Some(bytes) if bytes.as_ref() == b"runs" => {
                self.state(&vm, VmPhase::Ended, MigrationState::Done);
            }
            _ => self.state(&vm, VmPhase::Paused, MigrationState::InDoubt),
        }
    }

    /// The target's side.
    pub(super) async fn receive(
        self,
        vm: VmName,
        mut heard: BoxStream<'static, Bytes>,
        says: mpsc::Sender<Result<Data, Status>>,
    ) {
        self.state(&vm, VmPhase::Incoming, MigrationState::Receiving);
        let _ = says.send(data(Bytes::new())).await;
        let mut count = 0;
        while let Some(bytes) = heard.next().await {
            count += bytes.iter().filter(|byte| **byte == 1).count();
            if !bytes.contains(&2) {
                continue;
            }
            let fault = self.migrations.fault();
            if count != PIECES * PIECE || fault == Fault::CutAndFailed {
                break;
            }
            self.state(&vm, VmPhase::Running, MigrationState::Done);
            if fault != Fault::CutLate {
                let _ = says.send(data("runs")).await;
            }
            return;
        }
        self.state(&vm, VmPhase::Ended, MigrationState::Failed);
    }

    pub(super) fn cancel(&self, vm: &VmName) -> Result<(), Status> {
        let found = self.migration(vm).unwrap_or_default();
        let phase = match found.state() {
            MigrationState::Sending => VmPhase::Running,
            MigrationState::Waiting | MigrationState::Receiving => VmPhase::Ended,
            _ => return Err(Status::failed_precondition("it was given away")),
        };
        self.state(vm, phase, MigrationState::Cancelled);
        Ok(())
    }

    pub(super) fn resolve(&self, vm: &VmName, run: bool) -> Result<(), Status> {
        let found = self.migration(vm).unwrap_or_default();
        if found.state() != MigrationState::InDoubt {
            return Err(Status::failed_precondition("it is not in doubt"));
        }
        if run {
            self.state(vm, VmPhase::Running, MigrationState::Failed);
        } else {
            self.state(vm, VmPhase::Ended, MigrationState::Done);
        }
        Ok(())
    }
}
