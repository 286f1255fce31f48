//! Requests and redirects.

use std::collections::HashMap;
use std::time::Duration;

use reqwest::header::{
    AUTHORIZATION, CONTENT_RANGE, CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION, RETRY_AFTER,
};
use reqwest::{Method, Response, Url, redirect};

use super::address::{self, PublicOnly};
use super::{HttpError, RegistryConfig, RegistryHost, tls};

/// Redirects followed for one request.
const MAX_REDIRECTS: usize = 5;

/// The longest pause accepted from a server's `Retry-After`.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(30);

/// `Authorization` headers by the origin that sees them ([`origin_of`]).
pub(crate) type Authorizations = HashMap<String, HeaderValue>;

/// Whether the server that sends us elsewhere is a public one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    public: bool,
    https: bool,
}

/// HTTP client for one host.
#[derive(Debug)]
pub(crate) struct Http {
    client: reqwest::Client,
    /// For addresses that a public server chose.
    public_client: reqwest::Client,
}

impl Http {
    /// Creates a client for `host[:port]`. Reads certificates: call it where blocking is allowed.
    pub(crate) fn new(
        host: &str,
        settings: &RegistryHost,
        config: &RegistryConfig,
    ) -> Result<Self, HttpError> {
        let tls = tls::config(settings)?;
        // As everywhere else, proxies are not used for this machine itself.
        let direct = address::is_loopback(host);
        let builder = || {
            let builder = reqwest::Client::builder()
                .tls_backend_preconfigured(tls.clone())
                .redirect(redirect::Policy::none())
                .connect_timeout(config.connect_timeout)
                .read_timeout(config.stall_timeout)
                .user_agent(concat!("podvisor/", env!("CARGO_PKG_VERSION")));
            if direct { builder.no_proxy() } else { builder }
        };
        let build = |builder: reqwest::ClientBuilder| builder.build().map_err(HttpError::Setup);
        Ok(Self {
            client: build(builder())?,
            public_client: build(builder().dns_resolver(PublicOnly))?,
        })
    }

    /// Gets a document, as [`Http::request`] does.
    pub(crate) async fn get(
        &self,
        start: &Url,
        headers: &HeaderMap,
        authorizations: &Authorizations,
    ) -> Result<Response, HttpError> {
        self.request(Method::GET, start, headers, authorizations)
            .await
    }

    /// Sends a request and follows redirects. Each origin sees its own authorization alone.
    pub(crate) async fn request(
        &self,
        method: Method,
        start: &Url,
        headers: &HeaderMap,
        authorizations: &Authorizations,
    ) -> Result<Response, HttpError> {
        self.follow(method, start.clone(), headers, authorizations, false)
            .await
    }

    /// `public_only`: a public server has named this address.
    async fn follow(
        &self,
        method: Method,
        mut url: Url,
        headers: &HeaderMap,
        authorizations: &Authorizations,
        mut public_only: bool,
    ) -> Result<Response, HttpError> {
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self
                .client(public_only)
                .request(method.clone(), url.clone())
                .headers(headers.clone());
            if let Some(authorization) = authorizations.get(&origin_of(&url)) {
                request = request.header(AUTHORIZATION, authorization);
            }
            let response = request.send().await?;
            // 304 is an answer and not a redirect.
            if !response.status().is_redirection() || response.status() == 304 {
                return Ok(response);
            }
            let next = target_of(&response, &url)?;
            public_only |= Origin::of(&response).public;
            check_target(
                &next,
                Origin {
                    public: public_only,
                    https: url.scheme() == "https",
                },
            )?;
            url = next;
        }
        Err(refused(&url, "too many redirects"))
    }

    /// Asks an address that a server named, as [`Http::get`] does; only that address's origin sees
    /// the authorization.
    pub(crate) async fn get_named(
        &self,
        url: Url,
        authorization: Option<HeaderValue>,
        from: Origin,
    ) -> Result<Response, HttpError> {
        check_target(&url, from)?;
        let authorizations = authorization.map(|header| (origin_of(&url), header));
        let authorizations = authorizations.into_iter().collect();
        let headers = HeaderMap::new();
        self.follow(Method::GET, url, &headers, &authorizations, from.public)
            .await
    }

    /// Sends a form with secrets to an address that a server named. Only redirects within that
    /// address's origin are followed, and only those that keep the method (307, 308).
    pub(crate) async fn post_form(
        &self,
        mut url: Url,
        form: String,
        from: Origin,
    ) -> Result<Response, HttpError> {
        check_target(&url, from)?;
        for _ in 0..=MAX_REDIRECTS {
            let request = self
                .client(from.public)
                .post(url.clone())
                .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
                .body(form.clone());
            let response = request.send().await?;
            if !matches!(response.status().as_u16(), 307 | 308) {
                return Ok(response);
            }
            let next = target_of(&response, &url)?;
            if next.origin() != url.origin() {
                return Err(refused(&next, "credentials are not sent to another server"));
            }
            url = next;
        }
        Err(refused(&url, "too many redirects"))
    }

    fn client(&self, public_only: bool) -> &reqwest::Client {
        if public_only {
            &self.public_client
        } else {
            &self.client
        }
    }
}

