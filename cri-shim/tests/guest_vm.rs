//! `podvisor vm` with the smallest system that a distribution's kernel makes (`cargo xtask small`,
//! whose directory is in `PODVISOR_TEST_SMALL`): its disk is booted by the loader.

mod support;

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;

use support::terminal::Terminal;
use support::{Ran, Root, until};

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
        "--disk",
        "128M",
        "--ssh-key",
        &key,
        &image,
    ];
    let mut run = terminal.spawn(root.podvisor(&line));
    terminal.read_until("ctrl-] leaves it");
    let shown = terminal.read_until("small: ready");
    assert!(shown.contains("meta-data user-data"), "{shown}");
    terminal
        .person
        .write_all(b"echo it is $((40+2))\n")
        .unwrap();
    terminal.read_until("it is 42");
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
    vm(&["reboot", "vm1"]).printed("vm1\n");
    until("the second boot", || logs().contains("CPUs, boot 2"));
    vm(&["reboot", "-f", "vm1"]).printed("vm1\n");
    until("the third boot", || logs().contains("CPUs, boot 3"));
    vm(&["stop", "-t", "5", "vm1"]).printed("vm1\n");

    vm(&["start", "vm1"]).printed("vm1\n");
    until("the next boot", || logs().contains("CPUs, boot 4"));
    let again = vm(&["start", "vm1"]);
    assert!(again.stderr.contains("runs already"), "{again:?}");
    vm(&["rm", "-f", "vm1"]).printed("vm1\n");
    vm(&["ps", "-q"]).printed("");
    let left = fs::read_dir(root.path().join("v")).unwrap();
    assert_eq!(left.count(), 0);
}
