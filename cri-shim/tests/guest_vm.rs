//! `podvisor vm` with the smallest system that a distribution's kernel makes (`cargo xtask small`,
//! whose directory is in `PODVISOR_TEST_SMALL`): its disk is booted by the loader.

#[path = "guest_vm/dump.rs"]
mod dump;
#[path = "guest_vm/half.rs"]
mod half;
mod support;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use support::terminal::Terminal;
use support::{Ran, Root, until};

/// What is the same for as long as a guest's kernel runs, wherever that is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// What the log of a VM begins with whose disk is as its image has it.
const KEPT: &str =
    "podvisor: entry \"Small system\": starting the kernel that was kept of the image";

const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA me@here\n";

fn small() -> String {
    let directory = std::env::var_os("PODVISOR_TEST_SMALL").expect(
        "PODVISOR_TEST_SMALL names no directory: `cargo xtask test --only guest` makes the system",
    );
    let disk = PathBuf::from(directory).join("small.raw");
    disk.into_os_string().into_string().unwrap()
}

#[test]
fn guest_vms_keep_what_they_wrote_and_their_console_may_be_left() {
    let root = Root::default();
    let key = root.path().join("key.pub");
    fs::write(&key, KEY).unwrap();
    let (image, key) = (small(), key.to_str().unwrap().to_owned());
    let mut terminal = Terminal::new(24, 80);
    let line = [
        "vm",
        "run",
        "--name",
        "vm1",
        "-m",
        "256M",
        "--max-cpus",
        "3",
        "--max-memory",
        "512M",
        "--disk",
        "128M",
        "--ssh-key",
        &key,
        "--network",
        "nat",
        &image,
    ];
    let mut run = terminal.spawn(root.podvisor(&line));
    terminal.read_until("ctrl-] leaves it");
    let shown = terminal.read_until("small: ready");
    assert!(
        shown.contains("meta-data network-config user-data"),
        "{shown}"
    );
    terminal
        .person
        .write_all(b"echo it is $((40+2))\n")
        .unwrap();
    terminal.read_until("it is 42");
    // Before anybody asks the agent, it has somebody to wait for, and does not look for one.
    let ports = "mount -t debugfs none /sys/kernel/debug; cat /sys/kernel/debug/virtio-ports/*\n";
    terminal.person.write_all(ports.as_bytes()).unwrap();
    terminal.read_until("host_connected: 1");
    terminal.person.write_all(b"\x1d").unwrap();
    terminal.read_until("VM vm1 goes on");
    assert!(run.wait().unwrap().success());
    assert!(terminal.echoes());

    let vm = |arguments: &[&str]| -> Ran { root.output(&[&["vm"], arguments].concat()) };
    let listed = vm(&["ps"]);
    assert!(listed.stdout.contains("Up "), "{listed:?}");
    assert_eq!(root.output(&["ps", "-aq"]).stdout, "");
    let removed = vm(&["rm", "vm1"]);
    assert!(removed.stderr.contains("podvisor vm stop"), "{removed:?}");
    let logs = || vm(&["logs", "vm1"]).stdout;
    assert!(logs().contains(KEPT), "{}", logs());
    boots_what_is_kept(&root, &image);
    assert!(logs().contains("CPUs, boot 1"), "{}", logs());

    // By the guest's agent: a command, a file there and back, what the guest says, and a reboot.
    until("the agent", || vm(&["exec", "vm1", "true"]).code == Some(0));
    let exec = ["exec", "vm1", "sh", "-c", "hostname; pwd; exit 3"];
    let ran = vm(&exec);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(3), "vm1\n/\n"));
    let missing = vm(&["exec", "vm1", "no-such-program"]);
    assert_eq!(missing.code, Some(127), "{missing:?}");
    let terminal_refused = vm(&["exec", "-t", "vm1", "sh"]);
    assert!(
        terminal_refused.stderr.contains("without a terminal"),
        "{terminal_refused:?}"
    );
    let bytes: Vec<u8> = (0..600_000_u32).flat_map(u32::to_le_bytes).collect();
    let (there, back) = (root.path().join("there"), root.path().join("back"));
    fs::write(&there, &bytes).unwrap();
    vm(&["cp", there.to_str().unwrap(), "vm1:/root"]).printed("");
    vm(&["cp", "vm1:/root/there", back.to_str().unwrap()]).printed("");
    assert!(fs::read(&back).unwrap() == bytes);
    let none = vm(&["cp", "vm1:/no/such", back.to_str().unwrap()]);
    assert!(none.stderr.contains("/no/such"), "{none:?}");
    assert!(fs::read(&back).unwrap() == bytes);
    let seen = vm(&["inspect", "vm1"]).stdout;
    assert!(seen.contains("\"Small system\""), "{seen}");
    grows(&root);
    dump::dumps(&root);
    let by_loader = "podvisor-loader: starting the kernel";
    assert!(!logs().contains(by_loader), "{}", logs());
    vm(&["reboot", "vm1"]).printed("vm1\n");
    // With the CPUs that were plugged in.
    until("the second boot", || logs().contains("2 CPUs, boot 2"));
    // What the guest has changed is in force.
    assert!(logs().contains(by_loader), "{}", logs());
    let seen: Value = serde_json::from_str(&vm(&["inspect", "vm1"]).stdout).unwrap();
    let boot = &seen[0]["Boot"];
    assert_eq!(
        (&boot["way"], &boot["entry"]),
        (&"loader".into(), &"Small system".into())
    );
    assert!(
        boot["kernel"].as_str().unwrap().contains("vmlinuz"),
        "{boot}"
    );
    vm(&["reboot", "-f", "vm1"]).printed("vm1\n");
    until("the third boot", || logs().contains("CPUs, boot 3"));
    let running = vm(&["resize", "--max-cpus", "4", "vm1"]);
    assert!(running.stderr.contains("podvisor vm stop"), "{running:?}");
    let running = vm(&["commit", "vm1", "mine:1"]);
    assert!(
        running
            .stderr
            .contains("podvisor vm commit vm1:NAME mine:1"),
        "{running:?}"
    );
    vm(&["stop", "-t", "5", "vm1"]).printed("vm1\n");
    commit(&root);

    let smaller = vm(&["resize", "--disk", "64M", "vm1"]);
    assert!(smaller.stderr.contains("not made smaller"), "{smaller:?}");
    vm(&["resize", "-m", "320M", "--disk", "192M", "vm1"]).printed("vm1\n");
    vm(&["start", "vm1"]).printed("vm1\n");
    until("the next boot", || logs().contains("CPUs, boot 4"));
    until("the agent", || vm(&["exec", "vm1", "true"]).code == Some(0));
    let sizes =
        "cat /sys/block/vda/size; [ $(awk '/MemTotal/ {print $2}' /proc/meminfo) -gt 262144 ]";
    let resized = vm(&["exec", "vm1", "sh", "-c", sizes]);
    assert_eq!((resized.code, resized.stdout.trim()), (Some(0), "393216"));
    let again = vm(&["start", "vm1"]);
    assert!(again.stderr.contains("runs already"), "{again:?}");
    vm(&["rm", "-f", "vm1"]).printed("vm1\n");
    vm(&["ps", "-q"]).printed("");
    let left = fs::read_dir(root.path().join("v")).unwrap();
    assert_eq!(left.count(), 0);
}