impl Origin {
    /// Returns the origin of an answer.
    pub(crate) fn of(response: &Response) -> Self {
        let public = response
            .remote_addr()
            .is_some_and(|address| address::is_public(address.ip()));
        Self {
            public,
            https: response.url().scheme() == "https",
        }
    }
}

/// The scheme, host and port of an address.
pub(crate) fn origin_of(url: &Url) -> String {
    url.origin().ascii_serialization()
}

/// Where the answer for `url` redirects to.
fn target_of(response: &Response, url: &Url) -> Result<Url, HttpError> {
    let target = response.headers().get(LOCATION);
    let target = target
        .and_then(|target| target.to_str().ok())
        .ok_or(HttpError::Protocol("a redirect to nowhere"))?;
    url.join(target)
        .map_err(|_| HttpError::Protocol("a redirect to no valid address"))
}

fn check_target(target: &Url, from: Origin) -> Result<(), HttpError> {
    let scheme = target.scheme();
    if scheme != "https" && (from.https || scheme != "http") {
        return Err(refused(target, "it is not HTTPS"));
    }
    let host = target.host_str().unwrap_or_default();
    let literal = address::host_name(host).parse().ok();
    if from.public && literal.is_some_and(|address| !address::is_public(address)) {
        return Err(refused(
            target,
            "a public server may not point to a private address",
        ));
    }
    Ok(())
}

fn refused(target: &Url, why: &'static str) -> HttpError {
    // Without its query, which may hold secrets.
    let target = format!(
        "{}://{}",
        target.scheme(),
        target.host_str().unwrap_or_default()
    );
    HttpError::Redirect { target, why }
}

/// Returns the pause before attempt number `attempt`, which starts at 2: doubling, or as the server
/// asks for.
pub(crate) fn pause(backoff: Duration, attempt: u32, asked: Option<Duration>) -> Duration {
    let doubled = backoff.saturating_mul(1 << attempt.saturating_sub(2).min(10));
    asked.unwrap_or(doubled).min(MAX_RETRY_AFTER)
}

/// Returns the pause that an answer asks for.
pub(crate) fn retry_after(response: &Response) -> Option<Duration> {
    let value = response.headers().get(RETRY_AFTER)?;
    value
        .to_str()
        .ok()?
        .trim()
        .parse()
        .ok()
        .map(Duration::from_secs)
}

/// Returns whether an answer to a range request starts at the requested byte.
pub(crate) fn resumes_at(response: &Response, from: u64) -> bool {
    let range = response
        .headers()
        .get(CONTENT_RANGE)
        .and_then(|value| value.to_str().ok());
    let first = range.and_then(|range| {
        range
            .strip_prefix("bytes ")?
            .split('-')
            .next()?
            .parse()
            .ok()
    });
    first == Some(from)
}
