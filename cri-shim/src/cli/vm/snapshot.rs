//! `vm snapshot`, `vm snapshots`, `vm rm-snapshot` and `vm restore`: a VM's memory and disk at one
//! moment.
//!
//! Snapshots are in the VM's directory, each in a directory of its name: the files of the saved
//! machine, the VM's own disk, and its record of that time. The image below the disk is the VM's.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use serde::Serialize;

use super::boot::{Beginning, Loader, boot};
use super::hibernate::check_network;
use super::run::{claimed, is_off};
use super::saved::{SavedFiles, not_saved, sync};
use super::{attached, disk, hibernate, resize};
use crate::cli::container::lifecycle::each_name;
use crate::cli::container::{Containers, Entry, NetworkArgs, Record, clear, state, sweep};
use crate::cli::format::{ago, rfc3339};
use crate::cli::table::Table;
use crate::cli::{FormatArgs, Globals, size};
use crate::sandbox::{AfterSave, BootEvent, BootPhase, ContinueAs, SandboxClient, SaveMachine};

/// The directory of a VM's snapshots.
const SNAPSHOTS: &str = "snapshots";

const RECORD: &str = "container.json";

/// What the name of a directory begins with whose snapshot is not complete.
const PARTIAL: &str = ".partial-";

/// Longest name of a snapshot.
const NAME_MAX: usize = 64;

#[derive(Debug, Args)]
pub(super) struct SnapshotArgs {
    /// The VM, which runs or is paused
    #[arg(value_name = "VM")]
    vm: String,

    /// Name of the snapshot, which the VM does not have yet
    #[arg(value_name = "SNAPSHOT", value_parser = parse_name)]
    snapshot: String,
}

#[derive(Debug, Args)]
pub(super) struct ListArgs {
    #[command(flatten)]
    shown: FormatArgs,

    /// The VM [default: all]
    #[arg(value_name = "VM")]
    vms: Vec<String>,
}

#[derive(Debug, Args)]
pub(super) struct RmArgs {
    /// The VM
    #[arg(value_name = "VM")]
    vm: String,

    /// Names of its snapshots
    #[arg(value_name = "SNAPSHOT", required = true)]
    snapshots: Vec<String>,
}

#[derive(Debug, Args)]
pub(super) struct RestoreArgs {
    /// Kill the VM first if it runs
    #[arg(short, long)]
    force: bool,

    /// The VM, which is off
    #[arg(value_name = "VM")]
    vm: String,

    /// The snapshot
    #[arg(value_name = "SNAPSHOT")]
    snapshot: String,
}

/// A snapshot of a VM.
#[derive(Debug)]
pub(super) struct VmSnapshot {
    pub(super) dir: PathBuf,
    name: String,
}

/// What is listed of a snapshot.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct View {
    vm: String,
    name: String,
    created: String,
    /// Bytes on the host's disk.
    size: u64,
    #[serde(skip)]
    at: SystemTime,
}

fn parse_name(text: &str) -> Result<String, String> {
    let is_inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    let is_name = text.len() <= NAME_MAX
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(is_inner);
    match is_name {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "write at most {NAME_MAX} letters, digits, `_`, `.` and `-`"
        )),
    }
}

impl VmSnapshot {
    /// Returns the VM's snapshot of this name.
    pub(super) fn find(entry: &Entry, name: &str) -> anyhow::Result<Self> {
        let found = parse_name(name).ok().map(|name| Self {
            dir: entry.dir.join(SNAPSHOTS).join(&name),
            name,
        });
        let vm = &entry.record.name;
        found.filter(|found| found.dir.is_dir()).with_context(|| {
            format!("VM {vm} has no snapshot `{name}`; `podvisor vm snapshots {vm}` lists them")
        })
    }

    /// Takes one of a VM that runs. Without a name, it is removed when [`Self::remove`] is called,
    /// and never listed.
    pub(super) async fn take(
        client: &SandboxClient,
        entry: &Entry,
        name: Option<&str>,
    ) -> anyhow::Result<Self> {
        check_network(entry)?;
        attached::must_be_copyable(&entry.record)?;
        resize::complete(client, &entry.record).await?;
        attached::plug_all(client, &entry.dir, &entry.record).await?;
        let all = entry.dir.join(SNAPSHOTS);
        let named = name.map(|name| all.join(name));
        if let (Some(named), Some(name)) = (&named, name) {
            ensure!(
                named.symlink_metadata().is_err(),
                "VM {vm} has a snapshot `{name}` already; choose another name, or remove that one \
                 by `podvisor vm rm-snapshot {vm} {name}`",
                vm = entry.record.name
            );
        }
        remove_partial(&all);
        let partial = all.join(format!("{PARTIAL}{}", std::process::id()));
        let taken = Self::write(client, entry, &partial).await;
        let taken = taken.and_then(|()| {
            if let Some(named) = &named {
                fs::rename(&partial, named)
                    .and_then(|()| sync(named))
                    .with_context(|| format!("cannot make {}", named.display()))?;
            }
            anyhow::Ok(())
        });
        let dir = named.unwrap_or_else(|| partial.clone());
        match taken {
            Ok(()) => Ok(Self {
                dir,
                name: name.unwrap_or_default().to_owned(),
            }),
            Err(error) => Err(not_saved(error, &entry.record.name, "has no new snapshot")),
        }
    }

