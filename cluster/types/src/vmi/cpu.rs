//! vCPUs (`spec.domain.cpu`).

use serde_json::Value;

use super::{Domain, VmiSpec};
use crate::{
    Causes, ClusterConfig, ClusterDefaults, FieldPath, Quantity, cause::shown, config::MAX_VCPUS,
};

/// How many more sockets may be plugged in where the cluster sets no bound.
const GROWTH: i64 = 4;

/// Models that every node has.
const HOST_MODELS: [&str; 2] = ["host-model", "host-passthrough"];

const POLICIES: [&str; 6] = ["", "force", "require", "optional", "disable", "forbid"];

object! {
    /// vCPUs: as many as cores × sockets × threads.
    pub struct Cpu {
        /// Cores of a socket.
        pub cores: Option<i64>,
        /// Sockets.
        pub sockets: Option<i64>,
        /// Threads of a core.
        pub threads: Option<i64>,
        /// How many sockets may be reached while it runs.
        pub max_sockets: Option<i64>,
        /// What CPU the guest sees.
        pub model: Option<String>,
        /// Single features of that CPU.
        pub features: Vec<CpuFeature>,
        /// Pins each vCPU to a CPU of its own.
        pub dedicated_cpu_placement: Option<bool>,
        /// Refused.
        pub isolate_emulator_thread: Option<Value>,
        /// Refused.
        pub realtime: Option<Value>,
        /// Refused.
        pub numa: Option<Value>,
    }

    /// A feature of the CPU.
    pub struct CpuFeature {
        /// Its name, as the kernel spells it.
        pub name: String,
        /// What is wanted of it; nothing means `require`.
        pub policy: Option<String>,
    }

    /// How vCPUs are spread over sockets, cores and threads.
    pub struct CpuTopology {
        /// Cores of a socket.
        pub cores: Option<i64>,
        /// Sockets.
        pub sockets: Option<i64>,
        /// Threads of a core.
        pub threads: Option<i64>,
    }
}

impl Cpu {
    /// The topology; what is missing or zero counts as one.
    #[must_use]
    pub fn topology(&self) -> CpuTopology {
        let number = |number: Option<i64>| Some(number.unwrap_or(1).max(1));
        CpuTopology {
            cores: number(self.cores),
            sockets: number(self.sockets),
            threads: number(self.threads),
        }
    }

    /// The number of vCPUs.
    #[must_use]
    pub fn vcpus(&self) -> i64 {
        let CpuTopology {
            cores,
            sockets,
            threads,
        } = self.topology();
        [cores, sockets, threads]
            .into_iter()
            .flatten()
            .fold(1, i64::saturating_mul)
    }
}

pub(super) fn apply_default_topology(domain: &mut Domain) {
    let cpu = domain.cpu.get_or_insert_with(Cpu::default);
    if [cpu.cores, cpu.sockets, cpu.threads]
        .iter()
        .any(|given| given.is_some_and(|n| n != 0))
    {
        return;
    }
    let resources = &domain.resources;
    let given = resources
        .limits
        .get("cpu")
        .or_else(|| resources.requests.get("cpu"));
    let sockets = given
        .and_then(|cpu| cpu.amount().ok())
        .map_or(1, |cpu| cpu.ceil().max(1));
    (cpu.cores, cpu.sockets, cpu.threads) = (Some(1), Some(sockets), Some(1));
}

pub(super) fn apply_default_model(cpu: &mut Cpu, defaults: &ClusterDefaults) {
    if cpu.model.as_ref().is_none_or(String::is_empty) {
        let [host_model, _] = HOST_MODELS;
        cpu.model = Some(
            defaults
                .cpu_model
                .clone()
                .unwrap_or_else(|| host_model.to_owned()),
        );
    }
}

pub(super) fn apply_max_sockets(cpu: &mut Cpu, defaults: &ClusterDefaults) {
    if cpu.max_sockets.is_some_and(|max| max != 0) {
        return;
    }
    let CpuTopology {
        cores,
        sockets,
        threads,
    } = cpu.topology();
    let sockets = sockets.unwrap_or(1);
    let per_socket = cores
        .unwrap_or(1)
        .saturating_mul(threads.unwrap_or(1))
        .max(1);
    let wanted = defaults
        .max_sockets
        .unwrap_or(sockets.saturating_mul(GROWTH));
    cpu.max_sockets = Some(wanted.min(MAX_VCPUS / per_socket).max(sockets));
}

