//! The controllers: VirtualMachine, replica set → VirtualMachineInstance → pod; migrations of
//! instances from one pod to another; snapshots, restores and exports of machines; and DataVolume →
//! claim.
//!
//! Each is two parts: a pure function from what was observed to what has to be done (`decide` in
//! each room), and the driver that does it. They are
//! level-triggered: a controller that was killed anywhere continues from the objects alone. Of
//! several replicas one acts ([`leader`]); even two that act at the same time do nothing twice,
//! because names are given, deletions name the unique id and writes the version that they are based
//! on.

mod cdi_config;
mod claims;
mod classes;
pub mod clone;
mod context;
mod datasource;
pub mod datavolume;
mod error;
mod expectations;
pub mod export;
mod importers;
mod installation;
mod instances;
pub mod leader;
mod machines;
mod metrics;
pub mod migration;
mod names;
pub mod nodes;
mod patch;
mod progress;
pub mod replica_set;
pub mod restore;
pub mod settings;
pub mod snapshot;
pub mod vm;
pub mod vmi;
mod world;

use std::fmt::Debug;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use kube::runtime::controller::{self, Action};
use kube::{Client, Resource};
use tokio::signal::unix::{SignalKind, signal};

pub use error::Error;

use crate::certificates::AuthorityStore;
use crate::copy;
use crate::token::KeyStore;
use context::Context;
use importers::Importers;
use leader::Election;
use metrics::Metrics;
use nodes::Nodes;
use settings::ClusterSettings;
use world::{Queue, World};

/// So many objects of a kind are worked on at the same time.
const CONCURRENCY: u16 = 32;

/// What the subcommand takes from its command line.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct Options {
    /// Act in this namespace only
    #[arg(long, env = "PODVISOR_NAMESPACE")]
    pub namespace: Option<String>,
    /// The namespace of the lease by which one of several replicas is chosen
    #[arg(long, env = "POD_NAMESPACE", default_value = "podvisor")]
    pub lease_namespace: String,
    /// The name of that lease
    #[arg(long, default_value = "podvisor-controller")]
    pub lease_name: String,
    /// How long after its last sign of life a replica is replaced, in seconds
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u64).range(3..=3600))]
    pub lease_seconds: u64,
    /// This replica's name, which no other has
    #[arg(long, env = "POD_NAME")]
    pub identity: Option<String>,
    /// Serve metrics for Prometheus on this address, at /metrics
    #[arg(long)]
    pub metrics: Option<SocketAddr>,
    /// The image of the pods that fill claims; it has this program
    #[arg(long, default_value = crate::installation::IMAGE)]
    pub importer_image: String,
    /// How running VMs are moved
    #[command(flatten)]
    pub migrations: settings::Options,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            namespace: None,
            lease_namespace: "podvisor".to_owned(),
            lease_name: "podvisor-controller".to_owned(),
            lease_seconds: 15,
            identity: None,
            metrics: None,
            importer_image: crate::installation::IMAGE.to_owned(),
            migrations: settings::Options::default(),
        }
    }
}

/// Runs until the process is told to end.
///
/// # Errors
///
/// The API server cannot be reached.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let client = Client::try_default().await?;
    let version = client.apiserver_version().await?;
    tracing::info!(api_server = %version.git_version, "connected");
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    let metrics = Metrics::default();
    let serve = {
        let metrics = metrics.clone();
        async {
            match options.metrics {
                Some(address) => metrics.serve(address).await,
                None => std::future::pending().await,
            }
        }
    };
    tokio::select! {
        () = run_with(client, &options, metrics, stop) => Ok(()),
        served = serve => served,
    }
}

/// Runs until `stop` is done.
pub async fn run_until(client: Client, options: &Options, stop: impl Future<Output = ()>) {
    run_with(client, options, Metrics::default(), stop).await;
}

async fn run_with(
    client: Client,
    options: &Options,
    metrics: Metrics,
    stop: impl Future<Output = ()>,
) {
    let identity = options.identity.clone().unwrap_or_else(identity);
    let election = Election {
        namespace: options.lease_namespace.clone(),
        name: options.lease_name.clone(),
        identity: identity.clone(),
        duration: Duration::from_secs(options.lease_seconds),
    };
    let leading = metrics.leading().clone();
    let work = || {
        Box::pin(act(
            client.clone(),
            options.namespace.clone(),
            metrics.clone(),
            identity.clone(),
            Importers::new(
                options.importer_image.clone(),
                AuthorityStore::new(client.clone(), &options.lease_namespace),
                KeyStore::of::<copy::Grant>(client.clone(), &options.lease_namespace),
            ),
            options.lease_namespace.clone(),
            options.migrations.settings(),
        ))
    };
    election.run(client.clone(), &leading, work, stop).await;
}

