//! The agent's whole way, with the client that hosts have: over a pair of sockets with a system
//! that is a directory, and the program itself. Nothing of the machine that runs this changes.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream as StdUnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use podvisor_ga::linux::{Guest, Kernel, Port, serve};
use podvisor_guest_agent::{
    FileUse, GuestAgent, GuestAgentError, Program, ProgramEnd, ProgramExit, ShutdownMode,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

const LIMIT: Duration = Duration::from_secs(120);

/// What a kernel was told.
#[derive(Debug, Clone, Default)]
struct Told(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    frozen: Vec<u64>,
    clock: Option<Duration>,
}

impl Kernel for Told {
    fn freeze(&self, file: &File) -> io::Result<()> {
        let number = file.metadata()?.ino();
        self.0.lock().unwrap().frozen.push(number);
        Ok(())
    }

    fn thaw(&self, file: &File) -> io::Result<()> {
        let number = file.metadata()?.ino();
        let frozen = &mut self.0.lock().unwrap().frozen;
        match frozen.iter().position(|it| *it == number) {
            Some(at) => {
                frozen.remove(at);
                Ok(())
            }
            None => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
    }

    fn set_clock(&self, since: Duration) -> io::Result<()> {
        self.0.lock().unwrap().clock = Some(since);
        Ok(())
    }
}

/// A system that is a directory, with an agent in it.
struct System {
    dir: tempfile::TempDir,
    told: Told,
    serving: JoinHandle<io::Result<()>>,
}

impl System {
    fn new() -> (Self, GuestAgent<UnixStream>) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let owner = fs::metadata(root).unwrap();
        let (uid, gid) = (owner.uid(), owner.gid());
        for (path, text) in [
            (
                "etc/os-release",
                "ID=small\nPRETTY_NAME=\"Small system\"\n".to_owned(),
            ),
            (
                "etc/passwd",
                format!("me:x:{uid}:{gid}::/home/me:/bin/sh\n"),
            ),
            (
                "proc/self/mountinfo",
                "1 0 8:1 / / rw - ext4 /dev/vda1 rw\n2 1 8:2 / /home rw - xfs /dev/vdb rw\n\
                 3 1 0:5 / /proc rw - proc proc rw\n"
                    .to_owned(),
            ),
            ("sys/devices/system/cpu/cpu1/online", "0\n".to_owned()),
            ("sys/devices/system/cpu/cpu0/topology/x", String::new()),
            ("home/me/x", String::new()),
        ] {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let (ours, theirs) = StdUnixStream::pair().unwrap();
        let (told, place) = (Told::default(), root.to_owned());
        let kernel = told.clone();
        let serving = std::thread::spawn(move || {
            let port = Port::stream(OwnedFd::from(theirs))?;
            serve(&port, &mut Guest::new(&place, kernel), None)
        });
        let system = Self { dir, told, serving };
        (system, client(ours))
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    /// A program of the system that notes its arguments and its input.
    fn tool(&self, name: &str, then: &str) {
        let path = self.path(&format!("usr/sbin/{name}"));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let noted = self.path("noted");
        let noted = noted.display();
        let script = format!("#!/bin/sh\n(echo \"$0 $*\"; cat) >{noted}\n{then}\n");
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    }

    fn noted(&self) -> String {
        let noted = fs::read_to_string(self.path("noted")).unwrap();
        let place = self.path("usr/sbin/");
        noted.replace(place.to_str().unwrap(), "")
    }

    /// Ends with the host's end of the stream.
    fn end(self, agent: GuestAgent<UnixStream>) {
        drop(agent);
        self.serving.join().unwrap().unwrap();
    }
}

fn client(stream: StdUnixStream) -> GuestAgent<UnixStream> {
    stream.set_nonblocking(true).unwrap();
    GuestAgent::new(UnixStream::from_std(stream).unwrap())
}

async fn run(agent: &GuestAgent<UnixStream>, words: &[&str], input: &[u8]) -> ProgramEnd {
    let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    let program = Program {
        path: words[0].clone(),
        arguments: words[1..].to_vec(),
        input: input.to_vec(),
        ..Program::default()
    };
    let number = agent.start_program(&program, LIMIT).await.unwrap();
    agent.program_end(number, LIMIT).await.unwrap()
}

#[tokio::test]
async fn a_system_says_what_it_is() {
    let (system, agent) = System::new();
    agent.ping(LIMIT).await.unwrap();
    let info = agent.info(LIMIT).await.unwrap();
    assert!(info.agent_version.starts_with("podvisor "), "{info:?}");
    assert!(info.commands.iter().any(|name| name == "guest-exec"));
    assert_eq!(
        (info.os.id.as_str(), info.os.pretty_name.as_str()),
        ("small", "Small system")
    );
    assert!(!info.os.kernel_release.is_empty() && !info.host_name.is_empty());
    assert!(info.interfaces.iter().any(|it| it.name == "lo"));
    let mounted: Vec<_> = info
        .file_systems
        .iter()
        .map(|it| {
            (
                it.device.as_str(),
                it.mount_point.as_str(),
                it.kind.as_str(),
            )
        })
        .collect();
    assert_eq!(mounted, [("vda1", "/", "ext4"), ("vdb", "/home", "xfs")]);
    assert!(info.file_systems[0].total >= info.file_systems[0].used);
    assert!(!info.is_frozen && info.users.is_empty());
    system.end(agent);
}

#[tokio::test]
async fn programs_run_with_input_and_end_with_output_code_or_signal() {
    let (system, agent) = System::new();
    // More than pipes hold, both ways.
    let input: Vec<u8> = (0..1 << 20).map(|at: u32| at.to_be_bytes()[3]).collect();
    let end = run(&agent, &["cat"], &input).await;
    assert_eq!((end.exit, end.is_truncated), (ProgramExit::Code(0), false));
    assert!(end.stdout == input);
    let end = run(&agent, &["sh", "-c", "echo out; echo err >&2; exit 7"], b"").await;
    assert_eq!(end.exit, ProgramExit::Code(7));
    assert_eq!(
        (end.stdout.as_slice(), end.stderr.as_slice()),
        (&b"out\n"[..], &b"err\n"[..])
    );
    let end = run(&agent, &["sh", "-c", "kill -TERM $$"], b"").await;
    assert_eq!(end.exit, ProgramExit::Signal(15));
    let program = Program {
        path: "sh".to_owned(),
        arguments: vec!["-c".to_owned(), "echo $A; env | wc -l".to_owned()],
        environment: vec!["A=b=c".to_owned(), "PATH=/usr/bin:/bin".to_owned()],
        ..Program::default()
    };
    let number = agent.start_program(&program, LIMIT).await.unwrap();
    let end = agent.program_end(number, LIMIT).await.unwrap();
    assert!(end.stdout.starts_with(b"b=c\n"), "{end:?}");
    let error = agent.program_end(number, LIMIT).await.unwrap_err();
    assert!(error.to_string().contains("does not exist"), "{error}");
    // What hosts look for.
    let missing = Program {
        path: "/no/such/program".to_owned(),
        ..Program::default()
    };
    let error = agent.start_program(&missing, LIMIT).await.unwrap_err();
    assert!(error.to_string().contains("No such file"), "{error}");
    system.end(agent);
}

#[tokio::test]
async fn a_program_that_does_not_end_is_killed_while_others_run() {
    let (system, agent) = System::new();
    let sleep = Program {
        path: "sleep".to_owned(),
        arguments: vec!["600".to_owned()],
        ..Program::default()
    };
    let number = agent.start_program(&sleep, LIMIT).await.unwrap();
    assert_eq!(
        run(&agent, &["echo", "beside"], b"").await.stdout,
        b"beside\n"
    );
    agent.signal_program(number, 9, LIMIT).await.unwrap();
    let end = agent.program_end(number, LIMIT).await.unwrap();
    assert_eq!(end.exit, ProgramExit::Signal(9));
    system.end(agent);
}

#[tokio::test]
async fn files_travel_both_ways() {
    let (system, agent) = System::new();
    let path = system.path("file");
    let path = path.to_str().unwrap();
    let bytes: Vec<u8> = (0..600_000_u32).map(|at| at.to_be_bytes()[2]).collect();
    let file = agent.open_file(path, FileUse::Write, LIMIT).await.unwrap();
    agent.write_file(file, &bytes, LIMIT).await.unwrap();
    agent.close_file(file, LIMIT).await.unwrap();
    assert!(fs::read(path).unwrap() == bytes);
    let file = agent.open_file(path, FileUse::Read, LIMIT).await.unwrap();
    let mut read = Vec::new();
    loop {
        let piece = agent.read_file(file, LIMIT).await.unwrap();
        match piece.is_empty() {
            true => break,
            false => read.extend(piece),
        }
    }
    assert!(read == bytes);
    agent.close_file(file, LIMIT).await.unwrap();
    let error = agent.close_file(file, LIMIT).await.unwrap_err();
    assert!(error.to_string().contains("has not been found"), "{error}");
    system.end(agent);
}

#[tokio::test]
async fn file_systems_freeze_and_thaw_and_nothing_else_happens_meanwhile() {
    let (system, agent) = System::new();
    assert_eq!(agent.freeze(LIMIT).await.unwrap(), 2);
    assert_eq!(system.told.0.lock().unwrap().frozen.len(), 2);
    let info = agent.info(LIMIT).await.unwrap();
    assert!(info.is_frozen && !info.commands.iter().any(|name| name == "guest-exec"));
    let error = agent.start_program(&Program::default(), LIMIT).await;
    let error = error.unwrap_err();
    assert!(
        matches!(error, GuestAgentError::NotAllowed { .. }),
        "{error}"
    );
    assert_eq!(agent.thaw(LIMIT).await.unwrap(), 2);
    assert_eq!(agent.thaw(LIMIT).await.unwrap(), 0);
    assert!(!agent.info(LIMIT).await.unwrap().is_frozen);
    // A host that goes away leaves nothing frozen.
    agent.freeze(LIMIT).await.unwrap();
    let told = system.told.clone();
    system.end(agent);
    assert!(told.0.lock().unwrap().frozen.is_empty());
}

#[tokio::test]
async fn keys_passwords_cpus_and_the_clock_are_set() {
    let (system, agent) = System::new();
    let keys = ["ssh-ed25519 AAAA me@here".to_owned()];
    agent.add_authorized_keys("me", &keys, LIMIT).await.unwrap();
    let file = fs::read_to_string(system.path("home/me/.ssh/authorized_keys"));
    assert_eq!(file.unwrap(), format!("{}\n", keys[0]));
    let error = agent.add_authorized_keys("nobody-here", &keys, LIMIT).await;
    assert!(error.unwrap_err().to_string().contains("nobody-here"));

    let error = agent.set_password("me", "secret", LIMIT).await.unwrap_err();
    assert!(error.to_string().contains("no program chpasswd"), "{error}");
    system.tool("chpasswd", "");
    agent.set_password("me", "secret", LIMIT).await.unwrap();
    assert_eq!(system.noted(), "chpasswd \nme:secret\n");
    system.tool("chpasswd", "echo 'no such user' >&2; exit 1");
    let error = agent.set_password("me", "secret", LIMIT).await.unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("no such user") && !error.contains("secret"),
        "{error}"
    );
    agent
        .set_password("me", "a\nroot:b", LIMIT)
        .await
        .unwrap_err();

    assert!(agent.use_cpus(2, LIMIT).await.unwrap());
    let online = fs::read_to_string(system.path("sys/devices/system/cpu/cpu1/online"));
    assert_eq!(online.unwrap(), "1");
    let time = UNIX_EPOCH + Duration::from_nanos(1_500_000_000_000_000_001);
    agent.set_time(time, LIMIT).await.unwrap();
    let clock = system.told.0.lock().unwrap().clock.unwrap();
    assert_eq!(SystemTime::UNIX_EPOCH + clock, time);
    system.end(agent);
}

#[tokio::test]
async fn a_shutdown_is_the_systems_own_and_a_refusal_is_told() {
    let (system, agent) = System::new();
    let refused = agent.shutdown(ShutdownMode::Reboot, LIMIT).await;
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("no program reboot"), "{refused}");
    for (mode, tool, noted) in [
        (ShutdownMode::PowerDown, "poweroff", "poweroff \n"),
        (ShutdownMode::PowerDown, "shutdown", "shutdown -P +0\n"),
        (ShutdownMode::Reboot, "shutdown", "shutdown -r +0\n"),
    ] {
        system.tool(tool, "");
        agent.shutdown(mode, LIMIT).await.unwrap();
        // Answered after it.
        agent.ping(LIMIT).await.unwrap();
        assert_eq!(system.noted(), noted);
    }
    system.end(agent);
}

#[tokio::test]
async fn a_host_that_writes_no_requests_gets_faults_and_then_answers() {
    let (ours, theirs) = StdUnixStream::pair().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().to_owned();
    let serving = std::thread::spawn(move || {
        let port = Port::stream(OwnedFd::from(theirs))?;
        serve(&port, &mut Guest::new(&place, Told::default()), None)
    });
    ours.set_nonblocking(true).unwrap();
    let mut stream = UnixStream::from_std(ours).unwrap();
    // Requests of which many come at once, and in pieces.
    let ping = b"{\"execute\": \"guest-ping\"}\n".repeat(1000);
    let mut bytes = b"[[[\n{\"execute\": \"guest-nap\"}\n".to_vec();
    bytes.extend(ping);
    bytes.extend(b"{\"execute\": \"guest-p\xff{\"execute\": \"guest-ping\", \"id\": 9}\n");
    let (mut read, mut write) = stream.split();
    let writes = async {
        for piece in bytes.chunks(777) {
            write.write_all(piece).await.unwrap();
        }
    };
    let reads = async {
        let mut answers = Vec::new();
        while !answers.ends_with(b"{\"id\":9,\"return\":{}}\n") {
            assert!(read.read_buf(&mut answers).await.unwrap() > 0);
        }
        answers
    };
    let ((), answers) = tokio::join!(writes, reads);
    let answers = String::from_utf8(answers).unwrap();
    assert_eq!(answers.lines().count(), 1003);
    assert!(answers.contains("guest-nap has not been found"));
    drop(stream);
    serving.join().unwrap().unwrap();
}

/// The program itself, connected to a socket of this test. It is asked only what changes nothing.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_podvisor-ga"))
}

