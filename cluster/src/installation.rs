//! The KubeVirt object of the components' namespace: what an administrator decides for the whole
//! cluster, while the components run.

use std::future::Future;
use std::sync::Arc;

use futures_util::StreamExt;
use kube::runtime::{WatchStreamExt, reflector, watcher};
use kube::{Api, Client};
use tokio::sync::watch;

use crate::objects::KubeVirt;

/// The image of the components, unless another one is chosen.
pub(crate) const IMAGE: &str = "ghcr.io/podvisor/podvisor-cluster:latest";

/// What is known of the object.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    /// Whether the API server has been asked.
    pub(crate) is_known: bool,
    /// The object: of several the oldest, since nobody is asked to make a second one.
    pub(crate) object: Option<Arc<KubeVirt>>,
}

/// Follows the object of a namespace; the future does the work, and must be polled.
pub(crate) fn follow(
    client: Client,
    namespace: &str,
) -> (
    watch::Receiver<Seen>,
    impl Future<Output = ()> + Send + use<>,
) {
    let (sender, seen) = watch::channel(Seen::default());
    let api: Api<KubeVirt> = Api::namespaced(client, namespace);
    let (store, writer) = reflector::store();
    let changes = watcher(api, watcher::Config::default())
        .default_backoff()
        .reflect(writer)
        .boxed();
    let work = changes.for_each(move |change| {
        match change {
            // A list is complete with the last of these.
            Ok(watcher::Event::Init | watcher::Event::InitApply(_)) => {}
            Ok(_) => {
                let age = |object: &Arc<KubeVirt>| {
                    let metadata = &object.metadata;
                    (metadata.creation_timestamp.clone(), metadata.name.clone())
                };
                let object = store.state().into_iter().min_by_key(age);
                sender.send_replace(Seen {
                    is_known: true,
                    object,
                });
            }
            Err(error) => tracing::debug!(
                error = &error as &dyn std::error::Error,
                "the cluster's configuration is asked for again"
            ),
        }
        std::future::ready(())
    });
    (seen, work)
}
