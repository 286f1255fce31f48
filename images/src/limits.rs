//! Limits on the resources of this machine that an image may use.

/// Limits for one image; each protects memory, disk or time from a hostile registry or image.
///
/// The defaults let through every image that is known to be in use, with room to spare.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of a manifest or index. Registries themselves accept at most 4 MiB.
    pub manifest_bytes: u64,
    /// Bytes of an image configuration.
    pub config_bytes: u64,
    /// Layers of an image.
    pub layers: usize,
    /// Bytes of one compressed layer.
    pub layer_bytes: u64,
    /// Bytes of all layers of an image together when decompressed.
    pub unpacked_bytes: u64,
    /// Files, directories and other entries in all layers of an image together.
    pub entries: u64,
    /// Bytes of a path inside the image (Linux's `PATH_MAX` is 4096).
    pub path_bytes: usize,
    /// Directories above an entry.
    pub path_depth: usize,
    /// Bytes of all extended attributes of one file.
    pub xattr_bytes: usize,
    /// Bytes of memory for names, link targets, attributes, manifests and configurations, in all
    /// layers together. Applies separately to reading an archive's index, to reading the manifests
    /// and configurations of its images, and to unpacking an image.
    pub metadata_bytes: u64,
    /// Whether images may contain device nodes.
    pub devices: bool,
    /// Number of nested indexes above the image's own manifest.
    pub index_depth: usize,
    /// Bytes of a disk image's file, as it is served and when decompressed.
    pub disk_file_bytes: u64,
    /// Bytes of a disk, as its guest sees it.
    pub disk_bytes: u64,
    /// Bytes of a disk that are not zeros.
    pub disk_data_bytes: u64,
    /// Bytes of a disk image's compressed clusters when decompressed, zeros among them, besides
    /// `disk_unpacked_ratio` for each byte of its file that was read: several clusters of a disk
    /// may have the same data, which takes time again for each.
    pub disk_unpacked_bytes: u64,
    /// See `disk_unpacked_bytes`. Deflate makes some thousand bytes of one at most, and zstd a few
    /// thousand of a cluster's zeros.
    pub disk_unpacked_ratio: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            manifest_bytes: 4 << 20,
            config_bytes: 8 << 20,
            layers: 512,
            layer_bytes: 64 << 30,
            unpacked_bytes: 128 << 30,
            entries: 4_000_000,
            path_bytes: 4095,
            path_depth: 1024,
            xattr_bytes: 64 << 10,
            metadata_bytes: 1 << 30,
            devices: true,
            index_depth: 4,
            disk_file_bytes: 256 << 30,
            disk_bytes: 2 << 40,
            disk_data_bytes: 256 << 30,
            disk_unpacked_bytes: 16 << 30,
            disk_unpacked_ratio: 4096,
        }
    }
}