#[test]
fn guest_long_vms_are_saved_cloned_and_moved() {
    let root = Root::default();
    let vm = |arguments: &[&str]| -> Ran { root.output(&[&["vm"], arguments].concat()) };
    let run = ["run", "-d", "--name", "vm1", "-m", "256M", "--network"];
    let ran = vm(&[&run[..], &["nat", &small()]].concat());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    until("the agent", || vm(&["exec", "vm1", "true"]).code == Some(0));
    warm(&root);
    moves(&root);
    vm(&["rm", "-f", "vm1"]).printed("vm1\n");
}

/// Gives the VM `vm1`, whose agent answers, another CPU and more memory, and takes a part of that.
fn grows(root: &Root) {
    let vm = |arguments: &[&str]| -> Ran { root.output(&[&["vm"], arguments].concat()) };
    let sees = |script: &str| -> String {
        let ran = vm(&["exec", "vm1", "sh", "-c", script]);
        assert_eq!(ran.code, Some(0), "{script}: {ran:?}");
        ran.stdout.trim().to_owned()
    };
    let online = || sees("cat /sys/devices/system/cpu/online");
    let memory = || -> u64 {
        let kib = sees("awk '/MemTotal/ {print $2}' /proc/meminfo");
        kib.parse::<u64>().unwrap() >> 10
    };
    let (cpus, at_boot) = (online(), memory());
    assert_eq!(cpus, "0");
    for (size, said) in [
        (["--cpus", "4"], "with 1 CPUs and at most 3"),
        (["--cpus", "0"], "--cpus"),
        (["-m", "128M"], "--memory"),
        (["-m", "513M"], "--max-memory"),
        (["--max-memory", "1G"], "podvisor vm stop"),
    ] {
        let refused = vm(&[&["resize"], &size[..], &["vm1"]].concat());
        assert_ne!(refused.code, Some(0), "{size:?}");
        assert!(refused.stderr.contains(said), "{size:?}: {refused:?}");
    }
    assert_eq!((online(), memory()), (cpus, at_boot), "nothing was changed");

    // By ACPI, and its agent.
    vm(&["resize", "--cpus", "2", "vm1"]).printed("vm1\n");
    until("the second CPU", || online() == "0-1");
    let fewer = vm(&["resize", "--cpus", "1", "vm1"]);
    assert!(fewer.stderr.contains("podvisor vm stop"), "{fewer:?}");
    // By virtio-mem, both ways; no driver gives back all that it once had.
    sees("modprobe virtio_mem");
    let resized = |size: &str| {
        until(size, || vm(&["resize", "-m", size, "vm1"]).code == Some(0));
        memory() - at_boot
    };
    assert_eq!(resized("512M"), 256);
    assert_eq!(resized("384M"), 128);
    assert_eq!(online(), "0-1");
}

