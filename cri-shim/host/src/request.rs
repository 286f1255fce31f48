//! The request that a task works for, by its number in the log: from the daemon through the
//! sandbox's process to the agent in the guest.

use std::future::Future;

use tokio::task::JoinHandle;
use tokio::task_local;
use tracing::{Instrument as _, Span, info_span};

task_local! {
    static NUMBER: u64;
}

/// Runs `work` on behalf of request `number`.
pub async fn scope<F: Future>(number: u64, work: F) -> F::Output {
    NUMBER.scope(number, work).await
}

/// Runs `work` on behalf of request `number` of another process, and tags its log events with it.
pub async fn on_behalf<F: Future>(number: Option<u64>, work: F) -> F::Output {
    match number {
        Some(number) => {
            let span = info_span!("call", number);
            scope(number, work).instrument(span).await
        }
        None => work.await,
    }
}

/// The request that this task works for, if any.
pub fn current() -> Option<u64> {
    NUMBER.try_with(|number| *number).ok()
}

/// Spawns a task that works for the same request as this one.
pub fn spawn<F>(work: F) -> JoinHandle<F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    let number = current();
    let work = async move {
        match number {
            Some(number) => scope(number, work).await,
            None => work.await,
        }
    };
    tokio::spawn(work.instrument(Span::current()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_and_its_tasks_know_their_request_and_others_do_not() {
        assert_eq!(current(), None);
        let (inside, task, apart) = scope(7, async {
            let task = spawn(async { current() });
            let apart = tokio::spawn(async { current() });
            (current(), task.await.unwrap(), apart.await.unwrap())
        })
        .await;
        assert_eq!((inside, task, apart), (Some(7), Some(7), None));
        assert_eq!(on_behalf(Some(8), async { current() }).await, Some(8));
        assert_eq!(on_behalf(None, async { current() }).await, None);
    }
}
