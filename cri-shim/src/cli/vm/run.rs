//! `vm run` and `vm start`.

use std::fs::{self, File};
use std::io::Read as _;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;

use anyhow::{Context as _, ensure};
use clap::Args;
use oci_spec::runtime::Process;
use podvisor_images::Disk;

use super::args::RunArgs;
use super::boot::{Beginning, Loader, boot};
use super::saved::SavedFiles;
use super::seed::Given;
use super::{arrival, console, disk, image, keys, seed, timings};
use crate::cli::container::claim::Claim;
use crate::cli::container::events::{self, event};
use crate::cli::container::lifecycle::{NamesArgs, each_name};
use crate::cli::container::ports::{Port, Protocol, choose_free};
use crate::cli::container::{
    Entry, NetworkArgs, NetworkMode, Record, RestartArg, State, Sweep, VmRecord, clear, sweep,
};
use crate::cli::format::SHORT_ID;
use crate::cli::guest::check_memory;
use crate::cli::pull::Pulled;
use crate::cli::run::{now, parse_hostname};
use crate::cli::signals::{Signals, exit_code_of};
use crate::cli::{Globals, notice};
use crate::sandbox::{BootEvent, BootPhase, ContinueAs, EventAction, SandboxClient, random_id};

/// The signal that stops a VM: any does, by its power button.
const SIGTERM: u8 = 15;

/// Seconds that a guest has to power itself off, unless `vm stop` gives another number.
const STOP_TIMEOUT: u32 = 60;

/// The port of the guest's SSH server.
const SSH: u16 = 22;

pub(super) fn run(globals: &Globals, args: &RunArgs) -> anyhow::Result<u8> {
    args.check()?;
    image::check(args)?;
    let root = globals.root()?;
    let containers = globals.containers()?;
    // Errors that do not depend on the image are reported before it is fetched.
    containers.check(args.name.as_deref())?;
    if let Some(name) = &args.name {
        containers.check_is_free(name)?;
    }
    let loader = Loader::find()?;
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    check_memory(args.memory, &meminfo)?;
    let given = match (&args.user_data, &args.ignition) {
        (_, Some(path)) => Given::Ignition(read_document("--ignition", path)?),
        (Some(path), None) => Given::UserData(read_document("--user-data", path)?),
        (None, None) => Given::Nothing,
    };
    let record = record(args, &root)?;
    seed::check(&record, &given)?;

    let runtime = crate::cli::runtime()?;
    let code = runtime.block_on(async {
        let mut before = vec![BootEvent::now(BootPhase::Begun)];
        let mut signals = Signals::new()?;
        let store = globals.store()?;
        let disk = match image::disk(&store, args).await? {
            Pulled::Image(disk) => disk,
            Pulled::Interrupted(signal) => return Ok(exit_code_of(signal)),
        };
        before.push(BootEvent::now(BootPhase::Image));
        let vm = record.vm.clone().map(|vm| VmRecord {
            disk_size: args.disk.unwrap_or_else(|| disk.virtual_size()),
            ..vm
        });
        let record = Record {
            image_id: disk.id().to_string(),
            vm,
            ..record
        };
        let sweep = Sweep::begin(&containers)?;
        sweep.ended_by_now().await;
        let (entry, claim) = containers.create(record)?;
        events::note(&entry.dir, &event(&entry.record, EventAction::Create));
        let begun = begun(args, &entry, &disk, &given, &loader, before);
        let begun = tokio::select! {
            begun = begun => begun.map(Ok),
            signal = signals.ending() => Ok(Err(signal)),
        };
        drop(claim);
        let client = match begun {
            Ok(Ok(client)) => client,
            Ok(Err(signal)) => {
                discard(&entry).await;
                let name = &entry.record.name;
                notice(&format!("cancelled: nothing of VM {name} is left"));
                return Ok(exit_code_of(signal));
            }
            Err(error) => {
                discard(&entry).await;
                return Err(error);
            }
        };
        if args.timings {
            timings::wait(&client, &entry, &mut signals).await?;
        }
        if args.detach {
            crate::cli::print(&format!("{}\n", entry.record.id))?;
            return Ok(0);
        }
        let console = console::connect(client.clone(), &entry, &args.detach_keys).await?;
        let code = console.talk(&entry, &mut signals).await?;
        after(&entry).await;
        Ok(code)
    });
    // A thread may be blocked in a read of stdin forever.
    runtime.shutdown_background();
    code
}

