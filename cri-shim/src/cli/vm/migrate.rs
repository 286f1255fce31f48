//! `vm migrate`: a running VM goes to another host, over a pipe to `vm receive` there.
//!
//! The VMs' jailed processes move the machine between themselves; this process carries the bytes to
//! a command, which ssh is as a rule, and tells how far it is. A VM whose migration fails, or is
//! cancelled, goes on here; one that has arrived is removed here. In between is the moment of
//! which nobody here can know how it ended, if the connection ends in it: then the VM stands still
//! until its owner has looked there (`--resolve`).

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use super::boot::own_mac;
use super::hibernate::check_network;
use super::run::{claimed, is_off};
use super::snapshot::VmSnapshot;
use super::transfer::{self, Offer};
use super::{arrival, attached, disk};
use crate::cli::container::{Entry, VmRecord, clear, state, sweep};
use crate::cli::signals::{Signals, exit_code_of};
use crate::cli::{Globals, notice, size, terminal};
use crate::sandbox::{
    MigrationInfo, MigrationState, SandboxClient, SandboxError, SendMachine, random_id,
};

/// How long the other side may say nothing, in seconds.
const PATIENCE: u64 = 60;

/// What the command's process ignores: the terminal sends it to all of its processes, and the
/// connection is needed to cancel a migration.
const SHIELD: &str = "trap '' INT QUIT; exec \"$@\"";

#[derive(Debug, Args)]
pub(super) struct MigrateArgs {
    /// Name of the VM there [default: the same]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Milliseconds for which the guest may stand still
    #[arg(long, value_name = "MS", default_value = "300")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=60_000))]
    downtime: u32,

    /// Most bytes per second while the guest runs: 100M
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    bandwidth: Option<u64>,

    /// Let the guest stand still for as long as it takes, if it writes faster than its memory is
    /// sent
    #[arg(long)]
    force: bool,

    /// Print what it cost, as JSON
    #[arg(long)]
    json: bool,

    /// Show no progress
    #[arg(short, long)]
    quiet: bool,

    /// Decide about a VM whose connection ended while it was given away, or that may not have
    /// arrived here: after a look at the other host
    #[arg(long, value_name = "WHERE", conflicts_with_all = ["host", "command"])]
    resolve: Option<Runs>,

    /// The VM, which runs or is paused
    #[arg(value_name = "VM")]
    vm: String,

    /// The host that it goes to, as ssh knows it, with podvisor
    #[arg(value_name = "[USER@]HOST", required_unless_present_any = ["resolve", "command"])]
    #[arg(conflicts_with = "command")]
    host: Option<String>,

    /// A command in place of ssh, whose input and output lead to `podvisor vm receive`
    #[arg(last = true, value_name = "CMD")]
    command: Vec<String>,
}

/// Where a VM in doubt runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Runs {
    /// It does not run there: it goes on here
    Here,
    /// It runs there, and is removed here
    There,
}

impl MigrateArgs {
    /// Returns the command that leads to the other side.
    fn peer(&self) -> anyhow::Result<Vec<String>> {
        let Some(host) = &self.host else {
            return Ok(self.command.clone());
        };
        ensure!(
            !host.is_empty() && !host.starts_with('-'),
            "{host:?} is not the name of a host"
        );
        let ssh = ["ssh", "-T", host, "podvisor", "vm", "receive"];
        Ok(ssh.map(str::to_owned).into())
    }

    fn where_to(&self) -> String {
        self.host.clone().unwrap_or_else(|| self.command.join(" "))
    }
}

pub(super) fn run(globals: &Globals, args: &MigrateArgs) -> anyhow::Result<u8> {
    crate::cli::runtime()?.block_on(async {
        match args.resolve {
            Some(runs) => resolve(globals, &args.vm, runs).await,
            None => migrate(globals, args).await,
        }
    })
}

