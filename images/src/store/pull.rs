//! A pull: fetch what is missing, write the file system, then the name.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fs::File;
use std::path::Path;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Once};
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinSet, spawn_blocking};

use super::arrivals::{self, Arrivals, Fetched};
use super::database::{self, Change, Name, Record};
use super::flights::{Flight, Patience, Turn};
use super::gc::GcHold;
use super::lookup::{configuration, names_of};
use super::repair::MAX_REPAIRS;
use super::rootfs::{Rootfs, Wanted};
use super::work::WorkFile;
use super::{Inner, PullOptions, PullPolicy, Store, signatures};
use crate::error::parse_reference;
use crate::layer::{LayerError, Unpacker};
use crate::registry::{
    BlobError, Client, Descriptor, Known, ManifestError, RegistryError, Resolved,
};
use crate::{Digest, Error, Image, PullEvent, Reference, Result};

/// Sets its flag when dropped, so that a thread stops when the task that waits for it does.
#[derive(Default)]
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Keeps files from removal, and makes a pull wait, until it is dropped.
type PullGuard = (Arc<GcHold>, mpsc::Sender<Infallible>);

/// Where a pull's layers come from.
struct Source {
    client: Client,
    registry: String,
    patience: Patience,
}

/// What keeps others from an image that has a root file system, until it has its record, from which
/// they know what they find.
struct RootfsGuard {
    claim: WorkFile,
    turn: Option<Turn>,
}

/// Runs `work` where blocking is allowed.
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Blocking work is cancelled only when the runtime itself ends, and this future with
            // it.
            Err(_) => std::future::pending().await,
        },
    }
}

impl Store {
    pub(super) async fn pull_image(&self, name: &str, options: &PullOptions) -> Result<Image> {
        if options.policy == PullPolicy::IfMissing {
            let (store, name) = (self.clone(), name.to_owned());
            let signatures = options.signatures.clone();
            let found = blocking(move || match &signatures {
                Some(policy) => store.resolve_signed(&name, policy),
                None => store.resolve(&name),
            });
            match found.await {
                Err(Error::NotFound { .. } | Error::Damaged { .. } | Error::Signature(_)) => {}
                found => return found,
            }
        }
        // An image in the store may be named by its id too.
        let reference = parse_reference(name)?;
        // If signatures cannot change the outcome, none are fetched.
        if let Some(policy) = &options.signatures
            && !policy.wants_signatures(&reference)
        {
            policy.check(&reference, &[], 0)?;
        }
        let inner = Arc::clone(&self.inner);
        let stay = Arc::new(blocking(move || inner.hold_files()).await?);
        let pull = || self.inner.clone().pull(&reference, options, &stay);
        let mut outcome = pull().await;
        for _ in 0..MAX_REPAIRS {
            if !matches!(outcome, Err(Error::DamagedLayer { .. })) {
                break;
            }
            outcome = pull().await;
        }
        blocking(move || drop(stay)).await;
        if let Err(error) = &outcome
            && (!error.is_retryable() || matches!(error, Error::DiskFull { .. }))
        {
            // Layers of an image that cannot be used, or that does not fit on the disk, are
            // useless. A failure to remove them must not hide the error.
            let inner = Arc::clone(&self.inner);
            if let Err(error) = blocking(move || inner.collect()).await {
                tracing::warn!(%error, "cannot clear the store after a failed pull");
            }
        }
        outcome
    }
}

/// Bytes of memory that an image may keep for names and metadata while it waits for its next layer
/// without a place: most images need less.
pub(super) const MAX_IDLE_METADATA: u64 = 32 << 20;

