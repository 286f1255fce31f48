//! Work in progress in this process, so that it is not done twice.
//!
//! A registry is trusted with its own images only: it may name in a manifest what others have, and
//! send it as slowly as it likes. So whoever wants what is just being fetched waits for a fetch
//! from the same registry for as long as it takes, and for one from another registry for a limited
//! time ([`Patience`]). Then it fetches the thing too; who has it first tells the others.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{Mutex as Lock, OwnedMutexGuard, watch};
use tokio::time::{Instant, timeout};

use crate::Digest;

/// A thing that is being fetched or created. A registry decides what an image's digests are, and
/// may give one digest to things of several kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Flight {
    /// The root file system of an image. Its holder waits for blobs.
    Rootfs(Digest),
    /// A blob. Its holder waits for no other flight.
    Blob(Digest),
    /// A disk image, by the digest of its URL.
    Disk(Digest),
}

/// Values that are forgotten when no one holds them.
type Shared<K, V> = Mutex<HashMap<K, Weak<V>>>;

/// Locks and signals for each thing that is being fetched or created.
#[derive(Debug, Default)]
pub(super) struct SingleFlight {
    /// By thing, and by thing and registry.
    locks: Shared<(Flight, Option<String>), Lock<()>>,
    arrivals: Shared<Flight, watch::Sender<()>>,
}

impl SingleFlight {
    /// Takes the lock of a thing, for as long as it takes. Calls `waiting` if it is taken.
    pub(super) async fn lock(&self, thing: Flight, waiting: impl FnOnce()) -> OwnedMutexGuard<()> {
        lock(enter(&self.locks, (thing, None)), waiting).await
    }

    /// Waits until nobody else fetches the thing from `registry`; then, while there is `patience`
    /// and the thing is not in the store, until nobody does from another registry. Calls `waiting`
    /// before each wait. The caller looks whether the thing is in the store now.
    pub(super) async fn turn(
        &self,
        thing: Flight,
        registry: &str,
        patience: &Patience,
        waiting: impl Fn(),
    ) -> Turn {
        let arrival = enter(&self.arrivals, thing);
        let mut arrived = arrival.subscribe();
        let own = enter(&self.locks, (thing, Some(registry.to_owned())));
        let own = lock(own, &waiting).await;
        let all = lock(enter(&self.locks, (thing, None)), &waiting);
        let all = async {
            tokio::select! {
                biased;
                turn = all => Some(turn),
                () = changed(&mut arrived) => None,
            }
        };
        Turn {
            _all: patience.wait(all).await.flatten(),
            _own: own,
            arrival,
            arrived,
        }
    }
}

fn enter<K: Eq + Hash, V: Default>(shared: &Shared<K, V>, key: K) -> Arc<V> {
    let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = shared.get(&key).and_then(Weak::upgrade) {
        return found;
    }
    shared.retain(|_, value| value.strong_count() > 0);
    let value = Arc::default();
    shared.insert(key, Arc::downgrade(&value));
    value
}

async fn lock(lock: Arc<Lock<()>>, waiting: impl FnOnce()) -> OwnedMutexGuard<()> {
    match Arc::clone(&lock).try_lock_owned() {
        Ok(guard) => guard,
        Err(_) => {
            waiting();
            lock.lock_owned().await
        }
    }
}

async fn changed(arrived: &mut watch::Receiver<()>) {
    if arrived.changed().await.is_err() {
        // Nobody is left who could tell.
        std::future::pending().await
    }
}

/// The right to fetch a thing from a registry; others that want it from there wait.
#[derive(Debug)]
pub(super) struct Turn {
    /// Missing if another registry's fetch goes on too.
    _all: Option<OwnedMutexGuard<()>>,
    _own: OwnedMutexGuard<()>,
    arrival: Arc<watch::Sender<()>>,
    arrived: watch::Receiver<()>,
}

impl Turn {
    /// Tells all others who fetch or await the thing that it is in the store.
    pub(super) fn tell(&self) {
        self.arrival.send_replace(());
    }

    /// Waits until another tells that the thing is in the store.
    pub(super) async fn told(&mut self) {
        changed(&mut self.arrived).await;
    }
}

/// How long a pull waits for what others fetch from other registries, all waits together; waits at
/// the same time count once.
#[derive(Debug)]
pub(super) struct Patience(Mutex<Waits>);