    /// Writes all of it to `dir`. What is written of one that fails is removed.
    async fn write(client: &SandboxClient, entry: &Entry, dir: &Path) -> anyhow::Result<()> {
        let mut make = DirBuilder::new();
        let made = make
            .recursive(true)
            .mode(0o700)
            .create(dir.parent().unwrap_or(dir));
        made.with_context(|| format!("cannot make a directory for {}", dir.display()))?;
        let files = SavedFiles::of(dir.to_owned());
        let (state, memory) = files.create()?;
        let mut disks = vec![disk::create_copy(&entry.dir, dir)?.into()];
        disks.extend(attached::create_copies(&entry.record, dir)?);
        let record = serde_json::to_vec_pretty(&entry.record).context("cannot write JSON")?;
        fs::write(dir.join(RECORD), record).context("cannot write the snapshot's record")?;
        let save = SaveMachine {
            state,
            memory,
            disks,
            plugged: attached::serials(&entry.record),
            then: AfterSave::GoOn,
        };
        let saved = client.save_machine(&entry.record.id, save).await;
        saved.map_err(|error| {
            hibernate::discard(&files, &error);
            error.into()
        })
    }

    /// Returns the files of the saved machine.
    pub(super) fn files(&self) -> SavedFiles {
        SavedFiles::of(self.dir.clone())
    }

    /// Returns the VM as it was recorded then.
    pub(super) fn record(&self) -> anyhow::Result<Record> {
        let path = self.dir.join(RECORD);
        let read = || anyhow::Ok(serde_json::from_slice(&fs::read(&path)?)?);
        read().with_context(|| format!("cannot read the snapshot's record {}", path.display()))
    }

    pub(super) fn remove(&self) -> anyhow::Result<()> {
        self.files().remove()
    }

    /// Returns the complete ones of a VM, by name.
    pub(super) fn all(entry: &Entry) -> anyhow::Result<Vec<Self>> {
        let dir = entry.dir.join(SNAPSHOTS);
        let entries = match fs::read_dir(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.with_context(|| format!("cannot read {}", dir.display()))?,
        };
        let names = entries.flatten().filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            parse_name(&name).ok().map(|name| Self {
                dir: entry.path(),
                name,
            })
        });
        let mut all: Vec<Self> = names.collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    fn view(&self, entry: &Entry) -> View {
        let at = fs::metadata(self.dir.join(RECORD)).and_then(|meta| meta.modified());
        let at = at.unwrap_or(SystemTime::UNIX_EPOCH);
        View {
            vm: entry.record.name.clone(),
            name: self.name.clone(),
            created: rfc3339(at),
            size: self.files().stored(),
            at,
        }
    }
}

/// Removes what processes that were killed have left. Who takes or uses a snapshot has the VM's
/// claim.
fn remove_partial(all: &Path) {
    for entry in fs::read_dir(all).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(PARTIAL)
            && let Err(error) = SavedFiles::of(entry.path()).remove()
        {
            crate::cli::report(&error);
        }
    }
}

pub(super) fn take(globals: &Globals, args: &SnapshotArgs) -> anyhow::Result<u8> {
    let names = std::slice::from_ref(&args.vm);
    each_name(globals, names, async |containers, name| {
        let entry = containers.find(name)?;
        let _claim = claimed(&entry, name).await?;
        let (client, ..) = state::running(&entry).await?;
        VmSnapshot::take(&client, &entry, Some(&args.snapshot)).await?;
        Ok(Some(args.snapshot.clone()))
    })
}

pub(super) fn list(globals: &Globals, args: &ListArgs) -> anyhow::Result<u8> {
    let containers = globals.containers()?;
    let entries = crate::cli::runtime()?.block_on(entries(&containers, &args.vms))?;
    let mut views = Vec::new();
    for entry in entries {
        let all = VmSnapshot::all(&entry)?;
        views.extend(all.iter().map(|snapshot| snapshot.view(&entry)));
    }
    if args.shown.is_json() {
        crate::cli::print_json(&views)?;
        return Ok(0);
    }
    let mut table = Table::new(["VM", "SNAPSHOT", "CREATED", "SIZE"]);
    let now = SystemTime::now();
    for view in &views {
        table.row([
            view.vm.clone(),
            view.name.clone(),
            ago(Some(view.at), now),
            size::human(view.size),
        ]);
    }
    crate::cli::print(&table.render())?;
    Ok(0)
}

