//! Several containers in one machine without a daemon, and a debug shell in the guest next to them.
//! These tests need a KVM that runs guests; they do not assert times.

mod support;

use std::fs;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use support::host::{Host, command, kill, sandboxes};
use support::{Ran, until};

impl Host {
    fn in_pod(&self, flags: &[&str], script: &str) -> Ran {
        let run = ["run", "-e", "PATH=/bin", "--pod", "team"];
        self.podvisor(&[&run, flags, &["box", "sh", "-c", script]].concat())
    }
}

#[test]
fn guest_containers_of_a_pod_share_what_a_pod_shares() {
    let host = Host::default();
    let data = host.root.path().join("data");
    fs::create_dir(&data).unwrap();
    let volume = format!("{}:/data", data.display());
    let create = [
        "pod",
        "create",
        "--name",
        "team",
        "--memory",
        "192M",
        "-l",
        "a=b",
        "--volumes",
        "--device-read-bps",
        "/dev/loop0:3mb",
        "--device-write-iops",
        "/dev/loop0:40",
    ];
    // Its devices need no file to be limited.
    command("modprobe", &["loop"]);
    let created = host.podvisor(&create);
    assert_eq!(created.code, Some(0), "{created:?}");
    let id = created.stdout.trim().to_owned();
    let group = fs::read_to_string(format!("/sys/fs/cgroup/podvisor/{id}/io.max"));
    assert_eq!(
        group.unwrap(),
        "7:0 rbps=3145728 wbps=max riops=max wiops=40\n"
    );
    let inspect = &host.json(&["pod", "inspect", "team"])[0];
    let limit = json!([{"Path": "/dev/loop0", "Rate": 3 << 20}]);
    assert_eq!(inspect["BlkioDeviceReadBps"], limit);
    assert_eq!(sandboxes().len(), 1);
    let listed = &host.json(&["pod", "ls", "--format", "json"])[0];
    assert_eq!(
        (&listed["Id"], &listed["State"]),
        (&id.clone().into(), &"Running".into())
    );
    assert_eq!(host.podvisor(&["ps", "-aq"]).stdout, "");
    host.podvisor(&create).refused(1, &["team", "in use"]);
    let both = ["run", "--pod", "team", "--memory", "1G", "box", "true"];
    assert_eq!(host.podvisor(&both).code, Some(125));
    let limit = ["--device-read-iops", "/dev/loop0:1"];
    assert_eq!(host.in_pod(&limit, "true").code, Some(125));
    host.podvisor(&["run", "--device-read-bps", "/dev/null:1mb", "box", "true"])
        .refused(125, &["/dev/null", "no block device"]);

    // Network, host name and shared memory are shared; processes only on request.
    let server = "echo shared >/dev/shm/file; echo up; exec nc -ll -p 80 -e echo hello";
    let server = host.in_pod(
        &["-d", "--name", "server", "--pid", "pod", "-v", &volume],
        server,
    );
    assert_eq!(server.code, Some(0), "{server:?}");
    host.logs_with("server", "up");
    let inspect = &host.json(&["inspect", "server"])[0]["HostConfig"];
    assert_eq!(inspect["BlkioDeviceWriteIOps"][0]["Rate"], 40, "{inspect}");
    let client = "hostname; cat /dev/shm/file; until nc 127.0.0.1 80 </dev/null; do sleep 0.1; done; \
                  ps | grep -c '[n]c -ll'; echo kept >/data/file; exit 3";
    let ran = host.in_pod(&["--rm", "-v", &volume, "--pid", "pod"], client);
    let expected = "team\nshared\nhello\n1\n";
    assert_eq!((ran.code, &*ran.stdout), (Some(3), expected), "{ran:?}");
    assert_eq!(fs::read_to_string(data.join("file")).unwrap(), "kept\n");
    let alone = host.in_pod(&["--rm"], "ps | grep -c '[n]c -ll'");
    assert_eq!((alone.code, &*alone.stdout), (Some(1), "0\n"), "{alone:?}");
    assert_eq!(sandboxes().len(), 1);
    let ps = &host.json(&["ps", "--json", "--host-memory"])[0];
    assert_eq!(
        (&ps["Names"][0], &ps["PodName"]),
        (&"server".into(), &"team".into())
    );
    assert!(
        ps["HostMemory"]["Private"].as_u64().unwrap() > 1 << 20,
        "{ps}"
    );
    let table = host.podvisor(&["ps", "--pod"]).stdout;
    assert!(
        table.contains("PODNAME") && table.contains("team"),
        "{table}"
    );

    // A debug program sees all of the guest.
    let script = "ps | grep -c '[n]c -ll'; cat $CONTAINER_ROOT/dev/shm/file; ls /proc/1/root/run; \
                  mount -t tmpfs none /tmp && echo may";
    let ran = host.podvisor(&["debug", "server", "sh", "-c", script]);
    assert_eq!(ran.stdout, "1\nshared\npodvisor\nmay\n", "{ran:?}");
    let ran = host.podvisor(&["debug", "--image", "box", "team", "sh", "-c", "exit 9"]);
    assert_eq!(ran.code, Some(9), "{ran:?}");
    host.podvisor(&["debug", "nobody"])
        .refused(125, &["nobody"]);
    // Whenever its user gives up, nothing of it stays.
    for delay in (1..9).map(|number| Duration::from_millis(150 * number)) {
        let mut debug = host.root.podvisor(&["debug", "server", "sleep", "1000"]);
        let mut debug = debug.stdin(Stdio::null()).spawn().unwrap();
        thread::sleep(delay);
        kill_process(Pid::from_child(&debug), Signal::TERM).unwrap();
        assert!(!debug.wait().unwrap().success());
    }
    let script = "ls /proc/1/root/run/podvisor/state | wc -l";
    host.podvisor(&["debug", "server", "sh", "-c", script])
        .printed("2\n");
    host.podvisor(&["pause", "server"])
        .refused(1, &["server", "team"]);

    // A container does not see another one's remains; the pod continues without containers.
    host.podvisor(&["pod", "rm", "team"])
        .refused(1, &["server", "--force"]);
    host.podvisor(&["stop", "-t", "0", "server"])
        .printed("server\n");
    host.podvisor(&["wait", "server"]).printed("137\n");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let shared = format!("{}/c/{}/shared/", host.root.path().display(), &id[..12]);
    assert!(!mounts.contains(&shared), "{mounts}");
    host.podvisor(&["logs", "-f", "server"]).printed("up\n");
    let again = host.in_pod(
        &["-d", "--name", "ends", "--restart", "on-failure"],
        "trap 'exit 0' TERM; echo up; while :; do sleep 0.1; done",
    );
    assert_eq!(again.code, Some(0), "{again:?}");
    host.logs_with("ends", "up");
    host.podvisor(&["pod", "stop", "-t", "300", "team"])
        .printed("team\n");
    host.podvisor(&["wait", "ends"]).printed("0\n");
    assert_eq!(sandboxes(), [0; 0]);
    let exited = &host.json(&["pod", "inspect", "team"])[0];
    assert_eq!(exited["State"], "Exited", "{exited}");
    assert_eq!(
        exited["Containers"].as_array().unwrap().len(),
        2,
        "{exited}"
    );
    host.in_pod(&[], "true").refused(125, &["gone"]);
    host.podvisor(&["pod", "rm", "team"]).printed("team\n");
    assert_eq!(host.podvisor(&["ps", "-aq"]).stdout, "");
    let left = fs::read_dir(host.root.path().join("c")).unwrap().count();
    assert_eq!(left, 0);
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let own = host.root.path().display().to_string();
    assert!(!mounts.lines().any(|line| line.contains(&own)), "{mounts}");
}

#[test]
fn guest_pod_whose_machine_was_killed_goes_with_its_containers() {
    let host = Host::default();
    let create = ["pod", "create", "--name", "team", "--memory", "128M"];
    assert_eq!(host.podvisor(&create).code, Some(0));
    let ran = host.in_pod(&["-d", "--name", "one"], "exec sleep 9999");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    sandboxes().into_iter().for_each(kill);
    until("the pod's end", || {
        host.json(&["pod", "ls", "--format", "json"])[0]["State"] == "Exited"
    });
    let ps = host.json(&["ps", "-a", "--json"]);
    assert_eq!(ps[0]["State"], "dead", "{ps}");
    let pruned = host.podvisor(&["prune", "-f"]);
    assert_eq!(pruned.code, Some(0), "{pruned:?}");
    assert_eq!(host.podvisor(&["pod", "ls", "-q"]).stdout, "");
    assert_eq!(host.podvisor(&["ps", "-aq"]).stdout, "");
}
