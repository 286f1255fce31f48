//! One container of the sandbox, and the processes that `exec` started in it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use podvisor_agent_protocol::ErrorKind;
use podvisor_host::signal::SIGKILL;
use podvisor_host::stall_timeout::timeout;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{debug, info, warn};

use super::super::agent::{Agent, LinkError, now_ns};
use super::super::error::SandboxError;
use super::super::events::{Event, EventAction, EventLog};
use super::super::stdio::Outputs;
use super::super::types::{
    ContainerInfo, ContainerState, Health, ProcessExit, RefusalKind, Started,
};
use super::output::ContainerStreams;
use super::restart::{Processes, Restarts};

/// How long output may still come after its process has ended: its children may keep the streams
/// open forever. The time of readers that are waited for does not count.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// How long readers that are waited for may take for the rest of the output after a requested end,
/// when the grace period is over.
pub(super) const READER_GRACE: Duration = Duration::from_secs(2);

/// How long a machine may take to end after its guest was lost. Then it is killed, as it is of no
/// use any more. Before that, a panicked guest's memory is searched for the cause.
pub(super) const LOST_GUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Most ended processes of `exec` that are remembered.
const EXECS_REMEMBERED: usize = 256;

/// The exit code of a process whose guest is gone: as if killed.
pub(super) const KILLED_EXIT_CODE: i32 = 128 + SIGKILL as i32;

/// A container in the guest.
#[derive(Debug)]
pub(super) struct Container {
    pub(super) id: String,
    pub(super) streams: Arc<ContainerStreams>,
    info: Mutex<ContainerInfo>,
    exit: watch::Sender<Option<ProcessExit>>,
    execs: Mutex<VecDeque<ExecProcess>>,
    pub(super) processes: Processes,
    events: Option<Arc<EventLog>>,
    /// The sandbox ends when this container does.
    ends_sandbox: AtomicBool,
    /// The exit of a process whose output is not complete yet.
    ended: Mutex<Option<ProcessExit>>,
}

#[derive(Debug)]
struct ExecProcess {
    id: String,
    exit: watch::Receiver<Option<ProcessExit>>,
}

impl Container {
    pub(super) fn new(
        id: String,
        pid: u32,
        streams: Arc<ContainerStreams>,
        processes: Processes,
        events: Option<Arc<EventLog>>,
    ) -> Self {
        let info = ContainerInfo {
            id: id.clone(),
            state: ContainerState::Created,
            pid,
            started_at_ns: 0,
            exit: None,
            restarts: 0,
            is_starting: false,
            message: None,
            never_came: false,
            health: None,
        };
        Self {
            id,
            streams,
            processes,
            events,
            info: Mutex::new(info),
            exit: watch::Sender::new(None),
            execs: Mutex::default(),
            ends_sandbox: AtomicBool::new(false),
            ended: Mutex::default(),
        }
    }

    pub(super) fn ends_sandbox(&self) -> bool {
        self.ends_sandbox.load(Ordering::Relaxed)
    }

    pub(super) fn set_ends_sandbox(&self) {
        self.ends_sandbox.store(true, Ordering::Relaxed);
    }

    pub(super) fn info(&self) -> ContainerInfo {
        let mut info = self.lock().clone();
        info.is_starting = info.state == ContainerState::Created && self.processes.is_starting();
        info
    }

    fn lock(&self) -> MutexGuard<'_, ContainerInfo> {
        self.info.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_ended(&self, exit: Option<ProcessExit>) {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = exit;
    }

