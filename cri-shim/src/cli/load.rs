//! `podvisor load`: loads images from an archive.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use podvisor_images::LoadedImage;
use serde::Serialize;

use super::images::ImageView;
use super::interrupt::{Interruptible, Interrupts};
use super::progress::Progress;
use super::signals::exit_code_of;
use super::terminal;
use super::{FormatArgs, Globals};

#[derive(Debug, Args)]
pub(super) struct LoadArgs {
    /// Archive or OCI layout directory to load instead of stdin, which is `-`, too
    #[arg(short, long, value_name = "FILE")]
    input: Option<PathBuf>,

    /// Show no progress
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    shown: FormatArgs,
}

pub(super) fn run(globals: &Globals, args: &LoadArgs) -> anyhow::Result<u8> {
    // As in docker and tar, `-` means stdin.
    let input = args.input.as_deref().filter(|path| *path != Path::new("-"));
    let stdin = match input {
        Some(_) => None,
        None if terminal::is_terminal(io::stdin()) => {
            anyhow::bail!(
                "nothing to load from a terminal; give --input FILE or pipe an archive in"
            )
        }
        None => Some(stdin()?),
    };
    let store = globals.store()?;
    let input = input.map(Path::to_owned);
    let ended =
        Interrupts::catch()?.during(Progress::for_steps(args.quiet), move |options| {
            match (stdin, input) {
                (Some(stdin), _) => store.load_file(stdin, None, options),
                (None, input) => store.load(input.unwrap_or_default(), None, options),
            }
        });
    match ended? {
        Interruptible::Done(images) => {
            if args.shown.is_json() {
                let views: Vec<_> = images.iter().map(LoadedView::from).collect();
                super::print_json(&views)?;
            } else {
                super::print(&images.iter().map(loaded).collect::<String>())?;
            }
            Ok(0)
        }
        Interruptible::Interrupted(signal) => Ok(exit_code_of(signal)),
    }
}

/// Returns stdin as a file of its own.
pub(super) fn stdin() -> anyhow::Result<File> {
    let stdin = io::stdin().as_fd().try_clone_to_owned();
    stdin.map(File::from).context("cannot read stdin")
}

/// The JSON representation of an image that was loaded.
#[derive(Debug, Serialize)]
struct LoadedView<'a> {
    #[serde(flatten)]
    image: ImageView,
    /// Those of the archive; the image may have others in the store.
    names: &'a [String],
}

impl<'a> From<&'a LoadedImage> for LoadedView<'a> {
    fn from(loaded: &'a LoadedImage) -> Self {
        Self {
            image: ImageView::from(&loaded.image),
            names: &loaded.names,
        }
    }
}

/// Returns a line for each name that the archive has, as docker prints it.
fn loaded(loaded: &LoadedImage) -> String {
    if loaded.names.is_empty() {
        return format!("Loaded image ID: {}\n", loaded.image.id());
    }
    let names = loaded.names.iter();
    names
        .map(|name| format!("Loaded image: {name}\n"))
        .collect()
}
