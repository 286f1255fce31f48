//! Where a disk comes from.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr as _;

use http::Uri;
use podvisor_images::{
    Checksum, Credentials, Limits, PullOptions, RegistryConfig, RegistryHost, RegistryProtocol,
    Store, StoreOptions, disk_len,
};
use tokio::sync::mpsc;

use super::progress::Progress;
use super::{ImportError, Options, blocking};
use crate::disk;

/// A file may be larger than its disk by what its format takes, and this.
const SLACK: u64 = 64 << 20;

/// Where a disk comes from.
#[derive(Debug)]
pub(super) enum Source {
    /// A file of a web server.
    Http {
        url: String,
        checksum: Option<Checksum>,
        trust: Trust,
    },
    /// A file in an image.
    Image {
        reference: String,
        credentials: Credentials,
        trust: Trust,
    },
    /// A raw disk that is mounted here.
    File(PathBuf),
    /// Nowhere.
    Blank,
}

/// How a host is reached.
#[derive(Debug)]
pub(super) struct Trust {
    host: String,
    settings: RegistryHost,
}

impl fmt::Display for Source {
    /// Secrets are not shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http { trust, .. } => write!(f, "a file of {}", trust.host),
            Self::Image { reference, .. } => f.write_str(reference),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Blank => f.write_str("an empty disk"),
        }
    }
}

impl Source {
    pub(super) fn of(options: &Options) -> Result<Self, ImportError> {
        if let Some(file) = &options.file {
            return Ok(Self::File(file.clone()));
        }
        let authorities = match &options.certificates {
            Some(directory) => files_of(directory)?,
            None => Vec::new(),
        };
        let settings = authorities
            .into_iter()
            .fold(RegistryHost::default(), RegistryHost::authority);
        if let Some(url) = &options.url {
            let (host, is_plain) = host_of(url).ok_or(ImportError::Url)?;
            // Whoever wrote http:// wants it.
            let protocol = match is_plain {
                true => RegistryProtocol::Http,
                false => RegistryProtocol::Https,
            };
            let checksum = options.checksum.as_deref();
            let checksum = checksum.map(Checksum::from_str).transpose();
            return Ok(Self::Http {
                url: match &options.user {
                    Some(user) => {
                        let password = options.password.as_deref().unwrap_or_default();
                        with_user(url, user, password)
                    }
                    None => url.clone(),
                },
                checksum: checksum.map_err(ImportError::Checksum)?,
                trust: Trust {
                    host,
                    settings: settings.protocol(protocol),
                },
            });
        }
        let Some(reference) = &options.image else {
            return Ok(Self::Blank);
        };
        let credentials = match &options.user {
            Some(user) => Credentials::Basic {
                user: user.clone(),
                password: options.password.clone().unwrap_or_default(),
            },
            None => Credentials::Anonymous,
        };
        Ok(Self::Image {
            reference: reference.clone(),
            credentials,
            trust: Trust {
                host: reference.split('/').next().unwrap_or_default().to_owned(),
                settings,
            },
        })
    }

    /// Whether more is kept meanwhile than the disk itself.
    pub(super) fn needs_scratch(&self) -> bool {
        matches!(self, Self::Image { .. })
    }

    /// Gets the disk, of at most `room` bytes; returns its raw file somewhere in `work`.
    pub(super) async fn fetch(
        &self,
        work: &Path,
        room: u64,
        progress: &Progress,
    ) -> Result<Option<PathBuf>, ImportError> {
        let failed = |error| ImportError::source(error, room);
        match self {
            Self::Blank => return Ok(None),
            Self::File(path) => {
                let path = path.clone();
                return blocking(move || fits(path, room).map(Some)).await;
            }
            Self::Http { .. } | Self::Image { .. } => {}
        }
        let options = StoreOptions::default().limits(limits(room));
        let root = work.to_owned();
        let store = blocking(move || {
            Store::open_with(root, options).map_err(|error| ImportError::source(error, room))
        })
        .await?;
        let (sender, events) = mpsc::unbounded_channel();
        let pull = PullOptions::default().events(sender);
        let disk = match self {
            Self::Http {
                url,
                checksum,
                trust,
            } => {
                let pull = pull.registries(trust.config());
                // With it the events end.
                let pulling = async move { store.pull_disk(url, checksum.as_ref(), &pull).await };
                tokio::join!(pulling, progress.follow(events)).0
            }
            Self::Image {
                reference,
                credentials,
                trust,
            } => {
                let pull = pull
                    .registries(trust.config())
                    .credentials(credentials.clone());
                let pulled = {
                    let store = store.clone();
                    let pulling = async move { store.pull(reference, &pull).await };
                    tokio::join!(pulling, progress.follow(events)).0
                };
                let name = pulled.map_err(failed)?.id().to_string();
                let made = blocking(move || {
                    let disk = store.container_disk(&name);
                    disk.map_err(|error| ImportError::source(error, room))
                });
                return Ok(Some(made.await?.path().to_owned()));
            }
            Self::File(_) | Self::Blank => return Ok(None),
        };
        Ok(Some(disk.map_err(failed)?.path().to_owned()))
    }
}

