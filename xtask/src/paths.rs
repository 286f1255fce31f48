//! Where the workspace is and where results lie. All of them are below `target/`, so that
//! `cargo clean` removes every trace.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The workspace's root directory, found when the program runs: a tree that was copied or moved
/// builds into itself, whichever tree this program was compiled in.
pub(crate) fn root() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        // Set by `cargo run`, to this package's directory.
        let by_cargo = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
        let start = by_cargo.or_else(|| std::env::current_dir().ok());
        start
            .as_deref()
            .and_then(workspace_above)
            .unwrap_or_else(|| PathBuf::from("."))
    })
}

/// The nearest directory from `start` upwards that holds `xtask/` and a lock file.
fn workspace_above(start: &Path) -> Option<PathBuf> {
    start
        .ancestors()
        .find(|dir| dir.join("xtask/Cargo.toml").is_file() && dir.join("Cargo.lock").is_file())
        .map(Path::to_owned)
}

/// `target/` of the workspace, whatever `CARGO_TARGET_DIR` says: results that are shared by
/// every build (kernel, test host) are made once.
pub(crate) fn target() -> PathBuf {
    root().join("target")
}

/// Where cargo puts what it builds.
pub(crate) fn cargo_target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) if !dir.is_empty() => std::path::absolute(&dir).unwrap_or_else(|_| dir.into()),
        _ => target(),
    }
}

/// `target/guest`: what guests boot from (`vmlinux`, `initramfs.cpio`).
pub(crate) fn guest() -> PathBuf {
    target().join("guest")
}

/// `target/host`: the emulated test host.
pub(crate) fn host() -> PathBuf {
    target().join("host")
}

/// A path as the user would type it: relative to the workspace when it lies in it.
pub(crate) fn display(path: &Path) -> String {
    path.strip_prefix(root())
        .unwrap_or(path)
        .display()
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_is_the_one_around_the_starting_directory() {
        let copy = std::env::temp_dir().join(format!("xtask-paths-{}", std::process::id()));
        std::fs::create_dir_all(copy.join("xtask/src")).unwrap();
        assert_eq!(workspace_above(&copy.join("xtask/src")), None);
        for file in ["xtask/Cargo.toml", "Cargo.lock"] {
            std::fs::write(copy.join(file), "").unwrap();
        }
        let found = workspace_above(&copy.join("xtask/src"));
        std::fs::remove_dir_all(&copy).unwrap();
        assert_eq!(found, Some(copy));
    }
}
