//! The demo's image: Debian's busybox in three layers, the last of which removes a file of the
//! second one (a whiteout), in the format of the OCI image specification.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::json;

use crate::process;

pub(super) const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG_TYPE: &str = "application/vnd.oci.image.config.v1+json";
const LAYER_TYPE: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// A file that a registry stores under its digest.
#[derive(Debug, Clone)]
pub(crate) struct Blob {
    pub(super) path: PathBuf,
    /// `sha256:` and the hexadecimal digest.
    pub(super) digest: String,
    /// In bytes.
    pub(super) size: u64,
}

impl Blob {
    fn of(path: PathBuf) -> Result<Self> {
        Ok(Self {
            digest: format!("sha256:{}", process::sha256(&path)?),
            size: fs::metadata(&path)?.len(),
            path,
        })
    }

    /// Returns the digest, shortened for people.
    pub(super) fn short(&self) -> &str {
        self.digest.get(..19).unwrap_or(&self.digest)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Layer {
    pub(super) blob: Blob,
    pub(super) what: &'static str,
    /// The digest of the tar file before compression.
    diff_id: String,
}

/// An image, ready to be pushed.
#[derive(Debug)]
pub(crate) struct Image {
    pub(super) config: Blob,
    pub(super) layers: Vec<Layer>,
    /// The manifest's bytes.
    pub(super) manifest: Vec<u8>,
}

/// Creates the image's blobs in `directory`; `greeting` is a file of its last layer.
pub(super) fn make(directory: &Path, greeting: &str) -> Result<Image> {
    fs::create_dir_all(directory)?;
    let layers = vec![
        layer(directory, "1", "busybox and its names", programs)?,
        layer(directory, "2", "users, and a file to take away", files)?,
        layer(
            directory,
            "3",
            "a whiteout of that file, and a greeting",
            |tree| changes(tree, greeting),
        )?,
    ];
    Image::write(
        directory,
        layers,
        json!({
            "Env": ["PATH=/bin:/sbin:/usr/bin:/usr/sbin"],
            "Cmd": ["sh"],
            "WorkingDir": "/",
        }),
    )
}

impl Image {
    /// Makes an image of layers, whose configuration and manifest are written to `directory`.
    pub(crate) fn write(
        directory: &Path,
        layers: Vec<Layer>,
        settings: serde_json::Value,
    ) -> Result<Self> {
        let diff_ids: Vec<&str> = layers.iter().map(|layer| layer.diff_id.as_str()).collect();
        let history: Vec<_> = layers
            .iter()
            .map(|layer| json!({ "created_by": layer.what }))
            .collect();
        let config = directory.join("config.json");
        let text = json!({
            "architecture": "amd64",
            "os": "linux",
            "config": settings,
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
            "history": history,
        });
        fs::write(&config, text.to_string())?;
        let config = Blob::of(config)?;
        let descriptor = |kind: &str, blob: &Blob| json!({ "mediaType": kind, "digest": blob.digest, "size": blob.size });
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": descriptor(CONFIG_TYPE, &config),
            "layers": layers.iter().map(|layer| descriptor(LAYER_TYPE, &layer.blob)).collect::<Vec<_>>(),
        });
        Ok(Self {
            config,
            layers,
            manifest: manifest.to_string().into_bytes(),
        })
    }
}

/// Packs the files that `fill` puts into a directory, owned by root and without times.
pub(crate) fn layer(
    directory: &Path,
    name: &str,
    what: &'static str,
    fill: impl FnOnce(&Path) -> Result<()>,
) -> Result<Layer> {
    let tree = directory.join(name);
    fs::create_dir(&tree)?;
    fill(&tree).with_context(|| format!("the layer of {what} cannot be made"))?;
    let tar = directory.join(format!("layer-{name}.tar"));
    process::run(
        process::tied("tar")
            .args(["--owner=0", "--group=0", "--numeric-owner", "--sort=name"])
            .args(["--mtime=@0", "-cf"])
            .arg(&tar)
            .arg("-C")
            .arg(&tree)
            .arg("."),
    )?;
    let diff_id = format!("sha256:{}", process::sha256(&tar)?);
    process::run(process::tied("gzip").arg("-nf").arg(&tar))?;
    fs::remove_dir_all(&tree)?;
    Ok(Layer {
        blob: Blob::of(directory.join(format!("layer-{name}.tar.gz")))?,
        what,
        diff_id,
    })
}

fn programs(tree: &Path) -> Result<()> {
    let bin = tree.join("bin");
    fs::create_dir(&bin)?;
    let busybox = bin.join("busybox");
    fs::copy("/bin/busybox", &busybox)
        .context("/bin/busybox cannot be copied; Debian's busybox-static brings it")?;
    fs::set_permissions(&busybox, fs::Permissions::from_mode(0o755))?;
    for name in process::output(Command::new(&busybox).arg("--list"))?.lines() {
        if name != "busybox" {
            symlink("busybox", bin.join(name))?;
        }
    }
    Ok(())
}

fn files(tree: &Path) -> Result<()> {
    fs::create_dir(tree.join("etc"))?;
    fs::write(
        tree.join("etc/passwd"),
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    )?;
    fs::write(tree.join("etc/group"), "root:x:0:\nnogroup:x:65534:\n")?;
    for (name, mode) in [("root", 0o700), ("tmp", 0o1777)] {
        fs::create_dir(tree.join(name))?;
        fs::set_permissions(tree.join(name), fs::Permissions::from_mode(mode))?;
    }
    fs::write(tree.join("taken-away-by-layer-3"), "nobody reads this\n")?;
    Ok(())
}

fn changes(tree: &Path, greeting: &str) -> Result<()> {
    fs::write(tree.join(".wh.taken-away-by-layer-3"), "")?;
    fs::write(tree.join("greeting"), format!("{greeting}\n"))?;
    Ok(())
}
