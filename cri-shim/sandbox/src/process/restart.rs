//! Whether, when and with which streams a container's process is restarted.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Mutex as AsyncMutex, MutexGuard as AsyncMutexGuard, watch};
use tokio::time::sleep;

use super::super::agent::Agent;
use super::super::error::SandboxError;
use super::super::stdio::{StdioError, StreamSet, Streams};
use super::super::types::{RestartPolicy, Started, TerminalSize};
use super::output::ContainerStreams;

/// The first delay; each is twice the one before.
const FIRST_DELAY: Duration = Duration::from_millis(100);

/// The longest delay.
const MAX_DELAY: Duration = Duration::from_secs(60);

/// A process that ran this long counts as having worked: the delays start again at the first.
const BACKOFF_RESET_AFTER: Duration = Duration::from_secs(10);

/// The delays before a process's restarts.
#[derive(Debug)]
pub(super) struct Restarts {
    policy: RestartPolicy,
    count: u32,
    delay: Duration,
}

impl Restarts {
    pub(super) fn new(policy: RestartPolicy) -> Self {
        Self {
            policy,
            count: 0,
            delay: Duration::ZERO,
        }
    }

    /// Returns the delay before the next start of a process that ran for `ran`; `None` if it is not
    /// restarted.
    pub(super) fn next(&mut self, code: i32, ran: Duration) -> Option<Duration> {
        let is_wanted = match self.policy {
            RestartPolicy::Never => false,
            RestartPolicy::OnFailure { max_restarts } => {
                code != 0 && max_restarts.is_none_or(|max| self.count < max)
            }
            RestartPolicy::Always => true,
        };
        if !is_wanted {
            return None;
        }
        self.count = self.count.saturating_add(1);
        self.delay = match self.delay {
            Duration::ZERO => FIRST_DELAY,
            _ if ran >= BACKOFF_RESET_AFTER => FIRST_DELAY,
            delay => (delay * 2).min(MAX_DELAY),
        };
        Some(self.delay)
    }
}

/// State that the processes of one container share.
#[derive(Debug)]
pub(super) struct Processes {
    policy: RestartPolicy,
    set: StreamSet,
    terminal: Mutex<Option<TerminalSize>>,
    /// Held while a process is created, and while one is sent a signal.
    turn: AsyncMutex<()>,
    /// The process is not restarted any more.
    is_over: watch::Sender<bool>,
    /// Requested starts that the guest has not answered.
    pending_starts: AtomicUsize,
}

/// A start that the guest has not answered, until this is dropped.
#[derive(Debug)]
pub(super) struct PendingStart<'a>(&'a AtomicUsize);

impl Drop for PendingStart<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Processes {
    pub(super) fn new(
        policy: RestartPolicy,
        set: StreamSet,
        terminal: Option<TerminalSize>,
    ) -> Self {
        Self {
            policy,
            set,
            terminal: Mutex::new(terminal),
            turn: AsyncMutex::default(),
            is_over: watch::Sender::new(false),
            pending_starts: AtomicUsize::new(0),
        }
    }

