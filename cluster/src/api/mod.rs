//! The aggregated group `subresources.kubevirt.io`: discovery and the verbs of VMs.
//!
//! The API server passes requests on with the user's name in their headers, under a certificate
//! that only it has (`front_proxy`). Each request is authorized by a SubjectAccessReview
//! (`authorize`) and answered by `discovery` or by the room of its object.

mod authorize;
mod discovery;
mod front_proxy;
mod status;
mod vm;

use std::{net::SocketAddr, sync::Arc};

use anyhow::Context as _;
use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use kube::Client;
use tokio::net::TcpListener;

use crate::{
    certificates::{Certificates, Publish},
    https::{self, Answer, Peer},
};
use front_proxy::FrontProxy;
use status::Failure;

/// The group of the subresources.
pub const GROUP: &str = "subresources.kubevirt.io";

/// Its versions, which differ in nothing.
pub const VERSIONS: [&str; 2] = ["v1", "v1alpha3"];

/// The name of the service.
pub const NAME: &str = "podvisor-api";

/// The names of the APIServices.
const API_SERVICES: [&str; 2] = [
    "v1.subresources.kubevirt.io",
    "v1alpha3.subresources.kubevirt.io",
];

/// What the subcommand takes from its command line.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct Options {
    /// Address to listen on.
    #[arg(long, default_value = "0.0.0.0:8443")]
    pub listen: SocketAddr,
    /// Namespace that the components run in.
    #[arg(long, env = "POD_NAMESPACE", default_value = "podvisor")]
    pub namespace: String,
}

/// Serves the API until the process is told to end.
///
/// # Errors
///
/// The API server cannot be reached, the certificates cannot be made, or the address is taken.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let client = Client::try_default()
        .await
        .context("failed to find an API server")?;
    let listener = TcpListener::bind(options.listen)
        .await
        .with_context(|| format!("failed to listen on {}", options.listen))?;
    serve(client, listener, &options.namespace, https::told_to_end()).await
}

/// Serves the API on a listener until `stop` is ready.
///
/// # Errors
///
/// The API server does not say whom to trust, or the certificates cannot be made or published.
pub async fn serve(
    client: Client,
    listener: TcpListener,
    namespace: &str,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let front_proxy = FrontProxy::read(&client).await?;
    let publish = Publish::ApiServices(&API_SERVICES);
    let certificates = Certificates::new(client.clone(), namespace, NAME, publish).await?;
    let tls = certificates.server_config(Some(front_proxy.verifier()?))?;
    let fresh = tokio::spawn(certificates.keep_fresh());
    tracing::info!(address = ?listener.local_addr().ok(), "serving the subresources");
    let state = Arc::new(State {
        client,
        front_proxy,
    });
    let handle = move |request, peer| handle(request, peer, Arc::clone(&state));
    https::serve(listener, tls, handle, stop).await;
    fresh.abort();
    Ok(())
}

struct State {
    client: Client,
    front_proxy: FrontProxy,
}

async fn handle(request: Request<Incoming>, peer: Peer, state: Arc<State>) -> Answer {
    if request.uri().path() == "/healthz" {
        return https::text(StatusCode::OK, "ok");
    }
    match answer(request, &peer, &state).await {
        Ok(answer) => answer,
        Err(failure) => failure.answer(),
    }
}

/// A path of a subresource: `/apis/GROUP/VERSION/namespaces/NS/RESOURCE/NAME/SUB`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Target<'a> {
    version: &'a str,
    namespace: &'a str,
    resource: &'a str,
    name: &'a str,
    subresource: &'a str,
}

impl<'a> Target<'a> {
    fn parse(path: &'a str) -> Option<Self> {
        let mut steps = path.strip_prefix("/apis/")?.split('/');
        let mut next = || steps.next().filter(|step| !step.is_empty());
        if next()? != GROUP {
            return None;
        }
        let version = next().filter(|version| VERSIONS.contains(version))?;
        if next()? != "namespaces" {
            return None;
        }
        let (namespace, resource, name, subresource) = (next()?, next()?, next()?, next()?);
        let target = Self {
            version,
            namespace,
            resource,
            name,
            subresource,
        };
        steps.next().is_none().then_some(target)
    }
}

async fn answer(request: Request<Incoming>, peer: &Peer, state: &State) -> Result<Answer, Failure> {
    let user = state.front_proxy.user(peer, request.headers())?;
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    if parts.method == Method::GET
        && let Some(answer) = discovery::answer(path)
    {
        return Ok(answer);
    }
    let target = Target::parse(path).ok_or_else(|| Failure::not_found_path(path))?;
    let verb = match parts.method {
        Method::PUT => "update",
        Method::GET => "get",
        _ => return Err(Failure::method_not_allowed()),
    };
    authorize::check(&state.client, &user, verb, &target).await?;
    let body = match https::read_body(body).await {
        Ok(body) => body,
        Err(answer) => return Ok(answer),
    };
    match (target.resource, verb) {
        ("virtualmachines", "update") => vm::update(&state.client, &target, &body).await,
        _ => Err(Failure::not_found_path(path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_an_object_and_its_subresource() {
        let path = "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/b/start";
        let target = Target::parse(path).unwrap();
        assert_eq!(
            (target.namespace, target.name, target.subresource),
            ("a", "b", "start")
        );
        for path in [
            "",
            "/apis/subresources.kubevirt.io/v1",
            "/apis/subresources.kubevirt.io/v2/namespaces/a/virtualmachines/b/start",
            "/apis/kubevirt.io/v1/namespaces/a/virtualmachines/b/start",
            "/apis/subresources.kubevirt.io/v1/namespaces//virtualmachines/b/start",
            "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/b/start/x",
        ] {
            assert_eq!(Target::parse(path), None, "{path}");
        }
    }
}
