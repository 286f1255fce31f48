//! Calls that do their work once even if several callers ask for it at the same time, and that
//! complete it even if the caller goes away.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tonic::Status;

use super::error::{CriError, Result};
use crate::request;

/// The answer of a call, once it is done.
type Answer = watch::Receiver<Option<Result<String, Status>>>;

type Table<R> = HashMap<String, Flight<R>>;

/// Running work, by its name.
#[derive(Debug)]
pub(super) struct SingleFlight<R>(Arc<Mutex<Table<R>>>);

#[derive(Debug)]
struct Flight<R> {
    /// Compared with other requests of the same name.
    request: R,
    answer: Answer,
}

impl<R> Flight<R> {
    /// Returns whether there will be no answer: its task panicked, and no caller was waiting.
    fn is_lost(&self) -> bool {
        self.answer.has_changed().is_err() && self.answer.borrow().is_none()
    }
}

impl<R> Default for SingleFlight<R> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

fn lock<R>(table: &Mutex<Table<R>>) -> MutexGuard<'_, Table<R>> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<R: PartialEq + Send + 'static> SingleFlight<R> {
    /// Runs `work` in a task of its own, or joins the one that runs for an equal request of
    /// that name. A result whose callers have all gone away is kept for the next equal request,
    /// because the caller will retry. An error is not kept: a retry runs `work` again.
    ///
    /// `None` when another request of that name is under way.
    pub(super) async fn join<W>(
        &self,
        name: &str,
        request: R,
        work: impl FnOnce() -> W,
    ) -> Option<Result<String>>
    where
        W: Future<Output = Result<String>> + Send + 'static,
    {
        let begin = |sender: watch::Sender<_>| {
            let (work, table, name) = (work(), Arc::clone(&self.0), name.to_owned());
            async move {
                let done = work.await.map_err(Status::from);
                // Locked so that no caller joins or leaves meanwhile. The table is a receiver, too.
                let mut table = lock(&table);
                if done.is_err() && sender.receiver_count() <= 1 {
                    table.remove(&name);
                }
                // The result is kept in the table if no caller waits.
                sender.send_replace(Some(done));
            }
        };
        self.join_flight(name, request, begin).await
    }

    /// Like [`Self::join`], for callers that do not retry with an equal request: if no caller waits
    /// any more when the work is done, the result is undone.
    pub(super) async fn join_or_undo<W, U>(
        &self,
        name: &str,
        request: R,
        work: impl FnOnce() -> W,
        undo: impl FnOnce(String) -> U + Send + 'static,
    ) -> Option<Result<String>>
    where
        W: Future<Output = Result<String>> + Send + 'static,
        U: Future<Output = ()> + Send,
    {
        let begin = |sender: watch::Sender<_>| {
            let (work, table, name) = (work(), Arc::clone(&self.0), name.to_owned());
            async move {
                let done = work.await.map_err(Status::from);
                {
                    // Locked so that no caller joins or leaves meanwhile. The table is a receiver,
                    // too.
                    let _table = lock(&table);
                    if sender.receiver_count() > 1 {
                        sender.send_replace(Some(done));
                        return;
                    }
                }
                if let Ok(made) = done {
                    undo(made).await;
                }
                lock(&table).remove(&name);
                // For callers that have joined meanwhile.
                let undone = "who asked for it first went away, and it was removed: ask again";
                sender.send_replace(Some(Err(Status::aborted(undone))));
            }
        };
        self.join_flight(name, request, begin).await
    }

    /// Joins the work of an equal request, or spawns the future of `begin` as a new task.
    async fn join_flight<F>(
        &self,
        name: &str,
        request: R,
        begin: impl FnOnce(watch::Sender<Option<Result<String, Status>>>) -> F,
    ) -> Option<Result<String>>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let answer = {
            let mut flights = lock(&self.0);
            match flights.get(name).filter(|flight| !flight.is_lost()) {
                Some(flight) if flight.request == request => flight.answer.clone(),
                Some(flight) if flight.answer.borrow().is_none() => return None,
                _ => {
                    let (sender, answer) = watch::channel(None);
                    let flight = Flight {
                        request,
                        answer: answer.clone(),
                    };
                    flights.insert(name.to_owned(), flight);
                    request::spawn(begin(sender));
                    answer
                }
            }
        };
        let mut waiter = Waiter {
            table: &self.0,
            name,
            answer: Some(answer),
            is_told: false,
        };
        let done = waiter.done().await;
        drop(waiter);
        Some(match done {
            Some(done) => done.map_err(CriError::Shared),
            None => Err(CriError::Shared(Status::internal("the call's task failed"))),
        })
    }

    /// Forgets an answer that no caller has fetched: what it says has changed since, or the object
    /// that it names is being removed.
    pub(super) fn forget(&self, made: &str) {
        let mut flights = lock(&self.0);
        flights.retain(|_, flight| !matches!(&*flight.answer.borrow(), Some(Ok(id)) if id == made));
    }
}

