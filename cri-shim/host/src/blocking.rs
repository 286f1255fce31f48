//! Work that blocks its thread, mostly for a disk, and work that changes its thread.

use std::io;
use std::panic::resume_unwind;
use std::thread;

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::oneshot;
use tokio::task::block_in_place;

/// Runs `work` in this thread, after the runtime has moved the thread's other tasks to another one.
/// Futures in the caller's own task wait.
pub fn in_place<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => block_in_place(work),
        // There is no other thread, or no other task that could be delayed.
        _ => work(),
    }
}

/// Runs `work` in a thread of its own with this name: for work that may block without limit and
/// must not occupy the threads that all other work shares. It continues when its caller no longer
/// waits for it.
///
/// # Errors
/// The thread cannot be started, or it panicked.
pub async fn apart<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (sender, done) = oneshot::channel();
    let work = move || {
        // The caller may be gone.
        let _ = sender.send(work());
    };
    thread::Builder::new().name(name.to_owned()).spawn(work)?;
    done.await
        .map_err(|_| io::Error::other(format!("the thread `{name}` panicked")))
}

/// Runs `work` in a thread that ends with it, so that changes of the thread's namespaces affect
/// nothing else.
///
/// # Errors
/// The thread cannot be started.
pub fn in_thread<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    thread::scope(|scope| {
        // `Scope::spawn` panics if it cannot start a thread.
        let thread = thread::Builder::new().spawn_scoped(scope, work)?;
        Ok(thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

/// For tests: keeps the calling thread from starting any other thread.
#[cfg(any(test, feature = "test-utils"))]
pub fn refuse_threads() {
    use podvisor_seccomp::{Otherwise, Verdict, apply, compile};

    let refused = Verdict::Fail(u16::try_from(libc::EAGAIN).unwrap());
    let mut calls: std::collections::BTreeMap<_, _> =
        (0..1024).map(|call| (call, Verdict::Allow)).collect();
    calls.extend([libc::SYS_clone, libc::SYS_clone3].map(|call| (call, refused.clone())));
    apply(&compile(&calls, Otherwise::Kill)).unwrap();
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

    #[test]
    fn a_thread_that_there_is_not_is_an_error() {
        assert_eq!(in_thread(|| 7).unwrap(), 7);
        let short = thread::spawn(|| {
            refuse_threads();
            in_thread(|| 7)
        });
        let error = short.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
