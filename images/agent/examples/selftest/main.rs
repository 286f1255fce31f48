//! Boots as `/init` of a guest, acts as the host of an agent in the same process, and checks the
//! behaviour of containers. For development of the agent without our own VMM; see docs/agent.md.
//!
//! Needs a virtio-blk with serial `img0` whose image holds busybox as /bin/sh.

mod pod;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use podvisor_agent::container::process::pidns;
use podvisor_agent::init::mounts;
use podvisor_agent::network;
use podvisor_agent::power;
use podvisor_agent::reaper;
use podvisor_agent::server::{self, Listeners};
use podvisor_agent::service::Service;
use podvisor_agent::stdio::StreamRegistry;
use podvisor_agent_protocol::api::{self, AgentClient};
use podvisor_agent_protocol::{AgentError, ErrorKind, ExitStatus, StreamId};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use ttrpc::asynchronous::{Client, transport::Socket};
use ttrpc::context::Context;

const RPC: &str = "/run/rpc.sock";
const STDIO: &str = "/run/stdio.sock";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    if args.next().as_deref() == Some(podvisor_agent::launcher::SUBCOMMAND) {
        return podvisor_agent::launcher::main(args.next());
    }
    if std::env::args().nth(1).as_deref() == Some(pidns::SUBCOMMAND) {
        return pidns::main();
    }
    let result = run();
    match &result {
        Ok(()) => println!("SELFTEST PASSED"),
        Err(error) => println!("SELFTEST FAILED: {error:#}"),
    }
    power::off()
}

fn run() -> Result<()> {
    mounts::set_up().context("mounts")?;
    network::loopback_up().context("loopback")?;
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(async {
            let (reaper, reaping) = reaper::start()?;
            let hub = StreamRegistry::new();
            let listeners = Listeners::unix(UnixListener::bind(RPC)?, UnixListener::bind(STDIO)?);
            let service = Arc::new(Service::new(reaper, hub.clone()));
            let serving = server::serve(listeners, service, hub);
            tokio::select! {
                error = reaping => Err(error).context("reaping"),
                error = serving => Err(error).context("serving"),
                result = host() => result,
            }
        })
}

struct Host {
    agent: AgentClient,
    made: u8,
}

struct Outcome {
    status: ExitStatus,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

fn spec(args: &[&str]) -> Value {
    json!({
        "ociVersion": "1.2.0",
        "process": {
            "args": args, "cwd": "/work/dir", "env": ["PATH=/bin:/usr/bin"],
            "user": {"uid": 0, "gid": 0},
            "capabilities": {"bounding": ["CAP_KILL"], "effective": ["CAP_KILL"], "permitted": ["CAP_KILL"]}
        },
        "hostname": "box",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs",
             "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts",
             "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "noexec", "nodev", "mode=1777"]},
            {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": ["nosuid", "noexec", "nodev"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["nosuid", "noexec", "nodev", "relatime", "ro"]}
        ],
        "linux": {
            "namespaces": [{"type": "mount"}, {"type": "pid"}, {"type": "uts"}, {"type": "ipc"}, {"type": "cgroup"}],
            "maskedPaths": ["/proc/kcore", "/sys/firmware"], "readonlyPaths": ["/proc/sys"],
            "resources": {"memory": {"limit": 67108864}, "pids": {"limit": 50}},
            "seccomp": {"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"],
                "syscalls": [{"names": ["swapon"], "action": "SCMP_ACT_ERRNO"}]}
        }
    })
}

fn no_timeout() -> Context {
    ttrpc::context::with_timeout(0)
}

impl Host {
    fn id(&mut self) -> StreamId {
        self.made += 1;
        StreamId::new([self.made; 16]).expect("not zero")
    }

    async fn stream(&self, id: StreamId) -> Result<UnixStream> {
        let mut stream = UnixStream::connect(STDIO).await?;
        stream.write_all(id.as_bytes()).await?;
        Ok(stream)
    }

    fn request(id: &str, spec: &Value) -> api::CreateContainerRequest {
        api::CreateContainerRequest {
            container_id: id.into(),
            image_serial: "img0".into(),
            spec_json: serde_json::to_vec(spec).expect("JSON"),
            ..Default::default()
        }
    }

