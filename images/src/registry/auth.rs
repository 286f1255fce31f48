//! Authentication (Docker registry v2 token authentication; RFC 7617; RFC 6750).

use reqwest::Url;
use reqwest::header::HeaderValue;
use serde::Deserialize;

use super::RegistryError;
use super::challenge::Challenge;
use super::credentials::{Credentials, secret};
use super::endpoint::Endpoint;
use crate::http::Origin;

/// Bytes of a token server's answer.
const TOKEN_BYTES: u64 = 1 << 20;

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

/// Answers a challenge: returns the header for the next try, or `None` if there is nothing to try.
pub(super) async fn answer(
    endpoint: &Endpoint,
    credentials: &Credentials,
    challenge: &Challenge,
    from: Origin,
    repository: &str,
) -> Result<Option<HeaderValue>, RegistryError> {
    let (realm, service, scope) = match challenge {
        Challenge::Basic => return Ok(credentials.basic()),
        Challenge::Bearer { .. } if matches!(credentials, Credentials::RegistryToken(_)) => {
            return Ok(None);
        }
        Challenge::Bearer {
            realm,
            service,
            scope,
        } => (realm, service, scope),
    };
    let mut url =
        Url::parse(realm).map_err(|_| endpoint.fault("a token server without a valid address"))?;
    let scope = scope
        .clone()
        .unwrap_or_else(|| format!("repository:{repository}:pull"));
    let mut query = vec![("scope", scope.as_str())];
    query.extend(service.iter().map(|service| ("service", service.as_str())));
    let response = if let Credentials::IdentityToken(token) = credentials {
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
        endpoint
            .post_form(url, form.unwrap_or_default(), from)
            .await?
    } else {
        url.query_pairs_mut().extend_pairs(&query);
        endpoint.get_token(url, credentials.basic(), from).await?
    };
    if response.status().is_client_error() && response.status().as_u16() != 429 {
        return Ok(None);
    }
    let response = endpoint.check_status(response, "a token").await?;
    let body = endpoint
        .read_document(response, "a token", TOKEN_BYTES)
        .await?;
    let token: Token = serde_json::from_slice(&body)
        .map_err(|_| endpoint.fault("a token that is not valid JSON"))?;
    let token = token
        .token
        .or(token.access_token)
        .ok_or_else(|| endpoint.fault("no token"))?;
    let header = secret(&format!("Bearer {token}"));
    header
        .map(Some)
        .ok_or_else(|| endpoint.fault("a token that no header can hold"))
}
