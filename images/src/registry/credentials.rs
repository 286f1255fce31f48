//! Who pulls.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::HeaderValue;

/// Who pulls.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Credentials {
    /// Whatever Docker's configuration file has for the registry, else nobody.
    #[default]
    Auto,
    /// Nobody.
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
    /// The header to begin with, before any challenge.
    pub(super) fn initial_header(&self) -> Option<HeaderValue> {
        match self {
            Self::RegistryToken(token) => secret(&format!("Bearer {token}")),
            _ => None,
        }
    }

    /// For the server that asks for a password.
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

/// `None` for what no header may hold, such as a line break in a token.
pub(super) fn secret(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}