    /// Returns the exit of the process if it has ended, even if its output is not complete yet.
    pub(super) fn has_ended(&self) -> Option<ProcessExit> {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports that the process runs, and waits for its end from now on. Before the end is
    /// reported, `release` is called: so the next container finds this one's resources free.
    pub(super) fn started<F>(
        self: &Arc<Self>,
        started: Started,
        agent: &Agent,
        release: impl FnOnce(Arc<Self>) -> F + Send + 'static,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        self.runs(started);
        let (container, agent) = (Arc::clone(self), agent.clone());
        tokio::spawn(async move {
            let exit = container.live(&agent).await;
            release(Arc::clone(&container)).await;
            container.exited(exit).await;
        });
    }

    /// Sends a signal, and SIGKILL if the process still runs after `grace`, whether or not a client
    /// waits for it, or the guest answers. The process is not restarted any more.
    pub(super) fn stop(
        self: &Arc<Self>,
        agent: &Agent,
        signal: u32,
        grace: Duration,
    ) -> Result<(), SandboxError> {
        self.processes.end();
        let mut exit = self.exit(None)?;
        let (container, agent) = (Arc::clone(self), agent.clone());
        tokio::spawn(async move {
            let send = async |signal, all| {
                // A process that is just being created gets the signal, too, and none is created
                // after it.
                drop(container.processes.turn().await);
                let sent = agent.signal(&container.id, "", signal, all).await;
                if let Err(error) = sent {
                    debug!(container = container.id, signal, %error, "the signal is not sent");
                }
            };
            let asked = async {
                if !grace.is_zero() {
                    send(signal, false).await;
                }
                exit.wait_for(Option::is_some).await.is_ok()
            };
            if tokio::time::timeout(grace, asked).await.is_err() {
                info!(container = container.id, "the grace period is over");
                send(SIGKILL.into(), true).await;
                container.hurry_readers().await;
            }
        });
        Ok(())
    }

    pub(super) fn set_health(&self, health: Health) {
        self.lock().health = Some(health);
    }

    pub(super) fn note(&self, event: Event) {
        if let Some(events) = &self.events {
            events.append(&event);
        }
    }

    fn note_end(&self, exit: ProcessExit) {
        if exit.oom_killed {
            self.note(Event::now(&self.id, EventAction::Oom));
        }
        let died = Event::now(&self.id, EventAction::Die);
        self.note(died.with("exitCode", exit.code));
    }

    /// Notes what the exit code does not say about the coming end.
    pub(super) fn set_message(&self, message: Option<String>) {
        self.lock().message = message;
    }

    /// Notes that the machine that it waited for never came.
    pub(super) fn set_never_came(&self) {
        self.lock().never_came = true;
    }

    /// Notes that its process runs.
    pub(super) fn runs(&self, started: Started) {
        self.note(Event::now(&self.id, EventAction::Start));
        let mut info = self.lock();
        info.state = ContainerState::Running;
        info.pid = started.pid;
        info.started_at_ns = started.started_at_ns;
    }

    /// Waits for the end of the process and restarts it according to the policy; returns its last
    /// exit.
    async fn live(&self, agent: &Agent) -> ProcessExit {
        let mut restarts = Restarts::new(self.processes.policy());
        let mut begun = Instant::now();
        loop {
            let exit = wait(agent, &self.id, "").await;
            self.set_ended(exit.ok());
            self.drain().await;
            let mut exit = match exit {
                Ok(exit) => exit,
                Err(Unknown::Deleted | Unknown::NotTold) => return killed(),
                Err(Unknown::GuestIsLost) => {
                    // The machine has ended, or is being killed, and will report how. Otherwise,
                    // clients would only learn that the process was killed, and not why.
                    sleep(2 * LOST_GUEST_TIMEOUT).await;
                    return ended_with_machine();
                }
            };
            let mut ran = begun.elapsed();
            loop {
                let Some(delay) = restarts.next(exit.code, ran) else {
                    return exit;
                };
                self.waits_for_restart(exit);
                if !self.processes.delayed(delay).await {
                    return exit;
                }
                match self.processes.restart(&self.id, &self.streams, agent).await {
                    Ok(None) => return exit,
                    Ok(Some(started)) => {
                        let count = self.lock().restarts;
                        let restarted = Event::now(&self.id, EventAction::Restart);
                        self.note(restarted.with("restartCount", count));
                        self.runs(started);
                        break;
                    }
                    Err(error) => {
                        warn!(container = self.id, %error, "failed to restart the process");
                        // It may exist nevertheless, and then the guest does not create another
                        // one.
                        let ended = end_unwanted(agent, &self.id, "");
                        if timeout(DRAIN_TIMEOUT, ended).await.is_err() {
                            debug!(container = self.id, "a process may be left in the guest");
                        }
                        exit = not_started(&error);
                        ran = Duration::ZERO;
                    }
                }
            }
            begun = Instant::now();
        }
    }

    fn waits_for_restart(&self, exit: ProcessExit) {
        self.note_end(exit);
        self.set_ended(None);
        let mut info = self.lock();
        info.state = ContainerState::Restarting;
        info.exit = Some(exit);
        info.restarts = info.restarts.saturating_add(1);
    }

    /// Waits for the rest of the output.
    async fn drain(&self) {
        if self.streams.drained(DRAIN_TIMEOUT / 2).await {
            return;
        }
        let streams = Arc::clone(&self.streams);
        let hurried = tokio::task::spawn_blocking(move || streams.hurry());
        // The log's disk may not answer.
        let _ = timeout(DRAIN_TIMEOUT / 2, hurried).await;
        if !self.streams.drained(DRAIN_TIMEOUT / 2).await {
            warn!(
                container = self.id,
                "output still open after the container's process exited"
            );
        }
    }

    /// Writes the rest of the output of a process that has ended, and reports its exit.
    pub(super) async fn ends(&self, exit: ProcessExit) {
        self.set_ended(Some(exit));
        self.drain().await;
        self.exited(exit).await;
    }

    async fn exited(&self, exit: ProcessExit) {
        // The streams may be writing to a log whose disk does not answer.
        let streams = Arc::clone(&self.streams);
        let closed = tokio::task::spawn_blocking(move || streams.close());
        if timeout(DRAIN_TIMEOUT, closed).await.is_err() {
            warn!(
                container = self.id,
                "timed out flushing the container's log"
            );
        }
        let mut info = self.lock();
        if info.state != ContainerState::Exited {
            if info.state == ContainerState::Running {
                self.note_end(exit);
            }
            info.state = ContainerState::Exited;
            info.exit = Some(exit);
            self.exit.send_replace(Some(exit));
        }
    }

    /// Handles the end of the guest, with which the container ended.
    pub(super) async fn guest_is_gone(&self) {
        self.processes.end();
        self.drain().await;
        let exit = self.has_ended().unwrap_or_else(ended_with_machine);
        self.exited(exit).await;
    }

    /// Gives the readers of a killed process a moment for the rest of its output.
    pub(super) async fn hurry_readers(&self) {
        let mut exit = self.exit.subscribe();
        let known = exit.wait_for(Option::is_some);
        if timeout(READER_GRACE, known).await.is_err() {
            self.detach_readers().await;
        }
    }

    /// Stops waiting for readers that do not read the output.
    pub(super) async fn detach_readers(&self) {
        // As above: if a log's disk does not answer, other requests are still served.
        let streams = Arc::clone(&self.streams);
        let _ = tokio::task::spawn_blocking(move || streams.detach_readers()).await;
    }

    /// Returns a receiver of the exit of the container's process or of one that `exec` started.
    pub(super) fn exit(
        &self,
        exec_id: Option<&str>,
    ) -> Result<watch::Receiver<Option<ProcessExit>>, SandboxError> {
        let Some(exec_id) = exec_id else {
            return Ok(self.exit.subscribe());
        };
        let execs = self.execs();
        let found = execs.iter().find(|exec| exec.id == exec_id);
        match found {
            Some(exec) => Ok(exec.exit.clone()),
            None => Err(SandboxError::refused(
                RefusalKind::NotFound,
                format!("container {} has no process {exec_id}", self.id),
            )),
        }
    }

    fn execs(&self) -> MutexGuard<'_, VecDeque<ExecProcess>> {
        self.execs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers another process, which runs and whose output is being moved.
    pub(super) fn exec_started(&self, exec_id: String, outputs: Outputs, agent: &Agent) {
        // The agent refuses an id that is in use, so a process with this id has ended.
        let sender = self.note_exec(&exec_id);
        let (agent, id) = (agent.clone(), self.id.clone());
        tokio::spawn(async move {
            let exit = wait(&agent, &id, &exec_id)
                .await
                .unwrap_or_else(|_| killed());
            finish_exec(&exec_id, outputs).await;
            sender.send_replace(Some(exit));
        });
    }

    /// Registers another process, in place of one with this id that has ended. Its exit is what is
    /// sent.
    pub(super) fn note_exec(&self, exec_id: &str) -> watch::Sender<Option<ProcessExit>> {
        let (sender, exit) = watch::channel(None);
        let mut execs = self.execs();
        execs.retain(|exec| exec.id != exec_id);
        execs.push_back(ExecProcess {
            id: exec_id.to_owned(),
            exit,
        });
        if execs.len() > EXECS_REMEMBERED {
            let ended = execs.iter().position(|exec| exec.exit.borrow().is_some());
            ended.and_then(|index| execs.remove(index));
        }
        sender
    }

    /// Kills a process of `exec` whose streams could not be connected, and makes the guest forget
    /// it.
    pub(super) fn kill_exec(&self, exec_id: String, agent: &Agent) {
        let (agent, id) = (agent.clone(), self.id.clone());
        tokio::spawn(async move { end_unwanted(&agent, &id, &exec_id).await });
    }
}

/// Waits for the rest of the output of a process that has ended.
pub(super) async fn finish_exec(exec_id: &str, outputs: Outputs) {
    match outputs.finish_within(DRAIN_TIMEOUT).await {
        Ok(true) => {}
        Ok(false) => debug!(
            exec_id,
            "what the process left has its output open: cut off"
        ),
        Err(error) => debug!(%error, exec_id, "an exec's output is lost"),
    }
}

/// Why the exit of a process is unknown; it was killed in either case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unknown {
    /// The container was deleted.
    Deleted,
    /// The connection to the agent is lost, and with it the machine.
    GuestIsLost,
    /// The agent has refused to tell, and the machine lives on.
    NotTold,
}

