//! The machine's end: when it is due, and the work that is left then.

use std::fs::File;
use std::future::pending;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{info, warn};

use super::super::record::{self, ExitRecord};
use super::super::types::{ContainerInfo, SandboxExit};
use super::container::{LOST_GUEST_TIMEOUT, READER_GRACE};

/// How long a guest may take to power itself off after the container with which the sandbox ends
/// has ended.
const POWER_OFF_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the last answers and lines may take after the machine has ended.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(15);

/// How long a request whose guest was lost waits until everything about the machine's end is
/// written.
const EXIT_WRITTEN_TIMEOUT: Duration = Duration::from_secs(15);

/// How long killing a machine may take after its guest was lost.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// The reason for ending a machine.
#[derive(Debug, Clone, Copy)]
pub(super) enum Shutdown {
    /// An end was requested, with this grace period for the guest.
    Within(Duration),
    /// The container with which the sandbox ends has ended, and its output is complete.
    Done,
}

/// The known facts about a machine's end.
#[derive(Debug, Clone)]
pub(super) struct Cause {
    /// The guest has stopped: how it ended will be known soon.
    pub(super) stopped: watch::Receiver<bool>,
    /// How the machine has ended: known before its containers' output is written.
    pub(super) exit: watch::Receiver<Option<SandboxExit>>,
    /// As `exit`, but once everything is written.
    pub(super) written: watch::Receiver<Option<SandboxExit>>,
}

