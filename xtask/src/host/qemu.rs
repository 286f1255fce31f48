//! The emulator of the test host. Guests panic on Debian 12's QEMU 7.2 now and then
//! (docs/testing.md), so that of Debian's backports is downloaded and unpacked. Where it cannot be,
//! the installed one has to do.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::process::{self, Lock};
use crate::{deb, paths, report};

const PROGRAM: &str = "qemu-system-x86_64";

/// What it takes; the libraries are those of the installed one.
const PACKAGES: [&str; 3] = ["qemu-system-x86", "qemu-system-data", "seabios"];

/// The release of Debian whose own QEMU is faulty.
const RELEASE: &str = "bookworm";

/// The public keys of Debian's archive.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Returns a command that runs the emulator, without arguments of its own. Hosts that count
/// instructions have the installed one, by which all figures in docs/ were measured.
pub(super) fn command(icount: bool) -> Command {
    let newer = if icount { None } else { newer() };
    let Some(tree) = newer else {
        return process::tied(PROGRAM);
    };
    let mut command = process::tied(program(&tree));
    for data in ["usr/share/qemu", "usr/share/seabios"] {
        command.arg("-L").arg(tree.join(data));
    }
    command
}

fn program(tree: &Path) -> PathBuf {
    tree.join("usr/bin").join(PROGRAM)
}

/// Returns the tree with the emulator of Debian's backports; `None` where there is none. That is
/// found out once.
fn newer() -> Option<PathBuf> {
    let system = fs::read_to_string("/etc/os-release").unwrap_or_default();
    if codename(&system) != Some(RELEASE) {
        return None;
    }
    let directory = paths::host().join("qemu");
    let tree = directory.join("tree");
    let missing = directory.join("missing");
    let known = || match (program(&tree).is_file(), missing.exists()) {
        (true, _) => Some(Some(tree.clone())),
        (false, true) => Some(None),
        (false, false) => None,
    };
    if let Some(known) = known() {
        return known;
    }
    // Without the lock, another host would make the same tree.
    let _lock = Lock::take(&directory).ok()?;
    known().unwrap_or_else(|| match unpack(&directory, &tree) {
        Ok(()) => Some(tree.clone()),
        Err(error) => {
            report::note(&format!(
                "the installed QEMU emulates the test host, in which a guest panics now and then: \
                 {error:#}"
            ));
            let _ = fs::write(&missing, "remove this file to try again\n");
            None
        }
    })
}

/// Returns the name of a release of Debian from its /etc/os-release.
fn codename(system: &str) -> Option<&str> {
    system
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
}

fn unpack(directory: &Path, tree: &Path) -> Result<()> {
    let options = backports(directory)?;
    let download = directory.join("download");
    let unpacked = deb::unpack_all(&PACKAGES, "QEMU for the test host", &options, &download)?;
    // Its libraries may be missing here.
    process::output(Command::new(program(&unpacked)).arg("--version"))
        .context("QEMU of Debian's backports does not run")?;
    // Last, because it says that all is there.
    fs::rename(unpacked, tree)?;
    fs::remove_dir_all(&download)?;
    Ok(())
}

/// Reads what the backports have, in a state of apt's of its own: the system's is not changed.
/// Returns the options with which apt has it.
fn backports(directory: &Path) -> Result<Vec<String>> {
    let mirrors = process::output(
        Command::new("apt-get")
            .args(["indextargets", "--format", "$(SITE)"])
            .args(["Origin: Debian", "Component: main"])
            .arg(format!("Codename: {RELEASE}")),
    )?;
    let Some(mirror) = mirrors.lines().next() else {
        bail!("apt has no source of {RELEASE}");
    };
    let [lists, cache] = ["lists", "cache"].map(|name| directory.join(name));
    fs::create_dir_all(lists.join("partial"))?;
    fs::create_dir_all(cache.join("archives/partial"))?;
    let sources = directory.join("sources.list");
    let line = format!("deb [signed-by={KEYRING}] {mirror} {RELEASE}-backports main\n");
    fs::write(&sources, line)?;
    let option = |name: &str, path: &Path| format!("{name}={}", path.display());
    let options = vec![
        option("Dir::Etc::SourceList", &sources),
        option("Dir::Etc::SourceParts", Path::new("/dev/null")),
        option("Dir::State::Lists", &lists),
        option("Dir::Cache", &cache),
    ];
    process::run(
        deb::apt_get(&options)
            .arg("update")
            .stdin(Stdio::null())
            .stdout(std::io::stderr()),
    )
    .context("Debian's backports cannot be read; is its archive reachable?")?;
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::codename;

    #[test]
    fn a_release_is_told_by_its_name() {
        let debian = "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nVERSION_CODENAME=bookworm\n";
        assert_eq!(codename(debian), Some("bookworm"));
        assert_eq!(codename("ID=arch\n"), None);
    }
}
