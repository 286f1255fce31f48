//! How much of something that keeps processors busy is done at once: what waits for its turn ends
//! sooner than what shares a processor with everything else, and does not come too late for its
//! time limit.

use std::thread::available_parallelism;

use tokio::sync::{Semaphore, SemaphorePermit};

/// At least so many, for what waits for other things than processors.
const LEAST: usize = 4;

/// Turns for two at a time and processor, in the order in which they were asked for.
#[derive(Debug)]
pub(crate) struct Turns(Semaphore);

impl Default for Turns {
    fn default() -> Self {
        let processors = available_parallelism().map_or(1, usize::from);
        Self(Semaphore::new(processors.saturating_mul(2).max(LEAST)))
    }
}

impl Turns {
    /// Waits for a turn, which ends when the answer is dropped.
    pub(crate) async fn take(&self) -> Option<SemaphorePermit<'_>> {
        // It is never closed.
        self.0.acquire().await.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    #[tokio::test]
    async fn the_next_waits_until_one_has_had_its_turn() {
        let turns = Turns::default();
        let mut taken = Vec::new();
        while let Some(turn) = turns.take().now_or_never() {
            assert!(turn.is_some());
            taken.push(turn);
        }
        let processors = available_parallelism().unwrap().get();
        assert_eq!(taken.len(), (2 * processors).max(LEAST));
        taken.pop();
        assert!(turns.take().now_or_never().flatten().is_some());
    }
}
