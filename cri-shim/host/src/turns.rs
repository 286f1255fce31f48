//! A concurrency limit for CPU-bound work: each task ends sooner than if all shared the CPUs, and
//! so within its timeout.

use std::pin::pin;
use std::thread::available_parallelism;
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::stall_timeout::timeout;

/// The least number of turns, for work that waits for other things than CPUs.
const MIN_TURNS: usize = 4;

/// The longest duration of a turn, for work that may wait for something that never happens: several
/// times what it takes on busy CPUs.
const MAX_TURN: Duration = Duration::from_secs(10);

/// Turns: two at a time for each CPU, in the order of requests.
#[derive(Debug)]
pub struct Turns(Semaphore);

impl Default for Turns {
    fn default() -> Self {
        let processors = available_parallelism().map_or(1, usize::from);
        Self(Semaphore::new(processors.saturating_mul(2).max(MIN_TURNS)))
    }
}

impl Turns {
    /// Waits for a turn, which ends when the returned permit is dropped.
    pub async fn take(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        self.0.acquire().await.ok()
    }

    /// Runs `work` when it is its turn. Work that takes longer than a turn continues, and the next
    /// turn starts.
    pub async fn begin<F: Future>(&self, work: F) -> F::Output {
        let turn = self.take().await;
        let mut work = pin!(work);
        match timeout(MAX_TURN, &mut work).await {
            Ok(done) => done,
            Err(_) => {
                drop(turn);
                work.await
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use futures_util::FutureExt as _;
    use tokio::time::Instant;

    use super::*;

    #[tokio::test]
    async fn the_next_waits_until_one_has_had_its_turn() {
        let turns = Turns::default();
        let mut taken = Vec::new();
        while let Some(turn) = turns.take().now_or_never() {
            assert!(turn.is_some());
            taken.push(turn);
        }
        let processors = available_parallelism().unwrap().get();
        assert_eq!(taken.len(), (2 * processors).max(MIN_TURNS));
        taken.pop();
        assert!(turns.take().now_or_never().flatten().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn work_that_takes_too_long_goes_on_and_keeps_nobody_waiting() {
        let turns = Turns::default();
        let all = turns.0.available_permits();
        let begin = Instant::now();
        let hangs = (0..all).map(|_| turns.begin(pending::<()>()));
        let hangs = futures_util::future::join_all(hangs);
        let next = turns.begin(async { begin.elapsed() });
        tokio::select! {
            biased;
            _ = hangs => unreachable!("they never end"),
            waited = next => assert!((MAX_TURN..2 * MAX_TURN).contains(&waited), "{waited:?}"),
        }
        // Work that ends in time keeps its turn until then.
        turns
            .begin(async { assert_eq!(turns.0.available_permits(), all - 1) })
            .await;
        assert_eq!(turns.0.available_permits(), all);
    }
}
