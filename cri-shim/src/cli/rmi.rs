//! `podvisor rmi`: removes names of images, and images when their last name is removed.

use clap::Args;
use podvisor_images::{Error, Image, RemovedImages, Store, parse_reference};
use serde::Serialize;

use super::{FormatArgs, Globals, size};

#[derive(Debug, Args)]
pub(super) struct RmiArgs {
    /// Names, ids or digests
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<String>,

    /// Remove images by their ids with all their names; ignore images that do not exist
    #[arg(short, long)]
    force: bool,

    #[command(flatten)]
    shown: FormatArgs,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct RemovedView {
    untagged: Vec<String>,
    deleted: Vec<String>,
    /// Bytes of disk space that were freed.
    freed: u64,
    /// Files are kept until a running pull, load or save ends.
    deferred: bool,
}

impl RemovedView {
    pub(super) fn add(&mut self, removed: RemovedImages) {
        self.untagged.extend(removed.names);
        self.deleted.extend(removed.image.map(|id| id.to_string()));
        self.freed = self.freed.saturating_add(removed.bytes);
        self.deferred |= removed.deferred;
    }

    /// Returns the removed names and images, and the freed space.
    pub(super) fn to_summary(&self) -> String {
        format!(
            "{}Total reclaimed space: {}\n",
            self.to_text(),
            size::human(self.freed)
        )
    }

    /// Tells the user if the disk space is not freed yet.
    pub(super) fn notice(&self) {
        if self.deferred {
            super::notice(
                "images are being fetched or saved, so files that are no longer needed stay until \
                 that ends",
            );
        }
    }

    fn to_text(&self) -> String {
        let untagged = self
            .untagged
            .iter()
            .map(|name| format!("Untagged: {name}\n"));
        let deleted = self.deleted.iter().map(|id| format!("Deleted: {id}\n"));
        untagged.chain(deleted).collect()
    }
}

/// Removes what can be removed; each failure is reported, and any failure makes the command fail.
pub(super) fn run(globals: &Globals, args: &RmiArgs) -> anyhow::Result<u8> {
    let store = globals.store()?;
    let mut all = RemovedView::default();
    let mut code = 0;
    for name in &args.images {
        let checked = match args.force {
            true => Ok(()),
            false => check_names(&store, name),
        };
        let mut removed = RemovedImages::default();
        let done = checked.and_then(|()| Ok(store.remove_into(name, &mut removed)?));
        all.add(removed);
        match done {
            Ok(()) => {}
            Err(error) if args.force && is_not_found(&error) => {}
            Err(error) => {
                super::report(&error);
                code = super::FAILURE;
            }
        }
    }
    if args.shown.is_json() {
        super::print_json(&all)?;
    } else {
        super::print(&all.to_text())?;
    }
    all.notice();
    Ok(code)
}

fn is_not_found(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Error::NotFound { .. }))
}

/// Refuses to remove several names of an image that is given by its id.
fn check_names(store: &Store, name: &str) -> anyhow::Result<()> {
    match store.resolve(name) {
        Ok(image) => check_names_of(&image, name),
        // It may be a disk image, or a damaged image, which can be removed.
        Err(_) => Ok(()),
    }
}

fn check_names_of(image: &Image, name: &str) -> anyhow::Result<()> {
    let tags = image.tags();
    anyhow::ensure!(
        tags.len() < 2 || !is_id(name, &image.id().hex(), tags),
        "cannot remove image {name}: it has several names ({}); name one of them, or give --force \
         to remove it with all of them",
        tags.join(", ")
    );
    Ok(())
}

/// Returns whether `name`, which stands for the image with these digits and tags, is its id or a
/// prefix of it. A name that looks like one is a name.
fn is_id(name: &str, hex: &str, tags: &[String]) -> bool {
    let is_tag = parse_reference(name).is_ok_and(|name| tags.contains(&name.to_string()));
    !is_tag && hex.starts_with(name.strip_prefix("sha256:").unwrap_or(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_before_images() {
        let removed = |name: &str| RemovedImages {
            names: vec![name.to_owned()],
            bytes: 10,
            ..RemovedImages::default()
        };
        let mut all = RemovedView::default();
        all.add(removed("a:1"));
        all.add(removed("a:2"));
        all.deleted.push("sha256:00".to_owned());
        assert_eq!(
            all.to_text(),
            "Untagged: a:1\nUntagged: a:2\nDeleted: sha256:00\n"
        );
        assert_eq!(all.freed, 20);
    }

    #[test]
    fn a_tag_that_looks_like_the_id_is_a_name() {
        let hex = "beef".repeat(16);
        let tags = ["docker.io/library/beef:latest", "docker.io/library/b:1"];
        let tags = tags.map(str::to_owned);
        for id in ["beefb", &hex, &format!("sha256:{hex}"), "sha256:beef"] {
            assert!(is_id(id, &hex, &tags), "{id}");
        }
        for name in [
            "beef",
            "beef:latest",
            "b:1",
            "docker.io/library/b:1",
            "x/b@sha256:00",
        ] {
            assert!(!is_id(name, &hex, &tags), "{name}");
        }
        assert!(is_id("beef", &hex, &tags[1..]));
    }
}
