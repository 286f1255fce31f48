//! The streams of a process as its request names them.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use podvisor_agent_protocol::{STDIO_PORT, StreamId, api};
use tokio::io::AsyncWriteExt as _;

use super::ends::{GuestInput, GuestStreams};
use super::error::StdioError;
use super::outputs::Outputs;
use super::stream_set::StreamSet;
use crate::agent::Mux;
use crate::random::random;
use crate::types::{StdioFds, TerminalSize};

/// The streams of a process, before they are connected.
#[derive(Debug)]
pub struct Streams {
    has_input: bool,
    /// The stream of stdin only; on a terminal, input is part of `output`.
    stdin: Option<StreamId>,
    output: Option<StreamId>,
    /// `None` for a terminal, which has only one output.
    errors: Option<StreamId>,
    terminal: Option<TerminalSize>,
}

impl Streams {
    /// Draws the streams' ids for a process with or without a terminal.
    ///
    /// # Errors
    /// The host has no random bytes.
    pub fn new(set: StreamSet, terminal: Option<TerminalSize>) -> Result<Self, StdioError> {
        let pipes = terminal.is_none();
        let id = |wanted: bool| wanted.then(stream_id).transpose();
        Ok(Self {
            has_input: set.stdin,
            stdin: id(pipes && set.stdin)?,
            output: id(!pipes || set.stdout)?,
            errors: id(pipes && set.stderr)?,
            terminal,
        })
    }

    /// The size of the process's terminal, if it has one.
    #[must_use]
    pub fn terminal(&self) -> Option<TerminalSize> {
        self.terminal
    }

    /// Whether the process has an input that may be written to.
    #[must_use]
    pub fn has_input(&self) -> bool {
        self.has_input
    }

    /// Returns the streams as the request for a process names them.
    #[must_use]
    pub fn request(&self) -> api::Stdio {
        let field = |id: Option<StreamId>| id.map_or_else(Vec::new, |id| id.as_bytes().to_vec());
        api::Stdio {
            stdin: field(self.stdin),
            stdout: field(self.output),
            stderr: field(self.errors),
            terminal: self.terminal.is_some(),
            columns: self.terminal.map_or(0, |size| size.columns.into()),
            rows: self.terminal.map_or(0, |size| size.rows.into()),
            ..Default::default()
        }
    }

    /// Connects the streams.
    pub(crate) async fn connect(&self, mux: &Mux) -> Result<GuestStreams, StdioError> {
        let output = match self.output {
            Some(id) => Some(Arc::new(connect(mux, "stdout", id).await?)),
            None => None,
        };
        let errors = match self.errors {
            Some(id) => Some(Arc::new(connect(mux, "stderr", id).await?)),
            None => None,
        };
        let stream = match self.stdin {
            Some(id) => Some(Arc::new(connect(mux, "stdin", id).await?)),
            None if self.has_input && self.terminal.is_some() => output.clone(),
            None => None,
        };
        let is_terminal = self.terminal.is_some();
        Ok(GuestStreams {
            input: stream.map(|stream| GuestInput {
                stream,
                is_terminal,
            }),
            output,
            errors,
        })
    }

    /// Connects the outputs of a process without a terminal, to be read by this process.
    pub(crate) async fn open_outputs(
        &self,
        mux: &Mux,
    ) -> Result<[tokio::net::UnixStream; 2], StdioError> {
        let id = |stream: Option<StreamId>| stream.map_or_else(stream_id, Ok);
        Ok([
            open(mux, "stdout", id(self.output)?).await?,
            open(mux, "stderr", id(self.errors)?).await?,
        ])
    }

    /// Connects the streams and moves bytes between them and `files` until they end.
    ///
    /// # Errors
    /// [`StdioError`]; connections that were made are closed again.
    pub async fn attach(self, mux: &Mux, files: StdioFds) -> Result<Outputs, StdioError> {
        self.connect(mux).await?.serve(files)
    }
}

/// Draws the id of a stream.
pub(crate) fn stream_id() -> Result<StreamId, StdioError> {
    loop {
        // All zeros, the only invalid id, is drawn once in 2¹²⁸ times.
        if let Ok(id) = StreamId::new(random().map_err(StdioError::Random)?) {
            return Ok(id);
        }
    }
}

/// Connects to the guest and sends the stream's id.
pub(crate) async fn open(
    mux: &Mux,
    name: &'static str,
    id: StreamId,
) -> Result<tokio::net::UnixStream, StdioError> {
    let mut stream = mux.connect(STDIO_PORT).await?;
    match stream.write_all(id.as_bytes()).await {
        Ok(()) => Ok(stream),
        Err(source) => Err(StdioError::SetUp { name, source }),
    }
}

async fn connect(mux: &Mux, name: &'static str, id: StreamId) -> Result<UnixStream, StdioError> {
    let blocking = |stream: tokio::net::UnixStream| {
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        Ok(stream)
    };
    blocking(open(mux, name, id).await?).map_err(|source| StdioError::SetUp { name, source })
}
