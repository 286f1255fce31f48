//! One host's HTTP: requests, redirects and the reading of bounded answers.

use std::time::Duration;

use reqwest::header::{
    ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION, RANGE, RETRY_AFTER,
    WWW_AUTHENTICATE,
};
use reqwest::{Response, Url, redirect};
use tokio::sync::Mutex;

use super::address::{self, PublicOnly};
use super::challenge::Challenge;
use super::{Credentials, Host, Protocol, RegistryConfig, RegistryError, auth, tls};

/// Redirects followed for one request.
const HOPS: usize = 5;

/// Whether the server that sends us elsewhere is a public one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    public: bool,
    https: bool,
}

/// A registry or mirror.
#[derive(Debug)]
pub(super) struct Endpoint {
    host: String,
    base: Url,
    /// Set for a mirror: whose content is asked for.
    namespace: Option<String>,
    client: reqwest::Client,
    /// For addresses that a public server chose.
    public_client: reqwest::Client,
    credentials: Credentials,
    authorization: Mutex<Option<HeaderValue>>,
}

impl Endpoint {
    pub(super) fn new(
        host: &str,
        mirror_of: Option<&str>,
        config: &RegistryConfig,
        credentials: Credentials,
    ) -> Result<Self, RegistryError> {
        let default = Host::default();
        let settings = config.hosts.get(host).unwrap_or(&default);
        let plain = match settings.protocol {
            Protocol::Auto => address::is_loopback(host),
            Protocol::Https => false,
            Protocol::Http => true,
        };
        let server = if host == "docker.io" {
            "registry-1.docker.io"
        } else {
            host
        };
        let scheme = if plain { "http" } else { "https" };
        let base = Url::parse(&format!("{scheme}://{server}/v2/")).map_err(|_| {
            RegistryError::Protocol {
                host: host.to_owned(),
                what: "nothing: its name is not that of a host".to_owned(),
            }
        })?;
        let tls = tls::config(settings)?;
        // As everywhere else, proxies are not for this machine itself.
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
        let build = |builder: reqwest::ClientBuilder| builder.build().map_err(RegistryError::Setup);
        Ok(Self {
            host: host.to_owned(),
            base,
            namespace: mirror_of.map(str::to_owned),
            client: build(builder())?,
            public_client: build(builder().dns_resolver(PublicOnly))?,
            authorization: Mutex::new(credentials.initial_header()),
            credentials,
        })
    }

    pub(super) fn host(&self) -> &str {
        &self.host
    }

    pub(super) fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// An answer that breaks the protocol.
    pub(super) fn fault(&self, what: &str) -> RegistryError {
        RegistryError::Protocol {
            host: self.host.clone(),
            what: what.to_owned(),
        }
    }

    /// Asks for `repository/kind/name`, authenticating when the registry wants it.
    pub(super) async fn get(
        &self,
        repository: &str,
        kind: &str,
        name: &str,
        from: u64,
    ) -> Result<Response, RegistryError> {
        let mut url = self.base.clone();
        url.set_path(&format!("/v2/{repository}/{kind}/{name}"));
        if let Some(namespace) = &self.namespace {
            url.query_pairs_mut().append_pair("ns", namespace);
        }
        let mut headers = HeaderMap::new();
        if kind == "manifests" {
            headers.insert(ACCEPT, HeaderValue::from_static(super::manifest::ACCEPT));
        }
        if from > 0 {
            headers.insert(
                RANGE,
                HeaderValue::try_from(format!("bytes={from}-"))
                    .unwrap_or(HeaderValue::from_static("bytes=0-")),
            );
        }
        let used = self.authorization.lock().await.clone();
        let response = self.follow(url.clone(), &headers, used.as_ref()).await?;
        if response.status() != 401 {
            return Ok(response);
        }
        let Some(challenge) = challenge_of(&response) else {
            return Ok(response);
        };
        let origin = self.origin_of(&response);
        let mut authorization = self.authorization.lock().await;
        // Another request of this pull may have got a new token meanwhile.
        if *authorization == used {
            let Some(header) = auth::answer(self, &challenge, origin, repository).await? else {
                return Ok(response);
            };
            *authorization = Some(header);
        }
        let header = authorization.clone();
        drop(authorization);
        self.follow(url, &headers, header.as_ref()).await
    }

    /// Sends a request and follows redirects; only the registry itself sees the credentials.
    async fn follow(
        &self,
        start: Url,
        headers: &HeaderMap,
        authorization: Option<&HeaderValue>,
    ) -> Result<Response, RegistryError> {
        let mut url = start;
        let mut public_only = false;
        for _ in 0..=HOPS {
            let client = if public_only {
                &self.public_client
            } else {
                &self.client
            };
            let mut request = client.get(url.clone()).headers(headers.clone());
            if url.origin() == self.base.origin()
                && let Some(authorization) = authorization
            {
                request = request.header(AUTHORIZATION, authorization);
            }
            let response = request.send().await.map_err(|error| self.failed(error))?;
            if !response.status().is_redirection() {
                return Ok(response);
            }
            let target = response
                .headers()
                .get(LOCATION)
                .and_then(|target| target.to_str().ok());
            let target = target.ok_or_else(|| self.fault("a redirect to nowhere"))?;
            let next = url
                .join(target)
                .map_err(|_| self.fault("a redirect to no valid address"))?;
            let origin = self.origin_of(&response);
            public_only |= origin.public;
            self.check_target(
                &next,
                Origin {
                    public: public_only,
                    https: url.scheme() == "https",
                },
            )?;
            url = next;
        }
        Err(self.refused(&url, "too many redirects"))
    }

