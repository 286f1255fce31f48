//! Guest memory (`spec.domain.memory`); its rules stand with the pod's resources.

use serde_json::Value;

use super::Domain;
use crate::{ClusterDefaults, Quantity};

/// How much a guest may grow where the cluster sets no bound.
const GROWTH: u64 = 4;

/// Smaller guests cannot take memory that is plugged in.
const MIN_HOT_PLUG_GUEST: u64 = 1 << 30;

object! {
    /// Guest memory.
    pub struct Memory {
        /// What the guest sees.
        pub guest: Option<Quantity>,
        /// What the guest may grow to while it runs.
        pub max_guest: Option<Quantity>,
        /// Backs it by huge pages.
        pub hugepages: Option<Hugepages>,
        /// Refused.
        pub reserved_overhead: Option<Value>,
    }

    /// Huge pages of the host.
    pub struct Hugepages {
        /// `2Mi` or `1Gi`.
        pub page_size: Option<Quantity>,
    }
}

pub(super) fn apply_defaults(domain: &mut Domain) {
    let memory = domain.memory.get_or_insert_with(Memory::default);
    if memory.guest.is_some() {
        return;
    }
    let resources = &domain.resources;
    let page_size = memory
        .hugepages
        .as_ref()
        .and_then(|pages| pages.page_size.as_ref());
    memory.guest = resources
        .requests
        .get("memory")
        .or_else(|| resources.limits.get("memory"))
        .or(page_size)
        .cloned();
}

pub(super) fn apply_max_guest(memory: Option<&mut Memory>, defaults: &ClusterDefaults) {
    let Some(memory) = memory.filter(|memory| memory.max_guest.is_none()) else {
        return;
    };
    let Some(guest) = memory.guest.as_ref().and_then(Quantity::bytes) else {
        return;
    };
    if guest < MIN_HOT_PLUG_GUEST {
        return;
    }
    memory.max_guest = match &defaults.max_guest {
        Some(max) => max.bytes().filter(|max| *max >= guest).map(|_| max.clone()),
        None => guest.checked_mul(GROWTH).map(Quantity::from_bytes),
    };
}