impl Inner {
    /// `stay` is held by everything that still works on files when this future is dropped.
    async fn pull(
        self: Arc<Self>,
        reference: &Reference,
        options: &PullOptions,
        stay: &Arc<GcHold>,
    ) -> Result<Image> {
        options.emit(PullEvent::Resolving {
            reference: reference.to_string(),
        });
        let client = blocking({
            let (reference, options, limits) = (
                reference.clone(),
                options.clone(),
                self.options.limits.clone(),
            );
            move || {
                let PullOptions {
                    registries,
                    credentials,
                    events,
                    ..
                } = options;
                Client::new(&reference, &registries, &credentials, &limits, events)
            }
        });
        let source = Arc::new(Source {
            client: client.await?,
            registry: reference.registry().to_owned(),
            patience: Patience::new(options.other_registry_wait),
        });
        let client = &source.client;
        let known = Known {
            answers: self.clone().answers_of(reference).await?,
            read: &|digest| self.manifest_here(digest),
        };
        let resolved = client.resolve(reference, &known).await?;
        let signatures = self
            .verify_signatures(client, reference, &resolved, options)
            .await?;
        let layers = &resolved.manifest.layers;
        options.emit(PullEvent::Resolved {
            manifest: resolved.digest,
            layers: layers
                .iter()
                .map(|layer| (layer.digest, layer.size))
                .collect(),
        });
        let id = resolved.manifest.config.digest;
        let config = self.config_of(client, &resolved).await?;
        let diff_ids = self.diff_ids(&config, layers.len()).map_err(|source| {
            Error::from(RegistryError::Manifest {
                name: reference.to_string(),
                source,
            })
        })?;
        let wanted = Arc::new(Wanted {
            id,
            target: resolved.target,
            layers: layers
                .iter()
                .map(|layer| (layer.digest, layer.size))
                .collect(),
        });
        let (rootfs, guard) = self
            .clone()
            .make_rootfs(&source, layers, &wanted, diff_ids, options, stay)
            .await?;
        let new = rootfs.is_new();
        let documents: Vec<_> = (resolved
            .indexes
            .iter()
            .map(|(digest, bytes)| (*digest, bytes.clone())))
        .chain([(resolved.digest, resolved.bytes.clone()), (id, config)])
        .collect();
        let names = names_of(reference, &resolved.target, id).into();
        let record = rootfs.record(Record {
            indexes: resolved.indexes.iter().map(|(digest, _)| *digest).collect(),
            signatures,
            ..Record::new(resolved.digest)
        });
        let (stop, stay) = (StopOnDrop::default(), Arc::clone(stay));
        let cancelled = Arc::clone(&stop.0);
        let image = blocking(move || {
            let image = self.commit(id, record, names, &documents, &cancelled);
            drop((guard.claim, stay));
            if let (Some(turn), Ok(_)) = (guard.turn, &image) {
                turn.tell();
            }
            image
        })
        .await?;
        options.emit(PullEvent::Done { id, new });
        Ok(image)
    }

    /// Digests of what the repository of `reference` answered to earlier pulls, of any of its tags.
    async fn answers_of(self: Arc<Self>, reference: &Reference) -> Result<BTreeSet<Digest>> {
        let contents = blocking(move || database::read(&self.layout)).await?;
        let prefix = format!("{}/{}@", reference.registry(), reference.repository());
        let digests = contents.names.iter();
        let digests = digests.filter_map(|known| known.name.strip_prefix(&prefix)?.parse().ok());
        Ok(digests.collect())
    }

    async fn config_of(&self, client: &Client, resolved: &Resolved) -> Result<Vec<u8>> {
        let config = &resolved.manifest.config;
        match self.document(&config.digest, config.size) {
            Some(bytes) => Ok(bytes),
            None => Ok(client
                .document(
                    config,
                    "the configuration",
                    self.options.limits.config_bytes,
                )
                .await?),
        }
    }

    /// Returns the digests of the uncompressed layers, as listed in the configuration.
    pub(super) fn diff_ids(
        &self,
        config: &[u8],
        layers: usize,
    ) -> Result<Vec<Digest>, ManifestError> {
        let config = configuration(config).map_err(ManifestError::Config)?;
        let (os, architecture) = (config.os().to_string(), config.architecture().to_string());
        if (os.as_str(), architecture.as_str()) != ("linux", "amd64") {
            let available = format!("{os}/{architecture}").chars().take(40).collect();
            return Err(ManifestError::Platform { available });
        }
        let diff_ids = config.rootfs().diff_ids();
        if diff_ids.len() != layers {
            return Err(ManifestError::LayerCount {
                layers,
                diff_ids: diff_ids.len(),
            });
        }
        diff_ids
            .iter()
            .map(|text| text.parse().map_err(ManifestError::DiffId))
            .collect()
    }

