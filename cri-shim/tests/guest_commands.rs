//! Restarts, events, consoles and flags of containers without a daemon. These tests need a KVM that
//! runs guests; they do not assert times.

mod support;

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Stdio;

use support::host::{Host, kill, sandboxes};
use support::terminal::Terminal;
use support::{Ran, until};

impl Host {
    /// Returns the past events as text.
    fn events(&self, arguments: &[&str]) -> String {
        let now = ["events", "--until", "0s"];
        let ran = self.podvisor(&[&now, arguments].concat());
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let words = ran.stdout.lines().map(|line| line.split(' ').nth(2));
        words.map(Option::unwrap).collect::<Vec<_>>().join(" ")
    }
}

#[test]
fn guest_events_are_told_as_they_happen_and_none_is_missing() {
    let host = Host::default();
    let mut follow = host.root.podvisor(&["events", "--format", "json"]);
    let mut follow = follow.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follow.stdout.take().unwrap()).lines();
    // Only its output shows that it listens.
    let log = host.root.path().join("events.log");
    until("the log of events", || log.exists());
    let id = host.start(&["--name", "web", "-l", "tier=front"], "exec sleep 9999");
    host.podvisor(&["pause", "web"]).printed("web\n");
    host.podvisor(&["unpause", "web"]).printed("web\n");
    host.podvisor(&["exec", "web", "true"]).printed("");
    // The next command reports what a killed process did not.
    sandboxes().into_iter().for_each(kill);
    until("the end of the killed one", || {
        host.podvisor(&["ps", "-q"]).stdout.is_empty()
    });
    host.podvisor(&["rm", "web"]).printed("web\n");
    let mut words = Vec::new();
    while words.last().map(String::as_str) != Some("destroy") {
        let line = lines.next().unwrap().unwrap();
        let event: serde_json::Value = serde_json::from_str(&line).unwrap();
        let attributes = &event["Actor"]["Attributes"];
        assert_eq!(event["Actor"]["ID"], *id, "{event}");
        assert_eq!(attributes["name"], "web", "{event}");
        assert_eq!(attributes["tier"], "front", "{event}");
        if event["Action"] == "die" {
            assert_eq!(attributes["exitCode"], "137");
        }
        words.push(event["Action"].as_str().unwrap().to_owned());
    }
    let all = "create start pause unpause exec die destroy";
    assert_eq!(words.join(" "), all);
    assert_eq!(host.events(&[]), all);
    assert_eq!(
        host.events(&["-f", "label=tier=front", "-f", "event=die"]),
        "die"
    );
    assert_eq!(host.events(&["-f", "container=nobody"]), "");
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&follow),
        rustix::process::Signal::INT,
    )
    .unwrap();
    assert_eq!(follow.wait().unwrap().code(), Some(130));
}

#[test]
fn guest_console_is_read_and_typed_to_and_needs_no_agent() {
    let host = Host::default();
    host.start(&["--name", "talks", "--console", "pty"], "exec sleep 9999");
    let connect = || {
        let mut console = host.root.podvisor(&["console", "talks"]);
        console.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut console = console.spawn().unwrap();
        let lines = BufReader::new(console.stdout.take().unwrap()).lines();
        (console, lines)
    };
    // Its earlier output is shown first.
    let (mut console, mut lines) = connect();
    assert!(lines.any(|line| line.unwrap().contains("Linux version")));
    let tty = "/proc/1/root/dev/ttyS0";
    let script = format!("exec <{tty} >{tty}; echo ready; read line; echo \"<$line>\"");
    let mut reader = host.root.podvisor(&["debug", "talks", "sh", "-c", &script]);
    let mut reader = reader.spawn().unwrap();
    assert!(lines.any(|line| line.unwrap().contains("ready")));
    let long = "typed ".repeat(30);
    let mut keys = console.stdin.take().unwrap();
    writeln!(keys, "{long}").unwrap();
    let answer = format!("<{}>", long.trim_end());
    assert!(lines.any(|line| line.unwrap().contains(&answer)));
    assert!(reader.wait().unwrap().success());
    let pid = rustix::process::Pid::from_child(&console);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(console.wait().unwrap().code(), Some(130));

    // Even if the guest is paused; it ends with the machine.
    host.podvisor(&["pause", "talks"]).printed("talks\n");
    let (mut console, mut lines) = connect();
    assert!(lines.any(|line| line.unwrap().contains(&answer)));
    host.podvisor(&["rm", "-f", "talks"]).printed("talks\n");
    assert_eq!(console.wait().unwrap().code(), Some(0));
}

