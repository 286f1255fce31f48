//! The files that the program is given: volumes, certificates and the token.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use ::ring::{hmac, rand::SystemRandom};
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;

use super::error::ExportError;
use crate::certificates::files::{Files, Unusable};

/// The longest token.
const MAX_TOKEN: u64 = 4096;

/// A volume that is served: `NAME=PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// The claim's name.
    pub name: String,
    /// The raw disk: a file, or a block device; or the directory with its files.
    pub path: PathBuf,
}

impl FromStr for Volume {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => Ok(Self {
                name: name.to_owned(),
                path: path.into(),
            }),
            _ => Err("a volume is NAME=PATH"),
        }
    }
}

/// The file with the token, read for each request: a token that is replaced is good no longer.
#[derive(Debug)]
pub(super) struct Token {
    path: PathBuf,
    key: hmac::Key,
}

impl Token {
    pub(super) fn new(path: &Path) -> Result<Self, ExportError> {
        let key = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new());
        Ok(Self {
            path: path.to_owned(),
            key: key.map_err(|_| ExportError::Random)?,
        })
    }

    /// Returns whether this is the token; how long that takes says nothing of it.
    pub(super) fn is(&self, given: &[u8]) -> io::Result<bool> {
        let mut token = Vec::new();
        let file = File::open(&self.path)?;
        file.take(MAX_TOKEN + 1).read_to_end(&mut token)?;
        let token = token.trim_ascii_end();
        if token.is_empty() || token.len() as u64 > MAX_TOKEN {
            let text = "the token is empty, or longer than 4096 bytes";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let expected = hmac::sign(&self.key, token);
        Ok(hmac::verify(&self.key, given, expected.as_ref()).is_ok())
    }
}

/// The server's side of TLS, from the files `tls.crt` and `tls.key`.
pub(super) fn server_config(directory: &Path) -> Result<ServerConfig, ExportError> {
    let files = Files::new(directory);
    let (certificates, key) = files.read_own()?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(Unusable::of(&files.own()))?
        .with_no_client_auth()
        .with_single_cert(certificates, key)
        .map_err(Unusable::of(&files.own()))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_is_the_token() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let token = Token::new(&path).unwrap();
        assert!(token.is(b"").is_err(), "there is none");
        std::fs::write(&path, "secret\n").unwrap();
        assert!(token.is(b"secret").unwrap());
        for other in [&b""[..], b"secre", b"secrets", b"secret\n", b"secret\0"] {
            assert!(!token.is(other).unwrap(), "{other:?}");
        }
        for invalid in ["", "\n", &"x".repeat(4097)] {
            std::fs::write(&path, invalid).unwrap();
            assert!(token.is(invalid.as_bytes()).is_err());
        }
    }

    #[test]
    fn a_volume_has_a_name_and_a_path() {
        let volume: Volume = "a=/b=c".parse().unwrap();
        assert_eq!(
            (volume.name.as_str(), volume.path.as_path()),
            ("a", Path::new("/b=c"))
        );
        for text in ["", "a", "a=", "=/b"] {
            assert!(text.parse::<Volume>().is_err(), "{text}");
        }
    }
}
