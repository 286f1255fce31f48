//! Time limits for what other processes of this host do.
//!
//! A host may stand still for seconds, for example a virtual machine whose own host has no time for
//! it. Its programs make no progress then, but its clock continues. So a limit is waited for in
//! slices, of which such a pause uses up only one, however long it is.

use std::pin::pin;
use std::time::Duration;

use tokio::time::error::Elapsed;

/// The number of slices of a limit.
const SLICES: u32 = 20;

/// As [`tokio::time::timeout`], but pauses of this host do not count.
pub async fn timeout<F: Future>(limit: Duration, future: F) -> Result<F::Output, Elapsed> {
    let mut future = pin!(future);
    let slice = limit / SLICES;
    for _ in 1..SLICES {
        if let Ok(done) = tokio::time::timeout(slice, &mut future).await {
            return Ok(done);
        }
    }
    tokio::time::timeout(slice, future).await
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::sync::oneshot;
    use tokio::time::{Instant, advance};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    #[tokio::test(start_paused = true)]
    async fn a_host_that_stands_still_uses_up_nobodys_time() {
        let (answer, answered) = oneshot::channel();
        let asked = tokio::spawn(timeout(LIMIT, answered));
        tokio::task::yield_now().await;
        for _ in 0..3 {
            advance(10 * LIMIT).await;
        }
        answer.send("late").unwrap();
        assert_eq!(asked.await.unwrap().unwrap(), Ok("late"));
    }

    #[tokio::test(start_paused = true)]
    async fn who_never_answers_is_not_waited_for_any_longer() {
        let begin = Instant::now();
        timeout(LIMIT, pending::<()>()).await.unwrap_err();
        assert!((LIMIT..2 * LIMIT).contains(&begin.elapsed()));
    }
}
