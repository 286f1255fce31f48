//! Stores that a watch feeds, and the queues of controllers.

use std::fmt::Debug;
use std::future::Future;
use std::hash::Hash;

use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt, TryStreamExt};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

use super::Queue;

pub(super) fn api<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// Returns a store, and the changes that were made in it.
pub(super) fn watch<K>(
    api: Api<K>,
    config: watcher::Config,
) -> (Store<K>, BoxStream<'static, Result<K, watcher::Error>>)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Hash + Eq,
{
    let (store, writer) = reflector::store();
    let changes = kube::runtime::watcher(api, config)
        .default_backoff()
        .reflect(writer)
        .touched_objects();
    // On the heap, as everything here that holds whole objects: what joins it would have it on its
    // stack several times, and overflow a thread's where it is not optimized.
    (store, changes.boxed())
}

/// Tells the controllers of each change; a watch that fails is begun again by itself.
pub(super) async fn pump<K, F>(
    mut changes: BoxStream<'static, Result<K, watcher::Error>>,
    mut tell: impl FnMut(K) -> F,
) where
    F: Future<Output = ()>,
{
    loop {
        match changes.try_next().await {
            Ok(Some(object)) => tell(object).await,
            Ok(None) => return,
            Err(error) if is_unknown_kind(&error) => tracing::debug!(
                error = &error as &dyn std::error::Error,
                "the cluster has no such kind; it is looked for again"
            ),
            Err(error) => tracing::warn!(
                error = &error as &dyn std::error::Error,
                "a watch failed, and begins again"
            ),
        }
    }
}

/// Whether a watch failed because the cluster has no such kind.
fn is_unknown_kind(error: &watcher::Error) -> bool {
    use watcher::Error::{InitialListFailed, WatchFailed, WatchStartFailed};
    match error {
        InitialListFailed(error) | WatchStartFailed(error) | WatchFailed(error) => {
            crate::controller::error::code(error) == Some(404)
        }
        _ => false,
    }
}

pub(super) async fn send<K: Resource<DynamicType = ()>>(
    sender: mpsc::Sender<ObjectRef<K>>,
    objects: Vec<ObjectRef<K>>,
) {
    for object in objects {
        // Without a receiver, the controllers have ended.
        let _ = sender.send(object).await;
    }
}

pub(super) fn queue<K>(receiver: mpsc::Receiver<ObjectRef<K>>) -> Queue<K>
where
    K: Resource<DynamicType = ()> + Send + 'static,
{
    stream::unfold(receiver, |mut receiver| async {
        let object = receiver.recv().await?;
        Some((Ok(object), receiver))
    })
    .boxed()
}