/// Returns a name that no other replica has: of two on one machine, one has another number.
fn identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}-{}", host.trim(), std::process::id())
}

/// Watches and acts until this is dropped.
async fn act(
    client: Client,
    namespace: Option<String>,
    metrics: Metrics,
    identity: String,
    importers: Importers,
    own_namespace: String,
    settings: ClusterSettings,
) {
    let nodes = Nodes::new(client.clone(), &own_namespace);
    let (seen, follow) = crate::installation::follow(client.clone(), &own_namespace);
    let follow = Box::pin(follow);
    let installation = installation::keep(client.clone(), &own_namespace, seen.clone());
    let installation = Box::pin(installation);
    let uploads = Box::pin(cdi_config::keep(client.clone()));
    let (world, queues, watches) = World::watch(client, namespace);
    let watches = Box::pin(watches);
    metrics.set(world.clone());
    let leading = metrics.leading().clone();
    let context = Arc::new(Context::new(
        world.clone(),
        leading,
        &identity,
        importers,
        nodes,
        context::Configuration { settings, seen },
        metrics.progress().clone(),
    ));
    let vms = Box::pin(control(
        vm::reconcile,
        world.vms.clone(),
        queues.vms,
        Arc::clone(&context),
    ));
    let vmis = Box::pin(control(
        vmi::reconcile,
        world.vmis.clone(),
        queues.vmis,
        Arc::clone(&context),
    ));
    let sets = Box::pin(control(
        replica_set::reconcile,
        world.sets.clone(),
        queues.sets,
        Arc::clone(&context),
    ));
    let volumes = Box::pin(control(
        datavolume::reconcile,
        world.volumes.clone(),
        queues.volumes,
        Arc::clone(&context),
    ));
    let targets = Box::pin(control(
        datavolume::target::reconcile,
        world.claims.clone(),
        queues.claims,
        Arc::clone(&context),
    ));
    let snapshots = Box::pin(control(
        snapshot::reconcile,
        world.snapshots.clone(),
        queues.snapshots,
        Arc::clone(&context),
    ));
    let restores = Box::pin(control(
        restore::reconcile,
        world.restores.clone(),
        queues.restores,
        Arc::clone(&context),
    ));
    let sources = Box::pin(control(
        datasource::reconcile,
        world.sources.clone(),
        queues.sources,
        Arc::clone(&context),
    ));
    let clones = Box::pin(control(
        clone::reconcile,
        world.clones.clone(),
        queues.clones,
        Arc::clone(&context),
    ));
    let exports = Box::pin(control(
        export::reconcile,
        world.exports.clone(),
        queues.exports,
        Arc::clone(&context),
    ));
    let migrations = Box::pin(control(
        migration::reconcile,
        world.migrations.clone(),
        queues.migrations,
        context,
    ));
    tokio::join!(
        watches,
        vms,
        vmis,
        sets,
        migrations,
        volumes,
        targets,
        snapshots,
        restores,
        clones,
        exports,
        sources,
        follow,
        installation,
        uploads
    );
}

async fn control<K, F>(
    reconcile: fn(Arc<K>, Arc<Context>) -> F,
    store: kube::runtime::reflector::Store<K>,
    queue: Queue<K>,
    context: Arc<Context>,
) where
    K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
    F: Future<Output = Result<Action, Error>> + Send + 'static,
{
    let reconcile = move |object: Arc<K>, context: Arc<Context>| {
        Box::pin(async move {
            let action = reconcile(Arc::clone(&object), Arc::clone(&context)).await?;
            context.succeeded(&*object);
            Ok(action)
        })
    };
    let after = |object: Arc<K>, error: &Error, context: Arc<Context>| {
        let action = context.after(&*object, error);
        let name = object.meta().name.as_deref().unwrap_or_default();
        let namespace = object.meta().namespace.as_deref().unwrap_or_default();
        let kind = K::kind(&());
        if error.is_conflict() {
            tracing::debug!(%kind, namespace, name, "changed meanwhile; it is looked at again");
        } else {
            tracing::warn!(
                %kind, namespace, name,
                error = error as &dyn std::error::Error,
                "it is tried again"
            );
        }
        action
    };
    let config = kube::runtime::Config::default().concurrency(CONCURRENCY);
    controller::applier::<
        _,
        _,
        std::pin::Pin<Box<dyn Future<Output = Result<Action, Error>> + Send>>,
        _,
    >(
        move |object, context| reconcile(object, context),
        after,
        context,
        store,
        queue,
        config,
    )
    // Errors were reported, and objects that are gone need nothing.
    .for_each(|_| std::future::ready(()))
    .await;
}
