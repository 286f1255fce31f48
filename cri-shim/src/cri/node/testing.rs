//! For tests: a node without a kernel for guests.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use rustix::mount::{UnmountFlags, unmount};
use tempfile::TempDir;

use super::Node;
use crate::cni::CniOptions;
use crate::cri::config::{GuestSettings, ServeConfig, Sizes, VmSettings};
use crate::cri::state_lock::SANDBOXES;
use crate::registries::{Registries, RegistryDirectory};
use crate::sandbox::JailMode;

/// A node; its directories are removed when this is dropped.
pub(in crate::cri) struct TestNode {
    node: Arc<Node>,
    dir: TempDir,
}

impl TestNode {
    pub(in crate::cri) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        Self::of(dir, &root)
    }

    /// A node with its database and the volumes of images in `root`.
    pub(in crate::cri) fn with_root(root: &Path) -> Self {
        Self::of(tempfile::tempdir().unwrap(), root)
    }

    fn of(dir: TempDir, root: &Path) -> Self {
        let state = dir.path().join("state");
        let cni = CniOptions {
            config_dir: dir.path().join("net.d"),
            plugin_dirs: Vec::new(),
            ..CniOptions::new(root, &state)
        };
        let registries = RegistryDirectory::new(dir.path().join("certs.d"), true);
        let config = ServeConfig {
            listen: dir.path().join("podvisor.sock"),
            node_api: dir.path().join("node.sock"),
            root: root.to_owned(),
            state,
            guest: GuestSettings {
                kernel: "/kernel-of-test".into(),
                sizes: Sizes::default(),
            },
            handlers: BTreeMap::new(),
            vm: VmSettings {
                kernel: "/loader-of-test".into(),
                initramfs: "/loader-of-test".into(),
                keeps_kernels: true,
                firmware: "/firmware-of-test".into(),
                guest_agent: "/agent-of-test".into(),
            },
            initramfs: "/initramfs-of-test".into(),
            cni,
            cdi_spec_dirs: Vec::new(),
            registries: Registries::of(registries).unwrap(),
            signature_policy: None,
            image_names: Default::default(),
            metrics: None,
            consoles: None,
            templates: None,
            jail: JailMode::Disabled,
            map_users: true,
            required_layers: Vec::new(),
            host_runtime: None,
        };
        Self {
            node: Arc::new(Node::open(config).unwrap()),
            dir,
        }
    }
}

impl Deref for TestNode {
    type Target = Arc<Node>;

    fn deref(&self) -> &Arc<Node> {
        &self.node
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        let sandboxes = self.dir.path().join("state").join(SANDBOXES);
        let _ = unmount(sandboxes, UnmountFlags::DETACH);
    }
}
