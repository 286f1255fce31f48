//! `vm resize`: other CPUs and memory of a VM that is off, from its next start on; more CPUs and
//! memory of one that runs, as far as it was made for them; and a larger disk of any.

use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::Args;

use super::args::{growth_between, parse_disk_size};
use super::disk;
use super::run::{claimed, is_off};
use super::saved::SavedFiles;
use crate::cli::container::lifecycle::each_name;
use crate::cli::container::{Record, VmRecord, state};
use crate::cli::guest::{parse_cpus, parse_guest_memory};
use crate::cli::{Globals, size};
use crate::sandbox::SandboxClient;

/// How long a guest may take to use memory that is plugged in, or to release it.
const PLUG_TIMEOUT: Duration = Duration::from_secs(20);

/// The unit in which guests get memory.
const MEMORY_STEP: u64 = 2 << 20;

#[derive(Debug, Args)]
#[group(id = "sizes", required = true, multiple = true)]
pub(super) struct Sizes {
    /// Virtual CPUs; while the VM runs, only more, up to those of --max-cpus
    #[arg(long, value_name = "N", value_parser = parse_cpus)]
    cpus: Option<u8>,

    /// Virtual CPUs that it may get while it runs, from its next start on
    #[arg(long, value_name = "N", value_parser = parse_cpus)]
    max_cpus: Option<u8>,

    /// Memory, with a unit: 512M, 2G; while the VM runs, from that of its start to that of
    /// --max-memory
    #[arg(short, long, value_name = "SIZE", value_parser = parse_guest_memory)]
    memory: Option<u64>,

    /// Memory that it may get while it runs, from its next start on
    #[arg(long, value_name = "SIZE", value_parser = parse_guest_memory)]
    max_memory: Option<u64>,

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
    let sizes = &args.sizes;
    each_name(globals, &args.vms, async |containers, name| {
        let mut entry = containers.find(name)?;
        let _claim = claimed(&entry, name).await?;
        let is_off = is_off(&entry).await?;
        ensure!(
            is_off || sizes.max_cpus.is_none() && sizes.max_memory.is_none(),
            "VM {name} runs, and what it may get meanwhile is decided at its start: `podvisor vm \
             stop {name}` first"
        );
        ensure!(
            !SavedFiles::hibernated(&entry.dir).are_finished()?,
            "VM {name} hibernates, with the memory and CPUs that it has: start and stop it first"
        );
        let wanted = match is_off {
            true => resized(entry.record.clone(), sizes)?,
            false => plugged(entry.record.clone(), sizes)?,
        };
        if let Some(wanted) = sizes.disk {
            let now = entry.record.vm.as_ref().map_or(0, |vm| vm.disk_size);
            ensure!(
                wanted >= now,
                "--disk {}: VM {name} has {}, and a disk is not made smaller",
                size::human(wanted),
                size::human(now)
            );
        }
        if is_off {
            if let Some(wanted) = sizes.disk {
                disk::grow(&entry.dir, wanted)?;
            }
        } else {
            let (client, ..) = state::running(&entry).await?;
            if let Some(wanted) = sizes.disk {
                client
                    .grow_disk(&entry.record.id, disk::SERIAL, wanted)
                    .await?;
                set_disk(&mut entry.record, wanted);
                entry.store()?;
            }
            if let Some(cpus) = sizes.cpus {
                // Who is killed from here on leaves a record of CPUs that the machine gets before
                // it is saved, or from its next start on.
                let before = std::mem::replace(&mut entry.record.cpus, cpus);
                entry.store()?;
                if let Err(error) = client.set_vcpus(cpus).await {
                    entry.record.cpus = before;
                    entry.store()?;
                    return Err(error.into());
                }
            }
            if sizes.memory.is_some() {
                entry.record = wanted;
                // The guest may still come near to it when this is interrupted.
                entry.store()?;
                return plug_memory(&client, &entry.record)
                    .await
                    .map(|()| Some(name.to_owned()));
            }
            return Ok(Some(name.to_owned()));
        }
        entry.record = wanted;
        entry.store()?;
        Ok(Some(name.to_owned()))
    })
}

