//! The disk image that a VM begins with: a file, a URL, or an OCI image.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use podvisor_images::{Disk, PullOptions, PullPolicy, Store};

use super::args::RunArgs;
use crate::cli::notice;
use crate::cli::progress::Progress;
use crate::cli::pull::{Pulled, pull, pull_disk};

/// What the name of an image stands for.
#[derive(Debug, PartialEq, Eq)]
enum Source {
    /// The URL of a disk image.
    Url,
    /// A file of this host.
    File(PathBuf),
    /// An OCI image, or the id of a disk image.
    Image,
}

impl Source {
    /// Files come before OCI images of the same name, as `./NAME` does anyway.
    fn of(name: &str) -> anyhow::Result<Self> {
        if Disk::is_url(name) {
            return Ok(Self::Url);
        }
        let path = Path::new(name);
        let endings = ["qcow2", "img", "raw", "xz", "gz", "zst"];
        let is_path = name.starts_with(['/', '.']) || {
            let ending = path.extension().and_then(|ending| ending.to_str());
            ending.is_some_and(|ending| endings.contains(&ending))
        };
        match path.is_file() {
            true => Ok(Self::File(path.to_owned())),
            false if path.is_dir() => {
                bail!("{name} is a directory; name the file of a disk image in it")
            }
            false if path.exists() => {
                bail!("{name} is not a regular file; copy the disk into one first")
            }
            false if is_path => bail!("there is no file {name}; check the path"),
            false => Ok(Self::Image),
        }
    }
}

/// Checks the name of an image before anything is made for its VM.
pub(super) fn check(args: &RunArgs) -> anyhow::Result<()> {
    let source = Source::of(&args.image)?;
    if args.checksum.is_some() && source != Source::Url {
        bail!("--checksum is for URLs; name an OCI image by its digest instead: NAME@sha256:...");
    }
    Ok(())
}

/// Returns the disk image of the store, which it is fetched into if it is not there.
pub(super) async fn disk(store: &Store, args: &RunArgs) -> anyhow::Result<Pulled<Disk>> {
    let name = args.image.as_str();
    let source = Source::of(name)?;
    let progress = match args.quiet {
        true => Progress::Quiet,
        false => Progress::for_stderr(),
    };
    let options = PullOptions::default()
        .registries(args.registries.config()?)
        .policy(PullPolicy::IfMissing);
    match source {
        Source::Url => pull_disk(store, name, args.checksum.as_ref(), options, progress).await,
        Source::File(path) => {
            if !args.quiet {
                notice(&format!("reading {name}"));
            }
            let store = store.clone();
            let read = move || store.import_disk(&path);
            let read = tokio::task::spawn_blocking(read).await;
            let disk = read.context("the image is not read")??;
            Ok(Pulled::Image(Box::new(disk)))
        }
        Source::Image => {
            if let Ok(disk) = store.resolve_disk(name) {
                return Ok(Pulled::Image(Box::new(disk)));
            }
            let image = match pull(store, name, options, progress).await? {
                Pulled::Image(image) => image.id().to_string(),
                Pulled::Interrupted(signal) => return Ok(Pulled::Interrupted(signal)),
            };
            let store = store.clone();
            let find = move || store.container_disk(&image);
            let found = tokio::task::spawn_blocking(find).await;
            let disk = found.context("the disk in the image is not read")??;
            Ok(Pulled::Image(Box::new(disk)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_file_if_there_is_one_or_it_looks_like_one() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("debian");
        std::fs::write(&file, "x").unwrap();
        let path = |path: &Path| path.to_str().unwrap().to_owned();
        assert_eq!(
            Source::of(&path(&file)).unwrap(),
            Source::File(file.clone())
        );
        assert_eq!(
            Source::of("https://example.org/a.qcow2").unwrap(),
            Source::Url
        );
        for image in [
            "debian",
            "quay.io/containerdisks/debian:12",
            "sha256:abcd",
            "a/b.c:1",
        ] {
            assert_eq!(Source::of(image).unwrap(), Source::Image, "{image}");
        }
        for missing in ["./debian", "/no/such", "nothing.qcow2", "../x.img"] {
            let said = Source::of(missing).unwrap_err().to_string();
            assert!(said.contains(missing) && said.contains("no file"), "{said}");
        }
        let said = Source::of(&path(dir.path())).unwrap_err().to_string();
        assert!(said.contains("directory"), "{said}");
        let said = Source::of("/dev/null").unwrap_err().to_string();
        assert!(said.contains("regular file"), "{said}");
    }
}
