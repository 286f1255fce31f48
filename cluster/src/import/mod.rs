//! `podvisor-cluster import`: the program of an importer's pod, which fills a claim.
//!
//! A source enters by options (`source`) or is the body of a request: what a user uploads, or a
//! copy of a claim of another namespace (`upload`). A disk leaves as
//! the file `disk.img` of a directory or as the contents of a block device (`target`). A disk
//! appears when it is complete: the file gets its name at the end, and of a device the beginning is
//! written last. Nothing is kept from an earlier run that was killed. How far it is can be asked by
//! HTTP (`progress`); why it failed is the container's termination message. It has no rights at the
//! API server, and asks for none.

mod error;
mod progress;
mod source;
mod target;
mod upload;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::ArgGroup;
use tokio::task::spawn_blocking;

pub use error::ImportError;
pub(crate) use progress::METRIC as PROGRESS_METRIC;
pub use upload::FormError;

use progress::Progress;
use source::Source;
use target::Target;

use crate::scrape;
use crate::termination::leave_message;

/// What the subcommand takes from its command line.
#[derive(Debug, Clone, clap::Args)]
#[command(group(
    ArgGroup::new("source")
        .required(true)
        .args(["url", "image", "file", "blank", "upload"])
))]
#[command(group(ArgGroup::new("target").required(true).args(["directory", "device"])))]
#[non_exhaustive]
pub struct Options {
    /// Take the disk image at this URL, http:// or https://
    #[arg(long)]
    pub url: Option<String>,
    /// Take the disk in the directory /disk of this image of a registry
    #[arg(long)]
    pub image: Option<String>,
    /// Copy this raw disk: a file, or a block device
    #[arg(long)]
    pub file: Option<PathBuf>,
    /// Make an empty disk
    #[arg(long)]
    pub blank: bool,
    /// Take a disk that the upload proxy sends to this address by HTTPS
    #[arg(long, requires = "credentials")]
    pub upload: Option<SocketAddr>,
    /// Take a copy by that, from who shows a certificate with this name, and no upload
    #[arg(long, requires = "upload")]
    pub sender: Option<String>,
    /// The directory with tls.crt and tls.key for that, and ca.crt by which the proxy is known
    #[arg(long)]
    pub credentials: Option<PathBuf>,
    /// The file's checksum as it is served, sha256:… or sha512:…
    #[arg(long, requires = "url")]
    pub checksum: Option<String>,
    /// Trust the authorities in the files of this directory, too
    #[arg(long)]
    pub certificates: Option<PathBuf>,
    /// The server's user
    #[arg(long, env = "IMPORTER_ACCESS_KEY_ID", hide_env_values = true)]
    pub user: Option<String>,
    /// The user's password
    #[arg(
        long,
        env = "IMPORTER_SECRET_KEY",
        hide_env_values = true,
        requires = "user"
    )]
    pub password: Option<String>,
    /// Write disk.img into this directory
    #[arg(long)]
    pub directory: Option<PathBuf>,
    /// Write the disk to this block device
    #[arg(long)]
    pub device: Option<PathBuf>,
    /// Where files may be kept meanwhile; the target's directory by default
    #[arg(long, required_unless_present = "directory")]
    pub scratch: Option<PathBuf>,
    /// Bytes that the disk has, if there is room for so many
    #[arg(long)]
    pub size: u64,
    /// Leave 5.5 % of the directory's file system free
    #[arg(long)]
    pub leave_overhead: bool,
    /// Allocate space for the whole disk
    #[arg(long)]
    pub preallocate: bool,
    /// Serve the progress on this address, at /metrics
    #[arg(long)]
    pub progress: Option<SocketAddr>,
    /// The unique id that the progress is labelled with
    #[arg(long, default_value = "")]
    pub owner: String,
    /// Write the reason of a failure into this file, if it exists
    #[arg(long, default_value = "/dev/termination-log")]
    pub termination_log: PathBuf,
}

/// Fills the target.
///
/// # Errors
///
/// Why the disk is not there: of the source, or of the target.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let log = options.termination_log.clone();
    let outcome = run_until(options, crate::https::told_to_end()).await;
    if let Err(error) = &outcome {
        leave_message(&log, error);
    }
    outcome
}

async fn run_until(options: Options, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
    let progress = Progress::new(&options.owner);
    let serve = {
        let progress = progress.clone();
        let address = options.progress;
        async move {
            let Some(address) = address else {
                return std::future::pending().await;
            };
            progress.serve(scrape::listen(address).await?).await
        }
    };
    tokio::select! {
        outcome = import(&options, &progress) => Ok(outcome?),
        served = serve => served,
        () = stop => Err(ImportError::Stopped.into()),
    }
}

/// Fills the target; nobody can tell what it was before.
async fn import(options: &Options, progress: &Progress) -> Result<(), ImportError> {
    if let Some(address) = options.upload {
        upload::receive(options, address, progress).await?;
        progress.finish();
        tracing::info!("the disk is complete");
        return Ok(());
    }
    let source = Source::of(options)?;
    let target = Target::of(options);
    let (target, room) = {
        let (size, leave_overhead) = (options.size, options.leave_overhead);
        blocking(move || {
            target.clear()?;
            let room = target.room(size, leave_overhead)?;
            Ok((target, room))
        })
        .await?
    };
    tracing::info!(%source, room, "importing");
    let disk = source.fetch(&target.work(&source), room, progress).await?;
    let preallocate = options.preallocate;
    let copied = progress.clone();
    let counts = options.file.is_some();
    blocking(move || {
        let tell = |done, total| {
            if counts {
                copied.set(done, total);
            }
        };
        match disk {
            Some(disk) => target.put(&disk, room, preallocate, &tell)?,
            None => target.put_blank(room, preallocate)?,
        }
        target.clear()
    })
    .await?;
    progress.finish();
    tracing::info!("the disk is complete");
    Ok(())
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ImportError> + Send + 'static,
) -> Result<T, ImportError> {
    match spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Only if the runtime itself ends.
            Err(_) => Err(ImportError::Stopped),
        },
    }
}
