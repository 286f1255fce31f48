//! ImageService: the Container Runtime Interface to the node's image store.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use podvisor_cri_messages::{
    AuthConfig, FilesystemIdentifier, FilesystemUsage, Image as Shown, ImageFsInfoRequest,
    ImageFsInfoResponse, ImageService, ImageSpec, ImageStatusRequest, ImageStatusResponse,
    Int64Value, ListImagesRequest, ListImagesResponse, PullImageRequest, PullImageResponse,
    RemoveImageRequest, RemoveImageResponse, UInt64Value,
};
use podvisor_images::{
    Credentials, Error as ImageError, Image, PolicyError, PullOptions, SignaturePolicy,
};
use tokio::task::spawn_blocking;
use tonic::{Code, Request, Response, Status};
use tracing::info;

use super::error::{CriError, Result};
use super::node::{Node, now};
use super::vm::images as vm_images;

/// The service.
#[derive(Debug, Clone)]
pub(super) struct Images {
    node: Arc<Node>,
}

impl Images {
    pub(super) fn new(node: Arc<Node>) -> Self {
        Self { node }
    }

    /// Runs blocking work on the store.
    async fn with_store<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Node) -> Result<T> + Send + 'static,
    ) -> Result<T, Status> {
        let node = Arc::clone(&self.node);
        match spawn_blocking(move || work(&node)).await {
            Ok(done) => Ok(done?),
            Err(_) => Err(Status::internal("the call's task failed")),
        }
    }

    /// Returns the image that a request names; its runtime handler must be known.
    fn name(&self, image: Option<ImageSpec>) -> Result<String> {
        let image = image.unwrap_or_default();
        self.node.guest(&image.runtime_handler)?;
        match image.image.is_empty() {
            false => Ok(image.image),
            true => Err(CriError::invalid("image", "it names no image")),
        }
    }
}

impl ImageService for Images {
    async fn list_images(
        &self,
        request: Request<ListImagesRequest>,
    ) -> Result<Response<ListImagesResponse>, Status> {
        let filter = request.into_inner().filter.and_then(|filter| filter.image);
        let wanted = filter
            .map(|image| image.image)
            .filter(|name| !name.is_empty());
        let images = self.with_store(move |node| {
            let Some(name) = wanted else {
                let images = node.store.list()?;
                let mut disks = node.store.disks()?;
                // Others belong to an image, which is listed.
                disks.retain(|disk| !disk.urls().is_empty());
                let disks = disks.iter().map(vm_images::shown);
                return Ok(images.iter().map(shown).chain(disks).collect());
            };
            Ok(found(node, &name)?.into_iter().collect())
        });
        Ok(Response::new(ListImagesResponse {
            images: images.await?,
        }))
    }

    async fn image_status(
        &self,
        request: Request<ImageStatusRequest>,
    ) -> Result<Response<ImageStatusResponse>, Status> {
        let request = request.into_inner();
        let name = self.name(request.image)?;
        let is_verbose = request.verbose;
        if vm_images::is_none(&name) {
            return Ok(Response::new(ImageStatusResponse {
                image: Some(vm_images::none()),
                info: HashMap::new(),
            }));
        }
        let found = self.with_store(move |node| {
            let mut info = HashMap::new();
            if let Some(image) = found_image(node, &name)? {
                if is_verbose {
                    let details = serde_json::json!({
                        "imageSpec": image.config(),
                        "rootfs": image.rootfs(),
                        "manifest": image.manifest_digest().to_string(),
                    });
                    info.insert("info".to_owned(), details.to_string());
                }
                return Ok((Some(shown(&image)), info));
            }
            let disk = vm_images::find_disk(&node.store, &node.config.image_names, &name)?;
            Ok((disk.as_ref().map(vm_images::shown), info))
        });
        let (image, info) = found.await?;
        Ok(Response::new(ImageStatusResponse { image, info }))
    }

    async fn pull_image(
        &self,
        request: Request<PullImageRequest>,
    ) -> Result<Response<PullImageResponse>, Status> {
        let request = request.into_inner();
        let name = self.name(request.image)?;
        if vm_images::is_none(&name) {
            return Ok(Response::new(PullImageResponse {
                image_ref: vm_images::none().id,
            }));
        }
        let credentials = credentials(request.auth, &name)?;
        let registries = self.with_store(|node| Ok(node.config.registries.current()));
        let registries = registries.await?;
        let mut options = PullOptions::default()
            .registries(registries)
            .credentials(credentials);
        let named = name.clone();
        let url =
            self.with_store(move |node| vm_images::disk_url(&node.config.image_names, &named));
        if let Some(url) = url.await? {
            let checksum = vm_images::checksum(&name)?;
            let pulled = self.node.store.pull_disk(&url, checksum.as_ref(), &options);
            let disk = pulled.await.map_err(pull_failed)?;
            info!(image = name, id = %disk.id(), "pulled the disk image");
            return Ok(Response::new(PullImageResponse {
                image_ref: disk.id().to_string(),
            }));
        }
        if let Some(file) = self.node.config.signature_policy.clone() {
            let policy = self.with_store(move |_| Ok((SignaturePolicy::read(&file), file)));
            let (policy, file) = policy.await?;
            let policy = policy.map_err(|error| unusable_policy(&file, &error))?;
            options = options.signatures(Arc::new(policy));
        }
        // If the caller goes away, the pull ends; completed parts are kept for the next one.
        let image = self
            .node
            .store
            .pull(&name, &options)
            .await
            .map_err(pull_failed)?;
        info!(image = name, id = %image.id(), "pulled");
        Ok(Response::new(PullImageResponse {
            image_ref: image.id().to_string(),
        }))
    }

