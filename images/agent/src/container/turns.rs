//! Whose turn it is to make a process.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{Semaphore, SemaphorePermit};

/// Launchers at work at once: each takes some megabytes, and more would not be faster.
const MAX_LAUNCHERS: usize = 4;

/// Those of one container. A process that enters it can be held up there, by a signal that stops
/// it; those of other containers go on.
const MAX_LAUNCHERS_PER_CONTAINER: usize = 2;

/// What the processes of all containers wait for to be made.
#[derive(Debug)]
pub struct Launches {
    turns: Semaphore,
    consoles: AtomicU64,
}

/// What those of one container wait for before.
#[derive(Debug)]
pub struct ContainerTurns(Semaphore);

/// It is held while a process is made.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    _containers: SemaphorePermit<'a>,
    _guests: SemaphorePermit<'a>,
}

impl Default for Launches {
    fn default() -> Self {
        Self {
            turns: Semaphore::new(MAX_LAUNCHERS),
            consoles: AtomicU64::default(),
        }
    }
}

impl Default for ContainerTurns {
    fn default() -> Self {
        Self(Semaphore::new(MAX_LAUNCHERS_PER_CONTAINER))
    }
}

impl Launches {
    /// Waits for a turn, for a container with these.
    pub(super) async fn turn<'a>(&'a self, of: &'a ContainerTurns) -> Option<Turn<'a>> {
        // Neither is ever closed. Whoever waits for its container holds nothing of the guest's.
        let containers = of.0.acquire().await.ok()?;
        Some(Turn {
            _containers: containers,
            _guests: self.turns.acquire().await.ok()?,
        })
    }

    /// Name for a console's socket that no other has: two that meet would swap their terminals.
    pub(super) fn console(&self) -> String {
        format!("tty{}", self.consoles.fetch_add(1, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn one_container_does_not_take_all_turns() {
        let launches = Launches::default();
        let (one, other) = (ContainerTurns::default(), ContainerTurns::default());
        let turn = |of| launches.turn(of).now_or_never().flatten();
        let held: Vec<Turn<'_>> = std::iter::from_fn(|| turn(&one)).collect();
        assert_eq!(held.len(), MAX_LAUNCHERS_PER_CONTAINER);
        // Many that wait take none either.
        let mut waiting: Vec<_> = (0..MAX_LAUNCHERS)
            .map(|_| Box::pin(launches.turn(&one)))
            .collect();
        for next in &mut waiting {
            assert!(next.now_or_never().is_none());
        }
        let others = [turn(&other), turn(&other)];
        assert!(others.iter().all(Option::is_some));

        // All of the guest's are taken; the first to wait gets what becomes free.
        let third = ContainerTurns::default();
        let mut next = Box::pin(launches.turn(&third));
        assert!((&mut next).now_or_never().is_none());
        drop(others);
        assert!(next.now_or_never().flatten().is_some());
        drop(held);
        assert!(waiting.remove(0).now_or_never().flatten().is_some());
    }
}