/// Makes the VM's disk and boots it.
async fn begun(
    args: &RunArgs,
    entry: &Entry,
    image: &Disk,
    given: &Given,
    loader: &Loader,
    mut before: Vec<BootEvent>,
) -> anyhow::Result<SandboxClient> {
    disk::create(&entry.dir, image, args.disk)?;
    before.push(BootEvent::now(BootPhase::Disk));
    given.keep(&entry.dir)?;
    let boots_itself = args.no_kept_kernel || args.firmware.is_some();
    let beginning = match boots_itself {
        true => Beginning::Boot,
        false => Beginning::Image {
            image: image.clone(),
            is_quiet: args.quiet,
        },
    };
    boot(entry, loader, &args.network, beginning, before).await
}

/// Removes a VM that never ran, whatever of it is there.
pub(super) async fn discard(entry: &Entry) {
    let removed = async {
        SandboxClient::kill(&entry.dir).await?;
        clear::remove(&entry.dir).await
    };
    if let Err(error) = removed.await {
        crate::cli::report(&error);
    }
}

/// Releases or removes what a VM that may be off does not need.
async fn after(entry: &Entry) {
    if let Ok(state) = State::of(entry).await
        && state.has_ended()
    {
        match entry.record.remove {
            false => clear::release_resources(entry).await,
            true => {
                if let Err(error) = clear::remove(&entry.dir).await {
                    crate::cli::report(&error);
                }
            }
        }
    }
}

/// The flags of `vm start`.
#[derive(Debug, Args)]
pub(super) struct StartArgs {
    /// Boot VMs that hibernate from their disks, and forget their memory
    #[arg(long)]
    boot: bool,

    /// Wait until the guests have booted, and show how long each phase took
    #[arg(long)]
    timings: bool,

    #[command(flatten)]
    names: NamesArgs,
}

/// Boots VMs that are off, and continues those that hibernate.
pub(super) fn start(globals: &Globals, args: &StartArgs) -> anyhow::Result<u8> {
    let loader = Loader::find()?;
    each_name(globals, args.names.names(), async |containers, name| {
        let begun = vec![BootEvent::now(BootPhase::Begun)];
        sweep(containers).await?;
        let mut entry = containers.find(name)?;
        let claim = claimed(&entry, name).await?;
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        ensure!(
            is_off(&entry).await?,
            "VM {name} runs already; `podvisor vm console {name}` connects to it"
        );
        arrival::must_have_come(&mut entry)?;
        check_memory(entry.record.memory, &meminfo)?;
        clear::release_resources(&entry).await;
        let files = SavedFiles::hibernated(&entry.dir);
        let beginning = match !args.boot && files.are_finished()? {
            true => Beginning::Saved(files.open(ContinueAs::Same)?),
            false => {
                files.remove()?;
                Beginning::Boot
            }
        };
        match boot(&entry, &loader, &NetworkArgs::default(), beginning, begun).await {
            Ok(client) => {
                // They are the machine's memory now, which has them open.
                files.remove()?;
                drop(claim);
                if args.timings {
                    timings::wait(&client, &entry, &mut Signals::new()?).await?;
                }
                Ok(Some(name.to_owned()))
            }
            Err(error) => {
                if let Err(error) = SandboxClient::kill(&entry.dir).await {
                    crate::cli::report(&error.into());
                }
                clear::release_resources(&entry).await;
                Err(match files.are_finished() {
                    Ok(true) => error.context(format!(
                        "VM {name} hibernates on; `podvisor vm start --boot {name}` boots it from \
                         its disk instead, and forgets its memory"
                    )),
                    _ => error,
                })
            }
        }
    })
}

/// Takes the claim of a VM for a change.
pub(super) async fn claimed(entry: &Entry, name: &str) -> anyhow::Result<Claim> {
    let claim = Claim::take_within(&entry.dir, START_WAIT).await?;
    claim.with_context(|| {
        format!("VM {name} is being started or removed by another command; try again later")
    })
}

/// Returns whether a VM is off, with its process gone.
pub(super) async fn is_off(entry: &Entry) -> anyhow::Result<bool> {
    match SandboxClient::connect(&entry.dir).await {
        Err(error) if error.is_gone() => Ok(true),
        Err(error) => Err(error.into()),
        Ok(client) => {
            let list = client.list().await?;
            let has_ended = list.iter().all(|info| info.exit.is_some());
            if has_ended {
                // Its process is about to end.
                client.ended().await;
            }
            Ok(has_ended)
        }
    }
}

