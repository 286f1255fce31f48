//! Applying an instance type and a preference to a specification.

use super::{CpuPreference, InstancetypeSpec, PreferenceSpec};
use crate::{
    Cause, Causes, FieldPath, Quantity,
    config::MAX_VCPUS,
    vmi::{Cpu, Memory, VmiSpec},
};

const CONFLICT: &str = "conflicts with the instance type, which sets it";

/// How many cores a socket has where vCPUs are spread, if nothing is said.
const RATIO: i64 = 2;

/// Applies both to `spec`; every conflict, by the path of its field below `path`
/// (`spec.template.spec` of a VM). With a conflict, the specification is of no use.
#[must_use]
pub fn apply(
    spec: &mut VmiSpec,
    instancetype: Option<&InstancetypeSpec>,
    preference: Option<&PreferenceSpec>,
    path: &FieldPath,
) -> Vec<Cause> {
    let mut causes = Causes::default();
    if let Some(instancetype) = instancetype {
        conflicts(spec, instancetype, path, &mut causes);
        let topology = preference.and_then(|preference| preference.cpu.as_ref());
        let older = preference.and_then(|p| p.prefer_spread_socket_to_core_ratio);
        set_cpu(spec, instancetype, topology, older, path, &mut causes);
        set_memory(spec, instancetype, path, &mut causes);
        set_others(spec, instancetype);
    }
    if let Some(preference) = preference {
        prefer(spec, preference);
        require(spec, preference, path, &mut causes);
    }
    causes.into_vec()
}

/// What both the VM and its instance type set.
fn conflicts(
    spec: &VmiSpec,
    instancetype: &InstancetypeSpec,
    path: &FieldPath,
    causes: &mut Causes,
) {
    let domain = &spec.domain;
    let mut conflict = |given: bool, field: &str| {
        if given {
            causes.invalid(&path.child(field), CONFLICT);
        }
    };
    let cpu = domain.cpu.clone().unwrap_or_default();
    let given = |number: Option<i64>| number.is_some_and(|number| number != 0);
    conflict(given(cpu.cores), "domain.cpu.cores");
    conflict(given(cpu.sockets), "domain.cpu.sockets");
    conflict(given(cpu.threads), "domain.cpu.threads");
    let of = &instancetype.cpu;
    conflict(
        of.model.is_some() && cpu.model.is_some(),
        "domain.cpu.model",
    );
    conflict(
        of.max_sockets.is_some() && cpu.max_sockets.is_some(),
        "domain.cpu.maxSockets",
    );
    conflict(
        of.dedicated_cpu_placement.is_some() && cpu.dedicated_cpu_placement.is_some(),
        "domain.cpu.dedicatedCpuPlacement",
    );
    let (of, memory) = (
        &instancetype.memory,
        domain.memory.clone().unwrap_or_default(),
    );
    conflict(memory.guest.is_some(), "domain.memory.guest");
    conflict(
        of.max_guest.is_some() && memory.max_guest.is_some(),
        "domain.memory.maxGuest",
    );
    conflict(
        of.hugepages.is_some() && memory.hugepages.is_some(),
        "domain.memory.hugepages",
    );
    for (name, list) in [
        ("requests", &domain.resources.requests),
        ("limits", &domain.resources.limits),
    ] {
        for resource in ["cpu", "memory"] {
            let field = format!("domain.resources.{name}.{resource}");
            conflict(list.contains_key(resource), &field);
        }
    }
    conflict(
        instancetype.io_threads_policy.is_some() && domain.io_threads_policy.is_some(),
        "domain.ioThreadsPolicy",
    );
    for name in instancetype.node_selector.keys() {
        conflict(
            spec.node_selector.contains_key(name),
            &format!("nodeSelector.{name}"),
        );
    }
    conflict(
        instancetype.scheduler_name.is_some() && spec.scheduler_name.is_some(),
        "schedulerName",
    );
}

