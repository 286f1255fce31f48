//! An image created from this machine's busybox.

use std::fs;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

/// Bytes as served by a registry.
#[derive(Clone, Default)]
pub(crate) struct Blob {
    pub(crate) media_type: &'static str,
    pub(crate) digest: String,
    pub(crate) bytes: Arc<[u8]>,
}

impl Blob {
    fn new(media_type: &'static str, bytes: Vec<u8>) -> Self {
        let digest: [u8; 32] = Sha256::digest(&bytes).into();
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        Self {
            media_type,
            digest: format!("sha256:{hex}"),
            bytes: bytes.into(),
        }
    }

    fn descriptor(&self) -> serde_json::Value {
        serde_json::json!({
            "mediaType": self.media_type,
            "digest": self.digest,
            "size": self.bytes.len(),
        })
    }
}

/// An image of one layer.
#[derive(Clone)]
pub(crate) struct Image {
    pub(crate) manifest: Blob,
    pub(crate) config: Blob,
    pub(crate) layer: Blob,
}

const APPLETS: &[&str] = &[
    "cat", "chmod", "dd", "df", "echo", "env", "free", "grep", "head", "hostname", "id", "kill",
    "ls", "mount", "mkdir", "nproc", "ps", "pwd", "sh", "sleep", "stat", "stty", "tail", "test",
    "touch", "tr", "true", "tty", "uname", "yes",
];

const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n";
const GROUP: &str = "root:x:0:\napp:x:1000:\nstaff:x:50:app\n";

impl Image {
    /// Creates an image of busybox with its applets, the users root and app, a file that cannot be
    /// executed, and `settings` as its configuration.
    pub(crate) fn busybox(settings: serde_json::Value) -> Self {
        Self::of_layer(busybox_layer().into_inner().unwrap(), settings)
    }

    /// Like [`Self::busybox`], with something at `/data`, of user 1000 and group 1000 with mode
    /// 2750: a file, a directory with a hard link to it, and a symbolic link.
    pub(crate) fn with_data(settings: serde_json::Value) -> Self {
        let mut tar = busybox_layer();
        for (directory, mode) in [("data/", 0o2750), ("data/sub/", 0o700)] {
            let mut header = header(tar::EntryType::Directory, mode, 1000);
            tar.append_data(&mut header, directory, [].as_slice())
                .unwrap();
        }
        let text = b"from the image\n";
        let mut file = header(tar::EntryType::Regular, 0o640, 1000);
        file.set_size(text.len() as u64);
        tar.append_data(&mut file, "data/file", text.as_slice())
            .unwrap();
        for (kind, path, to) in [
            (tar::EntryType::Link, "data/sub/same", "data/file"),
            (tar::EntryType::Symlink, "data/link", "/etc/passwd"),
        ] {
            let mut header = header(kind, 0o640, 1000);
            tar.append_link(&mut header, path, to).unwrap();
        }
        Self::of_layer(tar.into_inner().unwrap(), settings)
    }

    /// Like [`Self::busybox`], with links to nothing at `/etc/resolv.conf`, `/etc/localtime` and
    /// `/var/run`.
    pub(crate) fn with_links_to_nothing(settings: serde_json::Value) -> Self {
        let mut tar = busybox_layer();
        for (path, to) in [
            ("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf"),
            ("etc/localtime", "/usr/share/zoneinfo/UTC"),
            ("var/run", "/run"),
        ] {
            let mut header = header(tar::EntryType::Symlink, 0o777, 0);
            tar.append_link(&mut header, path, to).unwrap();
        }
        Self::of_layer(tar.into_inner().unwrap(), settings)
    }

    fn of_layer(tar: Vec<u8>, settings: serde_json::Value) -> Self {
        let layer = Blob::new("application/vnd.oci.image.layer.v1.tar", tar);
        let config = serde_json::json!({
            "architecture": "amd64",
            "os": "linux",
            "created": "2026-01-02T03:04:05Z",
            "config": settings,
            "rootfs": { "type": "layers", "diff_ids": [layer.digest] },
        });
        let config = Blob::new(
            "application/vnd.oci.image.config.v1+json",
            serde_json::to_vec(&config).unwrap(),
        );
        let manifest_type = "application/vnd.oci.image.manifest.v1+json";
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "mediaType": manifest_type,
            "config": config.descriptor(),
            "layers": [layer.descriptor()],
        });
        let manifest = Blob::new(manifest_type, serde_json::to_vec(&manifest).unwrap());
        Self {
            manifest,
            config,
            layer,
        }
    }

    /// Returns the same image from a registry that serves a different byte in its layer.
    pub(crate) fn with_a_lie(mut self) -> Self {
        let mut bytes = self.layer.bytes.to_vec();
        bytes[1000] ^= 1;
        self.layer.bytes = bytes.into();
        self
    }
}

fn busybox_layer() -> tar::Builder<Vec<u8>> {
    let busybox = fs::read("/bin/busybox").expect("this test needs Debian's busybox-static");
    let mut tar = tar::Builder::new(Vec::new());
    for (directory, mode) in [
        ("bin/", 0o755),
        ("etc/", 0o755),
        ("home/", 0o755),
        ("home/app/", 0o700),
        ("proc/", 0o755),
        ("root/", 0o700),
        ("srv/", 0o755),
        ("sys/", 0o755),
        ("dev/", 0o755),
        ("tmp/", 0o1777),
    ] {
        let owner = if directory == "home/app/" { 1000 } else { 0 };
        let mut header = header(tar::EntryType::Directory, mode, owner);
        tar.append_data(&mut header, directory, [].as_slice())
            .unwrap();
    }
    for (path, mode, bytes) in [
        ("bin/busybox", 0o755, busybox.as_slice()),
        ("etc/passwd", 0o644, PASSWD.as_bytes()),
        ("etc/group", 0o644, GROUP.as_bytes()),
        ("etc/plain", 0o644, b"no program\n"),
        ("etc/broken", 0o755, b"\x7fELF but no more"),
    ] {
        let mut header = header(tar::EntryType::Regular, mode, 0);
        header.set_size(bytes.len() as u64);
        tar.append_data(&mut header, path, bytes).unwrap();
    }
    for applet in APPLETS {
        let mut header = header(tar::EntryType::Symlink, 0o777, 0);
        let path = format!("bin/{applet}");
        tar.append_link(&mut header, path, "busybox").unwrap();
    }
    tar
}

fn header(kind: tar::EntryType, mode: u32, owner: u64) -> tar::Header {
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(owner);
    header.set_gid(owner);
    header.set_mtime(1_700_000_000);
    header.set_size(0);
    header
}
