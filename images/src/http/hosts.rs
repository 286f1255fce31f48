//! Settings of registries from a directory in the format of containerd (`hosts.toml`) or Docker
//! (certificates only): one directory per registry, `_default` for all that have none.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::config::{ClientCertificate, Mirror, RegistryConfig, RegistryHost, RegistryProtocol};

/// Bytes of a `hosts.toml`.
const MAX_FILE_SIZE: u64 = 1 << 20;
/// The directory for all registries without their own.
const DEFAULT: &str = "_default";

/// Why a directory with settings of registries cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostsError {
    /// It cannot be read.
    #[error("cannot read {}", .path.display())]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// It is not TOML of the expected form.
    #[error("{} is no valid hosts.toml", .path.display())]
    Toml {
        /// The file.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// It has a setting that is invalid or not supported.
    #[error("{}: {what}", .path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}

impl RegistryConfig {
    /// Adds the settings of registries in `directory`: `directory/HOST[:PORT]/hosts.toml` in
    /// containerd's format, or certificates in Docker's layout (`*.crt` to trust, `NAME.cert` with
    /// `NAME.key` to present).
    ///
    /// # Errors
    /// A directory or file that cannot be read, or has settings that are invalid or not supported.
    pub fn hosts_directory(mut self, directory: &Path) -> Result<Self, HostsError> {
        let mut directories = list(directory)?;
        directories.retain(|path| path.is_dir());
        for path in directories {
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
                continue;
            };
            let file = path.join("hosts.toml");
            let host = if file.is_file() {
                of_toml(&read(&file)?, &file)?
            } else {
                certificates_in(&path)?
            };
            if name == DEFAULT {
                self.other_hosts = host;
            } else {
                // Where directory names cannot contain a colon, containerd writes them like this.
                let host_name = match name
                    .strip_suffix('_')
                    .and_then(|name| name.rsplit_once('_'))
                {
                    Some((host, port)) => format!("{host}:{port}"),
                    None => name.to_owned(),
                };
                let known = self.hosts.entry(host_name).or_default();
                known.add(&host);
                known.server = host.server;
                known.mirrors = host.mirrors;
            }
        }
        Ok(self)
    }
}

/// Reads a `hosts.toml`.
fn of_toml(text: &str, file: &Path) -> Result<RegistryHost, HostsError> {
    let table: Table = toml::from_str(text).map_err(|source| HostsError::Toml {
        path: file.to_owned(),
        source: Box::new(source),
    })?;
    let at = |what: String| HostsError::Invalid {
        path: file.to_owned(),
        what,
    };
    let directory = file.parent().unwrap_or(Path::new(""));
    let (mut own, mut mirrors) = (Table::new(), Table::new());
    let mut server = None;
    for (key, value) in table {
        match (key.as_str(), value) {
            ("server", Value::String(address)) => server = Some(address),
            ("host", Value::Table(hosts)) => mirrors = hosts,
            (_, value) => drop(own.insert(key, value)),
        }
    }
    let own = Settings::of(&own, directory).map_err(at)?;
    let mut host = own.host;
    if let Some(server) = server {
        let (protocol, address) = address_of(&server, own.override_path).map_err(at)?;
        host.protocol = protocol;
        host.server = Some(address);
    }
    for (url, value) in mirrors {
        let Value::Table(table) = value else {
            return Err(at(format!("[host.{url:?}] is no table")));
        };
        let settings = Settings::of(&table, directory)
            .map_err(|what| at(format!("[host.{url:?}]: {what}")))?;
        let (protocol, address) = address_of(&url, settings.override_path).map_err(at)?;
        if !settings.pulls {
            continue;
        }
        host.mirrors.push(Mirror {
            address,
            resolves_tags: settings.resolves,
            settings: settings.host.protocol(protocol),
        });
    }
    Ok(host)
}