fn set_cpu(
    spec: &mut VmiSpec,
    instancetype: &InstancetypeSpec,
    preference: Option<&CpuPreference>,
    older_ratio: Option<i64>,
    path: &FieldPath,
    causes: &mut Causes,
) {
    let of = &instancetype.cpu;
    let field = path.child("domain.cpu");
    let guest = of.guest.unwrap_or_default();
    if !(1..=MAX_VCPUS).contains(&guest) {
        let message =
            format!("gets {guest} vCPUs from the instance type: 1 to {MAX_VCPUS} are possible");
        causes.invalid(&field, message);
        return;
    }
    let cpu = spec.domain.cpu.get_or_insert_with(Cpu::default);
    (cpu.sockets, cpu.cores, cpu.threads) = (Some(1), Some(1), Some(1));
    let topology = preference.and_then(|preference| preference.preferred_cpu_topology.as_deref());
    match topology {
        None | Some("any" | "sockets" | "preferSockets" | "preferAny") => cpu.sockets = Some(guest),
        Some("cores" | "preferCores") => cpu.cores = Some(guest),
        Some("threads" | "preferThreads") => cpu.threads = Some(guest),
        Some("spread" | "preferSpread") => {
            let options = preference.and_then(|preference| preference.spread_options.as_ref());
            let ratio = options.and_then(|options| options.ratio).or(older_ratio);
            let ratio = ratio.unwrap_or(RATIO);
            let across = options.and_then(|options| options.across.as_deref());
            if ratio < 1 || guest % ratio != 0 {
                let message = format!("gets {guest} vCPUs, which cannot be spread by {ratio}");
                causes.invalid(&field, message);
                return;
            }
            match across {
                None | Some("SocketsCores") => {
                    (cpu.sockets, cpu.cores) = (Some(guest / ratio), Some(ratio));
                }
                Some("CoresThreads") => {
                    (cpu.cores, cpu.threads) = (Some(guest / ratio), Some(ratio));
                }
                Some("SocketsCoresThreads") if guest % (ratio * 2) == 0 => {
                    let sockets = guest / (ratio * 2);
                    (cpu.sockets, cpu.cores, cpu.threads) = (Some(sockets), Some(ratio), Some(2));
                }
                Some(_) => {
                    let message =
                        format!("gets {guest} vCPUs, which cannot be spread as preferred");
                    causes.invalid(&field, message);
                    return;
                }
            }
        }
        Some(_) => {
            causes.invalid(&field, "has a preferredCPUTopology that is unknown");
            return;
        }
    }
    if of.model.is_some() {
        cpu.model.clone_from(&of.model);
    }
    if of.max_sockets.is_some() {
        cpu.max_sockets = of.max_sockets;
    }
    if of.dedicated_cpu_placement.is_some() {
        cpu.dedicated_cpu_placement = of.dedicated_cpu_placement;
    }
    // Refused by validation, like a VM's own.
    cpu.isolate_emulator_thread
        .clone_from(&of.isolate_emulator_thread);
    cpu.realtime.clone_from(&of.realtime);
    cpu.numa.clone_from(&of.numa);
}

fn set_memory(
    spec: &mut VmiSpec,
    instancetype: &InstancetypeSpec,
    path: &FieldPath,
    causes: &mut Causes,
) {
    let of = &instancetype.memory;
    let field = path.child("domain.memory");
    let Some(guest) = &of.guest else {
        causes.invalid(&field, "gets no size from the instance type");
        return;
    };
    let memory = spec.domain.memory.get_or_insert_with(Memory::default);
    memory.guest = Some(guest.clone());
    if of.max_guest.is_some() {
        memory.max_guest.clone_from(&of.max_guest);
    }
    if of.hugepages.is_some() {
        memory.hugepages.clone_from(&of.hugepages);
    }
    let percent = of.overcommit_percent.unwrap_or_default();
    if percent == 0 {
        return;
    }
    let bytes = guest.bytes();
    let (Some(bytes), Ok(percent @ 1..=99)) = (bytes, u64::try_from(percent)) else {
        let message = format!("cannot be overcommitted by {percent} %: 0 to 99 are possible");
        causes.invalid(&field, message);
        return;
    };
    let request = u128::from(bytes) * u128::from(100 - percent) / 100;
    let request = Quantity::from_bytes(u64::try_from(request).unwrap_or(u64::MAX));
    let requests = &mut spec.domain.resources.requests;
    requests.insert("memory".to_owned(), request);
}

