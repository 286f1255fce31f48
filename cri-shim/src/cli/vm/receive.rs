//! `vm receive`: the other side of `vm migrate`, which runs it. The VM comes by the standard input,
//! what is answered goes to the standard output.
//!
//! The VM counts as one that is removed when it ends until all of it is here, so that nothing is
//! left of one that did not arrive, whoever was killed. The record of one that arrives is on the
//! disk before the other side hears that its machine is ready, which it gives away only then. It
//! says that it arrives ([`super::arrival`]) until the machine runs here.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use oci_spec::runtime::Process;
use tokio::sync::mpsc;
use tracing::debug;

use super::arrival;
use super::boot::{Beginning, Loader, boot};
use super::disk;
use super::hibernate::check_network;
use super::run::{discard, free_port};
use super::transfer::{self, Answer, Offer};
use crate::cli::Globals;
use crate::cli::container::claim::Claim;
use crate::cli::container::events::{self, event};
use crate::cli::container::{Entry, NetworkArgs, NetworkMode, Record, RestartArg, sweep};
use crate::cli::guest::check_memory;
use crate::cli::run::now;
use crate::cli::signals::{Signals, exit_code_of};
use crate::cli::terminal;
use crate::sandbox::{
    BootEvent, BootPhase, EventAction, IncomingMachine, MigrationState, SandboxClient,
    SandboxError, random_id,
};

/// Most seconds that the other side may ask to be waited for.
const MAX_PATIENCE: u64 = 3600;

#[derive(Debug, Args)]
pub(super) struct ReceiveArgs {
    /// Name of the VM here, whatever the other side calls it
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Do not jail the machine's process: for hosts that do not let podvisor do so
    #[arg(long)]
    no_jail: bool,
}

pub(super) fn run(globals: &Globals, args: &ReceiveArgs) -> anyhow::Result<u8> {
    ensure!(
        !terminal::is_terminal(io::stdin()),
        "the virtual machine comes by the standard input: `podvisor vm migrate` runs this command"
    );
    let duplicate = |fd: io::Result<_>| fd.map(File::from);
    let from = duplicate(io::stdin().as_fd().try_clone_to_owned());
    let to = duplicate(io::stdout().as_fd().try_clone_to_owned());
    let (from, to) = (from?, to?);
    let runtime = crate::cli::runtime()?;
    let code = runtime.block_on(receive(globals, args, from, to));
    // A thread may still wait for the standard input.
    runtime.shutdown_background();
    code
}

async fn receive(
    globals: &Globals,
    args: &ReceiveArgs,
    from: File,
    to: File,
) -> anyhow::Result<u8> {
    let mut signals = Signals::new()?;
    let offer = {
        let from = from.try_clone()?;
        tokio::task::spawn_blocking(move || transfer::receive_offer(from))
    };
    let offer = offer.await.context("the VM is not heard of")??;
    let mut made = None;
    let prepared = tokio::select! {
        prepared = prepare(globals, args, &offer, (&from, &to), &mut made) => prepared,
        signal = signals.ending() => {
            give_up(made).await;
            return Ok(exit_code_of(signal));
        }
    };
    let client = match prepared {
        Ok(client) => client,
        Err(error) => {
            give_up(made).await;
            let refusal = Some(crate::cli::message(&error));
            // It is the other side's to show it, if that is still there.
            return match transfer::reply(
                &to,
                &Answer {
                    refusal,
                    ..Answer::default()
                },
            ) {
                Ok(()) => Ok(crate::cli::FAILURE),
                Err(_) => Err(error),
            };
        }
    };
    let Some((mut entry, claim)) = made else {
        return Ok(crate::cli::FAILURE);
    };
    let (id, migration) = (entry.record.id.clone(), &offer.migration);
    let arrived = {
        let arrives = arrive(&client, &mut entry, &offer, from, to);
        tokio::pin!(arrives);
        loop {
            tokio::select! {
                arrived = &mut arrives => break arrived,
                _ = signals.ending() => {
                    if let Err(error) = client.cancel_migration(&id, migration).await {
                        // It is too late, and over in a moment.
                        crate::cli::notice(&error.to_string());
                    }
                }
            }
        }
    };
    let reason = match arrived {
        Ok(None) => return Ok(0),
        Ok(Some(reason)) => reason,
        Err(error) => match error.downcast_ref::<SandboxError>() {
            Some(gone) if gone.is_gone() => gone.to_string(),
            // Its process may have taken the machine: it is left alone.
            _ => return Err(error),
        },
    };
    give_up(Some((entry, claim))).await;
    Err(anyhow::anyhow!("{}", reason.escape_debug()).context("the virtual machine did not arrive"))
}

