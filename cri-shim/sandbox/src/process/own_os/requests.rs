//! The requests about a container whose process is a machine.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use podvisor_host::signal::SIGKILL;

use super::super::super::error::SandboxError;
use super::super::super::types::{
    BootMachine, BootReport, ContainerStats, DumpInfo, DumpMachine, MigrationInfo, ProcessExit,
    ReadKernel, RefusalKind, SaveMachine,
};
use super::super::super::wire::{Answer, Call};
use super::super::blocking::blocking;
use super::super::entries::not_found;
use super::super::fds::Fds;
use super::system::OwnOs;
use super::vm::Vm;
use super::{files, migration, plug, programs};

/// Executes a request.
pub(in super::super) async fn answer(
    system: &Arc<OwnOs>,
    call: Call,
    mut fds: Fds,
) -> Result<Answer, SandboxError> {
    match call {
        Call::BootMachine(header) => {
            let boot = header.with_files(|| fds.next())?;
            return Ok(Answer::Started(OwnOs::boot(system, boot).await?));
        }
        Call::ReadKernel { cmdline, memory } => {
            let read = ReadKernel {
                kernel: fds.next()?.into(),
                initramfs: fds.next()?.into(),
                cmdline,
                memory,
                image: fds.next()?.into(),
                frame: fds.next()?.into(),
            };
            system.read_kernel(read).await?;
        }
        Call::Wait { id, exec_id: None } => return Ok(Answer::Exit(system.wait(&id).await?)),
        Call::Stats { id, .. } => return Ok(Answer::Stats(Box::new(system.stats(&id)?))),
        Call::Delete { id } => system.delete(&id).await?,
        Call::Stop { id, grace_ms, .. } => {
            system.stop(&id, Duration::from_millis(grace_ms)).await?;
        }
        Call::Signal {
            id,
            exec_id: None,
            signal,
            ..
        } => system.signal(&id, signal).await?,
        Call::Attach {
            id,
            stdio,
            is_whole,
        } => {
            let files = fds.stdio(stdio)?;
            let container = system.entries.get(&id)?;
            // This may have to wait for the log's disk.
            blocking(move || container.streams.attach(files, is_whole)).await??;
        }
        Call::ReopenLog { id } => {
            let (container, log) = (system.entries.get(&id)?, fds.next()?);
            blocking(move || container.streams.reopen_log(log)).await?;
        }
        Call::LimitLog { id, max_bytes } => {
            let (container, other) = (system.entries.get(&id)?, fds.next()?);
            blocking(move || container.streams.limit_log(other, max_bytes)).await?;
        }
        // A machine restarts by its guest's wish alone, and a serial port has no size.
        Call::EndRestarts { id }
        | Call::Resize {
            id, exec_id: None, ..
        } => {
            system.entries.get(&id)?;
        }
        Call::Exec(header) => {
            let files = fds.stdio(header.stdio)?;
            let vm = system.vm_that_runs(&header.id)?;
            programs::start(&vm, *header, files).await?;
        }
        Call::Wait {
            id,
            exec_id: Some(exec_id),
        } => {
            let mut exit = system.entries.get(&id)?.exit(Some(&exec_id))?;
            let known = exit.wait_for(Option::is_some).await;
            let exit = known.ok().and_then(|exit| *exit);
            return Ok(Answer::Exit(exit.ok_or_else(|| not_found(&id))?));
        }
        Call::Signal {
            id,
            exec_id: Some(exec_id),
            signal,
            ..
        } => programs::signal(&system.vm(&id)?, &exec_id, signal).await?,
        Call::GuestAgent { id, ask, limit_ms } => {
            let vm = system.vm_that_runs(&id)?;
            let limit = Duration::from_millis(limit_ms);
            let answer = vm.ask_agent("ask the guest's agent", *ask, limit).await?;
            return Ok(Answer::GuestAgent(answer));
        }
        Call::CopyFile { id, path, write } => {
            let vm = system.vm_that_runs(&id)?;
            let copied = files::copy(&vm, &path, write, fds.next()?).await?;
            return Ok(Answer::Copied(copied));
        }
        Call::SaveMachine {
            id,
            disks,
            plugged,
            then,
        } => {
            let vm = system.vm_that_runs(&id)?;
            let (state, memory) = (fds.next()?.into(), fds.next()?.into());
            let disks = (0..disks.min(BootMachine::MOST_DISKS)).map(|_| fds.next());
            let save = SaveMachine {
                state,
                memory,
                disks: disks.collect::<Result<_, _>>()?,
                plugged,
                then,
            };
            system.save(&vm, save).await?;
        }
        Call::DumpMemory { id, name, limit_ms } => {
            let vm = system.vm_that_runs(&id)?;
            let dump = DumpMachine {
                name,
                file: fds.next()?.into(),
                limit: Duration::from_millis(limit_ms),
            };
            OwnOs::begin_dump(system, &vm, dump)?;
        }
        Call::Dump { id, is_end } => {
            let vm = system.vm(&id)?;
            let info = match is_end {
                true => system.dump_ended(&vm).await?,
                false => vm.dumps.latest(),
            };
            return Ok(Answer::Dump(info.map(Box::new)));
        }
        Call::GrowDisk { id, serial, bytes } => {
            let vm = system.vm_that_runs(&id)?;
            system.grow_disk(&vm, serial, bytes).await?;
        }
        Call::SetCpus { count } => system.set_cpus(count).await?,
        Call::SetLinks { id, down } => {
            let vm = system.vm_that_runs(&id)?;
            system.set_links(&vm, down).await?;
        }
        Call::Grow { bytes, patience_ms } => {
            let patience = Duration::from_millis(patience_ms);
            return Ok(Answer::Grown(system.grow(bytes, patience).await?));
        }
        Call::PlugDisk {
            id,
            serial,
            is_read_only,
        } => {
            let vm = system.vm_that_runs(&id)?;
            let file = fds.next()?.into();
            system
                .plug_disk(&vm, plug::disk(serial, file, is_read_only)?)
                .await?;
        }
        Call::UnplugDisk {
            id,
            serial,
            limit_ms,
        } => {
            let vm = system.vm_that_runs(&id)?;
            let limit = Duration::from_millis(limit_ms);
            let unplugged = system.unplug_disk(&vm, &serial, limit).await?;
            return Ok(Answer::Unplugged(unplugged));
        }
        Call::Reboot { id, is_reset } => {
            let vm = system.vm_that_runs(&id)?;
            vm.migrations.must_be_over()?;
            match is_reset {
                true => {
                    vm.reset()?;
                    // The next machine runs, whatever the one before did.
                    system.is_paused.store(false, Ordering::Relaxed);
                }
                false => Vm::soft_reboot(&vm).await?,
            }
        }
        Call::SendMachine { id, send } => {
            system.vm(&id)?.must_not_be_saved()?;
            migration::send(system, &id, *send, fds.next()?)?;
        }
        Call::ReceiveMachine { id, migration } => {
            migration::give_connection(system, &id, &migration, fds.next()?)?;
        }
        Call::CancelMigration { id, migration } => {
            system
                .vm(&id)?
                .migrations
                .named(&migration)?
                .cancel()
                .await?;
        }
        Call::ResolveMigration { id, migration, run } => {
            system.resolve_migration(&id, &migration, run).await?;
        }
        Call::Migration { id, seen } => {
            let vm = system.vm(&id)?;
            let info = match seen {
                Some(seen) => Some(system.migration_after(&vm, seen).await?),
                None => vm.migrations.latest().map(|latest| latest.info()),
            };
            return Ok(Answer::Migration(info.map(Box::new)));
        }
        Call::BootReport { id, seen } => {
            let vm = system.vm(&id)?;
            let report = match seen {
                Some(seen) => system.boot_report_after(&vm, seen).await?,
                None => vm.boots().latest(),
            };
            return Ok(Answer::BootReport(Box::new(report)));
        }
        call => {
            return Err(SandboxError::NoAgent {
                request: call.action(),
                advice: "",
            });
        }
    }
    Ok(Answer::Done)
}

