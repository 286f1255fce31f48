//! `podvisor-cluster export`: the program of an exporter's pod, which serves volumes.
//!
//! It has no rights at the API server, writes nothing, and serves those alone who have the token.
//! A disk is what a guest or another pod wrote: it is opened as such (`disk`), and sent as it is.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, combinators::UnsyncBoxBody};
use hyper::body::{Body, Incoming};
use podvisor_disk_streams::range::Asked;
use podvisor_images::disk_len;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;
use tokio_rustls::rustls::ServerConfig;

use super::archive;
use super::body;
use super::error::ExportError;
use super::files::{Token, Volume, server_config};
use super::format::Format;
use crate::https::{self, Peer};

/// The header of a request with the token.
const TOKEN_HEADER: &str = "x-kubevirt-export-token";

/// So many downloads go on at once.
const MAX_DOWNLOADS: usize = 16;

/// What the subcommand takes from its command line.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct Options {
    /// Serve this volume, NAME=PATH: a raw disk, which is a file or a block device
    #[arg(long = "volume", required_unless_present = "files")]
    pub volumes: Vec<Volume>,
    /// Serve the files of this volume, NAME=PATH: a directory without a disk
    #[arg(long)]
    pub files: Vec<Volume>,
    /// Listen on this address, by HTTPS
    #[arg(long)]
    pub listen: SocketAddr,
    /// The file with the token that is asked for
    #[arg(long)]
    pub token: PathBuf,
    /// The directory with tls.crt and tls.key
    #[arg(long)]
    pub credentials: PathBuf,
    /// End at this time, in seconds since 1970
    #[arg(long)]
    pub until: u64,
    /// Write the reason of a failure into this file, if it exists
    #[arg(long, default_value = "/dev/termination-log")]
    pub termination_log: PathBuf,
}

/// Serves the volumes until their time is over, or the process is told to end.
///
/// # Errors
///
/// Why they cannot be served.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let stop = async {
        tokio::select! {
            () = tokio::time::sleep(left(options.until)) => {}
            () = https::told_to_end() => {}
        }
    };
    let outcome = serve(&options, stop).await.map_err(anyhow::Error::new);
    if let Err(error) = &outcome {
        crate::termination::leave_message(&options.termination_log, error);
    }
    outcome
}

/// How long it is until a time.
fn left(until: u64) -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    Duration::from_secs(until).saturating_sub(now.unwrap_or_default())
}

async fn serve(options: &Options, stop: impl Future<Output = ()>) -> Result<(), ExportError> {
    let (exporter, tls) = prepare(options)?;
    let address = options.listen;
    let listener = TcpListener::bind(address).await;
    let listener = listener.map_err(|source| ExportError::Listen { address, source })?;
    tracing::info!(%address, "serving volumes");
    serve_on(listener, tls, exporter, stop).await;
    Ok(())
}

/// Looks at what is served; what is wrong with a volume itself is known at once.
fn prepare(options: &Options) -> Result<(Exporter, ServerConfig), ExportError> {
    for volume in &options.volumes {
        open(&volume.path).map_err(|source| ExportError::Disk {
            name: volume.name.clone(),
            path: volume.path.clone(),
            source,
        })?;
    }
    for volume in &options.files {
        archive::entries(&volume.path).map_err(|source| ExportError::Files {
            name: volume.name.clone(),
            path: volume.path.clone(),
            source,
        })?;
    }
    let exporter = Exporter {
        volumes: options.volumes.clone(),
        files: options.files.clone(),
        token: Token::new(&options.token)?,
        downloads: Arc::new(Semaphore::new(MAX_DOWNLOADS)),
    };
    Ok((exporter, server_config(&options.credentials)?))
}

async fn serve_on(
    listener: TcpListener,
    tls: ServerConfig,
    exporter: Exporter,
    stop: impl Future<Output = ()>,
) {
    let exporter = Arc::new(exporter);
    let handle = move |request: Request<Incoming>, peer| {
        let exporter = Arc::clone(&exporter);
        async move {
            let (head, body) = request.into_parts();
            let answer = exporter.answer(&head, &peer).await;
            // Nobody has a body to send: who sends one still hears the answer.
            if !body.is_end_stream() {
                https::linger(body);
            }
            answer
        }
    };
    https::serve(listener, tls, handle, stop).await;
}

/// Opens a disk; returns its length.
fn open(path: &Path) -> io::Result<(File, u64)> {
    let disk = crate::disk::open(path)?;
    let length = disk_len(&disk)?;
    Ok((disk, length))
}

/// An answer with any body.
type Answer = Response<UnsyncBoxBody<Bytes, io::Error>>;

struct Exporter {
    volumes: Vec<Volume>,
    files: Vec<Volume>,
    token: Token,
    downloads: Arc<Semaphore>,
}

