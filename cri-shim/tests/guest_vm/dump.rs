//! A dump of a running VM's memory, by the command line.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::support::{Ran, Root};

/// Dumps the memory of the VM `vm1`, whose agent answers, and which goes on.
pub(crate) fn dumps(root: &Root) {
    let vm = |arguments: &[&str]| -> Ran { root.output(&[&["vm"], arguments].concat()) };
    let directory = root.path().join("dumps");
    fs::create_dir(&directory).unwrap();
    let names = |directory: &Path| -> Vec<_> {
        let entries = fs::read_dir(directory).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect()
    };
    let file = directory.join("vm1.dump");
    let path = file.to_str().unwrap();
    vm(&["dump", "vm1", "/no/such/dump"]).refused(1, &["/no/such/dump"]);

    // A file system with less room than the guest has memory: the file of before stays, alone.
    let size = c"size=1m";
    mount("none", &directory, "tmpfs", MountFlags::empty(), size).unwrap();
    fs::write(&file, "before").unwrap();
    let full = vm(&["dump", "vm1", path]);
    full.refused(1, &["VM vm1 is not dumped", "No space left on device"]);
    assert_eq!(fs::read(&file).unwrap(), b"before");
    assert_eq!(names(&directory), ["vm1.dump"]);
    unmount(&directory, UnmountFlags::DETACH).unwrap();
    assert_eq!(vm(&["exec", "vm1", "true"]).code, Some(0));

    let mark = "printf 'marker-%s-here' $((123456 * 3)) >/run/marker";
    assert_eq!(vm(&["exec", "vm1", "sh", "-c", mark]).code, Some(0));
    vm(&["dump", "vm1", path]).printed(&format!("{path}\n"));
    assert_eq!(names(&directory), ["vm1.dump"]);
    let mut grep = Command::new("grep");
    let found = grep.args(["-q", "-a", "-F", "marker-370368-here", path]);
    assert!(found.status().unwrap().success());
    let mut readelf = Command::new("readelf");
    let said = readelf.args(["-W", "-h", "-l", "-n", path]);
    let said = Ran::new(said.output().unwrap());
    assert_eq!((said.code, &*said.stderr), (Some(0), ""), "{said:?}");
    assert!(said.stdout.contains("CORE (Core file)"), "{said:?}");
    assert!(said.stdout.contains("  LOAD "), "{said:?}");
    // The registers of both of its CPUs.
    assert_eq!(said.stdout.matches("NT_PRSTATUS").count(), 2, "{said:?}");
    assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
    assert_eq!(vm(&["exec", "vm1", "true"]).code, Some(0));
    fs::remove_file(&file).unwrap();
}
