//! Checks of a container's health, and their results.

use std::collections::VecDeque;
use std::time::Duration;

use oci_spec::runtime::Process;
use serde::{Deserialize, Serialize};

/// How many results of checks are kept, the newest last.
const RESULTS: usize = 5;

/// How the health of a container is checked: by a program that runs in it again and again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HealthCheck {
    /// The program: 0 is its exit code while the container is healthy.
    pub process: Process,
    /// `user[:group]` as names or numbers of the image; empty: as `process` says.
    pub user: String,
    /// The time from one check's end to the next one's start.
    pub interval: Duration,
    /// How long a check may take: then it is killed, and has failed.
    pub timeout: Duration,
    /// The time after the container's start in which failures do not count.
    pub start_period: Duration,
    /// As `interval`, in that time, until the container is healthy.
    pub start_interval: Duration,
    /// So many failures in a row make the container unhealthy.
    pub retries: u32,
}

/// The health of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// Whether it is healthy.
    pub status: HealthStatus,
    /// How many checks have failed since the last one that did not.
    pub failing_streak: u32,
    /// The last checks, the newest last.
    pub log: VecDeque<HealthResult>,
}

/// Whether a container is healthy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum HealthStatus {
    /// Nothing is known yet.
    #[default]
    Starting,
    /// Its last check did not fail, or too few have failed since.
    Healthy,
    /// As many checks have failed in a row as make it unhealthy.
    Unhealthy,
    /// Another one, which only a newer podvisor knows.
    #[serde(other)]
    Unknown,
}

impl HealthStatus {
    /// Returns docker's word for it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Healthy => "healthy",
            Self::Unhealthy => "unhealthy",
            Self::Unknown => "unknown",
        }
    }
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthResult {
    /// Nanoseconds since 1970-01-01 UTC.
    pub started_at_ns: u64,
    /// Nanoseconds since 1970-01-01 UTC.
    pub ended_at_ns: u64,
    /// The program's exit code; -1 for one that did not end by itself, or did not start.
    pub exit_code: i32,
    /// The beginning of what it printed, or why it did not run.
    pub output: String,
}

impl Health {
    /// Adds a check's result. Of a container that is `starting`, a failure does not count.
    pub(crate) fn add(&mut self, result: HealthResult, retries: u32, starting: bool) {
        if result.exit_code == 0 {
            self.failing_streak = 0;
            self.status = HealthStatus::Healthy;
        } else if !(starting && self.status == HealthStatus::Starting) {
            self.failing_streak = self.failing_streak.saturating_add(1);
            if self.failing_streak >= retries {
                self.status = HealthStatus::Unhealthy;
            }
        }
        if self.log.len() >= RESULTS {
            self.log.pop_front();
        }
        self.log.push_back(result);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(exit_code: i32) -> HealthResult {
        HealthResult {
            started_at_ns: 1,
            ended_at_ns: 2,
            exit_code,
            output: exit_code.to_string(),
        }
    }

    #[test]
    fn a_container_is_unhealthy_after_enough_failures_in_a_row() {
        let mut health = Health::default();
        let mut add = |exit_code, starting| {
            health.add(result(exit_code), 2, starting);
            (health.status, health.failing_streak)
        };
        use HealthStatus::{Healthy, Starting, Unhealthy};
        assert_eq!(add(1, true), (Starting, 0));
        assert_eq!(add(1, true), (Starting, 0));
        assert_eq!(add(0, true), (Healthy, 0));
        // It was healthy already: failures count, although the start period is not over.
        assert_eq!(add(1, true), (Healthy, 1));
        assert_eq!(add(-1, false), (Unhealthy, 2));
        assert_eq!(add(3, false), (Unhealthy, 3));
        assert_eq!(add(0, false), (Healthy, 0));
        let codes: Vec<_> = health.log.iter().map(|result| result.exit_code).collect();
        assert_eq!(codes, [0, 1, -1, 3, 0]);
    }

    #[test]
    fn a_container_that_never_was_healthy_is_starting_until_enough_checks_have_failed() {
        let mut health = Health::default();
        health.add(result(1), 2, false);
        assert_eq!(health.status, HealthStatus::Starting);
        health.add(result(1), 2, false);
        assert_eq!(health.status, HealthStatus::Unhealthy);
    }
}