    /// Ensures that the image's file system exists, and the layers that it consists of.
    async fn make_rootfs(
        self: Arc<Self>,
        source: &Arc<Source>,
        layers: &[Descriptor],
        wanted: &Arc<Wanted>,
        diff_ids: Vec<Digest>,
        options: &PullOptions,
        stay: &Arc<GcHold>,
    ) -> Result<(Rootfs, RootfsGuard)> {
        let id = wanted.id;
        let told = Once::new();
        let waiting = || told.call_once(|| options.emit(PullEvent::RootfsWaiting));
        let find = || async {
            let claim = acquire(&self.layout.image_claim(&id), waiting).await?;
            let (inner, wanted) = (Arc::clone(&self), Arc::clone(wanted));
            let found = blocking(move || inner.find_rootfs(&wanted)).await?;
            Ok::<_, Error>(found.map(|rootfs| (rootfs, claim)))
        };
        if let Some((rootfs, claim)) = find().await? {
            return Ok((rootfs, RootfsGuard { claim, turn: None }));
        }
        let Source {
            registry, patience, ..
        } = &**source;
        let flight = Flight::Rootfs(id);
        let turn = Some(self.flights.turn(flight, registry, patience, waiting).await);
        let path = self.layout.rootfs_work(&id, Some(registry));
        let work = acquire(&path, waiting).await?;
        if let Some((rootfs, claim)) = find().await? {
            return Ok((rootfs, RootfsGuard { claim, turn }));
        }
        let (ready, queue) = arrivals::queue();
        let stop = StopOnDrop::default();
        let unpacking = spawn_blocking({
            let (inner, cancelled, options) =
                (Arc::clone(&self), Arc::clone(&stop.0), options.clone());
            let (stay, wanted) = (Arc::clone(stay), Arc::clone(wanted));
            let layers: Vec<_> = layers
                .iter()
                .map(|layer| layer.digest)
                .zip(diff_ids)
                .collect();
            move || {
                let next = |limit| queue.next(limit);
                let unpacked = inner.unpack(&work, id, &layers, next, cancelled, &options);
                let kept = unpacked.and_then(|()| {
                    let claim = inner.claim_image(&id, &options)?;
                    Ok((inner.keep_rootfs(work, &wanted)?, claim))
                });
                drop(stay);
                kept
            }
        });
        let fetched = self
            .clone()
            .fetch_layers(source, layers, options, ready, stay)
            .await;
        // A failed fetch has closed the queue, so the thread ends either way, and its own error
        // takes precedence unless it only says that the queue was closed.
        let unpacked = match unpacking.await {
            Ok(unpacked) => unpacked,
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        };
        match (fetched, unpacked) {
            (
                Err(error),
                Err(Error::Layer {
                    source: LayerError::Cancelled,
                    ..
                }),
            ) => Err(error),
            (_, Err(error)) | (Err(error), Ok(_)) => Err(error),
            (Ok(()), Ok((rootfs, claim))) => Ok((rootfs, RootfsGuard { claim, turn })),
        }
    }

