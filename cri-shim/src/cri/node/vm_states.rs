//! What is known of VMs beyond their records.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::{oneshot, watch};

use crate::sandbox::{MigrationDirection, MigrationInfo, MigrationState};

/// Pauses and consoles of the node's VMs, and the news that something has changed.
#[derive(Debug, Default)]
pub(in crate::cri) struct VmStates {
    changes: watch::Sender<u64>,
    /// By container: since when it is paused, in nanoseconds since 1970. Of those that are not
    /// here, the sandbox has to be asked.
    paused: Mutex<HashMap<String, Option<i64>>>,
    /// By container: its machine's latest migration, as far as its process has said.
    migrations: Mutex<HashMap<String, MigrationInfo>>,
    /// By container: who has the console.
    consoles: Mutex<Consoles>,
}

#[derive(Debug, Default)]
struct Consoles {
    last: u64,
    holders: HashMap<String, Holder>,
}

#[derive(Debug)]
struct Holder {
    number: u64,
    /// Dropped when another client takes the console.
    _taken: oneshot::Sender<()>,
}

/// A client's hold on a console.
#[derive(Debug)]
pub(in crate::cri) struct ConsoleHold {
    number: u64,
    /// Ends when another client takes the console.
    pub(in crate::cri) taken: oneshot::Receiver<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VmStates {
    /// Something of a pod or container has changed.
    pub(in crate::cri) fn changed(&self) {
        self.changes
            .send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Returns what is told each change. Several may come as one.
    pub(in crate::cri) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Returns since when a container's machine is paused, if it is; `None` if that is not known.
    pub(in crate::cri) fn pause_of(&self, container: &str) -> Option<Option<i64>> {
        lock(&self.paused).get(container).copied()
    }

    /// Notes whether a container's machine is paused.
    pub(in crate::cri) fn note_pause(&self, container: &str, since: Option<i64>) {
        lock(&self.paused).insert(container.to_owned(), since);
    }

    /// Notes that a container's machine is paused or not, unless that was known already.
    pub(in crate::cri) fn note_found(&self, container: &str, since: Option<i64>) -> Option<i64> {
        let mut paused = lock(&self.paused);
        *paused.entry(container.to_owned()).or_insert(since)
    }

    /// Notes how far a container's machine has moved.
    pub(in crate::cri) fn note_migration(&self, container: &str, info: MigrationInfo) {
        if info.direction == MigrationDirection::In && info.state == MigrationState::Done {
            // What was known before its machine came is of no machine.
            lock(&self.paused).remove(container);
        }
        lock(&self.migrations).insert(container.to_owned(), info);
    }

    /// Returns the latest migration of a container's machine.
    pub(in crate::cri) fn migration_of(&self, container: &str) -> Option<MigrationInfo> {
        lock(&self.migrations).get(container).cloned()
    }

    /// Forgets the migrations of containers that do not exist any more.
    pub(in crate::cri) fn retain_migrations(&self, mut exists: impl FnMut(&str) -> bool) {
        lock(&self.migrations).retain(|container, _| exists(container));
    }

    /// Forgets the machines of containers that do not run.
    pub(in crate::cri) fn retain(&self, mut runs: impl FnMut(&str) -> bool) {
        lock(&self.paused).retain(|container, _| runs(container));
    }

    /// Takes a console over.
    pub(in crate::cri) fn take_console(&self, container: &str) -> ConsoleHold {
        let (sender, taken) = oneshot::channel();
        let mut consoles = lock(&self.consoles);
        consoles.last += 1;
        let number = consoles.last;
        let holder = Holder {
            number,
            _taken: sender,
        };
        consoles.holders.insert(container.to_owned(), holder);
        ConsoleHold { number, taken }
    }

    /// Gives a console back, unless another client has it.
    pub(in crate::cri) fn release_console(&self, container: &str, hold: &ConsoleHold) {
        let mut consoles = lock(&self.consoles);
        let holder = consoles.holders.get(container);
        if holder.is_some_and(|holder| holder.number == hold.number) {
            consoles.holders.remove(container);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_console_is_the_last_clients_who_took_it() {
        let states = VmStates::default();
        let mut first = states.take_console("a");
        let mut other = states.take_console("b");
        assert!(
            first
                .taken
                .try_recv()
                .is_err_and(|error| error == oneshot::error::TryRecvError::Empty)
        );
        let mut second = states.take_console("a");
        let closed = oneshot::error::TryRecvError::Closed;
        assert_eq!(first.taken.try_recv(), Err(closed));
        // Who lost it cannot give it back.
        states.release_console("a", &first);
        let empty = oneshot::error::TryRecvError::Empty;
        assert_eq!(second.taken.try_recv(), Err(empty.clone()));
        assert_eq!(other.taken.try_recv(), Err(empty));
        states.release_console("a", &second);
        assert!(!lock(&states.consoles).holders.contains_key("a"));
    }

    #[test]
    fn what_a_call_noted_goes_before_what_is_found_later() {
        let states = VmStates::default();
        assert_eq!(states.pause_of("a"), None);
        states.note_pause("a", Some(7));
        assert_eq!(states.note_found("a", None), Some(7));
        states.retain(|container| container != "a");
        assert_eq!(states.pause_of("a"), None);
    }
}
