//! Landlock: the process can access nothing by path, or only files below the shared directory.

use std::os::fd::BorrowedFd;

use super::error::{JailError, MissingLayer};
use landlock::{
    ABI, Access as _, AccessFs, AccessNet, CompatLevel, Compatible as _, PathBeneath, Ruleset,
    RulesetAttr as _, RulesetCreatedAttr as _, RulesetStatus, Scope,
};

/// The ABI that is requested; an older kernel enforces the part that it knows.
const ABI: ABI = ABI::V6;

/// Restricts the process; returns the part that the kernel does not support.
pub(super) fn close(share: Option<BorrowedFd<'_>>) -> Result<Option<MissingLayer>, JailError> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI))?
        .handle_access(AccessNet::from_all(ABI))?
        .scope(Scope::from_all(ABI))?
        .create()?;
    if let Some(share) = share {
        // The server of the directory opens no devices, and calls no driver.
        let denied = AccessFs::Execute | AccessFs::MakeBlock | AccessFs::IoctlDev;
        let access = AccessFs::from_all(ABI) & !denied;
        rules = rules.add_rule(PathBeneath::new(share, access))?;
    }
    let status = rules.restrict_self()?;
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => None,
        RulesetStatus::PartiallyEnforced => Some(MissingLayer::PartOfLandlock),
        RulesetStatus::NotEnforced => Some(MissingLayer::Landlock),
    })
}

/// Whether the kernel has Landlock, of any version. Without it, a process that serves a directory
/// has one layer less.
#[must_use]
pub fn has_landlock() -> bool {
    let oldest = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(landlock::ABI::V1));
    oldest.and_then(Ruleset::create).is_ok()
}