/// Makes an image of the disk of the VM `vm1`, which has booted three times and is off.
fn commit(root: &Root) {
    let vm = |arguments: &[&str]| -> Ran { root.output(&[&["vm"], arguments].concat()) };
    let named = vm(&["commit", "vm1", "Not/A Name"]);
    assert!(named.stderr.contains("Not/A Name"), "{named:?}");
    let made = vm(&["commit", "-q", "vm1", "mine:1"]);
    assert!(made.stdout.starts_with("sha256:"), "{made:?}");
    vm(&["run", "-d", "--name", "vm2", "-m", "256M", "mine:1"]);
    until("the committed disk", || {
        vm(&["logs", "vm2"]).stdout.contains("CPUs, boot 4")
    });
    vm(&["rm", "-f", "vm2"]).printed("vm2\n");
}

/// The kernel that was found for the image's first VM is there for the next one, unless that is not
/// to use it; and goes with the image.
fn boots_what_is_kept(root: &Root, image: &str) {
    let vm = |arguments: &[&str]| -> Ran { root.output(&[&["vm"], arguments].concat()) };
    let disks = root.path().join("images/disks");
    let kept = || -> Vec<PathBuf> {
        let images = fs::read_dir(&disks).unwrap().flatten();
        let derived = images.filter_map(|image| fs::read_dir(image.path().join("derived")).ok());
        derived
            .flatten()
            .flatten()
            .map(|kept| kept.path())
            .collect()
    };
    let first = kept();
    assert_eq!(first.len(), 1, "{first:?}");
    let made = fs::metadata(first[0].join("kernel")).unwrap();
    for (name, way, said) in [
        ("kept", &["--timings"][..], KEPT),
        ("loaded", &["--no-kept-kernel"], "podvisor-loader: starting"),
    ] {
        let run = ["run", "-d", "--name", name, "-m", "256M"];
        let ran = vm(&[&run, way, &[image]].concat());
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let logs = || vm(&["logs", name]).stdout;
        if way == ["--timings"] {
            timings_of(root, name, &ran);
        }
        until("its boot", || logs().contains(said));
        vm(&["rm", "-f", name]).printed(&format!("{name}\n"));
    }
    assert_eq!(kept(), first);
    let now = fs::metadata(first[0].join("kernel")).unwrap();
    assert_eq!(now.ino(), made.ino(), "it was read again");
    // Another image has its own.
    let other = root.path().join("other.raw");
    let mut bytes = fs::read(image).unwrap();
    bytes.extend([0; 512]);
    fs::write(&other, bytes).unwrap();
    let run = ["run", "-d", "--name", "other", "-m", "256M"];
    let ran = vm(&[&run[..], &[other.to_str().unwrap()]].concat());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(kept().len(), 2, "{:?}", kept());
    vm(&["rm", "-f", "other"]).printed("other\n");
}

