//! The RPC service: checks what a request says, and has it done.
//!
//! A call that the host gives up by closing its connection is dropped at its next wait;
//! what must not stop half-way runs to its end anyway (see [`Containers`]).

use async_trait::async_trait;
use podvisor_agent_protocol::api::{self, Agent};
use podvisor_agent_protocol::{AgentError, ErrorKind, limits};
use rustix::time::{ClockId, Timespec, clock_settime};
use ttrpc::asynchronous::TtrpcContext;

use crate::container::launch::terminal_size;
use crate::container::{ContainerError, Containers};
use crate::init::power;
use crate::init::reaper::Reaper;
use crate::stdio::Hub;

/// Seconds until 2262, where nanoseconds leave 63 bits.
const MAX_TIME_NS: u64 = i64::MAX.unsigned_abs();

/// Answers the host.
#[derive(Debug)]
pub struct Service {
    containers: Containers,
}

impl Service {
    /// A service without containers.
    #[must_use]
    pub fn new(reaper: Reaper, hub: Hub) -> Self {
        Self {
            containers: Containers::new(reaper, hub),
        }
    }
}

fn invalid(message: &str) -> ttrpc::Error {
    AgentError::new(ErrorKind::InvalidArgument, message).into()
}

fn answer<T>(result: Result<T, ContainerError>) -> ttrpc::Result<T> {
    result.map_err(|error| {
        let error = AgentError::from(error);
        tracing::info!(kind = ?error.kind, message = error.message, "request failed");
        error.into()
    })
}

fn done<T>(action: &str, result: std::io::Result<T>) -> ttrpc::Result<T> {
    result.map_err(|error| {
        AgentError::new(ErrorKind::Internal, format!("cannot {action}: {error}")).into()
    })
}

fn signal_number(signal: u32) -> ttrpc::Result<u8> {
    match u8::try_from(signal) {
        Ok(signal @ 1..=64) => Ok(signal),
        _ => Err(invalid("a signal's number is 1 to 64")),
    }
}

#[async_trait]
impl Agent for Service {
    async fn configure(
        &self,
        _: &TtrpcContext,
        request: api::ConfigureRequest,
    ) -> ttrpc::Result<api::ConfigureResponse> {
        // All is checked before anything is changed.
        let name = request.hostname.as_bytes();
        let name_fits = name.len() <= limits::HOSTNAME_BYTES
            && name
                .iter()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_'));
        if !name_fits {
            return Err(invalid(
                "a host name is 1 to 64 letters, digits, '-', '.' or '_'",
            ));
        }
        if request.entropy.len() > limits::ENTROPY_BYTES {
            return Err(invalid("a seed is at most 512 bytes"));
        }
        if request.unix_time_ns > MAX_TIME_NS {
            return Err(invalid("the time is past 2262"));
        }
        if !name.is_empty() {
            done(
                "set the host name",
                rustix::system::sethostname(name).map_err(Into::into),
            )?;
        }
        if request.unix_time_ns > 0 {
            let time = timespec(request.unix_time_ns);
            let set = clock_settime(ClockId::Realtime, time).map_err(Into::into);
            done("set the clock", set)?;
        }
        if !request.entropy.is_empty() {
            done("add entropy", crate::sys::add_entropy(&request.entropy))?;
        }
        Ok(api::ConfigureResponse::new())
    }

    async fn create_container(
        &self,
        _: &TtrpcContext,
        request: api::CreateContainerRequest,
    ) -> ttrpc::Result<api::CreateContainerResponse> {
        let pid = answer(self.containers.create(request).await)?;
        Ok(api::CreateContainerResponse {
            pid,
            ..Default::default()
        })
    }

    async fn start_container(
        &self,
        _: &TtrpcContext,
        request: api::StartContainerRequest,
    ) -> ttrpc::Result<api::StartContainerResponse> {
        answer(self.containers.start(&request.container_id))?;
        Ok(api::StartContainerResponse::new())
    }

    async fn exec_process(
        &self,
        _: &TtrpcContext,
        request: api::ExecProcessRequest,
    ) -> ttrpc::Result<api::ExecProcessResponse> {
        let pid = answer(self.containers.exec(request).await)?;
        Ok(api::ExecProcessResponse {
            pid,
            ..Default::default()
        })
    }

