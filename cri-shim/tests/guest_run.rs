//! `podvisor run` with real guests: these tests need a KVM that runs them, and the guest's kernel
//! and initramfs where podvisor looks for them. Guests may boot ten times slower here than on
//! hardware, so the tests do not assert times.

mod support;

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use support::image::Image;
use support::registry::Registry;
use support::terminal::{Terminal, read_until};
use support::{PATIENCE, Ran, Root, until};

/// One guest at a time: more are no faster on a machine with a single processor.
static TURN: Mutex<()> = Mutex::new(());

/// The image that the tests share, pulled once.
static STORE: LazyLock<Store> = LazyLock::new(Store::new);

struct Store {
    root: Root,
    name: String,
}

impl Store {
    fn new() -> Self {
        let root = Root::default();
        let settings = json!({
            "Env": ["PATH=/bin", "FROM=image"],
            "Cmd": ["sh", "-c", "echo the image says hello"],
        });
        let registry = Registry::serve(&[("test/busybox", Image::busybox(settings))]);
        let name = registry.name("test/busybox");
        let pulled = root.output(&["pull", "--quiet", &name]);
        assert_eq!(pulled.code, Some(0), "{pulled:?}");
        Self { root, name }
    }
}

/// This test's turn to run a guest.
struct Turn(#[allow(dead_code)] MutexGuard<'static, ()>);

fn turn() -> Turn {
    Turn(TURN.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Turn {
    /// `podvisor run FLAGS IMAGE COMMAND`.
    fn command(&self, flags: &[&str], command: &[&str]) -> Command {
        let mut run = STORE.root.podvisor(&["run"]);
        run.args(flags).arg(&STORE.name).args(command);
        run.stdout(Stdio::piped()).stderr(Stdio::piped());
        run
    }

    fn run(&self, flags: &[&str], command: &[&str]) -> Ran {
        Ran::new(self.command(flags, command).output().unwrap())
    }

    fn sh(&self, flags: &[&str], script: &str) -> Ran {
        self.run(flags, &["sh", "-c", script])
    }
}

fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Sends a signal, and again after the program has answered it, until podvisor ends. The number of
/// signals depends on the time between them, and so on the machine.
fn ask_for_its_end(child: &mut Child, signal: Signal, says: &mut (impl Read + AsFd)) {
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        send(child, signal);
        let mut has_ended = false;
        until("an answer or the end", || {
            has_ended = child.try_wait().unwrap().is_some();
            let mut said = [PollFd::new(&*says, PollFlags::IN)];
            has_ended || poll(&mut said, Some(&Timespec::default())).unwrap() > 0
        });
        if has_ended {
            return;
        }
        let _ = says.read(&mut [0; 1024]).unwrap();
    }
    panic!("no signal is one too many");
}

#[test]
fn guest_output_exit_code_and_files_are_the_programs_and_stdin_is_not() {
    let turn = turn();
    let script = "cat; echo x > /etc/new; cat /etc/new; echo to stderr >&2; exit 42";
    let mut child = turn.command(&[], &["sh", "-c", script]);
    let mut child = child.stdin(Stdio::piped()).spawn().unwrap();
    // Without -i it is not read: the pipe may be closed already.
    let _ = child.stdin.take().unwrap().write_all(b"hi\n");
    let ran = Ran::of(child);
    assert_eq!(
        (ran.code, &*ran.stdout, &*ran.stderr),
        (Some(42), "x\n", "to stderr\n")
    );
}

#[test]
fn guest_is_pulled_when_it_is_not_here_and_runs_what_the_image_says() {
    let turn = turn();
    let root = Root::default();
    let settings = json!({"Cmd": ["/bin/echo", "the image says hi"]});
    let registry = Registry::serve(&[("test/pulled", Image::busybox(settings))]);
    let name = registry.name("test/pulled");
    let ran = root.output(&["run", &name]);
    ran.printed("the image says hi\n");
    assert!(ran.stderr.contains(&name), "{ran:?}");
    drop(turn);
}

#[test]
fn guest_sees_the_flags() {
    let flags = [
        "--cpus",
        "2",
        "--memory",
        "512M",
        "-w",
        "/srv",
        "-u",
        "app:staff",
        "-e",
        "FROM=flag",
        "-e",
        "MORE=a b",
        "--hostname",
        "web-1",
        "--transport",
        "pci",
    ];
    let script = "nproc; pwd; id; hostname; echo $FROM; echo $MORE; echo $HOME; \
                  grep MemTotal /proc/meminfo; ls /sys/bus/pci/drivers/virtio-pci | grep -c ^0000";
    let ran = turn().sh(&flags, script);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let lines: Vec<&str> = ran.stdout.lines().collect();
    let expected = [
        "2",
        "/srv",
        "uid=1000(app) gid=50(staff) groups=50(staff)",
        "web-1",
        "flag",
        "a b",
        "/home/app",
    ];
    assert_eq!(lines[..7], expected, "{ran:?}");
    let kilobytes = lines[7].split_whitespace().nth(1).unwrap();
    let megabytes = kilobytes.parse::<u64>().unwrap() / 1024;
    // Memory that the kernel reserves is not shown.
    assert!((400..=512).contains(&megabytes), "{ran:?}");
    assert_eq!(lines[8], "4", "disk, vsock, entropy, balloon: {ran:?}");
}

#[test]
fn guest_entrypoint_can_be_replaced() {
    turn()
        .run(&["--entrypoint", "/bin/echo"], &["a", "-n"])
        .printed("a -n\n");
}

#[test]
fn guest_root_can_be_read_only() {
    let ran = turn().sh(&["--read-only"], "touch /dev/shm/a && touch /etc/new");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(
        ran.stderr.contains("/etc/new: Read-only file system"),
        "{ran:?}"
    );
}

#[test]
fn guest_container_is_confined() {
    let script = "grep -E '^(Seccomp|NoNewPrivs|CapBnd):' /proc/self/status; ls /proc/self/fd; \
                  echo x > /proc/sys/kernel/hostname; mount -t tmpfs none /tmp; echo $$";
    let ran = turn().sh(&[], script);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let squeezed: Vec<String> = ran
        .stdout
        .lines()
        .map(|line| line.replace(char::is_whitespace, ""))
        .collect();
    assert!(squeezed.contains(&"Seccomp:2".to_owned()), "{ran:?}");
    // CHOWN to SETPCAP less LINUX_IMMUTABLE, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, MKNOD,
    // AUDIT_WRITE and SETFCAP: capability.h's bits 0, 1, 3 to 8, 10, 13, 18, 27, 29, 31.
    assert!(
        squeezed.contains(&"CapBnd:00000000a80425fb".to_owned()),
        "{ran:?}"
    );
    assert_eq!(squeezed.last().map(String::as_str), Some("1"), "{ran:?}");
    assert!(ran.stderr.contains("Read-only file system"), "{ran:?}");
    assert!(ran.stderr.contains("mount"), "{ran:?}");
}

/// Pseudo-random bytes, the same every time.
struct Noise {
    state: u64,
    left: usize,
}

impl Read for Noise {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = buffer.len().min(self.left);
        // In an emulated host, a step for each byte would take longer than the rest of the test.
        for bytes in buffer[..count].chunks_mut(8) {
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
            bytes.copy_from_slice(&self.state.to_le_bytes()[..bytes.len()]);
        }
        self.left -= count;
        Ok(count)
    }
}

/// Returns the SHA-256 and the length of the data of `input`.
fn digest(input: &mut impl Read) -> ([u8; 32], u64) {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 64 << 10];
    let mut length = 0;
    loop {
        match input.read(&mut buffer).unwrap() {
            0 => return (hasher.finalize().into(), length),
            got => {
                hasher.update(&buffer[..got]);
                length += got as u64;
            }
        }
    }
}

