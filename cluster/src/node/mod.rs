//! What runs on each node, beside its kubelet: it carries out what the API servers pass on
//! (`server`), and reports what only the node knows into the instances' status (`report`).
//!
//! It is a service of the host, not a pod: `podvisor serve` listens on a socket of the host, which
//! no VM can reach. It acts as the kubelet, with the kubelet's credentials, so that the API server
//! itself knows which node it is; a policy keeps it to the instances of that node, and it may read
//! nothing. `podvisor serve` is asked by its gRPC service, the crate `podvisor-node-api`.
//!
//! API servers find it by the address of the Node object, and by an annotation there with its
//! port and the digest of its certificate. It accepts clients that show a certificate of the
//! cluster's authority for the name of the API; for that of the controller where VMs move between
//! nodes (`migration`), and the nodes that they come from.

mod access;
mod answers;
mod changes;
mod expected;
mod guest;
mod identity;
mod machines;
mod metrics;
mod migration;
mod report;
mod server;
mod stream;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use tokio::net::TcpListener;

pub use access::Access;

pub use crate::contact::ANNOTATION;
use crate::{contact::Contact, https, scrape};
use expected::Expected;
use identity::{Identity, Trust};
use machines::Machines;
use migration::Migrations;

/// How often credentials, the authority and the annotation are looked at again; and after failures.
const REFRESH: Duration = Duration::from_secs(600);
const RETRY: Duration = Duration::from_secs(5);

/// What the subcommand takes from its command line.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct Options {
    /// Address to listen on for the cluster's API servers.
    #[arg(long, default_value = "0.0.0.0:8186")]
    pub listen: SocketAddr,
    /// The kubelet's credentials.
    #[arg(long, default_value = "/etc/kubernetes/kubelet.conf")]
    pub kubeconfig: PathBuf,
    /// Namespace that the components run in.
    #[arg(long, default_value = "podvisor")]
    pub namespace: String,
    /// Address to serve Prometheus' metrics of the node's VMs on, at `/metrics`; not without.
    #[arg(long)]
    pub metrics: Option<SocketAddr>,
    /// Socket of `podvisor serve` for this.
    #[arg(long, default_value = podvisor_node_api::SOCKET)]
    pub socket: PathBuf,
}

/// Runs until the process is told to end.
///
/// # Errors
///
/// The credentials are not a kubelet's, the API server cannot be reached, or the address is taken.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let access = Access::from_file(&options.kubeconfig).await?;
    let listener = TcpListener::bind(options.listen)
        .await
        .with_context(|| format!("failed to listen on {}", options.listen))?;
    let stop = https::told_to_end();
    if let Some(address) = options.metrics {
        let machines = Machines::new(&options.socket)?;
        let name = access.node().await?;
        let render = move || {
            let (machines, name) = (machines.clone(), name.clone());
            async move { metrics::render(&machines, &name).await }
        };
        let metrics = scrape::serve_later(scrape::listen(address).await?, render);
        let rest = serve(access, listener, &options.namespace, &options.socket, stop);
        return tokio::select! {
            failed = metrics => failed,
            ended = rest => ended,
        };
    }
    serve(access, listener, &options.namespace, &options.socket, stop).await
}

/// Serves on a listener until `stop` is ready.
///
/// # Errors
///
/// The API server cannot be reached, or the credentials are not a kubelet's.
pub async fn serve(
    access: Access,
    listener: TcpListener,
    namespace: &str,
    socket: &Path,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let machines = Machines::new(socket)?;
    let access = Arc::new(access);
    let name = access.node().await?;
    let identity = Identity::new().context("failed to make a certificate")?;
    let expected = Arc::new(Expected::default());
    let trust = Arc::new(Trust::new(Arc::clone(&expected)));
    let tls = identity.server_config(Arc::clone(&trust) as _)?;
    let contact = Contact {
        port: listener.local_addr()?.port(),
        certificate: identity.digest(),
    };
    tracing::info!(node = %name, port = contact.port, "serving the node's machines");
    let fresh = keep_fresh(
        Arc::clone(&access),
        name.clone(),
        namespace.to_owned(),
        contact,
        Arc::clone(&trust),
    );
    let fresh = tokio::spawn(fresh);
    let report = tokio::spawn(report::run(machines.clone(), Arc::clone(&access), name));
    let migrations = Migrations::new(machines.clone(), identity, expected);
    let events = report::Events::new(access);
    let server = Arc::new(server::Server::new(machines, events, migrations, trust));
    let handle = move |request, peer| server::handle(request, peer, Arc::clone(&server));
    https::serve(listener, tls, handle, stop).await;
    fresh.abort();
    report.abort();
    Ok(())
}

/// Reads the credentials and the authority again and again, as both are replaced from time to
/// time, and sees to it that the node is found.
async fn keep_fresh(
    access: Arc<Access>,
    node: String,
    namespace: String,
    contact: Contact,
    trust: Arc<Trust>,
) {
    loop {
        let refresh = async {
            access.refresh().await?;
            trust.set(&identity::bundle(&access.client(), &namespace).await?)?;
            identity::announce(&access.client(), &node, &contact).await
        };
        let wait = match refresh.await {
            Ok(()) => REFRESH,
            Err(error) => {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "the node is not ready for the cluster's API: it is tried again"
                );
                RETRY
            }
        };
        tokio::time::sleep(wait).await;
    }
}
