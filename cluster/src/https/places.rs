//! Places for connections.
//!
//! A connection is unknown until its handler has recognized who is at the other end, by a
//! certificate or a token. Unknown ones have few places and little time. When all are taken, the
//! address with the most of them loses its oldest one: whoever holds many connections open takes
//! places from themselves alone.
//!
//! An address of which somebody was recognized is an acquaintance. Its unknown connections have
//! places of their own: the API server opens many at once when many objects are written, and
//! would be the address with the most.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout;

/// Addresses that are remembered as acquaintances: those recognized last.
const MAX_ACQUAINTANCES: usize = 256;

/// The places of a server.
#[derive(Debug, Clone)]
pub(crate) struct Places(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    most_unknown: usize,
    most_known: usize,
    known: Arc<Semaphore>,
    unknown: Mutex<Unknown>,
}

#[derive(Debug, Default)]
struct Unknown {
    next: u64,
    of_strangers: Connections,
    of_acquaintances: Connections,
    /// The one recognized last is the last.
    acquaintances: VecDeque<IpAddr>,
}

impl Unknown {
    /// Remembers an address, whose other connections are an acquaintance's from now on.
    fn acquaint(&mut self, address: IpAddr) {
        self.acquaintances.retain(|other| *other != address);
        self.acquaintances.push_back(address);
        if self.acquaintances.len() > MAX_ACQUAINTANCES {
            self.acquaintances.pop_front();
        }
        if let Some(all) = self.of_strangers.0.remove(&address) {
            let known = self.of_acquaintances.0.entry(address).or_default();
            known.extend(all);
        }
    }

    fn remove(&mut self, address: IpAddr, number: u64) {
        // An acquaintance may have become a stranger again.
        self.of_strangers.remove(address, number);
        self.of_acquaintances.remove(address, number);
    }
}

/// The unknown connections of each address, the oldest first.
#[derive(Debug, Default)]
struct Connections(HashMap<IpAddr, BTreeMap<u64, oneshot::Sender<()>>>);

impl Connections {
    /// Adds a connection; if there are `most` already, one of them ends.
    fn add(&mut self, most: usize, address: IpAddr, number: u64, end: oneshot::Sender<()>) {
        while self.count() >= most.max(1) {
            self.make_room();
        }
        self.0.entry(address).or_default().insert(number, end);
    }

    fn count(&self) -> usize {
        self.0.values().map(BTreeMap::len).sum()
    }

    /// Ends the oldest connection of the address that has the most.
    fn make_room(&mut self) {
        let fullest = self.0.iter().max_by_key(|(_, all)| all.len());
        let Some(address) = fullest.map(|(address, _)| *address) else {
            return;
        };
        let oldest = self.0.get_mut(&address).and_then(BTreeMap::pop_first);
        if let Some((_, end)) = oldest {
            // It may have ended by itself.
            let _ = end.send(());
        }
        self.0.retain(|_, all| !all.is_empty());
    }

    fn remove(&mut self, address: IpAddr, number: u64) {
        if let Some(all) = self.0.get_mut(&address) {
            all.remove(&number);
            if all.is_empty() {
                self.0.remove(&address);
            }
        }
    }
}

impl Places {
    /// At most so many unknown connections of strangers, and besides so many known ones. So many
    /// more may be the unknown ones of acquaintances.
    pub(crate) fn new(most_unknown: usize, most_known: usize) -> Self {
        Self(Arc::new(Shared {
            most_unknown,
            most_known,
            known: Arc::new(Semaphore::new(most_known)),
            unknown: Mutex::default(),
        }))
    }

    /// Takes a place for a new connection, if need be that of another one.
    pub(crate) fn enter(&self, address: IpAddr) -> (Place, Loss) {
        let address = address.to_canonical();
        let (end, ended) = oneshot::channel();
        let mut unknown = self.0.unknown();
        let number = unknown.next;
        unknown.next = number.wrapping_add(1);
        if unknown.acquaintances.contains(&address) {
            let most = self.0.most_known;
            unknown.of_acquaintances.add(most, address, number, end);
        } else {
            let most = self.0.most_unknown;
            unknown.of_strangers.add(most, address, number, end);
        }
        let place = Place {
            shared: Arc::clone(&self.0),
            address,
            number,
            permit: Mutex::default(),
        };
        (place, Loss(ended))
    }
}

