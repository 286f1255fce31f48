//! New limits for an existing container.

use std::path::Path;

use libcgroups::common::{CgroupManager as _, ControllerOpt};
use libcgroups::v2::manager::{Manager, V2ManagerError};
use oci_spec::runtime::LinuxResources;
use podvisor_agent_protocol::limits::SPEC_BYTES;

use crate::cgroup::{CGROUP_ROOT, Cgroup};
use crate::container::spec_error::SpecError;

/// Leaves out limits of what this guest does not have: whatever they are, they hold. Memory that is
/// kept for a container is so only as long as there is other memory to take back.
pub(super) fn keep_what_is_there(resources: &mut LinuxResources) {
    keep(resources, |path| Path::new(path).exists());
}

fn keep(resources: &mut LinuxResources, is_there: impl Fn(&str) -> bool) {
    // Not every kernel supports swap; the file exists even if there is no swap space.
    if !is_there("/proc/swaps")
        && let Some(unified) = resources.unified_mut()
    {
        unified.retain(|name, _| !name.starts_with("memory.swap."));
    }
    // What the kernel must not take back counts at the mark of a guest that may get more memory
    // (`memory.high` of all containers together): cached files would hold up who reads them, though
    // the guest is not short of memory.
    if let Some(unified) = resources.unified_mut()
        && let Some(kept) = unified.remove("memory.min")
    {
        let low = unified.entry("memory.low".to_owned());
        let low = low.or_insert_with(|| kept.clone());
        if bytes(&kept) > bytes(low) {
            *low = kept;
        }
    }
    if let Some(limits) = resources.hugepage_limits_mut() {
        limits.retain(|limit| {
            let kib = kib(limit.page_size());
            kib.is_none_or(|kib| is_there(&format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB")))
        });
    }
}

/// Parses a value of memory.min or memory.low; what is none counts as 0.
fn bytes(value: &str) -> u64 {
    match value {
        "max" => u64::MAX,
        number => number.parse().unwrap_or(0),
    }
}

/// Parses the size of a page in KiB from its name in control groups: `2MB`, `1GB`.
fn kib(size: &str) -> Option<u64> {
    let (number, factor) = match size.strip_suffix("KB") {
        Some(number) => (number, 1),
        None => match size.strip_suffix("MB") {
            Some(number) => (number, 1 << 10),
            None => (size.strip_suffix("GB")?, 1 << 20),
        },
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

/// Reads the limits of a request.
///
/// # Errors
///
/// [`SpecError`] for JSON that is not such an object, and for rules for devices.
pub(super) fn parse(json: &[u8]) -> Result<LinuxResources, SpecError> {
    const WHAT: &str = "resources_json";
    if json.len() > SPEC_BYTES {
        return Err(SpecError::TooLarge {
            what: WHAT,
            limit: SPEC_BYTES,
        });
    }
    let mut resources: LinuxResources = serde_json::from_slice(json)
        .map_err(|source| SpecError::Malformed { what: WHAT, source })?;
    if resources
        .devices()
        .as_ref()
        .is_some_and(|rules| !rules.is_empty())
    {
        return Err(SpecError::Refused(
            "rules for devices cannot be changed while a container lives",
        ));
    }
    keep_what_is_there(&mut resources);
    Ok(resources)
}

/// Applies limits; those that are left out stay unchanged.
///
/// # Errors
///
/// Limits that the kernel refuses, such as a memory limit below the memory that cannot be
/// reclaimed.
pub(super) fn apply(resources: &LinuxResources, cgroup: &Cgroup) -> Result<(), V2ManagerError> {
    let manager = Manager::new(
        Path::new(CGROUP_ROOT).to_owned(),
        cgroup.spec_path().to_owned(),
    )?;
    manager.apply(&ControllerOpt {
        resources,
        disable_oom_killer: false,
        oom_score_adj: None,
        freezer_state: None,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn limits_of_what_is_not_there_are_left_out() {
        let json = json!({
            "unified": {"memory.swap.max": "0", "memory.min": "1"},
            "hugepageLimits": [
                {"pageSize": "2MB", "limit": 0},
                {"pageSize": "1GB", "limit": 0},
                {"pageSize": "strange", "limit": 0},
            ],
        });
        let kept = |is_there: fn(&str) -> bool| {
            let mut resources: LinuxResources = serde_json::from_value(json.clone()).unwrap();
            keep(&mut resources, is_there);
            let limits = resources.hugepage_limits().iter().flatten();
            let sizes: Vec<_> = limits.map(|limit| limit.page_size().clone()).collect();
            (resources.unified().as_ref().unwrap().len(), sizes.join(" "))
        };
        assert_eq!(kept(|_| true), (2, "2MB 1GB strange".to_owned()));
        let small = |path: &str| path == "/sys/kernel/mm/hugepages/hugepages-2048kB";
        assert_eq!(kept(small), (1, "2MB strange".to_owned()));
        for (size, in_kib) in [("64KB", Some(64)), ("16GB", Some(16 << 20)), ("GB", None)] {
            assert_eq!(kib(size), in_kib, "{size}");
        }
    }

    #[test]
    fn memory_that_must_not_be_taken_back_is_taken_back_last() {
        for (given, expected) in [
            (json!({"memory.min": "7"}), json!({"memory.low": "7"})),
            (json!({"memory.min": "0"}), json!({"memory.low": "0"})),
            (
                json!({"memory.min": "7", "memory.low": "9", "memory.max": "max"}),
                json!({"memory.low": "9", "memory.max": "max"}),
            ),
            (json!({"memory.low": "9"}), json!({"memory.low": "9"})),
            (
                json!({"memory.min": "7", "memory.low": "0"}),
                json!({"memory.low": "7"}),
            ),
            (
                json!({"memory.min": "max", "memory.low": "9"}),
                json!({"memory.low": "max"}),
            ),
        ] {
            let json = json!({ "unified": given }).to_string();
            let resources = parse(json.as_bytes()).unwrap();
            assert_eq!(json!(resources.unified()), expected);
        }
    }

    #[test]
    fn limits_are_read_and_rules_for_devices_refused() {
        let limits = parse(br#"{"memory": {"limit": 67108864}, "cpu": {"shares": 512}}"#).unwrap();
        assert_eq!(limits.memory().unwrap().limit(), Some(64 << 20));
        assert!(parse(b"true").is_err());
        assert!(parse(br#"{"devices": [{"allow": true}]}"#).is_err());
        assert!(parse(&vec![b' '; SPEC_BYTES + 1]).is_err());
        parse(br#"{"devices": []}"#).unwrap();
    }
}
