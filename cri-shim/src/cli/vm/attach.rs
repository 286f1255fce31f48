//! `vm attach-disk` and `vm detach-disk`: disks that a VM gets and loses, also while it runs.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::Args;

use super::args::parse_disk_size;
use super::attached::{self, parse_serial};
use super::run::{claimed, is_off};
use super::saved::SavedFiles;
use crate::cli::container::lifecycle::each_name;
use crate::cli::container::{AttachedDisk, Entry, VmRecord, state};
use crate::cli::{Globals, notice};
use crate::sandbox::{BootMachine, SandboxClient, Unplugged};

/// How long a guest may take to release a disk.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(20);

/// How serial numbers begin that nobody chose; a number follows.
const OWN_SERIAL: &str = "disk";

#[derive(Debug, Args)]
pub(super) struct AttachArgs {
    /// Serial number, by which the guest finds the disk: /dev/disk/by-id/virtio-SERIAL [default:
    /// the first of disk1, disk2, … that is free]
    #[arg(long, value_name = "SERIAL", value_parser = parse_serial)]
    serial: Option<String>,

    /// The guest is only to read it
    #[arg(long, conflicts_with = "size")]
    read_only: bool,

    /// Make an empty disk of this size in the VM's directory, which goes with the VM
    #[arg(long, value_name = "SIZE", value_parser = parse_disk_size)]
    #[arg(conflicts_with = "file", required_unless_present = "file")]
    size: Option<u64>,

    /// The VM
    #[arg(value_name = "VM")]
    vm: String,

