//! The way to the agent in a guest: its ready line, the connections to its ports, its calls.
//!
//! What comes from the guest is checked here and is not trusted: a container may have taken
//! the guest over.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use oci_spec::runtime::{LinuxResources, Process, Spec};
use podvisor_agent_protocol::api::{self, AgentClient};
use podvisor_agent_protocol::{
    AgentError, ExitStatus, InvalidReadyLine, MissingExitStatus, READY_PORT, RPC_PORT, StreamId,
    parse_ready_line,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tracing::debug;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::context::{self, Context};

use super::random;
use super::types::{
    ContainerStats, ContainerUser, GuestNetwork, Interface, ProcessExit, Route, Started,
    SupplementalGroups, TerminalSize,
};

/// Longest answer to `CONNECT`: `OK `, the digits of a u32 and a newline.
const ANSWER_MAX: usize = 3 + 10 + 1;

/// How long a call may take, but for the wait for a process.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);

/// Bytes of entropy that a guest starts with, as many as its generator's state has.
const SEED: usize = 32;

/// Why the agent cannot be reached, or what it refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The socket for the agent's ready line.
    #[error("cannot listen on {}", .path.display())]
    Listen {
        /// The socket.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// Reading the ready line failed.
    #[error("lost the guest's agent while it was starting")]
    ReadyLost(#[source] io::Error),
    /// What came is no ready line.
    #[error(transparent)]
    NotReady(#[from] InvalidReadyLine),
    /// A port in the guest cannot be connected to.
    #[error("cannot connect to port {port} of the guest's agent")]
    Connect {
        /// The vsock port.
        port: u32,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// The agent's own words.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// The agent's answer makes no sense.
    #[error(transparent)]
    Answer(#[from] MissingExitStatus),
    /// A specification that cannot be written as JSON.
    #[error("cannot write the container's specification as JSON")]
    Json(#[source] serde_json::Error),
    /// The host has no random bytes.
    #[error("cannot get random bytes from the kernel")]
    Random(#[source] io::Error),
}

impl From<ttrpc::Error> for LinkError {
    fn from(error: ttrpc::Error) -> Self {
        Self::Agent(error.into())
    }
}

/// The Unix socket through which the guest's vsock ports are reached, and next to which the
/// host's ports are.
#[derive(Debug, Clone)]
pub struct Mux {
    path: PathBuf,
}

impl Mux {
    /// The mux of the sandbox whose sockets are in `dir`.
    pub(super) fn new(dir: &Path) -> Self {
        Self {
            path: dir.join("vsock"),
        }
    }

    /// The socket that the vsock device listens on.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The socket on which the guest reaches `port` of the host.
    fn host_port(&self, port: u32) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(format!("_{port}"));
        PathBuf::from(path)
    }

    /// Connects to a port in the guest.
    pub(super) async fn connect(&self, port: u32) -> Result<UnixStream, LinkError> {
        let connect = async {
            let mut stream = UnixStream::connect(&self.path).await?;
            let request = format!("CONNECT {port}\n");
            stream.write_all(request.as_bytes()).await?;
            read_answer(&mut stream).await?;
            Ok(stream)
        };
        connect
            .await
            .map_err(|source| LinkError::Connect { port, source })
    }
}

/// Reads `OK <port>\n` and not a byte more: what follows is the connection's.
async fn read_answer(stream: &mut UnixStream) -> io::Result<()> {
    let mut answer = Vec::with_capacity(ANSWER_MAX);
    while answer.len() < ANSWER_MAX && answer.last() != Some(&b'\n') {
        // The connection is closed without an answer when nobody listens in the guest.
        answer.push(stream.read_u8().await?);
    }
    let port = answer
        .strip_prefix(b"OK ")
        .and_then(|rest| rest.strip_suffix(b"\n"))
        .and_then(|digits| str::from_utf8(digits).ok())
        .and_then(|digits| digits.parse::<u32>().ok());
    match port {
        Some(_) => Ok(()),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Waits for the agent to say that it can be talked to.
#[derive(Debug)]
pub(super) struct ReadyListener {
    listener: UnixListener,
}

impl ReadyListener {
    /// Listens; to be done before the guest starts.
    pub(super) fn bind(mux: &Mux) -> Result<Self, LinkError> {
        let path = mux.host_port(READY_PORT);
        match UnixListener::bind(&path) {
            Ok(listener) => Ok(Self { listener }),
            Err(source) => Err(LinkError::Listen { path, source }),
        }
    }

    /// Gives the agent once its ready line has come.
    pub(super) async fn agent(self, mux: Mux) -> Result<Agent, LinkError> {
        loop {
            let (mut stream, _) = self.listener.accept().await.map_err(LinkError::ReadyLost)?;
            let mut received = Vec::new();
            loop {
                if parse_ready_line(&received)?.is_some() {
                    return Agent::connect(mux).await;
                }
                let read = stream.read_buf(&mut received).await;
                if read.map_err(LinkError::ReadyLost)? == 0 {
                    // Closed half-way: the agent has to begin anew.
                    break;
                }
            }
        }
    }
}

/// A connection to the agent's service.
#[derive(Clone)]
pub struct Agent {
    client: AgentClient,
    mux: Mux,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent")
            .field("mux", &self.mux)
            .finish_non_exhaustive()
    }
}

fn deadline() -> Context {
    context::with_duration(CALL_TIMEOUT)
}

impl Agent {
    async fn connect(mux: Mux) -> Result<Self, LinkError> {
        let stream = mux.connect(RPC_PORT).await?;
        let client = AgentClient::new(ttrpc::asynchronous::Client::new(Socket::new(stream)));
        debug!("connected to the agent");
        Ok(Self { client, mux })
    }

    /// The way to the guest's ports.
    #[must_use]
    pub fn mux(&self) -> &Mux {
        &self.mux
    }

    /// Tells the guest its name, the time, its network and what is shared with it, and seeds
    /// its random numbers.
    pub(super) async fn configure(&self, guest: &GuestConfig) -> Result<(), LinkError> {
        let entropy: [u8; SEED] = random().map_err(LinkError::Random)?;
        let request = api::ConfigureRequest {
            hostname: guest.hostname.clone(),
            unix_time_ns: now_ns(),
            entropy: entropy.to_vec(),
            interfaces: guest.network.interfaces.iter().map(interface).collect(),
            routes: guest.network.routes.iter().map(route).collect(),
            shares: guest.shares.iter().map(Share::request).collect(),
            sysctls: guest.sysctls.clone().into_iter().collect(),
            ..Default::default()
        };
        self.client.configure(deadline(), &request).await?;
        Ok(())
    }

    /// Makes a container; its process, and who that is.
    ///
    /// # Errors
    /// The agent's refusal, or the guest is gone.
    pub async fn create(
        &self,
        container: AgentContainer,
    ) -> Result<(u32, ContainerUser), LinkError> {
        let request = api::CreateContainerRequest {
            container_id: container.id,
            image_serial: container.image_serial,
            readonly_rootfs: container.readonly_rootfs,
            spec_json: serde_json::to_vec(&container.spec).map_err(LinkError::Json)?,
            user: container.user,
            supplemental_groups: groups(container.supplemental_groups).into(),
            stdio: Some(container.stdio).into(),
            etc_hosts: container.etc_hosts,
            etc_resolv_conf: container.etc_resolv_conf,
            etc_hostname: container.etc_hostname,
            ..Default::default()
        };
        let answer = self.client.create_container(deadline(), &request).await?;
        let user = ContainerUser {
            uid: answer.uid,
            gid: answer.gid,
            groups: answer.additional_gids,
        };
        Ok((answer.pid, user))
    }

    /// Lets a container's process run.
    ///
    /// # Errors
    /// The agent's refusal, or the guest is gone.
    pub async fn start(&self, id: &str) -> Result<Started, LinkError> {
        let request = api::StartContainerRequest {
            container_id: id.to_owned(),
            ..Default::default()
        };
        let answer = self.client.start_container(deadline(), &request).await?;
        Ok(Started {
            pid: answer.pid,
            started_at_ns: answer.started_at_ns,
        })
    }

    /// Starts a further process in a container.
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
        self.client.exec_process(deadline(), &request).await?;
        Ok(())
    }

    /// Waits for the end of a process, however long that takes; an empty `exec_id` means the
    /// container's own.
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
        let answer = self.client.wait_process(no_deadline, &request).await?;
        Ok(AgentExit {
            status: ExitStatus::try_from(&answer)?,
            exited_at_ns: answer.exited_at_ns,
            oom_killed: answer.oom_killed,
        })
    }

    /// Sends a signal to a process, or to all of a container.
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
        self.client.signal_process(deadline(), &request).await?;
        Ok(())
    }

    /// Tells a process's terminal its size.
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
        self.client.resize_terminal(deadline(), &request).await?;
        Ok(())
    }

    /// Kills what is left of a container, and unmounts its image unless another container uses
    /// it.
    pub(super) async fn delete(&self, id: &str) -> Result<(), LinkError> {
        let request = api::DeleteContainerRequest {
            container_id: id.to_owned(),
            ..Default::default()
        };
        self.client.delete_container(deadline(), &request).await?;
        Ok(())
    }

    /// What a container uses.
    pub(super) async fn stats(&self, id: &str) -> Result<ContainerStats, LinkError> {
        let request = api::ContainerStatsRequest {
            container_id: id.to_owned(),
            ..Default::default()
        };
        let answer = self.client.container_stats(deadline(), &request).await?;
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
        self.client
            .update_container_resources(deadline(), &request)
            .await?;
        Ok(())
    }

    /// Connects the stream `stream` to a TCP port of the guest's loopback.
    pub(super) async fn port_forward(&self, stream: StreamId, port: u16) -> Result<(), LinkError> {
        let request = api::PortForwardRequest {
            stream: stream.as_bytes().to_vec(),
            port: port.into(),
            ..Default::default()
        };
        self.client.port_forward(deadline(), &request).await?;
        Ok(())
    }

    /// Ends all containers, writes out what is cached, and powers the guest off.
    pub(super) async fn shutdown(&self) -> Result<(), LinkError> {
        let request = api::ShutdownRequest::default();
        self.client.shutdown(deadline(), &request).await?;
        Ok(())
    }
}

/// What a guest is told about itself.
#[derive(Debug, Clone, Default)]
pub struct GuestConfig {
    /// Its host name.
    pub hostname: String,
    /// Its interfaces and routes.
    pub network: GuestNetwork,
    /// What to mount of the host's.
    pub shares: Vec<Share>,
    /// Kernel parameters by their dotted names.
    pub sysctls: BTreeMap<String, String>,
}

/// A directory of the host's that the guest mounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// The virtio-fs device's tag.
    pub tag: String,
    /// Where in the guest.
    pub path: String,
}

impl Share {
    fn request(&self) -> api::Share {
        api::Share {
            tag: self.tag.clone(),
            path: self.path.clone(),
            ..Default::default()
        }
    }
}

/// A container as the agent is asked for it.
#[derive(Debug)]
pub struct AgentContainer {
    /// Its name.
    pub id: String,
    /// The serial number of the disk that its image is on.
    pub image_serial: String,
    /// Writes to the root filesystem are refused.
    pub readonly_rootfs: bool,
    /// The specification.
    pub spec: Spec,
    /// `user[:group]`; empty: as the specification says.
    pub user: String,
    /// Which of the image's groups the process gets.
    pub supplemental_groups: SupplementalGroups,
    /// Its streams; see [`Streams::request`](super::Streams::request).
    pub stdio: api::Stdio,
    /// `/etc/hosts`; empty: the image's.
    pub etc_hosts: Vec<u8>,
    /// `/etc/resolv.conf`; empty: the image's.
    pub etc_resolv_conf: Vec<u8>,
    /// `/etc/hostname`; empty: the image's.
    pub etc_hostname: Vec<u8>,
}

/// A further process as the agent is asked for it.
#[derive(Debug)]
pub(super) struct AgentExec {
    pub(super) id: String,
    pub(super) exec_id: String,
    pub(super) process: Process,
    pub(super) user: String,
    pub(super) supplemental_groups: SupplementalGroups,
    pub(super) stdio: api::Stdio,
}

/// How a process ended, with the signal told apart from an exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgentExit {
    /// Its exit code or the signal that killed it.
    pub status: ExitStatus,
    /// Nanoseconds since 1970-01-01 UTC by the guest's clock.
    pub exited_at_ns: u64,
    /// The guest had no memory left for it.
    pub oom_killed: bool,
}

impl From<AgentExit> for ProcessExit {
    fn from(exit: AgentExit) -> Self {
        Self {
            code: exit.status.shell_code().into(),
            exited_at_ns: exit.exited_at_ns,
            oom_killed: exit.oom_killed,
        }
    }
}

/// Nanoseconds since 1970; 0 for a clock before that, or after 2554, which is not worth
/// passing on.
pub(super) fn now_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.ok().and_then(|t| u64::try_from(t.as_nanos()).ok());
    now.unwrap_or(0)
}

