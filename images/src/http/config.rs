//! How registries are reached.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// Settings for all registries.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RegistryConfig {
    /// Settings by registry host, with the port when it is not the usual one (`docker.io`,
    /// `localhost:5000`).
    pub hosts: BTreeMap<String, RegistryHost>,
    /// Settings of registries that `hosts` does not have. Mirrors that it does not have get none.
    pub other_hosts: RegistryHost,
    /// Docker's configuration file with credentials. Default: `$DOCKER_CONFIG/config.json`, else
    /// `~/.docker/config.json`; a missing file is no error.
    pub docker_config: Option<PathBuf>,
    /// How long a connection may take to be made.
    pub connect_timeout: Duration,
    /// How long a server may send nothing before the request counts as failed.
    pub stall_timeout: Duration,
    /// Attempts for each request when the server is overloaded or connections break, at least 1.
    pub attempts: u32,
    /// The pause before the second attempt; it doubles with each further one.
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
            connect_timeout: Duration::from_secs(15),
            stall_timeout: Duration::from_secs(30),
            attempts: 5,
            backoff: Duration::from_millis(500),
        }
    }
}

impl RegistryConfig {
    /// Sets what is special about one registry host.
    #[must_use]
    pub fn host(mut self, name: impl Into<String>, host: RegistryHost) -> Self {
        self.hosts.insert(name.into(), host);
        self
    }

    /// The settings of a registry.
    pub(crate) fn of(&self, name: &str) -> &RegistryHost {
        self.hosts.get(name).unwrap_or(&self.other_hosts)
    }
}

/// Settings of one registry.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct RegistryHost {
    /// HTTPS or HTTP.
    pub protocol: RegistryProtocol,
    /// Servers that are asked before the registry itself, in order; each may have settings of its
    /// own.
    pub mirrors: Vec<Mirror>,
    /// Where the registry really is, when that is not its name: as [`Mirror::address`].
    pub server: Option<String>,
    /// PEM files of authorities to trust besides the system's.
    pub authorities: Vec<PathBuf>,
    /// Certificate to show to the registry.
    pub client_certificate: Option<ClientCertificate>,
}

impl RegistryHost {
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

    /// Shows a certificate to the registry.
    #[must_use]
    pub fn client_certificate(mut self, certificate: ClientCertificate) -> Self {
        self.client_certificate = Some(certificate);
        self
    }
}

/// A server that has what a registry has.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mirror {
    /// `HOST[:PORT]`, or `HOST[:PORT]/PATH` when the server's interface is elsewhere than under
    /// `/v2`.
    pub address: String,
    /// Whether it is asked what a tag stands for; without that it only serves what is named by
    /// digest, which nobody can forge.
    pub resolves_tags: bool,
}

impl<T: Into<String>> From<T> for Mirror {
    fn from(address: T) -> Self {
        Self {
            address: address.into(),
            resolves_tags: true,
        }
    }
}

/// A client certificate: PEM files.
#[derive(Clone, Debug)]
pub struct ClientCertificate {
    /// The certificate and those between it and the authority.
    pub chain: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// How a registry speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RegistryProtocol {
    /// HTTP for loopback addresses and `localhost`, else HTTPS.
    #[default]
    Auto,
    /// HTTPS even on loopback.
    Https,
    /// HTTP, without any protection; digests alone protect what is pulled by digest.
    Http,
}
