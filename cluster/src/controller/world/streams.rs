//! The watches: each feeds a store, and tells the controllers of the changes in it.

use std::fmt::Debug;
use std::future::Future;

use futures_util::future::{BoxFuture, join_all};
use futures_util::stream::BoxStream;
use futures_util::{FutureExt, Stream, StreamExt, TryStreamExt};
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;

use super::World;
use super::changes::Change;
use super::queues::Senders;

/// What tells the controllers of one kind's changes, as soon as all stores are there.
type Teller = Box<dyn FnOnce(World, Senders) -> BoxFuture<'static, ()> + Send>;

/// Watches of one cluster, or of a namespace of it.
pub(super) struct Watches {
    client: Client,
    namespace: Option<String>,
    tellers: Vec<Teller>,
}

impl Watches {
    pub(super) fn new(client: Client, namespace: Option<String>) -> Self {
        Self {
            client,
            namespace,
            tellers: Vec::new(),
        }
    }

    /// Returns a store of a kind's objects.
    pub(super) fn of<K>(&mut self, config: watcher::Config) -> Store<K>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
        K: Change + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    {
        let api = self.api();
        self.store(kube::runtime::watcher(api, config))
    }

    /// Like [`Self::of`], of all objects of the kind; each is trimmed before it is kept, and a
    /// change of one wakes whom it wakes trimmed.
    pub(super) fn of_trimmed<K>(&mut self, trim: fn(&mut K)) -> Store<K>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
        K: Change + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    {
        let changes = kube::runtime::watcher(self.api(), watcher::Config::default());
        self.store(changes.modify(trim))
    }

    /// Returns a store of objects that are in no namespace.
    pub(super) fn of_cluster<K>(&mut self, config: watcher::Config) -> Store<K>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::ClusterResourceScope>,
        K: Change + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    {
        let api = Api::all(self.client.clone());
        self.store(kube::runtime::watcher(api, config))
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        match &self.namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        }
    }

    fn store<K>(
        &mut self,
        changes: impl Stream<Item = Result<watcher::Event<K>, watcher::Error>> + Send + 'static,
    ) -> Store<K>
    where
        K: Resource<DynamicType = ()>,
        K: Change + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    {
        let (store, writer) = reflector::store();
        // On the heap, as everything here that holds whole objects: what joins it would have it on
        // its stack several times, and overflow a thread's where it is not optimized.
        let changes = changes
            .default_backoff()
            .reflect(writer)
            .touched_objects()
            .boxed();
        self.tellers.push(Box::new(|world, senders| {
            tell(changes, world, senders).boxed()
        }));
        store
    }

    /// Tells the controllers of all changes, for as long as the future is polled.
    pub(super) fn tell(
        self,
        world: &World,
        senders: &Senders,
    ) -> impl Future<Output = ()> + Send + use<> {
        let tellers = self.tellers.into_iter();
        let all = join_all(tellers.map(|teller| teller(world.clone(), senders.clone())));
        all.map(|_| ())
    }
}

/// Tells the controllers of each change of a kind; a watch that fails is begun again by itself.
async fn tell<K: Change>(
    mut changes: BoxStream<'static, Result<K, watcher::Error>>,
    world: World,
    senders: Senders,
) {
    loop {
        match changes.try_next().await {
            Ok(Some(object)) => senders.send(object.wakes(&world)).await,
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
