//! The client of the agent in a guest: the connections to its ports and its ready line are in
//! `link`, the forms of its messages in `message`.
//!
//! Data from the guest is checked here and is not trusted: a container may have taken the guest
//! over.

#[cfg(test)]
mod clock_tests;
mod link;
mod message;

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use oci_spec::runtime::LinuxResources;
use podvisor_agent_protocol::api::{self, AgentClient};
use podvisor_agent_protocol::{ClockBracket, ExitStatus, REQUEST_METADATA, RPC_PORT, StreamId};
use podvisor_host::request;
use tokio::sync::Notify;
use tokio::time::timeout;
use tracing::debug;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::context::{self, Context};

use super::random::random;
use super::types::{ContainerStats, ContainerUser, Started, TerminalSize};
pub(super) use link::Ready;
pub use link::{LinkError, Mux};
pub(super) use message::AgentExec;
pub use message::{AgentContainer, AgentExit, GuestConfig, Share};
use message::{groups, interface, neighbour, route, stats};

/// Timeout of a call, except for waiting for a process.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);

/// How much longer a call may take until it is sent and answered: [`CALL_TIMEOUT`] begins when it
/// is sent, and a guest that reads nothing holds up calls before that.
const SEND_MARGIN: Duration = Duration::from_secs(1);

/// The maximum of readings of the guest's clock, and the duration of one that is good enough.
const CLOCK_READINGS: usize = 5;
const CLOCK_READING_NS: i128 = 2_000_000;

/// Bytes of entropy that a guest starts with: the size of its generator's state.
const SEED_BYTES: usize = 32;

/// A connection to the agent's service.
#[derive(Clone)]
pub struct Agent {
    client: AgentClient,
    mux: Mux,
    /// Notified when the connection has ended.
    lost: Arc<Notify>,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent")
            .field("mux", &self.mux)
            .finish_non_exhaustive()
    }
}

/// The most groups that Linux gives a process (`NGROUPS_MAX`).
pub(super) const GROUPS_MAX: usize = 65_536;

fn deadline() -> Context {
    let mut context = context::with_duration(CALL_TIMEOUT);
    if let Some(number) = request::current() {
        context.set(REQUEST_METADATA.to_owned(), vec![number.to_string()]);
    }
    context
}

impl Agent {
    pub(super) async fn connect(mux: Mux) -> Result<Self, LinkError> {
        let stream = mux.connect(RPC_PORT).await?;
        let client = AgentClient::new(ttrpc::asynchronous::Client::new(Socket::new(stream)));
        debug!("connected to the agent");
        let lost = Arc::default();
        Ok(Self { client, mux, lost })
    }

    /// Returns when a call has found that the connection has ended.
    pub(super) async fn lost(&self) {
        self.lost.notified().await;
    }

    /// Returns the result of a call, whether or not the guest takes it.
    async fn answer<T>(
        &self,
        call: impl Future<Output = ttrpc::Result<T>>,
    ) -> Result<T, LinkError> {
        match timeout(CALL_TIMEOUT + SEND_MARGIN, self.event(call)).await {
            Ok(answer) => answer,
            Err(_) => {
                let error = "the guest does not read its calls".to_owned();
                Err(LinkError::Unanswered(ttrpc::Error::Others(error)))
            }
        }
    }

    /// As [`Self::answer`], without a time limit. All calls go through here, so that each of them
    /// can notice that the connection has ended.
    async fn event<T>(&self, call: impl Future<Output = ttrpc::Result<T>>) -> Result<T, LinkError> {
        let answer = call.await.map_err(LinkError::from);
        answer.inspect_err(|error| {
            if error.is_lost() {
                self.lost.notify_one();
            }
        })
    }

    /// Returns the connector to the guest's ports.
    #[must_use]
    pub fn mux(&self) -> &Mux {
        &self.mux
    }

    /// Sets the guest's host name, time, network and shared directories, and seeds its random
    /// number generator. `present_macs` are the addresses that its cards have until then, if they
    /// differ.
    pub(super) async fn configure(
        &self,
        guest: &GuestConfig,
        present_macs: &[[u8; 6]],
    ) -> Result<(), LinkError> {
        let present = present_macs.iter().copied().map(Some);
        let present = present.chain(std::iter::repeat(None));
        let interfaces = guest.network.interfaces.iter().zip(present);
        let entropy: [u8; SEED_BYTES] = random().map_err(LinkError::Random)?;
        let request = api::ConfigureRequest {
            hostname: guest.hostname.clone(),
            unix_time_ns: now_ns(),
            entropy: entropy.to_vec(),
            interfaces: interfaces.map(|(it, mac)| interface(it, mac)).collect(),
            routes: guest.network.routes.iter().map(route).collect(),
            neighbours: guest.network.neighbours.iter().map(neighbour).collect(),
            shares: guest.shares.iter().map(Share::request).collect(),
            sysctls: guest.sysctls.clone().into_iter().collect(),
            ..Default::default()
        };
        let call = self.client.configure(deadline(), &request);
        self.answer(call).await?;
        Ok(())
    }