    async fn signal_process(
        &self,
        _: &TtrpcContext,
        request: api::SignalProcessRequest,
    ) -> ttrpc::Result<api::SignalProcessResponse> {
        let signal = signal_number(request.signal)?;
        let (id, exec_id) = (&request.container_id, &request.exec_id);
        answer(match (request.all, exec_id.is_empty()) {
            (true, true) => self.containers.signal_all(id, signal),
            (true, false) => return Err(invalid("`all` is for containers: leave exec_id empty")),
            (false, _) => self.containers.signal(id, exec_id, signal),
        })?;
        Ok(api::SignalProcessResponse::new())
    }

    async fn wait_process(
        &self,
        _: &TtrpcContext,
        request: api::WaitProcessRequest,
    ) -> ttrpc::Result<api::WaitProcessResponse> {
        let ended = answer(
            self.containers
                .wait(&request.container_id, &request.exec_id)
                .await,
        )?;
        Ok(api::WaitProcessResponse {
            status: Some(ended.exit.status.into()),
            exited_at_ns: ended.exit.at_ns,
            oom_killed: ended.oom_killed,
            ..Default::default()
        })
    }

    async fn resize_terminal(
        &self,
        _: &TtrpcContext,
        request: api::ResizeTerminalRequest,
    ) -> ttrpc::Result<api::ResizeTerminalResponse> {
        let size = terminal_size(request.columns, request.rows)
            .ok_or_else(|| invalid("a terminal has 1 to 65535 columns and rows"))?;
        answer(
            self.containers
                .resize(&request.container_id, &request.exec_id, size),
        )?;
        Ok(api::ResizeTerminalResponse::new())
    }

    async fn delete_container(
        &self,
        _: &TtrpcContext,
        request: api::DeleteContainerRequest,
    ) -> ttrpc::Result<api::DeleteContainerResponse> {
        answer(self.containers.delete(&request.container_id).await)?;
        Ok(api::DeleteContainerResponse::new())
    }

    async fn list_containers(
        &self,
        _: &TtrpcContext,
        _: api::ListContainersRequest,
    ) -> ttrpc::Result<api::ListContainersResponse> {
        let containers = self.containers.list();
        Ok(api::ListContainersResponse {
            containers,
            ..Default::default()
        })
    }

    async fn container_stats(
        &self,
        _: &TtrpcContext,
        request: api::ContainerStatsRequest,
    ) -> ttrpc::Result<api::ContainerStatsResponse> {
        answer(self.containers.stats(&request.container_id))
    }

    async fn shutdown(
        &self,
        _: &TtrpcContext,
        _: api::ShutdownRequest,
    ) -> ttrpc::Result<api::ShutdownResponse> {
        let containers = self.containers.clone();
        // Apart from this call, so that a host that hangs up at once gets its way too.
        let ended = tokio::spawn(async move { containers.delete_all().await });
        tokio::spawn(async move {
            // A task that ends by panic has powered the guest off already.
            let _ = ended.await;
            // Let the answer out first. It is sent by another task of this thread, which has
            // its turn before this one has had a few; the host does not depend on it.
            for _ in 0..TURNS_FOR_THE_ANSWER {
                tokio::task::yield_now().await;
            }
            power::off();
        });
        Ok(api::ShutdownResponse::new())
    }
}

/// Tasks between an answer and its write to the socket, with room to spare.
const TURNS_FOR_THE_ANSWER: usize = 16;

fn timespec(unix_time_ns: u64) -> Timespec {
    const NS_PER_S: u64 = 1_000_000_000;
    // Both fit: the time is below 2⁶³ ns.
    Timespec {
        tv_sec: i64::try_from(unix_time_ns / NS_PER_S).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(unix_time_ns % NS_PER_S).unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_numbers_are_those_of_linux() {
        assert_eq!(signal_number(1).unwrap(), 1);
        assert_eq!(signal_number(64).unwrap(), 64);
        for bad in [0, 65, 265, u32::MAX] {
            assert!(signal_number(bad).is_err());
        }
    }

    #[test]
    fn times_are_split_into_seconds_and_nanoseconds() {
        let time = timespec(1_700_000_000_123_456_789);
        assert_eq!((time.tv_sec, time.tv_nsec), (1_700_000_000, 123_456_789));
        assert_eq!(timespec(MAX_TIME_NS).tv_sec, 9_223_372_036);
    }
}