/// A caller that waits for an answer.
struct Waiter<'a, R> {
    table: &'a Mutex<Table<R>>,
    name: &'a str,
    /// `Some` until this is dropped.
    answer: Option<Answer>,
    is_told: bool,
}

impl<R> Waiter<'_, R> {
    /// Returns the answer; `None` if its task panicked.
    async fn done(&mut self) -> Option<Result<String, Status>> {
        let done = match self.answer.as_mut()?.wait_for(Option::is_some).await {
            Ok(done) => done.clone(),
            Err(_) => None,
        };
        self.is_told = true;
        done
    }
}

impl<R> Drop for Waiter<'_, R> {
    /// Removes the answer from the table if it was delivered. An error is always removed: a caller
    /// that left before it got the error does not fetch it.
    fn drop(&mut self) {
        let mut table = lock(self.table);
        // Dropped while the table is locked, so that the number of receivers is right for others.
        let Some(answer) = self.answer.take() else {
            return;
        };
        let is_over = self.is_told || matches!(&*answer.borrow(), Some(Err(_)));
        let is_this = |flight: &Flight<R>| flight.answer.same_channel(&answer);
        if is_over && table.get(self.name).is_some_and(is_this) {
            table.remove(self.name);
        }
    }
}

/// Runs `work` to completion even if the caller goes away.
pub(super) async fn to_the_end<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    match request::spawn(work).await {
        Ok(done) => done,
        Err(_) => Err(CriError::Shared(Status::internal("the call's task failed"))),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use tokio::sync::Notify;

    use super::*;

    #[tokio::test]
    async fn equal_calls_at_once_do_the_work_once() {
        let flights = SingleFlight::<u8>::default();
        let runs = Arc::new(AtomicU32::new(0));
        let go = Arc::new(Notify::new());
        let work = || {
            let (runs, go) = (Arc::clone(&runs), Arc::clone(&go));
            || async move {
                runs.fetch_add(1, Ordering::Relaxed);
                go.notified().await;
                Ok("made".to_owned())
            }
        };
        let start = async {
            let other = flights.join("a", 9, work()).await;
            assert!(other.is_none(), "another request of the same name");
            go.notify_one();
        };
        let (first, second, ()) = tokio::join!(
            flights.join("a", 1, work()),
            flights.join("a", 1, work()),
            start
        );
        assert_eq!(first.unwrap().unwrap(), "made");
        assert_eq!(second.unwrap().unwrap(), "made");
        assert_eq!(runs.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn an_answer_that_nobody_waited_for_is_given_to_who_asks_again() {
        let flights = SingleFlight::<u8>::default();
        let go = Arc::new(Notify::new());
        let done = Arc::new(Notify::new());
        {
            let (go, done) = (Arc::clone(&go), Arc::clone(&done));
            let work = || async move {
                go.notified().await;
                done.notify_one();
                Ok("made".to_owned())
            };
            let call = flights.join("a", 1, work);
            // The caller goes away.
            let left = tokio::time::timeout(std::time::Duration::from_millis(1), call).await;
            assert!(left.is_err());
        }
        go.notify_one();
        done.notified().await;
        let again = flights.join("a", 1, || async { unreachable!() }).await;
        assert_eq!(again.unwrap().unwrap(), "made");
        let anew = flights
            .join("a", 1, || async { Ok("anew".to_owned()) })
            .await;
        assert_eq!(anew.unwrap().unwrap(), "anew");
    }

    #[tokio::test]
    async fn a_name_whose_task_panicked_when_its_caller_had_left_is_free_again() {
        for request in [1, 2] {
            let flights = SingleFlight::<u8>::default();
            {
                let mut call = std::pin::pin!(flights.join("a", 1, || async { panic!("a bug") }));
                // The caller goes away before the task has run.
                assert!(futures_util::poll!(&mut call).is_pending());
            }
            tokio::task::yield_now().await;
            let anew = flights.join("a", request, || async { Ok("anew".to_owned()) });
            assert_eq!(anew.await.unwrap().unwrap(), "anew");
        }
    }

    #[tokio::test]
    async fn what_nobody_waits_for_is_undone_once_it_is_made_and_who_comes_then_asks_again() {
        let flights = SingleFlight::<u8>::default();
        let (go, undoing, undone) = <(Arc<Notify>, Arc<Notify>, Arc<Notify>)>::default();
        let work = || {
            let go = Arc::clone(&go);
            || async move {
                go.notified().await;
                Ok("made".to_owned())
            }
        };
        let undo = || {
            let (undoing, undone) = (Arc::clone(&undoing), Arc::clone(&undone));
            |made: String| async move {
                assert_eq!(made, "made");
                undoing.notify_one();
                undone.notified().await;
            }
        };
        let join = |request| Box::pin(flights.join_or_undo("a", request, work(), undo()));
        // One of the two stays.
        let (mut first, mut second) = (join(1), join(1));
        assert!(futures_util::poll!(&mut first).is_pending());
        assert!(futures_util::poll!(&mut second).is_pending());
        drop(first);
        go.notify_one();
        assert_eq!(second.await.unwrap().unwrap(), "made");

        let mut left = join(1);
        assert!(futures_util::poll!(&mut left).is_pending());
        drop(left);
        go.notify_one();
        undoing.notified().await;
        assert!(join(2).await.is_none(), "it is still being undone");
        let mut late = join(1);
        assert!(futures_util::poll!(&mut late).is_pending());
        undone.notify_one();
        let refused = Status::from(late.await.unwrap().unwrap_err());
        assert_eq!(refused.code(), tonic::Code::Aborted);
        go.notify_one();
        assert_eq!(join(2).await.unwrap().unwrap(), "made");
    }

    #[tokio::test]
    async fn an_answer_about_what_is_removed_is_forgotten() {
        let flights = SingleFlight::<()>::default();
        let done = Arc::new(Notify::new());
        let told = Arc::clone(&done);
        let work = || async move {
            told.notify_one();
            Ok("a".to_owned())
        };
        {
            let mut call = std::pin::pin!(flights.join("a", (), work));
            // The caller goes away before it is answered.
            assert!(futures_util::poll!(&mut call).is_pending());
        }
        done.notified().await;
        flights.forget("a");
        let anew = flights.join("a", (), || async { Ok("anew".to_owned()) });
        assert_eq!(anew.await.unwrap().unwrap(), "anew");
    }

    #[tokio::test]
    async fn an_error_that_nobody_waits_for_is_not_kept() {
        let flights = SingleFlight::<u8>::default();
        // The caller goes away before the work has failed, or before it got the error.
        for leaves_early in [true, false] {
            let (go, done) = <(Arc<Notify>, Arc<Notify>)>::default();
            let (goes, told) = (Arc::clone(&go), Arc::clone(&done));
            let work = || async move {
                goes.notified().await;
                told.notify_one();
                Err(CriError::invalid("x", "y"))
            };
            let mut call = Box::pin(flights.join("a", 1, work));
            assert!(futures_util::poll!(&mut call).is_pending());
            let late = match leaves_early {
                true => {
                    drop(call);
                    None
                }
                false => Some(call),
            };
            go.notify_one();
            // The task does not yield between this and its answer.
            done.notified().await;
            drop(late);
            assert!(lock(&flights.0).is_empty());
            let anew = flights.join("a", 1, || async { Ok("anew".to_owned()) });
            assert_eq!(anew.await.unwrap().unwrap(), "anew");
            assert!(lock(&flights.0).is_empty());
        }
    }

    #[tokio::test]
    async fn an_error_is_told_to_all_who_wait_for_it() {
        let flights = SingleFlight::<u8>::default();
        let fails = || || async { Err(CriError::invalid("x", "y")) };
        let (first, second) = tokio::join!(
            flights.join("a", 1, fails()),
            flights.join("a", 1, || async { unreachable!() })
        );
        for told in [first, second] {
            let status = Status::from(told.unwrap().unwrap_err());
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
        }
        assert!(lock(&flights.0).is_empty());
    }
}
