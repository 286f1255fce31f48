//! Devices of the node in containers.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use podvisor_cri_messages::{CdiDevice, Device};
use serde_json::json;
use tonic::Code;

use crate::fixture::RUNTIME;
use crate::pod::{Pod, security, stdout};

/// A block device of the node, backed by its own file.
struct Loop {
    device: String,
    file: PathBuf,
}

impl Loop {
    fn new() -> Self {
        let file = RUNTIME.directory("disks").join("disk");
        File::create(&file).unwrap().set_len(4 << 20).unwrap();
        let modprobe = Command::new("modprobe").arg("loop").status().unwrap();
        assert!(modprobe.success(), "no block devices to be had");
        let made = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(&file)
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        let device = String::from_utf8(made.stdout).unwrap().trim().to_owned();
        Self { device, file }
    }

    fn at(&self, container_path: &str, permissions: &str) -> Device {
        device(&self.device, container_path, permissions)
    }

    /// Returns the first bytes of the file, as text.
    fn start(&self, count: usize) -> String {
        let mut bytes = vec![0; count];
        let file = File::open(&self.file).unwrap();
        file.read_exact_at(&mut bytes, 0).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = Command::new("losetup").args(["-d", &self.device]).status();
        assert!(detached.unwrap().success());
        let _ = fs::remove_file(&self.file);
    }
}

fn device(host_path: &str, container_path: &str, permissions: &str) -> Device {
    Device {
        host_path: host_path.to_owned(),
        container_path: container_path.to_owned(),
        permissions: permissions.to_owned(),
    }
}

#[test]
fn guest_a_block_device_of_the_node_is_a_containers() {
    let disk = Loop::new();
    let pod = Pod::shared();
    let with = |devices: Vec<Device>| pod.start("raw", |config| config.devices = devices);
    let writer = with(vec![disk.at("/dev/xvda", "rwm")]);
    assert!(writer.sh("ls -l /dev/xvda").starts_with('b'));
    writer.sh("echo from a container > /dev/xvda");
    // Another container sees the same disk, including data that is not written out yet, at any
    // path.
    let other = with(vec![disk.at("/srv/disk", "rw")]);
    writer.sh("echo written > /dev/xvda");
    assert_eq!(other.sh("head -c 8 /srv/disk"), "written\n");
    writer.sh("echo written | dd of=/dev/xvda conv=fsync");
    assert_eq!(disk.start(8), "written\n");

    // Discarded blocks are returned to the node.
    writer.sh("blkdiscard /dev/xvda");
    let blocks = fs::metadata(&disk.file).unwrap().blocks();
    assert_eq!((blocks, disk.start(8)), (0, "\0".repeat(8)));
    writer.sh("echo written | dd of=/dev/xvda conv=fsync");

    let reader = with(vec![disk.at("/dev/xvda", "r")]);
    assert_eq!(reader.sh("head -c 8 /dev/xvda"), "written\n");
    let refused = "echo x 2>&- > /dev/xvda && echo written || echo refused";
    assert_eq!(reader.sh(refused), "refused\n");
    let without = pod.start("without", |_| {});
    assert_eq!(without.sh("ls /dev | grep -c xvda || true"), "0\n");

    for container in [writer, other, reader] {
        container.stop(0);
        container.remove();
    }
    if RUNTIME.is_vm {
        // It is not in the guest any more: its serial starts with its kind.
        let left = "cat /sys/block/vd*/serial | grep -c ^b7: || true";
        assert_eq!(without.sh(left), "0\n");
    }
    without.stop(0);
    without.remove();
}

/// Where drivers put the definitions of their devices, for every runtime.
const CDI: &str = "/var/run/cdi";

#[test]
fn guest_a_block_device_that_a_driver_defines_is_a_containers() {
    let disk = Loop::new();
    let document = json!({
        "cdiVersion": "0.6.0",
        "kind": "podvisor.test/disk",
        "devices": [{
            "name": "first",
            "containerEdits": {
                "env": ["DISK=/dev/claimed"],
                "deviceNodes": [{
                    "path": "/dev/claimed", "hostPath": disk.device, "permissions": "rwm",
                }],
            },
        }],
    });
    let definition = Path::new(CDI).join("podvisor-test.json");
    fs::create_dir_all(CDI).unwrap();
    fs::write(&definition, document.to_string()).unwrap();
    let pod = Pod::shared();
    let container = pod.start("claims", |config| {
        config.cdi_devices = vec![CdiDevice {
            name: "podvisor.test/disk=first".to_owned(),
        }];
    });
    fs::remove_file(&definition).unwrap();
    assert!(container.sh("ls -l /dev/claimed").starts_with('b'));
    container.sh("echo written | dd of=$DISK conv=fsync");
    assert_eq!(disk.start(8), "written\n");
    let without = pod.start("without", |_| {});
    assert_eq!(without.sh("ls /dev | grep -c claimed || true"), "0\n");
    for container in [container, without] {
        container.stop(0);
        container.remove();
    }
}

#[test]
fn guest_character_devices_are_those_that_the_machine_has_itself() {
    let pod = Pod::shared();
    let (_, lines) = pod.script("exec 3<>/dev/net/tun && ls -l /dev/net/tun", |config| {
        config.devices = vec![device("/dev/net/tun", "/dev/net/tun", "rwm")];
    });
    let lines = stdout(&lines);
    assert!(
        lines[0].starts_with('c') && lines[0].contains(" 10,"),
        "{lines:?}"
    );
    if !RUNTIME.is_vm {
        return;
    }
    let config = pod.container_config("refused", |config| {
        config.devices = vec![device("/dev/ptmx", "/dev/x", "rw")];
    });
    let refused = pod.try_create(config).err().unwrap();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("devices"), "{refused}");
}

#[test]
fn guest_a_privileged_container_has_the_machines_devices() {
    if !RUNTIME.is_vm {
        // The devices would be the test host's, and only in a privileged pod.
        return;
    }
    let script = "exec 3</dev/kmsg && test -c /dev/fuse && test -c /dev/net/tun && \
                  test ! -e /dev/vda && echo kmsg and no disks";
    let (_, lines) = Pod::shared().script(script, |config| security(config).privileged = true);
    assert_eq!(stdout(&lines), ["kmsg and no disks"]);
    let (_, lines) = Pod::shared().script("test -e /dev/kmsg || echo none", |_| {});
    assert_eq!(stdout(&lines), ["none"]);
}
