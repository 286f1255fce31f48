//! Control groups and devices.

use std::collections::HashMap;

use oci_spec::runtime::{
    LinuxCpuBuilder, LinuxDeviceCgroup, LinuxDeviceCgroupBuilder, LinuxDeviceType,
    LinuxHugepageLimit, LinuxHugepageLimitBuilder, LinuxMemoryBuilder, LinuxPidsBuilder,
    LinuxResources, LinuxResourcesBuilder,
};
use podvisor_cri_messages::LinuxContainerResources;

use super::fault::SpecFault;
use crate::sandbox::device_rules;

/// Returns the limits of a container's control group in the guest.
pub(in crate::cri) fn resources(
    wanted: &LinuxContainerResources,
) -> Result<LinuxResources, SpecFault> {
    build(Some(wanted), None)
}

pub(super) fn with_devices(
    wanted: Option<&LinuxContainerResources>,
    is_privileged: bool,
) -> Result<LinuxResources, SpecFault> {
    let rules = match is_privileged {
        true => vec![allow_all()?],
        false => device_rules()?,
    };
    build(wanted, Some(rules))
}

fn allow_all() -> Result<LinuxDeviceCgroup, SpecFault> {
    Ok(LinuxDeviceCgroupBuilder::default()
        .allow(true)
        .typ(LinuxDeviceType::A)
        .access("rwm")
        .build()?)
}

fn build(
    wanted: Option<&LinuxContainerResources>,
    devices: Option<Vec<LinuxDeviceCgroup>>,
) -> Result<LinuxResources, SpecFault> {
    let none = LinuxContainerResources::default();
    let wanted = wanted.unwrap_or(&none);
    let mut resources = LinuxResourcesBuilder::default();
    if let Some(devices) = devices {
        resources = resources.devices(devices);
    }
    let mut cpu = LinuxCpuBuilder::default();
    let mut has_cpu = false;
    if let Some(shares) = positive("linux.resources.cpu_shares", wanted.cpu_shares)? {
        cpu = cpu.shares(shares);
        has_cpu = true;
    }
    if let Some(period) = positive("linux.resources.cpu_period", wanted.cpu_period)? {
        cpu = cpu.period(period);
        has_cpu = true;
    }
    // -1 is the kernel's value for no limit.
    if wanted.cpu_quota != 0 {
        if wanted.cpu_quota < -1 {
            let reason = format!("{} is an invalid CPU quota", wanted.cpu_quota);
            return Err(SpecFault::invalid("linux.resources.cpu_quota", reason));
        }
        cpu = cpu.quota(wanted.cpu_quota);
        has_cpu = true;
    }
    // cpuset_cpus and cpuset_mems name CPUs of the host; the guest has others.
    if has_cpu {
        resources = resources.cpu(cpu.build()?);
    }
    // As for the quota: a kubelet sends -1 for a pod whose containers have no limit.
    let limit = wanted.memory_limit_in_bytes;
    if limit < -1 {
        let field = "linux.resources.memory_limit_in_bytes";
        return Err(SpecFault::invalid(field, format!("{limit} is negative")));
    }
    if limit != 0 {
        let memory = LinuxMemoryBuilder::default().limit(limit);
        resources = resources.memory(memory.build()?);
    }
    if let Some(limit) = wanted.unified.get("pids.max") {
        // `max` is the default.
        if let Ok(limit) = limit.parse::<i64>() {
            resources = resources.pids(LinuxPidsBuilder::default().limit(limit).build()?);
        }
    }
    if !wanted.hugepage_limits.is_empty() {
        resources = resources.hugepage_limits(hugepages(wanted)?);
    }
    if !wanted.unified.is_empty() {
        let unified: HashMap<String, String> = wanted.unified.clone();
        if let Some(name) = unified.keys().find(|name| !is_cgroup_file(name)) {
            let reason = format!("{name:?} is not a file of a control group");
            return Err(SpecFault::invalid("linux.resources.unified", reason));
        }
        resources = resources.unified(unified);
    }
    Ok(resources.build()?)
}

/// Returns `None` for 0, which means "not set".
fn positive(field: &'static str, value: i64) -> Result<Option<u64>, SpecFault> {
    match u64::try_from(value) {
        Ok(0) => Ok(None),
        Ok(value) => Ok(Some(value)),
        Err(_) => Err(SpecFault::invalid(field, format!("{value} is negative"))),
    }
}

/// Accepts only limits of 0, which kubelets set for all sizes that a container does not ask for.
/// The guest cannot use the node's huge pages and has none.
fn hugepages(wanted: &LinuxContainerResources) -> Result<Vec<LinuxHugepageLimit>, SpecFault> {
    let limits = wanted.hugepage_limits.iter().map(|limit| {
        if limit.limit > 0 {
            return Err(SpecFault::Refused {
                field: "linux.resources.hugepage_limits",
                reason: "a guest has no huge pages of the node's to hand out; its memory is of \
                         transparent ones where the node permits that",
            });
        }
        Ok(LinuxHugepageLimitBuilder::default()
            .page_size(limit.page_size.clone())
            .limit(0)
            .build()?)
    });
    limits.collect()
}

fn is_cgroup_file(name: &str) -> bool {
    let plain =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._".contains(&byte);
    name.contains('.') && !name.starts_with('.') && name.bytes().all(plain)
}