impl OwnOs {
    /// Waits for news of a machine's migrations, of which there are none after the sandbox's end:
    /// who waits must not keep its process from ending.
    async fn migration_after(&self, vm: &Vm, seen: u64) -> Result<MigrationInfo, SandboxError> {
        let mut ended = self.ended.subscribe();
        tokio::select! {
            biased;
            info = vm.migrations.after(seen) => Ok(info),
            _ = ended.wait_for(Option::is_some) => Err(SandboxError::refused(
                RefusalKind::WrongState,
                "there is no more news of migrations: the sandbox has ended",
            )),
        }
    }

    /// Waits for the end of a machine's dump, which is not waited for after the sandbox's end.
    async fn dump_ended(&self, vm: &Vm) -> Result<Option<DumpInfo>, SandboxError> {
        let mut ended = self.ended.subscribe();
        tokio::select! {
            biased;
            info = vm.dumps.ended() => Ok(info),
            _ = ended.wait_for(Option::is_some) => Err(SandboxError::refused(
                RefusalKind::WrongState,
                "there is no more news of the dump: the sandbox has ended",
            )),
        }
    }

    /// Waits for news of a boot, of which there are none after the machine's end.
    async fn boot_report_after(&self, vm: &Vm, seen: u64) -> Result<BootReport, SandboxError> {
        let mut exit = vm.container.exit(None)?;
        tokio::select! {
            biased;
            report = vm.boots().after(seen) => Ok(report),
            _ = exit.wait_for(Option::is_some) => Err(SandboxError::refused(
                RefusalKind::WrongState,
                "there is no more news of the boot: the machine has ended",
            )),
        }
    }

