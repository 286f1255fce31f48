//! Seccomp profiles of the OCI runtime specification, compiled to the filters that the kernel runs.
//!
//! [`compile`] turns a profile into a classic BPF [`Filter`] (seccomp(2)): one binary search over
//! the system call numbers for each architecture, followed by the conditions on arguments for the
//! numbers that have some (`calls` resolves names, `program` knows instructions). [`Filter`] is
//! stored next to the container's specification and installed by the launcher, for the container's
//! first process and for all that follow.
//!
//! libseccomp takes several times as long for the same; tests compare the filters of both.
//!
//! # What a profile means
//!
//! A rule without conditions decides its system calls, whatever other rules say about them. Of the
//! rules with conditions the first that holds decides, and all of a rule's conditions must hold.
//! Names that an architecture does not have are skipped, and so are architectures that the guest
//! does not have: profiles are written for several. A call of an architecture that the profile does
//! not name kills the thread.
//!
//! Numbers above all that a profile names are of calls that are newer than the profile, and fail
//! with ENOSYS: C libraries then use an older call (clone3, faccessat2), which they do not after
//! EPERM. As in runc, that is so whatever the default action is, unless it lets calls through.

mod calls;
mod condition;
mod filter;
mod program;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use oci_spec::runtime::{
    Arch, LinuxSeccomp, LinuxSeccompAction, LinuxSeccompArg, LinuxSeccompFilterFlag, LinuxSyscall,
};

use calls::{Architecture, Multiplexed};
use condition::Condition;
pub use filter::Filter;
use program::{ENOSYS, Leaf, Rule, Table};

/// A profile that cannot be compiled to a filter.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// Notification is requested, but no process in the guest could be notified.
    #[error("seccomp profile: SCMP_ACT_NOTIFY has nobody to notify in a guest")]
    Notify,
    /// A condition on an argument that system calls do not have.
    #[error("seccomp profile: system calls have arguments 0 to 5, not {0}")]
    Argument(usize),
    /// An error code larger than a filter can return.
    #[error("seccomp profile: error {0} is above 4095")]
    Errno(u32),
    /// More instructions than the kernel accepts.
    #[error(
        "seccomp profile: its filter has {0} instructions, the kernel takes {MAX_INSTRUCTIONS}: \
         name fewer system calls with conditions"
    )]
    TooLarge(usize),
}

/// `BPF_MAXINSNS` of the kernel.
const MAX_INSTRUCTIONS: usize = 4096;

/// The largest error code that the kernel accepts (`MAX_ERRNO`).
const MAX_ERRNO: u32 = 4095;

const EPERM: u32 = libc::EPERM.cast_unsigned();

/// Compiles a profile.
///
/// # Errors
///
/// [`ProfileError`].
pub fn compile(profile: &LinuxSeccomp) -> Result<Filter, ProfileError> {
    let default = action(profile.default_action(), profile.default_errno_ret())?;
    let named = |arch| profile.architectures().iter().flatten().any(|&a| a == arch);
    let mut architectures = vec![Architecture::X86_64];
    if named(Arch::ScmpArchX86) {
        architectures.push(Architecture::X86);
    }
    // The guest's kernel has no x32 calls: a program that may try them gets just that error.
    let x32 = if named(Arch::ScmpArchX32) {
        program::errno(ENOSYS)
    } else {
        program::KILL_THREAD
    };

    let rules = profile
        .syscalls()
        .iter()
        .flatten()
        .map(ParsedRule::new)
        .collect::<Result<Vec<_>, _>>()?;
    let tables = architectures
        .into_iter()
        .map(|architecture| Table {
            architecture,
            leaves: leaves(architecture, &rules, default),
            newer_from: (!lets_calls_through(profile.default_action()))
                .then(|| newer_from(architecture, &rules))
                .flatten(),
        })
        .collect::<Vec<_>>();
    let instructions = program::assemble(&tables, default, x32);
    if instructions.len() > MAX_INSTRUCTIONS {
        return Err(ProfileError::TooLarge(instructions.len()));
    }
    let has = |flag| profile.flags().iter().flatten().any(|&f| f == flag);
    Ok(Filter {
        log: has(LinuxSeccompFilterFlag::SeccompFilterFlagLog),
        spec_allow: has(LinuxSeccompFilterFlag::SeccompFilterFlagSpecAllow),
        instructions,
    })
}

/// Whether calls can succeed with this action. A tracer decides on calls that it does not know.
fn lets_calls_through(action: LinuxSeccompAction) -> bool {
    matches!(
        action,
        LinuxSeccompAction::ScmpActAllow
            | LinuxSeccompAction::ScmpActLog
            | LinuxSeccompAction::ScmpActTrace
    )
}

