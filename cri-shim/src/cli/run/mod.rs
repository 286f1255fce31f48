//! `podvisor run`: runs a program from an image in its own virtual machine, like a program that was
//! started on this host.
//!
//! `args` has the flags, `spec_flags`, `health` and `mount` some more of them, `create`
//! creates the container; this file runs it.

mod args;
mod create;
mod groups;
mod health;
mod mount;
mod spec_flags;

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use podvisor_images::{Image, PullOptions, PullPolicy, Store};
use tracing::debug;

use super::container::events::{self, event};
use super::container::foreground::{Abandoned, ForwardedStreams, Outcome, Program, exit_code};
use super::container::lifecycle::{end, force_remove, has_failed, is_killed};
use super::container::{Containers, Entry, NetworkMode, Record, Sweep, clear, exec, volumes};
use super::guest::Guest;
use super::progress::Progress;
use super::pull::{Pulled, pull};
use super::signals::{Signals, exit_code_of};
use super::{Globals, advice, terminal};
use crate::machine::KernelPanic;
use crate::sandbox::{EventAction, SandboxClient, SandboxError, SandboxExit};
use crate::signal::SIGKILL;
use args::Pull;
pub(super) use args::{RunArgs, parse_console, parse_hostname, parse_sysctl};
use create::{ImagePin, Place, PreparedContainer, launch, record};
pub(super) use create::{MachineOptions, begin_machine, keep_etc_files, now};

pub(super) fn run(globals: &Globals, args: &RunArgs) -> anyhow::Result<u8> {
    if args.tty && args.interactive && !args.detach && !terminal::is_terminal(io::stdin()) {
        anyhow::bail!(
            "the input device is not a terminal; leave out -t to read from a file or a pipe"
        );
    }
    anyhow::ensure!(
        !args.rm || args.restart.is_no(),
        "conflicting options: cannot specify both --restart and --rm"
    );
    if args.detach && args.rm {
        debug!("removed by the first command after its end");
    }
    debug!("begin");
    let root =
        std::path::absolute(globals.root()?).context("cannot find the root's absolute path")?;
    // Errors that do not depend on the image are reported before it is pulled.
    let containers = Containers::open(&root)?;
    containers.check(args.name.as_deref())?;
    args.container_options(None).check()?;
    volumes::check_distinct(args.mount_points())?;
    volumes::check(&args.volumes())?;
    if let Some(file) = args.cidfile.as_deref().filter(|file| file.exists()) {
        anyhow::bail!(
            "--cidfile: {} is there already; remove it if its container is gone",
            file.display()
        );
    }
    let place = match &args.pod {
        None => own_place(args, &root)?,
        Some(pod) => Place::Pod(Box::new(containers.find_pod(pod)?)),
    };

    let runtime = super::runtime()?;
    let code = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let store = globals.store()?;
        debug!("the store is open");
        let image = match image(&store, args).await? {
            Pulled::Image(image) => image,
            Pulled::Interrupted(signal) => return Ok(exit_code_of(signal)),
        };
        debug!(id = %image.id(), "the image is here");
        let details = store.inspect(&image.id().to_string())?;
        let record = record(args, &place, &image, &details.config)?;
        let run = Run {
            args,
            place: &place,
            image: &image,
            begin: Instant::now(),
        };
        let code = run.in_sandbox(record, &containers, &mut signals).await;
        note_use(&store, &image);
        code
    });
    // A thread may be blocked in a read of stdin forever.
    runtime.shutdown_background();
    code
}

/// Returns the settings of a machine for this container only.
fn own_place(args: &RunArgs, root: &Path) -> anyhow::Result<Place> {
    let guest = match &args.from_snapshot {
        Some(dir) => Guest::of_snapshot(dir)?,
        None => args.guest.guest(args.boot.mode()?.templates(root))?,
    };
    anyhow::ensure!(
        args.volumes().is_empty() || guest.shares != Some(false),
        "--volume: the snapshot's machine cannot share directories; make one by `podvisor snapshot --volumes`"
    );
    let network = args.network.choose(guest.has_card)?;
    Ok(Place::Own {
        guest: Box::new(guest),
        io_limits: args.io.limits()?,
        network,
    })
}

/// Returns the image from the store, or pulls it from its registry.
async fn image(store: &Store, args: &RunArgs) -> anyhow::Result<Pulled> {
    let name = args.image();
    let mut options = PullOptions::default();
    options.signatures = args.verify.policy()?;
    if args.pull == Pull::Never {
        let found = match &options.signatures {
            Some(policy) => store.resolve_signed(name, policy),
            None => store.resolve(name),
        };
        return Ok(Pulled::Image(Box::new(found?)));
    }
    if args.pull == Pull::Missing {
        options = options.policy(PullPolicy::IfMissing);
    }
    let progress = if args.quiet {
        Progress::Quiet
    } else {
        Progress::for_stderr()
    };
    let options = options.registries(args.registries.config()?);
    pull(store, name, options, progress).await
}

