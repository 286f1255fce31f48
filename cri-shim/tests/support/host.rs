//! A root with an image, and helpers for its containers.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::{IpAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::pod::busybox;
use super::{Ran, Root, until};

/// A root with an image of busybox, `box`.
pub(crate) struct Host {
    pub(crate) root: Root,
}

impl Default for Host {
    fn default() -> Self {
        Self::with(|_| {})
    }
}

impl Host {
    /// Creates the image `box` with additional files.
    pub(crate) fn with(add: impl FnOnce(&Path)) -> Self {
        let root = Root::default();
        let tree = root.path().join("tree");
        busybox(&tree);
        add(&tree);
        for name in ["etc", "proc", "sys", "dev", "tmp"] {
            fs::create_dir_all(tree.join(name)).unwrap();
        }
        let tree = tree.display().to_string();
        let imported = root.output(&["import", "-q", &tree, "box"]);
        assert_eq!(imported.code, Some(0), "{imported:?}");
        Self { root }
    }

    pub(crate) fn podvisor(&self, arguments: &[&str]) -> Ran {
        self.root.output(arguments)
    }

    /// Runs `podvisor run -d` with these flags and a script; returns the container's id.
    pub(crate) fn start(&self, flags: &[&str], script: &str) -> String {
        self.start_program(flags, &["sh", "-c", script])
    }

    /// Runs `podvisor run -d` with these flags and a program; returns the container's id.
    pub(crate) fn start_program(&self, flags: &[&str], program: &[&str]) -> String {
        let run = ["run", "-d", "--memory", "128M", "-e", "PATH=/bin"];
        let ran = self.podvisor(&[&run, flags, &["box"], program].concat());
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.stdout.trim().to_owned()
    }

    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        let ran = self.podvisor(arguments);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        serde_json::from_str(&ran.stdout).unwrap()
    }

    /// Returns the output of a container, once it contains this line.
    pub(crate) fn logs_with(&self, name: &str, line: &str) -> String {
        let mut follow = self.root.podvisor(&["logs", "-f", name]);
        let mut follow = follow.stdout(Stdio::piped()).spawn().unwrap();
        let mut text = String::new();
        for next in BufReader::new(follow.stdout.take().unwrap()).lines() {
            let next = next.unwrap();
            text = format!("{text}{next}\n");
            if next == line {
                break;
            }
        }
        follow.kill().unwrap();
        follow.wait().unwrap();
        assert!(text.lines().any(|is| is == line), "{text}");
        text
    }
}

impl Host {
    pub(crate) fn containers(&self) -> Vec<PathBuf> {
        let dirs = fs::read_dir(self.root.path().join("c"));
        dirs.into_iter()
            .flatten()
            .map(|dir| dir.unwrap().path())
            .collect()
    }

    /// Returns the remains of this root's containers on the host.
    pub(crate) fn left(&self) -> Vec<String> {
        let mut left: Vec<String> = self
            .containers()
            .iter()
            .map(|dir| dir.display().to_string())
            .collect();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let own = self.root.path().display().to_string();
        left.extend(
            mounts
                .lines()
                .filter(|line| line.contains(&own))
                .map(str::to_owned),
        );
        left.extend(sandboxes().into_iter().map(|pid| format!("process {pid}")));
        let groups = fs::read_dir("/sys/fs/cgroup/podvisor")
            .into_iter()
            .flatten()
            .flatten();
        let groups = groups.filter(|entry| entry.path().is_dir());
        left.extend(groups.map(|group| group.path().display().to_string()));
        left
    }
}

impl Host {
    /// Waits until [`Self::left`] is empty: after a machine's end its process cleans up, even if
    /// its launcher has exited, and its control group is removed by the next command.
    pub(crate) fn leaves_nothing(&self) {
        until("a node on which nothing is left", || {
            assert_eq!(self.podvisor(&["ps"]).code, Some(0));
            self.left().is_empty()
        });
    }
}

/// Returns the running `podvisor sandbox` processes.
pub(crate) fn sandboxes() -> Vec<u32> {
    processes(|arguments| arguments.starts_with(b"podvisor\0sandbox\0"))
}

/// Returns the processes whose arguments, each followed by a zero byte, match.
pub(crate) fn processes(is_one: impl Fn(&[u8]) -> bool) -> Vec<u32> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let matches = |pid: &u32| {
        let arguments = fs::read(format!("/proc/{pid}/cmdline"));
        is_one(&arguments.unwrap_or_default())
    };
    pids.filter(matches).collect()
}

/// The host's first user of those that jailed processes are.
const NOBODY: u32 = 2_000_000_000;

/// Whether a sandbox's process serves volumes as nobody of the host, in a user namespace of its
/// own; if not, it is the host's root.
pub(crate) fn is_nobody(pid: u32) -> bool {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/user")).unwrap();
    let is_apart = namespace(&pid.to_string()) != namespace("self");
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let users: Vec<&str> = users.unwrap().split_whitespace().collect();
    let expected = match is_apart {
        true => NOBODY + pid,
        false => 0,
    };
    assert_eq!(users, [expected.to_string().as_str(); 4]);
    is_apart
}

pub(crate) fn kill(pid: u32) {
    let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
    // It may have just ended.
    let _ = kill_process(pid, Signal::KILL);
}

/// Where the plugin `host-local` stores the addresses of podvisor's own network.
const RESERVED: &str = "/var/lib/cni/networks/podvisor";

/// Returns the remains of containers' networks on this host.
pub(crate) fn networks_left() -> Vec<String> {
    let names = |dir: &str| {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().into_string().unwrap());
        names.collect::<Vec<_>>()
    };
    let mut left = names("/run/netns");
    left.extend(
        names("/sys/class/net")
            .into_iter()
            .filter(|name| name.starts_with("veth")),
    );
    left.extend(
        names(RESERVED)
            .into_iter()
            .filter(|name| name.starts_with("10.")),
    );
    let rules = command("iptables-save", &[]);
    let of_one = |rule: &&str| {
        rule.contains("-A") && rule.contains("10.209.") && !rule.contains("-A CNI-HOSTPORT-SETMARK")
    };
    left.extend(rules.lines().filter(of_one).map(str::to_owned));
    left
}

/// Returns an address of this host other than loopback, with a default route, which passt needs to
/// start.
pub(crate) fn own_address() -> IpAddr {
    let routes = command("ip", &["-4", "route", "show", "default"]);
    if routes.is_empty() {
        for line in [
            "link add podvisor-test type dummy",
            "addr add 198.51.100.1/24 dev podvisor-test",
            "link set podvisor-test up",
            "route add default via 198.51.100.254",
        ] {
            command("ip", &line.split(' ').collect::<Vec<_>>());
        }
    }
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect("203.0.113.1:9").unwrap();
    socket.local_addr().unwrap().ip()
}

/// Returns the output of a program.
pub(crate) fn command(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {output:?}"
    );
    String::from_utf8(output.stdout).unwrap()
}