    /// Reports the container as starting until the result is dropped.
    pub(super) fn begin_start(&self) -> PendingStart<'_> {
        self.pending_starts.fetch_add(1, Ordering::AcqRel);
        PendingStart(&self.pending_starts)
    }

    pub(super) fn is_starting(&self) -> bool {
        self.pending_starts.load(Ordering::Acquire) > 0
    }

    pub(super) fn policy(&self) -> RestartPolicy {
        self.policy
    }

    /// Creates streams for the next process.
    pub(super) fn streams(&self) -> Result<Streams, StdioError> {
        Streams::new(self.set, *self.terminal())
    }

    /// Stores the terminal's present size.
    pub(super) fn resized(&self, size: TerminalSize) {
        let mut terminal = self.terminal();
        if terminal.is_some() {
            *terminal = Some(size);
        }
    }

    fn terminal(&self) -> MutexGuard<'_, Option<TerminalSize>> {
        self.terminal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the present process the last one.
    pub(super) fn end(&self) {
        self.is_over.send_replace(true);
    }

    /// Waits until no process is being created.
    pub(super) async fn turn(&self) -> AsyncMutexGuard<'_, ()> {
        self.turn.lock().await
    }

    /// Waits before the next process; false if none is started any more.
    pub(super) async fn delayed(&self, delay: Duration) -> bool {
        let mut is_over = self.is_over.subscribe();
        tokio::select! {
            biased;
            _ = is_over.wait_for(|is_over| *is_over) => false,
            () = sleep(delay) => true,
        }
    }

    /// Creates and starts the next process of the container `id`, whose output goes where that of
    /// the one before went; `None` if none is started any more.
    pub(super) async fn restart(
        &self,
        id: &str,
        outputs: &Arc<ContainerStreams>,
        agent: &Agent,
    ) -> Result<Option<Started>, SandboxError> {
        let _turn = self.turn().await;
        if *self.is_over.borrow() {
            return Ok(None);
        }
        let streams = self.streams()?;
        agent.restart(id, streams.request()).await?;
        outputs.go_on(streams.connect(agent.mux()).await?)?;
        Ok(Some(agent.start(id).await?))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream as StdUnixStream;

    use podvisor_agent_protocol::api::{
        RestartContainerResponse, SignalProcessRequest, SignalProcessResponse, WaitProcessResponse,
        wait_process_response::Status,
    };
    use tokio::net::UnixStream;
    use ttrpc::proto::{Codec as _, Message, MessageHeader};
    use ttrpc::{Code, Request, Response};

    use super::super::super::agent::Mux;
    use super::super::super::stdio::GuestStreams;
    use super::super::container::Container;
    use super::*;

    const SHORT: Duration = Duration::from_millis(1);

    #[test]
    fn delays_double_up_to_a_minute_and_begin_anew_after_a_long_run() {
        let mut restarts = Restarts::new(RestartPolicy::Always);
        let delays: Vec<u128> = (0..12)
            .filter_map(|_| restarts.next(0, SHORT))
            .map(|delay| delay.as_millis())
            .collect();
        let expected = [
            100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 51_200, 60_000, 60_000,
        ];
        assert_eq!(delays, expected);
        assert_eq!(restarts.next(0, BACKOFF_RESET_AFTER), Some(FIRST_DELAY));
        assert_eq!(restarts.next(0, SHORT), Some(2 * FIRST_DELAY));
    }

    #[test]
    fn only_failures_count_for_on_failure_and_so_often_as_told() {
        let mut never = Restarts::new(RestartPolicy::Never);
        assert_eq!(never.next(1, SHORT), None);
        let of = |max_restarts| Restarts::new(RestartPolicy::OnFailure { max_restarts });
        let mut twice = of(Some(2));
        assert!(twice.next(1, SHORT).is_some() && twice.next(1, BACKOFF_RESET_AFTER).is_some());
        assert_eq!(twice.next(1, SHORT), None);
        let mut often = of(None);
        assert!((0..1000).all(|_| often.next(137, SHORT).is_some()));
        assert_eq!(often.next(0, SHORT), None);
    }

    /// Reads the next call to a guest's agent, which must be `method`.
    async fn called(guest: &mut UnixStream, method: &str) -> Message<Request> {
        let call = Message::<Request>::read_from(guest).await.unwrap();
        assert_eq!(call.payload.method, method);
        call
    }

    async fn answer(guest: &mut UnixStream, call: &Message<Request>, payload: Response) {
        let header = MessageHeader::new_response(call.header.stream_id, payload.size());
        let answer = Message { header, payload };
        answer.write_to(guest).await.unwrap();
    }

    fn done(payload: Vec<u8>) -> Response {
        Response {
            payload,
            ..Response::default()
        }
    }

    #[tokio::test]
    async fn a_container_is_starting_until_it_runs_or_cannot_be_started() {
        let (container, _output) = Container::sample("c");
        let is_starting = || container.info().is_starting;
        assert!(!is_starting());
        let first = container.processes.begin_start();
        drop(container.processes.begin_start());
        assert!(is_starting());
        drop(first);
        assert!(!is_starting());

        let (ours, _guest) = StdUnixStream::pair().unwrap();
        let agent = Agent::connect(Mux::to(ours)).await.unwrap();
        let _pending = container.processes.begin_start();
        let started = Started {
            pid: 1,
            started_at_ns: 1,
        };
        container.started(started, &agent, |_| async {});
        assert!(!is_starting());
    }

    #[tokio::test]
    async fn a_process_that_is_made_and_not_started_is_killed_before_the_next_one() {
        let (ours, guest) = StdUnixStream::pair().unwrap();
        guest.set_nonblocking(true).unwrap();
        let mut guest = UnixStream::from_std(guest).unwrap();
        let agent = Agent::connect(Mux::to(ours)).await.unwrap();
        let streams = GuestStreams {
            input: None,
            output: None,
            errors: None,
        };
        let streams = ContainerStreams::start(streams, None, false, true).unwrap();
        let set = StreamSet {
            stdin: false,
            stdout: false,
            stderr: false,
        };
        let processes = Processes::new(RestartPolicy::Always, set, None);
        let container = Container::new("c".to_owned(), 1, streams, processes, None);
        let started = Started {
            pid: 1,
            started_at_ns: 1,
        };
        Arc::new(container).started(started, &agent, |_| async {});
        let exit = WaitProcessResponse {
            status: Some(Status::ExitCode(1)),
            ..WaitProcessResponse::default()
        };
        let exit = done(exit.encode().unwrap());
        let made = done(RestartContainerResponse::new().encode().unwrap());
        let sent = done(SignalProcessResponse::new().encode().unwrap());
        let refused = Response {
            status: Some(ttrpc::get_status(Code::INTERNAL, "no such luck")).into(),
            ..Response::default()
        };

        let wait = called(&mut guest, "WaitProcess").await;
        answer(&mut guest, &wait, exit.clone()).await;
        let restart = called(&mut guest, "RestartContainer").await;
        answer(&mut guest, &restart, made).await;
        let start = called(&mut guest, "StartContainer").await;
        answer(&mut guest, &start, refused).await;
        let kill = called(&mut guest, "SignalProcess").await;
        let signal = SignalProcessRequest::decode(&kill.payload.payload).unwrap();
        assert_eq!((signal.signal, signal.all), (9, true));
        answer(&mut guest, &kill, sent).await;
        let wait = called(&mut guest, "WaitProcess").await;
        answer(&mut guest, &wait, exit).await;
        called(&mut guest, "RestartContainer").await;
    }
}
