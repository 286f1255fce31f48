//! A pull's view of a registry and its mirrors.

use std::collections::BTreeSet;
use std::time::Duration;

use reqwest::Response;
use reqwest::header::CONTENT_TYPE;

use super::endpoint::{Endpoint, host_of, real_host};
use super::{
    Credentials, Descriptor, Manifest, ManifestError, Parsed, RegistryError, docker_config,
};
use crate::http::{self, RegistryConfig};
use crate::{Digest, Limits, PullEvent, PullEvents, Reference};

/// The digest of what a registry answers with (distribution-spec, "Pulling manifests").
const CONTENT_DIGEST: &str = "docker-content-digest";

/// What a reference resolves to.
#[derive(Clone, Debug)]
pub(crate) struct Resolved {
    /// Digest of the answer to the reference itself: an index's or the manifest's.
    pub(crate) target: Digest,
    /// Indexes on the way, outermost first.
    pub(crate) indexes: Vec<(Digest, Vec<u8>)>,
    /// The image's manifest.
    pub(crate) digest: Digest,
    pub(crate) bytes: Vec<u8>,
    pub(crate) manifest: Manifest,
}

/// A manifest or index with its digest.
type Document = (Digest, Vec<u8>, Parsed);

/// Manifests and indexes that need not be fetched again.
pub(crate) struct Known<'a> {
    /// What the repository answered to earlier pulls. What other repositories have is not among it:
    /// who knows no more than its digest may not have it.
    pub(crate) answers: BTreeSet<Digest>,
    /// Reads and verifies what is here by a digest.
    pub(crate) read: &'a (dyn Fn(&Digest) -> Option<Vec<u8>> + Sync),
}

impl Known<'_> {
    fn document(&self, digest: Digest, content_type: &str, limits: &Limits) -> Option<Document> {
        let bytes = (self.read)(&digest)?;
        // A failure is told by what the registry sends.
        let parsed = Parsed::parse(&bytes, content_type, limits).ok()?;
        Some((digest, bytes, parsed))
    }
}

/// Fetches one image's parts.
#[derive(Debug)]
pub(crate) struct Client {
    /// Mirrors in order, the registry last.
    endpoints: Vec<Endpoint>,
    repository: String,
    /// The reference, for messages.
    name: String,
    limits: Limits,
    attempts: u32,
    backoff: Duration,
    events: Option<PullEvents>,
}

impl Client {
    /// Creates a client for `reference`. Reads certificates and Docker's configuration, and may run
    /// a credential helper: call it where blocking is allowed.
    pub(crate) fn new(
        reference: &Reference,
        config: &RegistryConfig,
        credentials: &Credentials,
        limits: &Limits,
        events: Option<PullEvents>,
    ) -> Result<Self, RegistryError> {
        let (registry, repository) = (reference.registry(), reference.repository());
        let settings = config.of(registry);
        let credentials = match credentials {
            Credentials::Auto => stored_credentials(config, registry, repository)?,
            other => other.clone(),
        };
        let real = real_host(registry);
        let mut endpoints = Vec::new();
        for mirror in &settings.mirrors {
            let host = host_of(&mirror.address);
            // A registry may be described as a mirror of itself.
            let credentials = match host == registry || host == real {
                true => credentials.clone(),
                false => stored_credentials(config, host, repository)?,
            };
            let own = config.of_mirror(mirror, host);
            let mut endpoint = Endpoint::new(&mirror.address, &own, config, credentials)?;
            endpoint.serve_for(registry, mirror.resolves_tags);
            endpoints.push(endpoint);
        }
        let address = settings.server.as_deref().unwrap_or(real);
        let mut endpoint = Endpoint::new(address, settings, config, credentials)?;
        endpoint.serve_for(registry, true);
        endpoint.call(registry);
        endpoints.push(endpoint);
        Ok(Self {
            endpoints,
            repository: repository.to_owned(),
            name: reference.to_string(),
            limits: limits.clone(),
            attempts: config.attempts.max(1),
            backoff: config.backoff,
            events,
        })
    }

