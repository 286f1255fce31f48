//! The memory and the vCPUs of a pod's guest follow the limits of its containers.

use std::thread::available_parallelism;
use std::time::Duration;

use podvisor_cri_messages::{LinuxContainerResources, UpdatePodSandboxResourcesRequest};
use tokio::time::{Instant, sleep};
use tracing::{debug, info, warn};

use crate::cri::config::Sizes;
use crate::cri::error::{CriError, Result};
use crate::cri::limits::{NewLimits, cgroup, memory_limit, milli_cpus};
use crate::cri::node::{GuestResources, Node, Pod};
use crate::cri::spec;
use crate::cri::state::{ContainerRecord, GuestSize, PodRecord};
use crate::sandbox::{SandboxClient, memory_overhead};

/// How long a guest may take to online memory that is plugged in.
const PLUG_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a machine may take to give back memory that its pod may not use any more.
const SHRINK_TIMEOUT: Duration = Duration::from_secs(10);
const SHRINK_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The unit in which guests get memory: 2 MiB.
pub(super) const MEMORY_STEP: u64 = 2 << 20;

/// What limits come to for a guest, whether or not it can have that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Demand {
    /// Bytes in all.
    memory: u64,
    vcpus: u64,
}

impl Demand {
    /// Refuses what a guest of such a size can never have, unless it is no more than `now`.
    fn check(self, now: Self, id: &str, size: GuestSize) -> Result<()> {
        let beyond = |setting, wanted: String, most: String| CriError::BeyondGrowth {
            id: id.to_owned(),
            setting,
            wanted,
            most,
        };
        let most = size.memory.saturating_add(size.growth);
        if size.memory > 0 && self.memory > most.max(now.memory) {
            let mib = |bytes: u64| format!("{} MiB of memory", bytes >> 20);
            return Err(beyond("growth", mib(self.memory), mib(most)));
        }
        let most = u64::from(size.max_vcpus.max(size.vcpus));
        if size.vcpus > 0 && self.vcpus > most.max(now.vcpus) {
            let vcpus = |count: u64| format!("{count} virtual CPUs");
            return Err(beyond("cpu_growth", vcpus(self.vcpus), vcpus(most)));
        }
        Ok(())
    }
}

/// What limits ask for, as far as the guest can have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TargetSize {
    /// Bytes beyond the guest's memory at boot.
    memory: u64,
    vcpus: u8,
}

impl GuestResources {
    /// Requests that the guest has `wanted` bytes beyond its memory at boot, and returns how many
    /// it has when it has reached that, or after `patience`.
    async fn ask(
        &mut self,
        client: &SandboxClient,
        size: GuestSize,
        wanted: u64,
        patience: Duration,
    ) -> Result<u64> {
        // Reset first: if this call is cancelled, its effect is unknown.
        self.memory = None;
        let asked = client.grow(size.memory, wanted, size.growth, patience);
        let has = asked.await?;
        self.memory = (has == wanted).then_some(wanted);
        Ok(has)
    }
}

impl Node {
    /// Gives the pod's guest the memory and the vCPUs that the limits of its containers ask for,
    /// and waits until it has onlined the memory. With `new`, the larger of the current and the new
    /// limits counts.
    pub(in crate::cri) async fn make_room(
        &self,
        pod: &Pod,
        new: Option<NewLimits<'_>>,
    ) -> Result<()> {
        if pod.is_vm() {
            // Its size is that of its boot.
            return Ok(());
        }
        let mut given = pod.given.lock().await;
        let wanted = |new| self.wanted(pod, new);
        let (Some(now), Some(then)) = (wanted(None), wanted(new)) else {
            return Ok(());
        };
        let size = pod.record().size;
        let vcpus = now.vcpus.max(then.vcpus);
        // A guest that has more keeps it for now.
        if size.may_get_vcpus() && given.vcpus.is_none_or(|given| given < vcpus) {
            // Reset first: if this call is cancelled, its effect is unknown.
            let before = given.vcpus.take();
            pod.client()?.set_vcpus(vcpus).await?;
            given.vcpus = Some(vcpus);
            match before {
                Some(before) => info!(pod = pod.id, before, vcpus, "added vCPUs"),
                // After a restart of the daemon; it may have had as many.
                None => debug!(pod = pod.id, vcpus, "set the number of vCPUs"),
            }
        }
        let wanted = now.memory.max(then.memory);
        if given.memory.unwrap_or(0) >= wanted {
            return Ok(());
        }
        let client = pod.client()?;
        // If it has more and uses it, this does not wait until it has less.
        let mut grown = match given.memory {
            Some(grown) => grown,
            None => given.ask(&client, size, wanted, Duration::ZERO).await?,
        };
        if grown < wanted {
            grown = given.ask(&client, size, wanted, PLUG_TIMEOUT).await?;
            info!(pod = pod.id, wanted, grown, "plugged in guest memory");
        }
        match grown < wanted {
            false => Ok(()),
            true => Err(CriError::NoRoom {
                id: pod.id.clone(),
                wanted: size.memory.saturating_add(wanted),
                has: size.memory.saturating_add(grown),
            }),
        }
    }

