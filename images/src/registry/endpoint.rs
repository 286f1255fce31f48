//! One registry's endpoint: requests with its credentials, and reading of bounded answers.

use std::sync::atomic::{AtomicBool, Ordering};

use reqwest::header::{ACCEPT, HeaderMap, HeaderValue, RANGE, WWW_AUTHENTICATE};
use reqwest::{Method, Response, Url};
use tokio::sync::Mutex;

use super::auth::{self, Answer, TOKEN_BYTES, TokenRequest};
use super::challenge::Challenge;
use super::{Credentials, RegistryError};
use crate::http::{
    self, Authorizations, Http, HttpError, Origin, RegistryConfig, RegistryHost, RegistryProtocol,
};

/// Challenges answered for one request: the registry's own, and those of servers that it redirects
/// to.
const MAX_CHALLENGES: usize = 3;

/// A registry or mirror.
#[derive(Debug)]
pub(super) struct Endpoint {
    host: String,
    base: Url,
    /// Set for another host than the registry's: whose content is asked for.
    namespace: Option<String>,
    resolves_tags: bool,
    http: Http,
    credentials: Credentials,
    /// The registry's own, and anonymous tokens of those that it redirects to.
    authorizations: Mutex<Authorizations>,
    answered: AtomicBool,
    left_out: AtomicBool,
}

/// Returns the host, with its port, of an address that may have a path.
pub(super) fn host_of(address: &str) -> &str {
    address.split('/').next().unwrap_or(address)
}

/// The host that serves the content of a registry of this name.
pub(super) fn real_host(registry: &str) -> &str {
    match registry {
        "docker.io" => "registry-1.docker.io",
        registry => registry,
    }
}

impl Endpoint {
    /// `address` is `HOST[:PORT]`, optionally with the path of the API, which is `/v2` otherwise.
    pub(super) fn new(
        address: &str,
        settings: &RegistryHost,
        config: &RegistryConfig,
        credentials: Credentials,
    ) -> Result<Self, RegistryError> {
        let host = host_of(address);
        let plain = match settings.protocol {
            RegistryProtocol::Auto => http::is_loopback(host),
            RegistryProtocol::Https => false,
            RegistryProtocol::Http => true,
        };
        let scheme = if plain { "http" } else { "https" };
        let path = address.strip_prefix(host).filter(|path| !path.is_empty());
        let root = format!("{scheme}://{host}{}", path.unwrap_or("/v2"));
        let base = Url::parse(&root).map_err(|_| RegistryError::Protocol {
            host: host.to_owned(),
            what: "nothing: its name is not that of a host".to_owned(),
        })?;
        let http = Http::new(host, settings, config).map_err(|error| failed(host, error))?;
        let initial = credentials.initial_header();
        let authorizations = initial.map(|header| (http::origin_of(&base), header));
        Ok(Self {
            host: host.to_owned(),
            base,
            namespace: None,
            resolves_tags: true,
            http,
            authorizations: Mutex::new(authorizations.into_iter().collect()),
            credentials,
            answered: AtomicBool::new(false),
            left_out: AtomicBool::new(false),
        })
    }

    /// Has it serve the content of `registry`. Another host than the registry's own is told whose
    /// content it is.
    pub(super) fn serve_for(&mut self, registry: &str, resolves_tags: bool) {
        let own = self.host == registry || self.host == real_host(registry);
        self.namespace = (!own).then(|| registry.to_owned());
        self.resolves_tags = resolves_tags;
    }

    /// Sets its name in messages.
    pub(super) fn call(&mut self, name: &str) {
        name.clone_into(&mut self.host);
    }

    /// Returns whether it may resolve tags.
    pub(super) fn resolves_tags(&self) -> bool {
        self.resolves_tags
    }

    /// Returns whether it has answered any request, so that it is worth waiting for.
    pub(super) fn has_answered(&self) -> bool {
        self.answered.load(Ordering::Relaxed)
    }