/// Gives a machine that is to be saved the CPUs of its record, in case a command was killed: they
/// must agree when it goes on.
pub(super) async fn complete(client: &SandboxClient, record: &Record) -> anyhow::Result<()> {
    let may_get_cpus = record.vm.as_ref().is_some_and(|vm| vm.max_cpus > 0);
    if may_get_cpus {
        let completed = client.set_vcpus(record.cpus).await;
        completed.with_context(|| {
            format!(
                "VM {name} was resized to {cpus} CPUs, which its guest does not have: repeat \
                 `podvisor vm resize --cpus {cpus} {name}`",
                name = record.name,
                cpus = record.cpus
            )
        })?;
    }
    Ok(())
}

/// Has the guest of a VM use the memory that its record says.
async fn plug_memory(client: &SandboxClient, record: &Record) -> anyhow::Result<()> {
    let vm = record.vm.clone().unwrap_or_default();
    let (wanted, most) = (vm.grown, vm.growth);
    let grown = client
        .grow(record.memory, wanted, most, PLUG_TIMEOUT)
        .await?;
    let has = size::human(record.memory.saturating_add(grown));
    let name = &record.name;
    match grown.cmp(&wanted) {
        std::cmp::Ordering::Equal => Ok(()),
        std::cmp::Ordering::Less => bail!(
            "the guest of VM {name} uses {has} so far: it needs the driver virtio_mem, which takes \
             the rest as soon as it is there"
        ),
        std::cmp::Ordering::Greater => {
            bail!("the guest of VM {name} still has {has}: it releases memory when its programs do")
        }
    }
}

/// Returns the record of a VM that is off with these sizes.
fn resized(record: Record, sizes: &Sizes) -> anyhow::Result<Record> {
    let own = record.vm.clone().unwrap_or_default();
    let cpus = sizes.cpus.unwrap_or(record.cpus);
    let max_cpus = sizes.max_cpus.unwrap_or(own.max_cpus.max(cpus));
    ensure!(
        max_cpus >= cpus,
        "--max-cpus {max_cpus} is less than the VM's {cpus} CPUs"
    );
    // What was plugged in it has from the next start on.
    let memory = match sizes.memory {
        Some(memory) => memory,
        None => record.memory.saturating_add(own.grown),
    };
    let growth = match sizes.max_memory {
        Some(most) => growth_between(memory, most)?,
        None => {
            let most = record.memory.saturating_add(own.growth);
            let more = most.saturating_sub(memory);
            more - more % crate::machine::GROWTH_UNIT
        }
    };
    let mut record = Record {
        cpus,
        memory,
        vm: record.vm.map(|vm| VmRecord {
            max_cpus,
            growth,
            grown: 0,
            ..vm
        }),
        ..record
    };
    if let Some(disk) = sizes.disk {
        set_disk(&mut record, disk);
    }
    Ok(record)
}

/// Returns the record of a VM that runs with these sizes, as far as it was made for them.
fn plugged(record: Record, sizes: &Sizes) -> anyhow::Result<Record> {
    let own = record.vm.clone().unwrap_or_default();
    let name = &record.name;
    let (now, most) = (record.cpus, own.max_cpus.max(record.cpus));
    let cpus = sizes.cpus.unwrap_or(now);
    ensure!(
        (now..=most).contains(&cpus),
        "--cpus {cpus}: VM {name} runs, with {now} CPUs and at most {most}: `podvisor vm stop \
         {name}` first, and give --max-cpus to change them later while it runs"
    );
    let least = record.memory;
    let most = least.saturating_add(own.growth);
    let memory = sizes.memory.unwrap_or(least.saturating_add(own.grown));
    ensure!(
        (least..=most).contains(&memory),
        "--memory {}: VM {name} runs, with at least {} and at most {}: `podvisor vm stop {name}` \
         first, and give --max-memory to change it later while it runs",
        size::human(memory),
        size::human(least),
        size::human(most)
    );
    let grown = (memory - least).next_multiple_of(MEMORY_STEP);
    Ok(Record {
        cpus,
        vm: record.vm.map(|vm| VmRecord { grown, ..vm }),
        ..record
    })
}