fn interface(interface: &Interface) -> api::Interface {
    let mac: Vec<String> = interface.mac.iter().map(|b| format!("{b:02x}")).collect();
    api::Interface {
        mac: mac.join(":"),
        name: interface.name.clone(),
        addresses: interface.addresses.clone(),
        mtu: interface.mtu.into(),
        ..Default::default()
    }
}

fn route(route: &Route) -> api::Route {
    api::Route {
        destination: route.destination.clone(),
        gateway: route.gateway.clone().unwrap_or_default(),
        interface: route.interface.clone(),
        ..Default::default()
    }
}

fn groups(groups: SupplementalGroups) -> api::SupplementalGroups {
    match groups {
        SupplementalGroups::Default => api::SupplementalGroups::SUPPLEMENTAL_GROUPS_UNSPECIFIED,
        SupplementalGroups::Merge => api::SupplementalGroups::SUPPLEMENTAL_GROUPS_MERGE,
        SupplementalGroups::Strict => api::SupplementalGroups::SUPPLEMENTAL_GROUPS_STRICT,
    }
}

fn stats(answer: &api::ContainerStatsResponse) -> ContainerStats {
    let (cpu, memory) = (&answer.cpu, &answer.memory);
    let (pids, io) = (&answer.pids, &answer.io);
    ContainerStats {
        timestamp_ns: answer.timestamp_ns,
        cpu_usage_us: cpu.usage_us,
        cpu_user_us: cpu.user_us,
        cpu_system_us: cpu.system_us,
        cpu_throttled_us: cpu.throttled_us,
        memory_usage_bytes: memory.usage_bytes,
        memory_working_set_bytes: memory.working_set_bytes,
        memory_limit_bytes: memory.limit_bytes,
        memory_anon_bytes: memory.anon_bytes,
        memory_file_bytes: memory.file_bytes,
        page_faults: memory.page_faults,
        major_page_faults: memory.major_page_faults,
        oom_kills: memory.oom_kills,
        pids_current: pids.current,
        pids_limit: pids.limit,
        io_read_bytes: io.read_bytes,
        io_write_bytes: io.write_bytes,
        io_read_operations: io.read_operations,
        io_write_operations: io.write_operations,
    }
}