fn connected(dir: &Path) -> (Running, StdUnixStream) {
    let path = dir.join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let child = program().arg("--path").arg(&path).spawn().unwrap();
    let running = Running(child);
    let (stream, _) = listener.accept().unwrap();
    (running, stream)
}

#[tokio::test]
async fn the_program_answers_at_a_socket_until_it_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut running, stream) = connected(dir.path());
    let agent = client(stream);
    agent.ping(LIMIT).await.unwrap();
    let end = run(&agent, &["sh", "-c", "cat; exit 3"], b"hello").await;
    assert_eq!(
        (end.exit, end.stdout.as_slice()),
        (ProgramExit::Code(3), &b"hello"[..])
    );
    let info = agent.info(LIMIT).await.unwrap();
    assert!(!info.os.kernel_release.is_empty());
    drop(agent);
    assert!(running.0.wait().unwrap().success());
}

#[tokio::test]
async fn the_program_ends_when_it_is_told_by_a_signal() {
    let dir = tempfile::tempdir().unwrap();
    let (mut running, stream) = connected(dir.path());
    let agent = client(stream);
    agent.ping(LIMIT).await.unwrap();
    let pid = rustix::process::Pid::from_child(&running.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(running.0.wait().unwrap().success());
}

#[test]
fn the_program_says_what_is_wrong_with_its_port_and_its_words() {
    for (words, code, said) in [
        (&["--path", "/no/such/port"][..], 1, "/no/such/port"),
        (&["--nap"], 2, "--nap"),
        (&["--path"], 2, "--path"),
    ] {
        let ran = program().args(words).output().unwrap();
        let error = String::from_utf8(ran.stderr).unwrap();
        assert_eq!(ran.status.code(), Some(code), "{error}");
        assert!(error.contains(said), "{error}");
    }
    let ran = program().arg("--version").output().unwrap();
    assert!(ran.stdout.starts_with(b"podvisor-ga "), "{ran:?}");
}
