//! Runs blocking work on the store, with handling of SIGINT and SIGTERM.

use std::time::Duration;

use anyhow::Context as _;
use podvisor_images::{Cancel, PullOptions};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::progress::Progress;

/// How long interrupted work may take to clean up. It may be blocked in a read of a pipe forever.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(1);

/// The outcome of work that did not fail.
#[derive(Debug)]
pub(super) enum Interruptible<T> {
    /// It is done.
    Done(T),
    /// The user cancelled it; the signal's number.
    Interrupted(u8),
}

/// SIGINT and SIGTERM, which do not kill this process any more: they cancel the work.
pub(super) struct Interrupts {
    runtime: Runtime,
    interrupt: Signal,
    terminate: Signal,
}

impl Interrupts {
    /// Starts to catch the signals; has to be called before there is anything to clean up.
    pub(super) fn catch() -> anyhow::Result<Self> {
        let runtime = super::runtime()?;
        let entered = runtime.enter();
        let interrupt = signal(SignalKind::interrupt())?;
        let terminate = signal(SignalKind::terminate())?;
        drop(entered);
        Ok(Self {
            runtime,
            interrupt,
            terminate,
        })
    }

    /// Runs `work` on a thread of its own and shows its progress. A signal makes it end early and
    /// clean up; a second one does not wait for that.
    pub(super) fn during<T: Send + 'static>(
        self,
        progress: Progress,
        work: impl FnOnce(&PullOptions) -> podvisor_images::Result<T> + Send + 'static,
    ) -> anyhow::Result<Interruptible<T>> {
        let Self {
            runtime,
            mut interrupt,
            mut terminate,
        } = self;
        let ended = runtime.block_on(async {
            let cancel = Cancel::default();
            let (events, received) = mpsc::unbounded_channel();
            let options = PullOptions::default().events(events).cancel(cancel.clone());
            // The options hold the sender: dropping them ends the progress.
            let work = tokio::task::spawn_blocking(move || work(&options));
            let work = async { tokio::join!(work, progress.show(received)).0 };
            let mut work = std::pin::pin!(work);
            let number = tokio::select! {
                done = &mut work => {
                    return Ok(Interruptible::Done(done.context("this is a bug in podvisor")??));
                }
                _ = interrupt.recv() => 2,
                _ = terminate.recv() => 15,
            };
            cancel.cancel();
            tokio::select! {
                _ = &mut work => {}
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                () = sleep(CLEANUP_TIMEOUT) => {}
            }
            Ok(Interruptible::Interrupted(number))
        });
        runtime.shutdown_background();
        ended
    }
}