    /// Finds the manifest for this machine. What the reference stands for, and whether we may have
    /// it, says the registry; what is known is not fetched again.
    pub(crate) async fn resolve(
        &self,
        reference: &Reference,
        known: &Known<'_>,
    ) -> Result<Resolved, RegistryError> {
        let digest = reference.digest().map(str::parse::<Digest>).transpose();
        let mut wanted = digest.map_err(RegistryError::ReferenceDigest)?;
        let tag = reference.tag().unwrap_or("latest");
        let mut indexes = Vec::new();
        let mut is_known = false;
        loop {
            let name = wanted.map_or_else(|| tag.to_owned(), |digest| digest.to_string());
            // An image of a known index came with it.
            let here = wanted.filter(|_| is_known);
            let here = here.and_then(|digest| known.document(digest, "", &self.limits));
            let found = match here {
                Some(found) => found,
                None => {
                    let known = indexes.is_empty().then_some(known);
                    let found;
                    (found, is_known) = self.fetch_manifest(&name, wanted, known).await?;
                    found
                }
            };
            let (digest, bytes, parsed) = found;
            match parsed {
                Parsed::Image(manifest) => {
                    let target = indexes.first().map_or(digest, |(digest, _)| *digest);
                    return Ok(Resolved {
                        target,
                        indexes,
                        digest,
                        bytes,
                        manifest,
                    });
                }
                Parsed::Index(entry) => {
                    let limit = self.limits.index_depth;
                    if indexes.len() >= limit {
                        return Err(self.unusable(ManifestError::IndexDepth { limit }));
                    }
                    indexes.push((digest, bytes));
                    wanted = Some(entry.digest);
                }
            }
        }
    }

    fn unusable(&self, source: ManifestError) -> RegistryError {
        RegistryError::Manifest {
            name: self.name.clone(),
            source,
        }
    }

    /// Fetches a manifest or index, unless it is `known`; returns whether it was. A source whose
    /// answer is of no use, such as the page of a proxy, is passed over.
    async fn fetch_manifest(
        &self,
        name: &str,
        wanted: Option<Digest>,
        known: Option<&Known<'_>>,
    ) -> Result<(Document, bool), RegistryError> {
        let mut tries = self.tries();
        loop {
            if wanted.is_none() && !tries.endpoint().resolves_tags() && tries.pass_over() {
                continue;
            }
            let endpoint = tries.endpoint();
            if let Some(known) = known
                && tries.is_first_attempt()
            {
                match self.find_known(endpoint, name, wanted, known).await {
                    Ok(Some(found)) => return Ok((found, true)),
                    Err(error @ RegistryError::Unreachable { .. }) => {
                        tries.after(error).await?;
                        continue;
                    }
                    // Some registries do not answer HEAD. What is wrong, GET tells in more words.
                    Ok(None) | Err(_) => {}
                }
            }
            match self.fetch_manifest_from(endpoint, name, wanted).await {
                Ok(found) => return Ok((found, false)),
                Err(error) if is_of_the_image(&error) => return Err(error),
                Err(error) => tries.after(error).await?,
            }
        }
    }

    /// Asks by HEAD what `name` stands for, which Docker Hub's limit does not count, and looks
    /// whether that is known.
    async fn find_known(
        &self,
        endpoint: &Endpoint,
        name: &str,
        wanted: Option<Digest>,
        known: &Known<'_>,
    ) -> Result<Option<Document>, RegistryError> {
        let may_be = wanted.map_or(!known.answers.is_empty(), |digest| {
            known.answers.contains(&digest)
        });
        if !may_be {
            return Ok(None);
        }
        let response = endpoint.head(&self.repository, name).await?;
        if response.status() != 200 {
            return Ok(None);
        }
        let digest = response.headers().get(CONTENT_DIGEST);
        let digest = digest.and_then(|digest| digest.to_str().ok()?.parse::<Digest>().ok());
        let digest = digest.filter(|digest| {
            known.answers.contains(digest) && wanted.is_none_or(|wanted| wanted == *digest)
        });
        let content_type = content_type_of(&response);
        Ok(digest.and_then(|digest| known.document(digest, content_type, &self.limits)))
    }

