//! Directories and files of the host in a container.

use std::ffi::CStr;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use podvisor_cri::sandbox::jail;
use podvisor_cri_messages::*;
use rustix::fs::XattrFlags;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount,
};
use tonic::Code;

use crate::client::{ask, ask_images};
use crate::fixture::RUNTIME;
use crate::pod::{Client, Container, Pod, image, security, stdout, strings};
use crate::support::until;

pub(crate) fn mount(host: &Path, container: &str) -> Mount {
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

/// A directory of the host with its own file system mounted in it, until this is dropped.
pub(crate) struct Mounted(pub(crate) PathBuf);

impl Mounted {
    /// Mounts a tmpfs, on which only newer hosts map users.
    fn at(path: PathBuf) -> Self {
        Self::with(path, c"")
    }

    fn with(path: PathBuf, options: &CStr) -> Self {
        let mount = rustix::mount::mount("tmpfs", &path, "tmpfs", MountFlags::empty(), options);
        mount.unwrap();
        Self(path)
    }

    /// Mounts an ext4 in a new directory.
    fn with_attributes(name: &str) -> Self {
        let path = RUNTIME.directory(name).join("mounted");
        fs::create_dir(&path).unwrap();
        Self::disk(path)
    }

    /// Mounts an ext4 of 16 MiB, which has extended attributes and maps users on every host.
    fn disk(path: PathBuf) -> Self {
        let disk = RUNTIME.directory("disk").join("disk");
        let script = "/sbin/mke2fs -q -t ext4 \"$1\" 16M >/dev/null && mount -o loop \"$1\" .";
        let mut make = Command::new("sh");
        make.args(["-c", script, "sh"]).arg(disk).current_dir(&path);
        assert!(make.status().unwrap().success());
        Self(path)
    }

    pub(crate) fn bound(from: &Path, path: PathBuf) -> Self {
        mount_bind(from, &path).unwrap();
        Self(path)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// Returns the number of mounts of a file system.
fn mounts_of(device: u64) -> usize {
    let id = format!(
        "{}:{}",
        rustix::fs::major(device),
        rustix::fs::minor(device)
    );
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let ids = table.lines().filter_map(|line| line.split(' ').nth(2));
    ids.filter(|mounted| *mounted == id).count()
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

/// Creates a directory of the host like that of an emptyDir of the medium Memory.
pub(crate) fn memory_volume(name: &str, options: &CStr) -> Mounted {
    let dir = RUNTIME.directory(name);
    let volume = dir.join("volumes/kubernetes.io~empty-dir/cache");
    fs::create_dir_all(&volume).unwrap();
    Mounted::with(volume, options)
}

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

/// Returns path, image and sub-path of each mount in the status.
fn told_mounts(container: &Container) -> Vec<(String, String, String)> {
    let mounts = container.status().mounts.into_iter();
    let told = mounts.map(|mount| {
        let image_ref = mount.image.unwrap_or_default().image_ref;
        (mount.container_path, image_ref, mount.image_sub_path)
    });
    told.collect()
}

/// Returns PullImage's reference of an image.
fn image_ref(repository: &str) -> String {
    let pulled = ask_images!(pull_image(PullImageRequest {
        image: Some(image(repository)),
        ..Default::default()
    }));
    pulled.unwrap().image_ref
}

#[test]
fn guest_an_image_is_mounted_as_a_volume() {
    // Runtimes before Kubernetes 1.31 do not support such volumes.
    if !RUNTIME.is_vm {
        return;
    }
    let container = Pod::shared().start("image-volume", |config| {
        config.mounts = vec![Mount {
            container_path: "/model".to_owned(),
            readonly: true,
            image: Some(image("user")),
            ..Default::default()
        }];
    });
    assert_eq!(container.sh("cat /model/etc/plain"), "no program\n");
    container.sh("! touch /model/new 2>/dev/null");
    assert_eq!(container.sh("/model/bin/busybox echo runs"), "runs\n");
    assert_eq!(
        told_mounts(&container),
        [("/model".to_owned(), image_ref("user"), String::new())]
    );
    container.stop(0);
    container.remove();
    // The same image as the container's root.
    let same = Pod::shared().start("same-image", |config| {
        config.image = Some(image("user"));
        config.mounts = vec![Mount {
            container_path: "/model".to_owned(),
            readonly: true,
            image: Some(image("user")),
            ..Default::default()
        }];
    });
    assert_eq!(
        same.sh("cat /model/etc/plain /etc/plain"),
        "no program\nno program\n"
    );
    same.sh("! touch /model/new 2>/dev/null");
    same.stop(0);
    same.remove();
    let missing = Pod::shared().container_config("no-image", |config| {
        config.mounts = vec![Mount {
            container_path: "/model".to_owned(),
            readonly: true,
            image: Some(ImageSpec {
                image: "127.0.0.1:1/none:1".to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        }];
    });
    let refused = Pod::shared().try_create(missing).err().unwrap();
    assert_eq!(refused.code(), Code::NotFound);
}

fn create_with_part(sub_path: &str) -> Result<Container, tonic::Status> {
    let config = Pod::shared().container_config("image-part", |config| {
        config.command = strings(&["cat", "/etc-of-it/plain"]);
        config.mounts = vec![Mount {
            container_path: "/etc-of-it".to_owned(),
            readonly: true,
            image: Some(image("user")),
            image_sub_path: sub_path.to_owned(),
            ..Default::default()
        }];
    });
    Pod::shared().try_create(config)
}

#[test]
fn guest_a_part_of_an_image_is_mounted_as_a_volume() {
    if !RUNTIME.is_vm {
        return;
    }
    let container = create_with_part("etc").unwrap();
    container.start();
    assert_eq!(container.ended().exit_code, 0);
    assert_eq!(stdout(&container.lines()), ["no program"]);
    let told = ("/etc-of-it".to_owned(), image_ref("user"), "etc".to_owned());
    assert_eq!(told_mounts(&container), [told]);
    container.remove();
    for bad in ["../etc", "/etc", "no/such"] {
        let refused = create_with_part(bad).err().unwrap();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        let message = refused.message();
        assert!(message.contains(bad), "{refused}");
        assert!(message.contains("ImageVolumeMountFailed"), "{refused}");
    }
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
fn guest_an_overlay_can_have_its_upper_directory_in_a_volume() {
    let volume = Mounted::with_attributes("overlay");
    let pod = Pod::run("overlay", |config| {
        let linux = config.linux.as_mut().unwrap();
        linux.security_context.get_or_insert_default().privileged = true;
    });
    let script = "cd /volume; mkdir -p lower/dir lower/old upper work /tmp/merged; \
                  echo 1 >lower/dir/file; echo 2 >lower/gone; \
                  merge() { mount -t overlay overlay /tmp/merged -o \
                  lowerdir=/volume/lower,upperdir=/volume/upper,workdir=/volume/work; }; \
                  merge && cd /tmp/merged && busybox rm -r dir gone && mkdir dir && \
                  echo 3 >dir/new && \
                  busybox mv dir/new old/moved && cd / && busybox umount /tmp/merged && merge && \
                  cd /tmp/merged && ls -d * */*";
    let (status, lines) = pod.script(script, |config| {
        config.mounts = vec![mount(&volume.0, "/volume")];
        security(config).privileged = true;
    });
    assert_eq!(status.exit_code, 0, "{lines:?}");
    assert_eq!(stdout(&lines), ["dir", "old", "old/moved"]);
    // A directory in place of a removed one shows none of its files.
    let upper = volume.0.join("upper/dir");
    let names = rustix::fs::listxattr(&upper, &mut vec![0; 4096][..]);
    assert!(names.unwrap() > 0);
}

#[test]
fn guest_a_program_in_a_volume_has_its_capabilities_until_it_is_written_to() {
    // Revision 2, effective, CAP_CHOWN permitted.
    const CHOWN: [u8; 20] = [1, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let attribute = match RUNTIME.is_vm {
        true => "user.podvisor.security.capability",
        false => "security.capability",
    };
    let volume = Mounted::with_attributes("capability");
    let program = volume.0.join("busybox");
    fs::copy("/bin/busybox", &program).unwrap();
    fs::write(volume.0.join("file"), "").unwrap();
    rustix::fs::setxattr(&program, attribute, &CHOWN, XattrFlags::empty()).unwrap();
    let start = |user: i64| {
        Pod::shared().start("capability", |config| {
            config.mounts = vec![mount(&volume.0, "/volume")];
            security(config).run_as_user = Some(Int64Value { value: user });
        })
    };
    let (root, user) = (start(0), start(1000));
    user.sh("/volume/busybox chown 1000 /volume/file");
    user.sh("/volume/busybox chown 2000 /volume/file");
    root.sh("echo >>/volume/busybox");
    let refused = user.try_exec(&["/volume/busybox", "chown", "0", "/volume/file"], 0);
    assert_ne!(refused.unwrap().code, 0);
    assert_eq!(fs::metadata(volume.0.join("file")).unwrap().uid(), 2000);
    let left = rustix::fs::getxattr(&program, attribute, &mut [0; 32][..]);
    assert_eq!(left, Err(rustix::io::Errno::NODATA));
    for container in [root, user] {
        container.stop(0);
        container.remove();
    }
}

#[test]
fn guest_a_read_only_root_is_one_and_its_volumes_are_not() {
    let dir = RUNTIME.directory("writable");
    let script = "touch /x 2>/dev/null && exit 1; \
                  for file in hosts hostname resolv.conf; do \
                      (echo x >> /etc/$file) 2>/dev/null && exit 2; \
                  done; \
                  touch /data/y && echo fine";
    let (status, lines) = Pod::shared().script(script, |config| {
        config.mounts = vec![mount(&dir, "/data")];
        config.command = strings(&["sh", "-c", script]);
        security(config).readonly_rootfs = true;
    });
    assert_eq!(status.exit_code, 0, "{lines:?}");
    assert_eq!(stdout(&lines), ["fine"]);
    assert!(dir.join("y").exists());
}

#[test]
fn guest_what_an_image_has_at_its_volumes_can_be_written_below_a_read_only_root() {
    let start = |mounts: Vec<Mount>| {
        Pod::shared().start("declared", |config| {
            config.image = Some(image("volumes"));
            security(config).readonly_rootfs = true;
            config.mounts = mounts;
        })
    };
    let container = start(Vec::new());
    let refused = container.try_exec(&["touch", "/srv/new"], 0).unwrap();
    assert_ne!(refused.code, 0);
    let script = "cd /data; stat -c '%n %f %u %g' . file sub sub/same link; \
                  stat -c %Y file link; test file -ef sub/same";
    let listed = container.sh(script);
    let listed: Vec<_> = listed.lines().collect();
    let expected = [
        ". 45e8 1000 1000",
        "file 81a0 1000 1000",
        "sub 41c0 1000 1000",
        "sub/same 81a0 1000 1000",
        "link a1ff 1000 1000",
        "1700000000",
        "1700000000",
    ];
    assert_eq!(listed, expected);
    let script = "echo more >>/data/file; cat /data/sub/same; ls /srv/made/here; \
                  touch /srv/made/here/new; stat -c '%a %u' /srv/made/here";
    assert_eq!(container.sh(script), "from the image\nmore\n755 0\n");
    container.stop(0);
    container.remove();

    // The next container starts with the image's files, and its own mounts take precedence.
    let dir = RUNTIME.directory("own-volume");
    let container = start(vec![mount(&dir, "/srv/made/here")]);
    container.sh("touch /srv/made/here/own; test ! -e /srv/made/here/new");
    assert_eq!(container.sh("cat /data/file"), "from the image\n");
    assert!(dir.join("own").exists());
    container.stop(0);
    container.remove();
    if RUNTIME.is_vm {
        let left = fs::read_dir(RUNTIME.root().join("volumes")).unwrap();
        assert_eq!(left.count(), 0);
    }
}

#[test]
fn guest_a_working_directory_in_a_volume_is_made_and_is_roots() {
    let dir = RUNTIME.directory("work");
    let script = "pwd; busybox stat -c %u:%g:%a .; id -u";
    let (status, lines) = Pod::shared().script(script, |config| {
        config.mounts = vec![mount(&dir, "/data")];
        config.working_dir = "/data/for/it".to_owned();
        let context = security(config);
        context.run_as_user = Some(Int64Value { value: 1000 });
        context.readonly_rootfs = true;
    });
    assert_eq!(status.exit_code, 0, "{lines:?}");
    assert_eq!(stdout(&lines), ["/data/for/it", "0:0:755", "1000"]);
    assert!(dir.join("for/it").is_dir());
    if !RUNTIME.is_vm {
        return;
    }
    let read_only = Pod::shared().create("no-work", |config| {
        config.mounts = vec![Mount {
            readonly: true,
            ..mount(&dir, "/data")
        }];
        config.working_dir = "/data/other".to_owned();
    });
    let refused = ask!(start_container(StartContainerRequest {
        container_id: read_only.id.clone(),
    }))
    .unwrap_err();
    let message = refused.message();
    assert!(
        message.contains("/data/other") && message.contains("Read-only"),
        "{message}"
    );
    read_only.remove();
}
