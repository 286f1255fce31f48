//! What `podvisor vm` refuses, and lists, without a guest.

mod support;

use std::fs;

use support::{Ran, Root};

/// A key that a guest may have.
const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA me@here\n";

/// Podvisor with guest files that are there, and a key.
struct Vms {
    root: Root,
}

impl Vms {
    fn new() -> Self {
        let root = Root::default();
        let guest = root.path().join("guest");
        fs::create_dir(&guest).unwrap();
        for name in ["vmlinux-loader", "loader.cpio"] {
            fs::write(guest.join(name), "x").unwrap();
        }
        fs::write(root.path().join("key.pub"), KEY).unwrap();
        Self { root }
    }

    fn path(&self, name: &str) -> String {
        self.root.path().join(name).to_str().unwrap().to_owned()
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        let mut command = self.root.podvisor(&[&["vm"], arguments].concat());
        command.env("PODVISOR_GUEST_DIR", self.root.path().join("guest"));
        Ran::new(command.output().unwrap())
    }
}

#[test]
fn what_cannot_be_a_vm_is_refused_by_its_name_and_leaves_nothing() {
    let vms = Vms::new();
    let key = vms.path("key.pub");
    let (empty, disk, user_data) = (vms.path("empty"), vms.path("disk.img"), vms.path("user"));
    fs::write(&empty, "").unwrap();
    fs::write(&disk, [0; 1 << 20]).unwrap();
    fs::write(&user_data, "#cloud-config\na: [").unwrap();
    let root = vms.path("");
    for (arguments, said) in [
        (&["./no-such.qcow2"][..], "there is no file ./no-such.qcow2"),
        (&[&root], "is a directory"),
        (&[&empty], "it is empty"),
        (&["--disk", "512", &disk], "--disk"),
        (&["--user-data", &user_data, &disk], "--user-data"),
        (&["--user-data", "/no/such", &disk], "/no/such"),
        (&["--ssh-key", &disk, &disk], "public SSH keys"),
        (&["--add-host", "a:1.2.3.4", &disk], "--add-host"),
        (&["--name", "-x", &disk], "-x"),
        (&["-v", "src:src", &disk], "DIR:TAG"),
        (&["-v", "/:/", &disk], "DIR:/PATH"),
        (
            &["--checksum", &format!("sha256:{}", "0".repeat(64)), &disk],
            "--checksum",
        ),
        (&["-m", "100000G", &disk], "--memory"),
        (&["-m", "1M", &disk], "64M"),
        (&["--cpus", "0", &disk], "--cpus"),
    ] {
        let ran = vms.run(&[&["run", "--ssh-key", &key], arguments].concat());
        assert_ne!(ran.code, Some(0), "{arguments:?}");
        assert!(ran.stderr.contains(said), "{arguments:?}: {ran:?}");
    }
    vms.run(&["ps", "-q"]).printed("");
    assert!(fs::read_dir(vms.path("v")).is_ok_and(|mut left| left.next().is_none()));
}

#[test]
fn a_vm_that_is_not_there_is_named_with_the_command_that_lists_them() {
    let vms = Vms::new();
    for command in [
        "console", "stop", "start", "logs", "ssh", "rm", "inspect", "pause", "unpause", "wait",
    ] {
        let ran = vms.run(&[command, "nobody"]);
        assert_ne!(ran.code, Some(0), "{command}");
        assert!(
            ran.stderr
                .contains("no VM `nobody`; `podvisor vm ps` lists them"),
            "{command}: {ran:?}"
        );
    }
    for arguments in [
        &["hibernate", "nobody"][..],
        &["snapshot", "nobody", "s"],
        &["snapshots", "nobody"],
        &["rm-snapshot", "nobody", "s"],
        &["restore", "nobody", "s"],
        &["clone", "nobody", "new"],
        &["clone", "nobody:s", "new"],
        &["resize", "--cpus", "2", "nobody"],
        &["attach-disk", "--size", "1G", "nobody"],
        &["detach-disk", "nobody", "data"],
    ] {
        let ran = vms.run(arguments);
        assert_ne!(ran.code, Some(0), "{arguments:?}");
        assert!(
            ran.stderr.contains("no VM `nobody`"),
            "{arguments:?}: {ran:?}"
        );
    }
    for (arguments, said) in [
        (&["snapshot", "nobody", "../s"][..], "letters, digits"),
        (&["clone", "-n", "0", "nobody", "new"], "--count"),
        (&["clone", "nobody", "-x"], "-x"),
        (&["clone", "nobody", "a/b"], "a/b"),
        (&["resize", "nobody"], "--disk"),
        (&["attach-disk", "nobody"], "--size"),
        (&["attach-disk", "nobody", "/no/such"], "/no/such"),
        (
            &["attach-disk", "--serial", "a/b", "nobody", "/no/such"],
            "--serial",
        ),
    ] {
        let ran = vms.run(arguments);
        assert_ne!(ran.code, Some(0), "{arguments:?}");
        assert!(ran.stderr.contains(said), "{arguments:?}: {ran:?}");
    }
    vms.run(&["rm", "-f", "nobody"]).printed("");
}

/// Nobody installs a program for an image that is not there.
#[test]
fn a_missing_image_is_reported_before_a_key_is_made() {
    let vms = Vms::new();
    let mut command = vms.root.podvisor(&["vm", "run", "./no-such.qcow2"]);
    command.env("PODVISOR_GUEST_DIR", vms.root.path().join("guest"));
    let ran = Ran::new(command.env("PATH", "/nowhere").output().unwrap());
    assert!(
        ran.stderr.contains("there is no file ./no-such.qcow2"),
        "{ran:?}"
    );
    assert!(!ran.stderr.contains("ssh-keygen"), "{ran:?}");
}

#[test]
fn a_host_without_the_loader_says_what_is_missing() {
    let vms = Vms::new();
    fs::remove_file(vms.path("guest/loader.cpio")).unwrap();
    let disk = vms.path("x.qcow2");
    fs::write(&disk, [0; 1024]).unwrap();
    let ran = vms.run(&["run", &disk]);
    assert!(
        ran.stderr.contains("no guest loader `loader.cpio`"),
        "{ran:?}"
    );
}