    /// Asks a token server that a challenge named.
    pub(super) async fn get_token(
        &self,
        url: Url,
        authorization: Option<HeaderValue>,
        from: Origin,
    ) -> Result<Response, RegistryError> {
        self.check_target(&url, from)?;
        let client = if from.public {
            &self.public_client
        } else {
            &self.client
        };
        let mut request = client.get(url);
        if let Some(authorization) = authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        request.send().await.map_err(|error| self.failed(error))
    }

    /// As [`Endpoint::get_token`], by OAuth 2's form.
    pub(super) async fn post_form(
        &self,
        url: Url,
        form: String,
        from: Origin,
    ) -> Result<Response, RegistryError> {
        self.check_target(&url, from)?;
        let client = if from.public {
            &self.public_client
        } else {
            &self.client
        };
        let request = client
            .post(url)
            .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
            .body(form);
        request.send().await.map_err(|error| self.failed(error))
    }

    fn check_target(&self, target: &Url, from: Origin) -> Result<(), RegistryError> {
        let scheme = target.scheme();
        if scheme != "https" && (from.https || scheme != "http") {
            return Err(self.refused(target, "it is not HTTPS"));
        }
        let host = target.host_str().unwrap_or_default();
        let literal = address::host_name(host).parse().ok();
        if from.public && literal.is_some_and(|address| !address::is_public(address)) {
            return Err(self.refused(
                target,
                "a public registry may not point to a private address",
            ));
        }
        Ok(())
    }

    fn refused(&self, target: &Url, why: &'static str) -> RegistryError {
        // Without its query, which may hold secrets.
        let target = format!(
            "{}://{}",
            target.scheme(),
            target.host_str().unwrap_or_default()
        );
        RegistryError::Redirect {
            host: self.host.clone(),
            target,
            why,
        }
    }

    fn origin_of(&self, response: &Response) -> Origin {
        let public = response
            .remote_addr()
            .is_some_and(|address| address::is_public(address.ip()));
        Origin {
            public,
            https: response.url().scheme() == "https",
        }
    }

    /// Turns an answer that is none into an error; `name` says what was asked for.
    pub(super) async fn check_status(
        &self,
        response: Response,
        name: &str,
    ) -> Result<Response, RegistryError> {
        let status = response.status();
        let (host, name) = (self.host.clone(), name.to_owned());
        match status.as_u16() {
            200..=299 => Ok(response),
            401 | 403 => Err(RegistryError::Unauthorized { host, name }),
            404 => Err(RegistryError::NotFound { host, name }),
            code => {
                let retry_after = response
                    .headers()
                    .get(RETRY_AFTER)
                    .and_then(|value| value.to_str().ok()?.trim().parse().ok())
                    .map(Duration::from_secs);
                // Whatever the server has to say, in part; the status alone would do.
                let body = self
                    .read_document(response, "an error", 64 << 10)
                    .await
                    .unwrap_or_default();
                let message =
                    error_message(&body).map_or_else(String::new, |text| format!(": {text}"));
                Err(RegistryError::Status {
                    host,
                    name,
                    status: code,
                    message,
                    retry_after,
                })
            }
        }
    }

    /// Reads a small answer, never more than `limit` bytes of it.
    pub(super) async fn read_document(
        &self,
        mut response: Response,
        what: &'static str,
        limit: u64,
    ) -> Result<Vec<u8>, RegistryError> {
        let too_large = || RegistryError::TooLarge {
            host: self.host.clone(),
            what,
            limit,
        };
        if response
            .content_length()
            .is_some_and(|length| length > limit)
        {
            return Err(too_large());
        }
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.failed(error))? {
            if (body.len() + chunk.len()) as u64 > limit {
                return Err(too_large());
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }

    /// Sorts out what went wrong with a connection.
    pub(super) fn failed(&self, error: reqwest::Error) -> RegistryError {
        let host = self.host.clone();
        let tls = is_tls(&error);
        let connecting = error.is_connect();
        // Addresses may carry tokens.
        let source = error.without_url();
        match () {
            () if tls => RegistryError::Tls { host, source },
            () if connecting => RegistryError::Unreachable { host, source },
            () => RegistryError::Transfer { host, source },
        }
    }
}

fn challenge_of(response: &Response) -> Option<Challenge> {
    let headers = response.headers().get_all(WWW_AUTHENTICATE).iter();
    let mut found: Vec<_> = headers
        .filter_map(|header| Challenge::parse(header.to_str().ok()?))
        .collect();
    found.sort_by_key(|challenge| matches!(challenge, Challenge::Basic));
    found.into_iter().next()
}

fn is_tls(error: &reqwest::Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        // An I/O error hides what it was made from.
        let inner = error
            .downcast_ref::<std::io::Error>()
            .and_then(std::io::Error::get_ref);
        if error.is::<rustls::Error>() || inner.is_some_and(|inner| inner.is::<rustls::Error>()) {
            return true;
        }
        cause = match inner {
            Some(inner) => Some(inner as &(dyn std::error::Error + 'static)),
            None => error.source(),
        };
    }
    false
}

/// The first message of a registry's error document, printable and short.
fn error_message(body: &[u8]) -> Option<String> {
    let document: serde_json::Value = serde_json::from_slice(body).ok()?;
    let message = document.get("errors")?.get(0)?.get("message")?.as_str()?;
    Some(
        message
            .chars()
            .filter(|c| !c.is_control())
            .take(200)
            .collect(),
    )
}