pub(super) fn validate(
    spec: &VmiSpec,
    config: &ClusterConfig,
    domain: &FieldPath,
    causes: &mut Causes,
) {
    let Some(cpu) = &spec.domain.cpu else { return };
    let path = domain.child("cpu");
    let counts = [
        ("cores", cpu.cores),
        ("sockets", cpu.sockets),
        ("threads", cpu.threads),
        ("maxSockets", cpu.max_sockets),
    ];
    for (name, number) in counts {
        if let Some(number) = number.filter(|number| !(0..=MAX_VCPUS).contains(number)) {
            let message = format!("is {number}, but must be between 0 and {MAX_VCPUS}");
            causes.invalid(&path.child(name), message);
        }
    }
    if cpu.vcpus() > MAX_VCPUS {
        let message =
            format_args!("cores × sockets × threads must not exceed {MAX_VCPUS}").to_string();
        causes.invalid(&path, message);
    }
    if let (Some(sockets), Some(max)) = (cpu.sockets, cpu.max_sockets.filter(|max| *max != 0))
        && sockets > max
    {
        let message = format!("is {sockets}, but must not be greater than maxSockets, {max}");
        causes.invalid(&path.child("sockets"), message);
    }
    if cpu.dedicated_cpu_placement == Some(true) {
        validate_dedicated(spec, cpu, domain, causes);
    }
    if let Some(model) = cpu.model.as_deref().filter(|model| !model.is_empty())
        && !HOST_MODELS.contains(&model)
        && !config.cpu_models.iter().any(|known| known == model)
    {
        let known = HOST_MODELS
            .iter()
            .copied()
            .chain(config.cpu_models.iter().map(String::as_str));
        causes.one_of(&path.child("model"), model, &known.collect::<Vec<_>>());
    }
    for (index, feature) in cpu.features.iter().enumerate() {
        let path = path.child("features").index(index);
        if feature.name.is_empty() {
            causes.required(&path.child("name"), "is required");
        }
        causes.one_of(
            &path.child("policy"),
            feature.policy.as_deref().unwrap_or(""),
            &POLICIES,
        );
    }
}

/// Dedicated CPUs need a pod whose CPUs are whole and guaranteed.
fn validate_dedicated(spec: &VmiSpec, cpu: &Cpu, domain: &FieldPath, causes: &mut Causes) {
    let path = domain.child("cpu.dedicatedCpuPlacement");
    let resources = &spec.domain.resources;
    let amount = |list: &std::collections::BTreeMap<String, Quantity>| {
        list.get("cpu").and_then(|cpu| cpu.amount().ok())
    };
    let (request, limit) = (amount(&resources.requests), amount(&resources.limits));
    if cpu.threads.is_some_and(|threads| threads > 2) {
        causes.invalid(
            &domain.child("cpu.threads"),
            "must be at most 2 with dedicated CPUs",
        );
    }
    for (name, amount) in [("requests", request), ("limits", limit)] {
        let path = domain.child("resources").child(name).child("cpu");
        let Some(amount) = amount else { continue };
        if !amount.is_whole() {
            causes.invalid(&path, "must be a whole number with dedicated CPUs");
        } else if cpu.cores.is_some() && amount.ceil() != cpu.vcpus() {
            let vcpus = cpu.vcpus();
            causes.invalid(
                &path,
                format_args!("must be {vcpus}, the number of vCPUs, with dedicated CPUs"),
            );
        }
    }
    if let (Some(request), Some(limit)) = (request, limit)
        && request != limit
    {
        causes.invalid(&path, "needs equal requests and limits of CPUs");
    }
    if cpu.cores.is_none() && request.is_none() && limit.is_none() {
        causes.required(
            &path,
            "needs a number of cores, or a request or limit of CPUs",
        );
    }
    let has_memory = spec
        .domain
        .memory
        .as_ref()
        .is_some_and(|memory| memory.guest.is_some())
        || resources.requests.contains_key("memory");
    if !has_memory {
        causes.required(&path, "needs an amount of memory");
    }
    for (name, quantity) in resources
        .requests
        .iter()
        .filter(|(name, _)| *name == "memory")
    {
        if resources
            .limits
            .get(name)
            .is_some_and(|limit| limit.bytes() != quantity.bytes())
        {
            let given = shown(quantity.as_str());
            causes.invalid(
                &domain.child("resources.requests.memory"),
                format_args!("is {given}, but must equal the limit with dedicated CPUs"),
            );
        }
    }
}
