//! Tests the jail of a sandbox's process from inside: attempts of hostile code to escape, each with
//! its result. docs/sandbox.md has the table.
//!
//! These tests need root, who starts jails as itself and as another user, and no KVM.

use std::fs::Permissions;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use podvisor_cri::sandbox::bind::{self, DetachedTree, Extent, Propagation};
use podvisor_cri::sandbox::{SharedDirectory, jail};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tempfile::TempDir;

const SIGSYS: i32 = 31;

const EPERM: i32 = 1;
const ENOENT: i32 = 2;
const ESRCH: i32 = 3;
const EACCES: i32 = 13;
const EINVAL: i32 = 22;
const EOVERFLOW: i32 = 75;
const EROFS: i32 = 30;
const ENOSYS: i32 = 38;
const ENETUNREACH: i32 = 101;
const ECONNREFUSED: i32 = 111;

/// The result of an attempt without the system call filter.
#[derive(Debug, Clone, Copy)]
enum Alone {
    /// Another layer denies it, with one of these errors.
    Refused(&'static [i32]),
    /// It succeeds without effect: the other layers confine its result.
    Harmless,
    /// Only the filter denies it.
    FilterOnly,
}

use Alone::{FilterOnly, Harmless, Refused};

/// Attempts of a process without a shared directory.
const ATTEMPTS: &[(&str, Alone)] = &[
    ("open-file", Refused(&[ENOENT, EACCES])),
    ("open-proc", Refused(&[ENOENT, EACCES])),
    ("list-root", Refused(&[EACCES])),
    ("create-file", Refused(&[EACCES, EROFS])),
    ("make-device", Refused(&[EACCES, EPERM, EROFS])),
    ("signal", Refused(&[ESRCH])),
    ("signal-thread", Refused(&[ESRCH])),
    ("open-process", Refused(&[ESRCH])),
    ("trace", Refused(&[ESRCH])),
    ("read-memory", Refused(&[ESRCH])),
    ("limit-process", Refused(&[ESRCH])),
    ("tcp", Refused(&[EACCES, ENETUNREACH])),
    ("udp", Refused(&[ENETUNREACH])),
    ("raw-socket", Refused(&[EPERM])),
    ("abstract-socket", Refused(&[ECONNREFUSED])),
    ("mount", Refused(&[EPERM])),
    ("unmount", Refused(&[EPERM])),
    ("chroot", Refused(&[EPERM])),
    // Its capabilities have no effect on the host's resources.
    ("user-namespace", Refused(&[EPERM])),
    ("namespace", Refused(&[EPERM])),
    ("load-module", Refused(&[EPERM, ENOSYS])),
    ("load-kernel", Refused(&[EPERM, ENOSYS])),
    ("load-bpf", Refused(&[EPERM, EINVAL, ENOSYS])),
    ("execute", Refused(&[ENOENT, EACCES])),
    ("fork", Harmless),
    ("become-root", Refused(&[EPERM, EINVAL])),
    ("reboot", Refused(&[EPERM])),
    ("set-host-name", Refused(&[EPERM])),
    ("set-clock", Refused(&[EPERM])),
    ("ports", Refused(&[EPERM, ENOSYS])),
    ("keyring", FilterOnly),
    ("shared-memory", Refused(&[ENOENT])),
    ("io-uring", Harmless),
    ("datagram-pair", Harmless),
    ("executable-memory", Harmless),
    ("another-vm", FilterOnly),
    ("lock", FilterOnly),
    ("lease", FilterOnly),
    ("terminal-input", Refused(&[25, EPERM, EINVAL])),
];

/// Attempts of one that serves a directory, and is root: calls for files are allowed.
const WITH_SHARE: &[(&str, &[i32])] = &[
    ("open-file", &[ENOENT, EACCES]),
    ("leave-share", &[ENOENT]),
    // Landlock does not cover these.
    ("change-mode-above-share", &[ENOENT]),
    ("change-owner-above-share", &[ENOENT]),
    ("change-times-above-share", &[ENOENT]),
    ("look-above-share", &[ENOENT]),
    ("make-device-in-share", &[EACCES, EPERM]),
    ("make-null-in-share", &[EACCES, EPERM]),
];

fn program() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let target = test.parent().and_then(Path::parent).unwrap();
    target.join("examples/hostile")
}