/// The phases of a VM's boot, which `vm run` has waited for and shown.
fn timings_of(root: &Root, name: &str, ran: &Ran) {
    let by = format!("VM {name}: by the kernel that was kept of its image (Small system)\n");
    let shown = ran.stderr.split_once(&by).unwrap_or_default().1;
    let mut rest = shown;
    for phase in [
        "image ready",
        "disk made",
        "network made",
        "process jailed",
        "kernel of the image known",
        "machine built",
        "first output of the guest",
        "prompt on the console",
    ] {
        rest = rest.split_once(phase).expect(phase).1;
    }
    assert!(!shown.contains("loader"), "{shown}");
    let again = root.output(&["vm", "timings", name]);
    assert_eq!(again.stdout, by + shown);
    let json = root.output(&["vm", "timings", "--json", name]).stdout;
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (&json["way"], &json["boots"]),
        (&"keptKernel".into(), &1.into())
    );
    assert!(
        json["cmdline"].as_str().unwrap().contains("console=ttyS0"),
        "{json}"
    );
}

/// Saves the VM `vm1`, whose agent answers, in each way, and leaves it as it was.
fn warm(root: &Root) {
    let vm = |arguments: &[&str]| -> Ran { root.output(&[&["vm"], arguments].concat()) };
    let sh = |name: &str, script: &str| -> String {
        let ran = vm(&["exec", name, "sh", "-c", script]);
        assert_eq!(ran.code, Some(0), "{name}: {script}: {ran:?}");
        ran.stdout
    };
    let answers = |name: &str| until("the agent", || vm(&["exec", name, "true"]).code == Some(0));
    let inspect = |name: &str| -> Value {
        let all: Value = serde_json::from_str(&vm(&["inspect", name]).stdout).unwrap();
        all[0].clone()
    };
    // Anyone on this host reaches a guest by the address that is listed.
    let fetch = |name: &str| -> String {
        let address = inspect(name)["Addresses"][0].as_str().unwrap().to_owned();
        let mut stream = TcpStream::connect((address.as_str(), 80)).unwrap();
        stream.write_all(b"GET /hostname HTTP/1.0\r\n\r\n").unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        format!("{address} {said}")
    };
    let boot = sh("vm1", &format!("echo kept >/run/mark; cat {BOOT_ID}"));
    // It has no cloud-init: DHCP has told it its address.
    assert!(fetch("vm1").contains("vm1"));

    let began = SystemTime::now();
    vm(&["hibernate", "vm1"]).printed("vm1\n");
    println!("hibernate: {:?}", began.elapsed());
    let listed = vm(&["ps"]).stdout;
    assert!(listed.contains("Hibernated "), "{listed}");
    assert_eq!(inspect("vm1")["State"], "hibernated");
    let again = vm(&["hibernate", "vm1"]);
    assert!(again.stderr.contains("not running"), "{again:?}");
    // Longer than what its clock may be off because of a slow agent.
    thread::sleep(Duration::from_secs(12));
    vm(&["start", "vm1"]).printed("vm1\n");
    answers("vm1");
    assert_eq!(
        sh("vm1", &format!("cat /run/mark {BOOT_ID}")),
        format!("kept\n{boot}")
    );
    until("the guest's clock", || {
        let guest: u64 = sh("vm1", "date +%s").trim().parse().unwrap();
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let behind = now.unwrap().as_secs().abs_diff(guest);
        println!("clock: {behind} s behind");
        behind < 10
    });
    assert!(fetch("vm1").contains("vm1"));

    vm(&["snapshot", "vm1", "clean"]).printed("clean\n");
    let taken = vm(&["snapshot", "vm1", "clean"]);
    assert!(taken.stderr.contains("already"), "{taken:?}");
    sh("vm1", "echo later >/root/later; rm /run/mark; sync");
    let began = SystemTime::now();
    vm(&["clone", "-n", "2", "vm1:clean", "two"]).printed("two-1\ntwo-2\n");
    println!("two clones: {:?}", began.elapsed());
    let mut addresses = Vec::new();
    for name in ["two-1", "two-2"] {
        let said = sh(
            name,
            &format!("hostname; cat /run/mark {BOOT_ID}; ls /root/later; true"),
        );
        assert_eq!(said, format!("{name}\nkept\n{boot}"));
        sh(
            name,
            &format!("[ ! -e /root/mine ] && echo {name} >/root/mine && sync"),
        );
        addresses.push(fetch(name));
    }
    assert_eq!(inspect("two-1")["Boot"]["way"], "snapshot");
    assert_eq!(inspect("vm1")["Boot"]["way"], "savedState");
    addresses.push(fetch("vm1"));
    addresses.sort();
    addresses.dedup();
    assert_eq!(addresses.len(), 3, "{addresses:?}");
    // A clone is a VM: its own disk boots, with the name that cloud-init's disk has.
    vm(&["stop", "-t", "5", "two-1"]).printed("two-1\n");
    vm(&["start", "two-1"]).printed("two-1\n");
    answers("two-1");
    assert_eq!(sh("two-1", "cat /root/mine; hostname"), "two-1\ntwo-1\n");
    vm(&["rm", "-f", "two-1", "two-2"]).printed("two-1\ntwo-2\n");

    let running = vm(&["restore", "vm1", "clean"]);
    assert!(running.stderr.contains("-f"), "{running:?}");
    vm(&["restore", "-f", "vm1", "clean"]).printed("vm1\n");
    answers("vm1");
    let said = sh(
        "vm1",
        &format!("cat /run/mark {BOOT_ID}; ls /root/later; true"),
    );
    assert_eq!(said, format!("kept\n{boot}"));
    let listed = vm(&["snapshots", "vm1"]).stdout;
    assert!(listed.contains("clean"), "{listed}");
    vm(&["rm-snapshot", "vm1", "clean"]).printed("clean\n");
    let none: Value = serde_json::from_str(&vm(&["snapshots", "--json"]).stdout).unwrap();
    assert_eq!(none, Value::Array(Vec::new()));
}

