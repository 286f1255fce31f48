//! Guests of containers without a memory limit: they start small, and get more memory under memory
//! pressure, up to their maximum.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tracing::{debug, info};

use super::grow::MEMORY_STEP;
use crate::cri::backoff::Backoff;
use crate::cri::error::Result;
use crate::cri::limits::{Bound, PodBounds, memory_limit};
use crate::cri::node::{Node, Pod};
use crate::cri::state::{ContainerRecord, PodRecord};

/// The least that a guest gets per step.
const MIN_GROWTH: u64 = 256 << 20;

impl Node {
    /// Gives the pod's guest more memory whenever it runs short, while one of its containers is
    /// unlimited.
    pub(in crate::cri) fn watch_pressure(self: &Arc<Self>, pod: &Arc<Pod>) {
        if !self.may_grow(pod) || pod.is_watched.swap(true, Ordering::SeqCst) {
            return;
        }
        let (node, pod) = (Arc::clone(self), Arc::clone(pod));
        tokio::spawn(async move {
            let mut backoff = Backoff::default();
            loop {
                match node.grow_when_short(&pod).await {
                    Ok(true) => backoff = Backoff::default(),
                    Err(error) if node.may_be_short(&pod) => {
                        debug!(pod = pod.id, %error, "failed to plug in guest memory; will retry");
                        backoff.wait().await;
                    }
                    Ok(false) | Err(_) => break,
                }
            }
            pod.is_watched.store(false, Ordering::SeqCst);
            // A container may have been created meanwhile.
            node.watch_pressure(&pod);
        });
    }

    /// Makes sure that the guest has the memory that it should have, then waits until it runs short
    /// and records that it should have more. Returns false if it does not get more.
    async fn grow_when_short(self: &Arc<Self>, pod: &Arc<Pod>) -> Result<bool> {
        self.make_room(pod, None).await?;
        if !self.may_grow(pod) {
            return Ok(false);
        }
        pod.client()?.await_pressure().await?;
        if self.may_grow(pod) {
            // Even on a full disk: the processes that need memory are blocked until they have it.
            self.note_pod(pod, |record| record.extra = more(record));
            let extra = pod.record().extra;
            info!(pod = pod.id, extra, "the guest is short of memory");
        }
        Ok(true)
    }

    fn may_grow(&self, pod: &Pod) -> bool {
        let record = pod.record();
        record.extra < record.size.growth && self.may_be_short(pod)
    }

    /// Returns whether one of its containers has no memory limit, and its machine runs and reports
    /// pressure.
    fn may_be_short(&self, pod: &Pod) -> bool {
        let tells = pod.client().is_ok_and(|client| client.tells_pressure());
        tells && self.is_unlimited(pod, PodBounds::of(&pod.record().config))
    }

    /// Returns whether a container of the pod has no memory limit.
    pub(super) fn is_unlimited(&self, pod: &Pod, bounds: PodBounds) -> bool {
        let containers = self.containers_of(&pod.id);
        let mut records = containers.iter().map(|container| container.record());
        !has_limit(&pod.record(), bounds) && records.any(|record| is_unlimited(&record))
    }
}

/// Returns whether the pod has a limit for all its containers.
fn has_limit(record: &PodRecord, bounds: PodBounds) -> bool {
    let linux = record.config.linux.as_ref();
    let resources = linux.and_then(|linux| linux.resources.as_ref());
    match bounds.memory {
        Bound::Unlimited => false,
        Bound::At(_) => true,
        Bound::Unknown => resources.is_some_and(|resources| memory_limit(resources) > 0),
    }
}

fn is_unlimited(record: &ContainerRecord) -> bool {
    let linux = record.config.linux.as_ref();
    let resources = linux.and_then(|linux| linux.resources.as_ref());
    let has_limit = resources.is_some_and(|resources| memory_limit(resources) > 0);
    record.phase.is_there() && !has_limit
}

/// Returns the bytes that a guest gets beyond its limits in the next step: half of its memory more.
fn more(record: &PodRecord) -> u64 {
    let size = record.size;
    let half = size.memory.saturating_add(record.extra) / 2;
    let step = half.max(MIN_GROWTH).next_multiple_of(MEMORY_STEP);
    record.extra.saturating_add(step).min(size.growth)
}