    async fn remove_image(
        &self,
        request: Request<RemoveImageRequest>,
    ) -> Result<Response<RemoveImageResponse>, Status> {
        let name = self.name(request.into_inner().image)?;
        if vm_images::is_none(&name) {
            return Ok(Response::new(RemoveImageResponse {}));
        }
        self.with_store(move |node| {
            // By id, so that all its names are removed, as the kubelet expects.
            let id = match node.store.resolve(&name) {
                Ok(image) => image.id(),
                Err(ImageError::Damaged { id }) => id,
                Err(ImageError::NotFound { .. } | ImageError::Reference { .. }) => {
                    match vm_images::find_disk(&node.store, &node.config.image_names, &name)? {
                        Some(disk) => disk.id(),
                        None => return Ok(()),
                    }
                }
                Err(error) => return Err(error.into()),
            };
            match node.store.remove(&id.to_string()) {
                Ok(_) | Err(ImageError::NotFound { .. }) => Ok(()),
                Err(error) => Err(error.into()),
            }
        })
        .await?;
        Ok(Response::new(RemoveImageResponse {}))
    }

    async fn image_fs_info(
        &self,
        _request: Request<ImageFsInfoRequest>,
    ) -> Result<Response<ImageFsInfoResponse>, Status> {
        let usage = self.with_store(|node| Ok(node.store.usage()?)).await?;
        let root = self.node.store.root().to_string_lossy().into_owned();
        let usage = FilesystemUsage {
            timestamp: now(),
            fs_id: Some(FilesystemIdentifier { mountpoint: root }),
            used_bytes: Some(UInt64Value { value: usage.bytes }),
            inodes_used: Some(UInt64Value {
                value: usage.inodes,
            }),
        };
        Ok(Response::new(ImageFsInfoResponse {
            image_filesystems: vec![usage.clone()],
            // Containers' writable layers are in the memory of their guests.
            container_filesystems: vec![usage],
        }))
    }
}

/// Returns the image or disk image of a name, as it is listed.
fn found(node: &Node, name: &str) -> Result<Option<Shown>> {
    if vm_images::is_none(name) {
        return Ok(Some(vm_images::none()));
    }
    match found_image(node, name)? {
        Some(image) => Ok(Some(shown(&image))),
        None => Ok(
            vm_images::find_disk(&node.store, &node.config.image_names, name)?
                .as_ref()
                .map(vm_images::shown),
        ),
    }
}

