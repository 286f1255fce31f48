//! Which of several replicas acts: the one that holds a Lease.
//!
//! A lease is over when its record has not changed for its duration by the observer's own clock:
//! clocks of several machines are never compared. The holder stops acting before that, when it
//! could not renew for two thirds of the duration, by its own clock, too.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::Instant;

use super::error::code;

/// How a leader is chosen.
#[derive(Debug, Clone)]
pub struct Election {
    /// The namespace of the lease.
    pub namespace: String,
    /// The lease's name.
    pub name: String,
    /// This replica's name, which no other has.
    pub identity: String,
    /// How long after its last sign of life a leader is replaced.
    pub duration: Duration,
}

/// Whether this replica leads.
#[derive(Debug, Clone, Default)]
pub struct Leading(Arc<AtomicBool>);

impl Leading {
    /// Whether it leads now.
    #[must_use]
    pub fn is_leading(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    fn set(&self, leading: bool) {
        self.0.store(leading, Ordering::Release);
    }
}

/// A record of the lease, and when it was seen first.
#[derive(Debug)]
struct Seen {
    version: Option<String>,
    at: Instant,
}

impl Election {
    /// Runs `work` whenever this replica leads, and drops it when it does not any more, until
    /// `stop` is done; then the lease is given back.
    pub async fn run<W: Future<Output = ()>>(
        &self,
        client: Client,
        leading: &Leading,
        mut work: impl FnMut() -> W,
        stop: impl Future<Output = ()>,
    ) {
        let api = Api::<Lease>::namespaced(client, &self.namespace);
        let mut stop = pin!(stop);
        loop {
            let lease = tokio::select! {
                lease = self.acquire(&api) => Some(lease),
                () = &mut stop => None,
            };
            let Some(lease) = lease else {
                self.release_unseen(&api).await;
                return;
            };
            tracing::info!(identity = self.identity, "this replica leads");
            leading.set(true);
            let (ended, stopped) = {
                let mut lease = Some(lease);
                let stopped = tokio::select! {
                    () = self.hold(&api, &mut lease) => false,
                    () = work() => false,
                    () = &mut stop => true,
                };
                (lease, stopped)
            };
            leading.set(false);
            if let Some(lease) = ended {
                self.release(&api, lease).await;
            }
            if stopped {
                return;
            }
            tracing::warn!(
                identity = self.identity,
                "this replica does not lead any more"
            );
        }
    }

    /// Waits until the lease is this replica's.
    async fn acquire(&self, api: &Api<Lease>) -> Lease {
        let mut seen = Seen {
            version: None,
            at: Instant::now(),
        };
        loop {
            match self.try_acquire(api, &mut seen).await {
                Ok(Some(lease)) => return lease,
                Ok(None) => {}
                Err(error) => tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    lease = self.name,
                    "failed to ask for the lease"
                ),
            }
            tokio::time::sleep(self.period()).await;
        }
    }

    async fn try_acquire(
        &self,
        api: &Api<Lease>,
        seen: &mut Seen,
    ) -> Result<Option<Lease>, kube::Error> {
        let Some(mut lease) = api.get_opt(&self.name).await? else {
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(self.name.clone()),
                    ..ObjectMeta::default()
                },
                spec: Some(self.spec(0)),
            };
            return mine(api.create(&PostParams::default(), &lease).await);
        };
        if seen.version != lease.metadata.resource_version {
            *seen = Seen {
                version: lease.metadata.resource_version.clone(),
                at: Instant::now(),
            };
        }
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.unwrap_or_default();
        let is_free = holder.is_empty() || holder == self.identity;
        if !is_free && seen.at.elapsed() < self.duration {
            return Ok(None);
        }
        lease.spec = Some(self.spec(spec.lease_transitions.unwrap_or_default() + 1));
        mine(
            api.replace(&self.name, &PostParams::default(), &lease)
                .await,
        )
    }

    /// Renews the lease until that fails for too long; `lease` is empty then.
    async fn hold(&self, api: &Api<Lease>, lease: &mut Option<Lease>) {
        let mut renewed = Instant::now();
        let limit = self.duration * 2 / 3;
        while let Some(mut next) = lease.clone() {
            tokio::time::sleep(self.period()).await;
            if let Some(spec) = &mut next.spec {
                spec.renew_time = Some(MicroTime(Timestamp::now()));
            }
            let params = PostParams::default();
            let request = api.replace(&self.name, &params, &next);
            let left = limit.saturating_sub(renewed.elapsed());
            match tokio::time::timeout(left, request).await {
                Ok(Ok(renewal)) => {
                    *lease = Some(renewal);
                    renewed = Instant::now();
                }
                // Somebody else has it.
                Ok(Err(error)) if matches!(code(&error), Some(404 | 409)) => *lease = None,
                Ok(Err(error)) => tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    lease = self.name,
                    "failed to renew the lease"
                ),
                Err(_) => *lease = None,
            }
            if renewed.elapsed() >= limit {
                *lease = None;
            }
        }
    }

    /// Gives back a lease whose request was answered when nobody listened any more.
    async fn release_unseen(&self, api: &Api<Lease>) {
        let request = api.get_opt(&self.name);
        if let Ok(Ok(Some(lease))) = tokio::time::timeout(self.period(), request).await {
            let holder = lease
                .spec
                .as_ref()
                .and_then(|spec| spec.holder_identity.as_ref());
            if holder == Some(&self.identity) {
                self.release(api, lease).await;
            }
        }
    }

    /// Lets the next replica take over at once.
    async fn release(&self, api: &Api<Lease>, mut lease: Lease) {
        if let Some(spec) = &mut lease.spec {
            spec.holder_identity = None;
        }
        let params = PostParams::default();
        let request = api.replace(&self.name, &params, &lease);
        // Whoever waits gets it in the end, too.
        let _ = tokio::time::timeout(self.period(), request).await;
    }

    fn period(&self) -> Duration {
        self.duration / 6
    }

    fn spec(&self, transitions: i32) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(self.duration.as_secs().max(1)).ok(),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        }
    }
}

/// Returns the lease unless another replica was faster.
fn mine(answer: Result<Lease, kube::Error>) -> Result<Option<Lease>, kube::Error> {
    match answer {
        Ok(lease) => Ok(Some(lease)),
        Err(error) if code(&error) == Some(409) => Ok(None),
        Err(error) => Err(error),
    }
}
