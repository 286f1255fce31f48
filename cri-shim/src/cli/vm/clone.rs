//! `vm clone`: new VMs that continue from the memory of another one, each with its own disk, name
//! and network.
//!
//! A clone's memory is the snapshot's file until the clone writes it, so that a clone takes about
//! as long to make as its copy of the disk. Its guest learns of its own identity as far as there
//! is somebody to tell it: the generation ID changes for all, which reseeds random numbers; an
//! agent runs a script for the host name, the machine's id and the SSH server's keys; cloud-init
//! sees a new instance at the guest's next boot.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use futures_util::future::join_all;
use tokio::time::{Instant, sleep};
use tracing::debug;

use super::boot::{Beginning, Loader, boot};
use super::run::{claimed, discard, free_port};
use super::snapshot::VmSnapshot;
use super::{attached, disk};
use crate::cli::Globals;
use crate::cli::container::events::{self, event};
use crate::cli::container::{Containers, Entry, NetworkArgs, NetworkMode, Record, state, sweep};
use crate::cli::format::SHORT_ID;
use crate::cli::run::{now, parse_hostname};
use crate::sandbox::guest::{Program, ProgramExit};
use crate::sandbox::{BootEvent, BootPhase, ContinueAs, EventAction, SandboxClient, random_id};

/// What an agent runs in a clone: `sh -c SCRIPT sh NAME`.
const IDENTITY: &str = include_str!("identity.sh");

/// How long an agent may take to tell its guest who it is.
const IDENTITY_LIMIT: Duration = Duration::from_secs(60);

/// How long an agent is waited for that has not opened its port again. One that was there when the
/// machine was saved still has it open.
const AGENT_WAIT: Duration = Duration::from_secs(5);

/// Delay between two looks at whether there is an agent.
const AGENT_RETRY: Duration = Duration::from_millis(100);

/// Most clones that are made by one command.
const MAX_CLONES: u16 = 1000;

#[derive(Debug, Args)]
pub(super) struct CloneArgs {
    /// How many clones to make, called NAME-1, NAME-2 and so on [default: one, called NAME]
    #[arg(short = 'n', long, value_name = "COUNT")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_CLONES)))]
    count: Option<u16>,

    /// The VM, which runs or is paused, or one of its snapshots
    #[arg(value_name = "VM[:SNAPSHOT]")]
    from: String,

    /// Name of the clone, and its host name
    #[arg(value_name = "NAME")]
    name: String,
}

pub(super) fn run(globals: &Globals, args: &CloneArgs) -> anyhow::Result<u8> {
    let containers = globals.containers()?;
    let loader = Loader::find()?;
    let names: Vec<String> = match args.count {
        None => vec![args.name.clone()],
        Some(count) => (1..=count)
            .map(|number| format!("{}-{number}", args.name))
            .collect(),
    };
    for name in &names {
        containers.check(Some(name))?;
    }
    crate::cli::runtime()?.block_on(async {
        sweep(&containers).await?;
        let (vm, snapshot) = match args.from.split_once(':') {
            Some((vm, snapshot)) => (vm, Some(snapshot)),
            None => (&*args.from, None),
        };
        let entry = containers.find(vm)?;
        let claim = claimed(&entry, vm).await?;
        let (snapshot, is_own) = match snapshot {
            Some(name) => (VmSnapshot::find(&entry, name)?, false),
            None => {
                let (client, ..) = state::running(&entry).await?;
                (VmSnapshot::take(&client, &entry, None).await?, true)
            }
        };
        let cloning = Cloning {
            containers: &containers,
            origin: &entry,
            snapshot: &snapshot,
            loader: &loader,
        };
        let mut code = 0;
        let mut made = Vec::new();
        for name in &names {
            match cloning.make(name).await {
                Ok(clone) => {
                    crate::cli::print(&format!("{name}\n"))?;
                    made.push(clone);
                }
                Err(error) => {
                    crate::cli::report(&error.context(format!("clone {name}")));
                    code = crate::cli::FAILURE;
                    break;
                }
            }
        }
        if is_own && let Err(error) = snapshot.remove() {
            crate::cli::report(&error);
        }
        drop(claim);
        join_all(made.iter().map(|(client, entry)| identify(client, entry))).await;
        Ok(code)
    })
}

/// What clones are made of.
struct Cloning<'a> {
    containers: &'a Containers,
    origin: &'a Entry,
    snapshot: &'a VmSnapshot,
    loader: &'a Loader,
}

impl Cloning<'_> {
    async fn make(&self, name: &str) -> anyhow::Result<(SandboxClient, Entry)> {
        let begun = vec![BootEvent::now(BootPhase::Begun)];
        let saved = self.snapshot.files().open(ContinueAs::Copy)?;
        let record = clone_record(self.snapshot.record()?, name)?;
        let (entry, _claim) = self.containers.create(record)?;
        events::note(&entry.dir, &event(&entry.record, EventAction::Create));
        let booted = async {
            disk::clone(&self.origin.dir, &self.snapshot.dir, &entry.dir)?;
            attached::clone(&entry.record, &self.snapshot.dir, &entry.dir)?;
            let network = NetworkArgs::default();
            boot(
                &entry,
                self.loader,
                &network,
                Beginning::Saved(saved),
                begun,
            )
            .await
        };
        match booted.await {
            Ok(client) => Ok((client, entry)),
            Err(error) => {
                discard(&entry).await;
                Err(error)
            }
        }
    }
}

