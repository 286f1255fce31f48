//! Connection settings of registries.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Settings for all registries.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RegistryConfig {
    /// Settings by registry host, with the port when it is not the usual one (`docker.io`,
    /// `localhost:5000`).
    pub hosts: BTreeMap<String, RegistryHost>,
    /// Settings of registries that are not in `hosts`. Mirrors that are not in `hosts` get no
    /// settings.
    pub other_hosts: RegistryHost,
    /// Docker's configuration file with credentials. Default: `$DOCKER_CONFIG/config.json`, else
    /// `~/.docker/config.json`; a missing file is not an error.
    pub docker_config: Option<PathBuf>,
    /// Files of podman's and skopeo's with credentials, asked in order where Docker's has nothing
    /// (containers-auth.json(5)). Default: `$REGISTRY_AUTH_FILE`, else
    /// `$XDG_RUNTIME_DIR/containers/auth.json` (of root without that variable
    /// `/run/containers/0/auth.json`) and `~/.config/containers/auth.json`; a missing file is no
    /// error.
    pub podman_auth: Vec<PathBuf>,
    /// How long a connection may take to be made.
    pub connect_timeout: Duration,
    /// How long a server may send nothing before the request counts as failed.
    pub stall_timeout: Duration,
    /// Attempts for each request if the server is overloaded or connections break, at least 1.
    pub attempts: u32,
    /// The pause before the second attempt; it doubles with each following one.
    pub backoff: Duration,
}

impl Default for RegistryConfig {
    fn default() -> Self {
        let directory = std::env::var_os("DOCKER_CONFIG")
            .map(PathBuf::from)
            .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".docker")));
        Self {
            hosts: BTreeMap::new(),
            other_hosts: RegistryHost::default(),
            docker_config: directory.map(|directory| directory.join("config.json")),
            podman_auth: podman_auth(),
            connect_timeout: Duration::from_secs(15),
            stall_timeout: Duration::from_secs(30),
            attempts: 5,
            backoff: Duration::from_millis(500),
        }
    }
}

fn podman_auth() -> Vec<PathBuf> {
    let path = |variable: &str| std::env::var_os(variable).map(PathBuf::from);
    if let Some(file) = path("REGISTRY_AUTH_FILE") {
        return vec![file];
    }
    let runtime = path("XDG_RUNTIME_DIR").map(|directory| directory.join("containers"));
    let root = || {
        rustix::process::getuid()
            .is_root()
            .then(|| "/run/containers/0".into())
    };
    let home = path("HOME").map(|home| home.join(".config/containers"));
    let directories = [runtime.or_else(root), home].into_iter().flatten();
    directories
        .map(|directory| directory.join("auth.json"))
        .collect()
}

impl RegistryConfig {
    /// Credential files in the order in which they are asked.
    pub(crate) fn credential_files(&self) -> impl Iterator<Item = &Path> {
        let docker = self.docker_config.as_deref();
        docker
            .into_iter()
            .chain(self.podman_auth.iter().map(PathBuf::as_path))
    }

    /// Sets what is special about one registry host.
    #[must_use]
    pub fn host(mut self, name: impl Into<String>, host: RegistryHost) -> Self {
        self.hosts.insert(name.into(), host);
        self
    }

    /// How a mirror is reached.
    pub(crate) fn of_mirror(&self, mirror: &Mirror, host: &str) -> RegistryHost {
        let mut settings = self.hosts.get(host).cloned().unwrap_or_default();
        settings.add(&mirror.settings);
        settings
    }

    /// The settings of a registry.
    pub(crate) fn of(&self, name: &str) -> &RegistryHost {
        self.hosts.get(name).unwrap_or(&self.other_hosts)
    }
}

/// Settings of one registry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegistryHost {
    /// HTTPS or HTTP.
    pub protocol: RegistryProtocol,
    /// Servers that are asked before the registry itself, in order; each may have its own settings.
    pub mirrors: Vec<Mirror>,
    /// The server of the registry if it differs from its name, in the form of [`Mirror::address`].
    pub server: Option<String>,
    /// PEM files of certificate authorities to trust in addition to the system's.
    pub authorities: Vec<PathBuf>,
    /// Certificate to present to the registry.
    pub client_certificate: Option<ClientCertificate>,
}

impl RegistryHost {
    /// Adds how another one is reached; where both say something, the other one's is taken.
    pub(super) fn add(&mut self, other: &Self) {
        if other.protocol != RegistryProtocol::Auto {
            self.protocol = other.protocol;
        }
        for authority in &other.authorities {
            if !self.authorities.contains(authority) {
                self.authorities.push(authority.clone());
            }
        }
        let client = other.client_certificate.clone();
        self.client_certificate = client.or(self.client_certificate.take());
    }

    /// Sets the protocol.
    #[must_use]
    pub fn protocol(mut self, protocol: RegistryProtocol) -> Self {
        self.protocol = protocol;
        self
    }

    /// Adds a mirror, asked after those added before.
    #[must_use]
    pub fn mirror(mut self, mirror: impl Into<Mirror>) -> Self {
        self.mirrors.push(mirror.into());
        self
    }

    /// Trusts the authorities in a PEM file.
    #[must_use]
    pub fn authority(mut self, pem: impl Into<PathBuf>) -> Self {
        self.authorities.push(pem.into());
        self
    }

    /// Presents a certificate to the registry.
    #[must_use]
    pub fn client_certificate(mut self, certificate: ClientCertificate) -> Self {
        self.client_certificate = Some(certificate);
        self
    }
}

/// A server that has the content of a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mirror {
    /// `HOST[:PORT]`, or `HOST[:PORT]/PATH` if the server's API is not under `/v2`.
    pub address: String,
    /// Whether it is asked to resolve tags; otherwise it only serves content by digest, which
    /// cannot be forged.
    pub resolves_tags: bool,
    /// How it is reached for this registry's images, besides what [`RegistryConfig::hosts`] has for
    /// it. Its own images are not concerned.
    pub settings: RegistryHost,
}

impl<T: Into<String>> From<T> for Mirror {
    fn from(address: T) -> Self {
        Self {
            address: address.into(),
            resolves_tags: true,
            settings: RegistryHost::default(),
        }
    }
}

/// A client certificate: PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCertificate {
    /// The certificate and the intermediate certificates.
    pub chain: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// The protocol of a registry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RegistryProtocol {
    /// HTTP for loopback addresses and `localhost`, else HTTPS.
    #[default]
    Auto,
    /// HTTPS even on loopback.
    Https,
    /// HTTP, without any protection; what is pulled by digest is protected only by the digest.
    Http,
}