    /// A file in the format raw, or a block device
    #[arg(value_name = "FILE|DEVICE")]
    file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(super) struct DetachArgs {
    /// Remove a disk that was made by --size, with what is on it
    #[arg(long)]
    delete: bool,

    /// The VM
    #[arg(value_name = "VM")]
    vm: String,

    /// The disk's serial number
    #[arg(value_name = "SERIAL", value_parser = parse_serial)]
    serial: String,
}

pub(super) fn attach(globals: &Globals, args: &AttachArgs) -> anyhow::Result<u8> {
    // What depends on no VM is reported first.
    let path = match &args.file {
        Some(file) => Some(attached::check_file(file, args.read_only)?),
        None => None,
    };
    let names = std::slice::from_ref(&args.vm);
    each_name(globals, names, async |containers, name| {
        let mut entry = containers.find(name)?;
        let _claim = claimed(&entry, name).await?;
        must_not_hibernate(&entry)?;
        let serial = match &args.serial {
            Some(serial) => serial.clone(),
            None => free_serial(&entry),
        };
        let wanted = AttachedDisk {
            serial: serial.clone(),
            path: path.clone(),
            is_read_only: args.read_only,
        };
        let is_new = add(&mut entry, &wanted)?;
        if let (Some(size), true) = (args.size, is_new) {
            // What is left of a command that was killed is in no record.
            remove_own(&entry, &serial)?;
            attached::create(&entry.dir, &serial, size)?;
        }
        let attached = given(&entry).await;
        if attached.is_err() && is_new {
            forget(&mut entry, &serial);
            let cleared = entry.store().and_then(|()| match wanted.is_own() {
                true => remove_own(&entry, &serial),
                false => Ok(()),
            });
            if let Err(error) = cleared {
                crate::cli::report(&error);
            }
        }
        attached?;
        Ok(Some(serial))
    })
}

/// Writes the VM's record with the disk, and gives it to a machine that runs.
async fn given(entry: &Entry) -> anyhow::Result<()> {
    entry.store()?;
    if is_off(entry).await? {
        return Ok(());
    }
    let (client, ..) = state::running(entry).await?;
    attached::plug_all(&client, &entry.dir, &entry.record).await
}

/// Adds a disk to those of the record; `false` if it is there.
fn add(entry: &mut Entry, wanted: &AttachedDisk) -> anyhow::Result<bool> {
    let name = entry.record.name.clone();
    let vm = entry.record.vm.get_or_insert_with(VmRecord::default);
    if vm.attached.contains(wanted) {
        return Ok(false);
    }
    for one in &vm.attached {
        ensure!(
            one.serial != wanted.serial,
            "VM {name} has another disk {}: choose another --serial, or detach that one first",
            one.serial
        );
        if let (Some(path), true) = (&one.path, one.path == wanted.path) {
            bail!(
                "VM {name} has {} already, as the disk {}",
                path.display(),
                one.serial
            );
        }
    }
    // Its own and cloud-init's are there besides.
    let most = BootMachine::MOST_DISKS - 2;
    ensure!(
        vm.attached.len() < most,
        "VM {name} has {most} attached disks, and there is no room for more"
    );
    vm.attached.push(wanted.clone());
    Ok(true)
}

fn forget(entry: &mut Entry, serial: &str) {
    if let Some(vm) = &mut entry.record.vm {
        vm.attached.retain(|one| one.serial != serial);
    }
}

fn free_serial(entry: &Entry) -> String {
    let taken = attached::serials(&entry.record);
    let mut all = (1_u32..).map(|number| format!("{OWN_SERIAL}{number}"));
    let free = all.find(|serial| !taken.contains(serial));
    free.unwrap_or_default()
}

fn must_not_hibernate(entry: &Entry) -> anyhow::Result<()> {
    let name = &entry.record.name;
    ensure!(
        !SavedFiles::hibernated(&entry.dir).are_finished()?,
        "VM {name} hibernates, with the disks that it has: `podvisor vm start {name}` first"
    );
    Ok(())
}

pub(super) fn detach(globals: &Globals, args: &DetachArgs) -> anyhow::Result<u8> {
    let serial = &args.serial;
    let names = std::slice::from_ref(&args.vm);
    each_name(globals, names, async |containers, name| {
        let mut entry = containers.find(name)?;
        let _claim = claimed(&entry, name).await?;
        must_not_hibernate(&entry)?;
        let all = attached::of(&entry.record);
        let place = all.iter().position(|one| one.serial == *serial);
        let own = attached::own_path(&entry.dir, serial);
        let is_own = match place.and_then(|place| all.get(place)) {
            Some(one) => one.is_own(),
            None => own.exists(),
        };
        ensure!(
            !is_own || args.delete,
            "the disk {serial} was made by --size: what is on it is lost with --delete, which \
             detaches it"
        );
        ensure!(
            is_own || !args.delete,
            "the disk {serial} is not podvisor's to remove: detach it without --delete"
        );
        ensure!(
            place.is_some() || is_own,
            "VM {name} has no attached disk {serial}; `podvisor vm inspect {name}` lists them"
        );
        // Before it is forgotten: who is killed in between detaches it again.
        if !is_off(&entry).await? {
            let (client, ..) = state::running(&entry).await?;
            release(&client, &entry, serial).await?;
        }
        forget(&mut entry, serial);
        entry.store()?;
        if is_own {
            remove_own(&entry, serial)?;
        }
        Ok(Some(serial.clone()))
    })
}

/// Has the guest release a disk, or takes it away.
async fn release(client: &SandboxClient, entry: &Entry, serial: &str) -> anyhow::Result<()> {
    let record = &entry.record;
    let unplugged = client.unplug_disk(&record.id, serial, RELEASE_TIMEOUT);
    if unplugged.await? == Unplugged::Forced {
        notice(&format!(
            "VM {}: its guest did not release the disk {serial} within {} s: it was taken away",
            record.name,
            RELEASE_TIMEOUT.as_secs()
        ));
    }
    Ok(())
}

fn remove_own(entry: &Entry, serial: &str) -> anyhow::Result<()> {
    let path = attached::own_path(&entry.dir, serial);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use crate::cli::container::sample_record;

    use super::*;

    #[test]
    fn a_disk_is_a_vms_once_under_one_serial_number() {
        let dir = tempfile::tempdir().unwrap();
        let mut entry = Entry {
            dir: dir.path().to_owned(),
            record: sample_record("a", "web"),
        };
        let disk = |serial: &str, path: Option<&str>| AttachedDisk {
            serial: serial.to_owned(),
            path: path.map(PathBuf::from),
            is_read_only: false,
        };
        assert_eq!(free_serial(&entry), "disk1");
        assert!(add(&mut entry, &disk("disk1", Some("/x"))).unwrap());
        assert_eq!(free_serial(&entry), "disk2");
        // Again, by who does not know that it was done.
        assert!(!add(&mut entry, &disk("disk1", Some("/x"))).unwrap());
        for (other, said) in [
            (disk("disk1", None), "another disk disk1"),
            (disk("disk2", Some("/x")), "has /x already"),
        ] {
            let error = add(&mut entry, &other).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        assert!(add(&mut entry, &disk("own", None)).unwrap());
        forget(&mut entry, "disk1");
        assert_eq!(attached::serials(&entry.record), ["own"]);
        for number in 1.. {
            if let Err(error) = add(&mut entry, &disk(&format!("d{number}"), None)) {
                assert!(error.to_string().contains("no room"), "{error}");
                break;
            }
        }
        assert_eq!(attached::of(&entry.record).len(), 29);
    }
}