/// Settings of one server in a `hosts.toml`.
struct Settings {
    pulls: bool,
    resolves: bool,
    override_path: bool,
    host: RegistryHost,
}

impl Settings {
    fn of(table: &Table, directory: &Path) -> Result<Self, String> {
        let mut settings = Self {
            pulls: true,
            resolves: true,
            override_path: false,
            host: RegistryHost::default(),
        };
        for (key, value) in table {
            let wrong = || format!("`{key}` has a value of the wrong type");
            match key.as_str() {
                "capabilities" => {
                    let capabilities = strings(value).ok_or_else(wrong)?;
                    // An empty list stands for all of them.
                    let has = |name: &str| {
                        capabilities.is_empty()
                            || capabilities.iter().any(|c| c.eq_ignore_ascii_case(name))
                    };
                    (settings.pulls, settings.resolves) = (has("pull"), has("resolve"));
                }
                "ca" => {
                    let files = strings(value).ok_or_else(wrong)?;
                    let files = files.iter().map(|file| directory.join(file));
                    settings.host.authorities = files.collect();
                }
                "client" => {
                    settings.host.client_certificate =
                        client(value, directory).ok_or_else(wrong)?;
                }
                "override_path" => settings.override_path = value.as_bool().ok_or_else(wrong)?,
                "skip_verify" if value.as_bool() == Some(false) => {}
                "skip_verify" => {
                    let text = "`skip_verify` is not supported: trust the server's certificate by `ca` instead";
                    return Err(text.to_owned());
                }
                _ => return Err(format!("`{key}` is not supported")),
            }
        }
        Ok(settings)
    }
}

/// One string or a list of them.
fn strings(value: &Value) -> Option<Vec<&str>> {
    match value {
        Value::String(text) => Some(vec![text]),
        Value::Array(values) => values.iter().map(Value::as_str).collect(),
        _ => None,
    }
}

/// A file with certificate and key, a pair of files, or a list of these, of which the first is
/// used.
fn client(value: &Value, directory: &Path) -> Option<Option<ClientCertificate>> {
    let pair = |chain: &str, key: &str| ClientCertificate {
        chain: directory.join(chain),
        key: directory.join(key),
    };
    let both = |file: &str| Some(pair(file, file));
    match value {
        Value::String(file) => Some(both(file)),
        Value::Array(entries) => match entries.first() {
            None => Some(None),
            Some(Value::String(file)) => Some(both(file)),
            Some(Value::Array(files)) => match files.as_slice() {
                [chain, key] => Some(Some(pair(chain.as_str()?, key.as_str()?))),
                [file] => Some(both(file.as_str()?)),
                _ => None,
            },
            Some(_) => None,
        },
        _ => None,
    }
}

/// Splits `http://HOST[:PORT][/PATH]` into a protocol and an address for [`Mirror`].
fn address_of(url: &str, is_whole_path: bool) -> Result<(RegistryProtocol, String), String> {
    let wrong = || format!("{url:?} is no address of a server; write https://HOST[:PORT]");
    let (protocol, rest) = match url.split_once("://") {
        Some(("https", rest)) => (RegistryProtocol::Https, rest),
        Some(("http", rest)) => (RegistryProtocol::Http, rest),
        Some(_) => return Err(wrong()),
        None => (RegistryProtocol::Auto, url),
    };
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let path = path.trim_end_matches('/');
    let parsed = reqwest::Url::parse(&format!("https://{rest}")).map_err(|_| wrong())?;
    let is_plain = parsed.username().is_empty()
        && parsed.password().is_none()
        && parsed.query().is_none()
        && parsed.fragment().is_none();
    if host.is_empty() || !is_plain {
        return Err(wrong());
    }
    let address = match (path, is_whole_path) {
        ("" | "v2", _) => host.to_owned(),
        (path, true) => format!("{host}/{path}"),
        (path, false) if path.ends_with("/v2") => format!("{host}/{path}"),
        (path, false) => format!("{host}/{path}/v2"),
    };
    Ok((protocol, address))
}

