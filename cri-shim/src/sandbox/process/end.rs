//! The machine's end: when it is due, and what is left to do then.

use std::fs::File;
use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, info, warn};

use super::super::Sandbox;
use super::super::record::{self, ExitRecord};
use super::super::types::SandboxExit;
use super::containers::Containers;

/// How long a guest may take to power itself off once the container has ended that it was for.
const POWER_OFF_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the last answers and lines may take when the machine has ended.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(15);

/// How long readers that are waited for may take for what is left of the output when somebody has
/// asked for an end, and the time that he gave is over.
pub(super) const READER_GRACE: Duration = Duration::from_secs(2);

/// How long the end of a machine may come after its guest was lost. Then it is killed: nobody can
/// do anything with it any more. A guest that panicked is looked through for why before.
pub(super) const LOST_GUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// How long who asked a guest for something waits until everything of its machine's end is written.
const EXIT_WRITTEN_TIMEOUT: Duration = Duration::from_secs(15);

/// How long it may take to kill a machine whose guest was lost.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a machine is to end.
#[derive(Debug, Clone, Copy)]
pub(super) enum Shutdown {
    /// Somebody asks for it, and gives the guest so much time.
    Within(Duration),
    /// The container that it was for has ended, and its output is complete.
    Done,
}

/// What is known of a machine's end.
#[derive(Debug, Clone)]
pub(super) struct Cause {
    /// The guest runs no more: how it ended is about to be told.
    pub(super) stopped: watch::Receiver<bool>,
    /// How the machine has ended: told before its containers' output is written.
    pub(super) exit: watch::Receiver<Option<SandboxExit>>,
    /// As `exit`, once everything is written.
    pub(super) written: watch::Receiver<Option<SandboxExit>>,
}

impl Cause {
    /// How the machine has ended whose guest cannot be reached; `None` when it goes on.
    pub(super) async fn known(&mut self) -> Option<SandboxExit> {
        let Self {
            stopped,
            exit,
            written,
        } = self;
        let ends = async {
            tokio::select! {
                _ = stopped.wait_for(|stopped| *stopped) => {}
                _ = exit.wait_for(Option::is_some) => {}
            }
        };
        timeout(LOST_GUEST_TIMEOUT + KILL_TIMEOUT, ends)
            .await
            .ok()?;
        let exit = exit.wait_for(Option::is_some).await.ok()?.clone();
        // Callers read the exit record next, so wait for it; with a limit, since readers may hang.
        let _ = timeout(EXIT_WRITTEN_TIMEOUT, written.wait_for(Option::is_some)).await;
        exit
    }
}

/// Waits for the machine's end, and sees to it when there is a reason; says until when somebody has
/// given it time. Of a guest that leaves nothing on the host the power is cut once nobody needs it.
pub(super) async fn ended(
    sandbox: &Arc<Sandbox>,
    containers: &Arc<Containers>,
    shutdowns: &mut mpsc::UnboundedReceiver<Shutdown>,
    leaves_nothing: bool,
) -> (SandboxExit, Option<Instant>) {
    let mut deadline: Option<Instant> = None;
    let mut asked_by: Option<Instant> = None;
    let mut lost_at: Option<Instant> = None;
    let machine = sandbox.machine();
    let stopped = machine.stopped();
    loop {
        let kill_at = deadline.unwrap_or_else(Instant::now);
        let ends_by = lost_at.map_or_else(Instant::now, |at| at + LOST_GUEST_TIMEOUT);
        tokio::select! {
            // After a moment in which the host stood still several may be true at once.
            biased;
            exit = machine.ended() => return (exit.into(), asked_by),
            () = sandbox.agent().lost(), if lost_at.is_none() => {
                if deadline.is_none() {
                    // Which side ended the connection.
                    warn!(vsock = ?machine.vsock_counters(), "lost the guest's agent");
                }
                lost_at = Some(Instant::now());
            }
            () = sleep_until(ends_by), if lost_at.is_some() => {
                if *stopped.borrow() {
                    return (machine.ended().await.into(), asked_by);
                }
                warn!("lost the guest's agent; killing the machine");
                machine.kill();
                let why = "lost the guest's agent while its guest went on: it was killed";
                return (SandboxExit::Failed(why.to_owned()), asked_by);
            }
            Some(shutdown) = shutdowns.recv() => {
                let grace = match shutdown {
                    Shutdown::Within(grace) => grace,
                    Shutdown::Done if leaves_nothing => {
                        machine.kill();
                        return (SandboxExit::PoweredOff, asked_by);
                    }
                    Shutdown::Done => POWER_OFF_TIMEOUT,
                };
                if matches!(shutdown, Shutdown::Within(_)) {
                    asked_by = earlier(asked_by, grace);
                }
                if deadline.is_none() {
                    info!(?grace, "the guest is asked to stop");
                    let (sandbox, containers) = (Arc::clone(sandbox), Arc::clone(containers));
                    tokio::spawn(async move {
                        if containers.is_paused() && let Err(error) = containers.resume().await {
                            debug!(%error, "the guest stays paused");
                        }
                        sandbox.ask_to_stop().await;
                    });
                }
                deadline = earlier(deadline, grace);
            }
            () = sleep_until(kill_at), if deadline.is_some() => {
                if *stopped.borrow() {
                    return (machine.ended().await.into(), asked_by);
                }
                warn!("the guest did not stop within its grace period and is killed");
                machine.kill();
                return (SandboxExit::Killed, asked_by);
            }
        }
    }
}