impl Exporter {
    async fn answer(&self, head: &Parts, peer: &Peer) -> Answer {
        if head.uri.path() == "/healthz" {
            return text(StatusCode::OK, "ok");
        }
        let given = head.headers.get(TOKEN_HEADER);
        match given.map(|given| self.token.is(given.as_bytes())) {
            Some(Ok(true)) => peer.recognize(),
            Some(Ok(false)) => return text(StatusCode::UNAUTHORIZED, "the token is another one"),
            Some(Err(error)) => {
                tracing::error!(%error, "failed to read the token");
                let why = "the export has no valid token: look at its Secret";
                return text(StatusCode::INTERNAL_SERVER_ERROR, why);
            }
            None => {
                let why = format!("send the token of the export's Secret: {TOKEN_HEADER}: TOKEN");
                return text(StatusCode::UNAUTHORIZED, &why);
            }
        }
        if !matches!(head.method, Method::GET | Method::HEAD) {
            return text(
                StatusCode::METHOD_NOT_ALLOWED,
                "only GET and HEAD are served",
            );
        }
        let found = Format::of(head.uri.path()).and_then(|(name, format)| {
            let mut volumes = match format {
                Format::Archive => self.files.iter(),
                Format::Raw | Format::Gzip => self.volumes.iter(),
            };
            let volume = volumes.find(|volume| volume.name == name)?;
            Some((volume, format))
        });
        let Some((volume, format)) = found else {
            return text(StatusCode::NOT_FOUND, "no volume is served at this path");
        };
        self.download(head, volume, format).await
    }

    async fn download(&self, head: &Parts, volume: &Volume, format: Format) -> Answer {
        let Ok(permit) = Arc::clone(&self.downloads).try_acquire_owned() else {
            let why = "too many downloads go on: try again when one has ended";
            return text(StatusCode::SERVICE_UNAVAILABLE, why);
        };
        if format == Format::Archive {
            return pack(head, volume, permit).await;
        }
        let path = volume.path.clone();
        let opened = spawn_blocking(move || open(&path)).await;
        let opened = opened.map_err(io::Error::other).and_then(|opened| opened);
        let (disk, length) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                let volume = &volume.name;
                tracing::error!(volume, %error, "failed to open a disk");
                let why = format!("the disk of {volume} cannot be opened: {error}");
                return text(StatusCode::INTERNAL_SERVER_ERROR, &why);
            }
        };
        let part = match part(&head.headers, format, length) {
            Some(part) => part,
            None => {
                let mut answer = text(StatusCode::RANGE_NOT_SATISFIABLE, "there are no such bytes");
                set(
                    &mut answer,
                    header::CONTENT_RANGE,
                    &format!("bytes */{length}"),
                );
                return answer;
            }
        };
        let mut answer = describe(&part, format, length);
        if head.method == Method::GET {
            let (volume, format_name) = (&volume.name, format.name());
            tracing::info!(volume, format = format_name, ?part, "sending");
            *answer.body_mut() = body::of(disk, part, format, permit).boxed_unsync();
        }
        answer
    }
}

/// Sends the files of a volume.
async fn pack(head: &Parts, volume: &Volume, permit: OwnedSemaphorePermit) -> Answer {
    let path = volume.path.clone();
    let entries = spawn_blocking(move || archive::entries(&path)).await;
    let entries = entries
        .map_err(io::Error::other)
        .and_then(|entries| entries);
    let entries = match entries {
        Ok(entries) => entries,
        Err(error) => {
            let volume = &volume.name;
            tracing::error!(volume, %error, "failed to open files");
            let why = format!("the files of {volume} cannot be opened: {error}");
            return text(StatusCode::INTERNAL_SERVER_ERROR, &why);
        }
    };
    let mut answer = describe(&(0..0), Format::Archive, 0);
    if head.method == Method::GET {
        let (volume, files) = (&volume.name, entries.len());
        tracing::info!(volume, files, "sending an archive");
        *answer.body_mut() = body::of_files(entries, permit).boxed_unsync();
    }
    answer
}

/// Which bytes of a disk of this length are asked for; `None` if there are no such ones. What is
/// packed has no bytes that could be told in advance.
fn part(headers: &HeaderMap, format: Format, length: u64) -> Option<Range<u64>> {
    let range = headers.get(header::RANGE);
    // No version of a disk has a name by which a client could ask whether it is the same still.
    let range = range.filter(|_| !headers.contains_key(header::IF_RANGE));
    match range.filter(|_| format == Format::Raw) {
        None => Some(0..length),
        Some(range) => match Asked::of(range.as_bytes(), length) {
            Asked::All => Some(0..length),
            Asked::Part(part) => Some(part),
            Asked::Outside => None,
        },
    }
}

/// The head of an answer with part of a disk.
fn describe(part: &Range<u64>, format: Format, length: u64) -> Answer {
    let mut answer = Response::new(empty());
    let count = part.end.saturating_sub(part.start);
    if format == Format::Raw {
        set(&mut answer, header::ACCEPT_RANGES, "bytes");
        set(&mut answer, header::CONTENT_LENGTH, &count.to_string());
        if count < length {
            *answer.status_mut() = StatusCode::PARTIAL_CONTENT;
            let range = format!(
                "bytes {}-{}/{length}",
                part.start,
                part.end.saturating_sub(1)
            );
            set(&mut answer, header::CONTENT_RANGE, &range);
        }
    }
    let kind = match format {
        Format::Raw => "application/octet-stream",
        Format::Gzip | Format::Archive => "application/gzip",
    };
    set(&mut answer, header::CONTENT_TYPE, kind);
    set(&mut answer, header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    set(&mut answer, header::CACHE_CONTROL, "no-store");
    answer
}

fn set(answer: &mut Answer, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        answer.headers_mut().insert(name, value);
    }
}

fn text(status: StatusCode, text: &str) -> Answer {
    https::text(status, text).map(|body| body.map_err(|none| match none {}).boxed_unsync())
}

fn empty() -> UnsyncBoxBody<Bytes, io::Error> {
    Empty::new().map_err(|none| match none {}).boxed_unsync()
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
