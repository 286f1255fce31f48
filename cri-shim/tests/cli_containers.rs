//! Containers of the command line whose machines have ended or do not answer: this needs no guest.

mod support;

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use support::host::Host;
use support::stand_in::stand_in;
use support::{Ran, Root, until};
use tempfile::TempDir;

/// Returns the directory of a container of this name, as `run` creates it.
fn container(root: &Root, name: &str, number: u8) -> PathBuf {
    let id = format!("{number:02x}").repeat(32);
    let dir = root.path().join("c").join(&id[..12]);
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(&dir).unwrap();
    let record = json!({
        "id": id, "name": name, "image": "box", "imageId": "sha256:00", "created": 1,
        "labels": {}, "remove": false, "hostname": "x", "cpus": 1, "memory": 1 << 27,
        "interactive": false, "stopSignal": 15, "volumes": [], "jailed": true, "user": "",
        "network": "none", "process": {"cwd": "/", "args": ["true"], "user": {"uid": 0, "gid": 0}},
    });
    fs::write(dir.join("container.json"), record.to_string()).unwrap();
    dir
}

/// Creates one that has ended; its record has the time in seconds since 1970.
fn ended(root: &Root, name: &str, number: u8, at: u64) -> PathBuf {
    let dir = container(root, name, number);
    let id = format!("{number:02x}").repeat(32);
    let exit = json!({"code": 0, "exited_at_ns": at * 1_000_000_000, "oom_killed": false});
    let info = json!({
        "id": id, "state": "Exited", "pid": 1, "started_at_ns": 1, "exit": exit, "restarts": 0,
    });
    let record = json!({"exit": "PoweredOff", "containers": [info]});
    fs::write(dir.join("exit.json"), record.to_string()).unwrap();
    dir
}

#[test]
fn pruning_takes_containers_that_ended_before_then_and_goes_on_after_one_that_it_cannot() {
    let root = Root::default();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let old = ended(&root, "old", 1, 1000);
    let new = ended(&root, "new", 2, now.as_secs());
    root.output(&["prune", "-f", "--keep-size", "1G"])
        .printed("Total reclaimed space: 0B\n");
    assert!(old.exists() && new.exists());
    let bad = container(&root, "bad", 3);
    // It is not possible to connect to a socket there.
    fs::create_dir(bad.join("x")).unwrap();
    symlink("control.sock", bad.join("control.sock")).unwrap();
    let filter = ["prune", "-f", "--filter", "until=24h", "--json"];
    let ran = root.output(&filter);
    ran.refused(1, &["cannot remove bad"]);
    let pruned: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(
        (&pruned["containers"], &pruned["pods"], &pruned["deleted"]),
        (&json!(["old"]), &json!([]), &json!([]))
    );
    assert!(!old.exists() && new.exists());
    fs::remove_file(bad.join("control.sock")).unwrap();
    // The images cannot be read at all: the containers are gone all the same.
    let old = ended(&root, "old", 1, 1000);
    let store = root.path().join("images/store.redb");
    fs::create_dir(&store).unwrap();
    let ran = root.output(&filter);
    ran.refused(1, &["store.redb"]);
    let pruned: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(pruned["containers"], json!(["old"]));
    assert!(!old.exists());
    fs::remove_dir(&store).unwrap();
    root.output(&["prune", "-f"])
        .printed("Removed containers: 2\nTotal reclaimed space: 0B\n");
    assert!(!new.exists());
}

