//! What a user asked of the API server, by the server's audit log.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;

/// Numbers of requests by verb and resource. Watches and lists are not among them: they are the
/// same whatever number of objects there is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Requests(BTreeMap<String, usize>);

impl Requests {
    /// Counts the requests of `user` in an audit log.
    pub(super) fn of(log: &str, user: &str) -> Self {
        let mut counts = BTreeMap::new();
        for line in log.lines() {
            let Ok(event) = serde_json::from_str::<Value>(line) else {
                continue;
            };
            let verb = event["verb"].as_str().unwrap_or_default();
            if event["user"]["username"] != user || matches!(verb, "watch" | "list") {
                continue;
            }
            let object = &event["objectRef"];
            let mut name = format!("{verb} {}", object["resource"].as_str().unwrap_or_default());
            if let Some(subresource) = object["subresource"].as_str() {
                name = format!("{name}/{subresource}");
            }
            // The lease of the leader is renewed whether or not there is an object.
            if !name.ends_with(" leases") {
                *counts.entry(name).or_default() += 1;
            }
        }
        Self(counts)
    }

    /// Returns the number of all requests.
    pub fn total(&self) -> usize {
        self.0.values().sum()
    }

    /// Returns the number of requests of one kind, such as `patch pods/status`.
    pub fn count(&self, kind: &str) -> usize {
        self.0.get(kind).copied().unwrap_or_default()
    }

    /// Returns what was asked since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let differences = self.0.iter().filter_map(|(name, count)| {
            let more = count - before.0.get(name).copied().unwrap_or_default();
            (more > 0).then(|| (name.clone(), more))
        });
        Self(differences.collect())
    }
}

impl fmt::Display for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, count) in &self.0 {
            writeln!(f, "{count:>6}  {name}")?;
        }
        Ok(())
    }
}
