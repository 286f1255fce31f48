//! `podvisor run`: a program from an image, in a virtual machine of its own, behaving like a
//! program that was started right here.
//!
//! `args` is its flags, `make` what is made of them; here is what happens then.

mod args;
mod make;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use podvisor_images::{Image, PullOptions, PullPolicy, Store};
use tracing::debug;

use super::container::events::{self, event};
use super::container::foreground::{Outcome, Program, exit_code};
use super::container::lifecycle::end;
use super::container::{Containers, Entry, Record, exec, state, sweep};
use super::guest::Guest;
use super::progress::Progress;
use super::pull::{Pulled, pull};
use super::signals::{Signals, exit_code_of};
use super::terminal::RawMode;
use super::{Globals, advice, terminal};
use crate::sandbox::{EventAction, Outputs, ProcessExit, SandboxClient, SandboxError, SandboxExit};
use args::Pull;
pub(super) use args::{RunArgs, from_here};
pub(super) use args::{parse_console, parse_hostname, parse_label};
pub(super) use make::{MachineOptions, keep_etc_files, launch_machine, now};
use make::{Place, launch, record};

const SIGKILL: u8 = 9;

/// A use so soon after another need not be noted.
const USE_NOTED: Duration = Duration::from_secs(3600);

/// Whether a program was killed because its machine failed.
fn took_along(machine: &SandboxExit, program: &ProcessExit) -> bool {
    let has_failed = match machine {
        SandboxExit::PoweredOff | SandboxExit::Killed => false,
        SandboxExit::Reset
        | SandboxExit::TripleFault
        | SandboxExit::Failed(_)
        | SandboxExit::Died => true,
    };
    has_failed && program.code == i32::from(exit_code_of(SIGKILL)) && !program.oom_killed
}

pub(super) fn run(globals: &Globals, args: &RunArgs) -> anyhow::Result<u8> {
    if args.tty && args.interactive && !terminal::is_terminal(std::io::stdin()) {
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
    let place = match &args.pod {
        None => own_place(args, &root)?,
        Some(pod) => Place::Pod(Box::new(Containers::open(&root)?.find_pod(pod)?)),
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
        let containers = Containers::open(&root)?;
        sweep(&containers).await?;
        let record = record(args, &place, &image)?;
        let code = in_sandbox(args, &place, &image, record, &containers, &mut signals).await;
        note_use(&store, &image);
        code
    });
    // A thread may sit in a read of stdin for ever.
    runtime.shutdown_background();
    code
}

/// A machine for the container alone.
fn own_place(args: &RunArgs, root: &Path) -> anyhow::Result<Place> {
    let guest = match &args.from_snapshot {
        Some(dir) => Guest::of_snapshot(dir)?,
        None => args.guest.guest(args.boot.templates(root))?,
    };
    anyhow::ensure!(
        args.volume.is_empty() || guest.shares != Some(false),
        "--volume: the snapshot's machine cannot share directories; make one by `podvisor snapshot --volumes`"
    );
    let network = args.network.choose(guest.has_card)?;
    Ok(Place::Own {
        guest: Box::new(guest),
        network,
    })
}

/// The image from the store, or from its registry.
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

/// Tells the store that the image was used, for pruning to see. That writes to the disk, so not for each run.
fn note_use(store: &Store, image: &Image) {
    let is_new = image.used().elapsed().is_ok_and(|age| age < USE_NOTED);
    if !is_new && let Err(error) = store.touch(&image.id().to_string()) {
        debug!(%error, "the use of the image is not noted");
    }
}

/// Runs the program of `image` and gives its exit code; detached, prints the container's id.
async fn in_sandbox(
    args: &RunArgs,
    place: &Place,
    image: &Image,
    record: Record,
    containers: &Containers,
    signals: &mut Signals,
) -> anyhow::Result<u8> {
    let begin = Instant::now();
    let (entry, claim) = containers.create(record)?;
    events::note(&entry.dir, &event(&entry.record, EventAction::Create));
    let launched = tokio::select! {
        launched = launch(args, place, image, &entry) => launched,
        signal = signals.ending() => {
            drop(claim);
            state::remove(&entry.dir).await?;
            return Ok(exit_code_of(signal));
        }
    };
    let started = match launched {
        Ok(client) => {
            debug!(elapsed = ?begin.elapsed(), "the container is made");
            start(args, &entry, client).await
        }
        Err(error) => Err(error),
    };
    drop(claim);
    let (program, served) = match started {
        Ok(started) => started,
        Err(error) => {
            // Nothing of it ever ran.
            if let Err(error) = state::remove(&entry.dir).await {
                debug!(error = %format!("{error:#}"), "the container is left for the next sweep");
            }
            return exec::not_started(error).or_else(advised);
        }
    };
    let Some((outputs, raw)) = served else {
        super::print(&format!("{}\n", entry.record.id))?;
        return Ok(0);
    };
    let outcome = program.wait(outputs, signals).await;
    // Before anything is said about what happened.
    drop(raw);
    match &outcome {
        Ok(Outcome::Ended(exit)) => {
            let machine = entry.ended(&program.client).await;
            if let Some(machine) = machine.filter(|machine| took_along(machine, exit)) {
                super::notice(&format!("{machine}, and the program was killed with it"));
            }
        }
        Ok(Outcome::GivenUp(_)) if entry.record.pod.is_some() => {
            super::notice("the program did not end, so it is killed");
            end(&program.client, &entry, SIGKILL, Duration::ZERO).await?;
        }
        Ok(Outcome::GivenUp(_)) => {
            super::notice("the program did not end, so its guest is killed");
            program.client.shutdown(Duration::ZERO).await?;
        }
        Err(_) => {}
    }
    // The program's exit code is told whatever stays.
    match args.rm {
        true => {
            if let Err(error) = state::remove(&entry.dir).await {
                super::report(&error);
            }
        }
        false => state::settle(&entry).await,
    }
    debug!(elapsed = ?begin.elapsed(), "done");
    match outcome {
        Ok(outcome) => Ok(exit_code(&outcome)),
        Err(error) => advised(error),
    }
}

/// What serves the streams of a program in the foreground.
type Served = Option<(Outputs, Option<RawMode>)>;

async fn start(
    args: &RunArgs,
    entry: &Entry,
    client: SandboxClient,
) -> anyhow::Result<(Program, Served)> {
    let program = Program {
        client,
        id: entry.record.id.clone(),
        exec_id: None,
        has_terminal: args.tty,
        has_input: args.interactive,
    };
    if args.detach {
        program.client.start_container(&program.id).await?;
        return Ok((program, None));
    }
    let (streams, theirs) = program.streams()?;
    program.client.attach_whole(&program.id, theirs).await?;
    let served = program.serve(streams)?;
    program.client.start_container(&program.id).await?;
    debug!("the program runs");
    Ok((program, Some(served)))
}

/// An error with its remedy, where it is a sandbox's.
fn advised(error: anyhow::Error) -> anyhow::Result<u8> {
    Err(match error.downcast::<SandboxError>() {
        Ok(error) => advice::advised(error),
        Err(error) => error,
    })
}
