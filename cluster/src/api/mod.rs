//! The aggregated groups: `subresources.kubevirt.io` with discovery and what is asked of VMs, and
//! `upload.cdi.kubevirt.io` with the tokens of uploads (`upload`).
//!
//! The API server passes requests on with the user's name in their headers, under a certificate
//! that only it has (the crate's `front_proxy`). Each request is authorized by a
//! SubjectAccessReview (`authorize`) and answered by `discovery`, by the room of its object, or by
//! the node that the VM runs on (the crate's `node_client`).

mod authorize;
mod discovery;
mod expand;
mod graph;
mod objects;
mod openapi;
pub(crate) mod subresources;
mod upload;
mod vm;
mod vmi;

use std::sync::Arc;

use http::{Method, Request, StatusCode, header};
use hyper::body::Incoming;
use kube::Client;
use tokio::net::TcpListener;

use crate::{
    certificates::{Certificates, Publish},
    front_proxy::FrontProxy,
    https::{self, Answer, Listen, Peer},
    node_client::Nodes,
    status::Failure,
    token::KeyStore,
};
use subresources::{VM, VMI};

pub use crate::contact::API as NAME;
pub use crate::served::{GROUP, VERSIONS};

/// The names of the APIServices.
const API_SERVICES: [&str; 3] = [
    "v1.subresources.kubevirt.io",
    "v1alpha3.subresources.kubevirt.io",
    "v1beta1.upload.cdi.kubevirt.io",
];

/// Serves the API until the process is told to end.
///
/// # Errors
///
/// The API server cannot be reached, the certificates cannot be made, or the address is taken.
pub async fn run(options: Listen) -> anyhow::Result<()> {
    let (client, listener) = options.start().await?;
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
    let publish = Publish::Subresources(&API_SERVICES);
    // Its certificate is that of a server to the API server, and that of a client to the nodes.
    let certificates = Certificates::new(client.clone(), namespace, NAME, publish).await?;
    let tls = certificates.server_config(Some(Arc::clone(&front_proxy) as _))?;
    let nodes = Nodes::new(client.clone(), certificates.for_clients());
    let fresh = tokio::spawn(certificates.keep_fresh());
    let follow = tokio::spawn(Arc::clone(&front_proxy).follow(client.clone()));
    tracing::info!(address = ?listener.local_addr().ok(), "serving the subresources");
    let state = Arc::new(State {
        keys: KeyStore::of::<crate::upload::Grant>(client.clone(), namespace),
        client,
        front_proxy,
        nodes,
    });
    let handle = move |request, peer| handle(request, peer, Arc::clone(&state));
    https::serve(listener, tls, handle, stop).await;
    follow.abort();
    fresh.abort();
    Ok(())
}

struct State {
    client: Client,
    keys: KeyStore,
    front_proxy: Arc<FrontProxy>,
    nodes: Nodes,
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

/// A path of a subresource: `/apis/GROUP/VERSION/namespaces/NS/RESOURCE/NAME/SUB`, with more steps
/// for some, or `/apis/GROUP/VERSION/namespaces/NS/RESOURCE`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Target<'a> {
    version: &'a str,
    namespace: &'a str,
    resource: &'a str,
    name: &'a str,
    subresource: &'a str,
    rest: Vec<&'a str>,
    /// What is asked, as a role says it.
    verb: &'static str,
}

impl<'a> Target<'a> {
    /// No subresource has more steps.
    const MAX_REST: usize = 4;

    fn parse(path: &'a str, verb: &'static str) -> Option<Self> {
        let mut steps = path.strip_prefix("/apis/")?.split('/');
        let mut next = || steps.next().filter(|step| !step.is_empty());
        if next()? != GROUP {
            return None;
        }
        let version = next().filter(|version| VERSIONS.contains(version))?;
        if next()? != "namespaces" {
            return None;
        }
        let (namespace, resource) = (next()?, next()?);
        let (name, subresource) = match next() {
            Some(name) => (name, next()?),
            None => ("", ""),
        };
        // Decoded steps would be other steps for whoever reads them next.
        let rest: Vec<&str> = steps.collect();
        let is_plain = |step: &&str| !step.is_empty() && !step.contains('%');
        if rest.len() > Self::MAX_REST || !rest.iter().all(is_plain) {
            return None;
        }
        if [namespace, resource, name, subresource]
            .iter()
            .any(|step| step.contains('%'))
        {
            return None;
        }
        Some(Self {
            version,
            namespace,
            resource,
            name,
            subresource,
            rest,
            verb,
        })
    }
}

async fn answer(request: Request<Incoming>, peer: &Peer, state: &State) -> Result<Answer, Failure> {
    let user = state.front_proxy.user(peer, request.headers())?;
    let uri = request.uri().clone();
    let path = uri.path();
    if let Some(namespace) = upload::namespace(path) {
        return upload::answer(request, state, &user, namespace).await;
    }
    let verb = match *request.method() {
        Method::PUT => "update",
        Method::GET => "get",
        _ => return Err(Failure::method_not_allowed()),
    };
    if verb == "get"
        && let Some(answer) = discovery::answer(path, request.headers().get(header::ACCEPT))
    {
        return Ok(answer);
    }
    let unknown = || Failure::not_found_path(path);
    let target = Target::parse(path, verb).ok_or_else(unknown)?;
    authorize::check(&state.client, &user, &target).await?;
    let client = &state.client;
    match (target.resource, target.subresource, target.rest.as_slice()) {
        (VM | VMI, "objectgraph", []) if verb == "get" => {
            match https::read_body(request.into_body()).await {
                Ok(body) => graph::answer(client, &target, &body).await,
                Err(answer) => Ok(answer),
            }
        }
        (VMI, _, _) | (VM, "portforward" | "evacuate", _) => {
            vmi::answer(request, state, &target).await
        }
        (VM, "expand-spec", []) if verb == "get" => expand::stored(client, &target).await,
        (VM, _, []) if verb == "update" => match https::read_body(request.into_body()).await {
            Ok(body) => vm::update(client, &target, &body).await,
            Err(answer) => Ok(answer),
        },
        (expand::RESOURCE, "", []) if verb == "update" => {
            match https::read_body(request.into_body()).await {
                Ok(body) => expand::given(client, target.namespace, &body).await,
                Err(answer) => Ok(answer),
            }
        }
        _ => Err(unknown()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_an_object_and_its_subresource() {
        let path = "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/b/start";
        let target = Target::parse(path, "update").unwrap();
        assert_eq!(
            (target.namespace, target.name, target.subresource),
            ("a", "b", "start")
        );
        let path = "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/b/start/x/y";
        assert_eq!(Target::parse(path, "get").unwrap().rest, ["x", "y"]);
        let path = "/apis/subresources.kubevirt.io/v1/namespaces/a/expand-vm-spec";
        let target = Target::parse(path, "update").unwrap();
        assert_eq!((target.resource, target.name), ("expand-vm-spec", ""));
        for path in [
            "",
            "/apis/subresources.kubevirt.io/v1",
            "/apis/subresources.kubevirt.io/v2/namespaces/a/virtualmachines/b/start",
            "/apis/kubevirt.io/v1/namespaces/a/virtualmachines/b/start",
            "/apis/subresources.kubevirt.io/v1/namespaces//virtualmachines/b/start",
            "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/b/start/",
            "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/b/start/1/2/3/4/5",
            "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/b",
            "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/b/start/%2e%2e",
            "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/b%2fc/start",
        ] {
            assert_eq!(Target::parse(path, "get"), None, "{path}");
        }
    }
}
