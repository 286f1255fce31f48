//! Limits how many processes are created at the same time.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{Semaphore, SemaphorePermit};

/// Maximum number of launchers that run at the same time: each takes some megabytes, and more would
/// not be faster.
const MAX_LAUNCHERS: usize = 4;

/// Maximum number for one container. A process that enters it can be delayed there, by a signal
/// that stops it; those of other containers continue.
const MAX_LAUNCHERS_PER_CONTAINER: usize = 2;

/// The limit for the processes of all containers.
#[derive(Debug)]
pub struct LaunchLimits {
    turns: Semaphore,
    consoles: AtomicU64,
}

/// The limit for those of one container, which is acquired first.
#[derive(Debug)]
pub struct ContainerTurns(Semaphore);

/// Held while a process is created.
#[derive(Debug)]
pub(in crate::container) struct LaunchPermit<'a> {
    _containers: SemaphorePermit<'a>,
    _guests: SemaphorePermit<'a>,
}

impl Default for LaunchLimits {
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

impl LaunchLimits {
    /// Waits for a turn, for a container with the limit `of`.
    pub(in crate::container) async fn turn<'a>(
        &'a self,
        of: &'a ContainerTurns,
    ) -> Option<LaunchPermit<'a>> {
        // Neither is ever closed. A process that waits for its container's limit holds nothing of
        // the guest's.
        let containers = of.0.acquire().await.ok()?;
        Some(LaunchPermit {
            _containers: containers,
            _guests: self.turns.acquire().await.ok()?,
        })
    }

    /// Returns a unique name for a console's socket: with equal names two processes would swap
    /// their terminals.
    pub(in crate::container) fn console(&self) -> String {
        format!("tty{}", self.consoles.fetch_add(1, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn one_container_does_not_take_all_turns() {
        let launches = LaunchLimits::default();
        let (one, other) = (ContainerTurns::default(), ContainerTurns::default());
        let turn = |of| launches.turn(of).now_or_never().flatten();
        let held: Vec<LaunchPermit<'_>> = std::iter::from_fn(|| turn(&one)).collect();
        assert_eq!(held.len(), MAX_LAUNCHERS_PER_CONTAINER);
        // Many that wait take no turn either.
        let mut waiting: Vec<_> = (0..MAX_LAUNCHERS)
            .map(|_| Box::pin(launches.turn(&one)))
            .collect();
        for next in &mut waiting {
            assert!(next.now_or_never().is_none());
        }
        let others = [turn(&other), turn(&other)];
        assert!(others.iter().all(Option::is_some));

        // All turns of the guest are taken; the first to wait gets the next free one.
        let third = ContainerTurns::default();
        let mut next = Box::pin(launches.turn(&third));
        assert!((&mut next).now_or_never().is_none());
        drop(others);
        assert!(next.now_or_never().flatten().is_some());
        drop(held);
        assert!(waiting.remove(0).now_or_never().flatten().is_some());
    }
}
