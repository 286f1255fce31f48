//! Sandboxes in their own processes, through the real binary. These tests need a KVM that runs
//! guests; they do not assert times.

#[path = "guest_sandbox/programs.rs"]
mod programs;
mod support;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use oci_spec::runtime::MountBuilder;
use podvisor_cri::sandbox::{
    ContainerState, CreateContainer, RefusalKind, SandboxClient, SandboxError, SandboxExit,
    exit_record, jail,
};
use podvisor_images::Image;
use programs::{attachers, execs};
use rustix::process::{Pid, Signal, kill_process};
use support::PATIENCE;
use support::pod::{Pod, eventually, launch, log_text, sh};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Clones of one template that run at the same time, unless `PODVISOR_TEST_CLONES` sets another
/// number.
const CLONES: usize = 4;

fn kind<T: std::fmt::Debug>(result: Result<T, SandboxError>) -> RefusalKind {
    let error = result.unwrap_err();
    error.kind().unwrap_or_else(|| panic!("{error:?}"))
}

/// Size in bytes of a file that will be removed.
const LOG: usize = 8 << 20;

/// Returns the used bytes of a file system.
fn used(path: &Path) -> u64 {
    let about = rustix::fs::statvfs(path).unwrap();
    (about.f_blocks - about.f_bfree) * about.f_frsize
}

fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guest_a_sandbox_runs_containers_of_several_images() {
    let pod = Pod::default();
    let (one, two, three) = (pod.image("one"), pod.image("two"), pod.image("three"));
    let mut config = pod.config(2);
    let shared = pod.path("shared");
    fs::create_dir(&shared).unwrap();
    jail::pass_on_mounts(&shared).unwrap();
    config.shared_dir = Some(shared.clone());
    config.sysctls.insert("kernel.msgmax".into(), "4096".into());
    let sandbox = launch(config).await.unwrap();

    // Output of both kinds is in the log when the exit is known, a cut-off line too.
    let script = "cat /name; echo to stderr >&2; echo; printf unfinished; exit 7";
    let container = pod.container("first", &one, script);
    sandbox.create_container(container).await.unwrap();
    let again = pod.container("first", &one, script);
    let refused = sandbox.create_container(again).await;
    assert_eq!(kind(refused), RefusalKind::AlreadyExists);
    // Another image in parallel; a third one has to wait for a disk.
    let container = pod.container("second", &two, "echo up; exec sleep 10000");
    sandbox.create_container(container).await.unwrap();
    sandbox.start_container("second").await.unwrap();
    let container = pod.container("third", &three, "true");
    let refused = sandbox.create_container(container).await;
    assert_eq!(kind(refused), RefusalKind::ResourceExhausted);

    let started = sandbox.start_container("first").await.unwrap();
    assert!(started.pid > 1 && started.started_at_ns > 1_500_000_000_000_000_000);
    let exit = sandbox.wait("first", None).await.unwrap();
    assert_eq!((exit.code, exit.oom_killed), (7, false));
    assert!(exit.exited_at_ns >= started.started_at_ns);
    let log = pod.log("first");
    let stdout: String = log
        .split_inclusive('\n')
        .filter(|l| l.starts_with("stdout"))
        .collect();
    assert_eq!(stdout, "stdout F one\nstdout F \nstdout P unfinished\n");
    assert!(log.contains("stderr F to stderr\n"), "{log}");

    // Created after the boot, as volumes are.
    let volume = shared.join("volume");
    fs::create_dir(&volume).unwrap();
    rustix::mount::mount_bind(&volume, &volume).unwrap();
    fs::write(volume.join("from-host"), "hello\n").unwrap();
    let script = "cat /data/from-host; echo back > /data/from-guest; cat /proc/sys/kernel/msgmax";
    let mut container = pod.container("volume", &two, script);
    mount(&mut container, "/data", "/run/podvisor/shared/volume");
    sandbox.create_container(container).await.unwrap();
    sandbox.start_container("volume").await.unwrap();
    assert_eq!(sandbox.wait("volume", None).await.unwrap().code, 0);
    assert_eq!(pod.log("volume"), "stdout F hello\nstdout F 4096\n");
    assert_eq!(
        fs::read_to_string(volume.join("from-guest")).unwrap(),
        "back\n"
    );
    // A volume with a file that a running container has read and the guest has cached.
    let logs = shared.join("logs");
    fs::create_dir(&logs).unwrap();
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("logs", &logs, "tmpfs", flags, c"size=64m").unwrap();
    fs::write(logs.join("old"), vec![1; LOG]).unwrap();
    let script = "wc -c < /data/old; exec sleep 9999";
    let mut container = pod.container("logs", &two, script);
    mount(&mut container, "/data", "/run/podvisor/shared/logs");
    sandbox.create_container(container).await.unwrap();
    sandbox.start_container("logs").await.unwrap();
    let read = format!("stdout F {LOG}\n");
    eventually("the size of a file", || pod.log("logs") == read).await;
    fs::remove_file(logs.join("old")).unwrap();
    // A file that is not on a mount belongs to the host, whatever the guest's root tries.
    fs::create_dir(shared.join("bare")).unwrap();
    let script = "(echo > /data/new); true";
    let mut container = pod.container("bare", &two, script);
    mount(&mut container, "/data", "/run/podvisor/shared/bare");
    sandbox.create_container(container).await.unwrap();
    sandbox.start_container("bare").await.unwrap();
    assert_eq!(sandbox.wait("bare", None).await.unwrap().code, 0);
    assert!(pod.log("bare").contains("Read-only file system"));
    assert_eq!(fs::read_dir(shared.join("bare")).unwrap().count(), 0);
    sandbox.delete_container("bare").await.unwrap();
    // The process checks for it every minute.
    eventually("the space of a file", || used(&logs) < LOG as u64).await;
    sandbox.signal("logs", None, 9, true).await.unwrap();
    sandbox.wait("logs", None).await.unwrap();
    sandbox.delete_container("logs").await.unwrap();
    for point in [&logs, &volume, &shared] {
        rustix::mount::unmount(point, rustix::mount::UnmountFlags::DETACH).unwrap();
    }
    sandbox.delete_container("volume").await.unwrap();

    execs(&sandbox).await;
    attachers(&sandbox, &pod, &two).await;

    let stats = sandbox.stats("second").await.unwrap();
    assert!(
        stats.memory_usage_bytes > 0 && stats.pids_current >= 1,
        "{stats:?}"
    );
    // It was not configured to count pressure.
    assert_eq!((stats.psi, stats.guest_psi), Default::default());
    let list = sandbox.list().await.unwrap();
    let states: Vec<_> = list.iter().map(|c| (c.id.as_str(), c.state)).collect();
    let expected = [
        ("first", ContainerState::Exited),
        ("second", ContainerState::Running),
    ];
    assert_eq!(states, expected);
    assert_eq!(list[0].exit, Some(exit));

    // The disk of an ended container serves another image, and then a third; its statistics are
    // removed with it.
    assert_eq!(kind(sandbox.stats("first").await), RefusalKind::WrongState);
    for (old, new, image) in [("first", "third", &three), ("third", "fourth", &one)] {
        let container = pod.container(new, image, "cat /name");
        sandbox.create_container(container).await.unwrap();
        sandbox.start_container(new).await.unwrap();
        assert_eq!(sandbox.wait(new, None).await.unwrap().code, 0);
        sandbox.delete_container(old).await.unwrap();
        sandbox.delete_container(old).await.unwrap();
    }
    assert_eq!(pod.log("third"), "stdout F three\n");
    assert_eq!(pod.log("fourth"), "stdout F one\n");
    assert_eq!(
        kind(sandbox.start_container("first").await),
        RefusalKind::NotFound
    );
    assert_eq!(
        kind(sandbox.wait("first", None).await),
        RefusalKind::NotFound
    );

    // A process that a signal ended exits with 128 plus its number. The wait starts before.
    let waits = tokio::spawn({
        let sandbox = sandbox.clone();
        async move { sandbox.wait("second", None).await }
    });
    sandbox.signal("second", None, 9, true).await.unwrap();
    assert_eq!(waits.await.unwrap().unwrap().code, 137);

    let ended = sandbox.clone();
    let (shut, exit) = tokio::join!(sandbox.shutdown(PATIENCE), ended.ended());
    shut.unwrap();
    assert_eq!(exit, SandboxExit::PoweredOff);
    let gone = sandbox.list().await.unwrap_err();
    assert!(gone.is_gone(), "{gone:?}");
    match SandboxClient::connect(&pod.dir()).await {
        Err(SandboxError::Gone { exit, .. }) => assert_eq!(exit, Some(SandboxExit::PoweredOff)),
        other => panic!("{other:?}"),
    }
    let record = exit_record(&pod.dir()).unwrap();
    let ids: Vec<_> = record.containers.iter().map(|c| c.id.as_str()).collect();
    assert_eq!(ids, ["fourth", "second"]);
}

