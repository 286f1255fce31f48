//! Directories and files of the host in a container.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use k8s_cri::v1::*;

use crate::fixture::RUNTIME;
use crate::pod::{Pod, security, stdout, strings};

fn mount(host: &Path, container: &str) -> Mount {
    Mount {
        container_path: container.to_owned(),
        host_path: host.display().to_string(),
        ..Default::default()
    }
}

#[test]
fn guest_volumes_are_read_and_written_as_asked() {
    let dir = RUNTIME.directory("volume");
    fs::write(dir.join("in"), "from the host").unwrap();
    fs::create_dir(dir.join("sub")).unwrap();
    let file = dir.join("single");
    fs::write(&file, "one file").unwrap();
    let link = RUNTIME.directory("links").join("link");
    symlink(&dir, &link).unwrap();
    let container = Pod::shared().start("volumes", |config| {
        config.mounts = vec![
            mount(&dir, "/data"),
            Mount {
                readonly: true,
                ..mount(&dir, "/fixed")
            },
            Mount {
                readonly: true,
                ..mount(&file, "/srv/single")
            },
            mount(&link, "/linked"),
        ];
    });
    assert_eq!(
        container.sh("cat /data/in /linked/in"),
        "from the hostfrom the host"
    );
    assert_eq!(container.sh("cat /srv/single"), "one file");
    container.sh("echo from the guest >/data/sub/out");
    let written = fs::read_to_string(dir.join("sub/out")).unwrap();
    assert_eq!(written, "from the guest\n");
    for refused in [
        "echo x >/fixed/in",
        "touch /fixed/new",
        "echo x >/srv/single",
    ] {
        let output = container.try_exec(&["sh", "-c", refused], 0).unwrap();
        assert_ne!(output.code, 0, "{refused}");
    }
    assert_eq!(fs::read_to_string(dir.join("in")).unwrap(), "from the host");

    // What the host changes is seen.
    fs::write(dir.join("later"), "new").unwrap();
    assert_eq!(container.sh("cat /data/later"), "new");
    container.stop(0);
    container.remove();
}

#[test]
fn guest_a_volume_that_the_host_swaps_by_a_link_is_seen_anew() {
    // As a kubelet updates a configMap: files are links through one that is replaced.
    let dir = RUNTIME.directory("configmap");
    for (version, text) in [("..v1", "first"), ("..v2", "second")] {
        fs::create_dir(dir.join(version)).unwrap();
        fs::write(dir.join(version).join("key"), text).unwrap();
    }
    symlink("..v1", dir.join("..data")).unwrap();
    symlink("..data/key", dir.join("key")).unwrap();
    let container = Pod::shared().start("configmap", |config| {
        config.mounts = vec![Mount {
            readonly: true,
            ..mount(&dir, "/config")
        }];
    });
    assert_eq!(container.sh("cat /config/key"), "first");
    symlink("..v2", dir.join("..data_tmp")).unwrap();
    fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
    let script = "i=0; while [ $i -lt 20 ]; do grep -q second /config/key && exit 0; \
                  i=$((i+1)); sleep 0.1; done; exit 1";
    container.sh(script);
    container.stop(0);
    container.remove();
}

#[test]
fn guest_a_host_path_that_is_not_there_becomes_a_directory() {
    let missing = RUNTIME.directory("missing").join("new/dir");
    let (status, lines) = Pod::shared().script("ls -d /new && touch /new/file", |config| {
        config.mounts = vec![mount(&missing, "/new")];
    });
    assert_eq!(status.exit_code, 0, "{lines:?}");
    assert!(missing.join("file").exists());
}

#[test]
fn guest_a_termination_message_reaches_the_host() {
    let message = RUNTIME.directory("termination").join("message");
    fs::write(&message, "").unwrap();
    let (status, _) = Pod::shared().script("echo why it ended >/dev/termination-log", |config| {
        config.mounts = vec![mount(&message, "/dev/termination-log")];
    });
    assert_eq!(status.exit_code, 0);
    assert_eq!(fs::read_to_string(&message).unwrap(), "why it ended\n");
}

#[test]
fn guest_a_read_only_root_is_one_and_its_volumes_are_not() {
    let dir = RUNTIME.directory("writable");
    let script = "touch /x 2>/dev/null && exit 1; touch /data/y && echo fine";
    let (status, lines) = Pod::shared().script(script, |config| {
        config.mounts = vec![mount(&dir, "/data")];
        config.command = strings(&["sh", "-c", script]);
        security(config).readonly_rootfs = true;
    });
    assert_eq!(status.exit_code, 0, "{lines:?}");
    assert_eq!(stdout(&lines), ["fine"]);
    assert!(dir.join("y").exists());
}
