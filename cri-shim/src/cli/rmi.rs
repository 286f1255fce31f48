//! `podvisor rmi`: removes names of images, and images when their last name is removed.

use clap::Args;
use podvisor_images::{Error, RemovedImages};
use serde::Serialize;

use super::{FormatArgs, Globals, size};

#[derive(Debug, Args)]
pub(super) struct RmiArgs {
    /// Names, ids or digests
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<String>,

    /// Ignore images that do not exist
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
        match store.remove(name) {
            Ok(removed) => all.add(removed),
            Err(Error::NotFound { .. }) if args.force => {}
            Err(error) => {
                super::report(&error.into());
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
}