    /// Waits for an answer, whatever its contents.
    pub(super) async fn ping(&self) -> Result<(), LinkError> {
        let request = api::ListContainersRequest::default();
        let call = self.client.list_containers(deadline(), &request);
        self.answer(call).await?;
        Ok(())
    }

    /// Creates a container; returns its process's pid and user.
    ///
    /// # Errors
    /// The agent's refusal, or the guest is gone.
    pub async fn create(
        &self,
        container: AgentContainer,
    ) -> Result<(u32, ContainerUser), LinkError> {
        let config = container.config;
        let request = api::CreateContainerRequest {
            container_id: config.id,
            image_serial: container.image_serial,
            readonly_rootfs: config.readonly_rootfs,
            spec_json: serde_json::to_vec(&config.spec).map_err(LinkError::Json)?,
            user: config.user,
            supplemental_groups: groups(config.supplemental_groups).into(),
            stdio: Some(container.stdio).into(),
            devices: container.devices,
            guest_devices: config.guest_devices,
            etc_hosts: config.etc_hosts,
            etc_resolv_conf: config.etc_resolv_conf,
            etc_hostname: config.etc_hostname,
            ..Default::default()
        };
        let call = self.client.create_container(deadline(), &request);
        let mut answer = self.answer(call).await?;
        answer.additional_gids.truncate(GROUPS_MAX);
        let user = ContainerUser {
            uid: answer.uid,
            gid: answer.gid,
            groups: answer.additional_gids,
        };
        Ok((answer.pid, user))
    }

    /// Starts a container's process.
    ///
    /// # Errors
    /// The agent's refusal, or the guest is gone.
    pub async fn start(&self, id: &str) -> Result<Started, LinkError> {
        let request = api::StartContainerRequest {
            container_id: id.to_owned(),
            ..Default::default()
        };
        let call = self.client.start_container(deadline(), &request);
        let answer = self.answer(call).await?;
        Ok(Started {
            pid: answer.pid,
            started_at_ns: answer.started_at_ns,
        })
    }

    /// Creates a container's process again, after it has ended; it waits for the start.
    pub(super) async fn restart(&self, id: &str, stdio: api::Stdio) -> Result<u32, LinkError> {
        let request = api::RestartContainerRequest {
            container_id: id.to_owned(),
            stdio: Some(stdio).into(),
            ..Default::default()
        };
        let call = self.client.restart_container(deadline(), &request);
        let answer = self.answer(call).await?;
        Ok(answer.pid)
    }

    /// Starts another process in a container.
    pub(super) async fn exec(&self, exec: AgentExec) -> Result<(), LinkError> {
        let request = api::ExecProcessRequest {
            container_id: exec.id,
            exec_id: exec.exec_id,
            process_json: serde_json::to_vec(&exec.process).map_err(LinkError::Json)?,
            user: exec.user,
            supplemental_groups: groups(exec.supplemental_groups).into(),
            stdio: Some(exec.stdio).into(),
            ..Default::default()
        };
        let call = self.client.exec_process(deadline(), &request);
        self.answer(call).await?;
        Ok(())
    }

    /// Waits until a process ends, without a time limit; an empty `exec_id` means the container's
    /// own.
    ///
    /// # Errors
    /// The agent's refusal, or the guest is gone.
    pub async fn wait(&self, id: &str, exec_id: &str) -> Result<AgentExit, LinkError> {
        let request = api::WaitProcessRequest {
            container_id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            ..Default::default()
        };
        let no_deadline = Context::default();
        let call = self.client.wait_process(no_deadline, &request);
        let answer = self.event(call).await?;
        Ok(AgentExit {
            status: ExitStatus::try_from(&answer)?,
            exited_at_ns: answer.exited_at_ns,
            oom_killed: answer.oom_killed,
        })
    }