    /// Takes back what the limits of the pod's containers do not ask for any more, as far as it is
    /// not in use. With `new` they are about to be these.
    pub(in crate::cri) async fn give_back(&self, pod: &Pod, new: Option<NewLimits<'_>>) {
        if pod.is_vm() {
            return;
        }
        let record = pod.record();
        let bounds = NewLimits::bounds(new, &record.config);
        if record.extra > 0 && !self.is_unlimited(pod, bounds) {
            let forgotten = pod.update(&self.database, |record| record.extra = 0);
            if let Err(error) = forgotten {
                debug!(pod = pod.id, %error, "failed to reset the pod's extra memory");
            }
        }
        let mut given = pod.given.lock().await;
        let Some(wanted) = self.wanted(pod, new) else {
            return;
        };
        let size = pod.record().size;
        let Ok(client) = pod.client() else { return };
        if size.may_get_vcpus() && given.vcpus.is_none_or(|given| given > wanted.vcpus) {
            given.vcpus = None;
            match client.set_vcpus(wanted.vcpus).await {
                Ok(()) => given.vcpus = Some(wanted.vcpus),
                Err(error) => debug!(pod = pod.id, %error, "failed to take vCPUs offline"),
            }
        }
        let wanted = wanted.memory;
        if size.growth > 0
            && given.memory != Some(wanted)
            && let Err(error) = given.ask(&client, size, wanted, Duration::ZERO).await
        {
            debug!(pod = pod.id, %error, "failed to unplug guest memory");
        }
    }

    /// Waits like [`Self::wait_for_room`] after the limit of a container was lowered. Before that,
    /// those of all containers came to `before` bytes.
    pub(in crate::cri) async fn wait_for_lowered(&self, pod: &Pod, before: u64) -> Result<()> {
        let mut record = pod.record();
        let own = record.config.linux.as_mut();
        if let Some(own) = own.and_then(|linux| linux.resources.as_mut())
            && memory_limit(own) <= before
        {
            // It is the sum of the containers', and a kubelet tells the new one after it has
            // lowered that of its group.
            own.memory_limit_in_bytes = 0;
        }
        let most = self.most_memory(pod, &record, None);
        self.wait_for_room(pod, None, most).await
    }

    /// Returns the sum of the memory limits of a pod's containers, in bytes.
    pub(in crate::cri) fn memory_limits(&self, pod: &Pod) -> u64 {
        let containers = self.containers_of(&pod.id);
        let records = containers.iter().map(|container| container.record());
        let limits = resources(records, None);
        limits.fold(0, |sum, limits| memory_limit(&limits).saturating_add(sum))
    }

    /// Returns the bytes that a guest takes at most if its containers keep their limits, which may
    /// be less than it began with; `None` if one has no limit.
    fn most_memory(
        &self,
        pod: &Pod,
        record: &PodRecord,
        new: Option<NewLimits<'_>>,
    ) -> Option<u64> {
        let bounds = NewLimits::bounds(new, &record.config);
        match self.is_unlimited(pod, bounds) {
            true => None,
            false => Some(self.demand(record, new)?.memory),
        }
    }

