//! The layers of a pull as they arrive, and how long the pull may keep one of the places for
//! unpacking while it waits for them: a registry can make it wait for as long as it wants to.

use std::convert::Infallible;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

/// How long an image may wait for its layers with a place, all waits together.
const MAX_IDLE_TIME: Duration = Duration::from_secs(60);

/// Which layers are in the store; `next` waits for the index of another one, for a limited time or
/// for as long as it takes.
#[derive(Debug)]
pub(super) struct Arrivals<N> {
    next: N,
    here: Vec<bool>,
    /// How long a place may still be kept.
    idle: Duration,
}

impl<N: FnMut(Option<Duration>) -> Result<usize, RecvTimeoutError>> Arrivals<N> {
    pub(super) fn new(layers: usize, next: N) -> Self {
        Self {
            next,
            here: vec![false; layers],
            idle: MAX_IDLE_TIME,
        }
    }

    /// Waits for a layer.
    pub(super) fn wait(&mut self, layer: usize) -> Result<(), RecvTimeoutError> {
        while !self.here[layer] {
            let arrived = (self.next)(None)?;
            self.here[arrived] = true;
        }
        Ok(())
    }

    /// Waits for a layer with a place: only for what is left of [`MAX_IDLE_TIME`].
    pub(super) fn wait_with_place(&mut self, layer: usize) -> Result<(), RecvTimeoutError> {
        while !self.here[layer] {
            let start = Instant::now();
            let arrived = (self.next)(Some(self.idle));
            self.idle = self.idle.saturating_sub(start.elapsed());
            self.here[arrived?] = true;
        }
        Ok(())
    }

    /// Waits for all layers.
    pub(super) fn wait_for_all(&mut self) -> Result<(), RecvTimeoutError> {
        (0..self.here.len()).try_for_each(|layer| self.wait(layer))
    }
}

/// Tells the thread that unpacks which layers are in the store.
#[derive(Debug)]
pub(super) struct Fetched {
    layers: Sender<usize>,
    wanted: oneshot::Sender<Infallible>,
}

impl Fetched {
    pub(super) fn send(&self, layer: usize) {
        // Nobody waits for it if the unpacking has ended.
        let _ = self.layers.send(layer);
    }

    /// Waits for the end of the unpacking.
    pub(super) async fn closed(&mut self) {
        self.wanted.closed().await;
    }
}

/// The layers that [`Fetched`] tells of.
#[derive(Debug)]
pub(super) struct Queue {
    layers: Receiver<usize>,
    _wanted: oneshot::Receiver<Infallible>,
}

impl Queue {
    /// Waits for the index of a layer. Blocks, so it must not be called by a task.
    pub(super) fn next(&self, limit: Option<Duration>) -> Result<usize, RecvTimeoutError> {
        match limit {
            Some(limit) => self.layers.recv_timeout(limit),
            None => self.layers.recv().map_err(RecvTimeoutError::from),
        }
    }
}

/// Creates the two ends. When either is dropped, the other one ends.
pub(super) fn queue() -> (Fetched, Queue) {
    let (sender, layers) = channel();
    let (wanted, _wanted) = oneshot::channel();
    let fetched = Fetched {
        layers: sender,
        wanted,
    };
    (fetched, Queue { layers, _wanted })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::thread::sleep;

    use super::super::pull::MAX_IDLE_METADATA;
    use super::super::work::WorkFile;
    use super::super::{PullOptions, Store};
    use super::*;
    use crate::Digest;
    use crate::tarball::Tarball;

    const TARGET: usize = 4000;

    /// A layer with more metadata than an image may keep without a place, and one over it.
    fn layers() -> [Vec<u8>; 2] {
        let target = "t".repeat(TARGET);
        let links = MAX_IDLE_METADATA as usize / TARGET + 1;
        let large = (0..links).fold(Tarball::new(), |tar, at| {
            tar.symlink(&format!("links/{at}"), &target)
        });
        let large = large.file("replaced", 0o644, &[1; 100_000]);
        let small = Tarball::new()
            .file("links/.wh.1", 0, b"")
            .file("replaced", 0o644, b"new");
        [large.finish(), small.finish()]
    }

    fn unpack(
        store: &Store,
        next: impl FnMut(Option<Duration>) -> Result<usize, RecvTimeoutError>,
    ) -> Vec<u8> {
        let inner = &store.inner;
        let id = Digest::of(b"id");
        let layers = layers().map(|tar| {
            let digest = Digest::of(&tar);
            fs::write(inner.layout.blob(&digest), &tar).unwrap();
            (digest, digest)
        });
        let work = WorkFile::acquire(&inner.layout.rootfs_work(&id, None)).unwrap();
        let (options, runs) = (PullOptions::default(), Arc::new(AtomicBool::new(false)));
        inner
            .unpack(&work, id, &layers, next, runs, &options)
            .unwrap();
        fs::read(work.path()).unwrap()
    }

    #[test]
    fn an_image_that_waits_too_long_for_a_layer_gives_its_place_back_and_starts_again() {
        let (dir, prompt) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let prompt = Store::open(prompt.path()).unwrap();
        let mut ready = 0..2;
        let expected = unpack(&prompt, |_| Ok(ready.next().unwrap()));
        let store = Store::open(dir.path()).unwrap();
        let mut calls = 0;
        let image = unpack(&store, |limit| {
            calls += 1;
            match calls {
                1 => {
                    assert_eq!(limit, None);
                    Ok(0)
                }
                2 => {
                    assert_eq!(limit, Some(MAX_IDLE_TIME));
                    Err(RecvTimeoutError::Timeout)
                }
                _ => {
                    assert_eq!(limit, None);
                    assert!(store.inner.places.are_all_free());
                    let work = store.inner.layout.rootfs_work(&Digest::of(b"id"), None);
                    assert_eq!(fs::metadata(work).unwrap().len(), 0);
                    Ok(1)
                }
            }
        });
        assert_eq!(calls, 3);
        assert!(image == expected);
    }

    #[test]
    fn waits_with_a_place_are_limited_together() {
        let pause = Duration::from_millis(20);
        let mut limits = Vec::new();
        let mut ready = 0..;
        let mut arrivals = Arrivals::new(3, |limit| {
            limits.push(limit);
            sleep(pause);
            Ok(ready.next().unwrap())
        });
        arrivals.wait_with_place(0).unwrap();
        arrivals.wait_with_place(1).unwrap();
        arrivals.wait_for_all().unwrap();
        assert_eq!(limits[0], Some(MAX_IDLE_TIME));
        assert!(limits[1].unwrap() <= MAX_IDLE_TIME - pause);
        assert_eq!(limits[2], None);
    }

    #[test]
    fn a_wait_ends_with_a_layer_at_its_limit_or_with_the_fetches() {
        let (fetched, layers) = queue();
        let short = Some(Duration::from_millis(5));
        assert_eq!(layers.next(short), Err(RecvTimeoutError::Timeout));
        fetched.send(7);
        assert_eq!(layers.next(short), Ok(7));
        fetched.send(8);
        assert_eq!(layers.next(None), Ok(8));
        assert!(!fetched.wanted.is_closed());
        drop(fetched);
        assert_eq!(layers.next(short), Err(RecvTimeoutError::Disconnected));
        assert_eq!(layers.next(None), Err(RecvTimeoutError::Disconnected));
        let (fetched, layers) = queue();
        drop(layers);
        assert!(fetched.wanted.is_closed());
        fetched.send(9);
    }
}
