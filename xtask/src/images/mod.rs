//! Images created by other tools, for tests and benchmarks: mmdebstrap, umoci, buildah, skopeo.
//!
//! [`ensure`] creates them once per recipe, in `target/images`:
//!
//! | name | what it is |
//! | --- | --- |
//! | `registry/` | storage of a docker-registry with `debian:1`, `split:1`, `layers:1`, `zstd:1` and `schema2:1` |
//! | `layers.list` | what `umoci unpack` makes of `layers:1`, file by file ([`listing`]) |
//! | `busybox.docker.tar` | a docker-archive by buildah |
//! | `busybox.oci.tar` | an oci-archive by skopeo |
//!
//! `debian` is a Debian root in one layer, `zstd` the same in zstd, `split` the same in four
//! layers, `layers` the same with three more layers that change it.

pub(crate) mod cloud;
mod listing;
pub(crate) mod small;

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::demo::registry::Registry;
use crate::report::Step;
use crate::{paths, process, setup};

const RECIPE: &str = include_str!("make.sh");

/// Creates the images if they are missing; returns their directory.
pub(crate) fn ensure() -> Result<PathBuf> {
    let base = paths::target().join("images");
    let key = process::key(&[RECIPE, include_str!("listing.rs")])?;
    let directory = base.join(&key);
    if directory.is_dir() {
        return Ok(directory);
    }
    let _lock = process::Lock::take(&base)?;
    if directory.is_dir() {
        return Ok(directory);
    }
    setup::ensure(&[setup::IMAGES])?;
    if !rustix::process::geteuid().is_root() {
        bail!(
            "only root can make the tests' images, which have owners and device nodes: run this as root"
        );
    }
    let step = Step::begin("making images with Debian's tools");
    // Results of older recipes and of interrupted runs are removed.
    for entry in fs::read_dir(&base)? {
        let path = entry?.path();
        if path.is_dir() {
            fs::remove_dir_all(&path)
                .with_context(|| format!("{} cannot be removed", path.display()))?;
        }
    }
    let partial = base.join("partial");
    fs::create_dir(&partial)?;
    let registry = Registry::start(&partial.join("registry"))?;
    process::run(
        process::tied("sh")
            .arg(paths::root().join("xtask/src/images/make.sh"))
            .arg(suite()?)
            .args(sources())
            .current_dir(&partial)
            .env("REGISTRY", registry.address().to_string())
            .env("TMPDIR", &partial)
            .stdin(Stdio::null())
            .stdout(std::io::stderr()),
    )?;
    drop(registry);
    let bundle = partial.join("bundle");
    fs::write(
        partial.join("layers.list"),
        listing::list(&bundle.join("rootfs"))?,
    )?;
    fs::remove_dir_all(&bundle)?;
    fs::rename(&partial, &directory)?;
    step.done();
    Ok(directory)
}

/// Returns the code name of this machine's Debian, whose keys are installed.
fn suite() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release").context("/etc/os-release cannot be read")?;
    text.lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .map(|name| name.trim_matches('"').to_owned())
        .context("/etc/os-release names no release of Debian")
}

/// Returns Debian's sources as configured in this machine's apt; none if apt has no lists, in which
/// case mmdebstrap uses its defaults.
fn sources() -> Vec<String> {
    let listed = process::output(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "deb $(REPO_URI) $(RELEASE) $(COMPONENT)",
        "Created-By: Packages",
        "Origin: Debian",
    ]));
    let mut lines: Vec<String> = listed
        .unwrap_or_default()
        .lines()
        .map(str::to_owned)
        .filter(|line| line.ends_with(" main"))
        .collect();
    lines.sort();
    lines.dedup();
    lines
}
