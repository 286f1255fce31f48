//! URLs of disk images.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::Url;
use reqwest::header::HeaderValue;

use super::DiskError;
use crate::http::{self, RegistryConfig, RegistryProtocol};

/// Maximum bytes of a URL.
const MAX_URL_LEN: usize = 2048;

/// Location of a disk image.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// Without user, password and fragment.
    url: Url,
    authorization: Option<HeaderValue>,
}

impl Source {
    /// Returns whether a name means a disk image rather than an OCI image.
    pub(crate) fn is_meant(name: &str) -> bool {
        ["http://", "https://"].iter().any(|scheme| {
            name.get(..scheme.len())
                .is_some_and(|start| start.eq_ignore_ascii_case(scheme))
        })
    }

    pub(crate) fn parse(input: &str) -> Result<Self, DiskError> {
        let fault = |why| DiskError::Url {
            input: shown(input),
            why,
        };
        if input.len() > MAX_URL_LEN {
            return Err(fault("it is too long"));
        }
        let mut url = Url::parse(input).map_err(|_| fault("it is not a URL"))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(fault("it is neither HTTPS nor HTTP"));
        }
        let authorization = authorization(&url);
        // Neither fails for URLs with a host.
        let _ = url.set_username("");
        let _ = url.set_password(None);
        url.set_fragment(None);
        // Letters of other scripts take more bytes when they are encoded.
        if url.as_str().len() > MAX_URL_LEN {
            return Err(fault("it is too long"));
        }
        Ok(Self { url, authorization })
    }

    pub(super) fn url(&self) -> &Url {
        &self.url
    }

    pub(super) fn authorization(&self) -> Option<&HeaderValue> {
        self.authorization.as_ref()
    }

    /// Returns the name under which the image is stored: the whole URL without user and password.
    pub(crate) fn name(&self) -> String {
        self.url.to_string()
    }

    /// Returns the URL for messages: without the query.
    pub(crate) fn shown(&self) -> String {
        shown(self.url.as_str())
    }

    /// Returns the host, with the port unless it is the default one.
    pub(super) fn host(&self) -> String {
        let host = self.url.host_str().unwrap_or_default();
        match self.url.port() {
            Some(port) => format!("{host}:{port}"),
            None => host.to_owned(),
        }
    }

    /// Refuses plain HTTP except for this machine, for configured hosts and for content with a
    /// known checksum.
    pub(super) fn check_protocol(
        &self,
        config: &RegistryConfig,
        has_checksum: bool,
    ) -> Result<(), DiskError> {
        let host = self.host();
        let protocol = config
            .hosts
            .get(&host)
            .map_or(RegistryProtocol::Auto, |host| host.protocol);
        let allowed = match protocol {
            _ if self.url.scheme() == "https" => true,
            RegistryProtocol::Auto => has_checksum || http::is_loopback(&host),
            RegistryProtocol::Http => true,
            RegistryProtocol::Https => false,
        };
        if allowed {
            Ok(())
        } else {
            Err(DiskError::Insecure { url: self.shown() })
        }
    }
}

/// Returns the header for basic authentication with the user and password in the URL.
fn authorization(url: &Url) -> Option<HeaderValue> {
    if url.username().is_empty() && url.password().is_none() {
        return None;
    }
    let pair = [
        &percent_decode(url.username())[..],
        b":",
        &percent_decode(url.password().unwrap_or_default()),
    ]
    .concat();
    let mut value = HeaderValue::from_str(&format!("Basic {}", STANDARD.encode(pair))).ok()?;
    value.set_sensitive(true);
    Some(value)
}

fn percent_decode(text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let digits = tail.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        let byte = digits.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match byte.filter(|_| *first == b'%') {
            Some(byte) => {
                out.push(byte);
                rest = &tail[2..];
            }
            None => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    out
}

/// Formats a URL for messages: without user, password and query, and not too long.
fn shown(input: &str) -> String {
    let end = input.find(['?', '#']).unwrap_or(input.len());
    let address = &input[..end];
    let (scheme, rest) = address.split_once("://").unwrap_or(("", address));
    let host = rest.split('/').next().unwrap_or_default();
    let rest = match host.rfind('@') {
        Some(at) => &rest[at + 1..],
        None => rest,
    };
    let separator = if scheme.is_empty() { "" } else { "://" };
    format!("{scheme}{separator}{rest}")
        .chars()
        .take(300)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RegistryHost;

    #[test]
    fn secrets_are_neither_in_names_nor_in_messages() {
        let source =
            Source::parse("HTTPS://me:pa%40ss@Example.com:443/a/../d.qcow2?token=x#y").unwrap();
        assert_eq!(source.name(), "https://example.com/d.qcow2?token=x");
        assert_eq!(source.shown(), "https://example.com/d.qcow2");
        assert_eq!(source.host(), "example.com");
        let header = source.authorization().unwrap();
        assert_eq!(header, &format!("Basic {}", STANDARD.encode("me:pa@ss")));
        assert!(header.is_sensitive());
        assert_eq!(shown("https://me:x@y@host/p?q"), "https://host/p");
        let message = Source::parse("https://me:secret@[::/x")
            .unwrap_err()
            .to_string();
        assert!(!message.contains("secret"), "{message}");
    }

    #[test]
    fn what_is_no_address_of_a_file_by_http_is_refused() {
        for bad in [
            "",
            "busybox",
            "ftp://host/x",
            "file:///etc/passwd",
            "https://",
            "http:// /",
        ] {
            assert!(
                matches!(Source::parse(bad), Err(DiskError::Url { .. })),
                "{bad}"
            );
        }
        let long = format!("https://host/{}", "x".repeat(3000));
        assert!(Source::parse(&long).is_err());
        assert!(Source::is_meant("Http://x") && Source::is_meant("https://é"));
        assert!(
            !Source::is_meant("http:/x") && !Source::is_meant("https/x") && !Source::is_meant("é")
        );
    }

    #[test]
    fn plain_http_needs_a_reason() {
        let config = RegistryConfig::default()
            .host(
                "lan.example:8080",
                RegistryHost::default().protocol(RegistryProtocol::Http),
            )
            .host(
                "localhost",
                RegistryHost::default().protocol(RegistryProtocol::Https),
            );
        let allowed = |url: &str, checksum| {
            let source = Source::parse(url).unwrap();
            source.check_protocol(&config, checksum).is_ok()
        };
        assert!(allowed("http://127.0.0.1:8000/x", false));
        assert!(allowed("http://lan.example:8080/x", false));
        assert!(allowed("http://example.com/x", true));
        assert!(!allowed("http://example.com/x", false));
        assert!(!allowed("http://lan.example/x", false));
        assert!(!allowed("http://localhost/x", true));
        assert!(allowed("https://localhost/x", false));
    }
}