    async fn wait(&self, id: &str) -> Result<ProcessExit, SandboxError> {
        let mut exit = self.entries.get(id)?.exit(None)?;
        let known = exit.wait_for(Option::is_some).await;
        known
            .ok()
            .and_then(|exit| *exit)
            .ok_or_else(|| not_found(id))
    }

    /// Returns the machine of a container that has not ended.
    pub(super) fn vm_that_runs(&self, id: &str) -> Result<Arc<Vm>, SandboxError> {
        self.entries.get(id)?;
        let vm = self.vm(id)?;
        match vm.is_running() {
            true => Ok(vm),
            false => Err(SandboxError::refused(
                RefusalKind::WrongState,
                format!("the machine of the container {id} has ended"),
            )),
        }
    }

    fn stats(&self, id: &str) -> Result<ContainerStats, SandboxError> {
        let vm = self.vm(id)?;
        match vm.is_running() {
            true => {
                let mut stats = self.usage.stats(vm.memory());
                // A guest that reboots has none for a moment.
                let disks = vm.machine().map(|machine| machine.disk_traffic());
                let disks = disks.unwrap_or_default();
                stats.io_read_operations = disks.reads;
                stats.io_read_bytes = disks.read_bytes;
                stats.io_write_operations = disks.writes;
                stats.io_write_bytes = disks.write_bytes;
                Ok(stats)
            }
            false => Err(SandboxError::refused(
                RefusalKind::WrongState,
                format!("the machine of the container {id} has ended"),
            )),
        }
    }

    async fn stop(&self, id: &str, grace: Duration) -> Result<(), SandboxError> {
        self.entries.get(id)?;
        let vm = self.vm(id)?;
        if vm.is_running() {
            // First of all: nothing must delay the deadline.
            Vm::stop(&vm, grace);
            self.wake().await;
        }
        Ok(())
    }

    async fn signal(&self, id: &str, signal: u32) -> Result<(), SandboxError> {
        let vm = self.vm(id)?;
        if !vm.is_running() {
            return Ok(());
        }
        match signal == u32::from(SIGKILL) {
            true => vm.kill(),
            // There is one request that any system understands.
            false => {
                self.wake().await;
                Vm::stop(&vm, Duration::MAX);
            }
        }
        Ok(())
    }

    async fn delete(&self, id: &str) -> Result<(), SandboxError> {
        let container = match self.entries.made(id).await {
            Ok(container) => container,
            Err(error) if error.kind() == Some(RefusalKind::NotFound) => return Ok(()),
            Err(error) => return Err(error),
        };
        let vm = self.vm(id)?;
        if vm.is_running() {
            vm.kill();
        }
        let mut exit = container.exit(None)?;
        container.hurry_readers().await;
        // Its last lines are in the log when this is answered.
        let _ = exit.wait_for(Option::is_some).await;
        self.entries.set(id, None);
        self.lock().retain(|vm| vm.container.id != id);
        Ok(())
    }
}