    async fn run(
        &mut self,
        mut request: api::CreateContainerRequest,
        input: &[u8],
    ) -> Result<Outcome, AgentError> {
        let (stdin, stdout, stderr) = (self.id(), self.id(), self.id());
        let stdio = request.stdio.mut_or_insert_default();
        stdio.stdin = stdin.as_bytes().to_vec();
        stdio.stdout = stdout.as_bytes().to_vec();
        stdio.stderr = stderr.as_bytes().to_vec();
        let id = request.container_id.clone();
        let io = |error: anyhow::Error| AgentError::new(ErrorKind::Internal, format!("{error:#}"));
        let mut out = self.stream(stdout).await.map_err(io)?;
        let began = Instant::now();
        self.agent.create_container(no_timeout(), &request).await?;
        println!("{id} was created in {} µs", began.elapsed().as_micros());
        let start = api::StartContainerRequest {
            container_id: id.clone(),
            ..Default::default()
        };
        self.agent.start_container(no_timeout(), &start).await?;
        let mut err = self.stream(stderr).await.map_err(io)?;
        let mut inp = self.stream(stdin).await.map_err(io)?;
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let wait = api::WaitProcessRequest {
            container_id: id.clone(),
            ..Default::default()
        };
        let (status, _, _, _) = tokio::join!(
            self.agent.wait_process(no_timeout(), &wait),
            out.read_to_end(&mut stdout),
            err.read_to_end(&mut stderr),
            async {
                // If the process does not read its input, writing it fails.
                let _ = inp.write_all(input).await;
                let _ = inp.shutdown().await;
            },
        );
        let status = ExitStatus::try_from(&status?)
            .map_err(|error| AgentError::new(ErrorKind::Internal, error.to_string()))?;
        self.delete(&id).await?;
        Ok(Outcome {
            status,
            stdout,
            stderr,
        })
    }

    async fn delete(&self, id: &str) -> Result<(), AgentError> {
        let delete = api::DeleteContainerRequest {
            container_id: id.into(),
            ..Default::default()
        };
        self.agent.delete_container(no_timeout(), &delete).await?;
        Ok(())
    }

