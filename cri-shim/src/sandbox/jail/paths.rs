//! Landlock: what the process may reach by path is nothing, or below the shared directory.

use std::os::fd::BorrowedFd;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, CompatLevel, Compatible as _, PathBeneath, Ruleset,
    RulesetAttr as _, RulesetCreatedAttr as _, RulesetStatus, Scope,
};
use tracing::debug;

use super::JailError;

/// What is asked for; a kernel that knows less enforces what it knows.
const ABI: ABI = ABI::V6;

pub(super) fn close(share: Option<BorrowedFd<'_>>) -> Result<(), JailError> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI))?
        .handle_access(AccessNet::from_all(ABI))?
        .scope(Scope::from_all(ABI))?
        .create()?;
    if let Some(share) = share {
        let access = AccessFs::from_all(ABI) & !(AccessFs::Execute | AccessFs::MakeBlock);
        rules = rules.add_rule(PathBeneath::new(share, access))?;
    }
    let status = rules.restrict_self()?;
    if status.ruleset != RulesetStatus::FullyEnforced {
        debug!(status = ?status.ruleset, "the kernel has not all of Landlock");
    }
    Ok(())
}
