//! The command line as a user other than root, through the real binary. The test is started by
//! root, who makes the user's directory; all of podvisor runs as the user. It needs a KVM that runs
//! guests.

mod support;

use std::fs::{self, Permissions};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use podvisor_cri::machine::{Assets, GUEST_DIR_VARIABLE};
use serde_json::{Value, json};
use support::host::{command, own_address, processes, sandboxes};
use support::pod::busybox;
use support::{PATIENCE, Ran, until};
use tempfile::TempDir;

/// The number of the user and of its group. The host has no account of it.
const USER: u32 = 1234;

/// A user with a home, and with podvisor and its guest's files in it, where they can be read and
/// executed wherever they were built.
struct User {
    home: TempDir,
}

impl User {
    fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        chown(home.path(), Some(USER), Some(USER)).unwrap();
        let assets = Assets::of_this_process();
        let guest = home.path().join("guest");
        fs::create_dir(&guest).unwrap();
        // In another process: otherwise, a process that this one starts meanwhile could inherit the
        // file open for writing, which prevents its execution.
        let copied = Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_podvisor"))
            .arg(home.path())
            .status();
        assert!(copied.unwrap().success());
        fs::copy(assets.kernel().unwrap(), guest.join("vmlinux")).unwrap();
        fs::copy(assets.initramfs().unwrap(), guest.join("initramfs.cpio")).unwrap();
        let tree = home.path().join("tree");
        busybox(&tree);
        for name in ["etc", "proc", "sys", "dev", "tmp", "www"] {
            fs::create_dir_all(tree.join(name)).unwrap();
        }
        fs::write(tree.join("www/page"), "hello from the guest\n").unwrap();
        for path in [home.path(), &guest, &tree] {
            fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
        }
        Self { home }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// Where containers are by default.
    fn containers(&self) -> PathBuf {
        self.path(".local/share/podvisor/c")
    }

    /// Returns `podvisor` as this user runs it, whose environment has nothing that chooses a root
    /// or a network.
    fn podvisor(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("setpriv");
        command.args([format!("--reuid={USER}"), format!("--regid={USER}")]);
        let kvm = fs::metadata("/dev/kvm").unwrap();
        // A host either lets everybody use KVM, or a group.
        match kvm.mode() & 0o006 {
            0o006 => command.arg("--clear-groups"),
            _ => command.arg(format!("--groups={}", kvm.gid())),
        };
        command.arg("--no-new-privs").arg(self.path("podvisor"));
        command.args(arguments).stdin(Stdio::null());
        command.current_dir("/").env_clear();
        command.env("PATH", std::env::var_os("PATH").unwrap());
        command.env("HOME", self.home.path());
        command.env(GUEST_DIR_VARIABLE, self.path("guest"));
        command.env("PODVISOR_BOOT_TIMEOUT", "900");
        // Creating a template requires an additional boot.
        command.env("PODVISOR_BOOT", "cold");
        command
    }

    #[track_caller]
    fn ran(&self, arguments: &[&str]) -> Ran {
        Ran::new(self.podvisor(arguments).output().unwrap())
    }

    /// Returns the output of a command that is to succeed and to report nothing.
    #[track_caller]
    fn says(&self, arguments: &[&str]) -> String {
        let ran = self.ran(arguments);
        assert_eq!((ran.code, &*ran.stderr), (Some(0), ""), "{ran:?}");
        ran.stdout
    }

    fn inspect(&self, name: &str) -> Value {
        let text = self.says(&["inspect", name]);
        serde_json::from_str::<Value>(&text).unwrap()[0].take()
    }
}

impl Drop for User {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in self.containers().read_dir().into_iter().flatten() {
                let log = name.unwrap().path().join("sandbox.log");
                eprintln!("{}:", log.display());
                eprintln!("{}", fs::read_to_string(log).unwrap_or_default());
            }
            let _ = self.podvisor(&["rm", "-f", "web"]).output();
        }
    }
}

