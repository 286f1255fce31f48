//! What this controller wrote and its stores do not show yet.
//!
//! A look that comes before the controller's own last write is seen would do the same again. The
//! API server would refuse that, but it costs a request each time.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kube::Resource;

/// A write that is not seen for so long is forgotten: the object may have gone meanwhile.
pub(super) const LIMIT: Duration = Duration::from_secs(5);

/// So many objects are remembered at most.
const MOST: usize = 4096;

/// Writes that are not seen yet, by the unique id of what was looked at.
#[derive(Debug, Default)]
pub(super) struct Expectations(Mutex<HashMap<String, Expected>>);

#[derive(Debug, Clone)]
struct Expected {
    /// The version of the object itself.
    own: Option<u64>,
    /// The version of what was made for it.
    child: Option<u64>,
    until: Instant,
}

impl Expectations {
    /// Remembers that an object was written.
    pub(super) fn wrote<K: Resource>(&self, object: &K) {
        let version = version(object);
        self.update(object, |expected| expected.own = version.or(expected.own));
    }

    /// Remembers that something was made for an object.
    pub(super) fn made<K: Resource, C: Resource>(&self, object: &K, child: &C) {
        let version = version(child);
        self.update(object, |expected| {
            expected.child = version.or(expected.child)
        });
    }

    fn update<K: Resource>(&self, object: &K, change: impl FnOnce(&mut Expected)) {
        let Some(uid) = object.meta().uid.clone() else {
            return;
        };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MOST {
            known.clear();
        }
        let until = Instant::now() + LIMIT;
        let expected = known.entry(uid).or_insert(Expected {
            own: None,
            child: None,
            until,
        });
        expected.until = until;
        change(expected);
    }

    /// Returns whether what was written is still to be seen, by the object and by what was made
    /// for it.
    pub(super) fn are_pending<K: Resource, C: Resource>(
        &self,
        object: &K,
        child: Option<&C>,
    ) -> bool {
        let Some(uid) = &object.meta().uid else {
            return false;
        };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(expected) = known.get(uid) else {
            return false;
        };
        let seen = |expected: Option<u64>, seen: Option<u64>| {
            expected.is_none_or(|expected| seen.is_some_and(|seen| seen >= expected))
        };
        let all =
            seen(expected.own, version(object)) && seen(expected.child, child.and_then(version));
        if all || Instant::now() >= expected.until {
            known.remove(uid);
            return false;
        }
        true
    }
}

/// Returns an object's version as a number: of one kind, they are in order.
fn version<K: Resource>(object: &K) -> Option<u64> {
    object.meta().resource_version.as_deref()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::{VirtualMachine, VirtualMachineInstance};

    fn vm(version: &str) -> VirtualMachine {
        let mut vm = VirtualMachine::default();
        vm.metadata.uid = Some("u".into());
        vm.metadata.resource_version = Some(version.into());
        vm
    }

    fn vmi(version: &str) -> VirtualMachineInstance {
        let mut vmi = VirtualMachineInstance::default();
        vmi.metadata.resource_version = Some(version.into());
        vmi
    }

    const NONE: Option<&VirtualMachineInstance> = None;

    #[test]
    fn an_own_write_is_waited_for() {
        let expectations = Expectations::default();
        assert!(!expectations.are_pending(&vm("5"), NONE));
        expectations.wrote(&vm("10"));
        assert!(expectations.are_pending(&vm("9"), NONE), "9 is before 10");
        assert!(
            !expectations.are_pending(&vm("11"), NONE),
            "others wrote, too"
        );
        assert!(!expectations.are_pending(&vm("9"), NONE), "it was seen");
    }

    #[test]
    fn what_was_made_is_waited_for() {
        let expectations = Expectations::default();
        expectations.made(&vm("5"), &vmi("20"));
        assert!(expectations.are_pending(&vm("5"), NONE));
        assert!(
            expectations.are_pending(&vm("5"), Some(&vmi("19"))),
            "the one before"
        );
        assert!(!expectations.are_pending(&vm("5"), Some(&vmi("20"))));
    }

    #[test]
    fn versions_that_are_no_numbers_are_not_waited_for() {
        let expectations = Expectations::default();
        expectations.wrote(&vm("x"));
        assert!(!expectations.are_pending(&vm("y"), NONE));
    }
}
