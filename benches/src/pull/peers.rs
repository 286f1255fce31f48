//! The programs that are compared, each set up to pull one image into an empty directory.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use podvisor_images::Store;

use super::measure::{Cost, Disk, Sample, run, timed};
use super::registry::Server;

/// Without the service for Kubernetes, which requires a CNI configuration.
const CONTAINERD_CONFIG: &str = "version = 2\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n";

/// A program, or two that work together.
#[derive(Debug)]
pub(super) enum Peer {
    Podvisor(PathBuf),
    Containerd { snapshotter: Option<&'static str> },
    Umoci,
}

impl Peer {
    pub(super) fn all(podvisor: &Path) -> Vec<Self> {
        vec![
            Self::Podvisor(podvisor.to_owned()),
            Self::Containerd { snapshotter: None },
            Self::Umoci,
        ]
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Podvisor(_) => "podvisor",
            Self::Containerd {
                snapshotter: Some("native"),
            } => "containerd, native",
            Self::Containerd { .. } => "containerd, overlayfs",
            Self::Umoci => "skopeo and umoci",
        }
    }

    /// Pulls `image` into `directory`, which is empty.
    pub(super) fn measure(&mut self, image: &str, directory: &Path) -> Result<Sample> {
        match self {
            Self::Podvisor(program) => podvisor(program, image, directory),
            Self::Containerd { snapshotter } => containerd(snapshotter, image, directory),
            Self::Umoci => umoci(image, directory),
        }
    }
}

fn podvisor(program: &Path, image: &str, directory: &Path) -> Result<Sample> {
    let before = Disk::of(directory)?;
    let times = timed(directory, None, || {
        let mut command = Command::new(program);
        command.arg("--root").arg(directory);
        run(command.args(["pull", "--quiet", image])).map(drop)
    })?;
    // As `podvisor run` does: the image is looked up, and its file becomes the disk of a virtual
    // machine, then of another.
    let open = || -> Result<fs::File> {
        let store = Store::open(directory.join("images"))?;
        Ok(store.resolve(image)?.open_rootfs()?)
    };
    let first = open()?;
    let pulled = Disk::of(directory)?;
    let second = open()?;
    let both = Disk::of(directory)?;
    drop((first, second));
    Ok(sample(times, pulled - before, both - pulled))
}

fn containerd(
    snapshotter: &mut Option<&'static str>,
    image: &str,
    directory: &Path,
) -> Result<Sample> {
    let config = directory.join("config.toml");
    fs::write(&config, CONTAINERD_CONFIG)?;
    // Not below the directory: the path of a socket must be short.
    let socket = PathBuf::from(format!(
        "/run/podvisor-bench-{}-containerd",
        std::process::id()
    ));
    let mut command = Command::new("containerd");
    command.arg("--config").arg(&config);
    command.arg("--address").arg(&socket);
    command.arg("--root").arg(directory.join("root"));
    command.arg("--state").arg(directory.join("state"));
    let log = directory.join("log");
    let daemon = Server::start(command.args(["--log-level", "warn"]), &log, || {
        UnixStream::connect(&socket).is_ok()
    })?;
    let ctr = |arguments: &[&str]| {
        let mut command = Command::new("ctr");
        run(command.arg("--address").arg(&socket).args(arguments))
    };
    let snapshotter = match snapshotter {
        Some(known) => *known,
        none => *none.insert(usable_snapshotter(&ctr(&["plugins", "ls"])?)),
    };
    let before = Disk::of(directory)?;
    let times = timed(directory, Some(daemon.pid()), || {
        let arguments = ["--plain-http", "--snapshotter", snapshotter, image];
        ctr(&[&["images", "pull"], &arguments[..]].concat()).map(drop)
    })?;
    // As a container is created: a snapshot on top of the image's topmost one, then another.
    let top = ctr(&["snapshots", "--snapshotter", snapshotter, "ls"])?;
    let top = topmost(&top).context("containerd lists no snapshot of the image")?;
    let prepare = |key: &str| {
        ctr(&[
            "snapshots",
            "--snapshotter",
            snapshotter,
            "prepare",
            key,
            &top,
        ])
    };
    prepare("first")?;
    let pulled = Disk::of(directory)?;
    prepare("second")?;
    let both = Disk::of(directory)?;
    drop(daemon);
    let _ = fs::remove_file(&socket);
    let _ = fs::remove_file(socket.with_extension("ttrpc"));
    Ok(sample(times, pulled - before, both - pulled))
}

/// Returns overlayfs if `ctr plugins ls` says that it works, otherwise native, which copies.
fn usable_snapshotter(plugins: &str) -> &'static str {
    let works = plugins.lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.get(1) == Some(&"overlayfs") && words.last() == Some(&"ok")
    });
    if works { "overlayfs" } else { "native" }
}

/// Returns the snapshot that is not a parent of another one, in the output of `ctr snapshots ls`.
fn topmost(listing: &str) -> Option<String> {
    let lines = || listing.lines().skip(1).map(str::split_whitespace);
    let parents: Vec<&str> = lines().filter_map(|mut words| words.nth(1)).collect();
    lines()
        .filter_map(|mut words| words.next())
        .find(|key| !parents.contains(key))
        .map(str::to_owned)
}

fn umoci(image: &str, directory: &Path) -> Result<Sample> {
    let layout = directory.join("oci");
    let layout = format!("{}:image", layout.display());
    let unpack = |bundle: &str| {
        let mut command = Command::new("umoci");
        run(command
            .args(["unpack", "--image", &layout])
            .arg(directory.join(bundle)))
        .map(drop)
    };
    let before = Disk::of(directory)?;
    let times = timed(directory, None, || {
        let mut copy = Command::new("skopeo");
        copy.args(["copy", "--quiet", "--src-tls-verify=false"]);
        run(copy.args([format!("docker://{image}"), format!("oci:{layout}")]))?;
        unpack("first")
    })?;
    let pulled = Disk::of(directory)?;
    unpack("second")?;
    let both = Disk::of(directory)?;
    Ok(sample(times, pulled - before, both - pulled))
}

fn sample(
    (wall, synced, cost): (std::time::Duration, std::time::Duration, Cost),
    disk: Disk,
    second: Disk,
) -> Sample {
    Sample {
        wall,
        synced,
        cost,
        disk,
        second,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_topmost_snapshot_is_nobodys_parent() {
        let listing =
            "KEY      PARENT   KIND\nsha256:b sha256:a Committed\nsha256:a          Committed\n";
        assert_eq!(topmost(listing).as_deref(), Some("sha256:b"));
        assert_eq!(topmost("KEY PARENT KIND\n"), None);
    }

    #[test]
    fn overlayfs_is_used_where_it_works() {
        let line = |status: &str| {
            format!("io.containerd.snapshotter.v1    overlayfs    linux/amd64    {status}\n")
        };
        assert_eq!(usable_snapshotter(&line("ok")), "overlayfs");
        assert_eq!(usable_snapshotter(&line("skip")), "native");
    }
}
