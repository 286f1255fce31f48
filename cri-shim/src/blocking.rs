//! Work that has its thread wait, mostly for a disk.

use std::io;
use std::thread;

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::oneshot;
use tokio::task::block_in_place;

/// Does `work` in this thread, whose other tasks the runtime gives to another one first. A future
/// that shares its task with the caller waits.
pub(crate) fn in_place<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => block_in_place(work),
        // There is no other thread, or nothing that could wait.
        _ => work(),
    }
}

/// Does `work` in a thread of its own, which has this name: for what may wait without end, and is
/// not to take the threads that all other work shares. It goes on when nobody waits for it any
/// more.
///
/// # Errors
/// There is no such thread, or it panicked.
pub(crate) async fn apart<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (sender, done) = oneshot::channel();
    let work = move || {
        // Nobody may be there any more.
        let _ = sender.send(work());
    };
    thread::Builder::new().name(name.to_owned()).spawn(work)?;
    done.await
        .map_err(|_| io::Error::other(format!("the thread `{name}` panicked")))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn other_tasks_of_a_runtime_with_one_worker_go_on() {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).build().unwrap();
        let (sender, receiver) = mpsc::channel();
        let waits = runtime.spawn(async move {
            tokio::spawn(async move { sender.send(7) });
            in_place(|| receiver.recv())
        });
        assert_eq!(runtime.block_on(waits).unwrap(), Ok(7));
    }

    #[tokio::test]
    async fn a_runtime_without_other_threads_does_the_work_too() {
        assert_eq!(in_place(|| in_place(|| 7)), 7);
    }

    #[tokio::test]
    async fn work_apart_is_in_another_thread_and_goes_on_without_who_asked() {
        let here = thread::current().id();
        let there = apart("apart", || thread::current().id()).await.unwrap();
        assert_ne!(here, there);
        assert!(apart("apart", || panic!("a bug")).await.is_err());
        let (go, waits) = mpsc::channel::<()>();
        let (sender, receiver) = mpsc::channel();
        {
            let work = apart("apart", move || waits.recv().map(|()| sender.send(7)));
            let mut work = std::pin::pin!(work);
            assert!(futures_util::poll!(&mut work).is_pending());
        }
        go.send(()).unwrap();
        assert_eq!(receiver.recv(), Ok(7));
    }

    #[test]
    fn no_runtime_is_needed() {
        assert_eq!(in_place(|| 7), 7);
    }
}