/// Returns the image; `None` also for a damaged one, so that the kubelet pulls it again, which
/// repairs it, and for the name of a disk image.
fn found_image(node: &Node, name: &str) -> Result<Option<Image>> {
    if vm_images::disk_url(&node.config.image_names, name)?.is_some() {
        return Ok(None);
    }
    match node.store.resolve(name) {
        Ok(image) => Ok(Some(image)),
        Err(ImageError::NotFound { .. } | ImageError::Damaged { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn shown(image: &Image) -> Shown {
    let user = image
        .config()
        .config()
        .as_ref()
        .and_then(|config| config.user().clone());
    let user = user.unwrap_or_default();
    let user = user.split(':').next().unwrap_or_default();
    let uid = match user {
        // No user means root.
        "" => Some(0),
        user => user.parse().ok(),
    };
    Shown {
        id: image.id().to_string(),
        repo_tags: image.tags().to_vec(),
        repo_digests: image.digests().to_vec(),
        size: image.size().max(1),
        username: if uid.is_some() {
            String::new()
        } else {
            user.to_owned()
        },
        uid: uid.map(|value| Int64Value { value }),
        spec: None,
        pinned: image.pinned(),
    }
}

/// The reason of a pull that the signature policy refuses.
const UNSIGNED: &str = "SignatureValidationFailed";

/// A kubelet recognizes these reasons by the prefix of a message with code UNKNOWN.
fn pull_failed(error: ImageError) -> Status {
    let status = Status::from(CriError::from(error));
    let reason = match status.code() {
        Code::Unavailable => "RegistryUnavailable",
        Code::PermissionDenied => UNSIGNED,
        _ => return status,
    };
    Status::unknown(format!("{reason}: {}", status.message()))
}

/// No image is pulled until the policy can be read again.
fn unusable_policy(file: &Path, error: &PolicyError) -> Status {
    let causes = crate::machine::causes(error);
    let file = file.display();
    Status::unknown(format!(
        "{UNSIGNED}: cannot use the policy {file}: {causes}; repair the file"
    ))
}

/// Returns the request's credentials; those of another registry are ignored.
fn credentials(auth: Option<AuthConfig>, image: &str) -> Result<Credentials> {
    let Some(auth) = auth else {
        return Ok(Credentials::Auto);
    };
    if !auth.server_address.is_empty() && !is_of(&auth.server_address, image) {
        return Ok(Credentials::Auto);
    }
    if !auth.registry_token.is_empty() {
        return Ok(Credentials::RegistryToken(auth.registry_token));
    }
    if !auth.identity_token.is_empty() {
        return Ok(Credentials::IdentityToken(auth.identity_token));
    }
    if !auth.username.is_empty() {
        return Ok(Credentials::Basic {
            user: auth.username,
            password: auth.password,
        });
    }
    if auth.auth.is_empty() {
        return Ok(Credentials::Auto);
    }
    let bytes = STANDARD.decode(auth.auth.trim()).ok();
    let text = bytes.and_then(|bytes| String::from_utf8(bytes).ok());
    let parts = text.as_deref().and_then(|text| text.split_once(':'));
    match parts {
        Some((user, password)) => Ok(Credentials::Basic {
            user: user.to_owned(),
            password: password.trim_end_matches('\0').to_owned(),
        }),
        None => Err(CriError::invalid(
            "auth.auth",
            "it is not base64 of USER:PASSWORD",
        )),
    }
}

/// Returns whether credentials for `server` are meant for the registry of `image`.
fn is_of(server: &str, image: &str) -> bool {
    let host = server.split_once("://").map_or(server, |(_, rest)| rest);
    let host = host.split('/').next().unwrap_or_default();
    let Ok(reference) = podvisor_images::parse_reference(image) else {
        // The pull reports the invalid name.
        return true;
    };
    let is_hub = |host: &str| {
        matches!(
            host,
            "docker.io" | "index.docker.io" | "registry-1.docker.io"
        )
    };
    let registry = reference.registry();
    host == registry || (is_hub(host) && is_hub(registry))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pull_that_fails_on_this_node_is_no_fault_of_a_registry() {
        let io = |kind: std::io::ErrorKind| ImageError::Io {
            action: "write",
            path: "/store/layer".into(),
            source: kind.into(),
        };
        let status = pull_failed(io(std::io::ErrorKind::ReadOnlyFilesystem));
        assert_eq!(status.code(), Code::Internal, "{status}");
        assert!(!status.message().contains("Registry"), "{status}");
    }

    #[test]
    fn credentials_go_to_their_own_registry_only() {
        let auth = |server: &str| AuthConfig {
            username: "u".to_owned(),
            password: "p".to_owned(),
            server_address: server.to_owned(),
            ..AuthConfig::default()
        };
        let basic = Credentials::Basic {
            user: "u".to_owned(),
            password: "p".to_owned(),
        };
        for (server, image, is_used) in [
            ("", "r.example/a", true),
            ("r.example", "r.example/a:1", true),
            ("https://r.example/v1/", "r.example/a:1", true),
            ("https://index.docker.io/v1/", "busybox", true),
            ("https://index.docker.io/v1/", "r.example/a", false),
            ("r.example", "other.example/a", false),
            ("https://[fd00::1]:5000", "[fd00::1]:5000/a:1", true),
            ("r.example", "[fd00::1]:5000/a:1", false),
        ] {
            let found = credentials(Some(auth(server)), image).unwrap();
            assert_eq!(found == basic, is_used, "{server} {image}");
        }
    }

    #[test]
    fn credentials_come_in_each_form_of_the_api() {
        let auth = AuthConfig {
            auth: STANDARD.encode("u:p:q"),
            ..AuthConfig::default()
        };
        let basic = Credentials::Basic {
            user: "u".to_owned(),
            password: "p:q".to_owned(),
        };
        assert!(credentials(Some(auth), "a").unwrap() == basic);
        let bad = AuthConfig {
            auth: "%".to_owned(),
            ..AuthConfig::default()
        };
        assert!(credentials(Some(bad), "a").is_err());
        let token = AuthConfig {
            identity_token: "t".to_owned(),
            ..AuthConfig::default()
        };
        let found = credentials(Some(token), "a").unwrap();
        assert!(found == Credentials::IdentityToken("t".to_owned()));
        assert!(credentials(None, "a").unwrap() == Credentials::Auto);
    }
}
