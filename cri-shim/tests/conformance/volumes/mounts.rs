//! What the host mounts below a volume, and how long it is busy.

use super::*;

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

    // Changes by the host are visible.
    fs::write(dir.join("later"), "new").unwrap();
    assert_eq!(container.sh("cat /data/later"), "new");
    container.stop(0);
    container.remove();
}

#[test]
fn guest_mounts_on_links_to_nothing_are_where_the_links_lead() {
    let dir = RUNTIME.directory("linked");
    fs::write(dir.join("token"), "a token").unwrap();
    fs::write(dir.join("zone"), "a zone").unwrap();
    let container = Pod::shared().start("linked", |config| {
        config.image = Some(image("links"));
        config.mounts = vec![
            mount(&dir.join("zone"), "/etc/localtime"),
            mount(&dir, "/var/run/secrets/account"),
        ];
    });
    let files = "cat /etc/localtime /usr/share/zoneinfo/UTC /run/secrets/account/token";
    assert_eq!(container.sh(files), "a zonea zonea token");
    // The runtime mounts one on the link.
    container.sh("cat /etc/resolv.conf");
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
    let script = "until grep -q second /config/key; do sleep 0.1; done";
    container.sh(script);
    container.stop(0);
    container.remove();
}

#[test]
fn guest_a_stopped_pod_has_no_volume_of_the_host_mounted() {
    let volume = Mounted::disk(RUNTIME.directory("of-a-stopped-pod"));
    let pod = Pod::run("unmounted", |_| {});
    for name in ["first", "second"] {
        pod.start(name, |config| {
            config.mounts = vec![mount(&volume.0, "/data")];
        });
    }
    pod.stop();
    // A kubelet unmounts volumes now, before it removes the containers.
    let device = fs::metadata(&volume.0).unwrap().dev();
    assert_eq!(mounts_of(device), 1);
    pod.remove();
}

#[test]
fn guest_a_directory_below_a_volume_can_be_unmounted_and_removed_while_the_pod_runs() {
    let dir = RUNTIME.directory("not-busy");
    let inner = dir.join("inner");
    fs::create_dir(&inner).unwrap();
    let mounted = Mounted::disk(inner.clone());
    fs::write(inner.join("file"), "below").unwrap();
    let container = Pod::shared().start("not-busy", |config| {
        config.mounts = vec![mount(&dir, "/data")];
    });
    assert_eq!(container.sh("cat /data/inner/file"), "below");
    unmount(&inner, UnmountFlags::empty()).unwrap();
    drop(mounted);
    fs::remove_dir(&inner).unwrap();
    container.sh("test ! -e /data/inner");
    container.stop(0);
    container.remove();
}

#[test]
fn guest_a_pods_volumes_can_be_removed_beside_a_pod_that_has_the_whole_host() {
    let volume = RUNTIME.directory("of-a-pod-that-ends").join("volume");
    fs::create_dir(&volume).unwrap();
    let mounted = Mounted::disk(volume.clone());
    let pod = Pod::run("ends", |_| {});
    pod.start("user", |config| {
        config.mounts = vec![mount(&volume, "/data")];
    });
    // With what has no mapped users: `/proc`, among others.
    let monitor = Pod::shared_of(Client::Other).start("monitor", |config| {
        config.mounts = vec![Mount {
            readonly: true,
            ..mount(Path::new("/"), "/host")
        }];
    });
    monitor.sh("test -d /host/proc");
    pod.stop();
    unmount(&volume, UnmountFlags::empty()).unwrap();
    drop(mounted);
    fs::remove_dir(&volume).unwrap();
    pod.remove();
    monitor.sh("test -d /host/proc");
    monitor.stop(0);
    monitor.remove();
}

#[test]
fn guest_read_only_reaches_into_mounts_below_only_when_asked_to() {
    let dir = RUNTIME.directory("nested");
    let inner = dir.join("inner");
    fs::create_dir(&inner).unwrap();
    let _inner = Mounted::disk(inner);
    let recursive = |is_recursive| Mount {
        readonly: true,
        recursive_read_only: is_recursive,
        ..mount(&dir, if is_recursive { "/all" } else { "/top" })
    };
    let container = Pod::shared().start("nested", |config| {
        config.mounts = vec![recursive(false)];
        // Unknown to runtimes before Kubernetes 1.30.
        if RUNTIME.is_vm {
            config.mounts.push(recursive(true));
        }
    });
    container.sh("touch /top/inner/written && ! touch /top/refused 2>/dev/null");
    if RUNTIME.is_vm {
        container.sh("! touch /all/inner/refused 2>/dev/null && test -e /all/inner/written");
    }
    container.stop(0);
    container.remove();
}

#[test]
fn guest_later_mounts_of_the_host_are_seen_where_they_are_propagated_to() {
    let dir = RUNTIME.directory("later");
    fs::create_dir(dir.join("inner")).unwrap();
    // Propagation requires a shared mount.
    let outer = Mounted::at(dir.clone());
    mount_change(&outer.0, MountPropagationFlags::SHARED).unwrap();
    let inner = dir.join("inner");
    fs::create_dir(&inner).unwrap();
    // What is mounted later has no mapped users.
    let pod = Pod::shared_of(Client::Other);
    let container = pod.start("later", |config| {
        config.mounts = vec![
            mount(&dir, "/private"),
            Mount {
                propagation: MountPropagation::PropagationHostToContainer as i32,
                ..mount(&dir, "/slave")
            },
        ];
    });
    // The host can unmount a file system that was only listed; a kubelet does not detach.
    let listed = Mounted::at(inner.clone());
    assert!(container.sh("busybox ls -l /slave").contains("inner"));
    until("the mount is not busy", || {
        unmount(&inner, UnmountFlags::empty()).is_ok()
    });
    drop(listed);
    let _inner = Mounted::at(inner.clone());
    fs::write(inner.join("file"), "propagated").unwrap();
    assert_eq!(container.sh("cat /slave/inner/file"), "propagated");
    container.sh("test ! -e /private/inner/file");
    let bidirectional = pod.container_config("back", |config| {
        config.mounts = vec![Mount {
            propagation: MountPropagation::PropagationBidirectional as i32,
            ..mount(&dir, "/shared")
        }];
        security(config).privileged = true;
    });
    if RUNTIME.is_vm {
        let refused = pod.try_create(bidirectional).err().unwrap();
        assert!(refused.message().contains("Bidirectional"), "{refused}");
    }
    container.stop(0);
    container.remove();
}

#[test]
fn guest_a_node_of_a_device_that_machines_have_opens_the_machines() {
    let script = "cat /etc/hidden && echo gone >/etc/hidden && echo hidden";
    let (_, lines) = Pod::shared().script(script, |config| {
        config.mounts = vec![mount(Path::new("/dev/null"), "/etc/hidden")];
    });
    assert_eq!(stdout(&lines), ["hidden"]);
    if !RUNTIME.is_vm {
        // It is not open to privileged containers of a pod that is not.
        return;
    }
    let (_, lines) = Pod::shared().script("exec 3<>/dev/net/tun && echo opened", |config| {
        config.mounts = vec![mount(Path::new("/dev/net/tun"), "/dev/net/tun")];
        security(config).privileged = true;
    });
    assert_eq!(stdout(&lines), ["opened"]);
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
