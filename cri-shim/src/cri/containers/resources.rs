//! Resource limits of containers: UpdateContainerResources.

use std::sync::Arc;

use podvisor_cri_messages::{LinuxContainerResources, UpdateContainerResourcesRequest};

use crate::cri::error::Result;
use crate::cri::flights::to_the_end;
use crate::cri::limits::NewLimits;
use crate::cri::node::{Container, Node};
use crate::cri::spec;
use crate::cri::state::ContainerPhase;

impl Node {
    /// UpdateContainerResources.
    pub(in crate::cri) async fn update_resources(
        self: &Arc<Self>,
        request: UpdateContainerResourcesRequest,
    ) -> Result<()> {
        let container = self.settled_container(&request.container_id).await?;
        let Some(wanted) = request.linux else {
            return Ok(());
        };
        let node = Arc::clone(self);
        to_the_end(async move {
            let _turn = container.turn.lock().await;
            node.update_now(&container, wanted).await
        })
        .await
    }

    async fn update_now(
        self: &Arc<Self>,
        container: &Container,
        wanted: LinuxContainerResources,
    ) -> Result<()> {
        let resources = spec::resources(&wanted)?;
        let linux = container.record().config.linux.unwrap_or_default();
        let limits = merged(linux.resources.unwrap_or_default(), wanted);
        let note = |limits: LinuxContainerResources| {
            container.update(&self.database, |record| {
                let linux = record.config.linux.get_or_insert_default();
                linux.resources = Some(limits);
            })
        };
        let record = container.record();
        let has_ended = matches!(record.phase, ContainerPhase::Exited(_));
        if has_ended || record.start_error.is_some() {
            // There is nothing in the guest to limit.
            return note(limits);
        }
        if container.pod.is_vm() {
            // Its machine is resized by requests of its own: these limits are its pod's group's.
            note(limits)?;
            self.set_importance(&container.pod);
            return Ok(());
        }
        let client = container.pod.client()?;
        let new = NewLimits::Container {
            id: &container.id,
            resources: &limits,
        };
        self.check_growth(&container.pod, &container.pod.record(), new)?;
        let before = self.memory_limits(&container.pod);
        let change = async {
            self.make_room(&container.pod, Some(new)).await?;
            client.update_resources(&container.id, &resources).await?;
            note(limits.clone())
        };
        let changed = change.await;
        self.set_importance(&container.pod);
        self.watch_pressure(&container.pod);
        // Less is wanted than before, or as much as before because it failed.
        self.give_back(&container.pod, None).await;
        changed?;
        self.wait_for_lowered(&container.pod, before).await
    }
}

/// Returns the limits after an update: omitted values keep the old ones.
fn merged(old: LinuxContainerResources, new: LinuxContainerResources) -> LinuxContainerResources {
    fn number(old: i64, new: i64) -> i64 {
        if new == 0 { old } else { new }
    }
    fn text(old: String, new: String) -> String {
        if new.is_empty() { old } else { new }
    }
    let mut unified = old.unified;
    unified.extend(new.unified);
    LinuxContainerResources {
        cpu_period: number(old.cpu_period, new.cpu_period),
        cpu_quota: number(old.cpu_quota, new.cpu_quota),
        cpu_shares: number(old.cpu_shares, new.cpu_shares),
        memory_limit_in_bytes: number(old.memory_limit_in_bytes, new.memory_limit_in_bytes),
        oom_score_adj: number(old.oom_score_adj, new.oom_score_adj),
        cpuset_cpus: text(old.cpuset_cpus, new.cpuset_cpus),
        cpuset_mems: text(old.cpuset_mems, new.cpuset_mems),
        hugepage_limits: match new.hugepage_limits.is_empty() {
            true => old.hugepage_limits,
            false => new.hugepage_limits,
        },
        unified,
        memory_swap_limit_in_bytes: number(
            old.memory_swap_limit_in_bytes,
            new.memory_swap_limit_in_bytes,
        ),
    }
}

#[cfg(test)]
mod tests {
    use podvisor_cri_messages::HugepageLimit;

    use super::*;

    #[test]
    fn an_update_leaves_what_it_does_not_name() {
        let huge = |limit| HugepageLimit {
            page_size: "2MB".to_owned(),
            limit,
        };
        let old = LinuxContainerResources {
            cpu_period: 100_000,
            cpu_quota: 50_000,
            cpu_shares: 512,
            memory_limit_in_bytes: 64 << 20,
            oom_score_adj: 900,
            cpuset_cpus: "0".to_owned(),
            cpuset_mems: "0".to_owned(),
            hugepage_limits: vec![huge(1 << 21)],
            unified: [("pids.max".to_owned(), "10".to_owned())].into(),
            memory_swap_limit_in_bytes: 64 << 20,
        };
        let nothing = LinuxContainerResources::default();
        assert_eq!(merged(old.clone(), nothing.clone()), old);
        assert_eq!(merged(nothing, old.clone()), old);
        let update = LinuxContainerResources {
            cpu_quota: -1,
            hugepage_limits: vec![huge(0)],
            unified: [("memory.high".to_owned(), "1".to_owned())].into(),
            ..LinuxContainerResources::default()
        };
        let merged = merged(old.clone(), update);
        assert_eq!(merged.cpu_quota, -1);
        assert_eq!(merged.memory_limit_in_bytes, old.memory_limit_in_bytes);
        assert_eq!(merged.hugepage_limits, [huge(0)]);
        assert_eq!(merged.unified.len(), 2);
    }
}
