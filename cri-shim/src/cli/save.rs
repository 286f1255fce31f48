//! `podvisor save`: writes images to an archive.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use podvisor_images::{ArchiveError, ArchiveFormat, Error};

use super::Globals;
use super::destination::Destination;
use super::interrupt::{Interruptible, Interrupts};
use super::progress::Progress;
use super::signals::exit_code_of;
use super::terminal;
use super::whole_file::WholeFile;

#[derive(Debug, Args)]
pub(super) struct SaveArgs {
    /// Names, ids or digests
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<String>,

    /// File to write instead of stdout, which is `-`, too
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Archive format
    #[arg(long, value_enum, default_value_t = Format::DockerArchive)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For docker, podman, containerd and skopeo
    DockerArchive,
    /// The OCI image layout alone
    OciArchive,
}

impl From<Format> for ArchiveFormat {
    fn from(format: Format) -> Self {
        match format {
            Format::DockerArchive => Self::Docker,
            Format::OciArchive => Self::Oci,
        }
    }
}

pub(super) fn run(globals: &Globals, args: &SaveArgs) -> anyhow::Result<u8> {
    let store = globals.store()?;
    let interrupts = Interrupts::catch()?;
    // As in docker and tar, `-` means stdout.
    let path = args
        .output
        .as_deref()
        .filter(|path| *path != Path::new("-"));
    let output = Output::new(path)?;
    let (images, format) = (args.images.clone(), args.format.into());
    let file = output.file()?;
    let saved = interrupts.during(Progress::Quiet, move |options| {
        store.save(&images, format, file, &options.cancel)
    });
    match saved.map_err(|error| output.explain(error))? {
        Interruptible::Done(()) => output.finish().map(|()| 0),
        Interruptible::Interrupted(signal) => Ok(exit_code_of(signal)),
    }
}

/// The destination of the archive. A file gets its name once it is complete.
enum Output {
    Stdout,
    /// A device, pipe or socket, which is written as it is.
    Special(PathBuf),
    File {
        making: WholeFile,
        path: PathBuf,
    },
}

impl Output {
    fn new(path: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) = path else {
            anyhow::ensure!(
                !terminal::is_terminal(io::stdout()),
                "an archive is nothing for a terminal; give --output FILE or redirect stdout"
            );
            return Ok(Self::Stdout);
        };
        let path = match Destination::of(path).with_context(|| cannot_write(path))? {
            Destination::Directory => {
                anyhow::bail!("{} is a directory; give --output a file", path.display())
            }
            Destination::Special => return Ok(Self::Special(path.to_owned())),
            Destination::File(path) => path,
        };
        let directory = match path.parent() {
            Some(directory) if directory != Path::new("") => directory,
            _ => Path::new("."),
        };
        let making = WholeFile::create_in(directory).with_context(|| cannot_write(&path))?;
        Ok(Self::File { making, path })
    }

    fn file(&self) -> anyhow::Result<File> {
        match self {
            Self::Stdout => {
                let stdout = io::stdout().as_fd().try_clone_to_owned();
                stdout.map(File::from).context("cannot write to stdout")
            }
            Self::Special(path) => {
                let file = File::options().write(true).open(path);
                file.with_context(|| cannot_write(path))
            }
            Self::File { making, path } => {
                let file = making.file().try_clone();
                file.with_context(|| cannot_write(path))
            }
        }
    }

    /// Names the destination in the error if writing to it failed.
    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let Some(Error::Archive(ArchiveError::Write { source })) = error.downcast_ref() else {
            return error;
        };
        let is_full = matches!(
            source.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        );
        match self.path() {
            Some(path) if is_full => error.context(format!(
                "no space left for {}; free some, or save to another disk",
                path.display()
            )),
            Some(path) => error.context(cannot_write(path)),
            None => error.context("cannot write to stdout"),
        }
    }

    fn path(&self) -> Option<&Path> {
        match self {
            Self::Stdout => None,
            Self::Special(path) | Self::File { path, .. } => Some(path),
        }
    }

    fn finish(self) -> anyhow::Result<()> {
        match self {
            Self::Stdout => io::stdout().flush().context("cannot write to stdout"),
            Self::Special(_) => Ok(()),
            Self::File { making, path } => {
                making.finish(&path).with_context(|| cannot_write(&path))
            }
        }
    }
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}
