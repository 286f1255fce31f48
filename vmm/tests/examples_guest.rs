//! The programs in `examples/` do what they claim.

mod support;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use support::guest_file;

/// Returns an example's program, which is next to this one's directory.
fn example(name: &str) -> Command {
    let own = std::env::current_exe().unwrap();
    let target = own.parent().and_then(Path::parent).unwrap();
    Command::new(target.join("examples").join(name))
}

/// Runs an example to its end and returns its output.
fn output(name: &str, arguments: &[&OsStr]) -> String {
    let output = example(name).args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{errors}");
    text
}

/// Creates a directory with busybox and an init that runs `script`.
fn root(dir: &Path, script: &str) -> PathBuf {
    let root = dir.join("root");
    for directory in ["bin", "dev"] {
        std::fs::create_dir_all(root.join(directory)).unwrap();
    }
    std::fs::copy("/bin/busybox", root.join("bin/busybox")).unwrap();
    let script = format!(
        "#!/bin/busybox sh\n/bin/busybox mount -t devtmpfs dev /dev\nexec >/dev/console 2>&1\n\
         {script}\n/bin/busybox reboot -f\n"
    );
    let init = root.join("init");
    std::fs::write(&init, script).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&init, mode).unwrap();
    root
}

/// Runs a shell command in `directory`.
fn shell(directory: &Path, command: &str) {
    let mut shell = Command::new("sh");
    let status = shell
        .arg("-ec")
        .arg(command)
        .current_dir(directory)
        .status();
    assert!(status.unwrap().success(), "{command}");
}

#[test]
fn guest_of_the_example_hello_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let root = root(dir.path(), "echo hello from init");
    shell(
        &root,
        "find . | busybox cpio -o -H newc > ../initramfs 2>/dev/null",
    );
    let (vmlinux, initramfs) = (guest_file("vmlinux"), dir.path().join("initramfs"));
    let text = output("hello", &[vmlinux.as_ref(), initramfs.as_ref()]);
    assert!(text.contains("hello from init"), "{text}");
}

/// Packs a directory into an initial file system.
fn initramfs(dir: &Path, root: &Path) -> PathBuf {
    let pack = "find . | busybox cpio -o -H newc > ../initramfs 2>/dev/null";
    shell(root, pack);
    dir.join("initramfs")
}

#[test]
fn guest_of_the_example_own_disk_reads_what_the_program_computes() {
    let dir = tempfile::tempdir().unwrap();
    let script = "/bin/busybox dd if=/dev/vda bs=512 skip=7 count=1 2>/dev/null \
                  | /bin/busybox od -A n -t u8 -N 8";
    let initramfs = initramfs(dir.path(), &root(dir.path(), script));
    let text = output(
        "own_disk",
        &[guest_file("vmlinux").as_ref(), initramfs.as_ref()],
    );
    assert!(text.lines().any(|line| line.trim() == "7"), "{text}");
}

#[test]
fn guest_of_the_example_clone_goes_on_three_times() {
    let dir = tempfile::tempdir().unwrap();
    let script = "echo ready\n/bin/busybox sleep 2\necho went on";
    let initramfs = initramfs(dir.path(), &root(dir.path(), script));
    let text = output(
        "clone",
        &[guest_file("vmlinux").as_ref(), initramfs.as_ref()],
    );
    let count = |what| text.matches(what).count();
    assert_eq!((count("ready"), count("went on")), (1, 3), "{text}");
}

#[test]
fn guest_of_the_example_hotplug_reads_the_disk_that_came_later() {
    let dir = tempfile::tempdir().unwrap();
    let script = "/bin/busybox mkdir -p /sys\n/bin/busybox mount -t sysfs sys /sys\n\
                  echo ready\nread line </dev/console\n\
                  echo 1 >/sys/bus/pci/rescan\n\
                  echo \"read: $(/bin/busybox head -c 5 /dev/vda)\"";
    let initramfs = initramfs(dir.path(), &root(dir.path(), script));
    let image = dir.path().join("image");
    std::fs::write(&image, format!("{:<512}", "later")).unwrap();
    let vmlinux = guest_file("vmlinux");
    let text = output(
        "hotplug",
        &[vmlinux.as_ref(), initramfs.as_ref(), image.as_ref()],
    );
    assert!(text.contains("read: later"), "{text}");
}

#[test]
fn guest_of_the_example_disk_runs_a_program_from_it() {
    let dir = tempfile::tempdir().unwrap();
    let root = root(dir.path(), "echo \"from the disk: $*\"");
    shell(&root, "/usr/sbin/mke2fs -q -t ext4 -d . ../disk.ext4 16M");
    let disk = dir.path().join("disk.ext4");
    let vmlinux = guest_file("vmlinux");
    let arguments = ["/init", "one", "two"].map(OsStr::new);
    let [init, one, two] = arguments;
    let text = output("disk", &[vmlinux.as_ref(), disk.as_ref(), init, one, two]);
    assert!(text.contains("from the disk: one two"), "{text}");
    // By the id that the program gave it.
    assert!(text.contains("\nroot.read_bytes "), "counters: {text}");
}

#[test]
fn guest_of_the_example_vsock_is_heard() {
    let (vmlinux, initramfs) = (guest_file("vmlinux"), guest_file("initramfs.cpio"));
    let text = output("vsock", &[vmlinux.as_ref(), initramfs.as_ref()]);
    assert!(text.contains("the guest says: podvisor-agent "), "{text}");
}