    async fn fetch_manifest_from(
        &self,
        endpoint: &Endpoint,
        name: &str,
        wanted: Option<Digest>,
    ) -> Result<Document, RegistryError> {
        let (digest, bytes, content_type) = self
            .fetch_document_from(endpoint, "manifests", name, wanted)
            .await?;
        let parsed = Parsed::parse(&bytes, &content_type, &self.limits)
            .map_err(|source| self.unusable(source))?;
        Ok((digest, bytes, parsed))
    }

    /// Fetches a manifest, or another `kind` of document of the repository that has the same form.
    pub(super) async fn fetch_document(
        &self,
        kind: &'static str,
        name: &str,
        wanted: Option<Digest>,
    ) -> Result<(Digest, Vec<u8>, String), RegistryError> {
        let mut tries = self.tries();
        loop {
            if wanted.is_none() && !tries.endpoint().resolves_tags() && tries.pass_over() {
                continue;
            }
            match self
                .fetch_document_from(tries.endpoint(), kind, name, wanted)
                .await
            {
                Ok(found) => return Ok(found),
                Err(error) => tries.after(error).await?,
            }
        }
    }

    async fn fetch_document_from(
        &self,
        endpoint: &Endpoint,
        kind: &'static str,
        name: &str,
        wanted: Option<Digest>,
    ) -> Result<(Digest, Vec<u8>, String), RegistryError> {
        let response = endpoint.get(&self.repository, kind, name, 0).await?;
        let response = endpoint.check_status(response, &self.name).await?;
        let content_type = content_type_of(&response).to_owned();
        let what = "the manifest";
        let bytes = endpoint
            .read_document(response, what, self.limits.manifest_bytes)
            .await?;
        let actual = Digest::of(&bytes);
        match wanted {
            Some(expected) if expected != actual => Err(RegistryError::Digest {
                host: endpoint.host().to_owned(),
                what,
                expected,
                actual,
            }),
            _ => Ok((actual, bytes, content_type)),
        }
    }

    /// Fetches a small blob into memory.
    pub(crate) async fn document(
        &self,
        descriptor: &Descriptor,
        what: &'static str,
        limit: u64,
    ) -> Result<Vec<u8>, RegistryError> {
        let mut tries = self.tries();
        loop {
            match self
                .document_from(tries.endpoint(), descriptor, what, limit)
                .await
            {
                Ok(bytes) => return Ok(bytes),
                Err(error) => tries.after(error).await?,
            }
        }
    }

    async fn document_from(
        &self,
        endpoint: &Endpoint,
        descriptor: &Descriptor,
        what: &'static str,
        limit: u64,
    ) -> Result<Vec<u8>, RegistryError> {
        let name = descriptor.digest.to_string();
        let response = endpoint.get(&self.repository, "blobs", &name, 0).await?;
        let response = endpoint.check_status(response, &self.name).await;
        let response = response.map_err(|error| error.of_blob(descriptor.digest))?;
        let bytes = endpoint.read_document(response, what, limit).await?;
        self.verify(endpoint, what, descriptor, bytes.len() as u64, || {
            Digest::of(&bytes)
        })?;
        Ok(bytes)
    }

    /// Checks a blob's size and then its digest.
    pub(super) fn verify(
        &self,
        endpoint: &Endpoint,
        what: &'static str,
        descriptor: &Descriptor,
        length: u64,
        digest: impl FnOnce() -> Digest,
    ) -> Result<(), RegistryError> {
        let host = endpoint.host().to_owned();
        let Descriptor {
            digest: expected,
            size,
            ..
        } = *descriptor;
        if length != size {
            return Err(RegistryError::Size {
                host,
                what,
                digest: expected,
                expected: size,
                actual: length,
            });
        }
        let actual = digest();
        if actual != expected {
            return Err(RegistryError::Digest {
                host,
                what,
                expected,
                actual,
            });
        }
        Ok(())
    }

