//! Work on the store that blocks, under SIGINT and SIGTERM.

use std::time::Duration;

use anyhow::Context as _;
use podvisor_images::{Cancel, PullOptions};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::progress::Progress;

/// How long interrupted work may take to clear up. It may sit in a read of a pipe for ever.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(1);

/// How work ended that did not fail.
#[derive(Debug)]
pub(super) enum Outcome<T> {
    /// It is done.
    Done(T),
    /// The user wants no more of it; the signal's number.
    Interrupted(u8),
}

/// SIGINT and SIGTERM, which end nothing from now on: work is told of them.
pub(super) struct Interrupts {
    runtime: Runtime,
    interrupt: Signal,
    terminate: Signal,
}

impl Interrupts {
    /// To be called before there is anything that an interrupted program must clear up.
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

    /// Does `work` on a thread of its own and shows its progress. A signal makes it end early and
    /// clear up; a second one does not wait for that.
    pub(super) fn during<T: Send + 'static>(
        self,
        progress: Progress,
        work: impl FnOnce(&PullOptions) -> podvisor_images::Result<T> + Send + 'static,
    ) -> anyhow::Result<Outcome<T>> {
        let Self {
            runtime,
            mut interrupt,
            mut terminate,
        } = self;
        let ended = runtime.block_on(async {
            let cancel = Cancel::default();
            let (events, received) = mpsc::unbounded_channel();
            let options = PullOptions::default().events(events).cancel(cancel.clone());
            // The options hold the sender: with them goes the end of the progress.
            let work = tokio::task::spawn_blocking(move || work(&options));
            let work = async { tokio::join!(work, progress.show(received)).0 };
            let mut work = std::pin::pin!(work);
            let number = tokio::select! {
                done = &mut work => {
                    return Ok(Outcome::Done(done.context("this is a bug in podvisor")??));
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
            Ok(Outcome::Interrupted(number))
        });
        runtime.shutdown_background();
        ended
    }
}
