//! The workspace's root, and the directories of results. They are all below `target/`, so that
//! `cargo clean` removes everything.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Returns the workspace's root directory, determined at run time: a tree that was copied or moved
/// builds into itself, wherever this program was compiled.
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

/// Returns the nearest directory from `start` upwards that contains `xtask/` and a lock file.
fn workspace_above(start: &Path) -> Option<PathBuf> {
    start
        .ancestors()
        .find(|dir| dir.join("xtask/Cargo.toml").is_file() && dir.join("Cargo.lock").is_file())
        .map(Path::to_owned)
}

/// Returns `target/` of the workspace, regardless of `CARGO_TARGET_DIR`: results that are shared by
/// all builds (kernel, test host) are built once.
pub(crate) fn target() -> PathBuf {
    root().join("target")
}

/// Returns cargo's target directory.
pub(crate) fn cargo_target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) if !dir.is_empty() => std::path::absolute(&dir).unwrap_or_else(|_| dir.into()),
        _ => target(),
    }
}

/// Returns `target/guest`: the files from which guests boot (`vmlinux`, `initramfs.cpio`).
pub(crate) fn guest() -> PathBuf {
    target().join("guest")
}

/// Returns `target/host`: the emulated test host.
pub(crate) fn host() -> PathBuf {
    target().join("host")
}

/// Returns a path as the user would type it: relative to the workspace if it is below it.
pub(crate) fn display(path: &Path) -> String {
    path.strip_prefix(root())
        .unwrap_or(path)
        .display()
        .to_string()
}

/// Returns a path as a program's argument.
pub(crate) fn text(path: &Path) -> String {
    path.display().to_string()
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