/// Moves the VM `vm1`, whose agent answers, to another root and back: as to another host, without
/// ssh.
fn moves(root: &Root) {
    let other = Root::default();
    let vm = |root: &Root, arguments: &[&str]| root.output(&[&["vm"], arguments].concat());
    let sh = |root: &Root, script: &str| {
        until("the agent", || {
            vm(root, &["exec", "vm1", "true"]).code == Some(0)
        });
        vm(root, &["exec", "vm1", "sh", "-c", script]).stdout
    };
    let boot = sh(
        root,
        &format!("echo moves >/run/moves; echo disk >/root/moves; cat {BOOT_ID}"),
    );
    // What does not lead to podvisor there.
    for (command, named) in [
        (
            &[
                "sh",
                "-c",
                "echo Welcome to this host, which has no podvisor",
            ][..],
            "receive",
        ),
        (&["false"], "receive"),
    ] {
        let refused = vm(root, &[&["migrate", "vm1", "--"], command].concat());
        assert_eq!(refused.code, Some(1), "{refused:?}");
        assert!(refused.stderr.contains("goes on here"), "{refused:?}");
        assert!(refused.stderr.contains(named), "{refused:?}");
    }
    let doubt = vm(root, &["migrate", "--resolve", "here", "vm1"]);
    assert!(doubt.stderr.contains("not in doubt"), "{doubt:?}");
    let receive = |root: &Root| {
        let path = format!("PODVISOR_ROOT={}", root.path().display());
        let podvisor = env!("CARGO_BIN_EXE_podvisor").to_owned();
        [
            "env".to_owned(),
            path,
            podvisor,
            "vm".to_owned(),
            "receive".to_owned(),
        ]
    };
    let migrate = |from: &Root, to: &Root, flags: &[&str]| -> Ran {
        let command = receive(to);
        let command = command.each_ref().map(String::as_str);
        vm(
            from,
            &[&["migrate"], flags, &["vm1", "--"], &command].concat(),
        )
    };
    // The other one has a VM of this name.
    let taken = migrate(root, root, &[]);
    assert!(taken.stderr.contains("in use"), "{taken:?}");
    half::stays_off(root, &other);
    let began = SystemTime::now();
    let there = migrate(root, &other, &["--downtime", "2000"]);
    println!("to another root: {:?}, {}", began.elapsed(), there.stderr);
    there.printed("vm1\n");
    vm(root, &["ps", "-q"]).printed("");
    let seen = format!("cat /run/moves /root/moves {BOOT_ID}");
    assert_eq!(sh(&other, &seen), format!("moves\ndisk\n{boot}"));
    let shown: Value = serde_json::from_str(&vm(&other, &["inspect", "vm1"]).stdout).unwrap();
    assert_eq!(shown[0]["Boot"]["way"], "migration");
    // Back again, with what it has written there. Its image is known here.
    sh(&other, "echo there >>/root/moves");
    let back = migrate(&other, root, &["--json", "--force"]);
    let cost: Value = serde_json::from_str(&back.stdout).unwrap();
    println!("and back: {cost}");
    assert!(cost["downtimeMs"].as_u64().unwrap() > 0, "{cost}");
    assert_eq!(sh(root, &seen), format!("moves\ndisk\nthere\n{boot}"));
    assert_eq!(fs::read_dir(other.path().join("v")).unwrap().count(), 0);
}

