//! A migration whose receiving command is killed in its last moment.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use serde_json::Value;

use super::support::{Ran, Root, until};

/// Moves `vm1` to another root, and kills what receives it there when the VM's record says that it
/// stays, before anybody hears that its machine is ready: it goes on here, and the half of it that
/// is left there does not start.
pub(crate) fn stays_off(root: &Root, other: &Root) {
    let [out, back] = ["out", "back"].map(|name| other.path().join(name));
    let made = Command::new("mkfifo").args([&out, &back]).status();
    assert!(made.unwrap().success());
    // Leads to whoever reads and writes the pipes.
    let leads = format!("cat <{} & exec cat >{}", back.display(), out.display());
    let migrate = root
        .podvisor(&["vm", "migrate", "vm1", "--", "sh", "-c", &leads])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut receive = other
        .podvisor(&["vm", "receive"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut input, mut output) = (
        receive.stdin.take().unwrap(),
        receive.stdout.take().unwrap(),
    );
    let carrier = thread::spawn(move || {
        let mut out = File::open(out).unwrap();
        // Its reader is killed.
        let _ = io::copy(&mut out, &mut input);
    });
    let mut to = File::options().write(true).open(back).unwrap();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let count = output.read(&mut buffer).unwrap();
        assert!(count > 0, "the receiver ended by itself");
        if is_kept(other.path()) {
            break;
        }
        to.write_all(&buffer[..count]).unwrap();
    }
    receive.kill().unwrap();
    receive.wait().unwrap();
    drop(to);
    let failed = Ran::new(migrate.wait_with_output().unwrap());
    carrier.join().unwrap();
    assert_eq!(failed.code, Some(1), "{failed:?}");
    assert!(failed.stderr.contains("goes on here"), "{failed:?}");

    let vm = |arguments: &[&str]| other.output(&[&["vm"], arguments].concat());
    let refuses = |arguments: &[&str]| {
        let refused = vm(arguments);
        refused.code == Some(1) && refused.stderr.contains("half of a migration")
    };
    // Its machine's process ends when it learns that nothing more comes.
    until("the refusal", || refuses(&["start", "vm1"]));
    assert!(refuses(&["commit", "vm1", "stale:1"]));
    vm(&["migrate", "--resolve", "there", "vm1"]).printed("vm1\n");
    vm(&["ps", "-q"]).printed("");
}

/// Whether the only VM below a root stays when it ends.
fn is_kept(root: &Path) -> bool {
    let mut records = fs::read_dir(root.join("v")).unwrap().flatten();
    let dir: PathBuf = records.next().unwrap().path();
    let record = fs::read(dir.join("container.json")).unwrap();
    let record: Value = serde_json::from_slice(&record).unwrap();
    record["remove"] == false
}