/// Removes what there is of a VM that does not arrive.
async fn give_up(made: Option<(Entry, Claim)>) {
    if let Some((entry, claim)) = made {
        drop(claim);
        discard(&entry).await;
    }
}

/// Makes all of the VM but its machine, for which its process waits then.
async fn prepare(
    globals: &Globals,
    args: &ReceiveArgs,
    offer: &Offer,
    (from, to): (&File, &File),
    made: &mut Option<(Entry, Claim)>,
) -> anyhow::Result<SandboxClient> {
    let begun = vec![BootEvent::now(BootPhase::Begun)];
    let loader = Loader::find()?;
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let growth = offer.record.vm.as_ref().map_or(0, |vm| vm.growth);
    check_memory(offer.record.memory.saturating_add(growth), &meminfo)?;
    let containers = globals.containers()?;
    sweep(&containers).await?;
    let record = record(args, offer.record.clone())?;
    let entry = {
        let (entry, claim) = containers.create(record)?;
        &made.insert((entry, claim)).0
    };
    check_network(entry)?;
    events::note(&entry.dir, &event(&entry.record, EventAction::Create));
    // By its content alone: the other side names no image that it does not have.
    let known = globals.store()?.resolve_disk(&entry.record.image_id).ok();
    let known = known.filter(|image| image.id().to_string() == entry.record.image_id);
    let known = known.filter(|image| {
        let meta = fs::metadata(image.path());
        meta.is_ok_and(|meta| meta.len() == offer.disk.image)
    });
    let wants_image = known.is_none();
    transfer::reply(
        to,
        &Answer {
            wants_image,
            ..Answer::default()
        },
    )?;
    let store = {
        let (from, dir) = (from.try_clone()?, entry.dir.clone());
        let (files, shape) = (offer.files.clone(), offer.disk);
        move || {
            transfer::receive_files(&from, &dir, &files)?;
            match known {
                Some(image) => disk::link_image(&dir, &image)?,
                None => {
                    let image = disk::create_image(&dir)?;
                    transfer::receive_image(&from, &image, shape.image)?;
                }
            }
            disk::create_empty(&dir, &shape)
        }
    };
    let stored = tokio::task::spawn_blocking(store).await;
    stored.context("the VM's disk is not stored")??;
    let incoming = IncomingMachine {
        migration: offer.migration.clone(),
        limit: Duration::from_secs(offer.patience.min(MAX_PATIENCE)),
    };
    let beginning = Beginning::Arrives(incoming);
    boot(entry, &loader, &NetworkArgs::default(), beginning, begun).await
}

/// Returns the record of a VM that comes, with what this host decides.
fn record(args: &ReceiveArgs, theirs: Record) -> anyhow::Result<Record> {
    let attached = theirs.vm.as_ref().is_some_and(|vm| !vm.attached.is_empty());
    ensure!(
        theirs.volumes.is_empty() && !attached,
        "the other host names files of this one: directories that VM {} shares, or attached disks",
        theirs.name.escape_debug()
    );
    let now = now();
    let mut record = Record {
        id: random_id().context("cannot make up an id for the VM")?,
        name: args.name.clone().unwrap_or_else(|| theirs.name.clone()),
        created: now.as_secs(),
        created_nanos: now.subsec_nanos(),
        remove: true,
        restart: RestartArg::No,
        jailed: !args.no_jail,
        io_limits: Vec::new(),
        process: Process::default(),
        health: None,
        ..theirs
    };
    if let Some(vm) = &mut record.vm {
        vm.arriving = true;
    }
    let of_ssh = record.vm.as_ref().and_then(|vm| vm.ssh_port);
    if record.network == NetworkMode::User
        && let Some(before) = of_ssh
    {
        // That of the other host may be another one's here.
        let free = free_port()?;
        record.ports.retain(|port| port.host_port != before);
        record.ports.push(free);
        if let Some(vm) = &mut record.vm {
            vm.ssh_port = Some(free.host_port);
        }
    }
    Ok(record)
}