async fn migrate(globals: &Globals, args: &MigrateArgs) -> anyhow::Result<u8> {
    let mut peer = Command::new("sh");
    peer.args(["-c", SHIELD, "sh"]).args(args.peer()?);
    let containers = globals.containers()?;
    sweep(&containers).await?;
    let entry = containers.find(&args.vm)?;
    let claim = claimed(&entry, &args.vm).await?;
    let (client, ..) = state::running(&entry).await?;
    let offer = offer_of(&entry, args)?;
    let (id, migration) = (&entry.record.id, offer.migration.clone());
    let mut signals = Signals::new()?;
    let peer = peer.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut peer = peer.context("cannot run the command that leads to the other side")?;
    let bar = Bar::new(args.quiet || !terminal::is_terminal(io::stderr()));
    let introduced = {
        let (pipe, dir, bar) = (Pipe::of(&mut peer)?, entry.dir.clone(), bar.clone());
        tokio::task::spawn_blocking(move || introduce(pipe, &offer, &dir, &bar))
    };
    let introduced = tokio::select! {
        introduced = introduced => introduced.context("the VM is not announced")?,
        signal = signals.ending() => {
            end(peer);
            notice(&format!("cancelled: VM {} goes on here", args.vm));
            return Ok(exit_code_of(signal));
        }
    };
    let stays = || format!("VM {} goes on here", args.vm);
    let pipe = match introduced {
        Ok(pipe) => pipe,
        Err(error) => {
            end(peer);
            return Err(error.context(stays()));
        }
    };
    let mut send = SendMachine::new(migration.clone());
    send.downtime = Duration::from_millis(args.downtime.into());
    send.bandwidth = args.bandwidth;
    send.force = args.force;
    send.throttle = true;
    let (ours, theirs) = UnixStream::pair().context("cannot make a connection")?;
    if let Err(error) = client.send_machine(id, send, theirs.into()).await {
        end(peer);
        return Err(anyhow::Error::from(error).context(stays()));
    }
    pipe.carry(ours)?;
    let settled = settled(&client, id, &bar);
    tokio::pin!(settled);
    let mut signalled = None;
    let settled = loop {
        tokio::select! {
            settled = &mut settled => break settled,
            signal = signals.ending() => {
                signalled = Some(signal);
                if let Err(error) = client.cancel_migration(id, &migration).await {
                    // It is too late, and over in a moment.
                    notice(&error.to_string());
                }
            }
        }
    };
    bar.finish();
    let info = match settled {
        Ok(info) => Some(info),
        // The process may end before it is asked: the other side knows.
        Err(error) if error.is_gone() => None,
        Err(error) => return Err(error.into()),
    };
    match info.as_ref().map(|info| info.state) {
        Some(MigrationState::Done) | None => {}
        Some(MigrationState::InDoubt) => {
            end(peer);
            let name = &args.vm;
            bail!(
                "the connection ended while VM {name} was given away: it stands still here, and \
                 may run there. See there by `podvisor vm ps`; then, here, `podvisor vm migrate \
                 --resolve there {name}` if it runs there, else `--resolve here`"
            );
        }
        Some(_) => {
            end(peer);
            let reason = info.map(|info| info.reason).unwrap_or_default();
            return match signalled {
                Some(signal) => {
                    notice(&format!("cancelled: {}", stays()));
                    Ok(exit_code_of(signal))
                }
                None => Err(anyhow::anyhow!("{}", reason.escape_debug()).context(stays())),
            };
        }
    }
    let arrived = tokio::task::spawn_blocking(move || peer.wait()).await;
    let arrived = arrived.context("the command is not waited for")?;
    let is_sure = arrived.is_ok_and(|status| status.success());
    ensure!(
        info.is_some() || is_sure,
        "VM {} has ended, and did not arrive",
        args.vm
    );
    client.ended().await;
    drop(claim);
    clear::remove(&entry.dir)
        .await
        .with_context(|| format!("VM {} runs there, and is not removed here", args.vm))?;
    tell(args, info.as_ref())?;
    Ok(0)
}

/// Prints what it cost.
fn tell(args: &MigrateArgs, info: Option<&MigrationInfo>) -> anyhow::Result<()> {
    let downtime = info.map(|info| Duration::from_nanos(info.downtime_ns));
    let total =
        info.map(|info| Duration::from_nanos(info.ended_at_ns.saturating_sub(info.started_at_ns)));
    if args.json {
        return crate::cli::print_json(&json!({
            "vm": args.vm,
            "to": args.where_to(),
            "downtimeMs": downtime.map(|time| time.as_millis()),
            "totalMs": total.map(|time| time.as_millis()),
            "rounds": info.map(|info| info.round),
            "bytes": info.map(|info| info.bytes_total),
        }));
    }
    if let (Some(downtime), Some(total), false) = (downtime, total, args.quiet) {
        notice(&format!(
            "VM {} runs there: it stood still for {} ms of {:.1} s",
            args.vm,
            downtime.as_millis(),
            total.as_secs_f64()
        ));
    }
    crate::cli::print(&format!("{}\n", args.vm))
}

