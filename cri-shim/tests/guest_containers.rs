//! Containers without a daemon, through the real binary. These tests need a KVM that runs guests;
//! they do not assert times.

#[path = "guest_containers/copies.rs"]
mod copies;
mod support;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, TryRecvError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use podvisor_cri::sandbox::jail;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};
use support::host::{Host, kill, sandboxes};
use support::{Ran, until};

/// A directory on an ext4, while this exists.
struct Ext4<'a>(&'a Path);

impl<'a> Ext4<'a> {
    fn mount(at: &'a Path) -> Self {
        let image = at.with_extension("ext4");
        fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
        fs::create_dir(at).unwrap();
        // Where it is a module.
        let _ = Command::new("modprobe").arg("loop").status();
        let (image, at) = (image.to_str().unwrap(), at.to_str().unwrap());
        for command in [
            &["mkfs.ext4", "-q", image][..],
            &["mount", "-o", "loop", image, at],
        ] {
            let done = Command::new(command[0]).args(&command[1..]).status();
            assert!(done.unwrap().success(), "{command:?}");
        }
        Self(Path::new(at))
    }
}

impl Drop for Ext4<'_> {
    fn drop(&mut self) {
        let _ = unmount(self.0, UnmountFlags::DETACH);
    }
}

/// Returns the lines as they arrive.
fn lines_of(stdout: ChildStdout) -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(stdout).lines() {
            // The receiver may have been dropped.
            let _ = sender.send(line.unwrap());
        }
    });
    lines
}

/// Waits until there is a sandbox, or fails if there will not be one.
fn launched(run: &mut Child) {
    until("a sandbox", || {
        assert_eq!(run.try_wait().unwrap(), None);
        !sandboxes().is_empty()
    });
}

