//! podvisor's guest agent on the disk, and the script that installs it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

use super::{file, files, seed, written};
use crate::documents::{Form, GuestSeed};
use crate::user_data::UserData;
use crate::yaml::Node;

/// The base64 parts of vendor-data of several, by their types.
fn parts(text: &str) -> BTreeMap<String, String> {
    use base64::Engine as _;
    let (head, body) = text.split_once("\n\n").unwrap();
    let boundary = head.split('"').nth(1).unwrap();
    let delimiter = format!("--{boundary}");
    let parts = body.split(delimiter.as_str());
    let parts = parts.filter_map(|part| part.split_once("\n\n"));
    parts
        .map(|(head, lines)| {
            let (_, kind) = head.split_once("Content-Type: ").unwrap();
            let kind = kind.split(';').next().unwrap();
            assert!(head.contains("Content-Transfer-Encoding: base64"), "{head}");
            assert!(lines.lines().all(|line| line.len() <= 76), "{lines}");
            let lines: String = lines.split_whitespace().collect();
            let bytes = base64::engine::general_purpose::STANDARD.decode(lines);
            (kind.to_owned(), String::from_utf8(bytes.unwrap()).unwrap())
        })
        .collect()
}

#[test]
fn an_agent_comes_with_vendor_data_and_leaves_the_users_configuration_as_it_is() {
    let own = "#cloud-config\n# mine\nruncmd: [true]\n";
    let seed = GuestSeed {
        agent: Some(b"a program".to_vec()),
        user_data: UserData::Document(own.as_bytes().to_vec()),
        ..seed()
    };
    let found = files(&seed);
    assert_eq!(found["podvisor-ga"], "a program");
    assert_eq!(found["user-data"], own);
    let hook = &found["vendor-data"];
    assert!(hook.starts_with("#cloud-boothook\n#!/bin/sh\n"), "{hook}");
    assert!(
        hook.contains("findfs LABEL=CIDATA") && !hook.contains('@'),
        "{hook}"
    );
    // The same on the other kind of disk, where its label and its place are others.
    let seed = GuestSeed {
        form: Form::ConfigDrive,
        ..seed
    };
    let found = files(&seed);
    assert_eq!(found["podvisor-ga"], "a program");
    let vendor: Value = serde_json::from_str(&found["openstack/latest/vendor_data.json"]).unwrap();
    let hook = vendor["cloud-init"].as_str().unwrap();
    assert!(
        hook.starts_with("#cloud-boothook\n") && hook.contains("LABEL=config-2"),
        "{hook}"
    );
}

#[test]
fn an_agent_and_what_stands_beside_a_script_are_two_parts() {
    let seed = GuestSeed {
        agent: Some(b"a program".to_vec()),
        user_data: UserData::Script("#!/bin/sh\ntrue\n".to_owned()),
        files: vec![file("/etc/x", "x")],
        ..seed()
    };
    let parts = parts(&files(&seed)["vendor-data"]);
    let config = Node::parse(&parts["text/cloud-config"]).unwrap().to_json();
    assert_eq!(written(&config, "/etc/x"), "x");
    assert!(parts["text/cloud-boothook"].starts_with("#!/bin/sh\n"));
    assert_eq!(parts.len(), 2);
}

/// A system that is a directory, with systemd, and tools that note how they are called.
struct System(tempfile::TempDir);

