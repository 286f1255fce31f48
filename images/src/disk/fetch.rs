//! Fetching of a disk image's file by HTTP: converted as it arrives, and resumed after an
//! interruption.

use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use reqwest::header::{
    CONTENT_RANGE, ETAG, HeaderMap, HeaderName, HeaderValue, IF_MODIFIED_SINCE, IF_NONE_MATCH,
    IF_RANGE, LAST_MODIFIED, RANGE, TRANSFER_ENCODING,
};
use reqwest::{Response, StatusCode, Version};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, spawn_blocking};

use super::convert::Failure;
use super::{Checksum, ConvertError, Converted, DiskError, Job, Source, convert};
use crate::http::{self, Authorizations, Http, HttpError, RegistryConfig};
use crate::{Limits, PullEvent, PullEvents};

/// Progress is reported in steps of this many bytes, and a request that transfers as many resets
/// the count of attempts.
const PROGRESS_STEP: u64 = 1 << 20;
/// Pieces queued between the network and the conversion.
const QUEUE: usize = 32;

/// What a server sends to detect whether a file has changed (RFC 9110 §8.8).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Validators {
    #[serde(default)]
    etag: Option<String>,
    #[serde(default)]
    last_modified: Option<String>,
}

impl Validators {
    fn of(headers: &HeaderMap) -> Self {
        let text = |name| headers.get(name)?.to_str().ok().map(str::to_owned);
        Self {
            etag: text(ETAG),
            last_modified: text(LAST_MODIFIED),
        }
    }

    /// Returns what `If-Range` may contain: a weak tag is not sufficient.
    fn strong(&self) -> Option<&str> {
        let etag = self.etag.as_deref().filter(|tag| !tag.starts_with("W/"));
        etag.or(self.last_modified.as_deref())
    }
}

/// The result of a fetch.
#[derive(Debug)]
pub(crate) enum Fetched {
    /// The file is the one that the validators belong to; nothing was written.
    NotModified,
    /// The disk is in the output. Nothing is synced to the disk.
    File(Converted, Validators),
}

/// Why a fetch failed.
#[derive(Debug)]
pub(crate) enum FetchError {
    Disk(DiskError),
    Write(io::Error),
}

impl From<DiskError> for FetchError {
    fn from(error: DiskError) -> Self {
        Self::Disk(error)
    }
}

/// Fetches one file.
#[derive(Debug)]
pub(crate) struct Fetcher {
    source: Source,
    checksum: Option<Checksum>,
    http: Http,
    limits: Limits,
    attempts: u32,
    backoff: Duration,
    events: Option<PullEvents>,
}

impl Fetcher {
    /// Creates a fetcher for `source`. Reads certificates: call it where blocking is allowed.
    pub(crate) fn new(
        source: Source,
        checksum: Option<Checksum>,
        config: &RegistryConfig,
        limits: &Limits,
        events: Option<PullEvents>,
    ) -> Result<Self, DiskError> {
        source.check_protocol(config, checksum.is_some())?;
        let host = source.host();
        let http =
            Http::new(&host, config.of(&host), config).map_err(|error| failed(&host, error))?;
        Ok(Self {
            source,
            checksum,
            http,
            limits: limits.clone(),
            attempts: config.attempts.max(1),
            backoff: config.backoff,
            events,
        })
    }

    /// Fetches the file, unless it still is the one of `known`, and writes its disk into `out`.
    /// When it returns, nothing is being written any longer.
    pub(crate) async fn fetch(
        &self,
        known: Option<&Validators>,
        out: &File,
    ) -> Result<Fetched, FetchError> {
        let mut transfer = Transfer {
            fetcher: self,
            out,
            sink: None,
            validators: Validators::default(),
            total: None,
            done: 0,
        };
        match self.transfer(&mut transfer, known).await {
            Ok(Step::NotModified) => Ok(Fetched::NotModified),
            Ok(Step::Ended) => transfer.finish().await,
            Err(error) => {
                transfer.abandon().await;
                Err(error)
            }
        }
    }

