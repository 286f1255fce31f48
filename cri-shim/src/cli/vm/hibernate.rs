//! `vm hibernate`: a VM's memory goes to its directory, and its process ends. `vm start` continues
//! there.

use anyhow::ensure;

use super::run::claimed;
use super::saved::{SavedFiles, not_saved};
use super::{attached, resize};
use crate::cli::Globals;
use crate::cli::container::events::{self, event};
use crate::cli::container::lifecycle::{NamesArgs, each_name};
use crate::cli::container::{Entry, NetworkMode, clear, state};
use crate::sandbox::{AfterSave, EventAction, SandboxClient, SandboxError, SaveMachine};

pub(super) fn run(globals: &Globals, args: &NamesArgs) -> anyhow::Result<u8> {
    each_name(globals, args.names(), async |containers, name| {
        let entry = containers.find(name)?;
        let _claim = claimed(&entry, name).await?;
        let (client, ..) = state::running(&entry).await?;
        hibernate(&client, &entry).await?;
        Ok(Some(name.to_owned()))
    })
}

async fn hibernate(client: &SandboxClient, entry: &Entry) -> anyhow::Result<()> {
    let record = &entry.record;
    ensure!(
        !record.remove,
        "VM {} is removed when it is off (--rm), so that it cannot hibernate",
        record.name
    );
    check_network(entry)?;
    resize::complete(client, record).await?;
    attached::plug_all(client, &entry.dir, record).await?;
    let files = SavedFiles::hibernated(&entry.dir);
    let (state, memory) = files.create()?;
    let save = SaveMachine {
        state,
        memory,
        disks: Vec::new(),
        plugged: attached::serials(record),
        then: AfterSave::End,
    };
    let saved = client.save_machine(&record.id, save).await;
    if let Err(error) = saved {
        discard(&files, &error);
        return Err(not_saved(error.into(), &record.name, "does not hibernate"));
    }
    client.ended().await;
    events::note(&entry.dir, &event(record, EventAction::Stop));
    clear::release_resources(entry).await;
    Ok(())
}

/// Removes the files of a machine that was not saved. One that does not answer may still write
/// them.
pub(super) fn discard(files: &SavedFiles, error: &SandboxError) {
    if error.kind().is_some()
        && let Err(error) = files.remove()
    {
        crate::cli::report(&error);
    }
}

/// Checks that the guest's addresses are its own, and not those that a network gave its place.
pub(super) fn check_network(entry: &Entry) -> anyhow::Result<()> {
    let record = &entry.record;
    ensure!(
        !matches!(record.network, NetworkMode::Cni(_)),
        "VM {} has its addresses from the network {}, which may give it others next time; VMs with \
         --network nat, user or none can be saved and cloned",
        record.name,
        record.network
    );
    Ok(())
}
