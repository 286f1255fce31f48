//! OCI images as one EROFS file each, and disk images as sparse raw files.
//!
//! Input: references (`busybox`, `registry.example/app@sha256:…`), manifests, configs and layer
//! tars; all of it is untrusted until verified. Output: an [`Image`]: its ids and names, its OCI
//! configuration, and the path of a file that a guest mounts as its root, reproducible to the byte.
//! URLs of disk images ([`Store::pull_disk`]) give a [`Disk`]: a raw file, whatever format it was
//! served in.
//!
//! ```no_run
//! # async fn pull() -> Result<(), podvisor_images::Error> {
//! use podvisor_images::{PullOptions, Store};
//!
//! let store = Store::open("/var/lib/podvisor/images")?;
//! let image = store.pull("busybox", &PullOptions::default()).await?;
//! let disk = image.open_rootfs()?; // keeps the image from removal while open
//! println!("{} at {}", image.id(), image.rootfs().display());
//! # drop(disk);
//! # Ok(())
//! # }
//! ```
//!
//! The modules: `http` is the HTTP client and its settings, `registry` uses it to fetch and verify
//! an image's bytes, `signature` decides which signatures an image needs, `layer` turns a verified
//! layer into entries of a tree, `erofs` writes that tree, `store` keeps the results. `archive`
//! loads images from files and saves them, `import` creates an image from a directory or a tar, and
//! `disk` fetches and converts disk images. Nothing here knows about virtual machines, and no name
//! in a layer is ever used as a path on the host.

mod archive;
mod cancel;
mod decompress;
mod digest;
mod disk;
mod erofs;
mod error;
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing;
mod http;
mod image;
mod import;
mod layer;
mod limits;
mod pin;
mod program;
mod progress;
mod reference;
mod registry;
mod rfc3339;
mod signature;
mod store;
mod tree;

pub use archive::{ArchiveError, ArchiveFormat};
pub use cancel::Cancel;
pub use digest::{Digest, DigestError};
pub use disk::{
    Checksum, ChecksumError, ConvertError, Disk, DiskError, DiskFormat, Qcow2Error, convert_disk,
    copy_disk, disk_len, visit_data, zero_disk,
};
pub use erofs::WriteError;
pub use error::{Error, Result, parse_reference};
pub use http::{
    ClientCertificate, HostsError, Mirror, RegistryConfig, RegistryHost, RegistryProtocol,
};
pub use image::Image;
pub use import::{ImportError, ImportSource};
pub use layer::{LayerError, PathFault, TarError};
pub use limits::Limits;
pub use oci_spec::distribution::Reference;
pub use oci_spec::image::ImageConfiguration;
pub use program::write_program_rootfs;
pub use progress::{PullEvent, PullEvents};
pub use registry::{Credentials, ManifestError, RegistryError};
pub use signature::{PolicyError, SignatureError, SignaturePolicy};
pub use store::{
    HistoryEntry, ImageDetails, Layer, LoadedImage, Prune, PullOptions, PullPolicy, Pulling,
    RemovedImages, Store, StoreOptions, StoreUsage, create_database,
};
pub use tree::TreeError;

#[cfg(test)]
#[path = "../tests/support/tarball.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "shared with the tests of the public face"
)]
mod tarball;