/// Returns what the other side hears of a VM first.
fn offer_of(entry: &Entry, args: &MigrateArgs) -> anyhow::Result<Offer> {
    check_network(entry)?;
    let mut record = entry.record.clone();
    ensure!(
        record.volumes.is_empty(),
        "VM {} shares directories with this host, which another one does not have",
        record.name
    );
    if let Some(one) = attached::of(&record).first() {
        bail!(
            "VM {name} has the attached disk {serial}, which another host does not have: `podvisor \
             vm detach-disk {name} {serial}` first",
            name = record.name,
            serial = one.serial
        );
    }
    ensure!(
        VmSnapshot::all(entry)?.is_empty(),
        "VM {} has snapshots, which do not move with it: remove them first by `podvisor vm \
         rm-snapshot`, or make images of them by `podvisor vm commit`",
        record.name
    );
    let mac = Some(own_mac(&record));
    record.vm = record.vm.map(|vm| VmRecord { mac, ..vm });
    if let Some(name) = &args.name {
        record.name.clone_from(name);
    }
    Ok(Offer {
        migration: random_id().context("cannot make up an id for the migration")?,
        record,
        disk: disk::shape(&entry.dir)?,
        files: transfer::small_files(&entry.dir)?,
        patience: PATIENCE,
    })
}

/// Announces a VM and sends what does not change while it runs; returns when its machine is waited
/// for.
fn introduce(mut pipe: Pipe, offer: &Offer, dir: &Path, bar: &Bar) -> anyhow::Result<Pipe> {
    let answer = transfer::offer(&mut pipe, offer)?;
    let send = |pipe: &mut Pipe| {
        transfer::send_files(&mut *pipe, dir, &offer.files)?;
        if answer.wants_image {
            let (image, len) = (disk::open_image(dir)?, offer.disk.image);
            transfer::send_image(pipe, &image, len, |done| bar.show("image", done, len))?;
        }
        anyhow::Ok(())
    };
    let sent = send(&mut pipe);
    if sent.is_err() {
        pipe.to = None;
    }
    // If it has ended the connection, it says why.
    transfer::answer(&mut pipe)?;
    sent?;
    Ok(pipe)
}

/// Waits until nothing more happens by itself.
async fn settled(
    client: &SandboxClient,
    id: &str,
    bar: &Bar,
) -> Result<MigrationInfo, SandboxError> {
    let mut seen = 0;
    loop {
        let info = client.migration_after(id, seen).await?;
        seen = info.version;
        if info.state.is_final() || info.state == MigrationState::InDoubt {
            return Ok(info);
        }
        let done = info.bytes_total.saturating_sub(info.bytes_left);
        bar.show(&format!("round {}", info.round), done, info.bytes_total);
    }
}

/// Ends the command, which has nothing more to do.
fn end(mut peer: Child) {
    // Its input has ended, or ends now: what it leads to ends by itself.
    drop(peer.stdin.take());
    let _ = peer.kill();
    let _ = peer.wait();
}

/// Decides about a VM that was given away, and of which nobody here knows.
async fn resolve(globals: &Globals, name: &str, runs: Runs) -> anyhow::Result<u8> {
    let containers = globals.containers()?;
    let mut entry = containers.find(name)?;
    let claim = claimed(&entry, name).await?;
    let is_here = runs == Runs::Here;
    if arrival::is_open(&entry.record) && is_off(&entry).await? {
        match is_here {
            true => arrival::has_come(&mut entry)?,
            false => {
                drop(claim);
                clear::remove(&entry.dir).await?;
            }
        }
        return crate::cli::print(&format!("{name}\n")).map(|()| 0);
    }
    let (client, ..) = state::running(&entry).await?;
    let id = &entry.record.id;
    let info = client.migration(id).await?;
    let info = info.filter(|info| info.state == MigrationState::InDoubt);
    let info = info.with_context(|| format!("VM {name} is not in doubt: it runs here"))?;
    client
        .resolve_migration(id, &info.migration, is_here)
        .await?;
    if !is_here {
        client.ended().await;
        drop(claim);
        clear::remove(&entry.dir).await?;
    }
    crate::cli::print(&format!("{name}\n"))?;
    Ok(0)
}

