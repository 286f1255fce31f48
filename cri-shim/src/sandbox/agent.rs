//! The way to the agent in a guest: its ready line, the connections to its ports, its calls.
//!
//! What comes from the guest is checked here and is not trusted: a container may have taken
//! the guest over.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use podvisor_agent_protocol::api::{self, AgentClient};
use podvisor_agent_protocol::{
    AgentError, ExitStatus, InvalidReadyLine, MissingExitStatus, READY_PORT, RPC_PORT,
    parse_ready_line,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tracing::debug;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::context::{self, Context};

use super::spec::{ContainerSpec, TerminalSize};
use super::{random, rundir::RunDir};

/// Longest answer to `CONNECT`: `OK `, the digits of a u32 and a newline.
const ANSWER_MAX: usize = 3 + 10 + 1;

/// How long a call may take, but for the wait for a process.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);

/// Bytes of entropy that a guest starts with, as many as its generator's state has.
const SEED: usize = 32;

/// Why the agent cannot be reached, or what it refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    /// The socket for the agent's ready line.
    #[error("cannot listen on {}", .path.display())]
    Listen {
        /// The socket.
        path: PathBuf,
        /// Why.
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
        /// Why.
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
pub(crate) struct Mux {
    path: PathBuf,
}

impl Mux {
    /// The mux of the sandbox that owns `run`.
    pub(super) fn new(run: &RunDir) -> Self {
        Self {
            path: run.file("vsock"),
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
    pub(crate) async fn connect(&self, port: u32) -> Result<UnixStream, LinkError> {
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
pub(crate) struct Agent {
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

    /// For calls that nothing but tests makes yet.
    #[cfg(test)]
    pub(super) fn client(&self) -> &AgentClient {
        &self.client
    }

    /// The way to the guest's ports.
    pub(crate) fn mux(&self) -> &Mux {
        &self.mux
    }

    /// Tells the guest its name and the time, and seeds its random numbers.
    pub(super) async fn configure(&self, hostname: &str) -> Result<(), LinkError> {
        let entropy: [u8; SEED] = random().map_err(LinkError::Random)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let request = api::ConfigureRequest {
            hostname: hostname.to_owned(),
            // A clock before 1970, or after 2554, is not worth passing on.
            unix_time_ns: now
                .ok()
                .and_then(|t| u64::try_from(t.as_nanos()).ok())
                .unwrap_or(0),
            entropy: entropy.to_vec(),
            ..Default::default()
        };
        self.client.configure(deadline(), &request).await?;
        Ok(())
    }

    /// Makes a container from the image on the block device `serial`.
    pub(crate) async fn create(
        &self,
        id: &str,
        serial: &str,
        hostname: &str,
        container: &ContainerSpec,
        stdio: api::Stdio,
    ) -> Result<(), LinkError> {
        let root = container.spec.root().as_ref();
        let request = api::CreateContainerRequest {
            container_id: id.to_owned(),
            image_serial: serial.to_owned(),
            readonly_rootfs: root.and_then(|root| root.readonly()) == Some(true),
            spec_json: serde_json::to_vec(&container.spec).map_err(LinkError::Json)?,
            user: container.user.clone(),
            stdio: Some(stdio).into(),
            etc_hosts: etc_hosts(hostname).into_bytes(),
            etc_hostname: format!("{hostname}\n").into_bytes(),
            ..Default::default()
        };
        self.client.create_container(deadline(), &request).await?;
        Ok(())
    }

    /// Lets a container's process run.
    pub(crate) async fn start(&self, id: &str) -> Result<(), LinkError> {
        let request = api::StartContainerRequest {
            container_id: id.to_owned(),
            ..Default::default()
        };
        self.client.start_container(deadline(), &request).await?;
        Ok(())
    }

    /// Waits for the end of a container's process, however long that takes.
    pub(crate) async fn wait(&self, id: &str) -> Result<Ended, LinkError> {
        let request = api::WaitProcessRequest {
            container_id: id.to_owned(),
            ..Default::default()
        };
        let no_deadline = Context::default();
        let answer = self.client.wait_process(no_deadline, &request).await?;
        Ok(Ended {
            status: ExitStatus::try_from(&answer)?,
            oom_killed: answer.oom_killed,
        })
    }

    /// Sends a signal to a container's process.
    pub(crate) async fn signal(&self, id: &str, signal: u8) -> Result<(), LinkError> {
        let request = api::SignalProcessRequest {
            container_id: id.to_owned(),
            signal: signal.into(),
            ..Default::default()
        };
        self.client.signal_process(deadline(), &request).await?;
        Ok(())
    }

    /// Tells a container's terminal its size.
    pub(crate) async fn resize(&self, id: &str, size: TerminalSize) -> Result<(), LinkError> {
        let request = api::ResizeTerminalRequest {
            container_id: id.to_owned(),
            columns: size.columns.into(),
            rows: size.rows.into(),
            ..Default::default()
        };
        self.client.resize_terminal(deadline(), &request).await?;
        Ok(())
    }

    /// Ends all containers, writes out what is cached, and powers the guest off.
    pub(super) async fn shutdown(&self) -> Result<(), LinkError> {
        let request = api::ShutdownRequest::default();
        self.client.shutdown(deadline(), &request).await?;
        Ok(())
    }
}

/// How a container's process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ended {
    /// Its exit code or the signal that killed it.
    pub(crate) status: ExitStatus,
    /// The guest had no memory left for it.
    pub(crate) oom_killed: bool,
}

fn etc_hosts(hostname: &str) -> String {
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