/// The earlier one of a time, if there is one, and that after `grace`.
fn earlier(old: Option<Instant>, grace: Duration) -> Option<Instant> {
    let at = Instant::now().checked_add(grace);
    // Too far in the future to be a time is never, which a year is as well.
    let at = at.unwrap_or_else(|| Instant::now() + Duration::from_secs(365 * 86400));
    Some(old.map_or(at, |old| old.min(at)))
}

/// Returns when readers have had all the time that somebody gives who asks for the end; never when
/// nobody does.
pub(super) async fn reads_are_over(
    mut shutdowns: mpsc::UnboundedReceiver<Shutdown>,
    mut asked_by: Option<Instant>,
) {
    loop {
        let over_at = asked_by.map_or_else(Instant::now, |at| at + READER_GRACE);
        tokio::select! {
            Some(shutdown) = shutdowns.recv() => if let Shutdown::Within(grace) = shutdown {
                asked_by = earlier(asked_by, grace);
            },
            () = sleep_until(over_at), if asked_by.is_some() => return,
            else => pending().await,
        }
    }
}

/// Waits until what came of the containers' output is written, and read by those that are waited
/// for unless their time is over.
pub(super) async fn drain(containers: &Containers, reads_are_over: impl Future<Output = ()>) {
    let mut drained = pin!(containers.guest_is_gone());
    tokio::select! {
        () = &mut drained => {}
        () = reads_are_over => {
            containers.let_readers_go().await;
            drained.await;
        }
    }
}

/// Writes the record, and gives the last answers.
pub(super) async fn leave(
    file: &File,
    exit: SandboxExit,
    containers: &Containers,
    sender: watch::Sender<Option<SandboxExit>>,
    serving: JoinHandle<()>,
) {
    let record = ExitRecord {
        exit: exit.clone(),
        containers: containers.list(),
    };
    if let Err(error) = record::write(file, &record) {
        warn!(%error, "cannot write down how the sandbox ended");
    }
    sender.send_replace(Some(exit));
    if timeout(FLUSH_TIMEOUT, serving).await.is_err() {
        warn!("timed out sending the last replies");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn readers_have_as_long_as_nobody_asks_for_the_end_and_then_what_time_he_gives() {
        let (asks, shutdowns) = mpsc::unbounded_channel();
        let begin = Instant::now();
        let mut over = tokio::spawn(reads_are_over(shutdowns, None));
        asks.send(Shutdown::Done).unwrap();
        let day = Duration::from_secs(86400);
        timeout(day, &mut over).await.unwrap_err();
        let grace = Duration::from_secs(30);
        asks.send(Shutdown::Within(2 * grace)).unwrap();
        asks.send(Shutdown::Within(grace)).unwrap();
        over.await.unwrap();
        let waited = begin.elapsed() - day;
        assert!((grace..2 * grace).contains(&waited), "{waited:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn readers_of_a_machine_that_was_killed_have_a_moment() {
        let (_asks, shutdowns) = mpsc::unbounded_channel();
        let begin = Instant::now();
        reads_are_over(shutdowns, Some(begin)).await;
        assert!((READER_GRACE..2 * READER_GRACE).contains(&begin.elapsed()));
    }
}