/// Records in the store that the image was used, for pruning.
fn note_use(store: &Store, image: &Image) {
    if let Err(error) = store.note_use(image) {
        debug!(%error, "the use of the image is not noted");
    }
}

/// One run of an image's program.
struct Run<'a> {
    args: &'a RunArgs,
    place: &'a Place,
    image: &'a Image,
    begin: Instant,
}

impl Run<'_> {
    /// Runs the program and returns its exit code; detached, prints the container's id.
    async fn in_sandbox(
        &self,
        record: Record,
        containers: &Containers,
        signals: &mut Signals,
    ) -> anyhow::Result<u8> {
        if self.args.replace {
            tokio::select! {
                replaced = replace(containers, &record.name) => replaced?,
                signal = signals.ending() => return Ok(exit_code_of(signal)),
            }
        }
        // It continues while the container is created.
        let sweep = Sweep::begin(containers)?;
        let (sweep, (entry, claim)) = match containers.create(record.clone()) {
            Ok(created) => (Some(sweep), created),
            // Its name or a port may be those of a container that is about to be removed.
            Err(_) => {
                tokio::select! {
                    _ = sweep.ended() => {}
                    signal = signals.ending() => return Ok(exit_code_of(signal)),
                }
                (None, containers.create(record)?)
            }
        };
        events::note(&entry.dir, &event(&entry.record, EventAction::Create));
        let begun = self.begun(&entry, sweep, signals).await;
        drop(claim);
        let StartedProgram {
            program,
            served,
            image,
        } = match begun {
            Ok(ControlFlow::Continue(begun)) => begun,
            Ok(ControlFlow::Break(signal)) => {
                remove_unstarted(&entry).await;
                return Ok(exit_code_of(signal));
            }
            Err(error) => {
                // It never ran.
                if let Err(error) = clear::remove(&entry.dir).await {
                    let error = format!("{error:#}");
                    debug!(%error, "the container is left for the next sweep");
                }
                return exec::not_started(error).or_else(|error| advised(self.args, error));
            }
        };
        let Some(served) = served else {
            super::print(&format!("{}\n", entry.record.id))?;
            return Ok(0);
        };
        let outcome = program.wait(served, signals).await;
        let has_ended = match &outcome {
            // As if it had been detached from the start.
            Ok(left @ (Outcome::Left | Outcome::Unwritable(_))) => return Ok(exit_code(left)),
            Ok(outcome) => tokio::select! {
                has_ended = self.end_machine(&entry, &program.client, outcome) => has_ended?,
                // The next command clears up.
                _ = signals.ending() => return Ok(exit_code(outcome)),
            },
            Err(_) => false,
        };
        if has_ended {
            image.release();
        }
        self.clear(&entry, has_ended).await;
        debug!(elapsed = ?self.begin.elapsed(), "done");
        match outcome {
            Ok(outcome) => Ok(exit_code(&outcome)),
            Err(error) => advised(self.args, error),
        }
    }

    /// Creates the container and starts its program, or returns the signal that arrived before.
    async fn begun(
        &self,
        entry: &Entry,
        sweep: Option<Sweep>,
        signals: &mut Signals,
    ) -> anyhow::Result<ControlFlow<u8, StartedProgram>> {
        let launched = tokio::select! {
            launched = launch(self.args, self.place, self.image, entry) => launched,
            signal = signals.ending() => return Ok(ControlFlow::Break(signal)),
        };
        if let Some(sweep) = sweep {
            // Its messages are printed before the program's output.
            tokio::select! {
                _ = sweep.ended_by_now() => {}
                signal = signals.ending() => return Ok(ControlFlow::Break(signal)),
            }
        }
        let made = launched?;
        debug!(elapsed = ?self.begin.elapsed(), "the container is made");
        tokio::select! {
            started = start(self.args, entry, made) => Ok(ControlFlow::Continue(started?)),
            signal = signals.ending() => Ok(ControlFlow::Break(signal)),
        }
    }

    /// Ends the machine after the program's end; returns whether the machine has ended.
    async fn end_machine(
        &self,
        entry: &Entry,
        client: &SandboxClient,
        outcome: &Outcome,
    ) -> anyhow::Result<bool> {
        match outcome {
            Outcome::Ended(exit) => {
                let Some(machine) = machine_ended(self.args, entry, client).await else {
                    return Ok(false);
                };
                if has_failed(&machine) && is_killed(exit) {
                    super::notice(&format!("{machine}, and the program was killed with it"));
                    super::notice_kernel_log(machine.kernel_log());
                }
                return Ok(true);
            }
            Outcome::GivenUp(_) if entry.record.pod.is_some() => {
                super::notice("the program did not end, so it is killed");
                end(client, entry, SIGKILL, Duration::ZERO).await?;
            }
            Outcome::GivenUp(_) => {
                super::notice("the program did not end, so its guest is killed");
                client.shutdown(Duration::ZERO).await?;
            }
            Outcome::Left | Outcome::Unwritable(_) => {}
        }
        Ok(false)
    }

    /// Removes the container, or the parts of it that are not kept. The program's exit code is
    /// reported even if this fails.
    async fn clear(&self, entry: &Entry, has_ended: bool) {
        if !self.args.rm {
            clear::release_resources(entry).await;
        } else if let Err(error) = match has_ended {
            true => clear::remove_ended(entry).await,
            false => clear::remove(&entry.dir).await,
        } {
            super::report(&error);
        }
    }
}

