//! Volumes in memory, which the containers of a pod share.

use super::*;

#[test]
fn guest_containers_find_the_same_objects_in_what_they_share() {
    let dir = RUNTIME.directory("objects");
    let disk = Mounted::disk(dir.clone());
    let pod = Pod::shared();
    let with = |readonly| {
        let dir = &dir;
        move |config: &mut ContainerConfig| {
            config.mounts = vec![Mount {
                readonly,
                ..mount(dir, "/v")
            }];
        }
    };
    let first = pod.start("objects-first", with(false));
    let second = pod.start("objects-second", with(false));
    let object = "stat -c %d:%i /v /v/fifo";
    first.sh("busybox mkfifo /v/fifo; (cat /v/fifo >/v/got &) >/dev/null 2>&1");
    assert_eq!(first.sh(object), second.sh(object));
    // Writers and readers of a FIFO are connected.
    second.sh("echo sent >/v/fifo; until grep -q sent /v/got; do :; done");

    // A client of a socket reaches its listener.
    second.sh(
        "ln -s /v/socket /dev/log; (busybox syslogd -n -O /v/messages &) >/dev/null 2>&1; \
         until test -S /v/socket; do :; done",
    );
    first.sh("ln -s /v/socket /dev/log; busybox logger by the socket; \
         until grep -q 'by the socket' /v/messages; do :; done");

    // The volume stays when its first user is gone.
    first.stop(0);
    first.remove();
    second.sh("echo more >/v/more");
    let again = pod.start("objects-again", with(false));
    let reader = pod.start("objects-reader", with(true));
    assert_eq!(reader.sh("cat /v/more /v/got"), "more\nsent\n");
    let written = reader.try_exec(&["touch", "/v/new"], 0).unwrap();
    assert_ne!(written.code, 0);
    for container in [second, again, reader] {
        container.stop(0);
        container.remove();
    }
    assert_eq!(fs::read_to_string(dir.join("more")).unwrap(), "more\n");
    // No process uses the disk any more, not even the guest and its machine.
    until("the end of its use", || {
        unmount(&disk.0, UnmountFlags::empty()).is_ok()
    });
}

#[test]
fn guest_volumes_in_memory_are_one_tmpfs_for_all_containers() {
    let volume = memory_volume("memory", c"size=2m,mode=2777,gid=4321");
    let with_all = |config: &mut ContainerConfig| {
        config.mounts = vec![
            mount(&volume.0, "/cache"),
            Mount {
                readonly: true,
                ..mount(&volume.0, "/fixed")
            },
        ];
    };
    let pod = Pod::shared();
    let first = pod.start("memory-first", with_all);
    let second = pod.start("memory-second", with_all);
    assert_eq!(first.sh("stat -f -c %T /cache"), "tmpfs\n");
    assert_eq!(first.sh("stat -c '%a %u %g' /cache"), "2777 0 4321\n");
    first.sh("echo one >/cache/file && ! touch /fixed/new 2>/dev/null");
    assert_eq!(second.sh("cat /cache/file /fixed/file"), "one\none\n");
    second.sh("echo two >>/cache/file");
    // No more than the capacity of the host's.
    let written = first.try_exec(&["sh", "-c", "head -c 3000000 /dev/zero >/cache/much"], 0);
    assert_ne!(written.unwrap().code, 0);
    assert_eq!(
        first.sh("rm /cache/much; stat -f -c '%b %S' /cache"),
        "512 4096\n"
    );

    // A new container sees the files of the previous one.
    first.stop(0);
    first.remove();
    let first = pod.start("memory-again", with_all);
    assert_eq!(first.sh("cat /cache/file"), "one\ntwo\n");

    // A part of it, as a kubelet makes one for a subPath.
    fs::create_dir_all(volume.0.join("part/inner")).unwrap();
    let subpath = RUNTIME.directory("memory-subpath");
    let part = Mounted::bound(&volume.0.join("part/inner"), subpath);
    let of_part = pod.start("memory-part", |config| {
        config.mounts = vec![mount(&part.0, "/part")];
    });
    assert_eq!(
        of_part.sh("stat -f -c %T /part && touch /part/x"),
        "tmpfs\n"
    );
    assert_eq!(second.sh("ls /cache/part/inner"), "x\n");
    // The host's is not empty any more, and a container still sees the same as the others.
    let last = pod.start("memory-last", with_all);
    assert_eq!(
        last.sh("cat /cache/file; ls /cache/part/inner"),
        "one\ntwo\nx\n"
    );
    for container in [first, second, of_part, last] {
        container.stop(0);
        container.remove();
    }
}

#[test]
fn guest_a_part_of_a_volume_in_memory_may_be_mounted_before_the_whole() {
    let volume = memory_volume("memory-by-part", c"size=2m,mode=3777,gid=123");
    let directory = volume.0.join("part");
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o3777)).unwrap();
    let part = Mounted::bound(&directory, RUNTIME.directory("memory-by-part-subpath"));
    let container = Pod::shared().start("memory-by-part", |config| {
        config.mounts = vec![mount(&part.0, "/part"), mount(&volume.0, "/whole")];
    });
    assert_eq!(container.sh("stat -f -c %T /part"), "tmpfs\n");
    assert_eq!(container.sh("stat -c '%a %u %g' /part"), "3777 0 123\n");
    container.sh("touch /part/new && stat /whole/part/new");
    container.stop(0);
    container.remove();
}

#[test]
fn guest_what_the_host_has_put_into_a_volume_in_memory_is_seen() {
    let volume = memory_volume("memory-held", c"mode=0777");
    fs::write(volume.0.join("file"), "from the host").unwrap();
    // This takes a mount of the host's tmpfs: newer kernels map its users.
    let client = match jail::try_mapped_users(&volume.0) {
        Ok(()) => Client::Kubelet,
        Err(_) => Client::Other,
    };
    let container = Pod::shared_of(client).start("memory-held", |config| {
        config.mounts = vec![mount(&volume.0, "/cache")];
    });
    assert_eq!(container.sh("cat /cache/file"), "from the host");
    container.sh("rm /cache/file && echo back >/cache/new");
    assert_eq!(fs::read_to_string(volume.0.join("new")).unwrap(), "back\n");
    container.stop(0);
    container.remove();
}