/// Reads Docker's layout: certificates in the registry's directory.
fn certificates_in(directory: &Path) -> Result<RegistryHost, HostsError> {
    let mut host = RegistryHost::default();
    for path in list(directory)? {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("crt") => host.authorities.push(path),
            Some("cert") => {
                let key = path.with_extension("key");
                if !key.is_file() {
                    return Err(HostsError::Invalid {
                        what: format!("there is no {} beside it", key.display()),
                        path,
                    });
                }
                let certificate = ClientCertificate { chain: path, key };
                host.client_certificate.get_or_insert(certificate);
            }
            _ => {}
        }
    }
    Ok(host)
}

/// Lists a directory, sorted.
fn list(directory: &Path) -> Result<Vec<PathBuf>, HostsError> {
    let entries = || -> io::Result<Vec<PathBuf>> {
        fs::read_dir(directory)?
            .map(|entry| Ok(entry?.path()))
            .collect()
    };
    let mut entries = entries().map_err(|source| HostsError::Read {
        path: directory.to_owned(),
        source,
    })?;
    entries.sort();
    Ok(entries)
}

fn read(file: &Path) -> Result<String, HostsError> {
    let mut text = String::new();
    let opened = File::open(file);
    opened
        .and_then(|opened| opened.take(MAX_FILE_SIZE + 1).read_to_string(&mut text))
        .map_err(|source| HostsError::Read {
            path: file.to_owned(),
            source,
        })?;
    if text.len() as u64 > MAX_FILE_SIZE {
        return Err(HostsError::Invalid {
            path: file.to_owned(),
            what: format!("it has more than {MAX_FILE_SIZE} bytes"),
        });
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    fn config(dir: &tempfile::TempDir) -> Result<RegistryConfig, HostsError> {
        RegistryConfig::default().hosts_directory(dir.path())
    }

    #[test]
    fn containerds_hosts_toml_is_understood() {
        let dir = directory(&[(
            "docker.io/hosts.toml",
            r#"
            server = "https://registry-1.docker.io"
            [host."https://z.example:5000"]
              capabilities = ["pull"]
              ca = "z.crt"
              client = [["z.cert", "/keys/z.key"]]
            [host."http://a.example"]
              capabilities = ["pull", "resolve", "push"]
            [host."https://harbor.example/v2/hub"]
              override_path = true
            [host."https://deep.example/some/where"]
              ca = ["1.crt", "/2.crt"]
            [host."https://nexus.example/repository/hub/v2/"]
              capabilities = []
            [host."https://case.example"]
              capabilities = ["Pull"]
            [host."https://push.example"]
              capabilities = ["push"]
            "#,
        )]);
        let config = config(&dir).unwrap();
        let hub = config.of("docker.io");
        assert_eq!(hub.server.as_deref(), Some("registry-1.docker.io"));
        let mirrors: Vec<_> = hub
            .mirrors
            .iter()
            .map(|m| (m.address.as_str(), m.resolves_tags))
            .collect();
        assert_eq!(
            mirrors,
            [
                ("z.example:5000", false),
                ("a.example", true),
                ("harbor.example/v2/hub", true),
                ("deep.example/some/where/v2", true),
                ("nexus.example/repository/hub/v2", true),
                ("case.example", false),
            ]
        );
        let of = |at: usize| &hub.mirrors[at].settings;
        let z = of(0);
        assert_eq!(z.protocol, RegistryProtocol::Https);
        assert_eq!(z.authorities, [dir.path().join("docker.io/z.crt")]);
        let client = z.client_certificate.as_ref().unwrap();
        assert_eq!(client.key, Path::new("/keys/z.key"));
        assert_eq!(of(1).protocol, RegistryProtocol::Http);
        let deep = [dir.path().join("docker.io/1.crt"), "/2.crt".into()];
        assert_eq!(of(3).authorities, deep);
    }

    #[test]
    fn how_a_mirror_is_reached_does_not_concern_its_own_images() {
        let dir = directory(&[
            (
                "a.example/hosts.toml",
                "[host.\"http://cache.example\"]\nca = \"a.crt\"",
            ),
            ("b.example/hosts.toml", "[host.\"https://cache.example\"]"),
            ("cache.example/ca.crt", ""),
        ]);
        let config = config(&dir).unwrap();
        let authority = dir.path().join("cache.example/ca.crt");
        let own = config.of("cache.example");
        assert_eq!(own.protocol, RegistryProtocol::Auto);
        assert_eq!(own.authorities, std::slice::from_ref(&authority));
        let for_images_of = |registry: &str| {
            let mirror = &config.of(registry).mirrors[0];
            config.of_mirror(mirror, "cache.example")
        };
        let (a, b) = (for_images_of("a.example"), for_images_of("b.example"));
        assert_eq!(a.protocol, RegistryProtocol::Http);
        let both = [authority.clone(), dir.path().join("a.example/a.crt")];
        assert_eq!(a.authorities, both);
        assert_eq!(b.protocol, RegistryProtocol::Https);
        assert_eq!(b.authorities, [authority]);
    }

    #[test]
    fn dockers_certificates_and_a_default_are_understood() {
        let dir = directory(&[
            ("one.example:5000/ca.crt", ""),
            ("one.example:5000/me.cert", ""),
            ("one.example:5000/me.key", ""),
            ("two.example_443_/ca.crt", ""),
            ("_default/hosts.toml", "[host.\"https://mirror.example\"]"),
            ("a file", ""),
        ]);
        let config = config(&dir).unwrap();
        let one = config.of("one.example:5000");
        assert_eq!(
            one.authorities,
            [dir.path().join("one.example:5000/ca.crt")]
        );
        let client = one.client_certificate.as_ref().unwrap();
        assert_eq!(client.key, dir.path().join("one.example:5000/me.key"));
        assert_eq!(config.of("two.example:443").authorities.len(), 1);
        assert!(one.mirrors.is_empty());
        assert_eq!(
            config.of("else.example").mirrors[0].address,
            "mirror.example"
        );
    }

    #[test]
    fn what_makes_no_sense_is_told_with_its_file() {
        for (text, expected) in [
            ("server =", "no valid hosts.toml"),
            ("server = 1", "`server` is not supported"),
            ("serverr = \"x\"", "`serverr` is not supported"),
            ("server = \"ftp://x\"", "no address of a server"),
            ("server = \"https://u:p@x\"", "no address of a server"),
            ("[host.\"https://\"]", "no address of a server"),
            ("skip_verify = true", "by `ca` instead"),
            ("ca = 1", "`ca` has a value of the wrong type"),
            ("client = [[1]]", "`client` has a value of the wrong type"),
            (
                "[host.\"https://a\"]\nheader = {}",
                "`header` is not supported",
            ),
            ("host = {\"https://a\" = 1}", "is no table"),
        ] {
            let dir = directory(&[("x.example/hosts.toml", text)]);
            let error = config(&dir).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
            assert!(error.contains("x.example/hosts.toml"), "{error}");
        }
        let endless = "#".repeat(2 << 20);
        let dir = directory(&[("x.example/hosts.toml", &endless)]);
        let error = config(&dir).unwrap_err().to_string();
        assert!(error.contains("more than 1048576 bytes"), "{error}");
        let dir = directory(&[("x.example/me.cert", "")]);
        let error = config(&dir).unwrap_err().to_string();
        assert!(error.contains("me.key beside it"), "{error}");
        let error = RegistryConfig::default().hosts_directory(Path::new("/no/such/directory"));
        assert!(
            error
                .unwrap_err()
                .to_string()
                .contains("/no/such/directory")
        );
    }
}