/// Returns the path of a disk that fits.
fn fits(path: PathBuf, room: u64) -> Result<PathBuf, ImportError> {
    let disk = disk::open(&path).map_err(ImportError::io("open", &path))?;
    let size = disk_len(&disk).map_err(ImportError::io("measure", &path))?;
    if size > room {
        return Err(ImportError::Larger { size, room });
    }
    Ok(path)
}

impl Trust {
    fn config(&self) -> RegistryConfig {
        let mut config = RegistryConfig::default().host(self.host.clone(), self.settings.clone());
        // Nothing of the container's own file system decides who is asked, and as whom.
        config.docker_config = None;
        config.podman_auth = Vec::new();
        config
    }
}

/// What a source may make this machine do, for a disk of at most `room` bytes.
pub(super) fn limits(room: u64) -> Limits {
    let file = room.saturating_mul(2).saturating_add(SLACK);
    let mut limits = Limits::default();
    limits.disk_bytes = room;
    limits.disk_data_bytes = room;
    limits.disk_file_bytes = file;
    limits.layer_bytes = file;
    limits.unpacked_bytes = file;
    limits.devices = false;
    limits
}

/// The files of a mounted ConfigMap; what begins with two dots is the kubelet's.
fn files_of(directory: &Path) -> Result<Vec<PathBuf>, ImportError> {
    let failed = || ImportError::io("list the certificates in", directory);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(failed())? {
        let entry = entry.map_err(failed())?;
        let path = entry.path();
        if !entry.file_name().as_encoded_bytes().starts_with(b"..") && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The host of a URL, with a port that is not its scheme's own, and whether it is plain HTTP.
fn host_of(url: &str) -> Option<(String, bool)> {
    let address = url.split(['?', '#']).next()?;
    let uri = Uri::from_str(address).ok()?;
    let is_plain = match uri.scheme_str()? {
        "http" => true,
        "https" => false,
        _ => return None,
    };
    let host = uri.host()?.to_ascii_lowercase();
    let own = if is_plain { 80 } else { 443 };
    let host = match uri.port_u16() {
        Some(port) if port != own => format!("{host}:{port}"),
        _ => host,
    };
    Some((host, is_plain))
}

/// A URL with a user and a password in the place of those that it has.
fn with_user(url: &str, user: &str, password: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (host, path) = rest.split_at(end);
    let host = host.rsplit('@').next().unwrap_or_default();
    format!(
        "{scheme}://{}:{}@{host}{path}",
        percent_encode(user),
        percent_encode(password)
    )
}

fn percent_encode(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_named_as_its_settings_are() {
        let host = |url| host_of(url).unwrap();
        assert_eq!(host("http://Example.com/x"), ("example.com".into(), true));
        assert_eq!(host("https://u:p@h:443/x?a@b"), ("h".to_owned(), false));
        assert_eq!(host("https://h:80/"), ("h:80".to_owned(), false));
        assert_eq!(host("http://[::1]:8080/x"), ("[::1]:8080".into(), true));
        for url in ["", "http://", "ftp://h/x", "/x", "http:///x"] {
            assert_eq!(host_of(url), None, "{url}");
        }
    }

    #[test]
    fn a_secret_of_any_bytes_stays_in_its_place() {
        assert_eq!(
            with_user("https://old@h:1/p?q@r", "a/b", "p@:#%"),
            "https://a%2Fb:p%40%3A%23%25@h:1/p?q@r"
        );
    }

    #[test]
    fn files_of_the_kubelet_are_no_certificates() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("..data")).unwrap();
        for name in ["..x", "odd name.PEM", ".hidden"] {
            std::fs::write(directory.path().join(name), "").unwrap();
        }
        let names = [".hidden", "odd name.PEM"].map(|name| directory.path().join(name));
        assert_eq!(files_of(directory.path()).unwrap(), names);
        assert!(files_of(&directory.path().join("gone")).is_err());
    }
}
