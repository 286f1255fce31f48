//! `podvisor images`: lists the store's images.

use std::time::SystemTime;

use clap::Args;
use podvisor_images::Image;
use serde::Serialize;

use super::format::{NONE, SHORT_ID, ago, rfc3339};
use super::size;
use super::table::Table;
use super::{FormatArgs, Globals};

#[derive(Debug, Args)]
pub(super) struct ImagesArgs {
    /// List images of this repository alone, or of this tag
    #[arg(value_name = "NAME", conflicts_with = "disks")]
    name: Option<String>,

    /// Print ids alone
    #[arg(short, long, conflicts_with_all = ["json", "format", "digests"])]
    quiet: bool,

    /// Show the manifests' digests too
    #[arg(long)]
    digests: bool,

    /// Show ids in full
    #[arg(long)]
    no_trunc: bool,

    /// List disk images instead
    #[arg(long, conflicts_with = "digests")]
    disks: bool,

    #[command(flatten)]
    shown: FormatArgs,
}

/// The JSON representation of an image.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ImageView {
    id: String,
    digest: String,
    repo_tags: Vec<String>,
    repo_digests: Vec<String>,
    /// Bytes used on the disk.
    size: u64,
    /// RFC 3339; `None` if the image does not have it.
    created: Option<String>,
    pulled: String,
    user: Option<String>,
    pinned: bool,
}

impl From<&Image> for ImageView {
    fn from(image: &Image) -> Self {
        let config = image.config().config().as_ref();
        Self {
            id: image.id().to_string(),
            digest: image.manifest_digest().to_string(),
            repo_tags: image.tags().to_vec(),
            repo_digests: image.digests().to_vec(),
            size: image.size(),
            created: image.created().map(rfc3339),
            pulled: rfc3339(image.pulled()),
            user: config.and_then(|config| config.user().clone()),
            pinned: image.pinned(),
        }
    }
}

pub(super) fn run(globals: &Globals, args: &ImagesArgs) -> anyhow::Result<u8> {
    let store = globals.store()?;
    if args.disks {
        return super::disks::list(
            &store.disks()?,
            args.quiet,
            args.no_trunc,
            args.shown.is_json(),
        );
    }
    let mut images = store.list()?;
    if let Some(name) = &args.name {
        images.retain(|image| is_named(image.tags(), image.digests(), name));
    }
    if args.shown.is_json() {
        let views: Vec<ImageView> = images.iter().map(ImageView::from).collect();
        super::print_json(&views)?;
    } else if args.quiet {
        let line = |image: &Image| format!("{}\n", short_id(image, args.no_trunc));
        super::print(&images.iter().map(line).collect::<String>())?;
    } else {
        super::print(&table(&images, args, SystemTime::now()))?;
    }
    Ok(0)
}

fn table(images: &[Image], args: &ImagesArgs, now: SystemTime) -> String {
    let mut with_digests =
        Table::new(["REPOSITORY", "TAG", "DIGEST", "IMAGE ID", "CREATED", "SIZE"]);
    let mut plain = Table::new(["REPOSITORY", "TAG", "IMAGE ID", "CREATED", "SIZE"]);
    for image in images {
        let id = short_id(image, args.no_trunc);
        let created = ago(image.created(), now);
        let size = size::human(image.size());
        for (repository, tag) in names(image.tags(), image.digests()) {
            if args.digests {
                let digest = image.manifest_digest().to_string();
                let (id, created, size) = (id.clone(), created.clone(), size.clone());
                with_digests.row([repository, tag, digest, id, created, size]);
            } else {
                plain.row([repository, tag, id.clone(), created.clone(), size.clone()]);
            }
        }
    }
    if args.digests {
        with_digests.render()
    } else {
        plain.render()
    }
}

/// Returns an image's id, shortened for display or in full.
pub(super) fn short_id(image: &Image, in_full: bool) -> String {
    if in_full {
        image.id().to_string()
    } else {
        image.id().hex().chars().take(SHORT_ID).collect()
    }
}

/// Returns whether an image has a name: a repository, which may be short (`busybox`), with a tag or
/// digest or without.
fn is_named(tags: &[String], digests: &[String], name: &str) -> bool {
    let Ok(wanted) = podvisor_images::parse_reference(name) else {
        return false;
    };
    let (repository, _) = split_tag(name);
    let is_exact = repository != name || name.contains('@');
    let mut names = tags.iter().chain(digests);
    names.any(|known| match podvisor_images::parse_reference(known) {
        Ok(of) => {
            let is_same =
                of.registry() == wanted.registry() && of.repository() == wanted.repository();
            is_same && (!is_exact || of.to_string() == wanted.to_string())
        }
        Err(_) => false,
    })
}

/// Returns repository and tag of each name; those of the digests if there are no tags.
fn names(tags: &[String], digests: &[String]) -> Vec<(String, String)> {
    if !tags.is_empty() {
        return tags.iter().map(|name| split_tag(name)).collect();
    }
    let repository = digests.first().and_then(|name| name.split('@').next());
    vec![(repository.unwrap_or(NONE).to_owned(), NONE.to_owned())]
}

fn split_tag(name: &str) -> (String, String) {
    match name.rsplit_once(':') {
        // A colon before a slash belongs to the registry's port.
        Some((repository, tag)) if !tag.contains('/') => (repository.to_owned(), tag.to_owned()),
        _ => (name.to_owned(), NONE.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_chosen_by_repository_or_tag() {
        let tags = ["docker.io/library/busybox:1.36", "r.example:5000/app:2"].map(str::to_owned);
        let digests = [format!(
            "docker.io/library/busybox@sha256:{}",
            "1".repeat(64)
        )];
        for name in [
            "busybox",
            "busybox:1.36",
            "docker.io/library/busybox",
            "r.example:5000/app",
            &digests[0],
        ] {
            assert!(is_named(&tags, &digests, name), "{name}");
        }
        for name in [
            "busybox:1.37",
            "app",
            "library",
            "r.example:5000/app:3",
            "UPPER",
            "",
        ] {
            assert!(!is_named(&tags, &digests, name), "{name}");
        }
    }

    #[test]
    fn a_port_is_no_tag() {
        let split = |name: &str| {
            let (repository, tag) = split_tag(name);
            format!("{repository} {tag}")
        };
        assert_eq!(
            split("docker.io/library/busybox:latest"),
            "docker.io/library/busybox latest"
        );
        assert_eq!(split("localhost:5000/app:1.2"), "localhost:5000/app 1.2");
        assert_eq!(split("localhost:5000/app"), "localhost:5000/app <none>");
    }

    #[test]
    fn an_image_without_a_tag_has_a_row() {
        let digests = ["reg/app@sha256:00".to_owned()];
        assert_eq!(
            names(&[], &digests),
            [("reg/app".to_owned(), NONE.to_owned())]
        );
        assert_eq!(names(&[], &[]), [(NONE.to_owned(), NONE.to_owned())]);
    }
}
