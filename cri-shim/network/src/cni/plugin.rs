//! Runs one plugin: a program that reads its configuration from stdin and answers with JSON on
//! stdout, limited in time and size.

use std::env;
use std::ffi::OsString;
use std::future::pending;
use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::{Child, Command};
use tokio::time::timeout;
use tracing::debug;

use super::error::CniError;
use super::input::Input;

/// Most bytes that a plugin may print: far more than any result.
const STDOUT_BYTES: usize = 1 << 20;
/// Bytes of its stderr that are kept.
const STDERR_BYTES: usize = 4096;
/// Longest message of a plugin that is passed on, in characters.
const MESSAGE_CHARS: usize = 1000;

/// How long to wait for the end of a killed process, which only the kernel can delay.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Directories of programs for administrators.
const SYSTEM_DIRS: [&str; 2] = ["/usr/sbin", "/sbin"];

/// One run of a plugin.
#[derive(Debug)]
pub(super) struct Invocation<'a> {
    /// Its type.
    pub(super) name: &'a str,
    /// Its program.
    pub(super) program: PathBuf,
    /// `ADD`, `CHECK`, `DEL` or `STATUS`.
    pub(super) command: &'static str,
    /// `CNI_` variables in addition to `CNI_COMMAND`.
    pub(super) variables: Vec<(&'static str, String)>,
    /// Its configuration.
    pub(super) config: Vec<u8>,
    /// How long it may take.
    pub(super) limit: Duration,
}

/// Returns where plugins look for programs such as `iptables`: in this process's directories, and
/// in those that `su` may have left out.
pub(super) fn search_path() -> OsString {
    let path = env::var_os("PATH").unwrap_or_default();
    let dirs = env::split_paths(&path).chain(SYSTEM_DIRS.map(PathBuf::from));
    // They contain no colons, as they come from a split path.
    env::join_paths(dirs).unwrap_or(path)
}

/// Finds the program of a plugin.
pub(super) fn find(dirs: &[PathBuf], name: &str) -> Result<PathBuf, CniError> {
    let mut candidates = dirs.iter().map(|dir| dir.join(name));
    candidates.find(|path| path.is_file()).ok_or_else(|| {
        let searched: Vec<String> = dirs.iter().map(|dir| dir.display().to_string()).collect();
        CniError::NoPlugin {
            name: name.to_owned(),
            searched: searched.join(" or "),
        }
    })
}

/// Kills a plugin and all that it started if this is dropped before it has ended.
struct Group(Option<Pid>);