/// The input and the output of the command.
#[derive(Debug)]
struct Pipe {
    from: ChildStdout,
    /// `None` if it has ended.
    to: Option<ChildStdin>,
}

impl Pipe {
    fn of(peer: &mut Child) -> anyhow::Result<Self> {
        let (from, to) = (peer.stdout.take(), peer.stdin.take());
        Ok(Self {
            from: from.context("the command has no output")?,
            to,
        })
    }

    /// Carries the bytes between the command and a machine's process, until both have ended.
    fn carry(self, machine: UnixStream) -> anyhow::Result<()> {
        let Self { mut from, to } = self;
        let (mut into, mut out) = (machine.try_clone()?, machine);
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            let builder = thread::Builder::new().name(name.to_owned());
            builder.spawn(work).context("cannot start a thread")
        };
        spawn(
            "vm-comes-back",
            Box::new(move || {
                let _ = transfer::carry(&mut from, &mut into);
                // The machine's process learns of the end of the connection.
                let _ = into.shutdown(std::net::Shutdown::Both);
            }),
        )?;
        spawn(
            "vm-goes",
            Box::new(move || {
                if let Some(mut to) = to {
                    let _ = transfer::carry(&mut out, &mut to);
                }
                let _ = out.shutdown(std::net::Shutdown::Both);
            }),
        )?;
        Ok(())
    }
}

impl Read for Pipe {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.from.read(buffer)
    }
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.to {
            Some(to) => to.write(bytes),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.to {
            Some(to) => to.flush(),
            None => Ok(()),
        }
    }
}

/// How far it is, on a terminal.
#[derive(Debug, Clone)]
struct Bar(ProgressBar);

impl Bar {
    fn new(is_hidden: bool) -> Self {
        let target = match is_hidden {
            true => ProgressDrawTarget::hidden(),
            false => ProgressDrawTarget::stderr(),
        };
        let bar = ProgressBar::with_draw_target(Some(0), target);
        let style = "{prefix} [{bar:30}] {bytes:>10}/{total_bytes:<10} {bytes_per_sec}";
        let style = ProgressStyle::with_template(style);
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style.progress_chars("=> "));
        Self(bar)
    }

    fn show(&self, what: &str, done: u64, total: u64) {
        self.0.set_prefix(what.to_owned());
        self.0.set_length(total);
        self.0.set_position(done);
    }

    fn finish(&self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: MigrateArgs,
    }

    fn parse(line: &[&str]) -> Result<MigrateArgs, clap::Error> {
        let line = Line::try_parse_from([&["migrate"], line].concat());
        line.map(|line| line.args)
    }

    #[test]
    fn a_vm_goes_to_a_host_by_ssh_or_by_any_command() {
        let to_host = parse(&["web", "me@other"]).unwrap();
        let peer = to_host.peer().unwrap();
        assert_eq!(peer, ["ssh", "-T", "me@other", "podvisor", "vm", "receive"]);
        let by_command = parse(&["web", "--", "ssh", "-p", "2222", "other", "x"]).unwrap();
        assert_eq!(by_command.peer().unwrap().len(), 5);
        assert_eq!(by_command.where_to(), "ssh -p 2222 other x");
        // A host that ssh would take for an option.
        let option = parse(&["--name", "x", "web", ""]).unwrap();
        assert!(option.peer().is_err());
        for line in [
            &["web"][..],
            &["web", "host", "--", "command"],
            &["--resolve", "here", "web", "host"],
            &["--resolve", "nowhere", "web"],
            &["--downtime", "0", "web", "host"],
        ] {
            assert!(parse(line).is_err(), "{line:?}");
        }
        assert!(parse(&["--resolve", "there", "web"]).is_ok());
    }
}