/// How long another command may take to start or remove a VM.
const START_WAIT: std::time::Duration = std::time::Duration::from_secs(60);

/// Reads the document that a flag names.
fn read_document(flag: &str, path: &Path) -> anyhow::Result<Vec<u8>> {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let file = File::open(path)?;
        file.take(seed::MAX_USER_DATA + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().with_context(|| format!("{flag}: cannot read {}", path.display()))?;
    ensure!(
        bytes.len() as u64 <= seed::MAX_USER_DATA,
        "{flag}: {} is longer than 1 MiB",
        path.display()
    );
    Ok(bytes)
}

/// Creates the record of the requested VM.
fn record(args: &RunArgs, root: &Path) -> anyhow::Result<Record> {
    let id = random_id().context("cannot make up an id for the VM")?;
    let short: String = id.chars().take(SHORT_ID).collect();
    let name = args.name.clone().unwrap_or_else(|| short.clone());
    let network = args.network.choose(None)?;
    let mut ports = args.network.ports();
    choose_free(&mut ports, &[])?;
    let mut ssh_keys = Vec::new();
    for file in &args.ssh_key {
        ssh_keys.extend(keys::read(file).context("--ssh-key")?);
    }
    match keys::own(root) {
        Ok(own) => ssh_keys.push(own),
        Err(error) if ssh_keys.is_empty() => return Err(error),
        Err(_) => {}
    }
    // What passt forwards is all that the host reaches of its guest.
    let ssh_port = match network == NetworkMode::User {
        true => {
            let published = ports.iter().find(|port| leads_to_ssh(port));
            Some(match published {
                Some(port) => port.host_port,
                None => {
                    let free = free_port()?;
                    ports.push(free);
                    free.host_port
                }
            })
        }
        false => None,
    };
    let now = now();
    Ok(Record {
        hostname: args.hostname.clone().unwrap_or_else(|| {
            // Not every name is a valid host name.
            parse_hostname(&name).unwrap_or(short)
        }),
        name,
        image: args.image.clone(),
        image_id: String::new(),
        created: now.as_secs(),
        created_nanos: now.subsec_nanos(),
        labels: args.label.iter().cloned().collect(),
        remove: args.rm,
        restart: RestartArg::No,
        cpus: args.cpus,
        cpu_limit: None,
        memory: args.memory,
        io_limits: Vec::new(),
        interactive: true,
        stop_signal: SIGTERM,
        stop_timeout: Some(STOP_TIMEOUT),
        volumes: args.volumes.clone(),
        network,
        ports,
        jailed: !args.no_jail,
        pod: None,
        is_pod: false,
        user: String::new(),
        process: Process::default(),
        health: None,
        vm: Some(VmRecord {
            disk_size: 0,
            ssh_port,
            ssh_keys,
            has_autologin: !args.no_autologin,
            installs_agent: args.agent,
            firmware: args.firmware()?,
            max_cpus: args.max_cpus.unwrap_or(0),
            growth: args.growth(),
            grown: 0,
            mac: None,
            arriving: false,
            attached: Vec::new(),
        }),
        id,
    })
}

/// Whether the loopback of this host reaches the guest's SSH server by this port.
fn leads_to_ssh(port: &Port) -> bool {
    let is_local = port
        .host_ip
        .is_none_or(|ip| ip.is_loopback() && ip.is_ipv4());
    port.guest_port == SSH && port.protocol == Protocol::Tcp && is_local
}

/// Returns a port of the loopback that nobody listens on, for the guest's SSH server.
pub(super) fn free_port() -> anyhow::Result<Port> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let address = listener.and_then(|listener| listener.local_addr());
    let address = address.context("no port of this host is free for the VM's SSH server")?;
    Ok(Port {
        host_ip: Some(address.ip()),
        host_port: address.port(),
        guest_port: SSH,
        protocol: Protocol::Tcp,
    })
}

#[cfg(test)]
mod tests {
    use crate::cli::container::ports;

    use super::*;

    #[test]
    fn a_published_ssh_server_is_reached_by_its_port() {
        let port = |text: &str| ports::parse(text).unwrap().0[0];
        for local in ["2222:22", "127.0.0.1:2222:22"] {
            assert!(leads_to_ssh(&port(local)), "{local}");
        }
        for other in ["2222:80", "2222:22/udp", "192.0.2.1:2222:22", "[::1]:22:22"] {
            assert!(!leads_to_ssh(&port(other)), "{other}");
        }
        assert!(leads_to_ssh(&free_port().unwrap()));
    }
}