    pub(super) fn repository(&self) -> &str {
        &self.repository
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Iterates over the mirrors and then the registry, each as often as allowed.
    pub(super) fn tries(&self) -> Attempts<'_> {
        let mut endpoints = self.endpoints.iter();
        let now = endpoints
            .find(|endpoint| !endpoint.is_left_out())
            .expect("the registry itself is never left out");
        Attempts {
            client: self,
            now,
            rest: endpoints,
            attempt: 1,
        }
    }

    pub(super) fn emit(&self, event: PullEvent) {
        if let Some(events) = &self.events {
            // A dropped receiver only means that the caller is no longer interested.
            let _ = events.send(event);
        }
    }
}

/// The state of a request: which source, and which attempt.
#[derive(Debug)]
pub(super) struct Attempts<'a> {
    client: &'a Client,
    now: &'a Endpoint,
    rest: std::slice::Iter<'a, Endpoint>,
    attempt: u32,
}

impl<'a> Attempts<'a> {
    /// Returns the source to ask now.
    pub(super) fn endpoint(&self) -> &'a Endpoint {
        self.now
    }

    /// Returns whether the source to ask now was not asked before.
    fn is_first_attempt(&self) -> bool {
        self.attempt == 1
    }

    /// Skips a source that does not serve this; returns false if it is the last.
    pub(super) fn pass_over(&mut self) -> bool {
        let next = self.rest.find(|endpoint| !endpoint.is_left_out());
        if let Some(next) = next {
            (self.now, self.attempt) = (next, 1);
        }
        next.is_some()
    }

    /// Counts the attempts at this source anew, since the last one was of use.
    pub(super) fn start_over(&mut self) {
        self.attempt = 1;
    }

    /// After a failure: moves on to the next attempt, after a pause, or the next source.
    ///
    /// # Errors
    /// The failure, if nothing is left to try.
    pub(super) async fn after(&mut self, error: RegistryError) -> Result<(), RegistryError> {
        // A source that was reached before is worth waiting for.
        let lost = matches!(error, RegistryError::Unreachable { .. }) && !self.now.has_answered();
        let hopeless = lost || !error.is_retryable();
        if !hopeless && self.attempt < self.client.attempts {
            self.attempt += 1;
            let attempt = self.attempt;
            self.client.emit(PullEvent::Retrying {
                reason: error.to_string(),
                attempt,
            });
            tokio::time::sleep(self.pause(&error)).await;
            return Ok(());
        }
        let failed = self.now;
        if !self.pass_over() {
            return Err(error);
        }
        if lost {
            failed.leave_out();
        }
        tracing::info!(mirror = failed.host(), %error, "mirror failed");
        Ok(())
    }

    fn pause(&self, error: &RegistryError) -> Duration {
        let asked = match error {
            RegistryError::Status { retry_after, .. } => *retry_after,
            _ => None,
        };
        http::pause(self.client.backoff, self.attempt, asked)
    }
}

/// The type that an answer has, without parameters.
fn content_type_of(response: &Response) -> &str {
    let value = response.headers().get(CONTENT_TYPE);
    let value = value.and_then(|value| value.to_str().ok());
    let value = value.unwrap_or_default();
    value.split_once(';').map_or(value, |(kind, _)| kind).trim()
}

/// Returns whether no other source can have something better: the image itself is not taken.
fn is_of_the_image(error: &RegistryError) -> bool {
    matches!(error, RegistryError::Manifest { source, .. } if !source.is_of_no_image())
}

fn stored_credentials(
    config: &RegistryConfig,
    host: &str,
    repository: &str,
) -> Result<Credentials, RegistryError> {
    for file in config.credential_files() {
        match docker_config::lookup(file, host, repository)? {
            Credentials::Anonymous => {}
            found => return Ok(found),
        }
    }
    Ok(Credentials::Anonymous)
}