    /// Sends as many requests as necessary.
    async fn transfer(
        &self,
        transfer: &mut Transfer<'_>,
        known: Option<&Validators>,
    ) -> Result<Step, FetchError> {
        let mut attempt = 1;
        loop {
            let before = transfer.done;
            let error = match transfer.run(known).await {
                Err(FetchError::Disk(error)) if error.is_retryable() => error,
                outcome => return outcome,
            };
            if transfer.done >= before.saturating_add(PROGRESS_STEP) {
                attempt = 1;
            }
            let hopeless = matches!(error, DiskError::Unreachable { .. }) && transfer.done == 0;
            if hopeless || attempt >= self.attempts {
                return Err(error.into());
            }
            attempt += 1;
            self.emit(PullEvent::Retrying {
                reason: error.to_string(),
                attempt,
            });
            let asked = match error {
                DiskError::Status { retry_after, .. } => retry_after,
                _ => None,
            };
            tokio::time::sleep(http::pause(self.backoff, attempt, asked)).await;
        }
    }

    fn failed(&self, error: impl Into<HttpError>) -> DiskError {
        failed(&self.source.host(), error.into())
    }

    fn protocol(&self, what: &'static str) -> DiskError {
        self.failed(HttpError::Protocol(what))
    }

    fn check_status(&self, response: &Response) -> Result<(), DiskError> {
        let url = self.source.shown();
        match response.status().as_u16() {
            200 | 206 | 304 => Ok(()),
            401 | 403 => Err(DiskError::Unauthorized { url }),
            404 | 410 => Err(DiskError::NotFound { url }),
            status => Err(DiskError::Status {
                url,
                status,
                retry_after: http::retry_after(response),
            }),
        }
    }

    fn emit(&self, event: PullEvent) {
        if let Some(events) = &self.events {
            // A dropped receiver only means that the caller is no longer interested.
            let _ = events.send(event);
        }
    }
}

enum Step {
    NotModified,
    /// The file is complete, or the conversion needs no more of it.
    Ended,
}

/// A file in transfer, over as many requests as necessary.
struct Transfer<'a> {
    fetcher: &'a Fetcher,
    out: &'a File,
    sink: Option<Sink>,
    validators: Validators,
    total: Option<u64>,
    done: u64,
}