#[derive(Debug)]
struct Waits {
    /// What was left at `counted`.
    left: Duration,
    counted: Instant,
    running: usize,
}

impl Waits {
    /// Counts the time until now.
    fn count(&mut self) {
        let now = Instant::now();
        if self.running > 0 {
            self.left = self.left.saturating_sub(now - self.counted);
        }
        self.counted = now;
    }
}

impl Patience {
    pub(super) fn new(limit: Duration) -> Self {
        Self(Mutex::new(Waits {
            left: limit,
            counted: Instant::now(),
            running: 0,
        }))
    }

    /// Runs `work`, which waits; `None` if that takes too long.
    async fn wait<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let limit = {
            let mut waits = self.waits();
            waits.count();
            waits.running += 1;
            waits.left
        };
        // A pull that drops this in the middle is over.
        let done = timeout(limit, work).await.ok();
        let mut waits = self.waits();
        waits.count();
        waits.running -= 1;
        done
    }

    fn waits(&self) -> MutexGuard<'_, Waits> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    async fn turn(flights: &SingleFlight, registry: &str, patience: &Patience) -> Turn {
        let thing = Flight::Blob(Digest::of(b""));
        flights.turn(thing, registry, patience, || {}).await
    }

    /// Whether the work waits for something; time stands still.
    async fn waits(work: &mut (impl Future<Output = Turn> + Unpin)) -> bool {
        timeout(LONG, work).await.is_err()
    }

    #[tokio::test(start_paused = true)]
    async fn another_registry_is_awaited_for_a_limited_time_and_the_same_one_without() {
        let flights = SingleFlight::default();
        let patience = || Patience::new(Duration::from_secs(30));
        let first = turn(&flights, "a", &patience()).await;
        let mine = patience();
        let mut same = Box::pin(turn(&flights, "a", &mine));
        assert!(waits(&mut same).await);
        let start = tokio::time::Instant::now();
        let other = turn(&flights, "b", &patience()).await;
        assert_eq!(start.elapsed().as_secs(), 30);
        // Of each registry there is one.
        let theirs = Patience::new(Duration::ZERO);
        let mut second = Box::pin(turn(&flights, "b", &theirs));
        assert!(waits(&mut second).await);
        drop(other);
        second.await;
        drop(first);
        same.await;
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_waits_or_fetches_is_told_of_the_arrival() {
        let flights = SingleFlight::default();
        let (some, none) = (Patience::new(LONG * 3), Patience::new(Duration::ZERO));
        let mut slow = turn(&flights, "slow", &none).await;
        let mut waiting = Box::pin(turn(&flights, "waits", &some));
        assert!(waits(&mut waiting).await);
        let fast = turn(&flights, "fast", &none).await;
        assert!(timeout(LONG, slow.told()).await.is_err());
        fast.tell();
        slow.told().await;
        waiting.await;
        // It has arrived before; there may be need to fetch it again.
        drop((slow, fast));
        let mut again = turn(&flights, "slow", &some).await;
        assert!(timeout(LONG, again.told()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn waits_for_others_are_limited_together() {
        let patience = Patience::new(Duration::from_secs(30));
        let sleep = |time| tokio::time::sleep(Duration::from_secs(time));
        // Two at the same time, and a pause that is no wait.
        tokio::join!(patience.wait(sleep(10)), patience.wait(sleep(10)));
        sleep(100).await;
        assert!(patience.wait(sleep(10)).await.is_some());
        let start = Instant::now();
        let late = async {
            sleep(9).await;
            patience.wait(sleep(100)).await
        };
        let (early, late) = tokio::join!(patience.wait(sleep(100)), late);
        assert!(early.is_none() && late.is_none());
        assert_eq!(start.elapsed().as_secs(), 10);
        assert!(patience.wait(sleep(1)).await.is_none());
        assert!(patience.wait(async {}).await.is_some());
    }

    #[tokio::test]
    async fn what_nobody_holds_is_forgotten() {
        let flights = SingleFlight::default();
        let patience = Patience::new(LONG);
        drop(turn(&flights, "a", &patience).await);
        drop(flights.lock(Flight::Disk(Digest::of(b"")), || {}).await);
        let left = flights.locks.lock().unwrap();
        assert!(left.values().all(|lock| lock.strong_count() == 0));
        assert!(left.len() <= 2);
    }
}