    /// Excludes it from all other requests.
    pub(super) fn leave_out(&self) {
        self.left_out.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_left_out(&self) -> bool {
        self.left_out.load(Ordering::Relaxed)
    }

    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// An answer that breaks the protocol.
    pub(super) fn fault(&self, what: &str) -> RegistryError {
        RegistryError::Protocol {
            host: self.host.clone(),
            what: what.to_owned(),
        }
    }

    /// Gets `repository/kind/name`, as [`Endpoint::request`] does.
    pub(super) async fn get(
        &self,
        repository: &str,
        kind: &str,
        name: &str,
        from: u64,
    ) -> Result<Response, RegistryError> {
        self.request(Method::GET, repository, kind, name, from)
            .await
    }

    /// Asks for what the answer to [`Endpoint::get`] would say of a manifest.
    pub(super) async fn head(
        &self,
        repository: &str,
        name: &str,
    ) -> Result<Response, RegistryError> {
        self.request(Method::HEAD, repository, "manifests", name, 0)
            .await
    }

    /// Asks for `repository/kind/name`, authenticating when the registry wants it. A server that it
    /// redirects to gets the token that anybody gets, never the registry's credentials.
    async fn request(
        &self,
        method: Method,
        repository: &str,
        kind: &str,
        name: &str,
        from: u64,
    ) -> Result<Response, RegistryError> {
        let mut url = self.base.clone();
        url.set_path(&format!("{}/{repository}/{kind}/{name}", self.base.path()));
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
        let own = http::origin_of(&url);
        let mut used = self.authorizations.lock().await.clone();
        let mut response = self.send(&method, &url, &headers, &used).await?;
        let mut answered = Vec::new();
        while response.status() == 401 && answered.len() < MAX_CHALLENGES {
            let origin = http::origin_of(response.url());
            let Some(challenge) = challenge_of(&response) else {
                break;
            };
            if answered.contains(&origin) {
                break;
            }
            let mut authorizations = self.authorizations.lock().await;
            // Another request of this pull may have got a new token meanwhile.
            if authorizations.get(&origin) == used.get(&origin) {
                let header = if origin == own {
                    let from = Origin::of(&response);
                    self.authorize(&self.credentials, &challenge, from, repository)
                        .await?
                } else {
                    self.answer_anonymously(&response, &challenge, repository)
                        .await?
                };
                let Some(header) = header else {
                    break;
                };
                authorizations.insert(origin.clone(), header);
            }
            used.clone_from(&authorizations);
            drop(authorizations);
            answered.push(origin);
            response = self.send(&method, &url, &headers, &used).await?;
        }
        Ok(response)
    }

    /// Answers the challenge of a server that this one has redirected to.
    async fn answer_anonymously(
        &self,
        response: &Response,
        challenge: &Challenge,
        repository: &str,
    ) -> Result<Option<HeaderValue>, RegistryError> {
        let from = Origin::of(response);
        // The repository may have another name there.
        let repository = repository_of(response.url().path()).unwrap_or(repository);
        self.authorize(&Credentials::Anonymous, challenge, from, repository)
            .await
    }

    /// Answers a challenge: returns the header for the next try, or `None` if there is nothing to
    /// try.
    async fn authorize(
        &self,
        credentials: &Credentials,
        challenge: &Challenge,
        from: Origin,
        repository: &str,
    ) -> Result<Option<HeaderValue>, RegistryError> {
        let answer = auth::answer(credentials, challenge, repository);
        let TokenRequest { url, form } = match answer.map_err(|what| self.fault(what))? {
            Answer::Header(header) => return Ok(header),
            Answer::Token(request) => request,
        };
        let response = match form {
            Some(form) => self.http.post_form(url, form, from).await,
            None => self.http.get_named(url, credentials.basic(), from).await,
        };
        let response = response.map_err(|error| failed(&self.host, error))?;
        if response.status().is_client_error() && response.status().as_u16() != 429 {
            return Ok(None);
        }
        let response = self.check_status(response, "a token").await?;
        let body = self.read_document(response, "a token", TOKEN_BYTES).await?;
        let header = auth::header(&body).map_err(|what| self.fault(what))?;
        Ok(Some(header))
    }

    async fn send(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        authorizations: &Authorizations,
    ) -> Result<Response, RegistryError> {
        let method = method.clone();
        let response = self
            .http
            .request(method, url, headers, authorizations)
            .await;
        let response = response.map_err(|error| failed(&self.host, error))?;
        self.answered.store(true, Ordering::Relaxed);
        Ok(response)
    }

    /// Turns an unsuccessful answer into an error; `name` says what was requested.
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
                let retry_after = http::retry_after(&response);
                // The server's message, if any, is only read in part; the status would be enough.
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

    /// Classifies a connection error.
    pub(super) fn failed(&self, error: reqwest::Error) -> RegistryError {
        failed(&self.host, error.into())
    }
}

/// Adds the registry's name to an error.
fn failed(host: &str, error: HttpError) -> RegistryError {
    let host = host.to_owned();
    match error {
        HttpError::Unreachable(source) => RegistryError::Unreachable { host, source },
        HttpError::Tls(source) => RegistryError::Tls { host, source },
        HttpError::Transfer(source) => RegistryError::Transfer { host, source },
        HttpError::Protocol(what) => RegistryError::Protocol {
            host,
            what: what.to_owned(),
        },
        HttpError::Redirect { target, why } => RegistryError::Redirect { host, target, why },
        HttpError::Certificate { path, source } => RegistryError::Certificate { path, source },
        HttpError::Setup(source) => RegistryError::Setup(source),
    }
}

/// The repository in the path of a manifest or blob.
fn repository_of(path: &str) -> Option<&str> {
    let (_, rest) = path.split_once("/v2/")?;
    let end = rest
        .rfind("/manifests/")
        .or_else(|| rest.rfind("/blobs/"))?;
    rest.get(..end)
}

fn challenge_of(response: &Response) -> Option<Challenge> {
    let headers = response.headers().get_all(WWW_AUTHENTICATE).iter();
    let mut found: Vec<_> = headers
        .filter_map(|header| Challenge::parse(header.to_str().ok()?))
        .collect();
    found.sort_by_key(|challenge| matches!(challenge, Challenge::Basic));
    found.into_iter().next()
}

/// Returns the first message of a registry's error document, printable and short.
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
