//! `vm resize`: other CPUs and memory of a VM that is off, from its next start on, and a larger
//! disk of any.

use anyhow::ensure;
use clap::Args;

use super::args::parse_disk_size;
use super::disk;
use super::run::{claimed, is_off};
use super::saved::SavedFiles;
use crate::cli::container::lifecycle::each_name;
use crate::cli::container::{Record, VmRecord, state};
use crate::cli::guest::{parse_cpus, parse_guest_memory};
use crate::cli::{Globals, size};

#[derive(Debug, Args)]
#[group(id = "sizes", required = true, multiple = true)]
pub(super) struct Sizes {
    /// Virtual CPUs
    #[arg(long, value_name = "N", value_parser = parse_cpus)]
    cpus: Option<u8>,

    /// Memory, with a unit: 512M, 2G
    #[arg(short, long, value_name = "SIZE", value_parser = parse_guest_memory)]
    memory: Option<u64>,

    /// Size of the disk, at least the present one, also while the VM runs; cloud-init grows the
    /// guest's file system at its next boot, `growpart` and `resize2fs` do at once
    #[arg(long, value_name = "SIZE", value_parser = parse_disk_size)]
    disk: Option<u64>,
}

#[derive(Debug, Args)]
pub(super) struct ResizeArgs {
    #[command(flatten)]
    sizes: Sizes,

    /// Names or ids
    #[arg(value_name = "VM", required = true)]
    vms: Vec<String>,
}

pub(super) fn run(globals: &Globals, args: &ResizeArgs) -> anyhow::Result<u8> {
    each_name(globals, &args.vms, async |containers, name| {
        let mut entry = containers.find(name)?;
        let _claim = claimed(&entry, name).await?;
        let is_off = is_off(&entry).await?;
        ensure!(
            is_off || args.sizes.cpus.is_none() && args.sizes.memory.is_none(),
            "VM {name} runs, and only its disk grows then: `podvisor vm stop {name}` first"
        );
        ensure!(
            !SavedFiles::hibernated(&entry.dir).are_finished()?,
            "VM {name} hibernates, with the memory and CPUs that it has: start and stop it first"
        );
        if let Some(wanted) = args.sizes.disk {
            let now = entry.record.vm.as_ref().map_or(0, |vm| vm.disk_size);
            ensure!(
                wanted >= now,
                "--disk {}: VM {name} has {}, and a disk is not made smaller",
                size::human(wanted),
                size::human(now)
            );
            match is_off {
                true => disk::grow(&entry.dir, wanted)?,
                false => {
                    let (client, ..) = state::running(&entry).await?;
                    client
                        .grow_disk(&entry.record.id, disk::SERIAL, wanted)
                        .await?;
                }
            }
        }
        entry.record = resized(entry.record.clone(), &args.sizes);
        entry.store()?;
        Ok(Some(name.to_owned()))
    })
}

fn resized(record: Record, sizes: &Sizes) -> Record {
    Record {
        cpus: sizes.cpus.unwrap_or(record.cpus),
        memory: sizes.memory.unwrap_or(record.memory),
        vm: record.vm.map(|vm| VmRecord {
            disk_size: sizes.disk.unwrap_or(vm.disk_size),
            ..vm
        }),
        ..record
    }
}

#[cfg(test)]
mod tests {
    use crate::cli::container::sample_record;

    use super::*;

    #[test]
    fn what_is_not_asked_for_stays() {
        let record = Record {
            vm: Some(VmRecord {
                disk_size: 5,
                ..VmRecord::default()
            }),
            ..sample_record("a", "one")
        };
        let sizes = |cpus, memory, disk| Sizes { cpus, memory, disk };
        let shape = |record: Record| (record.cpus, record.memory, record.vm.unwrap().disk_size);
        let (cpus, memory) = (record.cpus, record.memory);
        let none = resized(record.clone(), &sizes(None, None, None));
        assert_eq!(shape(none), (cpus, memory, 5));
        let all = resized(record, &sizes(Some(3), Some(7), Some(9)));
        assert_eq!(shape(all), (3, 7, 9));
    }
}
