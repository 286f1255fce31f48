//! Credentials for registries.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::HeaderValue;

/// Credentials for a pull.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Credentials {
    /// Those for the registry in Docker's configuration file, otherwise none.
    #[default]
    Auto,
    /// No credentials.
    Anonymous,
    /// A user with a password or access token.
    Basic {
        /// User name.
        user: String,
        /// Password.
        password: String,
    },
    /// A refresh token that the token server takes for access tokens.
    IdentityToken(String),
    /// A token that the registry itself takes.
    RegistryToken(String),
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "Auto",
            Self::Anonymous => "Anonymous",
            Self::Basic { .. } => "Basic(…)",
            Self::IdentityToken(_) => "IdentityToken(…)",
            Self::RegistryToken(_) => "RegistryToken(…)",
        })
    }
}

impl Credentials {
    /// Returns the header to start with, before any challenge.
    pub(super) fn initial_header(&self) -> Option<HeaderValue> {
        match self {
            Self::RegistryToken(token) => secret(&format!("Bearer {token}")),
            _ => None,
        }
    }

    /// Returns the header for a server that asks for a password.
    pub(super) fn basic(&self) -> Option<HeaderValue> {
        match self {
            Self::Basic { user, password } => secret(&format!(
                "Basic {}",
                STANDARD.encode(format!("{user}:{password}"))
            )),
            _ => None,
        }
    }
}

/// Creates a header value; `None` for text that no header may contain, such as a line break in a
/// token.
pub(super) fn secret(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}
