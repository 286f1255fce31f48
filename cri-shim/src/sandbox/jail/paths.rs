//! Landlock: what the process may reach by path is nothing, or below the shared directory.

use std::os::fd::BorrowedFd;

use super::{JailError, MissingLayer};
use landlock::{
    ABI, Access as _, AccessFs, AccessNet, CompatLevel, Compatible as _, PathBeneath, Ruleset,
    RulesetAttr as _, RulesetCreatedAttr as _, RulesetStatus, Scope,
};

/// What is asked for; a kernel that knows less enforces what it knows.
const ABI: ABI = ABI::V6;

/// Says what of it the kernel does not have.
pub(super) fn close(share: Option<BorrowedFd<'_>>) -> Result<Option<MissingLayer>, JailError> {
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
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => None,
        RulesetStatus::PartiallyEnforced => Some(MissingLayer::PartOfLandlock),
        RulesetStatus::NotEnforced => Some(MissingLayer::Landlock),
    })
}

/// Whether the kernel has Landlock, of any age. Where it has none, a process that serves a
/// directory has a layer less around it.
#[must_use]
pub fn has_landlock() -> bool {
    let oldest = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(landlock::ABI::V1));
    oldest.and_then(Ruleset::create).is_ok()
}
