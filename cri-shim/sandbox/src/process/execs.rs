//! Starts of further processes in a container, and the end of those that the guest creates too
//! late: nobody waits for them any more.

use std::sync::Arc;
use std::time::Duration;

use podvisor_agent_protocol::ErrorKind;
use podvisor_host::signal::SIGKILL;
use tokio::time::{sleep, timeout};
use tracing::debug;

use super::super::agent::{Agent, AgentExec, LinkError};
use super::super::error::SandboxError;
use super::super::stdio::{StreamSet, Streams};
use super::super::types::StdioFds;
use super::super::wire::ExecHeader;
use super::container::Container;

/// Delay between attempts to end a process that the guest is still creating.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// How long that is tried: longer than a launch may take in the guest, with those before it.
const PATIENCE: Duration = Duration::from_secs(600);

/// Starts a process and connects its streams.
pub(super) async fn start(
    container: &Arc<Container>,
    agent: &Agent,
    header: ExecHeader,
    files: StdioFds,
) -> Result<(), SandboxError> {
    let streams = Streams::new(StreamSet::of(&files), header.tty)?;
    let exec = AgentExec {
        id: header.id,
        exec_id: header.exec_id.clone(),
        process: header.process,
        user: header.user,
        supplemental_groups: header.supplemental_groups,
        stdio: streams.request(),
    };
    if let Err(error) = agent.exec(exec).await {
        if may_be_created_later(&error) {
            let (agent, id) = (agent.clone(), container.id.clone());
            tokio::spawn(async move { end_late(&agent, &id, &header.exec_id).await });
        }
        return Err(error.into());
    }
    match streams.attach(agent.mux(), files).await {
        Ok(outputs) => {
            container.exec_started(header.exec_id, outputs, agent);
            Ok(())
        }
        Err(error) => {
            // Without streams, the process is of no use.
            container.kill_exec(header.exec_id, agent);
            Err(error.into())
        }
    }
}

/// Returns whether the guest may still create a process though the call for it has failed: there
/// was no answer in time. Where the agent notices that first, it answers with an error that has no
/// kind of its own.
fn may_be_created_later(error: &LinkError) -> bool {
    match error {
        LinkError::Unanswered(_) => true,
        LinkError::Agent(error) => error.kind == ErrorKind::Internal,
        _ => false,
    }
}

/// Kills a process as soon as the guest has created it, and waits for its end, so that the guest
/// can forget it.
async fn end_late(agent: &Agent, id: &str, exec_id: &str) {
    let ended = async {
        loop {
            match agent.signal(id, exec_id, SIGKILL.into(), false).await {
                Ok(()) => break drop(agent.wait(id, exec_id).await),
                Err(error) if is_final(&error) => {
                    break debug!(container = id, exec_id, %error, "no process to end");
                }
                Err(error) => debug!(container = id, exec_id, %error, "will be killed later"),
            }
            sleep(RETRY_DELAY).await;
        }
    };
    if timeout(PATIENCE, ended).await.is_err() {
        debug!(
            container = id,
            exec_id, "a process may be left in the guest"
        );
    }
}

/// Returns whether there is no such process, nor will there be one.
fn is_final(error: &LinkError) -> bool {
    match error {
        LinkError::Agent(error) => error.kind == ErrorKind::NotFound,
        error => error.is_lost(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream as StdUnixStream;

    use futures_util::future::join;
    use oci_spec::runtime::Process;
    use podvisor_agent_protocol::AgentError;
    use podvisor_agent_protocol::api::{SignalProcessRequest, SignalProcessResponse};
    use tokio::net::UnixStream;
    use ttrpc::proto::{Codec as _, Message, MessageHeader};
    use ttrpc::{Request, Response};

    use super::super::super::agent::Mux;
    use super::super::super::types::SupplementalGroups;
    use super::super::super::wire::StdioHeader;
    use super::*;

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

    /// Reads a call that kills the process, and nothing else of its container.
    async fn killed(guest: &mut UnixStream) -> Message<Request> {
        let call = called(guest, "SignalProcess").await;
        let sent = SignalProcessRequest::decode(&call.payload.payload).unwrap();
        let to = (sent.container_id.as_str(), sent.exec_id.as_str());
        assert_eq!(to, ("c", "late"));
        assert_eq!((sent.signal, sent.all), (SIGKILL.into(), false));
        call
    }

    fn refusal(kind: ErrorKind) -> Response {
        let ttrpc::Error::RpcStatus(status) = AgentError::new(kind, "not now").into() else {
            panic!("a refusal has a status");
        };
        Response {
            status: Some(status).into(),
            ..Response::default()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_a_guest_creates_too_late_is_killed() {
        let (ours, guest) = StdUnixStream::pair().unwrap();
        guest.set_nonblocking(true).unwrap();
        let mut guest = UnixStream::from_std(guest).unwrap();
        let agent = Agent::connect(Mux::to(ours)).await.unwrap();
        let (container, _output) = Container::sample("c");
        let header = ExecHeader {
            id: "c".to_owned(),
            exec_id: "late".to_owned(),
            process: Process::default(),
            user: String::new(),
            supplemental_groups: SupplementalGroups::Default,
            tty: None,
            stdio: StdioHeader {
                stdin: false,
                stdout: false,
                stderr: false,
            },
        };
        let started = start(&container, &agent, header, StdioFds::default());
        let ends = async {
            called(&mut guest, "ExecProcess").await;
            // It is still being created, and the next call is not answered.
            let call = killed(&mut guest).await;
            answer(&mut guest, &call, refusal(ErrorKind::WrongState)).await;
            killed(&mut guest).await;
            let call = killed(&mut guest).await;
            let payload = SignalProcessResponse::new().encode().unwrap();
            let done = Response {
                payload,
                ..Response::default()
            };
            answer(&mut guest, &call, done).await;
            called(&mut guest, "WaitProcess").await;
        };
        let both = join(started, ends);
        let (started, ()) = timeout(2 * PATIENCE, both).await.unwrap();
        started.unwrap_err();
    }

    #[test]
    fn only_a_process_that_may_be_created_later_is_looked_for() {
        let unanswered = LinkError::from(ttrpc::Error::Others("timeout".to_owned()));
        let lost = LinkError::from(ttrpc::Error::RemoteClosed);
        let refused = |kind| LinkError::from(AgentError::new(kind, "no"));
        for (error, is_later, is_over) in [
            (unanswered, true, false),
            (refused(ErrorKind::Internal), true, false),
            (refused(ErrorKind::WrongState), false, false),
            (refused(ErrorKind::AlreadyExists), false, false),
            (refused(ErrorKind::NotFound), false, true),
            (lost, false, true),
        ] {
            assert_eq!(may_be_created_later(&error), is_later, "{error}");
            assert_eq!(is_final(&error), is_over, "{error}");
        }
    }
}
