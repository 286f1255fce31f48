//! Pods in a user namespace (`hostUsers: false`): containers' ids are mapped to different ones on
//! the host, while volumes look unmapped.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::Path;

use podvisor_cri_messages::*;
use tonic::Code;

use crate::fixture::RUNTIME;
use crate::pod::{Container, Pod, image, security, stdout, strings};
use crate::streaming::{ECHO_SERVER, check_forward};
use crate::volumes::memory_volume;

/// The number of ids that a kubelet assigns to a pod.
const COUNT: u32 = 65_536;

fn options(first: u32) -> NamespaceOption {
    let ids = vec![IdMapping {
        host_id: first,
        container_id: 0,
        length: COUNT,
    }];
    NamespaceOption {
        pid: NamespaceMode::Container as i32,
        userns_options: Some(UserNamespace {
            mode: NamespaceMode::Pod as i32,
            uids: ids.clone(),
            gids: ids,
        }),
        ..Default::default()
    }
}

/// A pod whose ids start at `first`.
struct UsersPod {
    pod: Pod,
    options: NamespaceOption,
}

impl UsersPod {
    fn run(first: u32) -> Self {
        let options = options(first);
        let pod = Pod::run("users", |config| {
            let linux = config.linux.as_mut().unwrap();
            linux.security_context = Some(LinuxSandboxSecurityContext {
                namespace_options: Some(options.clone()),
                ..Default::default()
            });
        });
        Self { pod, options }
    }

    fn mount(&self, host: &Path, container: &str) -> Mount {
        Mount {
            host_path: host.display().to_string(),
            ..self.mount_of(container)
        }
    }

    /// Returns a mount without source and target, with the mappings that a kubelet sets for each.
    fn mount_of(&self, container: &str) -> Mount {
        let users = self.options.userns_options.as_ref().unwrap();
        Mount {
            container_path: container.to_owned(),
            uid_mappings: users.uids.clone(),
            gid_mappings: users.gids.clone(),
            ..Default::default()
        }
    }

    fn start(&self, change: impl FnOnce(&mut ContainerConfig)) -> Container {
        self.pod.start("users", |config| {
            security(config).namespace_options = Some(self.options.clone());
            change(config);
        })
    }

    /// Returns the output of a container that runs a script to its end.
    fn script(&self, script: &str, change: impl FnOnce(&mut ContainerConfig)) -> String {
        let (status, lines) = self.pod.script(script, |config| {
            security(config).namespace_options = Some(self.options.clone());
            change(config);
        });
        assert_eq!(status.exit_code, 0, "{script}: {lines:?}");
        stdout(&lines).join("\n")
    }
}

fn value(value: i64) -> Option<Int64Value> {
    Some(Int64Value { value })
}

fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

#[test]
fn guest_long_each_pods_users_are_the_range_that_it_was_given() {
    if !RUNTIME.is_vm {
        return;
    }
    for first in ["65536", "196608"] {
        let pod = UsersPod::run(first.parse().unwrap());
        let told = pod.pod.status().unwrap().linux.unwrap().namespaces.unwrap();
        assert_eq!(told.options, Some(pod.options.clone()));
        let maps = "cat /proc/self/uid_map /proc/self/gid_map; busybox readlink /proc/self/ns/user";
        let container = pod.start(|_| {});
        let by_exec = container.sh(maps);
        let [maps_of_exec @ .., namespace] = &words(&by_exec)[..] else {
            panic!("{by_exec}");
        };
        assert_eq!(maps_of_exec, ["0", first, "65536", "0", first, "65536"]);
        // Another container of the pod is in the same namespace.
        let alone = pod.script(maps, |config| security(config).run_as_user = value(1000));
        assert_eq!(words(&alone).last(), Some(namespace));
        assert_eq!(words(&alone)[..6], *maps_of_exec);

        let other = pod.pod.container_config("other", |config| {
            security(config).namespace_options = Some(options(1000));
        });
        let refused = pod.pod.try_create(other).err().unwrap();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains("hostUsers"), "{refused}");
        let beyond = pod.pod.container_config("beyond", |config| {
            let security = security(config);
            security.namespace_options = Some(pod.options.clone());
            security.run_as_user = value(COUNT.into());
        });
        let refused = pod.pod.try_create(beyond).err().unwrap();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        container.stop(0);
        container.remove();
    }
}