    /// Waits until the pod's machine takes no more of the host's memory than what it is to have,
    /// and no more than for a guest of `most` bytes: who lowers the limits of a pod lowers that of
    /// its control group next, and the kernel would kill the machine. With `new` they are about to
    /// be these.
    async fn wait_for_room(
        &self,
        pod: &Pod,
        new: Option<NewLimits<'_>>,
        most: Option<u64>,
    ) -> Result<()> {
        if pod.is_vm() {
            return Ok(());
        }
        let record = pod.record();
        let Some(parent) = cgroup::of_pod(&record.config) else {
            return Ok(());
        };
        let deadline = Instant::now() + SHRINK_TIMEOUT;
        loop {
            // The kubelet may change its group meanwhile.
            let (Ok(client), Some(wanted)) = (pod.client(), self.wanted(pod, new)) else {
                return Ok(());
            };
            // When the guest gives memory back, the limit of the machine's group is lowered, too,
            // for which the kernel drops cached files. If the lock is taken, another call asks for
            // something else.
            if let Ok(mut given) = pod.given.try_lock()
                && given.memory.is_none()
                && record.size.growth > 0
            {
                let asked = given.ask(&client, record.size, wanted.memory, SHRINK_POLL_INTERVAL);
                if let Err(error) = asked.await {
                    debug!(pod = pod.id, %error, "failed to unplug guest memory");
                }
            }
            // What the guest does not use any more, it reports as free.
            let memory = record.size.memory.saturating_add(wanted.memory);
            let memory = most.map_or(memory, |most| memory.min(most));
            // A machine in another group only has that group's limit.
            let Some(taken) = client.memory_below(&parent) else {
                return Ok(());
            };
            if taken <= memory.saturating_add(memory_overhead(memory, record.size.growth)) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(CriError::Keeps {
                    id: pod.id.clone(),
                    wanted: memory,
                    taken,
                });
            }
            // There is no notification when a machine takes less.
            sleep(SHRINK_POLL_INTERVAL).await;
        }
    }

    /// Refuses new limits that the pod's guest can never make good: its containers would be killed
    /// long below them. `record` is the pod's as it would be with them.
    pub(in crate::cri) fn check_growth(
        &self,
        pod: &Pod,
        record: &PodRecord,
        new: NewLimits<'_>,
    ) -> Result<()> {
        if pod.is_vm() {
            // What its process needs besides is within its limits.
            return Ok(());
        }
        let now = self.demand(&pod.record(), None);
        let then = self.demand(record, Some(new));
        match now.zip(then) {
            Some((now, then)) => then.check(now, &pod.id, record.size),
            None => Ok(()),
        }
    }

    /// What the limits of the pod's containers come to; `None` where its handler is not configured
    /// any more.
    fn demand(&self, record: &PodRecord, new: Option<NewLimits<'_>>) -> Option<Demand> {
        let sizes = self.config.guest(&record.handler)?.sizes;
        let config = &record.config;
        let bounds = NewLimits::bounds(new, config);
        let containers = self.containers_of(&record.id);
        let records = containers.iter().map(|container| container.record());
        let of_containers = resources(records, new).collect::<Vec<_>>();
        let sum = |limit: fn(&LinuxContainerResources) -> u64| {
            let limits = of_containers.iter().map(limit);
            limits.fold(0, u64::saturating_add)
        };
        // Shares are no limit.
        let quota = |resources: &LinuxContainerResources| {
            milli_cpus(resources.cpu_quota, resources.cpu_period).unwrap_or(0)
        };
        let own = config.linux.as_ref();
        let own = own.and_then(|linux| linux.resources.as_ref());
        let cpus = bounds
            .milli_cpus
            .limit(own.map_or(0, quota).max(sum(quota)));
        // The node has no more for anybody.
        let of_node = available_parallelism().map_or(u64::MAX, |count| count.get() as u64);
        Some(Demand {
            memory: sizes.memory(config, bounds, sum(memory_limit)),
            vcpus: cpus.div_ceil(1000).min(of_node),
        })
    }

    /// UpdatePodSandboxResources: the guest gets what the pod may use from now on.
    pub(in crate::cri) async fn update_pod_resources(
        &self,
        mut request: UpdatePodSandboxResourcesRequest,
    ) -> Result<()> {
        let pod = self.settled_pod(&request.pod_sandbox_id).await?;
        let _turn = pod.turn.lock().await;
        pod.client()?;
        for resources in [&mut request.overhead, &mut request.resources] {
            let Some(resources) = resources else { continue };
            // Some kubelets subtract an overhead even from an unlimited value.
            resources.cpu_quota = resources.cpu_quota.max(-1);
            resources.memory_limit_in_bytes = resources.memory_limit_in_bytes.max(-1);
            spec::resources(resources)?;
        }
        let change = |record: &mut PodRecord| {
            let linux = record.config.linux.get_or_insert_default();
            for (kept, new) in [
                (&mut linux.overhead, &request.overhead),
                (&mut linux.resources, &request.resources),
            ] {
                if new.is_some() {
                    kept.clone_from(new);
                }
            }
        };
        let new = request.resources.as_ref().map(NewLimits::Pod);
        if let Some(new) = new {
            let mut changed = pod.record();
            change(&mut changed);
            self.check_growth(&pod, &changed, new)?;
        }
        pod.update(&self.database, change)?;
        self.set_importance(&pod);
        let follow = async {
            self.make_room(&pod, new).await?;
            // Less is wanted than before.
            self.give_back(&pod, new).await;
            let most = self.most_memory(&pod, &pod.record(), new);
            self.wait_for_room(&pod, new, most).await
        };
        tokio::select! {
            followed = follow => followed,
            // Who ends the pod waits for the turn, and a guest may take its time.
            () = pod.is_to_end() => Err(pod.not_ready()),
        }
    }

    /// What the pod's guest needs; `None` where its handler is not configured any more.
    fn wanted(&self, pod: &Pod, new: Option<NewLimits<'_>>) -> Option<TargetSize> {
        let record = pod.record();
        let bounds = NewLimits::bounds(new, &record.config);
        let sizes = self.config.guest(&record.handler)?.sizes;
        let containers = self.containers_of(&pod.id);
        let records = containers.iter().map(|container| container.record());
        let limits = limits(sizes, records, new);
        let config = &record.config;
        let memory = growth(&record, sizes.memory(config, bounds, limits.memory));
        let extra = match self.is_unlimited(pod, bounds) {
            true => record.extra,
            false => 0,
        };
        Some(TargetSize {
            memory: memory.saturating_add(extra).min(record.size.growth),
            vcpus: vcpus(record.size, sizes.vcpus(config, bounds, limits.milli_cpus)),
        })
    }
}