#[test]
fn guest_commands_in_a_running_container_have_what_their_flags_say() {
    let host = Host::default();
    let data = host.root.path().join("data");
    std::fs::create_dir(&data).unwrap();
    std::fs::write(data.join("file"), "the host's\n").unwrap();
    let volume = format!("{}:/data:ro", data.display());
    let health = [
        "--health-cmd",
        "echo asked; test ! -e /ill",
        "--health-interval",
        "1s",
        "--health-retries",
        "1",
    ];
    let flags = [&["--name", "quiet", "-v", &volume][..], &health].concat();
    host.start(&flags, "exec sleep 9999");
    let sh = |script: &str| host.podvisor(&["exec", "quiet", "sh", "-c", script]);
    host.podvisor(&["console", "quiet"])
        .refused(1, &["no console", "--console pty"]);

    // A read-only volume can be read; not even the guest itself, outside of the container, writes.
    let is_refused = |ran: Ran| {
        assert_ne!(ran.code, Some(0), "{ran:?}");
        assert!(ran.stderr.contains("Read-only file system"), "{ran:?}");
    };
    sh("cat /data/file").printed("the host's\n");
    for script in ["echo x >/data/file", "echo x >/data/new", "rm /data/file"] {
        is_refused(sh(script));
    }
    let script = "cd /proc/1/root/run/podvisor/shared && cat v0/file && echo x >v0/file";
    let ran = host.podvisor(&["debug", "quiet", "sh", "-c", script]);
    assert_eq!(ran.stdout, "the host's\n", "{ran:?}");
    is_refused(ran);
    let names: Vec<_> = std::fs::read_dir(&data).unwrap().collect();
    assert_eq!(names.len(), 1, "{names:?}");
    let text = std::fs::read_to_string(data.join("file")).unwrap();
    assert_eq!(text, "the host's\n");

    // A directory.
    host.podvisor(&["exec", "-w", "/data", "quiet", "sh", "-c", "pwd; cat file"])
        .printed("/data\nthe host's\n");

    // In the background, nobody waits for it.
    let waits = "until [ -e /go ]; do sleep 0.1; done; echo went >/gone";
    host.podvisor(&["exec", "-d", "quiet", "sh", "-c", waits])
        .printed("");
    sh(": >/go").printed("");
    until("the end of what runs in the background", || {
        sh("cat /gone").stdout == "went\n"
    });

    // Its health follows what its check says.
    let is = |health: &str| {
        let shown = host.podvisor(&["ps", "--filter", &format!("health={health}")]);
        shown.stdout.contains(&format!("({health})"))
    };
    until("a healthy container", || is("healthy"));
    sh(": >/ill").printed("");
    until("an unhealthy container", || is("unhealthy"));
    let shown = host.json(&["inspect", "quiet"]);
    let health = &shown[0]["State"]["Health"];
    let log = health["Log"].as_array().unwrap();
    let last = log.last().unwrap();
    assert_eq!(
        (&last["ExitCode"], &last["Output"]),
        (&1.into(), &"asked\n".into())
    );
    assert_eq!(shown[0]["Config"]["Healthcheck"]["Retries"], 1);

    // A terminal.
    let mut terminal = Terminal::new(33, 101);
    let script = "stty size; tty; echo ready; read -r x; echo \"got $x\"; exit 7";
    let exec = ["exec", "-it", "quiet", "sh", "-c", script];
    let mut child = terminal.spawn(host.root.podvisor(&exec));
    let seen = terminal.read_until("ready\r\n");
    assert!(seen.starts_with("33 101\r\n/dev/pts/"), "{seen}");
    assert!(!terminal.echoes(), "the terminal is not raw");
    terminal.person.write_all(b"words\r").unwrap();
    let seen = terminal.read_until("got words\r\n");
    // The guest's terminal echoes the input, the user's does not.
    assert_eq!(seen, "words\r\ngot words\r\n");
    assert_eq!(child.wait().unwrap().code(), Some(7));
    assert!(terminal.echoes(), "the terminal is not as it was");

    // What the container uses, until the user has seen enough.
    let mut stats = host.root.podvisor(&["stats", "quiet"]);
    let mut stats = stats.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(stats.stdout.take().unwrap()).lines();
    let mut rounds = lines
        .map(Result::unwrap)
        .filter(|line| line.contains("quiet"));
    for _ in 0..3 {
        let round = rounds.next().expect("it ended by itself");
        assert!(round.contains("% ") && round.contains("/ 134MB"), "{round}");
    }
    let pid = rustix::process::Pid::from_child(&stats);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(stats.wait().unwrap().signal(), Some(2));
    host.podvisor(&["rm", "-f", "quiet"]).printed("quiet\n");
    host.leaves_nothing();
}