/// A sandbox, and its container's output.
struct Sandbox {
    client: SandboxClient,
    is_clone: bool,
    name: String,
    /// The lines of the container, in order.
    hostname: String,
    entropy: String,
    boot_id: String,
    volume: String,
    pressure: Vec<String>,
}

impl Sandbox {
    async fn start(pod: &Pod, image: &Image, number: usize) -> Self {
        let name = format!("sandbox{number}");
        let dir = pod.path(&name);
        fs::DirBuilder::new().mode(0o700).create(&dir).unwrap();
        let shared = dir.join("shared");
        fs::create_dir_all(shared.join("volume")).unwrap();
        fs::write(shared.join("volume/file"), &name).unwrap();
        let mut config = pod.config(2);
        config.hostname = name.clone();
        config.shared_dir = Some(shared);
        config.templates = Some(pod.path("templates"));
        config.psi = true;
        config.dir = dir.clone();
        let client = launch(config).await.unwrap();
        let script = "head -c 32 /dev/urandom | md5sum; hostname; date +%s; \
                      cat /proc/sys/kernel/random/boot_id; cat /data/file; echo; \
                      ls /proc/pressure";
        let mut container = pod.container(&name, image, script);
        mount(&mut container, "/data", "/run/podvisor/shared/volume");
        client.create_container(container).await.unwrap();
        client.start_container(&name).await.unwrap();
        assert_eq!(client.wait(&name, None).await.unwrap().code, 0);
        let log = fs::read_to_string(dir.join("sandbox.log")).unwrap();
        let said = pod.log(&name);
        let mut lines = said
            .lines()
            .map(|line| line.trim_start_matches("stdout F ").to_owned());
        let mut line = || lines.next().unwrap_or_default();
        let (entropy, hostname) = (line(), line());
        let time: u64 = line().parse().unwrap();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let age = now.as_secs().abs_diff(time);
        assert!(age < 300, "{name}'s clock is {age} s off");
        Self {
            client,
            is_clone: log.contains("is_clone=true"),
            name,
            entropy,
            hostname,
            boot_id: line(),
            volume: line(),
            pressure: lines.collect(),
        }
    }

    /// Ends the sandbox after checking that it is itself.
    async fn check_and_end(self) -> [String; 2] {
        assert_eq!([&self.hostname, &self.volume], [&self.name, &self.name]);
        // The template's kernel has the requested parameters.
        assert_eq!(self.pressure, ["cpu", "io", "memory"]);
        self.client.shutdown(PATIENCE).await.unwrap();
        [self.entropy, self.boot_id]
    }
}

