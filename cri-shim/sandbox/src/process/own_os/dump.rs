//! A machine whose memory is written to a file, for debuggers.
//!
//! The guest stands still meanwhile, but not for longer than it is allowed to: a file system that
//! does not answer keeps a thread, and not the guest. The file counts when all of it is on the disk
//! and the guest has not run in between.

use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::timeout;
use tracing::{info, warn};

use super::super::super::error::SandboxError;
use super::super::super::types::{DumpMachine, DumpState};
use super::refusals::invalid;
use super::system::OwnOs;
use super::vm::Vm;
use crate::machine::{Machine, MachineError, causes};

impl OwnOs {
    /// Begins to dump the memory of a container's machine.
    pub(super) fn begin_dump(
        this: &Arc<Self>,
        vm: &Arc<Vm>,
        dump: DumpMachine,
    ) -> Result<(), SandboxError> {
        if dump.name.is_empty() || dump.name.len() > DumpMachine::MAX_NAME {
            let most = DumpMachine::MAX_NAME;
            return Err(invalid(format!(
                "the name of a dump must have 1 to {most} bytes"
            )));
        }
        if !vm.dumps.begin(&dump.name)? {
            return Ok(());
        }
        let (this, vm) = (Arc::clone(this), Arc::clone(vm));
        tokio::spawn(async move {
            let container = &vm.container.id;
            match this.dump(&vm, dump).await {
                Ok(()) => {
                    info!(container, "the memory is dumped");
                    vm.dumps.change(|info| info.state = DumpState::Done);
                }
                Err(why) => {
                    warn!(container, why, "the memory is not dumped");
                    vm.dumps.change(|info| {
                        info.state = DumpState::Failed;
                        info.reason = why;
                    });
                }
            }
        });
        Ok(())
    }

    async fn dump(&self, vm: &Arc<Vm>, dump: DumpMachine) -> Result<(), String> {
        let refused = |error: SandboxError| causes(&error);
        let failed = |error: MachineError| causes(&error);
        // Nobody pauses, resumes or plugs meanwhile.
        let _turn = self.pausing.lock().await;
        vm.migrations.must_be_over().map_err(refused)?;
        let machine = vm.machine().map_err(refused)?;
        let _saving = vm.begin_saving().map_err(refused)?;
        let was_paused = machine.is_paused();
        if !was_paused {
            machine.pause().await.map_err(failed)?;
        }
        let limit = dump.limit.min(DumpMachine::LONGEST);
        let written = write(vm, &machine, dump.file, limit).await;
        if !was_paused {
            let resumed = machine.resume().await;
            // One that has ended meanwhile was not dumped, which says why.
            written?;
            resumed.map_err(failed)?;
            vm.set_clock();
            return Ok(());
        }
        written
    }
}

async fn write(
    vm: &Arc<Vm>,
    machine: &Arc<Machine>,
    file: File,
    limit: Duration,
) -> Result<(), String> {
    let is_over = Arc::new(AtomicBool::new(false));
    let write = {
        let (vm, machine, is_over) = (Arc::clone(vm), Arc::clone(machine), Arc::clone(&is_over));
        move || {
            machine.dump_to(&file, |progress| {
                if is_over.load(Ordering::Relaxed) {
                    return ControlFlow::Break(());
                }
                vm.dumps.change(|info| {
                    info.done = progress.done;
                    info.total = progress.total;
                });
                ControlFlow::Continue(())
            })
        }
    };
    let written = timeout(limit, tokio::task::spawn_blocking(write)).await;
    is_over.store(true, Ordering::Relaxed);
    match written {
        Ok(Ok(written)) => written.map_err(|error| causes(&error)),
        Ok(Err(error)) => Err(causes(&MachineError::Thread(io::Error::other(error)))),
        Err(_) => Err(format!(
            "the memory was not written within {} s: look at the file system or device that the \
             dump was to be on",
            limit.as_secs()
        )),
    }
}
