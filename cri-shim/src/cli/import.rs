//! `podvisor import`: creates an image from a directory or a tar.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use podvisor_images::ImportSource;

use super::images::ImageView;
use super::interrupt::{Interruptible, Interrupts};
use super::progress::Progress;
use super::signals::exit_code_of;
use super::{FormatArgs, Globals, load, terminal};

#[derive(Debug, Args)]
pub(super) struct ImportArgs {
    /// Directory, or tar of one; `-` is stdin
    #[arg(value_name = "DIR|TAR|-")]
    source: PathBuf,

    /// Name for the image
    name: Option<String>,

    /// Show no progress
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    shown: FormatArgs,
}

pub(super) fn run(globals: &Globals, args: &ImportArgs) -> anyhow::Result<u8> {
    let source = source(&args.source)?;
    let store = globals.store()?;
    let name = args.name.clone();
    let ended = Interrupts::catch()?.during(Progress::for_steps(args.quiet), move |options| {
        store.import(source, name.as_deref(), options)
    });
    match ended? {
        Interruptible::Done(image) => {
            if args.shown.is_json() {
                super::print_json(&ImageView::from(&image))?;
            } else {
                super::print(&format!("{}\n", image.id()))?;
            }
            Ok(0)
        }
        Interruptible::Interrupted(signal) => Ok(exit_code_of(signal)),
    }
}

fn source(path: &Path) -> anyhow::Result<ImportSource> {
    if path == Path::new("-") {
        anyhow::ensure!(
            !terminal::is_terminal(io::stdin()),
            "nothing to import from a terminal; give a directory or a file, or pipe a tar in"
        );
        return load::stdin().map(ImportSource::Tar);
    }
    if path.is_dir() {
        return Ok(ImportSource::Directory(path.to_owned()));
    }
    let file = File::open(path).with_context(|| {
        let shown = path.display();
        match path.starts_with("http:") || path.starts_with("https:") {
            true => {
                format!("cannot open {shown}; fetch it first: curl -fL {shown} | podvisor import -")
            }
            false => format!("cannot open {shown}"),
        }
    })?;
    Ok(ImportSource::Tar(file))
}
