//! Files of the guest, piece by piece (`guest-file-…`).

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::client::GuestAgent;
use crate::error::GuestAgentError;

const OPEN: &str = "guest-file-open";
const READ: &str = "guest-file-read";
const WRITE: &str = "guest-file-write";
const CLOSE: &str = "guest-file-close";

/// Bytes of a file in one command.
const PIECE: usize = 256 << 10;

/// How often a file may give neither bytes nor its end, or take a part of a piece: the copy of a
/// guest that does so for ever would never end, and nobody could stop it.
const UNDONE: u32 = 16;

/// What a file of the guest is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileUse {
    /// To be read.
    Read,
    /// To be written from the beginning; what it has is lost.
    Write,
}

/// An open file of the guest, by the agent's number. The agent keeps it open until
/// [`GuestAgent::close_file`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenFile(i64);

#[derive(Debug, Deserialize)]
struct FileChunk {
    #[serde(default, rename = "buf-b64")]
    data: String,
    #[serde(default)]
    eof: bool,
}

#[derive(Debug, Deserialize)]
struct Written {
    count: usize,
}

impl<S: AsyncRead + AsyncWrite + Unpin> GuestAgent<S> {
    /// Opens a file of the guest.
    ///
    /// # Errors
    /// [`GuestAgentError`].
    pub async fn open_file(
        &self,
        path: &str,
        usage: FileUse,
        limit: Duration,
    ) -> Result<OpenFile, GuestAgentError> {
        let mode = match usage {
            FileUse::Read => "rb",
            FileUse::Write => "wb",
        };
        let arguments = json!({ "path": path, "mode": mode });
        self.call(OPEN, arguments, limit).await.map(OpenFile)
    }

    /// Reads the next bytes; none at the end of the file.
    ///
    /// # Errors
    /// [`GuestAgentError`].
    pub async fn read_file(
        &self,
        file: OpenFile,
        limit: Duration,
    ) -> Result<Vec<u8>, GuestAgentError> {
        for _ in 0..UNDONE {
            let arguments = json!({ "handle": file.0, "count": PIECE });
            let piece: FileChunk = self.call(READ, arguments, limit).await?;
            let data = BASE64.decode(piece.data.trim_end());
            let data = data.map_err(|source| GuestAgentError::Data {
                command: READ,
                source,
            })?;
            if data.len() > PIECE {
                return Err(GuestAgentError::TooLong {
                    command: READ,
                    most: PIECE,
                });
            }
            if !data.is_empty() || piece.eof {
                return Ok(data);
            }
        }
        Err(GuestAgentError::Refused {
            command: READ,
            reason: "it gives neither bytes nor the end of the file".to_owned(),
        })
    }

    /// Writes bytes at the end of what was written.
    ///
    /// # Errors
    /// [`GuestAgentError`].
    pub async fn write_file(
        &self,
        file: OpenFile,
        mut bytes: &[u8],
        limit: Duration,
    ) -> Result<(), GuestAgentError> {
        let mut short = 0;
        while !bytes.is_empty() {
            let piece = bytes.get(..PIECE).unwrap_or(bytes);
            let arguments = json!({ "handle": file.0, "buf-b64": BASE64.encode(piece) });
            let Written { count } = self.call(WRITE, arguments, limit).await?;
            short += u32::from(count < piece.len());
            if count == 0 || count > piece.len() || short > UNDONE {
                return Err(GuestAgentError::Refused {
                    command: WRITE,
                    reason: format!("{count} of {} bytes were written", piece.len()),
                });
            }
            bytes = bytes.get(count..).unwrap_or_default();
        }
        Ok(())
    }

    /// Closes a file: what was written is in the guest's file system then.
    ///
    /// # Errors
    /// [`GuestAgentError`].
    pub async fn close_file(&self, file: OpenFile, limit: Duration) -> Result<(), GuestAgentError> {
        let arguments = json!({ "handle": file.0 });
        let closed = self.call::<IgnoredAny>(CLOSE, arguments, limit).await;
        closed.map(drop)
    }
}

/// Reads an answer as a piece of a file.
#[cfg(feature = "test-utils")]
pub(crate) fn fuzz(line: &[u8]) {
    let _ = crate::client::read::<FileChunk>(READ, line);
    let _ = crate::client::read::<Written>(WRITE, line);
}