/// Returns the directory of the template, once it is complete.
fn template(pod: &Pod) -> Option<PathBuf> {
    let entries = fs::read_dir(pod.path("templates")).ok()?.flatten();
    let is_complete = |path: &PathBuf| path.join("state").exists() && path.extension().is_none();
    entries.map(|entry| entry.path()).find(is_complete)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guest_sandboxes_are_clones_of_a_template_with_nothing_in_common() {
    let count = std::env::var("PODVISOR_TEST_CLONES").map_or(CLONES, |n| n.parse().unwrap());
    let pod = Arc::new(Pod::default());
    let image = Arc::new(pod.image("one"));
    let first = Sandbox::start(&pod, &image, 0).await;
    assert!(!first.is_clone);
    eventually("the template", || template(&pod).is_some()).await;
    // All run at the same time, in addition to the first one; a few start at the same time.
    let mut starts = JoinSet::new();
    let turns = Arc::new(Semaphore::new(4));
    for number in 1..=count {
        let (pod, image, turns) = (pod.clone(), image.clone(), turns.clone());
        starts.spawn(async move {
            let _turn = turns.acquire().await.unwrap();
            Sandbox::start(&pod, &image, number).await
        });
    }
    let mut random = BTreeSet::from(first.check_and_end().await);
    let clones = starts.join_all().await;
    for clone in clones {
        assert!(clone.is_clone, "{}", clone.name);
        random.extend(clone.check_and_end().await);
    }
    assert_eq!(random.len(), 2 * (count + 1), "{random:?}");
    // A damaged template is not used, and is recreated.
    fs::write(template(&pod).unwrap().join("state"), "nonsense").unwrap();
    let last = Sandbox::start(&pod, &image, count + 1).await;
    assert!(!last.is_clone);
    last.check_and_end().await;
}

fn mount(container: &mut CreateContainer, destination: &str, source: &str) {
    let mount = MountBuilder::default()
        .destination(destination)
        .typ("bind")
        .source(source)
        .options(["rbind".to_owned(), "rw".to_owned()])
        .build()
        .unwrap();
    let mut mounts = container.config.spec.mounts().clone().unwrap();
    mounts.push(mount);
    container.config.spec.set_mounts(Some(mounts));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guest_a_sandbox_outlives_its_launcher() {
    let pod = Pod::default();
    let log = pod.path("counter.log");
    let image = pod.image("image");
    let test = std::env::current_exe().unwrap();
    let target = test.parent().and_then(Path::parent).unwrap();
    let mut launcher = Command::new(target.join("examples/outlived"))
        .arg(env!("CARGO_BIN_EXE_podvisor"))
        .args([&pod.dir(), image.rootfs()])
        .arg(image.id().to_string())
        .arg(&log)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(launcher.stdout.take().unwrap()).lines();
    let pid = lines
        .map(|line| line.unwrap())
        .find_map(|line| Some(line.split_once("launched ")?.1.parse::<u32>().unwrap()))
        .expect("the launcher ended");
    launcher.kill().unwrap();
    launcher.wait().unwrap();

    let sandbox = SandboxClient::connect(&pod.dir()).await.unwrap();
    assert_eq!(sandbox.pid(), pid);
    let count = |log: &Path| log_text(log).lines().count();
    let before = count(&log);
    eventually("more output", || count(&log) > before + 3).await;
    let list = sandbox.list().await.unwrap();
    assert_eq!(
        (&*list[0].id, list[0].state),
        ("counter", ContainerState::Running)
    );
    let ran = sh(&sandbox, "counter", "e", "cat /name").await;
    assert_eq!((ran.code, &*ran.stdout), (0, "image\n"));

    // A second client at the same time; each may disconnect.
    let other = SandboxClient::connect(&pod.dir()).await.unwrap();
    drop(sandbox);
    other.signal("counter", None, 10, false).await.unwrap();
    assert_eq!(other.wait("counter", None).await.unwrap().code, 5);
    let log = log_text(&log);
    let expected: String = (0..log.lines().count())
        .map(|n| format!("stdout F {n}\n"))
        .collect();
    assert_eq!(log, expected);

    signal(pid, Signal::TERM);
    assert_eq!(other.ended().await, SandboxExit::PoweredOff);
    let record = exit_record(&pod.dir()).unwrap();
    assert_eq!(record.containers[0].exit.unwrap().code, 5);
}

/// Checks a sandbox's process without a shared directory by `/proc`; `tests/jail.rs` checks the
/// effects.
fn is_jailed(pid: u32) {
    for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        // Threads that wait for work end after some time without it.
        let Ok(status) = fs::read_to_string(task.unwrap().path().join("status")) else {
            continue;
        };
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_default()
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
        };
        let uid = (podvisor_cri::sandbox::jail::UID_BASE + pid).to_string();
        assert_eq!(field("Uid:"), [&*uid; 4].join(" "), "{status}");
        assert_eq!(field("Gid:"), [&*uid; 4].join(" "), "{status}");
        assert_eq!(field("Groups:"), "", "{status}");
        for set in ["CapPrm:", "CapEff:", "CapBnd:", "CapAmb:", "CapInh:"] {
            assert_eq!(field(set), "0000000000000000", "{set} {status}");
        }
        assert_eq!(
            (&*field("NoNewPrivs:"), &*field("Seccomp:")),
            ("1", "2"),
            "{status}"
        );
        assert_eq!(field("NSpid:").split(' ').count(), 2, "{status}");
    }
    for space in ["mnt", "ipc", "uts", "net", "pid", "cgroup", "user"] {
        let link = |of: &str| fs::read_link(format!("/proc/{of}/ns/{space}")).unwrap();
        assert_ne!(link(&pid.to_string()), link("self"), "{space}");
    }
    assert_eq!(
        fs::read_dir(format!("/proc/{pid}/root")).unwrap().count(),
        0
    );
    let mounts = fs::read_to_string(format!("/proc/{pid}/mounts")).unwrap();
    assert_eq!(mounts.lines().count(), 1, "{mounts}");
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    for (resource, most) in [
        ("Max core file size", "0"),
        ("Max msgqueue size", "0"),
        ("Max nice priority", "0"),
        ("Max realtime priority", "0"),
        ("Max processes", "8192"),
    ] {
        let mut lines = limits.lines();
        let values = lines.find_map(|line| line.strip_prefix(resource)).unwrap();
        let values: Vec<&str> = values.split_whitespace().take(2).collect();
        assert_eq!(values, [most; 2], "{limits}");
    }
    let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    assert_eq!(cgroup, "0::/podvisor-test/test/machine\n");
    let limit = fs::read_to_string("/sys/fs/cgroup/podvisor-test/test/memory.max").unwrap();
    let expected = (256 << 20) + podvisor_cri::sandbox::MEMORY_OVERHEAD;
    assert_eq!(limit.trim(), expected.to_string());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guest_a_killed_sandbox_leaves_nothing_but_its_directory() {
    let pod = Pod::default();
    let image = pod.image("image");
    let sandbox = launch(pod.config(1)).await.unwrap();
    let container = pod.container("sleeper", &image, "echo up; exec sleep 10000");
    sandbox.create_container(container).await.unwrap();
    sandbox.start_container("sleeper").await.unwrap();
    eventually("the container's output", || {
        pod.log("sleeper") == "stdout F up\n"
    })
    .await;
    is_jailed(sandbox.pid());
    let waits = tokio::spawn({
        let sandbox = sandbox.clone();
        async move { sandbox.wait("sleeper", None).await }
    });
    tokio::task::yield_now().await;
    signal(sandbox.pid(), Signal::KILL);
    assert_eq!(sandbox.ended().await, SandboxExit::Died);
    assert!(waits.await.unwrap().unwrap_err().is_gone());
    match SandboxClient::connect(&pod.dir()).await {
        Err(SandboxError::Gone { exit: None, .. }) => {}
        other => panic!("{other:?}"),
    }
    sandbox.shutdown(PATIENCE).await.unwrap();
    // Reaped, and no child or helper of it is left.
    let process = format!("/proc/{}", sandbox.pid());
    eventually("the end of the process", || !Path::new(&process).exists()).await;
    assert!(!Path::new("/sys/fs/cgroup/podvisor-test/test").exists());

    // The directory serves another one, and a grace period of zero means a kill.
    let sandbox = launch(pod.config(1)).await.unwrap();
    assert!(sandbox.list().await.unwrap().is_empty());
    sandbox.shutdown(Duration::ZERO).await.unwrap();
    assert_eq!(sandbox.ended().await, SandboxExit::Killed);
}
