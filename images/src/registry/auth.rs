//! Authentication (Docker registry v2 token authentication; RFC 7617; RFC 6750): what to ask a token
//! server for, and what its answer means. The endpoint sends the requests.

use reqwest::Url;
use reqwest::header::HeaderValue;
use serde::Deserialize;

use super::challenge::Challenge;
use super::credentials::{Credentials, secret};

/// Bytes of a token server's answer.
pub(super) const TOKEN_BYTES: u64 = 1 << 20;

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

/// What a challenge is answered by.
#[derive(Debug)]
pub(super) enum Answer {
    /// A header of the next try; `None` if there is nothing to try.
    Header(Option<HeaderValue>),
    /// A token, which a server has.
    Token(TokenRequest),
}

/// A request to a token server.
#[derive(Debug)]
pub(super) struct TokenRequest {
    pub(super) url: Url,
    /// OAuth 2's form, which is posted.
    pub(super) form: Option<String>,
}

/// Returns what to do about a challenge.
///
/// # Errors
/// What is wrong with it.
pub(super) fn answer(
    credentials: &Credentials,
    challenge: &Challenge,
    repository: &str,
) -> Result<Answer, &'static str> {
    let (realm, service, scope) = match challenge {
        Challenge::Basic => return Ok(Answer::Header(credentials.basic())),
        Challenge::Bearer { .. } if matches!(credentials, Credentials::RegistryToken(_)) => {
            return Ok(Answer::Header(None));
        }
        Challenge::Bearer {
            realm,
            service,
            scope,
        } => (realm, service, scope),
    };
    let mut url = Url::parse(realm).map_err(|_| "a token server without a valid address")?;
    let scope = scope
        .clone()
        .unwrap_or_else(|| format!("repository:{repository}:pull"));
    let mut query = vec![("scope", scope.as_str())];
    query.extend(service.iter().map(|service| ("service", service.as_str())));
    let form = if let Credentials::IdentityToken(token) = credentials {
        query.extend([
            ("grant_type", "refresh_token"),
            ("client_id", "podvisor"),
            ("refresh_token", token.as_str()),
        ]);
        let form = url
            .clone()
            .query_pairs_mut()
            .clear()
            .extend_pairs(&query)
            .finish()
            .query()
            .map(str::to_owned);
        Some(form.unwrap_or_default())
    } else {
        url.query_pairs_mut().extend_pairs(&query);
        None
    };
    Ok(Answer::Token(TokenRequest { url, form }))
}

/// Returns the header for a token server's answer.
///
/// # Errors
/// What was answered instead of a token.
pub(super) fn header(body: &[u8]) -> Result<HeaderValue, &'static str> {
    let token: Token =
        serde_json::from_slice(body).map_err(|_| "a token that is not valid JSON")?;
    let token = token.token.or(token.access_token).ok_or("no token")?;
    secret(&format!("Bearer {token}")).ok_or("a token that no header can hold")
}