/// Waits for the end of the container's own machine, and returns how it ended.
///
/// The machine's process then cleans up, without this function waiting for it, except if it still
/// holds resources that others need: directories of the host, a console's file, or ports, which a
/// user-space network holds until the process exits.
async fn machine_ended(
    args: &RunArgs,
    entry: &Entry,
    client: &SandboxClient,
) -> Option<SandboxExit> {
    let record = &entry.record;
    let has_ports = record.network == NetworkMode::User && !record.ports.is_empty();
    match record.pod {
        None if record.volumes.is_empty() && args.console.is_none() && !has_ports => {
            Some(client.machine_ended().await)
        }
        _ => entry.ended(client).await,
    }
}

/// Removes the container of this name, if it exists.
async fn replace(containers: &Containers, name: &str) -> anyhow::Result<()> {
    let entries = containers.list()?.into_iter();
    for entry in entries.filter(|entry| entry.record.name == name) {
        force_remove(&entry).await?;
    }
    Ok(())
}

/// Writes the container's id to the file that the user named.
fn write_id(args: &RunArgs, entry: &Entry) -> anyhow::Result<()> {
    let Some(file) = &args.cidfile else {
        return Ok(());
    };
    write_new(file, &entry.record.id)
        .with_context(|| format!("--cidfile: cannot write {}", file.display()))
}

/// Creates a file with this text. After a failure, no file is left for the next attempt.
fn write_new(path: &Path, text: &str) -> io::Result<()> {
    let written = File::create_new(path)?.write_all(text.as_bytes());
    written.inspect_err(|_| {
        let _ = fs::remove_file(path);
    })
}

/// Removes a container whose start was cancelled, whatever state its machine is in. Errors are
/// ignored: the caller reports the signal.
async fn remove_unstarted(entry: &Entry) {
    let remove = async {
        if entry.record.pod.is_none() {
            SandboxClient::kill(&entry.dir).await?;
        }
        clear::remove(&entry.dir).await
    };
    if let Err(error) = remove.await {
        super::report(&error);
    }
}

/// A started program.
struct StartedProgram {
    program: Program,
    /// Its streams; `None` if it is detached.
    served: Option<ForwardedStreams>,
    image: ImagePin,
}

async fn start(
    args: &RunArgs,
    entry: &Entry,
    made: PreparedContainer,
) -> anyhow::Result<StartedProgram> {
    let PreparedContainer { client, image } = made;
    write_id(args, entry)?;
    let program = Program {
        client,
        id: entry.record.id.clone(),
        exec_id: None,
        has_terminal: args.tty,
        has_input: args.interactive,
        abandoned: match args.tty {
            true => Abandoned::GoesOn,
            false => Abandoned::Ends,
        },
    };
    if args.detach {
        program.client.start_container(&program.id).await?;
        return Ok(StartedProgram {
            program,
            served: None,
            image,
        });
    }
    let (streams, theirs) = program.streams()?;
    program.client.attach_whole(&program.id, theirs).await?;
    let served = program.serve(streams, &args.leave.detach_keys)?;
    program.client.start_container(&program.id).await?;
    debug!("the program runs");
    Ok(StartedProgram {
        program,
        served: Some(served),
        image,
    })
}

/// Adds advice to the error of a sandbox. The last messages of a kernel that panicked come first.
fn advised(args: &RunArgs, error: anyhow::Error) -> anyhow::Result<u8> {
    Err(match error.downcast::<SandboxError>() {
        Ok(error) => {
            let log = error.panic().map_or(&[][..], KernelPanic::log);
            super::notice_kernel_log(log);
            advice::advised(error, args.keeps_console())
        }
        Err(error) => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::small_disk::SmallDisk;

    #[test]
    fn a_file_that_could_not_be_written_is_not_there() {
        let disk = SmallDisk::new();
        let path = disk.path().join("id");
        disk.fill();
        let full = write_new(&path, "0123").unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        disk.clear();
        write_new(&path, "0123").unwrap();
        write_new(&path, "4567").unwrap_err();
        assert_eq!(fs::read_to_string(path).unwrap(), "0123");
    }
}