impl System {
    fn new() -> Self {
        let system = Self(tempfile::tempdir().unwrap());
        fs::create_dir_all(system.path("run/systemd/system")).unwrap();
        fs::write(system.path("seed"), "a program").unwrap();
        let (seed, noted) = (system.path("seed"), system.path("noted"));
        let (seed, noted) = (seed.display(), noted.display());
        system.tool("findfs", "echo /dev/seed");
        system.tool("mount", &format!("cp {seed} \"$6/podvisor-ga\""));
        system.tool("umount", "rm -f \"$1/podvisor-ga\"");
        for tool in ["systemctl", "udevadm"] {
            system.tool(tool, &format!("echo {tool} \"$@\" >>{noted}"));
        }
        for tool in ["modprobe", "restorecon"] {
            system.tool(tool, "true");
        }
        system
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn tool(&self, name: &str, does: &str) {
        program(
            &self.path("bin").join(name),
            &format!("#!/bin/sh\n{does}\n"),
        );
    }

    /// Runs the script as cloud-init does; returns how the tools were called, too.
    fn boots(&self) -> (Output, String) {
        let seed = GuestSeed {
            agent: Some(Vec::new()),
            ..seed()
        };
        let root = self.0.path().display();
        let hook = files(&seed)["vendor-data"].replace("\nroot=\n", &format!("\nroot={root}\n"));
        program(
            &self.path("hook"),
            hook.strip_prefix("#cloud-boothook\n").unwrap(),
        );
        let _ = fs::remove_file(self.path("noted"));
        let ran = Command::new(self.path("hook"))
            .env("PATH", format!("{root}/bin:/usr/bin:/bin"))
            .env("TMPDIR", self.0.path())
            .output()
            .unwrap();
        let noted = fs::read_to_string(self.path("noted")).unwrap_or_default();
        (ran, noted)
    }
}

fn program(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn the_agent_is_installed_once_and_again_when_it_is_another_one() {
    let system = System::new();
    let installed = system.path("usr/local/sbin/podvisor-ga");
    for (content, verb) in [
        ("a program", "restart"),
        ("a program", "start"),
        ("a newer program", "restart"),
    ] {
        fs::write(system.path("seed"), content).unwrap();
        let (ran, noted) = system.boots();
        assert!(ran.status.success(), "{ran:?}");
        assert_eq!(fs::read_to_string(&installed).unwrap(), content);
        let mode = fs::metadata(&installed).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o755);
        let calls = format!(
            "udevadm control --reload\nsystemctl daemon-reload\n\
             systemctl --no-block {verb} podvisor-ga.service\n"
        );
        assert_eq!(noted, calls);
    }
    let unit = system.path("etc/systemd/system/podvisor-ga.service");
    let unit = fs::read_to_string(unit).unwrap();
    let waits = unit.lines().find(|line| line.starts_with("After="));
    assert_eq!(waits, None, "the unit waits for another one");
    assert!(unit.contains("DefaultDependencies=no"), "{unit}");
    let rule = system.path("etc/udev/rules.d/60-podvisor-ga.rules");
    assert!(
        fs::read_to_string(rule)
            .unwrap()
            .contains("org.qemu.guest_agent.0")
    );
    // Nothing is left of where the disk was mounted.
    let left = fs::read_dir(system.0.path()).unwrap().flatten();
    let left = left.filter(|entry| entry.file_name().to_string_lossy().starts_with("tmp."));
    assert_eq!(left.count(), 0);
}

#[test]
fn a_system_with_an_agent_keeps_it_and_one_without_the_disk_says_so() {
    let system = System::new();
    program(&system.path("usr/sbin/qemu-ga"), "");
    let (ran, noted) = system.boots();
    assert!(ran.status.success() && noted.is_empty(), "{ran:?}");
    assert!(String::from_utf8_lossy(&ran.stderr).contains("/usr/sbin/qemu-ga"));
    assert!(!system.path("usr/local").exists());
    fs::remove_file(system.path("usr/sbin/qemu-ga")).unwrap();
    system.tool("findfs", "exit 1");
    system.tool("blkid", "exit 2");
    let (ran, noted) = system.boots();
    assert!(!ran.status.success() && noted.is_empty(), "{ran:?}");
    assert!(String::from_utf8_lossy(&ran.stderr).contains("no disk has the label CIDATA"));
}

#[test]
fn a_system_that_has_masked_the_agent_is_left_alone() {
    let system = System::new();
    let unit = system.path("etc/systemd/system/podvisor-ga.service");
    fs::create_dir_all(unit.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink("/dev/null", &unit).unwrap();
    let (ran, noted) = system.boots();
    assert!(ran.status.success() && noted.is_empty(), "{ran:?}");
    assert!(String::from_utf8_lossy(&ran.stderr).contains("masked"));
    assert!(!system.path("usr/local").exists());
}

#[test]
fn without_systemd_the_agent_is_started_at_once() {
    let system = System::new();
    fs::remove_dir_all(system.path("run")).unwrap();
    let noted = system.path("noted");
    system.tool("setsid", &format!("echo \"$@\" >>{}", noted.display()));
    let (ran, _) = system.boots();
    assert!(ran.status.success(), "{ran:?}");
    let started = system.path("usr/local/sbin/podvisor-ga");
    // It goes on beside the script.
    let begun = std::time::Instant::now();
    while fs::read_to_string(&noted).unwrap_or_default().is_empty() {
        assert!(begun.elapsed().as_secs() < 60, "nothing was started");
        std::thread::yield_now();
    }
    let said = fs::read_to_string(&noted).unwrap();
    assert_eq!(said, format!("{}\n", started.display()));
    assert!(!system.path("etc").exists());
}
