//! Shared code of the tests of the crate's public API.
#![allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    missing_docs,
    reason = "every test binary uses its part of it"
)]

pub mod disk;
pub mod faulty;
pub mod image;
pub mod registry;
pub mod tarball;

pub use faulty::{Body, Faulty, Reply};
pub use image::TestImage;
pub use registry::Registry;
pub use tarball::Tarball;

use podvisor_images::{Image, PullOptions, RegistryConfig, Store};
use std::path::PathBuf;
use std::time::Duration;

/// Options that use none of the user's settings, and do not wait long.
pub fn options() -> PullOptions {
    PullOptions::default().registries(registries())
}

pub fn registries() -> RegistryConfig {
    let mut registries = RegistryConfig::default();
    registries.docker_config = None;
    registries.podman_auth = Vec::new();
    registries.backoff = Duration::from_millis(1);
    registries
}

/// A store in a separate directory.
pub struct TestStore {
    pub dir: tempfile::TempDir,
    pub store: Store,
}

impl TestStore {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        Self { dir, store }
    }

    pub async fn pull(&self, name: &str) -> podvisor_images::Result<Image> {
        self.store.pull(name, &options()).await
    }

    /// All files except the database and locks, relative, sorted.
    pub fn files(&self) -> Vec<String> {
        let mut found = Vec::new();
        let mut directories = vec![PathBuf::from(self.dir.path())];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    directories.push(path);
                } else {
                    found.push(
                        path.strip_prefix(self.dir.path())
                            .unwrap()
                            .display()
                            .to_string(),
                    );
                }
            }
        }
        found.retain(|file| !matches!(file.as_str(), "store.redb" | "lock" | "gc.lock"));
        found.sort();
        found
    }
}

/// An error with all its causes, as a command line would print it.
pub fn explain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

/// Unpacks an image's file system with erofs-utils.
pub fn extract(image: &Image) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let out = std::process::Command::new("fsck.erofs")
        .arg(format!("--extract={}", dir.path().join("root").display()))
        .arg(image.rootfs())
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    dir
}