impl Cause {
    /// Returns how the machine has ended whose guest cannot be reached; `None` if it keeps running.
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

/// What the decision about a machine's end needs to know, and can do.
pub(super) trait EndOfMachine {
    /// Waits until it is known how the machine has ended.
    fn exit(&self) -> impl Future<Output = SandboxExit>;
    /// The guest no longer runs: [`Self::exit`] will be known soon.
    fn has_stopped(&self) -> bool;
    /// Returns when a call has found that the guest's agent is lost.
    fn lost(&self) -> impl Future<Output = ()>;
    /// Counters that say which side ended the connection to the agent.
    fn counters(&self) -> Vec<(&'static str, u64)>;
    /// Asks the guest to power itself off, without waiting for its answer.
    fn ask_to_stop(&self);
    /// Powers the machine off.
    fn kill(&self);
}

/// Waits for the machine's end, and causes it if there is a reason; returns the exit, and the
/// deadline of a requested end. A guest that leaves nothing on the host is powered off once it is
/// not needed.
pub(super) async fn end_of(
    machine: &impl EndOfMachine,
    shutdowns: &mut mpsc::UnboundedReceiver<Shutdown>,
    leaves_nothing: bool,
) -> (SandboxExit, Option<Instant>) {
    let mut deadline: Option<Instant> = None;
    let mut asked_by: Option<Instant> = None;
    let mut lost_at: Option<Instant> = None;
    loop {
        let kill_at = deadline.unwrap_or_else(Instant::now);
        let ends_by = lost_at.map_or_else(Instant::now, |at| at + LOST_GUEST_TIMEOUT);
        tokio::select! {
            // After the host stood still for a moment, several branches may be ready at the same
            // time.
            biased;
            exit = machine.exit() => return (exit, asked_by),
            () = machine.lost(), if lost_at.is_none() => {
                if deadline.is_none() {
                    warn!(vsock = ?machine.counters(), "lost the guest's agent");
                }
                lost_at = Some(Instant::now());
            }
            () = sleep_until(ends_by), if lost_at.is_some() => {
                if machine.has_stopped() {
                    return (machine.exit().await, asked_by);
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
                    machine.ask_to_stop();
                }
                deadline = earlier(deadline, grace);
            }
            () = sleep_until(kill_at), if deadline.is_some() => {
                if machine.has_stopped() {
                    return (machine.exit().await, asked_by);
                }
                warn!("the guest did not stop within its grace period and is killed");
                machine.kill();
                return (SandboxExit::Killed, asked_by);
            }
        }
    }
}

/// Returns the earlier of `old`, if any, and the time after `grace`.
fn earlier(old: Option<Instant>, grace: Duration) -> Option<Instant> {
    let at = Instant::now().checked_add(grace);
    // A time too far in the future is never, for which a year is enough.
    let at = at.unwrap_or_else(|| Instant::now() + Duration::from_secs(365 * 86400));
    Some(old.map_or(at, |old| old.min(at)))
}

/// Returns when the time of readers after a requested end is over; never if no end is requested.
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

/// Writes the record, and sends the last answers.
pub(super) async fn leave(
    file: &File,
    exit: SandboxExit,
    containers: Vec<ContainerInfo>,
    sender: watch::Sender<Option<SandboxExit>>,
    serving: JoinHandle<()>,
) {
    let record = ExitRecord {
        exit: exit.clone(),
        containers,
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
    use std::cell::RefCell;

    use super::*;

    /// A machine whose guest ignores the request to stop.
    struct Deaf {
        /// What was done to it, and when.
        calls: RefCell<Vec<(&'static str, Duration)>>,
        begin: Instant,
        /// The agent is lost at that time.
        lost_after: Option<Duration>,
        /// The guest has stopped, and how is known at that time.
        stopped: Option<Duration>,
    }

    impl Deaf {
        fn new() -> Self {
            Self {
                calls: RefCell::default(),
                begin: Instant::now(),
                lost_after: None,
                stopped: None,
            }
        }

        fn called(&self, what: &'static str) {
            self.calls.borrow_mut().push((what, self.begin.elapsed()));
        }
    }

    impl EndOfMachine for Deaf {
        async fn exit(&self) -> SandboxExit {
            match self.stopped {
                Some(after) => sleep_until(self.begin + after).await,
                None => pending().await,
            }
            SandboxExit::Reset
        }

        fn has_stopped(&self) -> bool {
            self.stopped.is_some()
        }

        async fn lost(&self) {
            match self.lost_after {
                Some(after) => sleep_until(self.begin + after).await,
                None => pending().await,
            }
        }

        fn counters(&self) -> Vec<(&'static str, u64)> {
            Vec::new()
        }

        fn ask_to_stop(&self) {
            self.called("ask");
        }

        fn kill(&self) {
            self.called("kill");
        }
    }

    /// Times have steps of a millisecond.
    const STEP: Duration = Duration::from_millis(2);

    /// Checks what was done to a machine, and when.
    fn assert_calls(machine: &Deaf, expected: &[(&str, Duration)]) {
        let calls = machine.calls.borrow();
        let is_as_expected = calls.len() == expected.len()
            && calls
                .iter()
                .zip(expected)
                .all(|((what, at), (due, by))| what == due && (*by..=*by + STEP).contains(at));
        assert!(is_as_expected, "{calls:?} is not {expected:?}");
    }

    const GRACE: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_ignores_the_request_to_stop_is_killed_when_its_grace_period_is_over() {
        let machine = Deaf::new();
        let (asks, mut shutdowns) = mpsc::unbounded_channel();
        asks.send(Shutdown::Within(GRACE)).unwrap();
        let (exit, asked_by) = end_of(&machine, &mut shutdowns, false).await;
        assert_eq!(exit, SandboxExit::Killed);
        assert_eq!(asked_by, Some(machine.begin + GRACE));
        assert_calls(&machine, &[("ask", Duration::ZERO), ("kill", GRACE)]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_earliest_of_several_deadlines_counts_and_the_guest_is_asked_once() {
        let machine = Deaf::new();
        let (asks, mut shutdowns) = mpsc::unbounded_channel();
        asks.send(Shutdown::Within(4 * GRACE)).unwrap();
        // The last one comes before the earliest deadline, which it does not move.
        let more = async {
            for (wait, grace) in [(GRACE, GRACE), (GRACE / 2, 9 * GRACE)] {
                sleep_until(Instant::now() + wait).await;
                asks.send(Shutdown::Within(grace)).unwrap();
            }
            pending().await
        };
        let (exit, asked_by) = tokio::select! {
            biased;
            end = end_of(&machine, &mut shutdowns, false) => end,
            () = more => unreachable!(),
        };
        assert_eq!(exit, SandboxExit::Killed);
        let due = asked_by.unwrap() - machine.begin;
        assert!((2 * GRACE..=2 * GRACE + STEP).contains(&due), "{due:?}");
        assert_calls(&machine, &[("ask", Duration::ZERO), ("kill", 2 * GRACE)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_is_done_is_killed_when_it_does_not_power_itself_off() {
        for (leaves_nothing, exit, calls) in [
            (
                false,
                SandboxExit::Killed,
                &[("ask", Duration::ZERO), ("kill", POWER_OFF_TIMEOUT)][..],
            ),
            (true, SandboxExit::PoweredOff, &[("kill", Duration::ZERO)]),
        ] {
            let machine = Deaf::new();
            let (asks, mut shutdowns) = mpsc::unbounded_channel();
            asks.send(Shutdown::Done).unwrap();
            let ended = end_of(&machine, &mut shutdowns, leaves_nothing).await;
            assert_eq!(ended, (exit, None));
            assert_calls(&machine, calls);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_machine_whose_agent_is_lost_is_killed_when_it_does_not_end() {
        let machine = Deaf {
            lost_after: Some(GRACE),
            ..Deaf::new()
        };
        let (_asks, mut shutdowns) = mpsc::unbounded_channel();
        let (exit, asked_by) = end_of(&machine, &mut shutdowns, false).await;
        assert!(
            matches!(&exit, SandboxExit::Failed(why) if why.contains("lost")),
            "{exit:?}"
        );
        assert_eq!(asked_by, None);
        assert_calls(&machine, &[("kill", GRACE + LOST_GUEST_TIMEOUT)]);
    }

    #[tokio::test(start_paused = true)]
    async fn how_a_guest_ended_that_stopped_in_time_is_waited_for() {
        for asked in [true, false] {
            let machine = Deaf {
                lost_after: (!asked).then_some(Duration::ZERO),
                stopped: Some(Duration::from_secs(3600)),
                ..Deaf::new()
            };
            let (asks, mut shutdowns) = mpsc::unbounded_channel();
            if asked {
                asks.send(Shutdown::Within(GRACE)).unwrap();
            }
            let (exit, _) = end_of(&machine, &mut shutdowns, false).await;
            assert_eq!(exit, SandboxExit::Reset);
            let asks: &[_] = if asked {
                &[("ask", Duration::ZERO)]
            } else {
                &[]
            };
            assert_calls(&machine, asks);
        }
    }

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