/// The limits of containers in total.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Limits {
    /// In bytes.
    memory: u64,
    milli_cpus: u64,
}

/// Returns the total limits of all containers that use memory and CPUs, or will.
fn limits(
    sizes: Sizes,
    records: impl Iterator<Item = ContainerRecord>,
    new: Option<NewLimits<'_>>,
) -> Limits {
    resources(records, new).fold(Limits::default(), |sum, resources| Limits {
        memory: memory_limit(&resources).saturating_add(sum.memory),
        milli_cpus: sizes.milli_cpus(&resources).saturating_add(sum.milli_cpus),
    })
}

/// Those of all containers that use memory and CPUs, or will.
fn resources(
    records: impl Iterator<Item = ContainerRecord>,
    new: Option<NewLimits<'_>>,
) -> impl Iterator<Item = LinuxContainerResources> {
    let records = records.filter(|record| record.phase.is_there());
    records.map(move |record| match new {
        Some(NewLimits::Container { id, resources }) if id == record.id => resources.clone(),
        _ => {
            let linux = record.config.linux;
            linux.and_then(|linux| linux.resources).unwrap_or_default()
        }
    })
}

/// Returns the number of vCPUs of a guest whose limits ask for `wanted`: never fewer than at boot.
fn vcpus(size: GuestSize, wanted: u8) -> u8 {
    wanted.min(size.max_vcpus).max(size.vcpus)
}

/// Returns the bytes that a guest of `memory` bytes has beyond its memory at boot.
fn growth(record: &PodRecord, memory: u64) -> u64 {
    let size = record.size;
    let more = memory.saturating_sub(size.memory);
    let more = more
        .checked_next_multiple_of(MEMORY_STEP)
        .unwrap_or(u64::MAX);
    if more > size.growth && size.growth > 0 {
        warn!(
            pod = record.id,
            wanted = more,
            most = size.growth,
            "a guest cannot grow as much as its containers' limits"
        );
    }
    more.min(size.growth)
}

#[cfg(test)]
mod tests {
    use podvisor_cri_messages::{ContainerConfig, LinuxContainerConfig};

    use super::*;
    use crate::cri::state::{ContainerPhase, PodPhase, container_record};

    fn container(id: &str, phase: ContainerPhase, limit: i64) -> ContainerRecord {
        let resources = LinuxContainerResources {
            memory_limit_in_bytes: limit,
            cpu_quota: limit * 100,
            cpu_period: 100_000,
            ..Default::default()
        };
        ContainerRecord {
            config: ContainerConfig {
                linux: Some(LinuxContainerConfig {
                    resources: Some(resources),
                    security_context: None,
                }),
                ..Default::default()
            },
            phase,
            ..container_record(id, "pod")
        }
    }

