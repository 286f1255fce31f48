//! Disk images over the ImageService: by Virtlet's prefix, by URL and by id. Other names are those
//! of OCI images, of which a containerDisk is one.

use podvisor_cri_messages::Image as Shown;
use podvisor_images::{Checksum, Disk, Error as ImageError, Store};

use crate::cri::error::{CriError, Result};
use crate::cri::image_names::ImageNames;

/// What the name of an image begins with that is a disk image's URL without its scheme.
const PREFIX: &str = "virtlet.cloud/";

/// The scheme of such a URL.
const SCHEME: &str = "https://";

/// The name of the image that there is not: a machine that boots from a volume has it, as a pod
/// must name one. No registry is asked for it.
const NONE: &str = "podvisor.io/boot-from-volume:v1";

/// Its id, which no content has.
pub(super) const NONE_ID: &str =
    "sha256:0000000000000000000000000000000000000000000000000000000000000000";

/// Whether an image's name or id stands for no image.
pub(in crate::cri) fn is_none(name: &str) -> bool {
    name == NONE || name == NONE_ID
}

/// How that is listed, for those who ask for it by its name.
pub(in crate::cri) fn none() -> Shown {
    Shown {
        id: NONE_ID.to_owned(),
        repo_tags: vec![NONE.to_owned()],
        // A size of 0 means that it is not known.
        size: 1,
        pinned: true,
        ..Shown::default()
    }
}

/// Returns the URL of a disk image, if an image's name is one: with a scheme, or with Virtlet's
/// prefix. A tag, which a kubelet adds, is cut from the latter, and the rest may be a short name.
///
/// # Errors
/// Nothing follows the prefix.
pub(in crate::cri) fn disk_url(names: &ImageNames, name: &str) -> Result<Option<String>> {
    if Disk::is_url(name) {
        return Ok(Some(name.to_owned()));
    }
    let Some(rest) = name.strip_prefix(PREFIX) else {
        return Ok(None);
    };
    let rest = rest.split_once('@').map_or(rest, |(rest, _)| rest);
    let (before, last) = rest.rsplit_once('/').unwrap_or(("", rest));
    let last = last.split_once(':').map_or(last, |(last, _)| last);
    let url = match before {
        "" => last.to_owned(),
        before => format!("{before}/{last}"),
    };
    let url = names.url(&url).unwrap_or(url);
    match url.is_empty() {
        true => {
            let reason = format!("nothing follows {PREFIX:?}: write the URL without its scheme");
            Err(CriError::invalid("image", reason))
        }
        false if Disk::is_url(&url) => Ok(Some(url)),
        false => Ok(Some(format!("{SCHEME}{url}"))),
    }
}

/// Returns the checksum in the name of a disk image, `NAME@sha256:…`, which its file must match.
///
/// # Errors
/// It is not a checksum.
pub(in crate::cri) fn checksum(name: &str) -> Result<Option<Checksum>> {
    let named = name
        .strip_prefix(PREFIX)
        .and_then(|rest| rest.split_once('@'));
    let named = named.map(|(_, checksum)| checksum.parse::<Checksum>());
    let checksum = named.transpose();
    checksum.map_err(|error| CriError::invalid("image", error.to_string()))
}

/// Returns a disk image by its name or id; `None` if the store has none of that name.
pub(in crate::cri) fn find_disk(
    store: &Store,
    names: &ImageNames,
    name: &str,
) -> Result<Option<Disk>> {
    match disk_url(names, name)? {
        Some(url) => stored_disk(store, &url),
        None => stored_disk(store, name),
    }
}

/// Returns a disk image by its URL or id; `None` if the store has none of that name.
pub(super) fn stored_disk(store: &Store, name: &str) -> Result<Option<Disk>> {
    match store.resolve_disk(name) {
        Ok(disk) => Ok(Some(disk)),
        Err(
            ImageError::NotFound { .. } | ImageError::Damaged { .. } | ImageError::Reference { .. },
        ) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A disk to boot from, and the id of the image that it is or that has it.
#[derive(Debug)]
pub(super) struct BootDisk {
    pub(super) disk: Disk,
    pub(super) image: String,
}

/// Returns the disk that a machine boots from: that in an OCI image, or a disk image. It blocks.
pub(super) fn boot_disk(store: &Store, names: &ImageNames, name: &str) -> Result<BootDisk> {
    if disk_url(names, name)?.is_none() {
        match store.resolve(name) {
            Ok(image) => {
                let disk = store.container_disk(name)?;
                let image = image.id().to_string();
                return Ok(BootDisk { disk, image });
            }
            Err(ImageError::NotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    match find_disk(store, names, name)? {
        Some(disk) => Ok(BootDisk {
            image: disk.id().to_string(),
            disk,
        }),
        None => Err(CriError::NoImage {
            name: name.chars().take(512).collect(),
        }),
    }
}

/// How a disk image is listed: under the name by which a pod can have it.
pub(in crate::cri) fn shown(disk: &Disk) -> Shown {
    let names = disk
        .urls()
        .iter()
        .map(|url| match url.strip_prefix(SCHEME) {
            Some(rest) => format!("{PREFIX}{rest}:latest"),
            None => url.clone(),
        });
    Shown {
        id: disk.id().to_string(),
        repo_tags: names.collect(),
        repo_digests: Vec::new(),
        size: disk.size().max(1),
        pinned: disk.pinned(),
        ..Shown::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_that_there_is_not_is_known_by_name_and_id() {
        assert!(is_none(NONE) && is_none(&none().id));
        assert!(!is_none("podvisor.io/boot-from-volume:v2") && !is_none(""));
        // No content of a store has this id.
        let id: podvisor_images::Digest = none().id.parse().unwrap();
        assert_ne!(id, podvisor_images::Digest::of(b""));
    }

    #[test]
    fn names_with_the_prefix_or_a_scheme_are_urls_and_others_are_not() {
        let names = ImageNames::default();
        let disk_url = |name| disk_url(&names, name);
        for (name, url) in [
            (
                "https://x.example/a.qcow2",
                Some("https://x.example/a.qcow2"),
            ),
            ("http://x.example/a.img", Some("http://x.example/a.img")),
            (
                "virtlet.cloud/x.example/a.img",
                Some("https://x.example/a.img"),
            ),
            (
                "virtlet.cloud/x.example/a.img:latest",
                Some("https://x.example/a.img"),
            ),
            (
                "virtlet.cloud/x.example:8080/a.img:1",
                Some("https://x.example:8080/a.img"),
            ),
            ("virtlet.cloud/cirros", Some("https://cirros")),
            ("virtlet.cloud/a/b@sha256:00", Some("https://a/b")),
            ("busybox", None),
            ("registry.example/virtlet.cloud/x", None),
            ("virtlet.cloudy/x", None),
        ] {
            assert_eq!(disk_url(name).unwrap().as_deref(), url, "{name}");
        }
        assert!(disk_url("virtlet.cloud/").is_err());
        assert!(disk_url("virtlet.cloud/:latest").is_err());
    }
}
