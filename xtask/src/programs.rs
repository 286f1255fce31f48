//! Programs of Debian's that tests run and that are not installed for them: their packages start
//! services, or replace those of other vendors that a developer works with.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::{deb, paths, process};

/// The packages, and the programs of each.
const PROGRAMS: &[(&str, &[&str])] = &[
    ("containerd", &["containerd", "containerd-shim-runc-v2"]),
    ("runc", &["runc"]),
];

/// Returns the directory of the programs, which are downloaded if they are not there.
pub(crate) fn ensure() -> Result<PathBuf> {
    let base = paths::target().join("programs");
    let directory = base.join("bin");
    let _lock = process::Lock::take(&base)?;
    fs::create_dir_all(&directory)?;
    for (package, programs) in PROGRAMS {
        if programs.iter().all(|name| directory.join(name).is_file()) {
            continue;
        }
        let download = base.join("download");
        let tree = deb::unpack(package, package, &download)?;
        for name in *programs {
            // A link would lead out of the package's tree.
            let found = ["usr/bin", "usr/sbin", "bin", "sbin"]
                .map(|dir| tree.join(dir).join(name))
                .into_iter()
                .find(|path| path.symlink_metadata().is_ok_and(|found| found.is_file()))
                .with_context(|| format!("the package {package} holds no {name}"))?;
            fs::rename(found, directory.join(name))?;
        }
        fs::remove_dir_all(&download)?;
    }
    Ok(directory)
}