#[test]
fn guest_program_is_started_again_as_its_policy_says() {
    let host = Host::default();
    let both = ["run", "--rm", "--restart", "always", "box", "true"];
    host.podvisor(&both).refused(125, &["--restart", "--rm"]);

    // In the same files, with the same log, and a limited number of times.
    let script = "echo run $(cat /runs); echo again >>/runs; sleep 1000 & exit 3";
    host.start(&["--name", "fails", "--restart", "on-failure:2"], script);
    host.podvisor(&["wait", "fails"]).printed("3\n");
    host.podvisor(&["logs", "fails"])
        .printed("run\nrun again\nrun again again\n");
    let shown = &host.json(&["inspect", "fails"])[0];
    assert_eq!(shown["RestartCount"], 2, "{shown}");
    assert_eq!(shown["HostConfig"]["RestartPolicy"]["Name"], "on-failure");
    assert_eq!(shown["State"]["Status"], "exited");
    assert_eq!(
        host.events(&["--filter", "container=fails"]),
        "create start die restart start die restart start die"
    );

    // Without the control groups that it has created.
    let script = "cd /sys/fs/cgroup && mkdir init && echo 0 >init/cgroup.procs && \
                  echo +memory >cgroup.subtree_control && echo nested; exit 4";
    let nests = ["--name", "nests", "--restart", "on-failure:1"];
    host.start(&[&nests[..], &["--privileged"]].concat(), script);
    host.podvisor(&["wait", "nests"]).printed("4\n");
    host.podvisor(&["logs", "nests"])
        .printed("nested\nnested\n");
    host.podvisor(&["rm", "nests"]).printed("nests\n");

    // Even while its program does not run; it may not use other devices then.
    let volume = host.root.path().join("volume");
    std::fs::create_dir(&volume).unwrap();
    let program = || {
        let path = volume.join("new");
        let script = "#!/bin/sh\nrm /v/run\nmknod /dev/x c 10 229 || exit 9\n\
                      (: 3<>/dev/x) 2>&- && echo opened || echo refused\nexit 1\n";
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::rename(&path, volume.join("run")).unwrap();
    };
    let restarts = || host.json(&["inspect", "away"])[0]["RestartCount"].as_u64();
    program();
    let mounted = format!("{}:/v", volume.display());
    let away = ["--name", "away", "--restart", "on-failure", "-v", &mounted];
    host.start_program(&away, &["/v/run"]);
    until("a restart without a program", || restarts() >= Some(2));
    program();
    until("the program's restart", || {
        host.podvisor(&["logs", "away"]).stdout == "refused\nrefused\n"
    });
    host.podvisor(&["rm", "-f", "away"]).printed("away\n");

    // Until it is asked to end.
    let script = "trap 'exit 7' TERM; echo up; echo >>/n; \
                  [ $(wc -l </n) -gt 2 ] || exit 0; while :; do sleep 0.1; done";
    host.start(&["--name", "always", "--restart", "always"], script);
    let mut wait = host.root.podvisor(&["wait", "always"]);
    let wait = wait.stdout(std::process::Stdio::piped()).spawn().unwrap();
    until("two restarts", || {
        host.podvisor(&["logs", "always"]).stdout.lines().count() >= 3
    });
    assert_eq!(host.json(&["ps", "--json"])[0]["Restarts"], 2);
    host.podvisor(&["exec", "always", "true"]).printed("");
    host.podvisor(&["stop", "-t", "300", "always"])
        .printed("always\n");
    support::Ran::of(wait).printed("7\n");
    host.podvisor(&["logs", "always"]).printed("up\nup\nup\n");

    // Even while it waits for its next start.
    host.start(&["--name", "waits", "--restart", "always"], "exit 5");
    let status = || host.json(&["ps", "-a", "--json", "-f", "name=waits"])[0]["State"].clone();
    // Its delay is then longer than it takes to observe it.
    until("seven restarts", || {
        host.json(&["inspect", "waits"])[0]["RestartCount"].as_u64() >= Some(7)
    });
    until("a wait for the next one", || status() == "restarting");
    host.podvisor(&["kill", "waits"]).printed("waits\n");
    host.podvisor(&["wait", "waits"]).printed("5\n");
    host.podvisor(&["rm", "fails", "always", "waits"])
        .printed("fails\nalways\nwaits\n");
    // By its stop signal, too, and by no other one.
    let asked = ["--name", "waits", "--restart", "always", "--stop-signal"];
    host.start(&[&asked[..], &["INT"]].concat(), "exit 5");
    until("seven restarts", || {
        host.json(&["inspect", "waits"])[0]["RestartCount"].as_u64() >= Some(7)
    });
    until("a wait for the next one", || status() == "restarting");
    host.podvisor(&["kill", "-s", "TERM", "waits"])
        .refused(1, &["restarting"]);
    host.podvisor(&["kill", "-s", "INT", "waits"])
        .printed("waits\n");
    host.podvisor(&["wait", "waits"]).printed("5\n");
    host.podvisor(&["rm", "waits"]).printed("waits\n");
}