    /// Sends a signal to a process, or to all processes of a container.
    ///
    /// # Errors
    /// The agent's refusal, or the guest is gone.
    pub async fn signal(
        &self,
        id: &str,
        exec_id: &str,
        signal: u32,
        all: bool,
    ) -> Result<(), LinkError> {
        let request = api::SignalProcessRequest {
            container_id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            signal,
            all,
            ..Default::default()
        };
        let call = self.client.signal_process(deadline(), &request);
        self.answer(call).await?;
        Ok(())
    }

    /// Sets the size of a process's terminal.
    ///
    /// # Errors
    /// The agent's refusal, or the guest is gone.
    pub async fn resize(
        &self,
        id: &str,
        exec_id: &str,
        size: TerminalSize,
    ) -> Result<(), LinkError> {
        let request = api::ResizeTerminalRequest {
            container_id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            columns: size.columns.into(),
            rows: size.rows.into(),
            ..Default::default()
        };
        let call = self.client.resize_terminal(deadline(), &request);
        self.answer(call).await?;
        Ok(())
    }

    /// Kills what is left of a container, and unmounts its image unless another container uses
    /// it.
    pub(super) async fn delete(&self, id: &str) -> Result<(), LinkError> {
        let request = api::DeleteContainerRequest {
            container_id: id.to_owned(),
            ..Default::default()
        };
        let call = self.client.delete_container(deadline(), &request);
        self.answer(call).await?;
        Ok(())
    }

    /// Frees what a container holds whose process has ended permanently.
    pub(super) async fn release(&self, id: &str) -> Result<(), LinkError> {
        let request = api::ReleaseContainerRequest {
            container_id: id.to_owned(),
            ..Default::default()
        };
        let call = self.client.release_container(deadline(), &request);
        self.answer(call).await?;
        Ok(())
    }

    /// Makes the guest look for devices that were plugged in.
    pub(super) async fn scan_devices(&self) -> Result<(), LinkError> {
        let request = api::ScanDevicesRequest::default();
        let call = self.client.scan_devices(deadline(), &request);
        self.answer(call).await?;
        Ok(())
    }

    /// Makes the guest release a device that is to be unplugged.
    pub(super) async fn remove_device(&self, address: &str) -> Result<(), LinkError> {
        let request = api::RemoveDevicesRequest {
            addresses: vec![address.to_owned()],
            ..Default::default()
        };
        let call = self.client.remove_devices(deadline(), &request);
        self.answer(call).await?;
        Ok(())
    }

    /// Returns a container's resource usage; `brief` leaves out the more expensive figures.
    pub(super) async fn stats(&self, id: &str, brief: bool) -> Result<ContainerStats, LinkError> {
        let request = api::ContainerStatsRequest {
            container_id: id.to_owned(),
            brief,
            ..Default::default()
        };
        let call = self.client.container_stats(deadline(), &request);
        let answer = self.answer(call).await?;
        Ok(stats(&answer))
    }

    /// Changes a container's limits.
    pub(super) async fn update_resources(
        &self,
        id: &str,
        resources: &LinuxResources,
    ) -> Result<(), LinkError> {
        let request = api::UpdateContainerResourcesRequest {
            container_id: id.to_owned(),
            resources_json: serde_json::to_vec(resources).map_err(LinkError::Json)?,
            ..Default::default()
        };
        let call = self.client.update_container_resources(deadline(), &request);
        self.answer(call).await?;
        Ok(())
    }

    /// Connects the stream `stream` to a TCP port of the guest's loopback.
    pub(super) async fn port_forward(&self, stream: StreamId, port: u16) -> Result<(), LinkError> {
        let request = api::PortForwardRequest {
            stream: stream.as_bytes().to_vec(),
            port: port.into(),
            ..Default::default()
        };
        let call = self.client.port_forward(deadline(), &request);
        self.answer(call).await?;
        Ok(())
    }

    /// Sets the guest's clock, unless it follows the host's by itself. The duration of the calls
    /// does not affect its accuracy.
    pub(super) async fn set_clock(&self) -> Result<(), LinkError> {
        let mut best = None;
        for _ in 0..CLOCK_READINGS {
            let before = now_ns();
            let request = api::ReadClockRequest::default();
            let call = self.client.read_clock(deadline(), &request);
            let guest = self.answer(call).await?;
            if guest.follows_host {
                return Ok(());
            }
            let bracket = ClockBracket {
                before: before.into(),
                other: guest.unix_time_ns.into(),
                after: now_ns().into(),
            };
            best = ClockBracket::narrower(best, bracket);
            if best.is_some_and(|best| best.width() <= CLOCK_READING_NS) {
                break;
            }
        }
        // The host's clock was set back during each reading.
        let Some(best) = best else { return Ok(()) };
        let request = api::SetClockRequest {
            gain_ns: lacks(best),
            ..Default::default()
        };
        let call = self.client.set_clock(deadline(), &request);
        self.answer(call).await?;
        Ok(())
    }

