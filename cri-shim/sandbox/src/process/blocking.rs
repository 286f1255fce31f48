//! Work that may block, such as on a disk that does not answer.

use super::super::error::SandboxError;
use super::super::types::RefusalKind;

/// Runs it on a thread of its own.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, SandboxError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| SandboxError::refused(RefusalKind::Internal, error.to_string()))
}
