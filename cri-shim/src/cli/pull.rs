//! `podvisor pull`, and the pull of `run` for a missing image.

use clap::Args;
use podvisor_images::{Checksum, Disk, Image, PullEvents, PullOptions, Store};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::images::ImageView;
use super::progress::Progress;
use super::registries::RegistryArgs;
use super::signals::exit_code_of;
use super::verify::VerifyArgs;
use super::{FormatArgs, Globals};

#[derive(Debug, Args)]
pub(super) struct PullArgs {
    /// Image to fetch
    #[arg(
        value_name = "IMAGE",
        help = "Image to fetch: [REGISTRY/]NAME[:TAG][@DIGEST], or the https:// URL of a disk image"
    )]
    image: String,

    /// Expected checksum of a disk image: sha256:... or sha512:...
    #[arg(long, value_name = "CHECKSUM")]
    checksum: Option<Checksum>,

    #[command(flatten)]
    verify: VerifyArgs,

    #[command(flatten)]
    registries: RegistryArgs,

    /// Show no progress
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    shown: FormatArgs,
}

/// The outcome of a pull that did not fail.
pub(super) enum Pulled<T = Image> {
    /// The image is in the store.
    Image(Box<T>),
    /// The user cancelled it; the signal's number.
    Interrupted(u8),
}

/// Pulls an image and prints its id.
pub(super) fn run(globals: &Globals, args: &PullArgs) -> anyhow::Result<u8> {
    let store = globals.store()?;
    let progress = if args.quiet {
        Progress::Quiet
    } else {
        Progress::for_stderr()
    };
    let runtime = super::runtime()?;
    if Disk::is_url(&args.image) {
        if args.verify.is_given() {
            anyhow::bail!(
                "--verify-key and --signature-policy are for images of a registry; give a disk image's --checksum instead"
            );
        }
        let options = PullOptions::default().registries(args.registries.config()?);
        let (url, checksum) = (&args.image, args.checksum.as_ref());
        let pulled = runtime.block_on(pull_disk(&store, url, checksum, options, progress));
        runtime.shutdown_background();
        return match pulled? {
            Pulled::Image(disk) => {
                super::disks::print_pulled(&disk, args.shown.is_json()).map(|()| 0)
            }
            Pulled::Interrupted(signal) => Ok(exit_code_of(signal)),
        };
    }
    if args.checksum.is_some() {
        anyhow::bail!(
            "--checksum is for disk images (https://...); name an image by its digest instead: NAME@sha256:..."
        );
    }
    let mut options = PullOptions::default().registries(args.registries.config()?);
    options.signatures = args.verify.policy()?;
    let pulled = runtime.block_on(pull(&store, &args.image, options, progress));
    // Work of a cancelled pull on other threads is not waited for.
    runtime.shutdown_background();
    match pulled? {
        Pulled::Image(image) => {
            if args.shown.is_json() {
                super::print_json(&ImageView::from(&*image))?;
            } else {
                super::print(&format!("{}\n", image.id()))?;
            }
            Ok(0)
        }
        Pulled::Interrupted(signal) => Ok(exit_code_of(signal)),
    }
}

/// Pulls `reference` with progress on stderr until it is complete, fails, or SIGINT or SIGTERM
/// arrives; the store is unchanged in the last two cases.
pub(super) async fn pull(
    store: &Store,
    reference: &str,
    options: PullOptions,
    progress: Progress,
) -> anyhow::Result<Pulled> {
    watched(progress, async |events| {
        // The options hold the sender: dropping them ends the progress.
        let options = options.events(events);
        store.pull(reference, &options).await
    })
    .await
}

/// Like [`pull`], for the disk image at a URL.
pub(super) async fn pull_disk(
    store: &Store,
    url: &str,
    checksum: Option<&Checksum>,
    options: PullOptions,
    progress: Progress,
) -> anyhow::Result<Pulled<Disk>> {
    watched(progress, async |events| {
        let options = options.events(events);
        store.pull_disk(url, checksum, &options).await
    })
    .await
}

/// Runs a pull with its progress on stderr, until SIGINT or SIGTERM arrives.
async fn watched<T>(
    progress: Progress,
    pull: impl AsyncFnOnce(PullEvents) -> podvisor_images::Result<T>,
) -> anyhow::Result<Pulled<T>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let (events, received) = mpsc::unbounded_channel();
    let work = async { tokio::join!(pull(events), progress.show(received)).0 };
    tokio::select! {
        pulled = work => Ok(Pulled::Image(Box::new(pulled?))),
        _ = interrupt.recv() => Ok(Pulled::Interrupted(2)),
        _ = terminate.recv() => Ok(Pulled::Interrupted(15)),
    }
}