#[test]
fn guest_container_is_found_again_by_every_command() {
    let host = Host::default();
    let data = host.root.path().join("data");
    // The host's own root may be of a file system without mapped users.
    let mount = Ext4::mount(&data);
    fs::write(data.join("from-host"), "hello\n").unwrap();
    let volume = format!("{}:/data", data.display());
    let script = "echo up; cat /data/from-host; trap 'echo poked' USR1; \
                  trap 'sleep 3; echo whole > /data/flushed; echo flushed; exit 4' TERM; \
                  while :; do sleep 0.1; done";
    let id = host.start(
        &["--name", "web", "-l", "tier=front", "-v", &volume],
        script,
    );
    assert_eq!(id.len(), 64);
    assert_eq!(host.logs_with("web", "hello"), "up\nhello\n");

    let ps = host.json(&["ps", "--format", "json"]);
    let fields = |name: &str| ps[0][name].clone();
    assert_eq!(
        (fields("Id"), fields("State")),
        (id.clone().into(), "running".into())
    );
    assert_eq!(ps[0]["Labels"]["tier"], "front");
    let started = ps[0]["StartedAt"].clone();
    assert!(started.is_string(), "{ps}");
    let table = host.podvisor(&["ps"]).stdout;
    assert!(table.contains("web") && table.contains("Up "), "{table}");
    for (filter, count) in [
        ("label=tier=front", 1),
        ("name=nobody", 0),
        ("status=exited", 0),
    ] {
        let ran = host.podvisor(&["ps", "-q", "--filter", filter]);
        assert_eq!(ran.stdout.lines().count(), count, "{filter}");
    }
    let taken = ["run", "-d", "--name", "web", "box", "true"];
    host.podvisor(&taken).refused(125, &["web", "in use"]);
    host.podvisor(&["rm", "web"])
        .refused(1, &["running", "--force"]);

    // Execs: output, exit codes, input, environment.
    host.podvisor(&["exec", "web", "sh", "-c", "echo $A; exit 0"])
        .printed("\n");
    let ran = host.podvisor(&[
        "exec",
        "-e",
        "A=b",
        &id[..8],
        "sh",
        "-c",
        "echo $A; echo no >&2; exit 3",
    ]);
    assert_eq!(
        (ran.code, &*ran.stdout, &*ran.stderr),
        (Some(3), "b\n", "no\n")
    );
    let mut cat = host.root.podvisor(&["exec", "-i", "web", "cat"]);
    cat.stdin(fs::File::open(data.join("from-host")).unwrap());
    Ran::new(cat.output().unwrap()).printed("hello\n");
    // It ends although what it leaves behind has its output open.
    let leaves = ["exec", "web", "sh", "-c", "sleep 1000 & echo left"];
    let mut leaves = host.root.podvisor(&leaves);
    let leaves = leaves.stdout(Stdio::piped()).spawn().unwrap();
    host.podvisor(&["exec", "web", "no-such-command"])
        .refused(127, &["no-such-command"]);
    host.podvisor(&["exec", "web", "/etc"])
        .refused(126, &["/etc"]);
    host.podvisor(&["exec", "-u", "nobody-here", "web", "true"])
        .refused(125, &["nobody-here"]);
    host.podvisor(&["exec", "nobody", "true"])
        .refused(125, &["nobody"]);
    let top = host.podvisor(&["top", "web"]);
    let lists = |text: &str| top.stdout.contains(text);
    assert!(lists("PID") && lists("sh -c"), "{top:?}");

    // Files in both directions.
    let file = data.join("from-host").display().to_string();
    host.podvisor(&["cp", &file, "web:/tmp"]).printed("");
    host.podvisor(&["exec", "web", "cat", "/tmp/from-host"])
        .printed("hello\n");
    let to = host.root.path().join("copies");
    fs::create_dir(&to).unwrap();
    host.podvisor(&["cp", "web:/tmp/from-host", &to.display().to_string()])
        .printed("");
    assert_eq!(fs::read_to_string(to.join("from-host")).unwrap(), "hello\n");
    // Explicit names, and the contents of a directory.
    let at = |name: &str| to.join(name).display().to_string();
    for (from, place) in [
        ("web:/tmp/from-host", at("renamed")),
        ("web:/tmp", at("all")),
        ("web:/tmp/.", at("contents")),
        ("web:/tmp/.", at("")),
    ] {
        host.podvisor(&["cp", from, &place]).printed("");
    }
    for name in [
        "renamed",
        "all/from-host",
        "contents/from-host",
        "from-host",
    ] {
        assert_eq!(fs::read_to_string(to.join(name)).unwrap(), "hello\n");
    }
    host.podvisor(&["cp", "web:/tmp", &at("renamed")])
        .refused(1, &["renamed", "is a file"]);
    host.podvisor(&["cp", &file, "web:/tmp/renamed"])
        .printed("");
    for directory in [at("all"), at("all/.")] {
        host.podvisor(&["cp", &directory, "web:/tmp/renamed"])
            .refused(1, &["/tmp/renamed", "is a file"]);
    }
    let contents = at("all/.");
    host.podvisor(&["cp", &contents, "web:/made"]).printed("");
    host.podvisor(&["exec", "web", "cat", "/tmp/renamed", "/made/from-host"])
        .printed("hello\nhello\n");
    host.podvisor(&["cp", &file, "web:/no/such/directory"])
        .refused(1, &["/no/such"]);
    // Links from an earlier copy are not followed, and special files are not replaced.
    let outside = host.root.path().join("outside");
    fs::create_dir(&outside).unwrap();
    let run = |script: &str| {
        host.podvisor(&["exec", "web", "sh", "-c", script])
            .printed("")
    };
    run(&format!("ln -s {} /tmp/way", outside.display()));
    host.podvisor(&["cp", "web:/tmp/way", &at("")]).printed("");
    assert_eq!(fs::read_link(to.join("way")).unwrap(), outside);
    run("rm /tmp/way && mkdir /tmp/way && echo evil > /tmp/way/file");
    host.podvisor(&["cp", "web:/tmp/way", &at("")])
        .refused(1, &["way is no directory"]);
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    run("mkfifo /tmp/way/pipe");
    host.podvisor(&["cp", "web:/tmp/way", &at("way2")])
        .refused(1, &["way/pipe is a device, a pipe or a socket"]);
    // If it is interrupted, it leaves nothing.
    let is_half_way = || {
        let mut names = fs::read_dir(&to).unwrap().map(Result::unwrap);
        names.any(|name| name.file_name().to_string_lossy().starts_with('.'))
    };
    assert!(!is_half_way());
    run("dd if=/dev/zero of=/tmp/way/big bs=1 count=0 seek=1G 2>/dev/null");
    let mut copy = host.root.podvisor(&["cp", "web:/tmp/way/big", &at("")]);
    let mut copy = copy.stderr(Stdio::piped()).spawn().unwrap();
    until("the half of a copy", || {
        assert_eq!(copy.try_wait().unwrap(), None);
        is_half_way()
    });
    let pid = Pid::from_raw(copy.id().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    let copied = Ran::of(copy);
    assert_eq!(copied.code, Some(130), "{copied:?}");
    assert!(!is_half_way());
    run("rm -r /tmp/way");
    // Archives.
    let mut pack = host.root.podvisor(&["cp", "web:/tmp/renamed", "-"]);
    let packed = pack.output().unwrap();
    assert!(packed.status.success(), "{packed:?}");
    let archive = to.join("archive.tar");
    fs::write(&archive, &packed.stdout).unwrap();
    let mut unpack = host.root.podvisor(&["cp", "-", "web:/made"]);
    let unpacked = unpack.stdin(fs::File::open(&archive).unwrap()).output();
    assert!(unpacked.as_ref().unwrap().status.success(), "{unpacked:?}");
    host.podvisor(&["exec", "web", "cat", "/made/renamed"])
        .printed("hello\n");

    Ran::of(leaves).printed("left\n");

    // Paused, it does nothing; then it continues.
    host.podvisor(&["pause", "web"]).printed("web\n");
    assert_eq!(host.json(&["ps", "--json"])[0]["State"], "paused");
    host.podvisor(&["exec", "web", "true"])
        .refused(125, &["paused", "unpause"]);
    host.podvisor(&["cp", &file, "web:/tmp"])
        .refused(1, &["paused", "unpause"]);
    host.podvisor(&["attach", "web"])
        .refused(125, &["paused", "unpause"]);
    host.podvisor(&["pause", "web"]).refused(1, &["paused"]);
    host.podvisor(&["unpause", "web"]).printed("web\n");
    host.podvisor(&["exec", "web", "true"]).printed("");

    let stats = host.json(&["stats", "--no-stream", "--format", "json"]);
    assert!(stats[0]["MemoryUsage"].as_u64().unwrap() > 0, "{stats}");
    assert!(
        stats[0]["HostMemory"]["Private"].as_u64().unwrap() > 1 << 20,
        "{stats}"
    );
    let inspect = host.json(&["inspect", "web"]);
    assert_eq!(inspect[0]["State"]["Running"], true);
    // It serves the volume as nobody on the host, and its guest's users have their numbers there.
    let pid = inspect[0]["State"]["Pid"].as_u64().unwrap();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let own = u64::from(jail::UID_BASE) + pid;
    assert!(
        status.contains(&format!("Uid:\t{own}\t{own}\t")),
        "{status}"
    );
    let give = "echo x > /data/given && chown 1000:1001 /data/given && mkdir -m 700 /data/own && \
                chown 1000 /data/own";
    host.podvisor(&["exec", "web", "sh", "-c", give])
        .printed("");
    host.podvisor(&[
        "exec",
        "--user",
        "1000:1000",
        "web",
        "touch",
        "/data/own/new",
    ])
    .printed("");
    let owner = |name: &str| {
        let meta = fs::metadata(data.join(name)).unwrap();
        (meta.uid(), meta.gid())
    };
    assert_eq!(owner("given"), (1000, 1001));
    assert_eq!((owner("own"), owner("own/new")), ((1000, 0), (1000, 1000)));
    // A kernel may have an older Landlock.
    let missing = inspect[0]["HostConfig"]["JailMissing"].as_array().unwrap();
    assert!(
        missing.iter().all(|layer| layer == "part of Landlock"),
        "{missing:?}"
    );
    assert_eq!(inspect[0]["Mounts"][0]["Destination"], "/data");

    // An attached client gets the output and the exit code; the program gets its grace period.
    let mut attach = host.root.podvisor(&["attach", "web"]);
    let mut attach = attach.stdout(Stdio::piped()).spawn().unwrap();
    let attached = lines_of(attach.stdout.take().unwrap());
    let wait = host.root.podvisor(&["wait", "web"]);
    let wait = { wait }.stdout(Stdio::piped()).spawn().unwrap();
    // Only output that is written later shows that a client is attached.
    until("what the container writes", || {
        let is_attached = attached.try_recv() != Err(TryRecvError::Empty);
        if !is_attached {
            host.podvisor(&["kill", "-s", "USR1", "web"])
                .printed("web\n");
        }
        is_attached
    });
    host.podvisor(&["stop", "-t", "300", "web"])
        .printed("web\n");
    assert_eq!(fs::read_to_string(data.join("flushed")).unwrap(), "whole\n");
    assert_eq!(attached.iter().last().as_deref(), Some("flushed"));
    assert_eq!(attach.wait().unwrap().code(), Some(4));
    Ran::of(wait).printed("4\n");

    host.podvisor(&["wait", "web"]).printed("4\n");
    assert_eq!(host.podvisor(&["ps", "-q"]).stdout, "");
    let ended = host.json(&["ps", "-a", "--json"]);
    assert_eq!(
        (&ended[0]["State"], &ended[0]["ExitCode"]),
        (&"exited".into(), &4.into())
    );
    assert_eq!(ended[0]["StartedAt"], started);
    let logs = host.podvisor(&["logs", "web"]).stdout;
    assert!(logs.starts_with("up\nhello\npoked\n"), "{logs}");
    let stamped = host.podvisor(&["logs", "-t", "--tail", "1", "web"]).stdout;
    assert!(
        stamped.starts_with("20") && stamped.ends_with("Z flushed\n"),
        "{stamped}"
    );
    host.podvisor(&["exec", "web", "true"])
        .refused(125, &["exited"]);
    host.podvisor(&["rm", "web"]).printed("web\n");
    host.podvisor(&["rm", "web"])
        .refused(1, &["no container `web`"]);
    assert_eq!(
        fs::read_to_string(data.join("from-host")).unwrap(),
        "hello\n"
    );
    drop(mount);
    assert_eq!(host.left(), Vec::<String>::new());
}

#[test]
fn guest_containers_log_does_not_grow_beyond_its_bounds() {
    let host = Host::default();
    let script = "read x; i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i + 1)); done";
    let flags = ["--name", "talker", "-i", "--log-max-size", "64K"];
    let id = host.start(&flags, script);
    let mut follow = host.root.podvisor(&["logs", "-f", "talker"]);
    let follow = follow.stdout(Stdio::piped()).spawn().unwrap();
    let mut attach = host.root.podvisor(&["attach", "talker"]);
    attach.stdin(Stdio::piped()).stdout(Stdio::null());
    let mut attach = attach.spawn().unwrap();
    std::io::Write::write_all(&mut attach.stdin.take().unwrap(), b"go\n").unwrap();
    attach.wait().unwrap();
    host.podvisor(&["wait", "talker"]).printed("0\n");
    let followed = Ran::of(follow).stdout;
    assert!(followed.ends_with("\n2998\n2999\n"), "{followed}");
    let logs = host.podvisor(&["logs", "talker"]).stdout;
    let numbers: Vec<u32> = logs.lines().map(|line| line.parse().unwrap()).collect();
    // The last ones, without a gap; older ones are gone.
    assert!(numbers[0] > 0 && numbers.len() > 1000, "{logs}");
    assert!(numbers.iter().copied().eq(numbers[0]..3000), "{logs}");
    host.podvisor(&["logs", "--tail", "2", "talker"])
        .printed("2998\n2999\n");
    for name in ["container.log", "container.log.1"] {
        let log = host.root.path().join("c").join(&id[..12]).join(name);
        assert!(log.metadata().unwrap().len() <= 64 << 10, "{name}");
    }
    host.podvisor(&["rm", "talker"]).printed("talker\n");
    assert_eq!(host.left(), [""; 0]);
}

/// The least age of a template that is cloned. A clone whose clock is not set is so far behind.
const TEMPLATE_AGE: Duration = Duration::from_secs(40);

#[test]
fn guest_containers_begin_as_clones_of_the_first_ones_template_and_know_the_time() {
    let host = Host::default();
    let run = |name| {
        let start = host.start(
            &["--name", name, "--boot", "warm"],
            "echo up; exec sleep 9999",
        );
        host.logs_with(name, "up");
        let log = host.root.path().join("c").join(&start[..12]);
        fs::read_to_string(log.join("sandbox.log")).unwrap()
    };
    let first = run("first");
    assert!(first.contains("is_clone=false"), "{first}");
    let age = |dir: fs::DirEntry| {
        let is_complete = !dir.file_name().into_string().unwrap().starts_with('.');
        let state = is_complete.then(|| fs::metadata(dir.path().join("state")))?;
        state.ok()?.modified().ok()?.elapsed().ok()
    };
    let templates = host.root.path().join("templates");
    until("a template of that age", || {
        fs::read_dir(&templates).is_ok_and(|dirs| {
            dirs.flatten()
                .filter_map(age)
                .any(|age| age >= TEMPLATE_AGE)
        })
    });
    let second = run("second");
    assert!(second.contains("is_clone=true"), "{second}");
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let before = now();
    let date = host.podvisor(&["exec", "second", "date", "+%s"]);
    let after = now();
    let date = Duration::from_secs(date.stdout.trim().parse().unwrap());
    // A slow host's request may have been on its way for some seconds.
    let earliest = before - TEMPLATE_AGE / 4;
    assert!(
        (earliest..=after + Duration::from_secs(1)).contains(&date),
        "it is {date:?} and not {before:?} to {after:?}: the template's time?"
    );
    host.podvisor(&["rm", "-f", "first", "second"])
        .printed("first\nsecond\n");
    host.leaves_nothing();
}

/// While the machine's process is still cleaning up.
#[test]
fn guest_that_has_ended_leaves_its_name_and_image_to_the_next_command() {
    let host = Host::default();
    let run = |flags: &[&str]| {
        let same = [
            "run",
            "--name",
            "same",
            "--memory",
            "128M",
            "-e",
            "PATH=/bin",
        ];
        let program = ["box", "sh", "-c", "echo up; exit 3"];
        let ran = host.podvisor(&[&same, flags, &program].concat());
        assert_eq!((ran.code, &*ran.stdout), (Some(3), "up\n"), "{ran:?}");
    };
    for _ in 0..3 {
        run(&["--rm"]);
        host.podvisor(&["ps", "-aq"]).printed("");
    }
    run(&[]);
    let state = &host.json(&["inspect", "same"])[0]["State"];
    assert_eq!(
        (&state["Status"], &state["ExitCode"]),
        (&"exited".into(), &3.into())
    );
    host.podvisor(&["rm", "same"]).printed("same\n");
    run(&["--rm"]);
    let removed = host.podvisor(&["rmi", "box"]);
    assert_eq!(removed.code, Some(0), "{removed:?}");
    host.leaves_nothing();
}

#[test]
fn guest_programs_begin_with_a_snapshot_of_the_users() {
    let host = Host::default();
    let snapshot = host.root.path().join("booted").display().to_string();
    host.podvisor(&["snapshot", "--memory", "96M", "--volumes", &snapshot])
        .printed("");
    host.podvisor(&["snapshot", &snapshot])
        .refused(1, &["exists already"]);

    let run = |flags: &[&str], script: &str| {
        let from = [
            "run",
            "--rm",
            "-e",
            "PATH=/bin",
            "--from-snapshot",
            &snapshot,
        ];
        let command = ["box", "sh", "-c", script];
        host.podvisor(&[&from, flags, &command].concat())
    };
    let memory = run(&[], "awk '/MemTotal/ {print $2 / 1024}' /proc/meminfo");
    let mebibytes: f64 = memory.stdout.trim().parse().unwrap();
    assert!((48.0..96.0).contains(&mebibytes), "{memory:?}");
    let data = host.root.path().join("data");
    fs::create_dir(&data).unwrap();
    let volume = format!("{}:/data", data.display());
    // What is mounted in a volume is in it, whichever is named first.
    let ran = run(
        &["--tmpfs", "/data/own", "-v", &volume],
        "echo there > /data/file; echo here > /data/own/file && exit 3",
    );
    assert_eq!(ran.code, Some(3), "{ran:?}");
    assert_eq!(fs::read_to_string(data.join("file")).unwrap(), "there\n");
    assert!(!data.join("own/file").exists());

    fs::write(Path::new(&snapshot).join("state"), "nonsense").unwrap();
    run(&[], "true").refused(125, &["snapshot", "booted"]);
    let both = run(&["--memory", "1G"], "true");
    assert_eq!(both.code, Some(125));
    assert!(both.stderr.contains("'--memory <SIZE>'"), "{both:?}");
    assert_eq!(host.left(), [""; 0]);
}

#[test]
fn guest_container_that_does_not_end_is_killed_after_its_grace_period() {
    let host = Host::default();
    let script = "trap 'echo no' TERM; echo up; while :; do sleep 0.1; done";
    host.start(&["--name", "deaf"], script);
    host.logs_with("deaf", "up");
    // The sandbox enforces the deadline: it holds even if the client is gone. It is long enough for
    // a slow guest to answer before.
    let mut stop = host.root.podvisor(&["stop", "-t", "20", "deaf"]);
    let mut stop = stop.spawn().unwrap();
    host.logs_with("deaf", "no");
    stop.kill().unwrap();
    stop.wait().unwrap();
    host.podvisor(&["wait", "deaf"]).printed("137\n");
    host.podvisor(&["rm", "deaf"]).printed("deaf\n");
    assert_eq!(host.left(), Vec::<String>::new());
}

/// The process of a run that is killed, in this order.
#[derive(Debug, Clone, Copy)]
enum Killed {
    LauncherOnTheWay,
    LauncherThenSandbox,
    SandboxOnTheWay,
    Sandbox,
}

#[test]
fn guest_node_is_clean_after_anything_was_killed() {
    let host = Host::default();
    let data = host.root.path().join("data");
    fs::create_dir(&data).unwrap();
    let volume = format!("{}:/data", data.display());
    for killed in [
        Killed::LauncherOnTheWay,
        Killed::LauncherThenSandbox,
        Killed::SandboxOnTheWay,
        Killed::Sandbox,
    ] {
        let flags = ["run", "--rm", "--name", "victim", "--memory", "128M"];
        let more = ["-e", "PATH=/bin", "-v", &volume, "box"];
        let command = ["sh", "-c", "echo up; exec sleep 10000"];
        let mut run = host.root.podvisor(&[&flags[..], &more, &command].concat());
        let run = run.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut run = run.spawn().unwrap();
        let lines = lines_of(run.stdout.take().unwrap());
        match killed {
            Killed::LauncherOnTheWay => launched(&mut run),
            Killed::LauncherThenSandbox | Killed::Sandbox => {
                assert_eq!(lines.recv().as_deref(), Ok("up"), "{killed:?}");
            }
            Killed::SandboxOnTheWay => {
                launched(&mut run);
                sandboxes().into_iter().for_each(kill);
            }
        }
        if matches!(
            killed,
            Killed::LauncherOnTheWay | Killed::LauncherThenSandbox
        ) {
            run.kill().unwrap();
        }
        if matches!(killed, Killed::LauncherThenSandbox | Killed::Sandbox) {
            sandboxes().into_iter().for_each(kill);
        }
        run.wait().unwrap();
        // A launched sandbox outlives its launcher, and is a container like any other.
        host.podvisor(&["rm", "-f", "victim"]);
        let ps = host.podvisor(&["ps", "-aq"]);
        assert_eq!((ps.code, &*ps.stdout), (Some(0), ""), "{killed:?}: {ps:?}");
        // A killed process is gone a moment later, and its group is removed by the next command.
        host.leaves_nothing();
    }
    assert!(data.exists());
}
