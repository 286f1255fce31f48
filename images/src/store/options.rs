//! Settings of a store and of a pull.

use std::sync::Arc;
use std::time::Duration;

use crate::{Cancel, Credentials, Limits, PullEvent, PullEvents, RegistryConfig, SignaturePolicy};

/// Settings of a store.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct StoreOptions {
    /// Limits for every image of the store.
    pub limits: Limits,
}

impl StoreOptions {
    /// Sets the limits for images.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }
}

/// How long a pull waits for layers that others fetch from other registries.
const OTHER_REGISTRY_WAIT: Duration = Duration::from_secs(30);

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
    /// How long the pull waits, all waits together, for what other pulls fetch from other
    /// registries before it fetches that itself. Default: 30 s. What is fetched from its own
    /// registry it awaits for as long as that takes.
    pub other_registry_wait: Duration,
    /// Credentials for the registry itself; mirrors get those in Docker's configuration.
    pub credentials: Credentials,
    /// Connection settings of registries.
    pub registries: RegistryConfig,
    /// Which signatures images need; by default none are needed, and none are looked at.
    pub signatures: Option<Arc<SignaturePolicy>>,
    /// Cancels a load from another thread; a pull is cancelled by dropping its future.
    pub cancel: Cancel,
}

impl Default for PullOptions {
    fn default() -> Self {
        Self {
            policy: PullPolicy::Always,
            events: None,
            parallel_layers: 3,
            other_registry_wait: OTHER_REGISTRY_WAIT,
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

    /// Sets the credentials.
    #[must_use]
    pub fn credentials(mut self, credentials: Credentials) -> Self {
        self.credentials = credentials;
        self
    }

    /// Sets the connection settings of registries.
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

    /// Sets the handle that cancels a load.
    #[must_use]
    pub fn cancel(mut self, cancel: Cancel) -> Self {
        self.cancel = cancel;
        self
    }

    pub(crate) fn emit(&self, event: PullEvent) {
        if let Some(events) = &self.events {
            // A dropped receiver only means that the caller is no longer interested.
            let _ = events.send(event);
        }
    }
}
