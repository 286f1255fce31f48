//! Programs that run in the guest (`guest-exec`). The agent collects their output and tells it when
//! they have ended.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::sleep;

use crate::client::GuestAgent;
use crate::error::GuestAgentError;

const EXEC: &str = "guest-exec";
const STATUS: &str = "guest-exec-status";

/// Most bytes of a program's path, arguments and environment together.
const MAX_WORDS: usize = 256 << 10;

/// Delays between two questions whether a program has ended: each is twice the one before.
const FIRST_DELAY: Duration = Duration::from_millis(10);
const LONGEST_DELAY: Duration = Duration::from_millis(500);

/// A program that is to run in the guest, with the rights of the agent: mostly root's.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Its path, or a name that is looked for in the agent's `PATH`.
    pub path: String,
    /// Its arguments, without its own name.
    pub arguments: Vec<String>,
    /// Its environment, `NAME=VALUE` each; the agent's own if there is none.
    pub environment: Vec<String>,
    /// All of its input, at most [`MAX_INPUT`](Self::MAX_INPUT).
    #[serde(with = "crate::base64_bytes")]
    pub input: Vec<u8>,
}

impl Program {
    /// Most bytes of a program's input.
    pub const MAX_INPUT: usize = 1 << 20;
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProgramExit {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

impl ProgramExit {
    /// Its code as a shell has it: 128 and the number for a signal.
    #[must_use]
    pub fn code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => signal.saturating_add(128),
        }
    }
}

/// A program's end, with its output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramEnd {
    /// How it ended.
    pub exit: ProgramExit,
    /// Its standard output.
    #[serde(with = "crate::base64_bytes")]
    pub stdout: Vec<u8>,
    /// Its errors.
    #[serde(with = "crate::base64_bytes")]
    pub stderr: Vec<u8>,
    /// There was more output, which the agent did not keep.
    pub is_truncated: bool,
}

#[derive(Debug, Deserialize)]
struct Started {
    pid: i64,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Status {
    exited: bool,
    exitcode: Option<i32>,
    signal: Option<i32>,
    out_data: Option<String>,
    err_data: Option<String>,
    #[serde(default)]
    out_truncated: bool,
    #[serde(default)]
    err_truncated: bool,
}

impl<S: AsyncRead + AsyncWrite + Unpin> GuestAgent<S> {
    /// Starts a program; returns its number, which [`program_end`](Self::program_end) takes.
    ///
    /// # Errors
    /// [`GuestAgentError`], also if there is no such program.
    pub async fn start_program(
        &self,
        program: &Program,
        limit: Duration,
    ) -> Result<i64, GuestAgentError> {
        let words = program.arguments.iter().chain(&program.environment);
        let words = words.map(String::len).sum::<usize>();
        for (what, size, most) in [
            (
                "a command",
                words.saturating_add(program.path.len()),
                MAX_WORDS,
            ),
            ("a program's input", program.input.len(), Program::MAX_INPUT),
        ] {
            if size > most {
                return Err(GuestAgentError::Request { what, size, most });
            }
        }
        let mut arguments = json!({
            "path": program.path,
            "arg": program.arguments,
            "capture-output": true,
        });
        if !program.environment.is_empty() {
            arguments["env"] = json!(program.environment);
        }
        if !program.input.is_empty() {
            arguments["input-data"] = json!(BASE64.encode(&program.input));
        }
        let started: Started = self.call(EXEC, arguments, limit).await?;
        Ok(started.pid)
    }

    /// Waits for a program's end, for as long as it runs; `limit` is for each answer of the agent,
    /// which forgets the program then.
    ///
    /// # Errors
    /// [`GuestAgentError`].
    pub async fn program_end(
        &self,
        number: i64,
        limit: Duration,
    ) -> Result<ProgramEnd, GuestAgentError> {
        let mut delay = FIRST_DELAY;
        loop {
            let arguments = json!({ "pid": number });
            let status: Status = self.call(STATUS, arguments, limit).await?;
            if status.exited {
                return status.end();
            }
            sleep(delay).await;
            delay = delay.saturating_mul(2).min(LONGEST_DELAY);
        }
    }

    /// Kills a program that [`start_program`](Self::start_program) started, by the guest's own
    /// `kill`: the agent has no command for that.
    ///
    /// # Errors
    /// [`GuestAgentError`].
    pub async fn signal_program(
        &self,
        number: i64,
        signal: u32,
        limit: Duration,
    ) -> Result<(), GuestAgentError> {
        let kill = Program {
            path: "kill".to_owned(),
            arguments: vec![format!("-{signal}"), number.to_string()],
            ..Program::default()
        };
        let number = self.start_program(&kill, limit).await?;
        self.program_end(number, limit).await.map(drop)
    }
}

impl Status {
    fn end(self) -> Result<ProgramEnd, GuestAgentError> {
        let data = |data: Option<String>| {
            let data = data.unwrap_or_default();
            let command = STATUS;
            let decoded = BASE64.decode(data.trim_end());
            decoded.map_err(|source| GuestAgentError::Data { command, source })
        };
        Ok(ProgramEnd {
            exit: match (self.exitcode, self.signal) {
                (Some(code), _) => ProgramExit::Code(code),
                (None, Some(signal)) => ProgramExit::Signal(signal),
                (None, None) => ProgramExit::Code(0),
            },
            stdout: data(self.out_data)?,
            stderr: data(self.err_data)?,
            is_truncated: self.out_truncated || self.err_truncated,
        })
    }
}

/// Reads an answer as a program's end.
#[cfg(feature = "test-utils")]
pub(crate) fn fuzz(line: &[u8]) {
    let _ = crate::client::read::<Started>(EXEC, line);
    let _ = crate::client::read::<Status>(STATUS, line).and_then(Status::end);
}