    #[test]
    fn limits_of_containers_that_are_there_count() {
        let ended = ContainerPhase::Exited(crate::cri::state::ContainerExit {
            started_at: 0,
            finished_at: 0,
            code: 0,
            reason: String::new(),
            message: String::new(),
        });
        let all = || {
            [
                container("a", ContainerPhase::Running { started_at: 1 }, 100),
                container("b", ContainerPhase::Created, 20),
                container("c", ContainerPhase::Created, -1),
                container("d", ended.clone(), 7),
                container("e", ContainerPhase::Removing, 7),
            ]
            .into_iter()
        };
        let sum = |new: Option<NewLimits<'_>>| {
            let limits = limits(Sizes::default(), all(), new);
            (limits.memory, limits.milli_cpus)
        };
        assert_eq!(sum(None), (120, 120));
        let resources = |memory| LinuxContainerResources {
            memory_limit_in_bytes: memory,
            ..Default::default()
        };
        for (id, memory, expected) in [
            ("a", 300, (320, 20)),
            ("a", 0, (20, 20)),
            ("d", 300, (120, 120)),
        ] {
            let resources = &resources(memory);
            let new = NewLimits::Container { id, resources };
            assert_eq!(sum(Some(new)), expected);
        }
    }

    #[test]
    fn limits_that_no_guest_can_make_good_are_refused_where_they_are_new() {
        let size = GuestSize {
            memory: 1 << 30,
            growth: 1 << 30,
            vcpus: 1,
            max_vcpus: 4,
        };
        let demand = |gib: u64, vcpus| Demand {
            memory: gib << 30,
            vcpus,
        };
        let refused = |then: Demand, now: Demand, size| {
            let refused = then.check(now, "pod", size).err()?;
            Some(refused.to_string())
        };
        let now = demand(1, 1);
        assert_eq!(refused(demand(2, 4), now, size), None);
        let memory = refused(demand(3, 1), now, size).unwrap();
        assert!(
            memory.contains("3072 MiB") && memory.contains("2048 MiB"),
            "{memory}"
        );
        assert!(memory.contains("`growth`"), "{memory}");
        let vcpus = refused(demand(1, 5), now, size).unwrap();
        assert!(
            vcpus.contains("`cpu_growth`") && vcpus.contains("4 virtual"),
            "{vcpus}"
        );
        // As CreateContainer has let them be.
        let already = demand(5, 9);
        assert_eq!(refused(demand(5, 9), already, size), None);
        assert_eq!(refused(demand(4, 1), already, size), None);
        assert!(refused(demand(6, 9), already, size).is_some());
        // An older daemon did not note what there can be.
        assert_eq!(refused(demand(9, 9), now, GuestSize::default()), None);
    }

    #[test]
    fn a_guest_has_vcpus_between_what_it_began_with_and_what_it_may_have() {
        let size = GuestSize {
            vcpus: 2,
            max_vcpus: 4,
            ..GuestSize::default()
        };
        assert_eq!([1, 2, 3, 9].map(|wanted| vcpus(size, wanted)), [2, 2, 3, 4]);
        let by_older_daemon = GuestSize::default();
        assert_eq!(vcpus(by_older_daemon, 9), 0);
    }

    #[test]
    fn a_guest_grows_by_steps_and_as_far_as_it_can() {
        let record = PodRecord {
            id: "pod".to_owned(),
            config: Default::default(),
            handler: String::new(),
            created_at: 0,
            phase: PodPhase::Ready,
            addresses: Vec::new(),
            size: GuestSize {
                memory: 256 << 20,
                growth: 1 << 30,
                ..GuestSize::default()
            },
            memory_volumes: None,
            fills_volumes: false,
            extra: 0,
            network: None,
        };
        let grown = |memory: u64| growth(&record, memory);
        assert_eq!(grown(100 << 20), 0);
        assert_eq!(grown(257 << 20), 2 << 20);
        assert_eq!(grown(512 << 20), 256 << 20);
        assert_eq!(grown(u64::MAX), 1 << 30);
        let fixed = PodRecord {
            size: GuestSize::default(),
            ..record.clone()
        };
        assert_eq!(growth(&fixed, 1 << 40), 0, "made by an older daemon");
    }
}