/// Returns the container's state in `inspect`, and its line of `ps --json`.
fn described(root: &Root, name: &str) -> (Value, Value) {
    let json = |arguments: &[&str]| -> Value {
        let ran = root.output(arguments);
        serde_json::from_str(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"))
    };
    let state = json(&["inspect", name])[0]["State"].clone();
    let filter = format!("name=^{name}$");
    let listed = json(&["ps", "-a", "--json", "-f", &filter])[0].clone();
    (state, listed)
}

#[test]
fn a_container_that_has_ended_still_tells_when_it_started() {
    let root = Root::default();
    ended(&root, "exited", 1, 2000);
    let dead = ended(&root, "dead", 2, 2000);
    let never = ended(&root, "never", 3, 2000);
    container(&root, "unknown", 4);
    let change = |dir: &Path, started: u64, exit: Value| {
        let path = dir.join("exit.json");
        let text = fs::read_to_string(&path).unwrap();
        let mut record: Value = serde_json::from_str(&text).unwrap();
        record["exit"] = exit;
        record["containers"][0]["started_at_ns"] = json!(started * 1_000_000_000);
        record["containers"][0]["exit"]["code"] = json!(137);
        fs::write(path, record.to_string()).unwrap();
    };
    change(&dead, 1000, json!({"Failed": "x"}));
    change(&never, 0, json!("PoweredOff"));
    for (name, status, started) in [
        ("exited", "exited", json!("1970-01-01T00:00:00Z")),
        ("dead", "dead", json!("1970-01-01T00:16:40Z")),
        ("never", "exited", Value::Null),
        ("unknown", "dead", Value::Null),
    ] {
        let (state, listed) = described(&root, name);
        assert_eq!(
            (&state["Status"], &listed["State"]),
            (&json!(status), &json!(status))
        );
        assert_eq!(state["StartedAt"], started, "{name}");
        assert_eq!(listed["StartedAt"], started, "{name}");
    }
}

#[test]
fn the_image_and_the_stop_signal_of_a_container_are_named_as_docker_names_them() {
    let root = Root::default();
    ended(&root, "web", 1, 1000);
    let inspected = root.output(&["inspect", "web"]);
    let inspected: Value = serde_json::from_str(&inspected.stdout).unwrap();
    let config = &inspected[0]["Config"];
    assert_eq!(
        (&config["Image"], &config["StopSignal"]),
        (&json!("box"), &json!("SIGTERM"))
    );
}

#[test]
fn the_exit_code_of_what_has_not_ended_is_0_as_dockers() {
    let root = Root::default();
    let dir = container(&root, "up", 1);
    let _machine = StandIn::in_dir(&dir, &[&*"01".repeat(32)]);
    let (state, listed) = described(&root, "up");
    assert_eq!(
        (&state["Running"], &state["ExitCode"], &listed["ExitCode"]),
        (&json!(true), &json!(0), &json!(0))
    );
    let dir = container(&root, "new", 2);
    let claim = fs::File::open(&dir).unwrap();
    flock(&claim, FlockOperation::LockExclusive).unwrap();
    let (state, listed) = described(&root, "new");
    assert_eq!(
        (&state["Running"], &state["ExitCode"], &listed["ExitCode"]),
        (&json!(false), &json!(0), &json!(0))
    );
}

#[test]
fn metrics_and_logs_are_for_machines_too() {
    let root = Root::default();
    ended(&root, "old", 1, 1000);
    let first = "# HELP podvisor_containers Containers by state\n\
                 # TYPE podvisor_containers gauge\n\
                 podvisor_containers{state=\"exited\"} 1\n";
    let ran = root.output(&["metrics"]);
    assert!(ran.stdout.starts_with(first), "{ran:?}");
    let flags = ["--log-level", "debug", "--log-format", "json"];
    let run = [&["run"], &flags[..], &["--pull", "never", "none"]].concat();
    let ran = root.output(&run);
    assert_eq!(ran.code, Some(125), "{ran:?}");
    let first: Value = serde_json::from_str(ran.stderr.lines().next().unwrap()).unwrap();
    assert_eq!(
        (&first["level"], &first["message"]),
        (&json!("DEBUG"), &json!("begin"))
    );
    assert!(first["timestamp"].is_string(), "{first}");
}

#[test]
fn statistics_end_when_nobody_reads_them() {
    let root = Root::default();
    let mut stats = root.podvisor(&["stats", "--format", "json"]);
    let mut stats = stats.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(stats.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "[]");
    drop(lines);
    assert!(stats.wait().unwrap().success());
}

/// A process that listens like a machine's and never answers.
struct Mute {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Mute {
    fn in_dir(dir: &Path) -> Self {
        let test = std::env::current_exe().unwrap();
        let target = test.parent().and_then(Path::parent).unwrap();
        let mut child = Command::new(target.join("examples/mute"))
            .arg(dir.join("control.sock"))
            .stdout(Stdio::piped())
            .spawn()
            .expect("the example `mute` is built with the tests");
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut mute = Self { child, lines };
        mute.says("listening");
        mute
    }

    fn says(&mut self, line: &str) {
        assert_eq!(self.lines.next().unwrap().unwrap(), line);
    }
}

impl Drop for Mute {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process that answers like a machine's, and acts on files in a directory.
struct StandIn {
    child: Child,
    control: TempDir,
}

impl StandIn {
    /// Starts it in the directory of a machine, with running containers.
    fn in_dir(dir: &Path, running: &[&str]) -> Self {
        let control = tempfile::tempdir().unwrap();
        fs::write(control.path().join("running"), running.join("\n")).unwrap();
        let child = stand_in(&dir.join("control.sock"), control.path(), 2);
        Self { child, control }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.control.path().join(name)
    }

    /// Returns how often this call was made.
    fn called(&self, call: &str) -> usize {
        let calls = fs::read_to_string(self.file("calls")).unwrap_or_default();
        let names = calls.lines().filter_map(|line| line.split(' ').next());
        names.filter(|name| *name == call).count()
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Changes a container's record.
fn rewrite(dir: &Path, changes: &[(&str, Value)]) {
    let path = dir.join("container.json");
    let mut record: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    for (key, value) in changes {
        record[key] = value.clone();
    }
    fs::write(path, record.to_string()).unwrap();
}

#[test]
fn a_pod_stops_all_its_containers_at_once_and_ends_whatever_comes_of_that() {
    let root = Root::default();
    let pod = container(&root, "shop", 1);
    rewrite(&pod, &[("isPod", json!(true))]);
    let ids = [2, 3].map(|number: u8| format!("{number:02x}").repeat(32));
    for (name, number) in [("web", 2), ("db", 3)] {
        let own = container(&root, name, number);
        rewrite(&own, &[("pod", json!("01".repeat(32)))]);
    }
    let mut machine = StandIn::in_dir(&pod, &[&*ids[0], &*ids[1]]);
    fs::write(machine.file("Stop"), "").unwrap();
    fs::write(machine.file("refuse-Stop"), "the guest does not answer").unwrap();
    let stop = root
        .podvisor(&["pod", "stop", "shop"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    until("the question to both", || machine.called("Stop") == 2);
    fs::remove_file(machine.file("Stop")).unwrap();
    Ran::of(stop).printed("shop\n");
    assert_eq!(machine.called("Shutdown"), 1);
    assert!(machine.child.wait().unwrap().success());
}

#[test]
fn the_ports_of_a_pod_are_those_of_its_containers() {
    let root = Root::default();
    let pod = container(&root, "shop", 1);
    let port = json!({"hostIp": null, "hostPort": 8080, "guestPort": 80, "protocol": "tcp"});
    rewrite(&pod, &[("isPod", json!(true)), ("ports", json!([port]))]);
    let web = container(&root, "web", 2);
    rewrite(&web, &[("pod", json!("01".repeat(32)))]);
    let machine = StandIn::in_dir(&pod, &[&*"02".repeat(32)]);
    root.output(&["port", "web"])
        .printed("80/tcp -> 0.0.0.0:8080\n");
    root.output(&["port", "web", "80"])
        .printed("0.0.0.0:8080\n");
    root.output(&["port", "web", "81"])
        .refused(1, &["81/tcp", "not published", "podvisor pod create -p"]);
    let table = root.output(&["ps"]).stdout;
    assert!(table.contains("0.0.0.0:8080->80/tcp"), "{table}");
    let (_, listed) = described(&root, "web");
    assert_eq!(listed["Ports"][0]["host_port"], 8080);
    drop(machine);
    root.output(&["port", "web", "80"]).refused(1, &["is dead"]);
}

#[test]
fn a_run_that_is_interrupted_says_so_though_its_container_stays() {
    let host = Host::default();
    let pod = container(&host.root, "shop", 1);
    rewrite(&pod, &[("isPod", json!(true))]);
    let machine = StandIn::in_dir(&pod, &[]);
    fs::write(machine.file("Create"), "").unwrap();
    fs::write(machine.file("refuse-Delete"), "no such luck").unwrap();
    let mut run = host.root.podvisor(&["run", "--pod", "shop", "box", "true"]);
    let run = run.stderr(Stdio::piped()).spawn().unwrap();
    until("the container", || machine.called("Create") == 1);
    let pid = Pid::from_raw(run.id().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    Ran::of(run).refused(130, &["no such luck"]);
}

#[test]
fn logs_of_a_container_that_is_being_started_are_followed() {
    let root = Root::default();
    let dir = container(&root, "one", 1);
    let claim = fs::File::open(&dir).unwrap();
    flock(&claim, FlockOperation::LockExclusive).unwrap();
    let mut logs = root.podvisor(&["logs", "-f", "one"]);
    let mut logs = logs.stdout(Stdio::piped()).spawn().unwrap();
    while !waits_for_a_lock(logs.id()) {
        assert_eq!(logs.try_wait().unwrap(), None, "it did not wait");
    }
    let line = "2026-01-31T12:00:00.000000000Z stdout F a\n";
    fs::write(dir.join("container.log"), line).unwrap();
    ended(&root, "one", 1, 1000);
    flock(claim.as_fd(), FlockOperation::Unlock).unwrap();
    Ran::of(logs).printed("a\n");
}

#[test]
fn logs_are_followed_until_the_time_that_was_told() {
    let root = Root::default();
    let dir = container(&root, "one", 1);
    let line = "2026-01-31T12:00:00.000000000Z stdout F a\n";
    fs::write(dir.join("container.log"), line).unwrap();
    let machine = StandIn::in_dir(&dir, &[&*"01".repeat(32)]);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let until = (now.as_secs() + 2).to_string();
    root.output(&["logs", "-f", "--until", &until, "one"])
        .printed("a\n");
    drop(machine);
    let _mute = Mute::in_dir(&container(&root, "stuck", 2));
    root.output(&["logs", "-f", "stuck"])
        .refused(1, &["does not answer", "podvisor rm -f"]);
}

#[test]
fn a_machine_that_does_not_answer_is_shown_and_killed_by_force_alone() {
    let root = Root::default();
    let dir = container(&root, "stuck", 0xab);
    let mut mute = Mute::in_dir(&dir);
    let pid = mute.child.id();
    let ps = root.output(&["ps", "--json"]);
    assert_eq!(ps.code, Some(0), "{ps:?}");
    let ps: Value = serde_json::from_str(&ps.stdout).unwrap();
    assert_eq!(
        (&ps[0]["State"], &ps[0]["Pid"]),
        (&json!("unresponsive"), &json!(pid))
    );
    let process = pid.to_string();
    for command in ["stop", "rm"] {
        root.output(&[command, "stuck"])
            .refused(1, &["does not answer", &process, "podvisor rm -f"]);
    }
    assert!(mute.child.try_wait().unwrap().is_none());
    root.output(&["rm", "-f", "stuck"]).printed("stuck\n");
    assert!(!mute.child.wait().unwrap().success());
    assert!(!dir.exists());
}

#[test]
fn a_run_ends_by_a_signal_while_it_clears_away() {
    let host = Host::default();
    let mut mute = Mute::in_dir(&container(&host.root, "stuck", 0xab));
    // Files that it accepts as a guest's: it ends before it boots from them.
    symlink("/bin/busybox", host.root.path().join("vmlinux")).unwrap();
    fs::write(host.root.path().join("initramfs.cpio"), "none").unwrap();
    let mut run = host.root.podvisor(&["run", "box", "true"]);
    let run = run
        .env("PODVISOR_GUEST_DIR", host.root.path())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    mute.says("connected");
    let pid = Pid::from_raw(run.id().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    let ran = Ran::of(run);
    assert_eq!(ran.code, Some(130), "{ran:?}");
}

/// Returns whether the kernel shows that this process waits for a lock.
fn waits_for_a_lock(pid: u32) -> bool {
    let locks = fs::read_to_string("/proc/locks").unwrap();
    let mut lines = locks.lines().filter(|line| line.contains("-> FLOCK"));
    lines.any(|line| line.split_whitespace().any(|word| word == pid.to_string()))
}

#[test]
fn a_stop_waits_for_who_starts_the_container() {
    let root = Root::default();
    let dir = container(&root, "starting", 0xcd);
    let claim = fs::File::open(&dir).unwrap();
    flock(&claim, FlockOperation::LockExclusive).unwrap();
    // While a guest boots, its machine's process does not answer.
    let booting = Mute::in_dir(&dir);
    let ps = root.output(&["ps", "--json"]);
    let ps: Value = serde_json::from_str(&ps.stdout).unwrap();
    assert_eq!(ps[0]["State"], "created");
    drop(booting);
    let mut stop = root.podvisor(&["stop", "starting"]);
    let mut stop = stop.stdout(Stdio::piped()).spawn().unwrap();
    while !waits_for_a_lock(stop.id()) {
        assert_eq!(stop.try_wait().unwrap(), None, "it did not wait");
    }
    flock(claim.as_fd(), FlockOperation::Unlock).unwrap();
    // Its starter created nothing.
    Ran::of(stop).printed("starting\n");
}

#[test]
fn removing_by_force_does_not_wait_for_the_guest_of_one_that_is_being_started() {
    let root = Root::default();
    let dir = container(&root, "starting", 0xcd);
    let claim = fs::File::open(&dir).unwrap();
    flock(&claim, FlockOperation::LockExclusive).unwrap();
    let mut booting = Mute::in_dir(&dir);
    let mut remove = root.podvisor(&["rm", "-f", "starting"]);
    let remove = remove.stdout(Stdio::piped()).spawn().unwrap();
    assert!(!booting.child.wait().unwrap().success());
    flock(claim.as_fd(), FlockOperation::Unlock).unwrap();
    Ran::of(remove).printed("starting\n");
    assert!(!dir.exists());
}

/// Returns the names in the output of `ps -a` with these filters.
fn shown(root: &Root, filters: &[&str]) -> Vec<String> {
    let filters = filters.iter().flat_map(|filter| ["--filter", filter]);
    let arguments: Vec<&str> = ["ps", "-a", "--json"].into_iter().chain(filters).collect();
    let ran = root.output(&arguments);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let list: Vec<Value> = serde_json::from_str(&ran.stdout).unwrap();
    let name = |one: &Value| one["Names"][0].as_str().unwrap().to_owned();
    let mut names: Vec<String> = list.iter().map(name).collect();
    names.sort();
    names
}

#[test]
fn filters_of_one_kind_are_alternatives() {
    let root = Root::default();
    ended(&root, "web", 1, 1000);
    ended(&root, "db", 2, 1000);
    container(&root, "lost", 3);
    assert_eq!(shown(&root, &["name=web", "name=lost"]), ["lost", "web"]);
    assert_eq!(shown(&root, &["name=^we"]), ["web"]);
    assert!(shown(&root, &["name=^we$"]).is_empty());
    let refused = root.output(&["ps", "--filter", "name=web|db"]);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    let filters = ["name=web", "name=lost", "status=exited"];
    assert_eq!(shown(&root, &filters), ["web"]);
    let both = ["status=exited", "status=dead"];
    assert_eq!(shown(&root, &both), ["db", "lost", "web"]);
    let ran = root.output(&["ps", "--filter", "status=runing"]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("running, paused"), "{ran:?}");
}

#[test]
fn a_record_that_is_not_understood_is_told_of_and_stays() {
    let root = Root::default();
    let dir = container(&root, "tomorrow", 1);
    fs::write(dir.join("container.json"), r#"{"of": "another version"}"#).unwrap();
    let notes = root.path().join("c/my-notes");
    fs::create_dir(&notes).unwrap();
    for command in [["ps", "-a"].as_slice(), &["prune", "-f"]] {
        let ran = root.output(command);
        ran.refused(0, &["not understood", &dir.display().to_string()]);
        assert!(dir.join("container.json").exists() && notes.exists());
    }
}

#[test]
fn pruning_images_leaves_containers() {
    let root = Root::default();
    let dir = ended(&root, "old", 1, 1000);
    root.output(&["image", "prune", "-f"])
        .printed("Total reclaimed space: 0B\n");
    let ran = root.output(&["image", "prune", "-f", "--json"]);
    let pruned: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(
        (&pruned["deleted"], &pruned["containers"]),
        (&json!([]), &Value::Null)
    );
    assert!(dir.exists());
}

#[test]
fn pruning_goes_by_when_a_machine_ended_and_not_by_when_it_was_made() {
    let root = Root::default();
    let died = container(&root, "died", 1);
    let record = json!({"exit": "Died", "containers": []}).to_string();
    fs::write(died.join("exit.json"), record).unwrap();
    // At the latest when its host was rebooted.
    let unknown = container(&root, "unknown", 2);
    let pod = container(&root, "pod", 3);
    let record = fs::read_to_string(pod.join("container.json")).unwrap();
    let mut record: Value = serde_json::from_str(&record).unwrap();
    record["isPod"] = json!(true);
    fs::write(pod.join("container.json"), record.to_string()).unwrap();
    let record = json!({"exit": "PoweredOff", "containers": []}).to_string();
    fs::write(pod.join("exit.json"), record).unwrap();
    let filter = ["prune", "-f", "--filter", "until=2020-01-01T00:00:00Z"];
    root.output(&filter).printed("Total reclaimed space: 0B\n");
    let old = SystemTime::now() - std::time::Duration::from_secs(48 * 3600);
    for dir in [&died, &pod] {
        let record = fs::File::options().write(true).open(dir.join("exit.json"));
        record.unwrap().set_modified(old).unwrap();
    }
    root.output(&["prune", "-f", "--filter", "until=24h", "--json"]);
    assert!(!died.exists() && !pod.exists());
    root.output(&["prune", "-f"]);
    assert!(!unknown.exists());
}

/// Answers on a control socket that it speaks another version of the protocol.
fn other_version(dir: &Path) {
    let listener = std::os::unix::net::UnixListener::bind(dir.join("control.sock")).unwrap();
    let answer = |mut stream: UnixStream| -> std::io::Result<()> {
        let mut length = [0; 4];
        stream.read_exact(&mut length)?;
        let mut request = vec![0; u32::from_le_bytes(length) as usize];
        stream.read_exact(&mut request)?;
        let request: Value = serde_json::from_slice(&request).unwrap();
        let hello = json!({"Hello": {"version": 99_999, "missing_layers": []}});
        let reply = json!({"number": request["number"], "answer": {"Ok": hello}});
        let reply = serde_json::to_vec(&reply).unwrap();
        let length = u32::try_from(reply.len()).unwrap();
        stream.write_all(&length.to_le_bytes())?;
        stream.write_all(&reply)
    };
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            // A client that disconnects early does not need the answer.
            let _ = answer(stream.unwrap());
        }
    });
}

#[test]
fn a_container_of_another_version_is_shown_with_what_to_do() {
    let root = Root::default();
    other_version(&container(&root, "other", 1));
    let ran = root.output(&["ps", "--json"]);
    ran.refused(0, &["container other", "podvisor rm -f", "version 99999"]);
    let ps: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(
        (&ps[0]["State"], &ps[0]["Names"]),
        (&json!("unknown"), &json!(["other"]))
    );
    root.output(&["stop", "other"])
        .refused(1, &["container other", "podvisor rm -f"]);
}

#[test]
fn a_pod_of_another_version_does_not_hide_the_others() {
    let root = Root::default();
    for (name, number) in [("other", 1), ("old", 2)] {
        let dir = container(&root, name, number);
        rewrite(&dir, &[("isPod", json!(true))]);
    }
    other_version(&root.path().join("c").join("01".repeat(6)));
    let ran = root.output(&["pod", "ls", "--json"]);
    ran.refused(0, &["pod other", "podvisor pod rm -f"]);
    let pods: Vec<Value> = serde_json::from_str(&ran.stdout).unwrap();
    let mut states: Vec<_> = pods
        .iter()
        .map(|pod| (&pod["Name"], &pod["State"]))
        .collect();
    states.sort_by_key(|(name, _)| name.to_string());
    assert_eq!(
        states,
        [
            (&json!("old"), &json!("Exited")),
            (&json!("other"), &json!("Unknown"))
        ]
    );
}

#[test]
fn a_container_that_does_not_answer_is_left_out_of_the_statistics() {
    let root = Root::default();
    let _mute = Mute::in_dir(&container(&root, "stuck", 1));
    let ran = root.output(&["stats", "--no-stream", "--format", "json"]);
    ran.refused(0, &["container stuck", "left out"]);
    assert_eq!(ran.stdout, "[]\n");
}

#[test]
fn commands_in_a_container_end_by_a_signal_while_its_machine_is_waited_for() {
    let root = Root::default();
    let mut mute = Mute::in_dir(&container(&root, "stuck", 1));
    for command in [
        ["exec", "stuck", "true"].as_slice(),
        &["attach", "stuck"],
        &["top", "stuck"],
    ] {
        let mut command = root.podvisor(command);
        let child = command.stderr(Stdio::piped()).spawn().unwrap();
        mute.says("connected");
        let pid = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
        kill_process(pid, Signal::INT).unwrap();
        let ran = Ran::of(child);
        assert_eq!(ran.code, Some(130), "{ran:?}");
    }
}

#[test]
fn what_no_process_can_have_is_refused_before_anything_is_asked() {
    let root = Root::default();
    for (flag, value, words) in [
        ("-e", "=x", "without a name"),
        ("-e", "", "without a name"),
        ("-w", "srv", "not absolute"),
    ] {
        let ran = root.output(&["exec", flag, value, "nobody", "true"]);
        ran.refused(125, &[words]);
    }
}

#[test]
fn a_wrong_command_line_has_the_exit_code_of_its_command() {
    let root = Root::default();
    for (command, code) in [
        ("run", 125),
        ("exec", 125),
        ("debug", 125),
        ("attach", 125),
        ("ps", 2),
    ] {
        assert_eq!(
            root.output(&[command, "--nonsense"]).code,
            Some(code),
            "{command}"
        );
    }
    for command in [["exec", "nobody", "true"].as_slice(), &["attach", "nobody"]] {
        root.output(command)
            .refused(125, &["no container `nobody`"]);
    }
}

#[test]
fn dockers_flags_of_stop_and_rm_are_taken() {
    let root = Root::default();
    let dir = ended(&root, "old", 1, 1000);
    root.output(&["stop", "--timeout", "5", "old"])
        .printed("old\n");
    root.output(&["rm", "-v", "old"]).printed("old\n");
    assert!(!dir.exists());
}

#[test]
fn removing_by_force_what_is_not_there_is_no_failure() {
    let root = Root::default();
    let dir = ended(&root, "old", 1, 1000);
    root.output(&["rm", "-f", "nobody", "old"]).printed("old\n");
    assert!(!dir.exists());
    root.output(&["pod", "rm", "-f", "nobody"]).printed("");
    root.output(&["rm", "nobody"]).refused(1, &["no container"]);
    root.output(&["pod", "rm", "nobody"])
        .refused(1, &["no pod"]);
}

#[test]
fn logs_are_of_one_container_or_of_several_by_their_names() {
    let root = Root::default();
    for (name, number) in [("one", 1), ("two", 2)] {
        let log = ended(&root, name, number, 1000).join("container.log");
        let line = |text| format!("2026-01-31T12:00:00.000000000Z stdout F {text}\n");
        fs::write(log, line("a") + &line("b")).unwrap();
    }
    root.output(&["logs", "--tail", "all", "one"])
        .printed("a\nb\n");
    root.output(&["logs", "-n", "1", "one"]).printed("b\n");
    root.output(&["logs", "-f", "-n", "1", "one", "two"])
        .printed("one b\ntwo b\n");
    for all in ["--tail=-1", "-n-1"] {
        root.output(&["logs", all, "one"]).printed("a\nb\n");
    }
    root.output(&["logs", "--tail", "-1", "one"])
        .printed("a\nb\n");
    let ran = root.output(&["logs", "--tail", "some", "one"]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
}

#[test]
fn a_long_line_of_a_log_is_one_line_to_tail_timestamps_and_names() {
    let root = Root::default();
    let time = "2026-01-31T12:00:00.000000000Z";
    let record = |stream: &str, tag: &str, text: &str| format!("{time} {stream} {tag} {text}\n");
    let [a, b] = ["a", "b"].map(|text| text.repeat(16 << 10));
    for (name, number) in [("one", 1), ("two", 2)] {
        let log = ended(&root, name, number, 1000).join("container.log");
        let lines = [
            record("stdout", "F", "first"),
            record("stdout", "P", &a),
            record("stderr", "F", "error"),
            record("stdout", "P", &b),
            record("stdout", "F", "end"),
            record("stdout", "P", "unfinished"),
        ];
        fs::write(log, lines.concat()).unwrap();
    }
    let ran = root.output(&["logs", "-n", "3", "one"]);
    ran.printed(&format!("{a}{b}end\nunfinished"));
    assert_eq!(ran.stderr, "error\n");
    root.output(&["logs", "-t", "-n", "1", "one"])
        .printed(&format!("{time} unfinished\n"));
    for flags in ["-tn3", "-ftn3"] {
        let ran = root.output(&["logs", flags, "one", "two"]);
        let lines = |name: &str| format!("{name} {time} {a}{b}end\n{name} {time} unfinished\n");
        ran.printed(&(lines("one") + &lines("two")));
        let error = |name: &str| format!("{name} {time} error\n");
        assert_eq!(ran.stderr, error("one") + &error("two"), "{flags}");
    }
}
