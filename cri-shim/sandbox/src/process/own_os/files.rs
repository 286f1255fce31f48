//! Files that are copied to and from a guest by its agent. The other end is a stream: when nobody
//! is there any more, the copy ends.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;

use podvisor_guest_agent::{FileUse, GuestAgentError, OpenFile, Program, ProgramExit};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use super::super::super::error::SandboxError;
use super::super::super::stdio::StdioError;
use super::super::super::types::RefusalKind;
use super::agent_of_machine::{AgentOfMachine, LIMIT, refusal};
use super::vm::Vm;

/// Bytes that are read from the stream at once.
const PIECE: usize = 256 << 10;

/// Copies a file from the guest to a stream, or from a stream to the guest if there is a mode for
/// it. Returns its size.
pub(super) async fn copy(
    vm: &Arc<Vm>,
    path: &str,
    write: Option<u32>,
    stream: OwnedFd,
) -> Result<u64, SandboxError> {
    let stream = StdUnixStream::from(stream);
    let stream = stream.set_nonblocking(true).map(|()| stream);
    let stream = stream.and_then(UnixStream::from_std);
    let name = "file";
    let mut stream = stream.map_err(|source| StdioError::SetUp { name, source })?;
    let agent = vm.agent("copy a file of the guest").await?;
    let usage = match write {
        Some(_) => FileUse::Write,
        None => FileUse::Read,
    };
    let opened = agent.open_file(path, usage, LIMIT).await;
    let file = match opened {
        Ok(file) => file,
        Err(error @ GuestAgentError::Refused { .. }) => return Err(refused(&error)),
        Err(error) => vm.judged(Err(error)).await?,
    };
    let copied = match write {
        Some(_) => to_guest(&agent, file, &mut stream).await,
        None => from_guest(&agent, file, &mut stream).await,
    };
    // Also after a failure: the agent keeps it open.
    let closed = agent.close_file(file, LIMIT).await;
    let count = vm.judged(copied).await?;
    vm.judged(closed).await?;
    if let Some(mode) = write {
        let chmod = Program {
            path: "chmod".to_owned(),
            arguments: vec![format!("{:o}", mode & 0o7777), path.to_owned()],
            ..Program::default()
        };
        let number = vm.judged(agent.start_program(&chmod, LIMIT).await).await?;
        let end = vm.judged(agent.program_end(number, LIMIT).await).await?;
        if end.exit != ProgramExit::Code(0) {
            return Err(SandboxError::refused(
                RefusalKind::Internal,
                format!("the guest's chmod failed with code {}", end.exit.code()),
            ));
        }
    }
    Ok(count)
}

async fn to_guest(
    agent: &AgentOfMachine,
    file: OpenFile,
    stream: &mut UnixStream,
) -> Result<u64, GuestAgentError> {
    let mut copied = 0;
    let mut piece = vec![0; PIECE];
    loop {
        let read = stream.read(&mut piece).await.map_err(port)?;
        if read == 0 {
            return Ok(copied);
        }
        let bytes = piece.get(..read).unwrap_or_default();
        agent.write_file(file, bytes, LIMIT).await?;
        copied += bytes.len() as u64;
    }
}

async fn from_guest(
    agent: &AgentOfMachine,
    file: OpenFile,
    stream: &mut UnixStream,
) -> Result<u64, GuestAgentError> {
    let mut copied = 0;
    loop {
        let bytes = agent.read_file(file, LIMIT).await?;
        if bytes.is_empty() {
            return Ok(copied);
        }
        stream.write_all(&bytes).await.map_err(port)?;
        copied += bytes.len() as u64;
    }
}

/// The client is gone: nobody reads the error.
fn port(source: std::io::Error) -> GuestAgentError {
    GuestAgentError::Refused {
        command: "a copy",
        reason: format!("the other end is gone: {source}"),
    }
}

fn refused(error: &GuestAgentError) -> SandboxError {
    match error {
        GuestAgentError::Refused { reason, .. } => {
            SandboxError::refused(RefusalKind::NotFound, reason.clone())
        }
        error => refusal(error),
    }
}