    /// Fetches all layers, some at the same time, and sends `ready` the index of each that is in
    /// the store.
    async fn fetch_layers(
        self: Arc<Self>,
        source: &Arc<Source>,
        layers: &[Descriptor],
        options: &PullOptions,
        mut ready: Fetched,
        stay: &Arc<GcHold>,
    ) -> Result<()> {
        let slots = Arc::new(Semaphore::new(options.parallel_layers.max(1)));
        let mut fetches = JoinSet::new();
        // Holders of `alive` may still access files.
        let (sender, mut gone) = mpsc::channel::<Infallible>(1);
        let alive = (Arc::clone(stay), sender);
        for (index, layer) in layers.iter().cloned().enumerate() {
            let (inner, source, slots) =
                (Arc::clone(&self), Arc::clone(source), Arc::clone(&slots));
            let (options, alive) = (options.clone(), alive.clone());
            fetches.spawn(async move {
                // Never closed.
                let _slot = slots.acquire_owned().await.ok();
                inner
                    .fetch_layer(&source, &layer, &options, alive)
                    .await
                    .map(|()| index)
            });
        }
        let outcome = loop {
            let fetched = tokio::select! {
                // The unpacking thread has ended with an error: fetches that still run are useless.
                () = ready.closed() => break Ok(()),
                fetched = fetches.join_next() => fetched,
            };
            match fetched {
                None => break Ok(()),
                Some(Ok(Ok(index))) => {
                    ready.send(index);
                }
                Some(Ok(Err(error))) => break Err(error),
                Some(Err(error)) => std::panic::resume_unwind(error.into_panic()),
            }
        };
        // No file is being written any longer when the pull is over.
        fetches.shutdown().await;
        drop(alive);
        gone.recv().await;
        outcome
    }

    async fn fetch_layer(
        self: Arc<Self>,
        source: &Source,
        layer: &Descriptor,
        options: &PullOptions,
        alive: PullGuard,
    ) -> Result<()> {
        let digest = layer.digest;
        let Source {
            client,
            registry,
            patience,
        } = source;
        let present = || {
            let found = self.has(&digest, layer.size);
            if found {
                options.emit(PullEvent::LayerPresent { layer: digest });
            }
            found
        };
        if present() {
            return Ok(());
        }
        let waiting = || options.emit(PullEvent::LayerWaiting { layer: digest });
        let flight = Flight::Blob(digest);
        let mut turn = self.flights.turn(flight, registry, patience, waiting).await;
        if present() {
            return Ok(());
        }
        let path = self.layout.blob_work(&digest, registry);
        let work = acquire(&path, waiting).await?;
        if present() {
            return Ok(());
        }
        let file = work
            .handle()
            .map_err(|source| Error::io("write", &path, source))?;
        let mut fetch = pin!(client.blob(layer, file));
        let fetched = loop {
            tokio::select! {
                fetched = &mut fetch => break fetched,
                () = turn.told() => if present() {
                    return Ok(());
                }
            }
        };
        fetched.map_err(|error| match error {
            BlobError::Registry(error) => Error::from(error),
            BlobError::Write(source) => Error::io("write", &path, source),
        })?;
        let inner = Arc::clone(&self);
        blocking(move || {
            let published = inner.publish_blob(work, &digest);
            drop(alive);
            published
        })
        .await?;
        turn.tell();
        options.emit(PullEvent::LayerDone { layer: digest });
        Ok(())
    }

