//! An upload: a source that is the body of a request.
//!
//! One body is taken at a time. What breaks off, or is no disk, is refused with its reason, and the
//! next one may come; with the first that is written to its end, the program ends. Only the upload
//! proxy is answered, or the pod beside the source of a copy: TLS wants a certificate of the
//! authority, and it must have the right name.

mod pieces;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Incoming};
use podvisor_disk_streams::form::Boundary;
pub use podvisor_disk_streams::form::FormError;
use podvisor_images::{ConvertError, DiskError, Error, convert_disk};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::server::WebPkiClientVerifier;

use super::progress::Progress;
use super::source::limits;
use super::target::Target;
use super::{ImportError, Options, blocking};
use crate::certificates::files::{Files, Unusable};
use crate::copy;
use crate::https::{self, Answer, Peer};
use crate::upload::{PROXY, Way};

/// How long a sender may send nothing.
const STALL: Duration = Duration::from_secs(120);

/// Serves until a disk is complete.
pub(super) async fn receive(
    options: &Options,
    address: SocketAddr,
    progress: &Progress,
) -> Result<(), ImportError> {
    let credentials = options.credentials.clone().unwrap_or_default();
    let tls = server_config(&credentials)?;
    let listener = TcpListener::bind(address)
        .await
        .map_err(|source| ImportError::Listen { address, source })?;
    let (outcome, mut outcomes) = mpsc::channel(1);
    let receiver = Arc::new(Receiver {
        options: options.clone(),
        progress: progress.clone(),
        slot: Arc::new(Semaphore::new(1)),
        outcome,
    });
    // What is wrong with the volume itself is known at once.
    receiver.prepare().await?;
    tracing::info!(%address, "waiting for an upload");
    let handle = move |request, peer| Arc::clone(&receiver).answer(request, peer);
    let mut done = None;
    let stop = async { done = outcomes.recv().await };
    https::serve(listener, tls, handle, stop).await;
    done.unwrap_or(Err(ImportError::Stopped))
}

/// The side of TLS that the proxy meets, from the files `tls.crt`, `tls.key` and `ca.crt`.
fn server_config(directory: &Path) -> Result<ServerConfig, Unusable> {
    let files = Files::new(directory);
    let (certificates, key) = files.read_own()?;
    let roots = Arc::new(files.read_authorities()?);
    let provider = Arc::new(ring::default_provider());
    let clients = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
        .build()
        .map_err(Unusable::of(&files.authorities()))?;
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(Unusable::of(&files.own()))?;
    config
        .with_client_cert_verifier(clients)
        .with_single_cert(certificates, key)
        .map_err(Unusable::of(&files.own()))
}

/// What takes uploads.
struct Receiver {
    options: Options,
    progress: Progress,
    slot: Arc<Semaphore>,
    outcome: mpsc::Sender<Result<(), ImportError>>,
}

/// What a request brings.
enum Job {
    Upload(Way),
    Copy,
}

/// Where an upload goes.
struct Place {
    target: Target,
    room: u64,
}

/// A disk that has arrived, and is to be put into its place.
struct Arrived {
    place: Place,
    path: PathBuf,
}

impl Receiver {
    async fn answer(self: Arc<Self>, request: Request<Incoming>, peer: Peer) -> Answer {
        let sender = self.options.sender.as_deref();
        let path = request.uri().path();
        if peer.common_name().as_deref() != Some(sender.unwrap_or(PROXY)) {
            return https::text(
                StatusCode::FORBIDDEN,
                "only one sender is served: another one",
            );
        }
        peer.recognize();
        let job = match sender {
            Some(_) => (path == copy::PATH).then_some(Job::Copy),
            None => Way::of(path).map(Job::Upload),
        };
        let Some(job) = job else {
            return https::text(StatusCode::NOT_FOUND, "there is no such path");
        };
        if request.method() != Method::POST {
            return https::text(StatusCode::METHOD_NOT_ALLOWED, "only POST is served");
        }
        let Ok(permit) = Arc::clone(&self.slot).try_acquire_owned() else {
            https::linger(request.into_body());
            let text = "another upload to this claim is going on: try again when it has ended";
            return https::text(StatusCode::SERVICE_UNAVAILABLE, text);
        };
        // It goes on when the connection breaks off, and cleans up.
        let work = async move {
            match job {
                Job::Upload(way) => self.take(request, way, permit).await,
                Job::Copy => self.take_copy(request, permit).await,
            }
        };
        match tokio::spawn(work).await {
            Ok(answer) => answer,
            Err(error) => {
                tracing::error!(%error, "an upload failed");
                https::text(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "the upload failed: try again",
                )
            }
        }
    }

    async fn take(
        self: Arc<Self>,
        request: Request<Incoming>,
        way: Way,
        permit: OwnedSemaphorePermit,
    ) -> Answer {
        let arrived = match self.arrive(request, way).await {
            Ok(arrived) => arrived,
            Err(error) => return self.refuse(error).await,
        };
        tracing::info!("the disk has arrived");
        if way.is_async {
            tokio::spawn(async move {
                let outcome = self.put(arrived).await;
                // Nobody hears of an error any longer but by the end of this program.
                let _ = self.outcome.send(outcome).await;
                drop(permit);
            });
            return https::text(StatusCode::OK, "");
        }
        match self.put(arrived).await {
            Ok(()) => self.finish(permit).await,
            Err(error) => self.refuse(error).await,
        }
    }

