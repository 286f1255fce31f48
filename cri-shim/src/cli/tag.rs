//! `podvisor tag`, `podvisor image pin` and `unpin`: names of images, and protection from pruning.

use clap::Args;

use super::Globals;

#[derive(Debug, Args)]
pub(super) struct TagArgs {
    /// Name, id or digest of an image that is here
    image: String,

    /// New names
    #[arg(value_name = "NAME", required = true)]
    #[arg(help = "New names: [REGISTRY/]NAME[:TAG]")]
    names: Vec<String>,
}

#[derive(Debug, Args)]
pub(super) struct PinArgs {
    /// Names, ids or digests
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<String>,
}

pub(super) fn run(globals: &Globals, args: &TagArgs) -> anyhow::Result<u8> {
    let store = globals.store()?;
    for name in &args.names {
        store.tag(&args.image, name)?;
    }
    Ok(0)
}

/// Pins or unpins all images that are found; each failure is reported, and any failure makes the
/// command fail.
pub(super) fn pin(globals: &Globals, args: &PinArgs, pinned: bool) -> anyhow::Result<u8> {
    let store = globals.store()?;
    let mut code = 0;
    for image in &args.images {
        if let Err(error) = store.pin(image, pinned) {
            super::report(&error.into());
            code = super::FAILURE;
        }
    }
    Ok(code)
}
