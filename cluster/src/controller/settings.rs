//! How migrations are carried out: the cluster's settings, and those of a policy.

use podvisor_cluster_types::Quantity;
use podvisor_cluster_types::kubevirt::MigrationConfiguration;
use serde::{Deserialize, Serialize};

/// Settings of one migration, under the names that KubeVirt has for them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Settings {
    /// Most bytes per second while the guest runs; 0 for no limit.
    pub bandwidth_per_migration: u64,
    /// Seconds that each GiB of memory may take.
    pub completion_timeout_per_gi_b: u64,
    /// Seconds without anything sent after which it fails.
    pub progress_timeout: u64,
    /// Whether a guest that writes faster than its memory can be sent is slowed down.
    #[serde(default)]
    pub allow_auto_converge: bool,
    /// Whether the guest may stand still for as long as it takes, where it writes faster than its
    /// memory can be sent.
    pub allow_workload_disruption: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            bandwidth_per_migration: 0,
            completion_timeout_per_gi_b: 150,
            progress_timeout: 150,
            allow_auto_converge: false,
            allow_workload_disruption: false,
        }
    }
}

/// What a policy, or an administrator, decides of them.
#[derive(Debug, Default)]
pub(super) struct Decided<'a> {
    pub(super) bandwidth: Option<&'a Quantity>,
    pub(super) completion_timeout: Option<i64>,
    pub(super) progress_timeout: Option<i64>,
    pub(super) auto_converge: Option<bool>,
    pub(super) workload_disruption: Option<bool>,
}

impl Settings {
    /// Returns them with what was decided. What validation refuses is taken as nothing, or as 0.
    pub(super) fn with(&self, decided: &Decided<'_>) -> Self {
        let number = |value: Option<i64>, otherwise: u64| {
            value.map_or(otherwise, |value| u64::try_from(value).unwrap_or_default())
        };
        let bandwidth = decided.bandwidth.and_then(Quantity::bytes);
        Self {
            bandwidth_per_migration: bandwidth.unwrap_or(self.bandwidth_per_migration),
            completion_timeout_per_gi_b: number(
                decided.completion_timeout,
                self.completion_timeout_per_gi_b,
            ),
            progress_timeout: number(decided.progress_timeout, self.progress_timeout),
            allow_auto_converge: decided.auto_converge.unwrap_or(self.allow_auto_converge),
            allow_workload_disruption: decided
                .workload_disruption
                .unwrap_or(self.allow_workload_disruption),
        }
    }

    /// Seconds that the migration of a guest with so much memory may take.
    #[must_use]
    pub fn completion_timeout(&self, guest: Option<&Quantity>) -> u64 {
        let bytes = guest.and_then(Quantity::bytes).unwrap_or(1 << 30);
        let gib = bytes.div_ceil(1 << 30).max(1);
        self.completion_timeout_per_gi_b.saturating_mul(gib)
    }
}

/// How many migrations run in parallel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places {
    /// In the cluster.
    pub cluster: usize,
    /// Out of one node.
    pub node: usize,
}

/// What an administrator decides for the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClusterSettings {
    /// How many run in parallel.
    pub(super) places: Places,
    /// Of migrations that no policy is for.
    pub(super) settings: Settings,
}

impl Default for ClusterSettings {
    fn default() -> Self {
        Self {
            places: Places {
                cluster: 5,
                node: 2,
            },
            settings: Settings::default(),
        }
    }
}

impl ClusterSettings {
    /// Returns them with what an administrator has decided since.
    pub(super) fn with(&self, decided: &MigrationConfiguration) -> Self {
        let places = |value: Option<i64>, otherwise: usize| {
            value.map_or(otherwise, |value| {
                usize::try_from(value).unwrap_or_default().max(1)
            })
        };
        Self {
            places: Places {
                cluster: places(decided.parallel_migrations_per_cluster, self.places.cluster),
                node: places(
                    decided.parallel_outbound_migrations_per_node,
                    self.places.node,
                ),
            },
            settings: self.settings.with(&Decided {
                bandwidth: decided.bandwidth_per_migration.as_ref(),
                completion_timeout: decided.completion_timeout_per_gi_b,
                progress_timeout: decided.progress_timeout,
                auto_converge: decided.allow_auto_converge,
                workload_disruption: decided.allow_workload_disruption,
            }),
        }
    }
}

/// What the subcommand takes from its command line about migrations.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
#[non_exhaustive]
pub struct Options {
    /// Migrations at the same time
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    pub parallel_migrations: u16,
    /// Migrations at the same time out of one node
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    pub parallel_outbound_migrations: u16,
    /// Most bytes per second of a migration while its guest runs; 0 for no limit
    #[arg(long, default_value_t = 0)]
    pub migration_bandwidth: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            parallel_migrations: 5,
            parallel_outbound_migrations: 2,
            migration_bandwidth: 0,
        }
    }
}

impl Options {
    pub(super) fn settings(&self) -> ClusterSettings {
        ClusterSettings {
            places: Places {
                cluster: self.parallel_migrations.into(),
                node: self.parallel_outbound_migrations.into(),
            },
            settings: Settings {
                bandwidth_per_migration: self.migration_bandwidth,
                ..Settings::default()
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_an_administrator_decides_replaces_the_command_line_alone() {
        let decided = json!({
            "parallelMigrationsPerCluster": 9,
            "bandwidthPerMigration": "64Mi",
            "allowAutoConverge": true,
        });
        let decided = serde_json::from_value(decided).unwrap();
        let options = Options {
            parallel_outbound_migrations: 3,
            ..Options::default()
        };
        let settings = options.settings().with(&decided);
        assert_eq!((settings.places.cluster, settings.places.node), (9, 3));
        let wanted = Settings {
            bandwidth_per_migration: 64 << 20,
            allow_auto_converge: true,
            ..Settings::default()
        };
        assert_eq!(settings.settings, wanted);
        assert_eq!(
            options.settings().with(&MigrationConfiguration::default()),
            options.settings()
        );
    }
}
