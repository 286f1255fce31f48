//! Refusals of several kinds of requests.

use super::super::super::error::SandboxError;
use super::super::super::types::RefusalKind;

/// Refuses what needs a machine that runs.
pub(super) fn no_machine() -> SandboxError {
    SandboxError::refused(
        RefusalKind::WrongState,
        "the sandbox has no machine that runs: start its container",
    )
}

/// Refuses what a machine with shared directories, which have these tags, cannot do: the host's
/// files that its guest has open are neither in its memory nor on its disks.
pub(super) fn must_share_nothing<'a>(
    tags: impl Iterator<Item = &'a str>,
) -> Result<(), SandboxError> {
    let tags: Vec<&str> = tags.collect();
    match tags.is_empty() {
        true => Ok(()),
        false => Err(SandboxError::refused(
            RefusalKind::WrongState,
            format!(
                "the machine shares directories with its host ({}), whose files cannot go with \
                 its memory: it can be stopped and started, but neither saved nor moved",
                tags.join(", ")
            ),
        )),
    }
}

/// Refuses a request that is wrong in itself.
pub(super) fn invalid(why: String) -> SandboxError {
    SandboxError::refused(RefusalKind::InvalidArgument, why)
}