async fn entries(containers: &Containers, names: &[String]) -> anyhow::Result<Vec<Entry>> {
    sweep(containers).await?;
    match names {
        [] => containers.list(),
        names => names.iter().map(|name| containers.find(name)).collect(),
    }
}

pub(super) fn rm(globals: &Globals, args: &RmArgs) -> anyhow::Result<u8> {
    let containers = globals.containers()?;
    let vm = &args.vm;
    each_name(globals, &args.snapshots, async |_, name| {
        let entry = containers.find(vm)?;
        let _claim = claimed(&entry, vm).await?;
        VmSnapshot::find(&entry, name)?.remove()?;
        Ok(Some(name.to_owned()))
    })
}

pub(super) fn restore(globals: &Globals, args: &RestoreArgs) -> anyhow::Result<u8> {
    let loader = Loader::find()?;
    let names = std::slice::from_ref(&args.vm);
    each_name(globals, names, async |containers, name| {
        let entry = containers.find(name)?;
        let _claim = claimed(&entry, name).await?;
        let snapshot = VmSnapshot::find(&entry, &args.snapshot)?;
        if !is_off(&entry).await? {
            ensure!(
                args.force,
                "VM {name} runs: stop it first, or give -f to kill it"
            );
            SandboxClient::kill(&entry.dir).await?;
        }
        clear::release_resources(&entry).await;
        // Its memory belongs to the disk that it has.
        let hibernated = SavedFiles::hibernated(&entry.dir);
        ensure!(
            args.force || !hibernated.are_finished()?,
            "VM {name} hibernates: give -f to forget the memory that it has now"
        );
        hibernated.remove()?;
        go_back(&entry, &snapshot, &loader).await?;
        Ok(Some(name.to_owned()))
    })
}

/// Continues a VM that is off from a snapshot, with the snapshot's disk; if that fails, it is off
/// with the disk that it had.
async fn go_back(entry: &Entry, snapshot: &VmSnapshot, loader: &Loader) -> anyhow::Result<()> {
    let then = snapshot.record()?;
    let shape = |record: &Record| {
        let growth = record.vm.as_ref().map_or(0, |vm| vm.growth);
        (record.cpus, record.memory, growth)
    };
    if shape(&then) != shape(&entry.record) {
        let (cpus, memory, growth) = shape(&then);
        bail!(
            "the snapshot has {cpus} CPUs, {} of memory and {} that may be plugged in, and VM {} \
             was resized since: resize it to them first",
            size::human(memory),
            size::human(growth),
            entry.record.name
        );
    }
    ensure!(
        attached::of(&then) == attached::of(&entry.record),
        "the snapshot has the attached disks {:?}, and VM {} has {:?}: attach and detach them so \
         that they are the same first",
        attached::serials(&then),
        entry.record.name,
        attached::serials(&entry.record)
    );
    let saved = snapshot.files().open(ContinueAs::Copy)?;
    let begun = vec![BootEvent::now(BootPhase::Begun)];
    let swapped = disk::swap(&entry.dir, &snapshot.dir, attached::own_names(&then))?;
    let network = NetworkArgs::default();
    match boot(entry, loader, &network, Beginning::Saved(saved), begun).await {
        Ok(_) => swapped.keep(),
        Err(error) => {
            if let Err(error) = SandboxClient::kill(&entry.dir).await {
                crate::cli::report(&error.into());
            }
            clear::release_resources(entry).await;
            swapped.undo()?;
            Err(error.context("the VM is off as before"))
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::cli::container::sample_record;

    use super::*;

    fn entry(dir: &Path) -> Entry {
        Entry {
            dir: dir.to_owned(),
            record: sample_record("a", "vm1"),
        }
    }

    #[test]
    fn complete_snapshots_are_listed_and_half_ones_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let entry = entry(dir.path());
        assert!(VmSnapshot::all(&entry).unwrap().is_empty());
        let all = dir.path().join(SNAPSHOTS);
        for name in ["b", "a", ".partial-1", "-x"] {
            fs::create_dir_all(all.join(name)).unwrap();
        }
        fs::write(all.join("a").join(RECORD), "").unwrap();
        let names = || -> Vec<String> {
            let all = VmSnapshot::all(&entry).unwrap();
            all.into_iter().map(|one| one.name).collect()
        };
        assert_eq!(names(), ["a", "b"]);
        remove_partial(&all);
        assert!(!all.join(".partial-1").exists());
        VmSnapshot::find(&entry, "a").unwrap().remove().unwrap();
        assert_eq!(names(), ["b"]);
        for missing in ["a", "../a", "", ".partial-1"] {
            let said = VmSnapshot::find(&entry, missing).unwrap_err().to_string();
            assert!(said.contains("podvisor vm snapshots vm1"), "{said}");
        }
    }
}
