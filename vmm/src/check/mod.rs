//! Checks whether this host can run guests, and says what to do if it cannot.
//!
//! [`run`] checks the host's files and KVM's capabilities (`host`, `cpu`, `kvm`) and then runs a
//! guest of a few dozen bytes for each thing that a kernel needs of a processor (`probe`). It
//! returns a [`Report`]; printing it, and exit codes, are up to the caller.
//!
//! Nothing here changes the host. All checks together take some seconds at most, or up to half a
//! minute if guests hang.

mod cpu;
mod host;
mod kvm;
mod probe;

use serde::Serialize;

use crate::cpuid;
use crate::kvm::KvmError;

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Status {
    /// As it should be.
    Ok,
    /// Works, with a loss that the item describes.
    Warning,
    /// Missing, or not allowed.
    Missing,
    /// Exists, but does not work correctly.
    Broken,
}

/// One thing that was checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Item {
    /// What was checked, such as "/dev/kvm" or "guest: SYSCALL".
    pub name: &'static str,
    /// The result.
    pub status: Status,
    /// What was found, in a few words.
    pub found: String,
    /// What to do about it, if anything.
    pub remedy: Option<String>,
    /// No guest runs without it. Items that are not required affect features or speed.
    pub required: bool,
}

impl Item {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self {
            name,
            status: Status::Ok,
            found: found.into(),
            remedy: None,
            required: false,
        }
    }

    fn bad(
        name: &'static str,
        status: Status,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            status,
            remedy: Some(remedy.into()),
            ..Self::ok(name, found)
        }
    }

    /// Marks the item as something that no guest runs without.
    fn required(self) -> Self {
        Self {
            required: true,
            ..self
        }
    }

    fn prevents_guests(&self) -> bool {
        self.required && matches!(self.status, Status::Missing | Status::Broken)
    }
}

/// The result of [`run`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// All items, in the order in which they were checked.
    pub items: Vec<Item>,
}

impl Report {
    /// Returns whether guests can run on this host: nothing that they need is missing or broken.
    #[must_use]
    pub fn can_run_guests(&self) -> bool {
        !self.items.iter().any(Item::prevents_guests)
    }

    /// Returns one line: that guests can run, or what prevents it.
    #[must_use]
    pub fn verdict(&self) -> String {
        let mut faults = self.items.iter().filter(|item| item.prevents_guests());
        match (faults.next(), faults.count()) {
            (None, _) => "guests can run here".to_owned(),
            (Some(first), more) => {
                let more = match more {
                    0 => String::new(),
                    n => format!(" (and {n} more)"),
                };
                format!(
                    "guests cannot run here: {}: {}{more}",
                    first.name, first.found
                )
            }
        }
    }
}

/// Checks this host. Needs only the privileges that running guests needs.
#[must_use]
pub fn run() -> Report {
    let mut items = Vec::new();
    if kvm::check(&mut items) {
        probe::check(&mut items);
    }
    host::check(&mut items);
    cpu::check(&mut items);
    tracing::debug!(items = items.len(), "host checked");
    Report { items }
}

/// Returns whether the processor is AMD's and KVM does not offer guests its automatic IBRS
/// (CPUID leaf 0x80000021, EAX bit 8), as KVM of Linux 6.1 does not on any processor. A guest's
/// kernel then needs retpolines against Spectre v2, also where the host's own kernel does without.
///
/// There is no such gap on Intel's processors: KVM passes on the bits by which a kernel decides.
///
/// # Errors
/// KVM cannot be used.
pub fn guests_lack_ibrs() -> Result<bool, KvmError> {
    cpuid::lacks_ibrs(&crate::kvm::open()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(items: Vec<Item>) -> Report {
        Report { items }
    }

    #[test]
    fn what_is_not_required_does_not_keep_guests_from_running() {
        let report = report(vec![
            Item::ok("/dev/kvm", "there").required(),
            Item::bad("/dev/net/tun", Status::Missing, "not there", "modprobe tun"),
            Item::bad("nested paging", Status::Warning, "off", "turn it on").required(),
        ]);
        assert!(report.can_run_guests());
        assert_eq!(report.verdict(), "guests can run here");
    }

    #[test]
    fn the_verdict_names_the_first_of_what_is_wrong() {
        let report = report(vec![
            Item::ok("/dev/kvm", "there").required(),
            Item::bad("guest: SYSCALL", Status::Broken, "CPL stays 3", "…").required(),
            Item::bad("guest: ud2", Status::Broken, "nothing", "…").required(),
        ]);
        assert!(!report.can_run_guests());
        assert_eq!(
            report.verdict(),
            "guests cannot run here: guest: SYSCALL: CPL stays 3 (and 1 more)"
        );
    }

    #[test]
    fn a_report_of_this_machine_names_every_miss_with_a_remedy() {
        let report = run();
        assert!(report.items.iter().any(|item| item.name == "/dev/kvm"));
        for item in &report.items {
            assert_eq!(item.remedy.is_none(), item.status == Status::Ok, "{item:?}");
            assert!(!item.found.is_empty(), "{item:?}");
        }
    }
}
