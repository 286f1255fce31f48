//! Creates images: layers, a configuration and a manifest.

use std::io::Write;

use podvisor_images::Digest;
use serde_json::{Value, json};

/// How a layer is compressed.
#[derive(Clone, Copy, Debug)]
pub enum Packing {
    Plain,
    Gzip,
    Zstd,
}

#[derive(Clone, Debug)]
pub struct Layer {
    pub media_type: String,
    pub blob: Vec<u8>,
    pub diff_id: Digest,
}

impl Layer {
    pub fn new(tar: &[u8], packing: Packing) -> Self {
        let (suffix, blob) = match packing {
            Packing::Plain => ("", tar.to_vec()),
            Packing::Gzip => {
                let mut encoder =
                    flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(tar).unwrap();
                ("+gzip", encoder.finish().unwrap())
            }
            Packing::Zstd => {
                let level = ruzstd::encoding::CompressionLevel::Fastest;
                ("+zstd", ruzstd::encoding::compress_to_vec(tar, level))
            }
        };
        let media_type = format!("application/vnd.oci.image.layer.v1.tar{suffix}");
        Self {
            media_type,
            blob,
            diff_id: Digest::of(tar),
        }
    }
}

/// An image in the form in which a registry gets it.
#[derive(Clone, Debug)]
pub struct TestImage {
    pub layers: Vec<Layer>,
    pub config: Vec<u8>,
    pub manifest: Vec<u8>,
}

impl TestImage {
    pub fn new(layers: Vec<Layer>) -> Self {
        let diff_ids: Vec<_> = layers.iter().map(|layer| layer.diff_id).collect();
        let config = json!({
            "created": "2024-02-29T12:34:56Z",
            "os": "linux",
            "architecture": "amd64",
            "config": { "Cmd": ["/bin/sh"], "Env": ["A=b"], "User": "1000" },
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
        });
        Self::with_config(layers, config)
    }

    pub fn with_config(layers: Vec<Layer>, config: Value) -> Self {
        let config = serde_json::to_vec(&config).unwrap();
        let entries: Vec<_> = layers
            .iter()
            .map(|layer| {
                json!({
                    "mediaType": layer.media_type,
                    "digest": Digest::of(&layer.blob),
                    "size": layer.blob.len(),
                })
            })
            .collect();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": Digest::of(&config),
                "size": config.len(),
            },
            "layers": entries,
        });
        Self {
            layers,
            config,
            manifest: serde_json::to_vec(&manifest).unwrap(),
        }
    }

    /// A few files in two layers, of which the upper hides one.
    pub fn small() -> Self {
        Self::packed([Packing::Gzip, Packing::Zstd])
    }

    /// As `small`, with layers compressed as given.
    pub fn packed(packings: [Packing; 2]) -> Self {
        let base = super::Tarball::new()
            .dir("etc", 0o755)
            .file("etc/hello", 0o644, b"hello\n")
            .file("etc/gone", 0o644, b"hidden\n")
            .finish();
        let upper = super::Tarball::new().file("etc/.wh.gone", 0, b"").finish();
        Self::new(vec![
            Layer::new(&base, packings[0]),
            Layer::new(&upper, packings[1]),
        ])
    }

    /// A layer of some megabytes that do not compress.
    pub fn large() -> Self {
        let noise: Vec<u8> = (0..1_000_000u32)
            .flat_map(|i| {
                i.wrapping_mul(2_654_435_761)
                    .rotate_left(i % 31)
                    .to_be_bytes()
            })
            .collect();
        Self::new(vec![Layer::new(
            &super::Tarball::new().file("noise", 0o644, &noise).finish(),
            Packing::Plain,
        )])
    }

    pub fn id(&self) -> Digest {
        Digest::of(&self.config)
    }

    pub fn digest(&self) -> Digest {
        Digest::of(&self.manifest)
    }

    pub fn blobs(&self) -> impl Iterator<Item = &[u8]> {
        self.layers
            .iter()
            .map(|layer| layer.blob.as_slice())
            .chain([self.config.as_slice()])
    }

    /// Writes an OCI layout directory with only this image.
    pub fn write_layout(&self, dir: &std::path::Path, name: &str) {
        let blobs = dir.join("blobs/sha256");
        std::fs::create_dir_all(&blobs).unwrap();
        for blob in self.blobs().chain([self.manifest.as_slice()]) {
            std::fs::write(blobs.join(Digest::of(blob).hex()), blob).unwrap();
        }
        let index = json!({"schemaVersion": 2, "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": self.digest(), "size": self.manifest.len(),
            "annotations": {"org.opencontainers.image.ref.name": name},
        }]});
        std::fs::write(dir.join("index.json"), index.to_string()).unwrap();
        std::fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    }
}