/// Prints the effects of the flags that change the specification.
const FLAGS: &str = "echo $A-$B; grep 192.0.2 /etc/hosts; ulimit -Sn; ulimit -Hn; id -G
    grep -E ' /(data|tmp|dev/shm) ' /proc/mounts | cut -d' ' -f2-4; cat /proc/sys/vm/swappiness
    grep CapEff /proc/self/status; echo x >/tmp/x && echo x >/run/x && echo written
    echo x >/x || echo refused";

#[test]
fn guest_flags_of_a_container_are_what_its_program_finds() {
    let host = Host::default();
    let env = host.root.path().join("env");
    let id = host.root.path().join("cid").display().to_string();
    std::fs::write(&env, "A=file\nB=file\n").unwrap();
    let env = env.display().to_string();
    let flags = [
        "--env-file",
        &env,
        "-e",
        "B=flag",
        "--add-host",
        "db:192.0.2.1",
        "--ulimit",
        "nofile=100:200",
        "--group-add",
        "7",
        "--tmpfs",
        "/data:size=1m,exec",
        "--shm-size",
        "2m",
        "--sysctl",
        "vm.swappiness=42",
        "--cap-drop",
        "ALL",
        "--cap-add",
        "CHOWN",
        "--read-only",
        "--cidfile",
        &id,
        "--name",
        "flags",
        "--stop-timeout",
        "3",
    ];
    let run = [
        &["run", "-e", "PATH=/bin"],
        &flags[..],
        &["box", "sh", "-c", FLAGS],
    ]
    .concat();
    let ran = host.podvisor(&run);
    let lines: Vec<&str> = ran.stdout.lines().collect();
    assert_eq!(
        lines,
        [
            "file-flag",
            "192.0.2.1\tdb",
            "100",
            "200",
            "0 7",
            "/tmp tmpfs rw,nosuid,nodev,relatime",
            "/data tmpfs rw,nosuid,nodev,relatime,size=1024k",
            "/dev/shm tmpfs rw,nosuid,nodev,noexec,relatime,size=2048k",
            "42",
            "CapEff:\t0000000000000001",
            "written",
            "refused",
        ],
        "{ran:?}"
    );
    let shown = host.json(&["inspect", "flags"]);
    assert_eq!(shown[0]["Id"], std::fs::read_to_string(&id).unwrap());
    assert_eq!(shown[0]["Config"]["StopTimeout"], 3);
    // It exists already, and so does the name.
    host.podvisor(&run).refused(125, &["--cidfile"]);
    let replace = [
        "run",
        "--rm",
        "--name",
        "flags",
        "--init",
        "--privileged",
        "-e",
        "PATH=/bin",
        "box",
    ];
    let script = "mount -t tmpfs none /tmp && hostname && cat /proc/1/comm";
    let mounts = ["sh", "-c", script];
    host.podvisor(&[&replace[..], &mounts].concat())
        .refused(125, &["in use"]);
    let replaced = [&["run", "--replace"], &replace[1..], &mounts].concat();
    let ran = host.podvisor(&replaced);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    // The program has an init before it.
    assert!(ran.stdout.ends_with("\npause\n"), "{ran:?}");
}

#[test]
fn guest_check_says_whether_a_run_works() {
    let host = Host::default();
    let empty = host.root.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let check = |flag: &[&str], without_files: bool| {
        let mut podvisor = host.root.podvisor(&[&["check"], flag].concat());
        if without_files {
            podvisor.env("PODVISOR_GUEST_DIR", &empty);
        }
        Ran::new(podvisor.output().unwrap())
    };
    for (ran, code, verdict) in [
        (check(&[], false), 0, "guests can run here"),
        (check(&["--host"], true), 0, "guests can run here"),
        (check(&[], true), 1, "guests cannot run here: guest files: "),
    ] {
        assert_eq!(ran.code, Some(code), "{ran:?}");
        assert!(ran.stdout.lines().last().unwrap().starts_with(verdict));
    }
}