fn set_others(spec: &mut VmiSpec, instancetype: &InstancetypeSpec) {
    if instancetype.io_threads_policy.is_some() {
        let domain = &mut spec.domain;
        domain
            .io_threads_policy
            .clone_from(&instancetype.io_threads_policy);
        domain.io_threads.clone_from(&instancetype.io_threads);
    }
    let selector = instancetype.node_selector.clone();
    spec.node_selector.extend(selector);
    if instancetype.scheduler_name.is_some() {
        spec.scheduler_name.clone_from(&instancetype.scheduler_name);
    }
    let devices = &mut spec.domain.devices;
    for (device, given) in [
        (&mut devices.gpus, &instancetype.gpus),
        (&mut devices.host_devices, &instancetype.host_devices),
        (
            &mut spec.domain.launch_security,
            &instancetype.launch_security,
        ),
    ] {
        if given.is_some() {
            device.clone_from(given);
        }
    }
}

/// Fills in what is missing.
fn prefer(spec: &mut VmiSpec, preference: &PreferenceSpec) {
    fn fill<T: Clone>(field: &mut Option<T>, preferred: Option<&T>) {
        if field.is_none() {
            *field = preferred.cloned();
        }
    }
    if let Some(of) = &preference.cpu
        && !of.preferred_cpu_features.is_empty()
    {
        let cpu = spec.domain.cpu.get_or_insert_with(Cpu::default);
        if cpu.features.is_empty() {
            cpu.features.clone_from(&of.preferred_cpu_features);
        }
    }
    if let Some(of) = &preference.devices {
        let devices = &mut spec.domain.devices;
        for (field, preferred) in [
            (
                &mut devices.autoattach_mem_balloon,
                of.preferred_autoattach_mem_balloon,
            ),
            (
                &mut devices.autoattach_pod_interface,
                of.preferred_autoattach_pod_interface,
            ),
            (
                &mut devices.autoattach_serial_console,
                of.preferred_autoattach_serial_console,
            ),
            (
                &mut devices.block_multi_queue,
                of.preferred_block_multi_queue,
            ),
            (
                &mut devices.network_interface_multiqueue,
                of.preferred_network_interface_multi_queue,
            ),
        ] {
            fill(field, preferred.as_ref());
        }
        fill(&mut devices.rng, of.preferred_rng.as_ref());
    }
    fill(&mut spec.subdomain, preference.preferred_subdomain.as_ref());
    fill(
        &mut spec.termination_grace_period_seconds,
        preference
            .preferred_termination_grace_period_seconds
            .as_ref(),
    );
}

/// Refuses a machine that is smaller than its guest needs.
fn require(spec: &VmiSpec, preference: &PreferenceSpec, path: &FieldPath, causes: &mut Causes) {
    let Some(requirements) = &preference.requirements else {
        return;
    };
    let needed = requirements.cpu.as_ref().and_then(|cpu| cpu.guest);
    if let Some(needed) = needed {
        let given = spec.domain.cpu.as_ref().map_or(1, Cpu::vcpus);
        if given < needed {
            let message = format!("has {given} vCPUs, but the preference requires {needed}");
            causes.invalid(&path.child("domain.cpu"), message);
        }
    }
    let needed = requirements
        .memory
        .as_ref()
        .and_then(|memory| memory.guest.as_ref());
    if let Some(needed) = needed {
        let memory = spec.domain.memory.as_ref();
        let given = memory.and_then(|memory| memory.guest.as_ref());
        let given = given.or_else(|| spec.domain.resources.requests.get("memory"));
        let is_enough = given.is_some_and(|given| match (given.amount(), needed.amount()) {
            (Ok(given), Ok(needed)) => given >= needed,
            _ => false,
        });
        if !is_enough {
            let needed = crate::cause::shown(needed.as_str());
            let message = format!("is less than the {needed} that the preference requires");
            causes.invalid(&path.child("domain.memory"), message);
        }
    }
}