/// Returns the record of a clone: its origin's, with a name and an id of its own, and without what
/// there can be once only.
fn clone_record(origin: Record, name: &str) -> anyhow::Result<Record> {
    let id = random_id().context("cannot make up an id for the VM")?;
    let short: String = id.chars().take(SHORT_ID).collect();
    let now = now();
    let mut vm = origin
        .vm
        .clone()
        .context("the snapshot is not one of a VM")?;
    vm.mac = None;
    vm.arriving = false;
    ensure!(
        !origin.is_pod && origin.pod.is_none(),
        "the snapshot is not one of a VM"
    );
    let mut ports = Vec::new();
    if origin.network == NetworkMode::User {
        let free = free_port()?;
        vm.ssh_port = Some(free.host_port);
        ports.push(free);
    }
    Ok(Record {
        hostname: parse_hostname(name).unwrap_or(short),
        name: name.to_owned(),
        created: now.as_secs(),
        created_nanos: now.subsec_nanos(),
        ports,
        vm: Some(vm),
        id,
        ..origin
    })
}

/// Has the guest's agent give the guest its own identity.
async fn identify(client: &SandboxClient, entry: &Entry) {
    let record = &entry.record;
    let until = Instant::now() + AGENT_WAIT;
    while let Err(error) = client.ping_guest_agent(&record.id).await {
        if Instant::now() > until {
            debug!(%error, vm = record.name, "no agent tells the guest who it is");
            return crate::cli::notice(&format!(
                "VM {}: no agent answers, so that its guest keeps host name, machine id and SSH \
                 host keys until it boots again with cloud-init",
                record.name
            ));
        }
        sleep(AGENT_RETRY).await;
    }
    let arguments = ["-c", IDENTITY, "sh", &record.hostname];
    let program = Program {
        path: "/bin/sh".to_owned(),
        arguments: arguments.map(str::to_owned).into(),
        environment: vec!["PATH=/usr/sbin:/usr/bin:/sbin:/bin".to_owned()],
        input: Vec::new(),
    };
    let said = match client
        .run_in_guest(&record.id, program, IDENTITY_LIMIT)
        .await
    {
        Ok(end) if end.exit == ProgramExit::Code(0) => return,
        Ok(end) => String::from_utf8_lossy(&end.stderr).trim().to_owned(),
        Err(error) => error.to_string(),
    };
    crate::cli::notice(&format!(
        "VM {}: its guest was not told all of its new identity: {}",
        record.name,
        said.escape_debug()
    ));
}

#[cfg(test)]
mod tests {
    use crate::cli::container::{VmRecord, sample_record};

    use super::*;

    #[test]
    fn a_clone_has_its_own_name_and_id_and_its_origins_shape() {
        let origin = Record {
            cpus: 2,
            vm: Some(VmRecord {
                disk_size: 7,
                ssh_port: Some(22),
                ssh_keys: vec!["k".to_owned()],
                has_autologin: true,
                firmware: Some("/f".into()),
                mac: Some([2; 6]),
                ..VmRecord::default()
            }),
            network: NetworkMode::User,
            ..sample_record("a", "one")
        };
        let clone = clone_record(origin.clone(), "two").unwrap();
        assert_eq!(
            (clone.name.as_str(), clone.hostname.as_str()),
            ("two", "two")
        );
        assert_ne!(clone.id, origin.id);
        assert_eq!((clone.cpus, clone.memory), (2, origin.memory));
        let (vm, of_origin) = (clone.vm.unwrap(), origin.vm.clone().unwrap());
        assert_eq!((vm.disk_size, &vm.ssh_keys), (7, &of_origin.ssh_keys));
        assert_eq!(vm.mac, None);
        // Two cannot have one port.
        assert_eq!(clone.ports.len(), 1);
        assert_eq!(vm.ssh_port, Some(clone.ports[0].host_port));
        let container = sample_record("b", "container");
        assert!(clone_record(container, "two").is_err());
    }

    #[test]
    fn what_runs_in_a_guest_is_a_script_that_takes_its_name() {
        let root = tempfile::tempdir().unwrap();
        for dir in ["etc/ssh", "proc/sys/kernel/random"] {
            std::fs::create_dir_all(root.path().join(dir)).unwrap();
        }
        let path = |name: &str| root.path().join(name);
        let read = |name: &str| std::fs::read_to_string(path(name)).unwrap();
        for (name, text) in [
            ("proc/sys/kernel/hostname", "old\n"),
            (
                "proc/sys/kernel/random/uuid",
                "01234567-89ab-4def-8123-456789abcdef\n",
            ),
            ("etc/hostname", "old\n"),
            (
                "etc/hosts",
                "127.0.0.1 localhost\n127.0.1.1 old.example old\n",
            ),
            ("etc/machine-id", "old\n"),
        ] {
            std::fs::write(path(name), text).unwrap();
        }
        // In a directory that stands for the guest's root.
        let script = IDENTITY.replace(" /", &format!(" {}/", root.path().display()));
        let script = script.replace(">/", &format!(">{}/", root.path().display()));
        let script = script.replace("</", &format!("<{}/", root.path().display()));
        let script = script.replace(&format!("{}/dev/null", root.path().display()), "/dev/null");
        let ran = std::process::Command::new("sh")
            .args(["-c", &script, "sh", "new"])
            .output()
            .unwrap();
        assert!(ran.status.success(), "{ran:?}");
        assert_eq!(read("proc/sys/kernel/hostname"), "new\n");
        assert_eq!(read("etc/hostname"), "new\n");
        assert_eq!(read("etc/machine-id"), "0123456789ab4def8123456789abcdef\n");
        let hosts = read("etc/hosts");
        assert_eq!(hosts, "127.0.0.1 localhost\n127.0.1.1 new new\n");
    }
}