impl Group {
    fn kill(&self) {
        if let Some(pid) = self.0 {
            // Fails if it has just ended.
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Invocation<'_> {
    /// Runs the plugin; returns its output if it succeeded.
    pub(super) async fn run(self, input: &mut Input) -> Result<Vec<u8>, CniError> {
        self.run_until(input, pending()).await
    }

    /// As [`Self::run`], but kills the plugin if `end` comes first. A killed plugin is gone when
    /// this returns: no other may work on the same pod before that (CNI specification 1.1,
    /// "Lifecycle & Ordering").
    pub(super) async fn run_until(
        self,
        input: &mut Input,
        end: impl Future<Output = ()>,
    ) -> Result<Vec<u8>, CniError> {
        let failed = |source| CniError::Execute {
            path: self.program.clone(),
            source,
        };
        let stdin = input.lend(&self.config);
        let stdin = stdin.map_err(|source| CniError::Configure {
            path: self.program.clone(),
            source,
        })?;
        let mut command = Command::new(&self.program);
        command
            .env("CNI_COMMAND", self.command)
            .env("PATH", search_path())
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .current_dir("/")
            .process_group(0)
            .kill_on_drop(true)
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let mut group = Group(pid);
        let (status, stdout, stderr) = {
            let mut conversation = pin!(converse(&mut child));
            let ended = tokio::select! {
                ended = timeout(self.limit, conversation.as_mut()) => {
                    ended.map_err(|_| CniError::Hangs {
                        name: self.name.to_owned(),
                        command: self.command,
                        limit: self.limit,
                    })
                }
                () = end => Err(CniError::Cancelled {
                    name: self.name.to_owned(),
                    command: self.command,
                }),
            };
            if ended.is_err() {
                group.kill();
                // All its processes have ended when its streams are closed.
                if timeout(KILL_TIMEOUT, conversation).await.is_ok() {
                    input.returned();
                }
            }
            ended?.map_err(CniError::io("read the answer of", &self.program))?
        };
        if stdout.len() > STDOUT_BYTES {
            group.kill();
            if timeout(KILL_TIMEOUT, child.wait()).await.is_ok() {
                input.returned();
            }
            return Err(CniError::TooMuchOutput {
                name: self.name.to_owned(),
                command: self.command,
                limit: STDOUT_BYTES,
            });
        }
        // All its processes have ended: its streams are closed.
        group.0 = None;
        input.returned();
        if status.success() {
            debug!(plugin = self.name, command = self.command, "done");
            return Ok(stdout);
        }
        let (code, message) = fault(status, &stdout, &stderr);
        Err(CniError::Failed {
            name: self.name.to_owned(),
            command: self.command,
            code,
            message,
        })
    }
}

/// Reads until the plugin's streams are closed and it has ended, or it has printed too much.
async fn converse(child: &mut Child) -> io::Result<(ExitStatus, Vec<u8>, Vec<u8>)> {
    let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(io::ErrorKind::BrokenPipe.into());
    };
    let (stdout, stderr) = tokio::try_join!(bounded(stdout), head(stderr))?;
    if stdout.len() > STDOUT_BYTES {
        return Ok((ExitStatus::default(), stdout, stderr));
    }
    Ok((child.wait().await?, stdout, stderr))
}

/// Reads all of `stream`, but at most one byte more than is allowed.
async fn bounded(stream: impl AsyncRead + Unpin) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let limit = STDOUT_BYTES as u64 + 1;
    stream.take(limit).read_to_end(&mut bytes).await?;
    Ok(bytes)
}

/// Reads all of `stream`, and keeps its beginning.
async fn head(mut stream: impl AsyncRead + Unpin) -> io::Result<Vec<u8>> {
    let mut kept = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let count = stream.read(&mut buffer).await?;
        if count == 0 {
            return Ok(kept);
        }
        let room = STDERR_BYTES.saturating_sub(kept.len()).min(count);
        kept.extend_from_slice(buffer.get(..room).unwrap_or_default());
    }
}

/// An error as in the CNI specification 1.1, "Error".
#[derive(Deserialize)]
struct ErrorResult {
    #[serde(default)]
    code: u64,
    #[serde(default)]
    msg: String,
    #[serde(default)]
    details: Value,
}

fn fault(status: ExitStatus, stdout: &[u8], stderr: &[u8]) -> (u64, String) {
    let error = serde_json::from_slice::<ErrorResult>(stdout).ok();
    match error.filter(|error| !error.msg.is_empty()) {
        Some(error) => {
            let details = match &error.details {
                Value::String(text) if !text.is_empty() => format!(": {text}"),
                _ => String::new(),
            };
            let message = format!("{}{details} (code {})", error.msg, error.code);
            (error.code, clean(&message))
        }
        None => {
            let said = String::from_utf8_lossy(if stderr.is_empty() { stdout } else { stderr });
            (0, clean(&format!("{status}; it printed: {}", said.trim())))
        }
    }
}

/// Removes control characters, and limits the length for logs.
pub(super) fn clean(text: &str) -> String {
    let text = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    text.take(MESSAGE_CHARS).collect()
}

/// Writes a plugin for tests. This is done by another process: a process that another thread starts
/// meanwhile would inherit the file open for writing, and it could not be executed then.
#[cfg(test)]
pub(super) fn write_script(dir: &std::path::Path, name: &str, script: &str) {
    let mut write = std::process::Command::new("sh");
    write.args([
        "-c",
        r#"printf '#!/bin/sh\n%s\n' "$1" >"$0" && chmod 755 "$0""#,
    ]);
    let written = write.arg(dir.join(name)).arg(script).status();
    assert!(written.unwrap().success());
}
