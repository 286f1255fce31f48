//! Settings of a store and of a pull.

use std::sync::Arc;

use crate::{Cancel, Credentials, Limits, PullEvent, PullEvents, RegistryConfig, SignaturePolicy};

/// Settings of a store.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct StoreOptions {
    /// Bounds that every image of the store keeps.
    pub limits: Limits,
}

impl StoreOptions {
    /// Sets the bounds on images.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }
}

/// When a pull asks the registry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PullPolicy {
    /// Always: a tag may have moved. Layers that the store has are not fetched again.
    #[default]
    Always,
    /// Only when the store has no image of that name.
    IfMissing,
}

/// Settings of one pull.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PullOptions {
    /// When to ask the registry.
    pub policy: PullPolicy,
    /// Where progress is reported.
    pub events: Option<PullEvents>,
    /// Layers fetched at the same time, at least 1.
    pub parallel_layers: usize,
    /// Who pulls, as far as the registry itself is concerned; mirrors get what Docker's
    /// configuration has for them.
    pub credentials: Credentials,
    /// How registries are reached.
    pub registries: RegistryConfig,
    /// Which signatures images need; by default none, and none is looked at.
    pub signatures: Option<Arc<SignaturePolicy>>,
    /// Ends a load from another thread; a pull ends when its future is dropped.
    pub cancel: Cancel,
}

impl Default for PullOptions {
    fn default() -> Self {
        Self {
            policy: PullPolicy::Always,
            events: None,
            parallel_layers: 3,
            credentials: Credentials::Auto,
            registries: RegistryConfig::default(),
            signatures: None,
            cancel: Cancel::default(),
        }
    }
}

impl PullOptions {
    /// Sets when the registry is asked.
    #[must_use]
    pub fn policy(mut self, policy: PullPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// Reports progress to `events`.
    #[must_use]
    pub fn events(mut self, events: PullEvents) -> Self {
        self.events = Some(events);
        self
    }

    /// Sets who pulls.
    #[must_use]
    pub fn credentials(mut self, credentials: Credentials) -> Self {
        self.credentials = credentials;
        self
    }

    /// Sets how registries are reached.
    #[must_use]
    pub fn registries(mut self, registries: RegistryConfig) -> Self {
        self.registries = registries;
        self
    }

    /// Sets which signatures images need.
    #[must_use]
    pub fn signatures(mut self, policy: Arc<SignaturePolicy>) -> Self {
        self.signatures = Some(policy);
        self
    }

    /// Lets `cancel` end a load.
    #[must_use]
    pub fn cancel(mut self, cancel: Cancel) -> Self {
        self.cancel = cancel;
        self
    }

    pub(crate) fn emit(&self, event: PullEvent) {
        if let Some(events) = &self.events {
            // A receiver that went away has lost interest, no more.
            let _ = events.send(event);
        }
    }
}