impl Transfer<'_> {
    /// Transfers as much of the file as one request gives.
    async fn run(&mut self, known: Option<&Validators>) -> Result<Step, FetchError> {
        let fetcher = self.fetcher;
        let url = fetcher.source.url();
        let own = fetcher.source.authorization().cloned();
        let own = own.map(|header| (http::origin_of(url), header));
        let authorizations: Authorizations = own.into_iter().collect();
        let mut response = loop {
            let headers = self.headers(known);
            let response = fetcher.http.get(url, &headers, &authorizations).await;
            let response = response.map_err(|error| fetcher.failed(error))?;
            if response.status() != StatusCode::RANGE_NOT_SATISFIABLE || self.done == 0 {
                break response;
            }
            // The file is shorter now, so it is a different one.
            self.done = 0;
        };
        fetcher.check_status(&response)?;
        match response.status() {
            StatusCode::NOT_MODIFIED if self.done == 0 && known.is_some() => {
                return Ok(Step::NotModified);
            }
            StatusCode::PARTIAL_CONTENT if self.done > 0 => self.check_part(&response)?,
            StatusCode::OK => self.begin(&response).await?,
            _ => return Err(fetcher.protocol("a status that was not asked for").into()),
        }
        loop {
            let chunk = response.chunk().await;
            let Some(chunk) = chunk.map_err(|error| fetcher.failed(error))? else {
                break;
            };
            let before = self.done;
            self.done += chunk.len() as u64;
            let Some(sink) = &self.sink else { break };
            if sink
                .pieces
                .send(FetchedPiece::Bytes(chunk.into()))
                .await
                .is_err()
            {
                return Ok(Step::Ended);
            }
            if before / PROGRESS_STEP != self.done / PROGRESS_STEP || Some(self.done) == self.total
            {
                fetcher.emit(PullEvent::DiskBytes {
                    done: self.done,
                    total: self.total,
                });
            }
        }
        Ok(Step::Ended)
    }

    fn headers(&mut self, known: Option<&Validators>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let mut put = |name: HeaderName, value: &str| {
            // A value that came in a header can be sent in one.
            let value = HeaderValue::from_str(value).ok();
            value.and_then(|value| headers.insert(name, value));
        };
        let strong = self.validators.strong();
        if strong.is_none() && self.fetcher.checksum.is_none() {
            // Without a validator nothing would show whether the rest is of the same file.
            self.done = 0;
        }
        if self.done > 0 {
            put(RANGE, &format!("bytes={}-", self.done));
            if let Some(strong) = strong {
                put(IF_RANGE, strong);
            }
        } else if let Some(known) = known {
            if let Some(etag) = &known.etag {
                put(IF_NONE_MATCH, etag);
            }
            if let Some(time) = &known.last_modified {
                put(IF_MODIFIED_SINCE, time);
            }
        }
        headers
    }

    /// Starts the file, again if it was started before.
    async fn begin(&mut self, response: &Response) -> Result<(), FetchError> {
        let fetcher = self.fetcher;
        self.abandon().await;
        self.done = 0;
        self.validators = Validators::of(response.headers());
        self.total = response.content_length();
        // Without a length, the end of the connection marks the end of the file, also of one that
        // was cut off.
        let ends = self.total.is_some()
            || response.headers().contains_key(TRANSFER_ENCODING)
            || response.version() >= Version::HTTP_2;
        if !ends && fetcher.checksum.is_none() {
            let url = fetcher.source.shown();
            return Err(DiskError::NoLength { url }.into());
        }
        let limit = fetcher.limits.disk_file_bytes;
        if self.total.is_some_and(|total| total > limit) {
            return Err(fetcher
                .unusable(ConvertError::TooLarge {
                    what: "file",
                    limit,
                })
                .into());
        }
        let out = self.out.try_clone().map_err(FetchError::Write)?;
        let (checksum, limits) = (fetcher.checksum.clone(), fetcher.limits.clone());
        self.sink = Some(Sink::new(out, checksum, limits));
        Ok(())
    }

    /// Checks that the answer is the rest of what was received before.
    fn check_part(&mut self, response: &Response) -> Result<(), DiskError> {
        let range = response.headers().get(CONTENT_RANGE);
        let total = range.and_then(|range| range.to_str().ok()?.rsplit('/').next()?.parse().ok());
        let other = |known: &Option<String>, name| {
            let now = response
                .headers()
                .get(name)
                .and_then(|value| value.to_str().ok());
            known.is_some() && now.is_some() && known.as_deref() != now
        };
        if !http::resumes_at(response, self.done) {
            return Err(self
                .fetcher
                .protocol("another part of the file than was asked for"));
        }
        if self.total.is_some() && total.is_some() && self.total != total
            || other(&self.validators.etag, ETAG)
            || other(&self.validators.last_modified, LAST_MODIFIED)
        {
            return Err(self.fetcher.protocol("a part of another file than before"));
        }
        Ok(())
    }

    async fn abandon(&mut self) {
        if let Some(sink) = self.sink.take() {
            sink.abandon().await;
        }
    }

    async fn finish(self) -> Result<Fetched, FetchError> {
        let fetcher = self.fetcher;
        let Some(sink) = self.sink else {
            return Err(fetcher.protocol("nothing").into());
        };
        match sink.finish().await {
            Ok(converted) => Ok(Fetched::File(converted, self.validators)),
            Err(Failure::Convert(ConvertError::Write(source))) => Err(FetchError::Write(source)),
            Err(Failure::Convert(source)) => Err(fetcher.unusable(source).into()),
            Err(Failure::Checksum(actual)) => {
                let url = fetcher.source.shown();
                let actual = Box::new(actual);
                let expected = fetcher.checksum.clone().map(Box::new);
                let expected = expected.unwrap_or_else(|| actual.clone());
                Err(DiskError::Checksum {
                    url,
                    expected,
                    actual,
                }
                .into())
            }
        }
    }
}