fn set_disk(record: &mut Record, bytes: u64) {
    if let Some(vm) = &mut record.vm {
        vm.disk_size = bytes;
    }
}

#[cfg(test)]
mod tests {
    use crate::cli::container::sample_record;

    use super::*;

    fn record() -> Record {
        Record {
            cpus: 2,
            memory: 1 << 30,
            vm: Some(VmRecord {
                disk_size: 5,
                max_cpus: 4,
                growth: 3 << 30,
                grown: 512 << 20,
                ..VmRecord::default()
            }),
            ..sample_record("a", "one")
        }
    }

    fn sizes(cpus: Option<u8>, memory: Option<u64>) -> Sizes {
        Sizes {
            cpus,
            max_cpus: None,
            memory,
            max_memory: None,
            disk: None,
        }
    }

    fn shape(record: &Record) -> (u8, u8, u64, u64, u64) {
        let vm = record.vm.as_ref().unwrap();
        (record.cpus, vm.max_cpus, record.memory, vm.growth, vm.grown)
    }

    #[test]
    fn what_was_plugged_in_is_there_from_the_next_start_on() {
        let mut disk = sizes(None, None);
        disk.disk = Some(9);
        let record = resized(record(), &disk).unwrap();
        assert_eq!(
            shape(&record),
            (2, 4, (1 << 30) + (512 << 20), (2 << 30) + (512 << 20), 0)
        );
        assert_eq!(record.vm.unwrap().disk_size, 9);
    }

    #[test]
    fn a_vm_that_is_off_takes_any_size_and_keeps_its_bounds() {
        let sized = |sizes: &Sizes| resized(record(), sizes).map(|record| shape(&record));
        let of = |cpus, memory| sized(&sizes(cpus, memory));
        assert_eq!(
            of(Some(1), Some(2 << 30)).unwrap(),
            (1, 4, 2 << 30, 2 << 30, 0)
        );
        // More than there could be before: there can be no more than that.
        assert_eq!(of(Some(8), Some(8 << 30)).unwrap(), (8, 8, 8 << 30, 0, 0));
        let mut more = sizes(None, Some(1 << 30));
        (more.max_cpus, more.max_memory) = (Some(8), Some(9 << 30));
        assert_eq!(sized(&more).unwrap(), (2, 8, 1 << 30, 8 << 30, 0));
        more.max_cpus = Some(1);
        assert!(sized(&more).unwrap_err().to_string().contains("--max-cpus"));
        (more.max_cpus, more.max_memory) = (None, Some(1 << 20));
        assert!(
            sized(&more)
                .unwrap_err()
                .to_string()
                .contains("--max-memory")
        );
    }

    #[test]
    fn a_vm_that_runs_gets_what_it_was_made_for_and_loses_no_cpu() {
        let sized = |cpus, memory| {
            let record = plugged(record(), &sizes(cpus, memory));
            record.map(|record| shape(&record))
        };
        let both = sized(Some(4), Some((2 << 30) + 1)).unwrap();
        assert_eq!(both, (4, 4, 1 << 30, 3 << 30, (1 << 30) + (2 << 20)));
        let less = sized(None, Some(1 << 30)).unwrap();
        assert_eq!(less, (2, 4, 1 << 30, 3 << 30, 0), "memory may become less");
        for (cpus, memory, said) in [
            (Some(1), None, "with 2 CPUs and at most 4"),
            (Some(5), None, "--max-cpus"),
            (None, Some(512 << 20), "at least 1.07GB"),
            (None, Some(5 << 30), "--max-memory"),
        ] {
            let error = sized(cpus, memory).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