/// Carries the bytes between the other side and the machine's process, until the machine runs here;
/// or returns why it never will.
async fn arrive(
    client: &SandboxClient,
    entry: &mut Entry,
    offer: &Offer,
    mut from: File,
    to: File,
) -> anyhow::Result<Option<String>> {
    let id = entry.record.id.clone();
    let (ours, theirs) = UnixStream::pair().context("cannot make a connection")?;
    let (mut into, out) = (ours.try_clone()?, ours.try_clone()?);
    client
        .receive_machine(&id, &offer.migration, theirs.into())
        .await?;
    transfer::reply(&to, &Answer::default())?;
    thread::Builder::new()
        .name("vm-comes".to_owned())
        .spawn(move || {
            if let Err(error) = transfer::carry(&mut from, &mut into) {
                debug!(%error, "the connection ended");
            }
            let _ = into.shutdown(Shutdown::Write);
        })?;
    if let Err(error) = answer(client, entry, offer, out, to).await {
        debug!(%error, "the other side hears no more");
        let _ = ours.shutdown(Shutdown::Both);
    }
    let mut seen = 0;
    loop {
        let info = client.migration_after(&id, seen).await?;
        seen = info.version;
        match info.state {
            MigrationState::Done => {
                if let Err(error) = arrival::has_come(entry) {
                    crate::cli::report(&error);
                }
                return Ok(None);
            }
            state if state.is_final() => return Ok(Some(info.reason)),
            _ => {}
        }
    }
}

/// Carries what the machine's process says to the other side.
async fn answer(
    client: &SandboxClient,
    entry: &mut Entry,
    offer: &Offer,
    mut out: UnixStream,
    mut to: File,
) -> anyhow::Result<()> {
    let (said, mut says) = mpsc::channel::<Vec<u8>>(1);
    thread::Builder::new()
        .name("vm-answers".to_owned())
        .spawn(move || {
            let mut buffer = vec![0; 64 << 10];
            while let Ok(count @ 1..) = out.read(&mut buffer) {
                if said.blocking_send(buffer[..count].to_vec()).is_err() {
                    return;
                }
            }
        })?;
    let mut is_kept = false;
    while let Some(bytes) = says.recv().await {
        if !is_kept {
            // What says that it is ready is among the bytes that come after this.
            let info = client.migration(&entry.record.id).await?;
            let state = info.map(|info| info.state);
            if matches!(
                state,
                Some(MigrationState::HandingOver | MigrationState::Done)
            ) {
                entry.record.remove = offer.record.remove;
                entry.store()?;
                is_kept = true;
            }
        }
        to.write_all(&bytes).context("the other side is gone")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::cli::container::{AttachedDisk, VmRecord, sample_record};

    use super::*;

    #[test]
    fn what_this_host_decides_is_not_the_other_sides() {
        let args = ReceiveArgs {
            name: None,
            no_jail: false,
        };
        let port = free_port().unwrap();
        let theirs = Record {
            jailed: false,
            remove: false,
            network: NetworkMode::User,
            ports: vec![port],
            vm: Some(VmRecord {
                ssh_port: Some(port.host_port),
                mac: Some([2; 6]),
                ..VmRecord::default()
            }),
            ..sample_record("a", "web")
        };
        let ours = record(&args, theirs.clone()).unwrap();
        assert!(ours.jailed && ours.remove && ours.id != theirs.id);
        assert_eq!(ours.name, "web");
        let vm = ours.vm.unwrap();
        assert_eq!(ours.ports.len(), 1);
        assert_eq!(vm.ssh_port, Some(ours.ports[0].host_port));
        assert_eq!(vm.mac, Some([2; 6]));
        assert!(vm.arriving);
        let mut with_disk = theirs.clone();
        if let Some(vm) = &mut with_disk.vm {
            vm.attached.push(AttachedDisk {
                serial: "disk1".to_owned(),
                path: Some("/etc/shadow".into()),
                is_read_only: true,
            });
        }
        let refused = record(&args, with_disk).unwrap_err().to_string();
        assert!(refused.contains("attached disks"), "{refused}");
        let args = ReceiveArgs {
            name: Some("other".to_owned()),
            no_jail: true,
        };
        let ours = record(&args, theirs).unwrap();
        assert_eq!((&*ours.name, ours.jailed), ("other", false));
    }
}