    /// Turns layers into a file system, in order; `next` waits for the index of another layer that
    /// is ready, for a limited time or for as long as it takes.
    ///
    /// An image that has waited too long with a place frees its memory and the place, and starts
    /// again when all its layers are in the store. The caller keeps layers there until the end.
    pub(super) fn unpack(
        &self,
        work: &WorkFile,
        id: Digest,
        layers: &[(Digest, Digest)],
        next: impl FnMut(Option<Duration>) -> Result<usize, RecvTimeoutError>,
        cancelled: Arc<AtomicBool>,
        options: &PullOptions,
    ) -> Result<()> {
        let start = || {
            let file = work.handle().and_then(|file| {
                file.set_len(0)?;
                Ok(file)
            });
            let file = file.map_err(|source| Error::io("write", work.path(), source))?;
            let limits = self.options.limits.clone();
            Ok::<_, Error>(Unpacker::new(file, limits, Arc::clone(&cancelled)))
        };
        let cancelled_at = |layer| {
            let source = LayerError::Cancelled;
            Error::Layer { layer, source }
        };
        let needs_place = |layer| {
            let place = self.places.take(&cancelled);
            place.ok_or_else(|| cancelled_at(layer))
        };
        let mut unpacker = start()?;
        let mut arrivals = Arrivals::new(layers.len(), next);
        let mut place = None;
        let mut index = 0;
        while let Some((digest, diff_id)) = layers.get(index) {
            let arrived = match place {
                None => arrivals.wait(index),
                Some(_) => arrivals.wait_with_place(index),
            };
            match arrived {
                Ok(()) => {}
                Err(RecvTimeoutError::Timeout) => {
                    // Its memory is free before its place is.
                    unpacker = start()?;
                    place = None;
                    arrivals.wait_for_all().map_err(|_| cancelled_at(*digest))?;
                    index = 0;
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return Err(cancelled_at(*digest)),
            }
            if place.is_none() {
                place = Some(needs_place(*digest)?);
            }
            options.emit(PullEvent::Unpacking { layer: *digest });
            let path = self.layout.blob(digest);
            let blob = File::open(&path).map_err(|source| Error::io("read", &path, source))?;
            unpacker
                .layer(blob, *diff_id)
                .map_err(|error| self.layer_error(*digest, error, work.path()))?;
            // A slow registry keeps nobody else waiting.
            if unpacker.memory() <= MAX_IDLE_METADATA {
                place = None;
            }
            index += 1;
        }
        let last = layers.last().map_or(id, |(digest, _)| *digest);
        let _place = match place {
            Some(place) => place,
            None => needs_place(last)?,
        };
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&id.bytes()[..16]);
        unpacker
            .finish(uuid)
            .map(drop)
            .map_err(|error| self.layer_error(last, error, work.path()))
    }

    /// Stores the record and names of an image, and those of the documents that the record refers
    /// to. If `cancelled` is set, a disk image in it is left unconverted until it is requested.
    pub(super) fn commit(
        &self,
        id: Digest,
        record: Record,
        names: Vec<Name>,
        documents: &[(Digest, Vec<u8>)],
        cancelled: &AtomicBool,
    ) -> Result<Image> {
        for (digest, bytes) in documents {
            if *digest == id || *digest == record.manifest || record.indexes.contains(digest) {
                self.put_document(digest, bytes)?;
            }
        }
        let (contents, ()) = database::update(&self.layout, |before| {
            let mut record = record;
            if let Some(old) = before.record(&id) {
                (record.pulled, record.pinned) = (old.pulled, old.pinned);
                record.disk = old.disk;
                signatures::remember(&mut record, old);
            }
            let mut changes = vec![Change::PutImage(id, record)];
            changes.extend(names.into_iter().map(Change::PutName));
            Ok((changes, ()))
        })?;
        let record = contents.record(&id).ok_or_else(|| Error::NotFound {
            name: id.to_string(),
        })?;
        let image = self.image(&contents, id, record)?;
        Ok(self.recognise_disk(image, cancelled))
    }

    fn layer_error(&self, layer: Digest, error: LayerError, work: &Path) -> Error {
        match error.into_io() {
            Ok(source) => Error::io("write", work, source),
            Err(source) => self.layer_fault(layer, source),
        }
    }
}

/// How long to wait before looking again for a work file that another process has: at first, and at
/// most.
const FIRST_LOOK: Duration = Duration::from_millis(5);
const LAST_LOOK: Duration = Duration::from_millis(250);

/// Acquires a work file; `waiting` is called if another process has it.
///
/// That process may be suspended, so no thread waits for its lock, which none could be called back
/// from: whoever drops the future waits no longer.
pub(super) async fn acquire(path: &Path, waiting: impl FnOnce()) -> Result<WorkFile> {
    let (mut pause, mut waiting) = (FIRST_LOOK, Some(waiting));
    loop {
        let work = WorkFile::try_acquire(path);
        if let Some(work) = work.map_err(|source| Error::io("create", path, source))? {
            return Ok(work);
        }
        if let Some(waiting) = waiting.take() {
            waiting();
        }
        tokio::time::sleep(pause).await;
        pause = LAST_LOOK.min(pause * 2);
    }
}

#[cfg(test)]
#[path = "pull_tests.rs"]
mod tests;
