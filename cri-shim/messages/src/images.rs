//! Images, their registries and file systems.

use std::collections::HashMap;
use std::fmt;

use prost::Message;
use serde::Serialize;

use crate::{Int64Value, PodSandboxConfig, UInt64Value};

/// An image, by a name or an id.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct ImageSpec {
    /// Its name or id.
    #[prost(string, tag = "1")]
    pub image: String,
    /// Values that runtimes hand on and some read.
    #[prost(map = "string, string", tag = "2")]
    pub annotations: HashMap<String, String>,
    /// The image as the pod's author named it.
    #[prost(string, tag = "18")]
    pub user_specified_image: String,
    /// The runtime handler; empty for the default.
    #[prost(string, tag = "19")]
    pub runtime_handler: String,
    /// The image as a runtime resolved it (Kubernetes 1.35).
    #[prost(string, tag = "20")]
    pub image_ref: String,
}

/// Which images are listed.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ImageFilter {
    /// The image.
    #[prost(message, optional, tag = "1")]
    pub image: Option<ImageSpec>,
}

/// Request of [`ImageService::list_images`](crate::ImageService::list_images).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ListImagesRequest {
    /// What to list; everything without it.
    #[prost(message, optional, tag = "1")]
    pub filter: Option<ImageFilter>,
}

/// An image of the node.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Image {
    /// Its id.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Its names with a tag.
    #[prost(string, repeated, tag = "2")]
    pub repo_tags: Vec<String>,
    /// Its names with a digest.
    #[prost(string, repeated, tag = "3")]
    pub repo_digests: Vec<String>,
    /// Its size on the disk, in bytes.
    #[prost(uint64, tag = "4")]
    pub size: u64,
    /// The user that it names by number.
    #[prost(message, optional, tag = "5")]
    pub uid: Option<Int64Value>,
    /// The user's name.
    #[prost(string, tag = "6")]
    pub username: String,
    /// As the runtime names it.
    #[prost(message, optional, tag = "7")]
    pub spec: Option<ImageSpec>,
    /// Whether it is never removed for want of space.
    #[prost(bool, tag = "8")]
    pub pinned: bool,
}

/// Answer of [`ImageService::list_images`](crate::ImageService::list_images).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ListImagesResponse {
    /// Some or all of the images.
    #[prost(message, repeated, tag = "1")]
    pub images: Vec<Image>,
}

/// Request of [`ImageService::stream_images`](crate::ImageService::stream_images).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StreamImagesRequest {
    /// What to list; everything without it.
    #[prost(message, optional, tag = "1")]
    pub filter: Option<ImageFilter>,
}

/// One of the answers of [`ImageService::stream_images`](crate::ImageService::stream_images).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StreamImagesResponse {
    /// Some or all of the images.
    #[prost(message, repeated, tag = "1")]
    pub images: Vec<Image>,
}

/// Request of [`ImageService::image_status`](crate::ImageService::image_status).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ImageStatusRequest {
    /// The image.
    #[prost(message, optional, tag = "1")]
    pub image: Option<ImageSpec>,
    /// Whether the answer shall tell more in `info`.
    #[prost(bool, tag = "2")]
    pub verbose: bool,
}

/// Answer of [`ImageService::image_status`](crate::ImageService::image_status).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ImageStatusResponse {
    /// The image; absent if the node does not have it.
    #[prost(message, optional, tag = "1")]
    pub image: Option<Image>,
    /// What a runtime tells besides, if it was asked to be verbose.
    #[prost(map = "string, string", tag = "2")]
    pub info: HashMap<String, String>,
}

/// With what a registry is logged in to. It is never shown by `Debug`.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
#[prost(skip_debug)]
pub struct AuthConfig {
    /// The user's name.
    #[prost(string, tag = "1")]
    pub username: String,
    /// The password.
    #[prost(string, tag = "2")]
    pub password: String,
    /// Name and password in base64, joined by a colon.
    #[prost(string, tag = "3")]
    pub auth: String,
    /// The registry.
    #[prost(string, tag = "4")]
    pub server_address: String,
    /// A token to ask for others with.
    #[prost(string, tag = "5")]
    pub identity_token: String,
    /// A token for the registry.
    #[prost(string, tag = "6")]
    pub registry_token: String,
}

/// Request of [`ImageService::pull_image`](crate::ImageService::pull_image).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PullImageRequest {
    /// The image.
    #[prost(message, optional, tag = "1")]
    pub image: Option<ImageSpec>,
    /// Credentials for the registry.
    #[prost(message, optional, tag = "2")]
    pub auth: Option<AuthConfig>,
    /// The pod, as it was made.
    #[prost(message, optional, tag = "3")]
    pub sandbox_config: Option<PodSandboxConfig>,
}

/// Answer of [`ImageService::pull_image`](crate::ImageService::pull_image).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct PullImageResponse {
    /// The image, by digest or id.
    #[prost(string, tag = "1")]
    pub image_ref: String,
}

/// Request of [`ImageService::remove_image`](crate::ImageService::remove_image).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RemoveImageRequest {
    /// The image.
    #[prost(message, optional, tag = "1")]
    pub image: Option<ImageSpec>,
}

/// Answer of [`ImageService::remove_image`](crate::ImageService::remove_image).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct RemoveImageResponse {}

/// Request of [`ImageService::image_fs_info`](crate::ImageService::image_fs_info).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct ImageFsInfoRequest {}

/// A file system of the node.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct FilesystemIdentifier {
    /// A directory in it.
    #[prost(string, tag = "1")]
    pub mountpoint: String,
}

/// How much of a file system is in use for something.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct FilesystemUsage {
    /// When it was measured, in nanoseconds since 1970.
    #[prost(int64, tag = "1")]
    pub timestamp: i64,
    /// The file system.
    #[prost(message, optional, tag = "2")]
    pub fs_id: Option<FilesystemIdentifier>,
    /// Bytes in use.
    #[prost(message, optional, tag = "3")]
    pub used_bytes: Option<UInt64Value>,
    /// Inodes in use.
    #[prost(message, optional, tag = "4")]
    pub inodes_used: Option<UInt64Value>,
}

/// Answer of [`ImageService::image_fs_info`](crate::ImageService::image_fs_info).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct ImageFsInfoResponse {
    /// The file systems of images.
    #[prost(message, repeated, tag = "1")]
    pub image_filesystems: Vec<FilesystemUsage>,
    /// The file systems of writable layers.
    #[prost(message, repeated, tag = "2")]
    pub container_filesystems: Vec<FilesystemUsage>,
}

impl fmt::Debug for AuthConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuthConfig")
            .field("username", &self.username)
            .field("server_address", &self.server_address)
            .finish_non_exhaustive()
    }
}
