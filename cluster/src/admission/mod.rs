//! The webhooks that default and validate KubeVirt's objects.
//!
//! They are a group of the API that the API server aggregates, and calls at itself: so a review
//! comes from it alone, and that can be proved.
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
mod policy;
mod review;
mod snapshots;
mod validate;

use std::{path::PathBuf, sync::Arc};

use anyhow::Context as _;
use http::{HeaderValue, Method, StatusCode, header, request::Parts};
use kube::Client;
use tokio::{
    net::TcpListener,
    sync::{Semaphore, watch},
};

pub use lookup::{ClusterLookup, Evicted, Lookup};
pub use mutate::mutate;
pub use policy::{Config, NAME, Policy};
use review::{Extent, ReviewError};
pub use review::{Request, Response, User, answer};
pub use validate::validate;

use crate::{
    certificates::{Certificates, Publish},
    copy, discovery,
    front_proxy::FrontProxy,
    https::{self, Listen, Peer},
    installation::{self, Seen},
    status::Failure,
    token::KeyStore,
};

/// The aggregated group of the webhooks.
pub const GROUP: &str = "admission.podvisor.io";
/// Its version.
pub const VERSION: &str = "v1";

/// The name of its APIService.
const API_SERVICE: &str = "v1.admission.podvisor.io";

/// Who calls webhooks: the API server's own account, which nobody else has.
const CALLER: &str = "system:apiserver";

/// The path of the webhook that fills in defaults, and of the one that judges.
pub(crate) const MUTATE: &str = "/apis/admission.podvisor.io/v1/mutate";
pub(crate) const VALIDATE: &str = "/apis/admission.podvisor.io/v1/validate";

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
    let front_proxy = FrontProxy::read(&client).await?;
    let publish = Publish::ApiServices(&[API_SERVICE]);
    let certificates = Certificates::new(client.clone(), &policy.namespace, NAME, publish).await?;
    let tls = certificates.server_config(Some(Arc::clone(&front_proxy) as _))?;
    let follow_proxy = tokio::spawn(Arc::clone(&front_proxy).follow(client.clone()));
    let fresh = tokio::spawn(certificates.keep_fresh());
    let (seen, follow) = installation::follow(client.clone(), &policy.namespace);
    let follow = tokio::spawn(follow);
    let state = Arc::new(State {
        keys: KeyStore::of::<copy::Grant>(client.clone(), &policy.namespace),
        front_proxy,
        policy,
        seen,
        lookup: ClusterLookup::new(client),
    });
    tracing::info!(address = ?listener.local_addr().ok(), "serving the webhooks");
    let handle = move |request, peer| handle(request, peer, Arc::clone(&state));
    https::serve(listener, tls, handle, stop).await;
    follow_proxy.abort();
    follow.abort();
    fresh.abort();
    Ok(())
}

/// What all requests share.
struct State {
    front_proxy: Arc<FrontProxy>,
    policy: Policy,
    keys: KeyStore,
    seen: watch::Receiver<Seen>,
    lookup: ClusterLookup,
}

/// So many large objects are judged at once: each takes a good part of the memory that there is.
static LARGE: Semaphore = Semaphore::const_new(2);

/// What becomes of a request.
#[derive(Debug)]
enum Judged {
    Mutate,
    Validate,
    Answer(https::Answer),
}

/// Decides by the head of a request alone: what is not a review by the API server is answered.
fn judge(head: &Parts, peer: &Peer, state: &State) -> Judged {
    let path = head.uri.path();
    if path == "/healthz" {
        return Judged::Answer(https::text(StatusCode::OK, "ok"));
    }
    let user = match state.front_proxy.user(peer, &head.headers) {
        Ok(user) => user,
        Err(failure) => return Judged::Answer(failure.answer()),
    };
    let judged = match (&head.method, path) {
        (&Method::POST, MUTATE) => Judged::Mutate,
        (&Method::POST, VALIDATE) => Judged::Validate,
        (&Method::GET, _) => {
            let found = discover(path, head.headers.get(header::ACCEPT));
            let found = found.unwrap_or_else(|| Failure::not_found_path(path).answer());
            return Judged::Answer(found);
        }
        _ => return Judged::Answer(Failure::not_found_path(path).answer()),
    };
    if user.name == CALLER {
        return judged;
    }
    Judged::Answer(Failure::forbidden("only the API server asks for reviews").answer())
}

/// The lists that clients read first: the group has no resources of its own.
fn discover(path: &str, accept: Option<&HeaderValue>) -> Option<https::Answer> {
    let group = || discovery::group(GROUP, &[VERSION]);
    let list = match path.strip_prefix("/apis")? {
        "" | "/" => return Some(discovery::groups(&[group()], accept)),
        rest => match rest.strip_prefix('/')?.strip_prefix(GROUP)? {
            "" | "/" => group(),
            rest if rest.strip_prefix('/') == Some(VERSION) => {
                discovery::resources(GROUP, VERSION, &[])
            }
            _ => return None,
        },
    };
    Some(https::json(StatusCode::OK, &list))
}

async fn handle(
    request: http::Request<hyper::body::Incoming>,
    peer: Peer,
    state: Arc<State>,
) -> https::Answer {
    let (parts, body) = request.into_parts();
    let mutates = match judge(&parts, &peer, &state) {
        Judged::Mutate => true,
        Judged::Validate => false,
        Judged::Answer(answer) => return answer,
    };
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
    let response = match mutates {
        true if request.kind.kind == "DataVolume" => {
            copies::authorize(&request, policy, &state.lookup, &state.keys).await
        }
        true => match infer::infer(&request, &state.lookup).await {
            Ok(Some(object)) => mutate::mutate_into(&request, object, policy),
            Ok(None) => mutate(&request, policy),
            Err(refused) => refused,
        },
        false => validate(&request, policy, &state.lookup).await,
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