#[test]
fn guest_volumes_have_the_same_owners_in_a_user_namespace_and_on_the_host() {
    if !RUNTIME.is_vm {
        return;
    }
    let pod = UsersPod::run(131_072);
    let dir = RUNTIME.directory("users");
    let owned = |name: &str, uid: u32, gid: u32, mode: u32| {
        let path = dir.join(name);
        chown(&path, Some(uid), Some(gid)).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    for (name, uid, gid) in [("root", 0, 0), ("user", 1000, 2000), ("other", 70_000, 0)] {
        fs::write(dir.join(name), "text").unwrap();
        owned(name, uid, gid, 0o600);
    }
    // Like the volume of a pod with `fsGroup`.
    fs::create_dir(dir.join("group")).unwrap();
    owned("group", 0, 2000, 0o2775);
    let memory = memory_volume("users-memory", c"mode=2777,gid=2000");
    let with_volumes = |config: &mut ContainerConfig| {
        config.mounts = vec![
            pod.mount(&dir, "/data/volume"),
            pod.mount(&dir.join("root"), "/secret"),
            pod.mount(&memory.0, "/memory"),
        ];
    };
    let root = pod.start(with_volumes);
    let owners = |container: &Container, paths: &str| {
        container.sh(&format!("busybox stat -c %u:%g {paths}"))
    };
    let paths = "/data/volume/root /data/volume/user /data/volume/other /secret /memory";
    assert_eq!(
        words(&owners(&root, paths)),
        ["0:0", "1000:2000", "65534:0", "0:0", "0:2000"]
    );
    // Root may read files of root and of a user, as on any host, but not of unmapped ids.
    root.sh("cat /secret /data/volume/user && ! cat /data/volume/other 2>/dev/null");
    root.sh("cd /data/volume && echo >made && echo >given && busybox chown 5:6 given");
    root.sh("! busybox chown 70000 /data/volume/made 2>/dev/null && echo >/memory/roots");
    // The parent directory of the mount was created for it.
    root.sh("touch /data/beside");

    let user = pod.start(|config| {
        with_volumes(config);
        config.working_dir = "/data/volume/for/it".to_owned();
        let security = security(config);
        security.run_as_user = value(1000);
        security.run_as_group = value(3000);
        security.supplemental_groups = vec![2000];
    });
    user.sh("cd /data/volume && ! cat root 2>/dev/null && cat user && echo >group/file");
    user.sh("echo >/memory/users && ! touch /data/volume/no 2>/dev/null");
    assert_eq!(
        words(&owners(&root, "/memory/roots /memory/users")),
        ["0:2000", "1000:2000"]
    );
    let on_host = |name: &str| {
        let meta = fs::metadata(dir.join(name)).unwrap();
        (meta.uid(), meta.gid())
    };
    for roots in ["made", "for", "for/it"] {
        assert_eq!(on_host(roots), (0, 0), "{roots}");
    }
    assert_eq!(on_host("given"), (5, 6));
    assert_eq!(on_host("group/file"), (1000, 2000));
    for container in [root, user] {
        container.stop(0);
        container.remove();
    }
}

#[test]
fn guest_a_container_in_a_user_namespace_is_as_one_without() {
    if !RUNTIME.is_vm {
        return;
    }
    let pod = UsersPod::run(131_072);
    let root = pod.start(|config| config.working_dir = "/made/for it".to_owned());
    let roots = "/ /bin/busybox /dev /dev/null /dev/pts/ptmx /dev/shm /etc/hosts \
                 /etc/hostname /made '/made/for it'";
    let owners = root.sh(&format!("busybox stat -c %u:%g:%n {roots}"));
    for line in owners.lines() {
        assert!(line.starts_with("0:0:"), "{owners}");
    }
    root.sh("echo >/written && touch /dev/new /dev/shm/new && busybox chown 1000:50 /written");
    // The guest's own resources are out of its reach.
    root.sh("busybox mkdir -p /srv && ! busybox mount -t tmpfs none /srv 2>/dev/null");
    root.sh("! echo 1 2>/dev/null >/proc/sys/vm/overcommit_memory");
    root.stop(0);
    root.remove();

    // Users can reopen their own standard streams.
    let streams = "id -u; id -g; echo out >/dev/stdout; echo err >/dev/stderr; echo $HOME";
    let said = pod.script(streams, |config| config.image = Some(image("user")));
    assert_eq!(words(&said)[..3], ["1000", "50", "out"]);
    let terminal = "busybox stat -Lc %u /dev/stdin; echo on >/dev/tty; test -w /dev/console";
    let said = pod.script(terminal, |config| {
        config.tty = true;
        security(config).run_as_user = value(1000);
    });
    assert_eq!(words(&said), ["1000", "on"]);

    pod.script("! touch /no 2>/dev/null && touch /dev/shm/yes", |config| {
        security(config).readonly_rootfs = true;
    });
    // A capability applies to the namespace's resources: mounts, but not the guest's clock.
    let script = "busybox mkdir -p /srv && busybox mount -t tmpfs none /srv && touch /srv/x \
                  && busybox date -s 2000-01-01 2>&1 | busybox grep -q 'not permitted'";
    pod.script(script, |config| {
        let added = strings(&["SYS_ADMIN", "SYS_TIME"]);
        security(config).capabilities = Some(Capability {
            add_capabilities: added,
            ..Default::default()
        });
    });
}

#[test]
fn guest_a_pod_in_a_user_namespace_is_reached_and_shares_as_one_without() {
    if !RUNTIME.is_vm {
        return;
    }
    let pod = UsersPod::run(131_072);
    is_reached(&pod);
    shares_images_and_processes(&pod);
}

fn is_reached(pod: &UsersPod) {
    let server = pod.start(|config| {
        let script = format!("{ECHO_SERVER}; sleep 1000000");
        config.command = strings(&["sh", "-c", &script]);
        security(config).run_as_user = value(1000);
    });
    check_forward(&pod.pod, &server);

    // Probes are judged by their exit codes, and by their timeouts.
    let probe = |script: &str, timeout| server.try_exec(&["sh", "-c", script], timeout);
    let fails = probe("id -u; echo why >&2; exit 3", 60).unwrap();
    let told = (fails.code, &*fails.stdout, &*fails.stderr);
    assert_eq!(told, (3, "1000\n", "why\n"));
    let hangs = probe("sleep 2000000", 1).err().unwrap();
    assert_eq!(hangs.code(), Code::DeadlineExceeded, "{hangs}");
    server.sh("! ps | grep '[s]leep 2000000'");
    server.stop(0);
    server.remove();
}

fn shares_images_and_processes(pod: &UsersPod) {
    let shares = |config: &mut ContainerConfig| {
        let options = security(config).namespace_options.as_mut().unwrap();
        options.pid = NamespaceMode::Pod as i32;
    };
    let root = pod.start(|config| {
        shares(config);
        config.mounts = vec![Mount {
            image: Some(image("user")),
            readonly: true,
            ..pod.mount_of("/model")
        }];
        security(config).capabilities = Some(Capability {
            add_capabilities: strings(&["SYS_PTRACE"]),
            ..Default::default()
        });
    });
    let user = pod.start(|config| {
        shares(config);
        config.command = strings(&["sleep", "2000000"]);
        security(config).run_as_user = value(1000);
    });

    // Its owners are those of the image, not mapped to those of the guest.
    let owners = root.sh("stat -c %u:%g /model /model/etc/plain /model/bin/busybox");
    assert_eq!(words(&owners), ["0:0"; 3]);
    assert_eq!(root.sh("cat /model/etc/plain"), "no program\n");
    assert_eq!(root.sh("/model/bin/busybox echo runs"), "runs\n");
    root.sh("! touch /model/new 2>/dev/null && ! chmod 666 /model/etc/plain 2>/dev/null");

    // Each sees the other's process; root may inspect and signal it, a user may not.
    let pid_of = |container: &Container, number: u32| {
        // The searching process must not find itself.
        let found = container.sh(&format!("ps -o pid,args | grep '[s]leep {number}'"));
        let pid = words(&found).first().map(ToString::to_string);
        pid.unwrap_or_else(|| panic!("{number} is not seen"))
    };
    let (of_user, of_root) = (pid_of(&root, 2_000_000), pid_of(&user, 1_000_000));
    let owner = root.sh(&format!("stat -c %u /proc/{of_user}"));
    assert_eq!(owner, "1000\n");
    root.sh(&format!("ls /proc/{of_user}/root/bin/busybox"));
    user.sh(&format!("! kill {of_root} 2>/dev/null"));
    user.sh(&format!("! ls /proc/{of_root}/root/ 2>/dev/null"));
    root.sh(&format!("kill -9 {of_user}"));
    assert_eq!(user.ended().exit_code, 137);
    assert_eq!(root.state(), ContainerState::ContainerRunning);
    root.stop(0);
    for container in [root, user] {
        container.remove();
    }
}