/// Returns the user of a process; `None` if it has ended.
fn user_of(pid: u32) -> Option<u32> {
    // A process that is not dumpable has a directory of root's.
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns the running programs `passt`.
fn passts() -> Vec<u32> {
    processes(|arguments| {
        let program = arguments.split(|byte| *byte == 0).next();
        program.is_some_and(|program| program.ends_with(b"/passt"))
    })
}

/// Returns what the HTTP server at a port of the host's answers.
fn page(port: u16) -> String {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"GET /page HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn guest_a_user_other_than_root_has_containers_with_a_network() {
    own_address();
    let user = User::new();
    user.says(&["import", "-q", user.path("tree").to_str().unwrap(), "box"]);
    assert!(user.says(&["images"]).contains("box"));

    // What takes root says so, and nothing is left.
    let nat = ["run", "--network", "nat", "box", "true"];
    user.ran(&nat)
        .refused(125, &["--network nat takes root", "--network user"]);
    let bridge = ["run", "--network", "bridge", "box", "true"];
    user.ran(&bridge)
        .refused(125, &["--network bridge takes root", "--network user"]);
    let volume = ["run", "-v", "/tmp:/host", "box", "true"];
    user.ran(&volume)
        .refused(125, &["--volume: sharing directories takes root"]);
    let pod = ["pod", "create", "--volumes"];
    user.ran(&pod).refused(1, &["--volumes takes root"]);
    command("modprobe", &["loop"]);
    let limit = ["run", "--device-read-bps", "/dev/loop0:1mb", "box", "true"];
    let words = [
        "cannot limit the sandbox's I/O",
        "/sys/fs/cgroup",
        "take root",
    ];
    user.ran(&limit).refused(125, &words);
    assert!(
        fs::read_dir(user.containers()).map_or(0, Iterator::count) == 0,
        "something is left"
    );

    let script = "echo out; echo err >&2; httpd -p 8080 -h /www; echo up; exec sleep 99999";
    let run = [
        "run",
        "-d",
        "--name",
        "web",
        "--memory",
        "128M",
        "-e",
        "PATH=/bin",
        "-p",
        "18083:8080",
        "box",
        "sh",
        "-c",
        script,
    ];
    let id = user.says(&run);
    let mut follow = user.podvisor(&["logs", "-f", "web"]);
    let follow = follow.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut follow = follow.spawn().unwrap();
    let mut text = Vec::new();
    let mut stdout = follow.stdout.take().unwrap();
    while !text.ends_with(b"up\n") {
        let mut byte = [0];
        assert_eq!(stdout.read(&mut byte).unwrap(), 1, "{text:?}");
        text.extend(byte);
    }
    follow.kill().unwrap();
    follow.wait().unwrap();
    let logs = user.ran(&["logs", "web"]);
    assert_eq!((&*logs.stdout, &*logs.stderr), ("out\nup\n", "err\n"));

    let answer = page(18083);
    assert!(answer.contains(" 200 OK\r\n"), "{answer}");
    assert!(
        answer.ends_with("\r\n\r\nhello from the guest\n"),
        "{answer}"
    );
    assert_eq!(user.says(&["port", "web"]), "8080/tcp -> 0.0.0.0:18083\n");
    let exec = [
        "exec",
        "web",
        "sh",
        "-c",
        "id -u; cat /proc/1/comm; ip route",
    ];
    let inside = user.says(&exec);
    assert!(
        inside.starts_with("0\nsleep\ndefault via 10.0.2.2"),
        "{inside}"
    );

    // All of it belongs to the user, and the machine is jailed.
    let inspect = user.inspect("web");
    assert_eq!(inspect["Id"], id.trim());
    assert_eq!(inspect["HostConfig"]["NetworkMode"], "user");
    assert_eq!(inspect["HostConfig"]["Jail"], true);
    let missing = inspect["HostConfig"]["JailMissing"].as_array().unwrap();
    assert!(missing.contains(&json!("control group")), "{missing:?}");
    let machines = sandboxes();
    assert_eq!(json!(machines), json!([inspect["State"]["Pid"]]));
    assert_eq!(passts().len(), 1);
    for pid in machines.into_iter().chain(passts()) {
        assert_eq!(user_of(pid), Some(USER), "{pid}");
    }

    assert_eq!(user.says(&["stop", "-t", "1", "web"]), "web\n");
    until("the end of the machine and of its network", || {
        sandboxes().is_empty() && passts().is_empty()
    });
    assert_eq!(user.says(&["rm", "web"]), "web\n");
    assert_eq!(fs::read_dir(user.containers()).unwrap().count(), 0);
    assert_eq!(user.says(&["ps", "-aq"]), "");
    until("the end of all processes of the user", || {
        processes(|_| true)
            .into_iter()
            .all(|pid| user_of(pid) != Some(USER))
    });
}