#[test]
fn guest_vms_share_directories_with_their_host() {
    let root = Root::default();
    let vm = |arguments: &[&str]| -> Ran { root.output(&[&["vm"], arguments].concat()) };
    let sh = |script: &str| -> String {
        let ran = vm(&["exec", "vm2", "sh", "-c", script]);
        assert_eq!(ran.code, Some(0), "{script}: {ran:?}");
        ran.stdout
    };
    let answers = || until("the agent", || vm(&["exec", "vm2", "true"]).code == Some(0));
    let (work, fixed) = (root.path().join("work"), root.path().join("fixed"));
    for dir in [&work, &fixed] {
        fs::create_dir(dir).unwrap();
        fs::write(dir.join("of-host"), "host\n").unwrap();
    }
    let volumes = [
        format!("{}:work", work.display()),
        format!("{}:/mnt/fixed:ro", fixed.display()),
    ];
    let image = small();
    let missing = format!("{}:none", root.path().join("none").display());
    let refused = vm(&["run", "-d", "-v", &missing, &image]);
    assert!(refused.stderr.contains("cannot share"), "{refused:?}");
    let [first, second] = &volumes;
    let run = [
        "run", "-d", "--name", "vm2", "-m", "256M", "--agent", "-v", first, "-v", second,
    ];
    let ran = vm(&[&run[..], &[image.as_str()]].concat());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    answers();
    brought_an_agent(&root);
    // By tag; cloud-init is told of the path.
    sh("mkdir -p /mnt/work /mnt/fixed && mount -t virtiofs work /mnt/work");
    let told = sh("grep -A5 volume1 /run/seed/user-data");
    assert!(
        told.contains("/mnt/fixed") && told.contains("virtiofs"),
        "{told}"
    );
    sh("mount -t virtiofs volume1 /mnt/fixed");
    assert_eq!(
        sh("cat /mnt/work/of-host /mnt/fixed/of-host"),
        "host\nhost\n"
    );
    let said = sh("touch /mnt/fixed/x 2>&1 || true");
    assert!(said.contains("Read-only"), "{said}");
    sh("echo guest >/mnt/work/of-guest && ln -s /etc/shadow /mnt/work/link");
    assert_eq!(
        fs::read_to_string(work.join("of-guest")).unwrap(),
        "guest\n"
    );
    fs::write(work.join("later"), "later\n").unwrap();
    assert_eq!(
        sh("cat /mnt/work/later; cat /mnt/work/link | head -c 5"),
        "later\nroot:"
    );
    // Its disk grows while it runs.
    vm(&["resize", "--disk", "96M", "vm2"]).printed("vm2\n");
    assert_eq!(sh("cat /sys/block/vda/size"), "196608\n");
    let smaller = vm(&["resize", "--disk", "80M", "vm2"]);
    assert!(smaller.stderr.contains("not made smaller"), "{smaller:?}");
    // The host's files are not in its memory.
    for command in [&["hibernate", "vm2"][..], &["clone", "vm2", "vm3"]] {
        let refused = vm(command);
        assert!(refused.stderr.contains("work, volume1"), "{refused:?}");
    }
    let listed = vm(&["inspect", "vm2"]).stdout;
    assert!(listed.contains("\"volume1\""), "{listed}");

    // As if it came from an older podvisor: what runs is another file.
    sh("cd /usr/local/sbin && cp /bin/busybox old && mv old podvisor-ga && sync");
    vm(&["stop", "-t", "300", "vm2"]).printed("vm2\n");
    let logs = vm(&["logs", "vm2"]).stdout;
    assert!(logs.contains("small: shutdown"), "{logs}");
    vm(&["start", "vm2"]).printed("vm2\n");
    answers();
    brought_an_agent(&root);
    sh("mount -t virtiofs work /mnt/work");
    assert_eq!(sh("cat /mnt/work/of-guest"), "guest\n");
    vm(&["rm", "-f", "vm2"]).printed("vm2\n");
    assert_eq!(fs::read_to_string(work.join("of-host")).unwrap(), "host\n");
    assert_eq!(fs::read_dir(root.path().join("v")).unwrap().count(), 0);
}

