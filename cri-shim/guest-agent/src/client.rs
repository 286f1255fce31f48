//! The stream to the agent: one command after the other.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::bounded::Text;
use crate::error::GuestAgentError;
use crate::lines::{Item, Lines, MAX_ANSWER};

/// Bytes that are read at once.
const PIECE: usize = 16 << 10;

/// What makes the agent forget a command that it has read a part of.
const FORGET: u8 = 0xff;

const SYNC: &str = "guest-sync-delimited";

/// A guest's agent. Several callers may share it; their commands follow one another.
#[derive(Debug)]
pub struct GuestAgent<S> {
    link: Mutex<Link<S>>,
    syncs: AtomicU32,
}

#[derive(Debug)]
struct Link<S> {
    stream: S,
    lines: Lines,
    /// Bytes that were read and not looked at.
    rest: Vec<u8>,
    /// The next line is the answer to the next command.
    is_in_step: bool,
}

/// An answer, of which one field is there.
#[derive(Debug, Deserialize)]
struct Answer<T> {
    #[serde(rename = "return")]
    value: Option<T>,
    error: Option<Fault>,
}

#[derive(Debug, Deserialize)]
struct Fault {
    #[serde(default)]
    class: Text,
    #[serde(default)]
    desc: Text,
}

/// What the agent's answer means.
pub(crate) fn read<T: DeserializeOwned>(
    command: &'static str,
    line: &[u8],
) -> Result<T, GuestAgentError> {
    let wrong = |source| GuestAgentError::Answer { command, source };
    let Answer { value, error } = serde_json::from_slice(line).map_err(wrong)?;
    if let Some(Fault { class, desc }) = error {
        let reason = match desc.0.is_empty() {
            true => class.0.clone(),
            false => desc.0,
        };
        return Err(match class.0.as_str() {
            "CommandNotFound" => GuestAgentError::NotAllowed { command, reason },
            _ => GuestAgentError::Refused { command, reason },
        });
    }
    value.ok_or_else(|| wrong(serde::de::Error::missing_field("return")))
}

impl<S: AsyncRead + AsyncWrite + Unpin> GuestAgent<S> {
    /// Talks to the agent at the other end of a stream. Nothing is sent yet.
    pub fn new(stream: S) -> Self {
        Self {
            link: Mutex::new(Link {
                stream,
                lines: Lines::default(),
                rest: Vec::new(),
                is_in_step: false,
            }),
            syncs: AtomicU32::new(1),
        }
    }

    /// Carries out a command, and returns its answer. The time limit includes the commands of
    /// others that come before.
    pub(crate) async fn call<T: DeserializeOwned>(
        &self,
        command: &'static str,
        arguments: Value,
        limit: Duration,
    ) -> Result<T, GuestAgentError> {
        let line = self.exchange(command, arguments, true, limit).await?;
        read(command, &line)
    }

    /// Sends a command that has no answer if it succeeds; waits a little for a refusal.
    pub(crate) async fn send(
        &self,
        command: &'static str,
        arguments: Value,
        limit: Duration,
        wait: Duration,
    ) -> Result<(), GuestAgentError> {
        self.exchange(command, arguments, false, limit).await?;
        let answer = async {
            let mut link = self.link.lock().await;
            link.line(command).await
        };
        match timeout(wait, answer).await {
            Err(_) => Ok(()),
            // It went away, as it was told.
            Ok(Err(GuestAgentError::Port { .. })) => Ok(()),
            Ok(Err(error)) => Err(error),
            Ok(Ok(line)) => read::<serde::de::IgnoredAny>(command, &line).map(drop),
        }
    }

    async fn exchange(
        &self,
        command: &'static str,
        arguments: Value,
        is_answered: bool,
        limit: Duration,
    ) -> Result<Vec<u8>, GuestAgentError> {
        let exchanged = async {
            let mut link = self.link.lock().await;
            if !link.is_in_step {
                let number = self.syncs.fetch_add(1, Ordering::Relaxed);
                link.sync(command, number).await?;
            }
            // Also if this is cancelled.
            link.is_in_step = false;
            link.write(command, &request(command, &arguments)).await?;
            if !is_answered {
                return Ok(Vec::new());
            }
            let line = link.line(command).await?;
            link.is_in_step = true;
            Ok(line)
        };
        match timeout(limit, exchanged).await {
            Ok(exchanged) => exchanged,
            Err(_) => Err(GuestAgentError::Unanswered { command, limit }),
        }
    }
}

fn request(command: &str, arguments: &Value) -> Vec<u8> {
    let mut request = json!({ "execute": command });
    if !arguments.is_null() {
        request["arguments"] = arguments.clone();
    }
    let mut line = request.to_string().into_bytes();
    line.push(b'\n');
    line
}

impl<S: AsyncRead + AsyncWrite + Unpin> Link<S> {
    /// Makes the next line the answer to the next command.
    async fn sync(&mut self, command: &'static str, number: u32) -> Result<(), GuestAgentError> {
        let mut bytes = vec![FORGET];
        bytes.extend(request(SYNC, &json!({ "id": number })));
        self.write(command, &bytes).await?;
        loop {
            while self.item(command).await? != Item::Delimiter {}
            // Two delimiters may follow each other.
            let mut item = self.item(command).await?;
            while item == Item::Delimiter {
                item = self.item(command).await?;
            }
            if let Item::Line(line) = item
                && read::<u32>(SYNC, &line).is_ok_and(|said| said == number)
            {
                self.is_in_step = true;
                return Ok(());
            }
        }
    }

    async fn write(&mut self, command: &'static str, bytes: &[u8]) -> Result<(), GuestAgentError> {
        let written = self.stream.write_all(bytes).await;
        written.map_err(|source| GuestAgentError::Port { command, source })
    }

    /// Returns the next line.
    async fn line(&mut self, command: &'static str) -> Result<Vec<u8>, GuestAgentError> {
        loop {
            match self.item(command).await? {
                Item::Line(line) => return Ok(line),
                Item::TooLong => {
                    let most = MAX_ANSWER;
                    return Err(GuestAgentError::TooLong { command, most });
                }
                Item::Delimiter => {}
            }
        }
    }

    async fn item(&mut self, command: &'static str) -> Result<Item, GuestAgentError> {
        let port = |source| GuestAgentError::Port { command, source };
        loop {
            if self.rest.is_empty() {
                let mut piece = vec![0; PIECE];
                let count = self.stream.read(&mut piece).await.map_err(port)?;
                if count == 0 {
                    return Err(port(io::ErrorKind::UnexpectedEof.into()));
                }
                piece.truncate(count);
                self.rest = piece;
            }
            let (count, item) = self.lines.take(&self.rest);
            self.rest.drain(..count.min(self.rest.len()));
            if let Some(item) = item {
                return Ok(item);
            }
        }
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