    async fn shell(&mut self, script: &str) -> Result<Outcome> {
        let request = Self::request("shell", &spec(&["sh", "-c", script]));
        Ok(self.run(request, b"").await?)
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap_or("(not UTF-8)")
}

async fn host() -> Result<()> {
    let stream = UnixStream::connect(RPC).await?;
    let mut host = Host {
        agent: AgentClient::new(Client::new(Socket::new(stream))),
        made: 0,
    };
    let configure = api::ConfigureRequest {
        hostname: "guest".into(),
        unix_time_ns: 1_800_000_000_000_000_000,
        entropy: vec![7; 64],
        ..Default::default()
    };
    host.agent.configure(no_timeout(), &configure).await?;
    let before = std::fs::read_to_string("/proc/self/mounts")?;

    let out = host
        .shell("echo hello; pwd; hostname; id; ls /dev; cat /proc/self/status | grep -E 'Cap|Secc'; echo err >&2; cat /proc/1/cgroup; date +%Y; exit 42")
        .await?;
    println!("{}", text(&out.stdout));
    ensure!(out.status == ExitStatus::Code(42), "{:?}", out.status);
    ensure!(text(&out.stdout).starts_with("hello\n/work/dir\nbox\nuid=0"));
    ensure!(out.stderr == b"err\n", "{:?}", text(&out.stderr));

    let out = host.shell("kill -9 $$; sleep 5").await?;
    ensure!(out.status == ExitStatus::Code(0) || out.status == ExitStatus::Signal(9));
    let out = host.shell("sh -c 'kill -9 $$'; echo $?").await?;
    ensure!(text(&out.stdout).contains("137"), "{:?}", text(&out.stdout));

    let mut big = vec![0u8; 3 << 20];
    big.iter_mut()
        .enumerate()
        .for_each(|(i, b)| *b = (i * 31 % 251) as u8);
    let out = host
        .run(Host::request("cat", &spec(&["cat"])), &big)
        .await?;
    ensure!(out.stdout == big, "{} bytes came back", out.stdout.len());

    // As many system calls as the default profiles of container engines list.
    let mut filtered = spec(&["true"]);
    let names = std::fs::read_to_string("/syscalls").unwrap_or_default();
    let names: Vec<&str> = names.lines().collect();
    filtered["linux"]["seccomp"]["defaultAction"] = json!("SCMP_ACT_ERRNO");
    filtered["linux"]["seccomp"]["syscalls"][0] =
        json!({"names": names, "action": "SCMP_ACT_ALLOW"});
    if names.is_empty() {
        println!("no /syscalls: filter not tried");
    } else {
        let out = host.run(Host::request("filtered", &filtered), b"").await?;
        ensure!(out.status == ExitStatus::Code(0));
    }

    for (args, kind) in [
        (&["nothing"][..], ErrorKind::CommandNotFound),
        (&["/etc/passwd"], ErrorKind::CommandNotExecutable),
        (&["/bin"], ErrorKind::CommandNotExecutable),
    ] {
        match host.run(Host::request("bad", &spec(args)), b"").await {
            Err(error) if error.kind == kind => println!("{args:?}: {error}"),
            Err(error) => bail!("{args:?}: {error:?}"),
            Ok(out) => bail!("{args:?} ended with {:?}", out.status),
        }
    }
    let out = host
        .run(Host::request("bad", &spec(&["/bin/noloader"])), b"")
        .await?;
    println!("{:?} {}", out.status, text(&out.stderr));
    ensure!(out.status == ExitStatus::Code(127));

    let mut request = Host::request(
        "user",
        &spec(&["sh", "-c", "id; echo $HOME; touch /x; cat /etc/hosts"]),
    );
    request.user = "alice".into();
    request.readonly_rootfs = true;
    request.etc_hosts = b"127.0.0.1 localhost\n".to_vec();
    let out = host.run(request.clone(), b"").await?;
    println!("{}{}", text(&out.stdout), text(&out.stderr));
    ensure!(text(&out.stdout).contains("uid=1000"));
    ensure!(text(&out.stdout).contains("/home/alice\n127.0.0.1"));
    ensure!(text(&out.stderr).contains("Read-only"));
    request.user = "bob".into();
    let error = host.run(request, b"").await.err().context("bob exists")?;
    ensure!(error.kind == ErrorKind::UnknownUser, "{error:?}");

    // Without a PID namespace, only the agent kills the processes that a container leaves.
    let mut shared = spec(&["sh", "-c", "ulimit -n; sleep 1000 & exit 5"]);
    shared["linux"]["namespaces"] = json!([{"type": "mount"}]);
    shared
        .as_object_mut()
        .context("a specification")?
        .remove("hostname");
    let out = host.run(Host::request("shared", &shared), b"").await?;
    ensure!(
        out.status == ExitStatus::Code(5) && out.stdout == b"1024\n",
        "{:?}",
        text(&out.stdout)
    );

    let script = "mknod /dev/port c 1 4; mknod /dev/disk b 254 0; cat /dev/disk; \
                  echo x >/dev/port; echo y >/dev/null && echo ok";
    let mut with_mknod = spec(&["sh", "-c", script]);
    for set in ["bounding", "effective", "permitted"] {
        with_mknod["process"]["capabilities"][set] = json!(["CAP_MKNOD"]);
    }
    let out = host.run(Host::request("devices", &with_mknod), b"").await?;
    println!("{}{}", text(&out.stdout), text(&out.stderr));
    ensure!(out.stdout == b"ok\n");
    ensure!(text(&out.stderr).matches("Operation not permitted").count() == 2);

    terminal(&mut host).await.context("terminal")?;
    running(&mut host).await.context("running")?;
    pod::check(&mut host).await.context("pod")?;

    let after = std::fs::read_to_string("/proc/self/mounts")?;
    ensure!(before == after, "left mounted:\n{after}");
    ensure!(!std::path::Path::new("/sys/fs/cgroup/podvisor/c1").exists());
    let left: Vec<_> = std::fs::read_dir("/run/podvisor")?
        .flatten()
        .map(|e| e.file_name())
        .collect();
    println!("left in /run/podvisor: {left:?}");
    println!(
        "memory: {}",
        std::fs::read_to_string("/proc/self/status")?
            .lines()
            .filter(|l| l.starts_with("Vm") || l.starts_with("Thr"))
            .collect::<Vec<_>>()
            .join(" ")
    );
    Ok(())
}

async fn terminal(host: &mut Host) -> Result<()> {
    let id = host.id();
    let mut request = Host::request(
        "tty",
        &spec(&[
            "sh",
            "-c",
            "tty; stty size; read x; echo got $x; stty size; cat",
        ]),
    );
    let stdio = request.stdio.mut_or_insert_default();
    stdio.terminal = true;
    (stdio.columns, stdio.rows) = (100, 30);
    stdio.stdout = id.as_bytes().to_vec();
    host.agent.create_container(no_timeout(), &request).await?;
    let mut stream = host.stream(id).await?;
    let start = api::StartContainerRequest {
        container_id: "tty".into(),
        ..Default::default()
    };
    host.agent.start_container(no_timeout(), &start).await?;
    let mut seen = String::new();
    let mut buffer = [0; 1024];
    while !seen.contains("30 100") {
        let count = stream.read(&mut buffer).await?;
        ensure!(count > 0, "ended after {seen:?}");
        seen.push_str(text(&buffer[..count]));
    }
    let resize = api::ResizeTerminalRequest {
        container_id: "tty".into(),
        columns: 132,
        rows: 50,
        ..Default::default()
    };
    host.agent.resize_terminal(no_timeout(), &resize).await?;
    stream.write_all(b"words\nlast").await?;
    stream.shutdown().await?;
    stream.read_to_string(&mut seen).await?;
    println!("{seen:?}");
    ensure!(seen.contains("got words") && seen.contains("50 132") && seen.contains("last"));
    let wait = api::WaitProcessRequest {
        container_id: "tty".into(),
        ..Default::default()
    };
    let ended = host.agent.wait_process(no_timeout(), &wait).await?;
    ensure!(ExitStatus::try_from(&ended)? == ExitStatus::Code(0));
    host.delete("tty").await?;
    Ok(())
}

async fn running(host: &mut Host) -> Result<()> {
    let request = Host::request(
        "long",
        &spec(&["sh", "-c", "trap 'exit 7' TERM; while :; do sleep 1; done"]),
    );
    host.agent.create_container(no_timeout(), &request).await?;
    let again = host
        .agent
        .create_container(no_timeout(), &request)
        .await
        .err()
        .context("twice")?;
    ensure!(AgentError::from(again).kind == ErrorKind::AlreadyExists);
    let start = api::StartContainerRequest {
        container_id: "long".into(),
        ..Default::default()
    };
    host.agent.start_container(no_timeout(), &start).await?;
    host.agent
        .start_container(no_timeout(), &start)
        .await
        .err()
        .context("started twice")?;

    let out = host.id();
    let exec = api::ExecProcessRequest {
        container_id: "long".into(),
        exec_id: "e1".into(),
        process_json: serde_json::to_vec(
            &json!({"args": ["sh", "-c", "ps; id -u; sleep 100 & exit 3"], "cwd": "/", "env": ["PATH=/bin"], "user": {"uid": 0, "gid": 0}}),
        )?,
        user: "alice".into(),
        stdio: Some(api::Stdio {
            stdout: out.as_bytes().to_vec(),
            ..Default::default()
        })
        .into(),
        ..Default::default()
    };
    let mut stream = host.stream(out).await?;
    host.agent.exec_process(no_timeout(), &exec).await?;
    let mut seen = String::new();
    // The remaining sleeper holds the pipe; the stream has to end nevertheless.
    stream.read_to_string(&mut seen).await?;
    println!("{seen}");
    ensure!(seen.ends_with("1000\n"));
    let wait = |exec: &str| api::WaitProcessRequest {
        container_id: "long".into(),
        exec_id: exec.into(),
        ..Default::default()
    };
    let ended = host.agent.wait_process(no_timeout(), &wait("e1")).await?;
    ensure!(ExitStatus::try_from(&ended)? == ExitStatus::Code(3));
    let exec = api::ExecProcessRequest {
        exec_id: "e2".into(),
        process_json: serde_json::to_vec(
            &json!({"args": ["nothing"], "cwd": "/", "user": {"uid": 0, "gid": 0}}),
        )?,
        user: String::new(),
        stdio: None.into(),
        ..exec
    };
    let error = host
        .agent
        .exec_process(no_timeout(), &exec)
        .await
        .err()
        .context("exec nothing")?;
    ensure!(
        AgentError::from(error.clone()).kind == ErrorKind::CommandNotFound,
        "{error:?}"
    );

    let stats = api::ContainerStatsRequest {
        container_id: "long".into(),
        ..Default::default()
    };
    println!(
        "{:?}",
        host.agent.container_stats(no_timeout(), &stats).await?
    );
    println!(
        "{:?}",
        host.agent
            .list_containers(no_timeout(), &api::ListContainersRequest::new())
            .await?
    );
    let kill = api::SignalProcessRequest {
        container_id: "long".into(),
        signal: 15,
        ..Default::default()
    };
    host.agent.signal_process(no_timeout(), &kill).await?;
    let ended = host.agent.wait_process(no_timeout(), &wait("")).await?;
    ensure!(ExitStatus::try_from(&ended)? == ExitStatus::Code(7));
    host.delete("long").await?;
    host.delete("long").await?;
    Ok(())
}