impl Shared {
    fn unknown(&self) -> MutexGuard<'_, Unknown> {
        self.unknown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of a connection, which is given back when this is dropped.
pub(crate) struct Place {
    shared: Arc<Shared>,
    address: IpAddr,
    number: u64,
    permit: Mutex<Option<OwnedSemaphorePermit>>,
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place")
            .field("address", &self.address)
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

impl Place {
    /// Makes the connection a known one, if there is a place among these: nobody takes it away.
    pub(crate) fn recognize(&self) {
        let mut permit = self.permit.lock().unwrap_or_else(PoisonError::into_inner);
        if permit.is_some() {
            return;
        }
        match Arc::clone(&self.shared.known).try_acquire_owned() {
            Ok(taken) => {
                *permit = Some(taken);
                let mut unknown = self.shared.unknown();
                unknown.remove(self.address, self.number);
                unknown.acquaint(self.address);
            }
            Err(_) => tracing::warn!(address = %self.address, "too many connections at once"),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.unknown().remove(self.address, self.number);
    }
}

/// Learns that a place is lost.
#[derive(Debug)]
pub(crate) struct Loss(oneshot::Receiver<()>);

impl Loss {
    /// Is ready when the place is another's, or the connection is unknown for longer than `limit`.
    pub(crate) async fn wait(self, limit: Duration) {
        if let Ok(Err(_)) = timeout(limit, self.0).await {
            // It is a known one.
            std::future::pending().await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(3600);

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    async fn is_lost(loss: Loss) -> bool {
        tokio::select! {
            biased;
            () = loss.wait(LIMIT) => true,
            () = std::future::ready(()) => false,
        }
    }

    #[tokio::test]
    async fn an_address_that_holds_many_places_loses_its_own() {
        let places = Places::new(4, 1);
        let (first, first_loss) = places.enter(address(1));
        let many: Vec<_> = (0..20).map(|_| places.enter(address(2))).collect();
        let (second, second_loss) = places.enter(address(3));
        assert!(!is_lost(first_loss).await && !is_lost(second_loss).await);
        let mut lost = Vec::new();
        let mut kept = Vec::new();
        for (place, loss) in many {
            kept.push(place);
            lost.push(is_lost(loss).await);
        }
        let expected: Vec<bool> = (0..20).map(|number| number < 18).collect();
        assert_eq!(lost, expected, "the oldest are lost");
        drop((first, second, kept));
        assert!(
            places.0.unknown().of_strangers.0.is_empty(),
            "nothing is left"
        );
    }

    #[tokio::test]
    async fn an_acquaintance_opens_more_than_strangers_leave_it() {
        let places = Places::new(5, 8);
        let (known, _) = places.enter(address(1));
        let (waits, waits_loss) = places.enter(address(1));
        let _strangers = [2, 3, 4].map(|last| places.enter(address(last)));
        known.recognize();
        let (many, losses): (Vec<_>, Vec<_>) = (0..7).map(|_| places.enter(address(1))).unzip();
        assert!(!is_lost(waits_loss).await);
        let _more = [5, 6, 7].map(|last| places.enter(address(last)));
        for loss in losses {
            assert!(!is_lost(loss).await);
        }
        let (_own, own_loss) = places.enter(address(1));
        assert!(!is_lost(own_loss).await);
        assert_eq!(places.0.unknown().of_acquaintances.count(), 8);
        drop((known, waits, many, _own));
        assert!(places.0.unknown().of_acquaintances.0.is_empty());
    }

    #[tokio::test]
    async fn acquaintances_are_forgotten_when_there_are_many() {
        let places = Places::new(1, usize::from(u16::MAX));
        let (unknown, loss) = places.enter(address(1));
        for host in 0..=MAX_ACQUAINTANCES {
            let [_, _, high, low] = u32::try_from(host).unwrap().to_be_bytes();
            let (place, _) = places.enter(IpAddr::from([10, 1, high, low]));
            place.recognize();
        }
        assert!(is_lost(loss).await, "there is one place for strangers");
        drop(unknown);
        let first = IpAddr::from([10, 1, 0, 0]);
        let unknown = places.0.unknown();
        assert_eq!(unknown.acquaintances.len(), MAX_ACQUAINTANCES);
        assert!(!unknown.acquaintances.contains(&first));
        assert!(unknown.of_strangers.0.is_empty());
    }

    #[tokio::test]
    async fn a_known_connection_is_lost_to_nobody() {
        let places = Places::new(1, 1);
        let (known, loss) = places.enter(address(1));
        known.recognize();
        known.recognize();
        let (unknown, other_loss) = places.enter(address(3));
        // There is no place among the known ones.
        unknown.recognize();
        let (_last, last_loss) = places.enter(address(2));
        assert!(!is_lost(loss).await);
        assert!(is_lost(other_loss).await);
        drop(known);
        unknown.recognize();
        assert!(!is_lost(last_loss).await);
    }

    #[tokio::test]
    async fn nobody_is_unknown_for_long() {
        let places = Places::new(9, 9);
        let (_place, loss) = places.enter(address(1));
        loss.wait(Duration::ZERO).await;
        let (known, loss) = places.enter(address(1));
        known.recognize();
        let waited = timeout(Duration::from_millis(20), loss.wait(Duration::ZERO)).await;
        assert!(waited.is_err());
    }
}