/// A user other than root.
const USER: u32 = 1234;

/// A user other than root, with a process, while this exists.
struct User {
    /// The program where any user may execute it, wherever the tests were built.
    dir: TempDir,
    process: Child,
}

impl User {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // By another process: a child that a test starts meanwhile would inherit the descriptor by
        // which this one writes, and no program runs that somebody writes.
        let copied = Command::new("cp").arg(program()).arg(dir.path()).status();
        assert!(copied.unwrap().success());
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let mut sleep = Command::new("sleep");
        let process = sleep.arg("infinity").uid(USER).gid(USER).spawn().unwrap();
        Self { dir, process }
    }

    fn program(&self) -> PathBuf {
        self.dir.path().join("hostile")
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Targets on the host, while this exists.
struct Host {
    tcp: TcpListener,
    _abstract: UnixListener,
    /// Whoever starts the jails, if it is not root.
    user: Option<User>,
}

impl Host {
    fn new() -> Self {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        // A name that no other test uses.
        let name = format!("podvisor-test-{}", tcp.local_addr().unwrap().port());
        let name = SocketAddr::from_abstract_name(name).unwrap();
        Self {
            tcp,
            _abstract: UnixListener::bind_addr(&name).unwrap(),
            user: None,
        }
    }

    /// The jails are started by another user than root, one of whose processes is a target.
    fn of_another_user() -> Self {
        Self {
            user: Some(User::new()),
            ..Self::new()
        }
    }

    /// Returns the result, or the signal that killed the process.
    fn attempt(&self, what: &str, filter: bool, share: &str) -> Result<Option<i32>, i32> {
        self.attempt_and_say(what, filter, share).0
    }

    /// Returns the result, and the process's stderr.
    fn attempt_and_say(
        &self,
        what: &str,
        filter: bool,
        share: &str,
    ) -> (Result<Option<i32>, i32>, String) {
        let command = match &self.user {
            None => Command::new(program()),
            Some(user) => {
                let mut command = Command::new(user.program());
                command.uid(USER).gid(USER);
                command
            }
        };
        self.attempt_by(command, what, filter, share)
    }

    /// The same, by a command that executes the program.
    fn attempt_by(
        &self,
        mut command: Command,
        what: &str,
        filter: bool,
        share: &str,
    ) -> (Result<Option<i32>, i32>, String) {
        let port = self.tcp.local_addr().unwrap().port().to_string();
        let filter = if filter { "filter" } else { "" };
        let pid = match &self.user {
            None => std::process::id(),
            Some(user) => user.process.id(),
        };
        command
            .args([what, filter, share, &pid.to_string(), &port])
            .env("RUST_BACKTRACE", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let child = match &self.user {
            None => jail::spawn(|| command.spawn()),
            // Who may not make a PID namespace.
            Some(_) => command.spawn(),
        };
        let child = child.expect("the example `hostile` is built with the tests");
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let answer = match output.status.signal() {
            Some(signal) => Err(signal),
            None if text == "ok\n" => Ok(None),
            None => match text.trim().parse() {
                Ok(error) => Ok(Some(error)),
                Err(_) => panic!("{what}: {text:?}, {}; stderr: {said}", output.status),
            },
        };
        (answer, said)
    }
}

#[test]
fn the_filter_kills_a_process_at_any_attempt_to_leave_its_jail() {
    for host in [Host::new(), Host::of_another_user()] {
        assert_eq!(host.attempt("nothing", true, ""), Ok(None));
        for (attempt, _) in ATTEMPTS {
            let answer = host.attempt(attempt, true, "");
            let expected = match *attempt {
                "open-file" | "open-proc" | "list-root" | "create-file" => Ok(Some(ENOSYS)),
                _ => Err(SIGSYS),
            };
            let is_root = host.user.is_none();
            assert_eq!(answer, expected, "{attempt}, as root: {is_root}");
        }
    }
}

#[test]
fn what_the_process_does_every_day_is_no_attempt() {
    let host = Host::new();
    let dir = tempfile::tempdir().unwrap();
    for share in ["", dir.path().to_str().unwrap()] {
        for work in ["threads", "memory", "panic", "time", "memory-file"] {
            let (answer, said) = host.attempt_and_say(work, true, share);
            assert_eq!(answer, Ok(None), "{work}: {said}");
            // A panic's message and location are printed.
            let is_told = said.contains("panicked at") && said.contains("hostile.rs");
            assert_eq!(is_told, work == "panic", "{work}: {said}");
        }
    }
}

/// Makes each attempt without the filter; returns those with another result than the expected one.
fn wrong_alone(
    host: &Host,
    expected: impl Fn(&str, Alone) -> Alone,
) -> Vec<(&'static str, Result<Option<i32>, i32>)> {
    let mut wrong = Vec::new();
    for (attempt, alone) in ATTEMPTS {
        let answer = host.attempt(attempt, false, "");
        println!("{attempt}: {answer:?}");
        let is_right = match (expected(attempt, *alone), answer) {
            (Refused(with), Ok(Some(error))) => with.contains(&error),
            // What it creates has no more privileges than itself.
            (Harmless, answer) => answer.is_ok(),
            (FilterOnly, _) => true,
            _ => false,
        };
        if !is_right {
            wrong.push((*attempt, answer));
        }
    }
    wrong
}

#[test]
fn without_the_filter_the_other_layers_refuse_each_attempt() {
    let wrong = wrong_alone(&Host::new(), |_, alone| alone);
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// Its process has no PID namespace of its own, and the user's other processes have its user.
#[test]
fn without_the_filter_the_other_layers_of_another_user_refuse_what_they_can() {
    let host = Host::of_another_user();
    // Without the scopes of Linux 6.12, only the filter keeps signals from them.
    let has_scopes = host.attempt("whole-landlock", false, "") == Ok(None);
    let wrong = wrong_alone(&host, |attempt, alone| match attempt {
        "signal" | "signal-thread" if has_scopes => Refused(&[EPERM]),
        "signal" | "signal-thread" | "limit-process" => FilterOnly,
        // What a descriptor of a process is good for is refused by itself.
        "open-process" => Harmless,
        "trace" | "read-memory" => Refused(&[EPERM]),
        _ => alone,
    });
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn a_process_with_a_shared_directory_reaches_that_one_alone() {
    let host = Host::new();
    let dir = tempfile::tempdir().unwrap();
    let share = dir.path().to_str().unwrap();
    for filter in [false, true] {
        for (attempt, with) in WITH_SHARE {
            let answer = host.attempt(attempt, filter, share);
            let error = answer.ok().flatten();
            assert!(
                error.is_some_and(|e| with.contains(&e)),
                "{attempt}: {answer:?}"
            );
        }
        assert_eq!(host.attempt("use-share", filter, share), Ok(None));
    }
    assert_eq!(std::fs::read_dir(share).unwrap().count(), 1);
    assert_eq!(host.attempt("open-handle", true, share), Err(SIGSYS));
    let answer = host.attempt("open-handle", false, share);
    assert_eq!(answer, Ok(Some(EPERM)));
    for attempt in ["signal", "tcp", "mount", "execute", "user-namespace"] {
        assert_eq!(host.attempt(attempt, true, share), Err(SIGSYS), "{attempt}");
    }
}

/// Attempts on what is the host's, by one that serves volumes: none of them is refused to the
/// host's root.
const ON_THE_HOSTS_FILES: [&str; 4] = [
    "volume-read-secret",
    "volume-give-secret",
    "volume-open-secret-to-all",
    "volume-make-beside",
];

/// A shared directory in which the host has a file of its own, which no volume shows; and a volume.
struct Shared {
    dir: TempDir,
}

impl Shared {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let mode = |name: &str, mode| {
            std::fs::set_permissions(path(name), Permissions::from_mode(mode)).unwrap();
        };
        for name in ["shared", "source"] {
            std::fs::create_dir(path(name)).unwrap();
        }
        for name in ["shared/secret", "source/given"] {
            std::fs::write(path(name), "x").unwrap();
            mode(name, 0o600);
        }
        mode("shared", 0o711);
        mode("source", 0o777);
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn owner(&self, name: &str) -> (u32, u32) {
        let meta = std::fs::symlink_metadata(self.path(name)).unwrap();
        (meta.uid(), meta.gid())
    }

    /// Starts the program, mounts the volume once it is in its jail, and returns what `/proc` told
    /// of it then, and the result.
    fn attempt(&self, what: &str, filter: bool, is_mapped: bool) -> (String, String) {
        let shared = self.path("shared");
        let form = if is_mapped { "mapped:" } else { "" };
        let share = format!("{form}{}", shared.display());
        let mut command = Command::new(program());
        command
            .args([what, if filter { "filter" } else { "" }, &share, "1", "1"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = jail::spawn(|| command.spawn()).unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        assert_eq!(line, "jailed\n");
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        let volumes = SharedDirectory::of_process(&shared, child.id(), pidfd).unwrap();
        assert_eq!(volumes.has_mapped_users(), is_mapped);
        let source = bind::open_source(&self.path("source")).unwrap();
        let tree = DetachedTree::of(&source, Extent::Whole, Propagation::Private).unwrap();
        tree.make_harmless().unwrap();
        volumes.attach(&tree, "volume", true).unwrap();
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let users = std::fs::read_to_string(format!("/proc/{}/uid_map", child.id())).unwrap();
        let own = format!("Uid:\t{0}\t{0}\t{0}\t{0}\n", jail::UID_BASE + child.id());
        assert_eq!(status.contains(&own), is_mapped, "{status}");
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        line.clear();
        stdout.read_line(&mut line).unwrap();
        child.wait().unwrap();
        std::fs::remove_dir(shared.join("volume")).unwrap();
        (users, line.trim().to_owned())
    }
}

/// These take root, and a kernel that maps users on the file system of temporary files.
#[test]
fn a_process_with_mapped_users_has_no_rights_to_files_but_those_of_its_volumes() {
    jail::try_mapped_users(&std::env::temp_dir())
        .expect("TMPDIR is on a file system that maps users, such as ext4, xfs or btrfs");
    for filter in [false, true] {
        let shared = Shared::new();
        for attempt in ON_THE_HOSTS_FILES {
            let (users, answer) = shared.attempt(attempt, filter, true);
            let error = answer.parse().unwrap_or(0);
            assert!(
                [EPERM, EACCES, EOVERFLOW].contains(&error),
                "{attempt}: {answer}"
            );
            // The host's root is none of its users.
            let hosts: Vec<_> = users
                .lines()
                .map(|line| line.split_whitespace().nth(1))
                .collect();
            assert!(hosts.len() == 2 && !hosts.contains(&Some("0")), "{users}");
        }
        assert_eq!(shared.owner("shared/secret"), (0, 0));
        assert!(!shared.path("shared/beside").exists());
        // In its volumes it serves the guest's users, by their numbers.
        let (_, answer) = shared.attempt("volume-use", filter, true);
        assert_eq!(answer, "ok");
        assert_eq!(shared.owner("source/new"), (1000, 1000));
        assert_eq!(shared.owner("source/given"), (1234, 1234));
    }
}

#[test]
fn a_process_that_serves_volumes_as_the_hosts_root_has_its_rights() {
    let shared = Shared::new();
    for attempt in ON_THE_HOSTS_FILES {
        let (_, answer) = shared.attempt(attempt, true, false);
        assert_eq!(answer, "ok", "{attempt}");
    }
    assert_eq!(shared.attempt("volume-use", true, false).1, "ok");
    assert_eq!(shared.owner("source/new"), (1000, 1000));
}

/// Linux' own limit is lower than the jail's on hosts of less than 2 GiB.
#[test]
fn a_user_whose_hard_limit_of_processes_is_low_has_a_jail() {
    let host = Host::new();
    let user = User::new();
    let mut command = Command::new("prlimit");
    command
        .args(["--nproc=4096:4096", "--"])
        .arg(user.program());
    command.uid(USER).gid(USER);
    let (answer, said) = host.attempt_by(command, "nothing", true, "");
    assert_eq!(answer, Ok(None), "{said}");
}
