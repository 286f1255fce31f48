//! `podvisor-cluster send`: the program of the pod beside a source, which it reads and sends.
//!
//! It connects to one importer, known by its certificate, and shows its own. What fails is tried
//! again by the kubelet; the importer begins anew each time.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use podvisor_disk_streams::blocks;
use podvisor_images::{disk_len, visit_data};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::ServerName;

use super::PATH;
use crate::certificates::files::{Files, Unusable};
use crate::https;

/// How long the importer may take to be connected to.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// So much is sent at once.
const PIECE: usize = 256 << 10;

/// Pieces that wait to be sent.
const QUEUE: usize = 8;

/// The longest answer: why a copy was refused.
const MAX_ANSWER: usize = 64 << 10;

/// What the subcommand takes from its command line.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct Options {
    /// The raw disk to send: a file, or a block device
    #[arg(long)]
    pub file: PathBuf,
    /// Where the importer takes it
    #[arg(long)]
    pub to: SocketAddr,
    /// The name in the importer's certificate
    #[arg(long)]
    pub name: String,
    /// The directory with tls.crt and tls.key, and ca.crt by which the importer is known
    #[arg(long)]
    pub credentials: PathBuf,
    /// Write the reason of a failure into this file, if it exists
    #[arg(long, default_value = "/dev/termination-log")]
    pub termination_log: PathBuf,
}

/// Why a disk was not sent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The source cannot be read.
    #[error("failed to read the source {}", .path.display())]
    Source {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The certificates cannot be used.
    #[error("failed to use {} for the copy; delete the pod", .path.display())]
    Credentials {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The importer cannot be reached, or the connection broke off.
    #[error("failed to send the disk to {to}; it is tried again")]
    Network {
        /// The importer.
        to: SocketAddr,
        /// What failed.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The importer did not take it.
    #[error("the importer refused the disk: {text} ({status})")]
    Refused {
        /// Its answer's status.
        status: StatusCode,
        /// Its answer.
        text: String,
    },
    /// The process was told to end.
    #[error("the copy was told to end before it was done")]
    Stopped,
}

impl From<Unusable> for SendError {
    fn from(Unusable { path, source }: Unusable) -> Self {
        Self::Credentials { path, source }
    }
}

/// Sends the disk.
///
/// # Errors
///
/// Why the importer does not have it.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let outcome = tokio::select! {
        outcome = send(&options) => outcome,
        () = crate::https::told_to_end() => Err(SendError::Stopped),
    };
    let outcome = outcome.map_err(anyhow::Error::new);
    if let Err(error) = &outcome {
        crate::termination::leave_message(&options.termination_log, error);
    }
    outcome
}

async fn send(options: &Options) -> Result<(), SendError> {
    fn network<E>(to: SocketAddr) -> impl FnOnce(E) -> SendError
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        move |source| SendError::Network {
            to,
            source: source.into(),
        }
    }
    let to = options.to;
    let tls = client_config(&options.credentials)?;
    let name = ServerName::try_from(options.name.clone()).map_err(network(to))?;
    let connect = async {
        let stream = TcpStream::connect(to).await?;
        TlsConnector::from(Arc::new(tls))
            .connect(name, stream)
            .await
    };
    let connected = timeout(CONNECT_TIMEOUT, connect).await;
    let stream = connected.map_err(network(to))?.map_err(network(to))?;
    let connected = http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = connected.map_err(network(to))?;
    let connection = tokio::spawn(connection);
    let (pieces, body) = mpsc::channel(QUEUE);
    let path = options.file.clone();
    let reading = spawn_blocking(move || read(&path, &pieces));
    let request = Request::post(PATH)
        .header(header::HOST, &options.name)
        .body(https::pieces(body))
        .map_err(network(to))?;
    let answer = sender.send_request(request).await;
    if let Ok(answer) = answer {
        let status = answer.status();
        let text = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
        connection.abort();
        if status.is_success() {
            tracing::info!(%to, "the disk was sent");
            return Ok(());
        }
        let text = text.map(|text| text.to_bytes()).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        return Err(SendError::Refused { status, text });
    }
    connection.abort();
    // The connection is gone, and its body with it: who reads notices that.
    match reading.await {
        Ok(Err(source)) if source.kind() != io::ErrorKind::BrokenPipe => Err(SendError::Source {
            path: options.file.clone(),
            source,
        }),
        _ => answer.map(drop).map_err(network(to)),
    }
}

/// Reads the disk into pieces of its stream.
fn read(path: &Path, pieces: &mpsc::Sender<io::Result<Bytes>>) -> io::Result<()> {
    let give = |bytes: Vec<u8>| {
        let given = pieces.blocking_send(Ok(bytes.into()));
        given.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))
    };
    let sent = (|| {
        let disk = crate::disk::open(path)?;
        let length = disk_len(&disk)?;
        tracing::info!(length, "sending");
        let mut piece = blocks::header(length);
        let mut visit = |at, block: &[u8]| {
            blocks::push_block(&mut piece, at, block);
            match piece.len() < PIECE {
                true => Ok(()),
                false => give(std::mem::take(&mut piece)),
            }
        };
        visit_data(&disk, 0..length, &mut visit, &|_| ())?;
        blocks::push_end(&mut piece);
        give(piece)
    })();
    if let Err(error) = &sent {
        // The importer must not take it for the end.
        let _ = pieces.blocking_send(Err(error.kind().into()));
    }
    sent
}

/// The side of TLS that the importer meets, from the files `tls.crt`, `tls.key` and `ca.crt`.
fn client_config(directory: &Path) -> Result<ClientConfig, Unusable> {
    let files = Files::new(directory);
    let (certificates, key) = files.read_own()?;
    let roots = files.read_authorities()?;
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(Unusable::of(&files.own()))?;
    config
        .with_root_certificates(roots)
        .with_client_auth_cert(certificates, key)
        .map_err(Unusable::of(&files.own()))
}