/// Returns the number after the highest one that any rule names, also those with the default
/// action.
fn newer_from(architecture: Architecture, rules: &[ParsedRule<'_>]) -> Option<u32> {
    let names = rules.iter().flat_map(|rule| rule.names);
    let last = names.filter_map(|name| architecture.number(name)).max()?;
    Some(last.saturating_add(1))
}

/// Returns the filter's return value for an action of a profile.
fn action(action: LinuxSeccompAction, errno: Option<u32>) -> Result<u32, ProfileError> {
    let errno = errno.unwrap_or(EPERM);
    let checked = || {
        if errno <= MAX_ERRNO {
            Ok(errno)
        } else {
            Err(ProfileError::Errno(errno))
        }
    };
    Ok(match action {
        LinuxSeccompAction::ScmpActKill | LinuxSeccompAction::ScmpActKillThread => {
            program::KILL_THREAD
        }
        LinuxSeccompAction::ScmpActKillProcess => program::KILL_PROCESS,
        LinuxSeccompAction::ScmpActTrap => program::TRAP,
        LinuxSeccompAction::ScmpActErrno => program::errno(checked()?),
        LinuxSeccompAction::ScmpActTrace => program::trace(checked()?),
        LinuxSeccompAction::ScmpActLog => program::LOG,
        LinuxSeccompAction::ScmpActAllow => program::ALLOW,
        LinuxSeccompAction::ScmpActNotify => return Err(ProfileError::Notify),
    })
}

/// A rule of a profile with its conditions checked.
struct ParsedRule<'a> {
    names: &'a [String],
    action: u32,
    /// One of these must hold; without any the rule always holds.
    alternatives: Vec<Vec<Condition>>,
}

impl<'a> ParsedRule<'a> {
    fn new(rule: &'a LinuxSyscall) -> Result<Self, ProfileError> {
        let conditions = rule
            .args()
            .iter()
            .flatten()
            .map(condition)
            .collect::<Result<Vec<_>, _>>()?;
        let twice = |(i, condition): (usize, &Condition)| {
            conditions
                .iter()
                .take(i)
                .any(|earlier| earlier.argument == condition.argument)
        };
        // As in other runtimes: several conditions on one argument are alternatives.
        let alternatives = if conditions.iter().enumerate().any(twice) {
            conditions
                .iter()
                .map(|&condition| vec![condition])
                .collect()
        } else if conditions.is_empty() {
            Vec::new()
        } else {
            vec![conditions]
        };
        Ok(Self {
            names: rule.names(),
            action: action(rule.action(), rule.errno_ret())?,
            alternatives,
        })
    }
}

fn condition(arg: &LinuxSeccompArg) -> Result<Condition, ProfileError> {
    let argument = u8::try_from(arg.index())
        .ok()
        .filter(|&index| index < 6)
        .ok_or(ProfileError::Argument(arg.index()))?;
    Ok(Condition {
        argument,
        operator: arg.op(),
        value: arg.value(),
        value_two: arg.value_two().unwrap_or(0),
    })
}

/// Returns the decisions for the numbers of one architecture; others get the default.
fn leaves(
    architecture: Architecture,
    rules: &[ParsedRule<'_>],
    default: u32,
) -> BTreeMap<u32, Leaf> {
    let mut leaves = BTreeMap::new();
    // A rule with the default action is ignored, as in libseccomp.
    for rule in rules.iter().filter(|rule| rule.action != default) {
        for name in rule.names {
            if let Some(number) = architecture.number(name) {
                add(&mut leaves, number, rule.action, &rule.alternatives);
            }
            // Arguments of a multiplexed call are in memory, which a filter cannot read.
            if let (Some(Multiplexed { call, function }), true) =
                (architecture.multiplexed(name), rule.alternatives.is_empty())
            {
                add(&mut leaves, call, rule.action, &[vec![function]]);
            }
        }
    }
    leaves
}

fn add(
    leaves: &mut BTreeMap<u32, Leaf>,
    number: u32,
    action: u32,
    alternatives: &[Vec<Condition>],
) {
    let leaf = leaves
        .entry(number)
        .or_insert_with(|| Leaf::Rules(Vec::new()));
    match leaf {
        Leaf::Always(_) => {}
        Leaf::Rules(_) if alternatives.is_empty() => *leaf = Leaf::Always(action),
        Leaf::Rules(rules) => rules.extend(alternatives.iter().map(|conditions| Rule {
            conditions: conditions.clone(),
            action,
        })),
    }
}