impl From<&LinkError> for Unknown {
    fn from(error: &LinkError) -> Self {
        match error {
            LinkError::Agent(error) if error.kind == ErrorKind::NotFound => Self::Deleted,
            error if error.is_lost() => Self::GuestIsLost,
            _ => Self::NotTold,
        }
    }
}

/// Waits for a process's exit.
async fn wait(agent: &Agent, id: &str, exec_id: &str) -> Result<ProcessExit, Unknown> {
    match agent.wait(id, exec_id).await {
        Ok(exit) => Ok(exit.into()),
        Err(error) => {
            debug!(container = id, exec_id, %error, "a process's end is not known");
            Err(Unknown::from(&error))
        }
    }
}

/// Kills a process that was created and must not run, with all of its container if it is the
/// container's own process, and waits for its end.
async fn end_unwanted(agent: &Agent, id: &str, exec_id: &str) {
    match agent
        .signal(id, exec_id, SIGKILL.into(), exec_id.is_empty())
        .await
    {
        Ok(()) => drop(wait(agent, id, exec_id).await),
        Err(error) => debug!(container = id, exec_id, %error, "a process is not killed"),
    }
}

/// The exit of a process that could not be created, with a shell's codes.
fn not_started(error: &SandboxError) -> ProcessExit {
    let code = match error.kind() {
        Some(RefusalKind::CommandNotFound) => 127,
        Some(RefusalKind::CommandNotExecutable) => 126,
        _ => 125,
    };
    ProcessExit {
        code,
        exited_at_ns: now_ns(),
        oom_killed: false,
        of_machine: false,
    }
}