    /// Makes the guest forget files that it does not use.
    pub(super) async fn forget_files(&self) -> Result<(), LinkError> {
        let request = api::ForgetFilesRequest::default();
        let call = self.client.forget_files(deadline(), &request);
        self.answer(call).await?;
        Ok(())
    }

    /// Waits until the guest's containers run short of memory, without a time limit.
    pub(super) async fn await_pressure(&self) -> Result<(), LinkError> {
        let request = api::AwaitPressureRequest::default();
        let no_deadline = Context::default();
        let call = self.client.await_pressure(no_deadline, &request);
        self.event(call).await?;
        Ok(())
    }

    /// Makes the guest use its first `count` CPUs.
    pub(super) async fn set_cpus(&self, count: u8) -> Result<(), LinkError> {
        let request = api::SetCpusRequest {
            count: count.into(),
            ..Default::default()
        };
        let call = self.client.set_cpus(deadline(), &request);
        self.answer(call).await?;
        Ok(())
    }

    /// Ends all containers, writes out cached data, and powers the guest off.
    pub(super) async fn shutdown(&self) -> Result<(), LinkError> {
        let request = api::ShutdownRequest::default();
        let call = self.client.shutdown(deadline(), &request);
        self.answer(call).await?;
        Ok(())
    }
}

/// Returns what the guest's clock is to gain, by a reading of it between two of the host's.
fn lacks(reading: ClockBracket) -> i64 {
    let ahead = reading.behind();
    i64::try_from(-ahead).unwrap_or(if ahead > 0 { i64::MIN } else { i64::MAX })
}

/// Returns the nanoseconds since 1970; 0 for a clock before that, or after 2554, which is not worth
/// passing on.
pub(super) fn now_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.ok().and_then(|t| u64::try_from(t.as_nanos()).ok());
    now.unwrap_or(0)
}

/// Returns the default `/etc/hosts` of a container.
#[must_use]
pub fn etc_hosts(hostname: &str) -> String {
    format!(
        "127.0.0.1\tlocalhost\n\
         ::1\tlocalhost ip6-localhost ip6-loopback\n\
         127.0.1.1\t{hostname}\n"
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream as StdUnixStream;

    use futures_util::future::join_all;

    use super::*;

    /// An agent whose guest has closed the connection.
    async fn closed() -> Agent {
        let (ours, theirs) = StdUnixStream::pair().unwrap();
        drop(theirs);
        Agent::connect(Mux::to(ours)).await.unwrap()
    }

    #[test]
    fn a_guests_clock_gains_what_it_lacks_of_the_hosts() {
        let lacks = |before, other, after| {
            lacks(ClockBracket {
                before,
                other,
                after,
            })
        };
        // Whatever the duration of the reading.
        assert_eq!(lacks(1_000, 1_500, 300_000_000), 0);
        assert_eq!(lacks(1_000, 400, 1_010), 600);
        assert_eq!(lacks(1_000, 1_110, 1_010), -100);
        let latest = i128::from(u64::MAX);
        assert_eq!(lacks(latest, 0, latest), i64::MAX);
        assert_eq!(lacks(0, latest, 0), i64::MIN);
    }

    /// More calls than wait to be sent at the same time.
    const MANY: usize = 1000;

    #[tokio::test(start_paused = true)]
    async fn no_call_waits_for_ever_for_a_guest_that_does_not_read() {
        let (ours, _theirs) = StdUnixStream::pair().unwrap();
        let agent = Agent::connect(Mux::to(ours)).await.unwrap();
        // Together more than the connection takes.
        let id = "c".repeat(4 << 10);
        let calls = (0..MANY).map(|_| agent.stats(&id, true));
        let answers = timeout(2 * CALL_TIMEOUT, join_all(calls)).await.unwrap();
        for answer in answers {
            assert!(
                matches!(answer, Err(LinkError::Unanswered(_))),
                "{answer:?}"
            );
        }
    }

    #[tokio::test]
    async fn a_connection_that_has_ended_is_noticed_whatever_is_asked() {
        let agent = closed().await;
        assert!(agent.set_clock().await.unwrap_err().is_lost());
        agent.lost().await;
        assert!(agent.await_pressure().await.unwrap_err().is_lost());
        agent.lost().await;
        assert!(agent.wait("c", "").await.unwrap_err().is_lost());
        agent.lost().await;
    }
}
