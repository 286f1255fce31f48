//! Containers of the command line whose machines have ended or do not answer: this needs no guest.

#[path = "cli_containers/ends.rs"]
mod ends;
#[path = "cli_containers/logs.rs"]
mod logs;
#[path = "cli_containers/prune.rs"]
mod prune;
#[path = "cli_containers/shown.rs"]
mod shown;
mod support;
#[path = "cli_containers/versions.rs"]
mod versions;

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

/// Returns whether the kernel shows that this process waits for a lock.
fn waits_for_a_lock(pid: u32) -> bool {
    let locks = fs::read_to_string("/proc/locks").unwrap();
    let mut lines = locks.lines().filter(|line| line.contains("-> FLOCK"));
    lines.any(|line| line.split_whitespace().any(|word| word == pid.to_string()))
}