/// The VM `vm2` has podvisor's agent, by the script that is on the disk for cloud-init.
fn brought_an_agent(root: &Root) {
    let run = |words: &[&str]| root.output(&[&["vm", "exec", "vm2"], words].concat());
    // It is the parent of what it runs.
    run(&["sh", "-c", "cat /proc/$PPID/comm"]).printed("podvisor-ga\n");
    let same = "cmp /run/seed/podvisor-ga /usr/local/sbin/podvisor-ga && \
                readlink /proc/$PPID/exe; exit 7";
    let ran = run(&["sh", "-c", same]);
    assert_eq!(
        (ran.code, ran.stdout.as_str()),
        (Some(7), "/usr/local/sbin/podvisor-ga\n"),
        "{ran:?}"
    );
    let missing = run(&["no-such-program"]);
    assert_eq!(missing.code, Some(127), "{missing:?}");
    let (there, back) = (root.path().join("there"), root.path().join("back"));
    let bytes: Vec<u8> = (0..60_000_u32).flat_map(u32::to_le_bytes).collect();
    fs::write(&there, &bytes).unwrap();
    let cp = |from: &str, to: &str| root.output(&["vm", "cp", from, to]).printed("");
    cp(there.to_str().unwrap(), "vm2:/root/there");
    cp("vm2:/root/there", back.to_str().unwrap());
    assert!(fs::read(&back).unwrap() == bytes);
}