/// A reader's pause. The machine must not end meanwhile, which is not an event to wait for.
struct Pause;

impl Read for Pause {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        thread::sleep(Duration::from_secs(3));
        Ok(0)
    }
}

#[test]
fn guest_megabytes_come_back_whole() {
    const SIZE: usize = 16_000_000;
    // The program has ended before its reader has received this rest.
    const LEFT: usize = 600_000;
    let noise = || Noise {
        state: 0x9e37_79b9_7f4a_7c15,
        left: SIZE,
    };
    let turn = turn();
    let mut child = turn
        .command(&["-i"], &["cat"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = thread::spawn(move || io::copy(&mut noise(), &mut stdin).map(|_| ()));
    let stdout = child.stdout.as_mut().unwrap();
    let end = File::from(stdout.as_fd().try_clone_to_owned().unwrap());
    let (received, count) = digest(&mut stdout.take((SIZE - LEFT) as u64).chain(Pause).chain(end));
    writer.join().unwrap().unwrap();
    let ran = Ran::of(child);
    assert_eq!((ran.code, count), (Some(0), SIZE as u64), "{ran:?}");
    assert_eq!(received, digest(&mut noise()).0);
}

#[test]
fn guest_program_killed_in_the_guest_gives_128_and_the_signals_number() {
    let ran = turn().sh(&[], "sleep 1000 & kill -KILL $!; wait $!");
    assert_eq!(ran.code, Some(137), "{ran:?}");
}

#[test]
fn guest_of_the_least_memory_runs_and_tells_when_it_has_no_more() {
    let ran = turn().run(&["--memory", "64M"], &["tail", "/dev/zero"]);
    ran.refused(137, &["no memory left", "--memory"]);
}

#[test]
fn guest_that_ignores_every_wish_is_killed_when_it_is_asked_again_and_again() {
    let turn = turn();
    let script = "trap 'echo no' INT; echo ready; while :; do sleep 1; done";
    let mut child = turn.command(&[], &["sh", "-c", script]).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    read_until(&mut stdout, "ready");
    send(&child, Signal::INT);
    read_until(&mut stdout, "no");
    ask_for_its_end(&mut child, Signal::INT, &mut stdout);
    let ran = Ran::of(child);
    assert_eq!(ran.code, Some(130), "{ran:?}");
}

#[test]
fn guest_program_gets_the_signals_that_podvisor_gets() {
    let turn = turn();
    let script = "trap 'echo got TERM; exit 3' TERM; trap 'echo got USR1' USR1; echo ready; \
                  while :; do sleep 1; done";
    let mut child = turn.command(&[], &["sh", "-c", script]).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut next = || {
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        line
    };
    assert_eq!(next(), "ready\n");
    send(&child, Signal::USR1);
    assert_eq!(next(), "got USR1\n");
    send(&child, Signal::TERM);
    assert_eq!(next(), "got TERM\n");
    assert_eq!(Ran::of(child).code, Some(3));
}

#[test]
fn guest_program_learns_that_nobody_reads_its_output() {
    let turn = turn();
    let mut child = turn.command(&[], &["yes"]).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    assert_eq!(line, "y\n");
    let ran = Ran::of(child);
    assert_eq!(ran.code, Some(141), "{ran:?}");
}

#[test]
fn guest_command_that_is_not_there_has_the_shells_code() {
    turn()
        .run(&[], &["no-such-command"])
        .refused(127, &["no-such-command"]);
}

#[test]
fn guest_kernel_that_panics_ends_the_run_at_once() {
    let turn = turn();
    let directory = tempfile::tempdir().unwrap();
    // A whole archive without an init: the kernel finds nothing to run.
    let path = directory.path().join("initramfs.cpio");
    fs::write(&path, empty_cpio()).unwrap();
    let kernel = guest_kernel();
    let mut command = turn.command(&["--kernel", &kernel], &["true"]);
    let ran = Ran::new(
        command
            .env("PODVISOR_GUEST_DIR", directory.path())
            .output()
            .unwrap(),
    );
    ran.refused(
        125,
        &["kernel panic: VFS: Unable to mount root", "--console"],
    );
}

#[test]
fn guest_kernel_that_panics_takes_the_program_along_and_that_is_told() {
    let turn = turn();
    let mut child = turn
        .command(&["--name", "victim"], &["sh", "-c", "echo up; sleep 1000"])
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "up");
    let panic = "echo c >/proc/sysrq-trigger";
    let debug = ["debug", "victim", "sh", "-c", panic];
    STORE.root.output(&debug);
    let why = "the guest ended by a kernel panic: sysrq triggered crash";
    // The last messages of its kernel.
    let words = ["guest: sysrq: Trigger a crash\n", "guest: Kernel panic"];
    Ran::of(child).refused(137, &[&[why, "killed with it"], &words[..]].concat());
    let wait = STORE.root.output(&["wait", "victim"]);
    wait.refused(0, &[&[why], &words[..]].concat());
    assert_eq!(wait.stdout, "137\n");
    let inspect = STORE.root.output(&["inspect", "victim"]);
    let inspect: serde_json::Value = serde_json::from_str(&inspect.stdout).unwrap();
    assert_eq!(inspect[0]["State"]["Error"], why);
    let log = inspect[0]["State"]["GuestLog"].to_string();
    assert!(log.contains("Kernel panic - not syncing"), "{log}");
}

/// Returns the trailer of a cpio archive in the newc format.
fn empty_cpio() -> Vec<u8> {
    let zeros = "0".repeat(8 * 11);
    let mut archive = format!("070701{zeros}0000000b00000000TRAILER!!!\0").into_bytes();
    archive.resize(512, 0);
    archive
}

/// Returns podvisor's default kernel.
fn guest_kernel() -> String {
    let version = STORE.root.output(&["version", "--json"]);
    let version: serde_json::Value = serde_json::from_str(&version.stdout).unwrap();
    version["kernel"]
        .as_str()
        .expect("there is no guest kernel")
        .to_owned()
}

#[test]
fn guest_console_goes_to_a_file() {
    let turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let console = directory.path().join("console");
    let ran = turn.run(&["--console", console.to_str().unwrap()], &["echo", "hi"]);
    ran.printed("hi\n");
    let console = fs::read_to_string(&console).unwrap();
    assert!(console.contains("Linux version"), "{console}");
}

#[test]
fn guest_image_in_use_is_not_removed() {
    let turn = turn();
    let mut child = turn.command(&["-i"], &["sh", "-c", "echo ready; read x"]);
    let mut child = child.stdin(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut line)
        .unwrap();
    assert_eq!(line, "ready\n");
    STORE
        .root
        .output(&["rmi", &STORE.name])
        .refused(1, &["in use"]);
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert_eq!(Ran::of(child).code, Some(0));
}

#[test]
fn guest_terminal_has_the_size_of_the_users_and_follows_it() {
    let turn = turn();
    let mut terminal = Terminal::new(33, 101);
    assert!(terminal.echoes());
    let script = "stty size; until [ \"$(stty size)\" = '50 132' ]; do sleep 0.1; done; \
                  tty; echo resized; read x; echo \"got $x\"; exit 7";
    let mut child = terminal.spawn(turn.command(&["-it"], &["sh", "-c", script]));
    assert!(terminal.read_until("33 101\r\n").ends_with("33 101\r\n"));
    assert!(!terminal.echoes(), "the terminal is not raw");
    terminal.resize(50, 132);
    // A terminal notifies a shell's foreground job; this one has no shell.
    send(&child, Signal::WINCH);
    let seen = terminal.read_until("resized\r\n");
    assert!(seen.contains("/dev/"), "{seen}");
    terminal.person.write_all(b"words\r").unwrap();
    // The guest's terminal echoes the input, the user's does not.
    assert!(
        terminal
            .read_until("got words\r\n")
            .starts_with("words\r\n")
    );
    assert_eq!(child.wait().unwrap().code(), Some(7));
    assert!(terminal.echoes(), "the terminal is not as it was");
}

#[test]
fn guest_terminal_is_restored_when_the_guest_is_switched_off() {
    let turn = turn();
    let mut terminal = Terminal::new(24, 80);
    let script = "trap 'echo no' TERM; echo ready; while :; do sleep 1; done";
    let mut child = terminal.spawn(turn.command(&["-it"], &["sh", "-c", script]));
    terminal.read_until("ready");
    assert!(!terminal.echoes(), "the terminal is not raw");
    send(&child, Signal::TERM);
    terminal.read_until("no");
    ask_for_its_end(&mut child, Signal::TERM, &mut terminal.person);
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(terminal.echoes(), "the terminal is not as it was");
}

#[test]
fn guest_control_c_is_the_programs_on_a_terminal() {
    let turn = turn();
    let mut terminal = Terminal::new(24, 80);
    let script = "trap 'echo got it; exit 5' INT; echo ready; while :; do sleep 1; done";
    let mut child = terminal.spawn(turn.command(&["-it"], &["sh", "-c", script]));
    terminal.read_until("ready");
    terminal.person.write_all(&[3]).unwrap();
    terminal.read_until("got it");
    assert_eq!(child.wait().unwrap().code(), Some(5));
}

#[test]
fn guest_program_goes_on_when_its_terminal_is_left_by_keys() {
    let turn = turn();
    let mut terminal = Terminal::new(24, 80);
    let script = "echo ready; while read x; do echo \"got $x\"; done; exit 6";
    let flags = ["-it", "--rm", "--name", "left"];
    let mut child = terminal.spawn(turn.command(&flags, &["sh", "-c", script]));
    terminal.read_until("ready");
    // The first key by itself is forwarded to the program.
    terminal.person.write_all(&[16, b'a', 16, 17]).unwrap();
    terminal.read_until("goes on");
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(terminal.echoes(), "the terminal is not as it was");
    let attach = ["attach", "--detach-keys", "ctrl-x", "left"];
    let mut child = terminal.spawn(STORE.root.podvisor(&attach));
    // It is attached once it answers to input.
    while terminal.echoes() {
        assert_eq!(child.try_wait().unwrap(), None);
    }
    terminal.person.write_all(b"b\r").unwrap();
    terminal.read_until("ab\r\n");
    terminal.person.write_all(&[24]).unwrap();
    terminal.read_until("goes on");
    assert_eq!(child.wait().unwrap().code(), Some(0));
    goes_on_without_its_user(&turn);
    // A detached one gets a terminal even without one here.
    let there = ["-dit", "--rm", "--name", "there"];
    let started = turn.run(&there, &["sh", "-c", "test -t 0 || exit; sleep 1000"]);
    assert_eq!(started.code, Some(0), "{started:?}");
    let stopped = STORE
        .root
        .output(&["stop", "-t", "0", "left", "there", "left"]);
    stopped.printed("left\nthere\nleft\n");
    assert_eq!(STORE.root.output(&["ps", "-q"]).stdout, "");
}

/// Closes the terminal at which the program `left` is, and the other ways out of it that nobody
/// asked for.
fn goes_on_without_its_user(turn: &Turn) {
    let attached = || {
        let terminal = Terminal::new(24, 80);
        let child = terminal.spawn(STORE.root.podvisor(&["attach", "left"]));
        while terminal.echoes() {}
        (terminal, child)
    };
    let (terminal, mut child) = attached();
    drop(terminal);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let (_terminal, mut child) = attached();
    send(&child, Signal::HUP);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    // Whoever reads what it prints has read enough.
    let prints = "while :; do echo word > /proc/1/fd/1; sleep 1; done";
    let prints = ["exec", "-d", "left", "sh", "-c", prints];
    assert_eq!(STORE.root.output(&prints).code, Some(0));
    let mut attach = STORE.root.podvisor(&["attach", "--no-stdin", "left"]);
    let mut child = attach.stdout(Stdio::piped()).spawn().unwrap();
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    reader.read_line(&mut String::new()).unwrap();
    drop(reader);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let mut terminal = Terminal::new(24, 80);
    let flags = ["-it", "--rm", "--name", "closed"];
    let mut child = terminal.spawn(turn.command(&flags, &["sh", "-c", "echo ready; sleep 1000"]));
    terminal.read_until("ready");
    drop(terminal);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let there = STORE.root.output(&["ps"]);
    let is_there = |name| there.stdout.contains(&format!(" {name}\n"));
    assert!(is_there("closed") && is_there("left"), "{there:?}");
    STORE
        .root
        .output(&["stop", "-t", "0", "closed"])
        .printed("closed\n");
}

#[test]
fn guest_runs_an_imported_directory_and_a_saved_image() {
    let turn = turn();
    let root = Root::default();
    let directory = root.path().join("rootfs");
    for name in ["bin", "dev", "etc", "proc", "sys", "tmp"] {
        fs::create_dir_all(directory.join(name)).unwrap();
    }
    fs::copy("/bin/busybox", directory.join("bin/busybox")).unwrap();
    fs::hard_link(directory.join("bin/busybox"), directory.join("bin/sh")).unwrap();
    fs::write(directory.join("etc/hello"), "from a directory\n").unwrap();
    let directory = directory.display().to_string();
    let imported = root.output(&["import", "-q", &directory, "directory"]);
    assert_eq!(imported.code, Some(0), "{imported:?}");
    let script = "busybox cat /etc/hello; busybox stat -c %h /bin/sh";
    root.output(&["run", "directory", "/bin/sh", "-c", script])
        .printed("from a directory\n2\n");

    let tar = root.path().join("saved.tar").display().to_string();
    STORE
        .root
        .output(&["save", "-o", &tar, &STORE.name])
        .printed("");
    let loaded = root.output(&["load", "-q", "-i", &tar]);
    loaded.printed(&format!("Loaded image: {}\n", STORE.name));
    root.output(&["run", "--pull", "never", &STORE.name])
        .printed("the image says hello\n");
    drop(turn);
}
