//! What decides about a request besides the request.

use podvisor_cluster_types::{ClusterConfig, ClusterDefaults, kubevirt::KubeVirtConfiguration};
use serde::Deserialize;

use super::review::User;

/// The name of both webhook configurations and of the service.
pub const NAME: &str = "podvisor-admission";

/// What an administrator decides: the file of `--config`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Config {
    /// What is filled in.
    pub defaults: ClusterDefaults,
    /// What is allowed.
    pub rules: ClusterConfig,
}

/// What decides about a request besides the request.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Policy {
    /// The administrator's file.
    pub config: Config,
    /// Namespace of the service accounts that are the system's own.
    pub namespace: String,
}

impl Policy {
    /// The policy of a cluster whose components run in `namespace`.
    #[must_use]
    pub fn new(config: Config, namespace: &str) -> Self {
        Self {
            config,
            namespace: namespace.to_owned(),
        }
    }

    /// Returns the policy with what an administrator has decided in the cluster itself.
    #[must_use]
    pub fn with(&self, decided: &KubeVirtConfiguration) -> Self {
        let mut policy = self.clone();
        let Config { defaults, rules } = &mut policy.config;
        decided.apply(rules, defaults);
        policy
    }

    /// Whether the user is one of our own components.
    #[must_use]
    pub fn is_system(&self, user: &User) -> bool {
        let account = user
            .username
            .strip_prefix("system:serviceaccount:")
            .and_then(|rest| rest.split_once(':'));
        account.is_some_and(|(namespace, name)| {
            namespace == self.namespace && matches!(name, "podvisor-controller" | "podvisor-api")
        })
    }

    /// Whether the user may write a status: one of our own components, or a node; these webhooks
    /// themselves mark VMs that have to leave their node. What a node may
    /// write is decided by a policy.
    #[must_use]
    pub fn may_report(&self, user: &User) -> bool {
        let own = format!("system:serviceaccount:{}:{NAME}", self.namespace);
        self.is_system(user)
            || user.username == own
            || user.groups.iter().any(|group| group == "system:nodes")
    }
}
