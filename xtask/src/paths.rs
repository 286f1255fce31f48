//! Where the workspace is and where results lie. All of them are below `target/`, so that
//! `cargo clean` removes every trace.

use std::path::{Path, PathBuf};

/// The workspace's root folder.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask/ lies in the workspace's root")
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