fn killed() -> ProcessExit {
    ProcessExit {
        code: KILLED_EXIT_CODE,
        exited_at_ns: now_ns(),
        oom_killed: false,
        of_machine: false,
    }
}

fn ended_with_machine() -> ProcessExit {
    ProcessExit {
        of_machine: true,
        ..killed()
    }
}

#[cfg(test)]
impl Container {
    /// A container that was just created, and the guest's end of its output.
    pub(super) fn sample(id: &str) -> (Arc<Self>, std::os::unix::net::UnixStream) {
        use super::super::stdio::{GuestStreams, StreamSet};
        use super::super::types::RestartPolicy;

        let (guest, output) = std::os::unix::net::UnixStream::pair().unwrap();
        let streams = GuestStreams {
            input: None,
            output: Some(Arc::new(output)),
            errors: None,
        };
        let streams = ContainerStreams::start(streams, None, false, false).unwrap();
        let set = StreamSet {
            stdin: false,
            stdout: true,
            stderr: false,
        };
        let processes = Processes::new(RestartPolicy::Never, set, None);
        let container = Self::new(id.to_owned(), 1, streams, processes, None);
        (Arc::new(container), guest)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream as StdUnixStream;

    use podvisor_agent_protocol::AgentError;
    use podvisor_agent_protocol::api::SignalProcessRequest;
    use ttrpc::Request;
    use ttrpc::proto::{Codec as _, Message};

    use super::super::super::agent::Mux;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_program_is_killed_when_its_grace_period_is_over_though_its_guest_does_not_answer() {
        let (ours, theirs) = StdUnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let mut guest = tokio::net::UnixStream::from_std(theirs).unwrap();
        let agent = Agent::connect(Mux::to(ours)).await.unwrap();
        let (container, _output) = Container::sample("c");
        let grace = Duration::from_secs(1000);
        let begin = Instant::now();
        container.stop(&agent, 15, grace).unwrap();
        for (signal, all, at) in [(15, false, Duration::ZERO), (SIGKILL.into(), true, grace)] {
            let request = Message::<Request>::read_from(&mut guest).await.unwrap();
            let sent = SignalProcessRequest::decode(&request.payload.payload).unwrap();
            assert_eq!((sent.signal, sent.all), (signal, all));
            let after = begin.elapsed();
            assert!(
                (at..at + Duration::from_secs(1)).contains(&after),
                "{after:?}"
            );
        }
    }

    #[test]
    fn a_container_that_is_not_found_was_deleted_and_a_lost_connection_is_the_guests_end() {
        let refused = |kind| Unknown::from(&AgentError::new(kind, "no").into());
        assert_eq!(refused(ErrorKind::NotFound), Unknown::Deleted);
        assert_eq!(refused(ErrorKind::Internal), Unknown::NotTold);
        let closed = LinkError::from(ttrpc::Error::RemoteClosed);
        assert_eq!(Unknown::from(&closed), Unknown::GuestIsLost);
    }
}
