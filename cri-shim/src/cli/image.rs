//! `podvisor image`: all commands for images, under one name.

use clap::{Args, Subcommand};

use super::deferred::Deferred;
use super::{Globals, images, import, inspect, load, prune, pull, rmi, save, tag};

#[derive(Debug, Args)]
pub(super) struct ImageArgs {
    #[command(subcommand)]
    command: ImageCommand,
}

#[derive(Debug, Subcommand)]
enum ImageCommand {
    /// Show all that is known of images, as JSON
    Inspect(Deferred<inspect::InspectArgs>),
    /// Show how an image was made
    History(Deferred<inspect::HistoryArgs>),
    /// Keep images from being pruned
    Pin(Deferred<tag::PinArgs>),
    /// Let images be pruned again
    Unpin(Deferred<tag::PinArgs>),
    /// List the images that are here
    #[command(visible_alias = "list")]
    Ls(Deferred<images::ImagesArgs>),
    /// Fetch images from a registry
    Pull(Deferred<pull::PullArgs>),
    /// Remove images
    #[command(visible_alias = "remove")]
    Rm(Deferred<rmi::RmiArgs>),
    /// Remove images that nobody needs
    Prune(Deferred<prune::PruneArgs>),
    /// Give an image more names
    Tag(Deferred<tag::TagArgs>),
    /// Take images from an archive
    Load(Deferred<load::LoadArgs>),
    /// Write images to an archive
    Save(Deferred<save::SaveArgs>),
    /// Make an image of a root file system: a directory or a tar
    Import(Deferred<import::ImportArgs>),
}

pub(super) fn run(globals: &Globals, args: &ImageArgs) -> anyhow::Result<u8> {
    match &args.command {
        ImageCommand::Inspect(args) => inspect::run(globals, args),
        ImageCommand::History(args) => inspect::history(globals, args),
        ImageCommand::Pin(args) => tag::pin(globals, args, true),
        ImageCommand::Unpin(args) => tag::pin(globals, args, false),
        ImageCommand::Ls(args) => images::run(globals, args),
        ImageCommand::Pull(args) => pull::run(globals, args),
        ImageCommand::Rm(args) => rmi::run(globals, args),
        ImageCommand::Prune(args) => prune::images(globals, args),
        ImageCommand::Tag(args) => tag::run(globals, args),
        ImageCommand::Load(args) => load::run(globals, args),
        ImageCommand::Save(args) => save::run(globals, args),
        ImageCommand::Import(args) => import::run(globals, args),
    }
}