    async fn take_copy(
        self: Arc<Self>,
        request: Request<Incoming>,
        permit: OwnedSemaphorePermit,
    ) -> Answer {
        match self.copy(request).await {
            Ok(()) => self.finish(permit).await,
            Err(error) => self.refuse(error).await,
        }
    }

    /// Tells the program that the disk is there; nothing is taken after it.
    async fn finish(&self, permit: OwnedSemaphorePermit) -> Answer {
        let _ = self.outcome.send(Ok(())).await;
        permit.forget();
        https::text(StatusCode::OK, "")
    }

    /// Writes a copy as it arrives.
    async fn copy(&self, request: Request<Incoming>) -> Result<(), ImportError> {
        let Place { target, room } = self.prepare().await?;
        let (pieces, input) = pieces::channel();
        let preallocate = self.options.preallocate;
        let progress = self.progress.clone();
        let writing = blocking(move || {
            let tell = |done, total| progress.set(done, total);
            target.receive(input, room, preallocate, &tell)?;
            target.clear()
        });
        let (written, ()) = tokio::join!(writing, self.feed(request.into_body(), pieces));
        written
    }

    /// Frees what a failed upload took, and says why it failed.
    async fn refuse(&self, error: ImportError) -> Answer {
        self.progress.reset();
        let status = match &error {
            ImportError::Source(_)
            | ImportError::TooLarge { .. }
            | ImportError::Larger { .. }
            | ImportError::Copy(_)
            | ImportError::Form(_) => StatusCode::BAD_REQUEST,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let message = format!("{:#}", anyhow::Error::new(error));
        tracing::warn!(message, "an upload was refused");
        let options = self.options.clone();
        if let Err(error) = blocking(move || Target::of(&options).clear()).await {
            tracing::warn!(%error, "failed to remove what was uploaded");
        }
        https::text(status, &message)
    }

    /// Makes room for an upload.
    async fn prepare(&self) -> Result<Place, ImportError> {
        let options = self.options.clone();
        blocking(move || {
            let target = Target::of(&options);
            target.clear()?;
            let room = target.room(options.size, options.leave_overhead)?;
            Ok(Place { target, room })
        })
        .await
    }

    /// Takes a body, converted as it arrives.
    async fn arrive(&self, request: Request<Incoming>, way: Way) -> Result<Arrived, ImportError> {
        let boundary = match way.is_form {
            true => {
                let content_type = request.headers().get(header::CONTENT_TYPE);
                let content_type = content_type.and_then(|value| value.to_str().ok());
                Some(Boundary::of(content_type).map_err(ImportError::Form)?)
            }
            false => None,
        };
        let place = self.prepare().await?;
        let room = place.room;
        let (place, path, file) = blocking(move || {
            let (path, file) = place.target.create()?;
            Ok((place, path, file))
        })
        .await?;
        let limits = limits(room);
        let (pieces, input) = pieces::channel();
        let conversion = spawn_blocking(move || match boundary {
            None => convert_disk(input, file, &limits),
            Some(boundary) => convert_disk(boundary.file(input), file, &limits),
        });
        self.feed(request.into_body(), pieces).await;
        match conversion.await {
            Ok(Ok(size)) => {
                tracing::info!(size, "converted");
                Ok(Arrived { place, path })
            }
            Ok(Err(ConvertError::Write(source))) => Err(ImportError::io("write", &path)(source)),
            Ok(Err(source)) => {
                let name = "the upload".to_owned();
                let error = Error::Disk(DiskError::Unusable { name, source });
                Err(ImportError::source(error, room))
            }
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => Err(ImportError::Stopped),
            },
        }
    }

    /// Passes a body on to its conversion.
    async fn feed(&self, mut body: Incoming, pieces: pieces::Sender) {
        let total = body.size_hint().exact();
        let mut done = 0_u64;
        loop {
            let frame = match timeout(STALL, body.frame()).await {
                Ok(Some(Ok(frame))) => frame,
                Ok(None) => return pieces.end().await,
                Ok(Some(Err(error))) => {
                    tracing::warn!(%error, done, "an upload was cut off");
                    return pieces.fail(std::io::ErrorKind::ConnectionAborted).await;
                }
                Err(_) => {
                    tracing::warn!(done, "an upload stalled");
                    return pieces.fail(std::io::ErrorKind::TimedOut).await;
                }
            };
            let bytes = frame.into_data().unwrap_or_else(|_| Bytes::new());
            done = done.saturating_add(bytes.len() as u64);
            if let Some(total) = total {
                self.progress.set(done, total);
            }
            if !pieces.send(bytes).await {
                // The conversion has ended, and says why.
                return https::linger(body);
            }
        }
    }

    /// Puts a disk into its place.
    async fn put(&self, arrived: Arrived) -> Result<(), ImportError> {
        let Arrived { place, path } = arrived;
        let preallocate = self.options.preallocate;
        blocking(move || {
            place
                .target
                .put(&path, place.room, preallocate, &|_, _| ())?;
            place.target.clear()
        })
        .await
    }
}