impl Fetcher {
    fn unusable(&self, source: ConvertError) -> DiskError {
        DiskError::Unusable {
            name: self.source.shown(),
            source,
        }
    }
}

enum FetchedPiece {
    Bytes(Vec<u8>),
    End,
}

/// A thread that converts, so that the conversion does not delay the network.
struct Sink {
    pieces: mpsc::Sender<FetchedPiece>,
    thread: JoinHandle<Result<Converted, Failure>>,
    cancelled: Arc<AtomicBool>,
}

impl Sink {
    /// Empties `out` and converts into it.
    fn new(out: File, checksum: Option<Checksum>, limits: Limits) -> Self {
        let (pieces, queue) = mpsc::channel(QUEUE);
        let cancelled = Arc::new(AtomicBool::new(false));
        let thread = spawn_blocking({
            let cancelled = Arc::clone(&cancelled);
            move || {
                out.set_len(0).map_err(ConvertError::Write)?;
                let input = Incoming {
                    queue,
                    piece: Vec::new(),
                    used: 0,
                    ended: false,
                };
                let job = Job {
                    limits: &limits,
                    cancelled: &cancelled,
                };
                convert(input, checksum.as_ref(), out, &job)
            }
        });
        Self {
            pieces,
            thread,
            cancelled,
        }
    }

    /// Stops, and waits until nothing is being written any longer.
    async fn abandon(mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
        let (closed, _) = mpsc::channel(1);
        self.pieces = closed;
        // It failed because it was cancelled.
        let _ = (&mut self.thread).await;
    }

    async fn finish(mut self) -> Result<Converted, Failure> {
        // A thread that has stopped reports the reason.
        let _ = self.pieces.send(FetchedPiece::End).await;
        match (&mut self.thread).await {
            Ok(outcome) => outcome,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // Only if the runtime itself ends.
                Err(_) => Err(ConvertError::Cancelled.into()),
            },
        }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

/// The pieces as a stream.
struct Incoming {
    queue: mpsc::Receiver<FetchedPiece>,
    piece: Vec<u8>,
    used: usize,
    ended: bool,
}

impl Read for Incoming {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.used == self.piece.len() && !self.ended {
            match self.queue.blocking_recv() {
                Some(FetchedPiece::Bytes(piece)) => (self.piece, self.used) = (piece, 0),
                Some(FetchedPiece::End) => self.ended = true,
                // Cancelled before its end.
                None => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
        let length = buffer.len().min(self.piece.len() - self.used);
        buffer[..length].copy_from_slice(&self.piece[self.used..self.used + length]);
        self.used += length;
        Ok(length)
    }
}

fn failed(host: &str, error: HttpError) -> DiskError {
    let host = host.to_owned();
    match error {
        HttpError::Unreachable(source) => DiskError::Unreachable { host, source },
        HttpError::Tls(source) => DiskError::Tls { host, source },
        HttpError::Transfer(source) => DiskError::Transfer { host, source },
        HttpError::Protocol(what) => DiskError::Protocol { host, what },
        HttpError::Redirect { target, why } => DiskError::Redirect { host, target, why },
        HttpError::Certificate { path, source } => DiskError::Certificate { path, source },
        HttpError::Setup(source) => DiskError::Setup(source),
    }
}
