//! The webhooks that default and validate KubeVirt's objects.
//!
//! An `AdmissionReview` enters by HTTPS, is read by `review`, defaulted by `mutate` or judged by
//! `validate`, and leaves with a patch or with every cause to refuse the object. What must be
//! looked up in the cluster comes through [`Lookup`]; everything else is a function of the
//! request.

mod copies;
mod evict;
mod infer;
mod lookup;
mod mutate;
mod review;
mod snapshots;
mod validate;

use std::{path::PathBuf, sync::Arc};

use anyhow::Context as _;
use http::{Method, StatusCode};
use kube::Client;
use podvisor_cluster_types::{ClusterConfig, ClusterDefaults, kubevirt::KubeVirtConfiguration};
use serde::Deserialize;
use tokio::{
    net::TcpListener,
    sync::{Semaphore, watch},
};

pub use evict::Evicted;
pub use lookup::{ClusterLookup, Lookup};
pub use mutate::mutate;
use review::{Extent, ReviewError};
pub use review::{Request, Response, User, answer};
pub use validate::validate;

use crate::{
    certificates::{Certificates, Publish},
    copy,
    https::{self, Listen},
    installation::{self, Seen},
    token::KeyStore,
};

/// The name of both webhook configurations and of the service.
pub const NAME: &str = "podvisor-admission";

/// What the subcommand takes from its command line.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct Options {
    /// Where it listens.
    #[command(flatten)]
    pub server: Listen,
    /// File with the cluster's defaults and rules, in JSON.
    #[arg(long)]
    pub config: Option<PathBuf>,
}

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

/// Serves the webhooks until the process is told to end.
///
/// # Errors
///
/// The configuration is invalid, the certificates cannot be made, or the address is taken.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let config = match &options.config {
        None => Config::default(),
        Some(path) => {
            let text = tokio::fs::read(path)
                .await
                .with_context(|| format!("failed to read {}", path.display()))?;
            serde_json::from_slice(&text)
                .with_context(|| format!("{} is invalid", path.display()))?
        }
    };
    let (client, listener) = options.server.start().await?;
    let policy = Policy::new(config, &options.server.namespace);
    serve(client, listener, policy, https::told_to_end()).await
}

/// Serves the webhooks on a listener until `stop` is ready.
///
/// # Errors
///
/// The certificates cannot be made or published.
pub async fn serve(
    client: Client,
    listener: TcpListener,
    policy: Policy,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let publish = Publish::Webhooks(NAME);
    let certificates = Certificates::new(client.clone(), &policy.namespace, NAME, publish).await?;
    let tls = certificates.server_config(None)?;
    let fresh = tokio::spawn(certificates.keep_fresh());
    let (seen, follow) = installation::follow(client.clone(), &policy.namespace);
    let follow = tokio::spawn(follow);
    let state = Arc::new(State {
        keys: KeyStore::of::<copy::Grant>(client.clone(), &policy.namespace),
        policy,
        seen,
        lookup: ClusterLookup::new(client),
    });
    tracing::info!(address = ?listener.local_addr().ok(), "serving the webhooks");
    let handle = move |request, _| handle(request, Arc::clone(&state));
    https::serve(listener, tls, handle, stop).await;
    follow.abort();
    fresh.abort();
    Ok(())
}

/// What all requests share.
struct State {
    policy: Policy,
    keys: KeyStore,
    seen: watch::Receiver<Seen>,
    lookup: ClusterLookup,
}

/// So many large objects are judged at once: each takes a good part of the memory that there is.
static LARGE: Semaphore = Semaphore::const_new(2);

async fn handle(request: http::Request<hyper::body::Incoming>, state: Arc<State>) -> https::Answer {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    match (parts.method, path) {
        (Method::GET, "/healthz") => return https::text(StatusCode::OK, "ok"),
        (Method::POST, "/mutate" | "/validate") => {}
        _ => return https::text(StatusCode::NOT_FOUND, "not found"),
    }
    let body = match https::read_body(body).await {
        Ok(body) => body,
        Err(answer) => return answer,
    };
    let refused = |error: ReviewError| https::text(StatusCode::BAD_REQUEST, &error.to_string());
    let _turn = match review::extent(&body) {
        Ok(Extent::Usual) => None,
        Ok(Extent::Large) => LARGE.acquire().await.ok(),
        Err(error) => return refused(error),
    };
    let request = match review::read(&body) {
        Ok(request) => request,
        Err(error) => return refused(error),
    };
    drop(body);
    let object = state.seen.borrow().object.clone();
    let policy = match object {
        Some(object) => &state.policy.with(&object.spec.configuration),
        None => &state.policy,
    };
    let response = match path {
        "/mutate" if request.kind.kind == "DataVolume" => {
            copies::authorize(&request, policy, &state.lookup, &state.keys).await
        }
        "/mutate" => match infer::infer(&request, &state.lookup).await {
            Ok(Some(object)) => mutate::mutate_into(&request, object, policy),
            Ok(None) => mutate(&request, policy),
            Err(refused) => refused,
        },
        _ => validate(&request, policy, &state.lookup).await,
    };
    tracing::debug!(
        kind = %request.kind.kind,
        operation = %request.operation,
        namespace = %request.namespace,
        name = %request.name,
        allowed = response.is_allowed(),
        "reviewed"
    );
    https::json(StatusCode::OK, &answer(&request, &response))
}