/// What `/etc/hosts` says in a container that has no other.
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
    use podvisor_agent_protocol::ready_line;
    use tokio::runtime::Builder;

    use super::*;

    fn run<T>(future: impl Future<Output = T>) -> T {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(future)
    }

    /// A mux in `folder` whose guest answers `answer` to what it is sent.
    fn guest(folder: &Path, answer: &'static [u8]) -> (Mux, tokio::task::JoinHandle<Vec<u8>>) {
        let mux = Mux {
            path: folder.join("vsock"),
        };
        let listener = UnixListener::bind(mux.path()).unwrap();
        let served = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; "CONNECT 1026\n".len()];
            stream.read_exact(&mut request).await.unwrap();
            stream.write_all(answer).await.unwrap();
            request
        });
        (mux, served)
    }

    #[test]
    fn a_connection_begins_right_behind_the_answer() {
        let folder = tempfile::tempdir().unwrap();
        run(async {
            let (mux, served) = guest(folder.path(), b"OK 1073741824\nhello");
            let mut stream = mux.connect(1026).await.unwrap();
            assert_eq!(served.await.unwrap(), b"CONNECT 1026\n");
            let mut rest = String::new();
            stream.read_to_string(&mut rest).await.unwrap();
            assert_eq!(rest, "hello");
        });
    }

    #[test]
    fn other_answers_are_refused_and_bounded() {
        for answer in [
            b"".as_slice(),
            b"OK",
            b"NO 1\n",
            b"OK x\n",
            b"OK 99999999999999999999999999\n",
        ] {
            let folder = tempfile::tempdir().unwrap();
            run(async {
                let (mux, _served) = guest(folder.path(), answer);
                let refused = mux.connect(1026).await;
                assert!(matches!(
                    refused,
                    Err(LinkError::Connect { port: 1026, .. })
                ));
            });
        }
    }

    #[test]
    fn a_ready_line_may_come_in_pieces_and_after_a_lost_connection() {
        let folder = tempfile::tempdir().unwrap();
        run(async {
            let (mux, served) = guest(folder.path(), b"OK 1\n");
            let listener = ReadyListener::bind(&mux).unwrap();
            let path = mux.host_port(READY_PORT);
            let speak = tokio::spawn(async move {
                drop(UnixStream::connect(&path).await.unwrap());
                let mut stream = UnixStream::connect(&path).await.unwrap();
                for byte in ready_line().bytes() {
                    stream.write_all(&[byte]).await.unwrap();
                    tokio::task::yield_now().await;
                }
            });
            listener.agent(mux).await.unwrap();
            speak.await.unwrap();
            assert_eq!(served.await.unwrap(), b"CONNECT 1025\n");
        });
    }

    #[test]
    fn another_line_than_the_agents_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        run(async {
            let (mux, _served) = guest(folder.path(), b"");
            let listener = ReadyListener::bind(&mux).unwrap();
            let mut stream = UnixStream::connect(mux.host_port(READY_PORT))
                .await
                .unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\n").await.unwrap();
            let refused = listener.agent(mux).await;
            assert!(matches!(refused, Err(LinkError::NotReady(_))));
        });
    }
}
