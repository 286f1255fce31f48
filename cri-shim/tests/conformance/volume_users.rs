//! Volumes of a kubelet's pod, which podvisor serves as nobody of the node by mounts with mapped
//! users; those that cannot have such mounts; and what a kubelet does when a pod's machine ends.
//!
//! Directories are where a kubelet has them, with the owners and modes that it gives them.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use podvisor_cri_messages::*;
use tonic::Code;

use crate::client::ask;
use crate::fixture::RUNTIME;
use crate::pod::{Client, Container, Pod, security};
use crate::support::host::{is_nobody, kill, processes};
use crate::support::until;
use crate::volumes::{Mounted, mount};

/// The group of a pod with `fsGroup`.
const GROUP: u32 = 2000;

/// A user of containers that is not root.
const USER: u32 = 1000;

fn owned(path: &Path, (uid, gid): (u32, u32), mode: u32) {
    chown(path, Some(uid), Some(gid)).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn file(path: PathBuf, owner: (u32, u32), mode: u32) -> PathBuf {
    fs::write(&path, "text\n").unwrap();
    owned(&path, owner, mode);
    path
}

fn directory(path: PathBuf, owner: (u32, u32), mode: u32) -> PathBuf {
    fs::create_dir_all(&path).unwrap();
    owned(&path, owner, mode);
    path
}

fn owner_and_mode(path: &Path) -> (u32, u32, u32) {
    let meta = fs::symlink_metadata(path).unwrap();
    (meta.uid(), meta.gid(), meta.mode() & 0o7777)
}

/// The volumes of a pod, in the directory that its kubelet has for it.
struct Volumes {
    /// With `fsGroup`.
    data: PathBuf,
    /// As of a service account, swapped by a link.
    token: PathBuf,
    /// A part of `data`, mounted for a `subPath`.
    part: Mounted,
    /// The node's own files.
    host: PathBuf,
}

impl Volumes {
    fn of(pod: &Pod) -> Self {
        let dir = pod.directory();
        let volume = |name: &str| dir.join("volumes").join(name);
        let data = directory(volume("kubernetes.io~empty-dir/data"), (0, GROUP), 0o2777);
        let token = directory(volume("kubernetes.io~projected/token"), (0, GROUP), 0o3777);
        let version = directory(token.join("..2026"), (0, GROUP), 0o2755);
        file(version.join("roots"), (0, 0), 0o400);
        file(version.join("users"), (USER, USER), 0o400);
        file(version.join("groups"), (0, GROUP), 0o440);
        symlink("..2026", token.join("..data")).unwrap();
        for name in ["roots", "users", "groups"] {
            symlink(format!("..data/{name}"), token.join(name)).unwrap();
        }
        let inner = directory(data.join("inner"), (0, GROUP), 0o2775);
        let point = directory(dir.join("volume-subpaths/data/one/0"), (0, 0), 0o750);
        let host = RUNTIME.directory("hosts-own");
        file(host.join("roots"), (0, 0), 0o600);
        file(host.join("others"), (4321, 4321), 0o600);
        file(host.join("all"), (0, 0), 0o644);
        Self {
            data,
            token,
            part: Mounted::bound(&inner, point),
            host,
        }
    }

    fn mounts(&self) -> Vec<Mount> {
        let read_only = |path: &Path, at: &str| Mount {
            readonly: true,
            ..mount(path, at)
        };
        vec![
            mount(&self.data, "/data"),
            read_only(&self.token, "/token"),
            mount(&self.part.0, "/part"),
            mount(&self.host, "/hosts"),
            read_only(&self.host, "/fixed"),
        ]
    }
}

fn run_pod() -> Pod {
    Pod::run("volumes", |_| {})
}

/// Starts a container of a user with the pod's `fsGroup`.
fn start(pod: &Pod, mounts: &[Mount], user: u32) -> Container {
    pod.start("user", |config| {
        config.mounts = mounts.to_vec();
        let security = security(config);
        let id = |id: u32| Some(Int64Value { value: id.into() });
        security.run_as_user = id(user);
        security.run_as_group = id(user);
        security.supplemental_groups = vec![GROUP.into()];
    })
}

fn refuses(container: &Container, scripts: &[&str]) {
    for script in scripts {
        let output = container.try_exec(&["sh", "-c", script], 0).unwrap();
        assert_ne!(output.code, 0, "{script}: {}", output.stdout);
    }
}

/// Returns the process that is a pod.
fn process_of(pod: &Pod) -> u32 {
    let arguments = format!("podvisor\0sandbox\0{}\0", pod.id);
    let found = processes(|all| all.starts_with(arguments.as_bytes()));
    assert_eq!(found.len(), 1, "{found:?}");
    found[0]
}

/// Returns what the runtime's status tells of the jail.
fn told_of_jail() -> serde_json::Value {
    let status = ask!(status(StatusRequest { verbose: true })).unwrap();
    serde_json::from_str(&status.info["jail"]).unwrap()
}

/// The number of pods whose processes are the host's root, as the runtime tells it.
fn pods_as_root() -> u64 {
    let told = &told_of_jail()["podsMissingLayers"]["mapped-users"];
    told.as_u64().unwrap_or(0)
}

#[test]
fn guest_long_a_kubelets_volumes_have_the_owners_and_modes_that_pods_expect() {
    let pod = run_pod();
    let volumes = Volumes::of(&pod);
    let mounts = volumes.mounts();
    let root = start(&pod, &mounts, 0);
    let user = start(&pod, &mounts, USER);
    owners_are_the_hosts(&root);
    projected_files_are_read_by_those_who_may(&root, &user);
    files_belong_to_who_makes_them(&volumes, &root, &user);
    root_changes_owners(&volumes, &root, &user);
    set_user_id_programs_work(&volumes, &root, &user);
    objects_are_shared(&volumes, &root, &user);
    if RUNTIME.is_vm {
        assert_eq!(told_of_jail()["noMappedUsers"], serde_json::Value::Null);
        assert!(is_nobody(process_of(&pod)));
        reaches_nothing_of_the_host(&pod, &volumes);
    }
    pod.stop();
    pod.remove();
}

fn owners_are_the_hosts(root: &Container) {
    let paths = "/data /data/inner /token /part /hosts/roots /hosts/others /fixed/all";
    let seen = root.sh(&format!("stat -c '%u:%g:%a' {paths}"));
    let expected = [
        "0:2000:2777",
        "0:2000:2775",
        "0:2000:3777",
        "0:2000:2775",
        "0:0:600",
        "4321:4321:600",
        "0:0:644",
    ];
    assert_eq!(seen.lines().collect::<Vec<_>>(), expected);
    // Root of a container is root for the node's own files that it is shown.
    root.sh("cat /hosts/roots /hosts/others && echo more >>/hosts/roots");
    refuses(root, &["echo x >>/fixed/roots", "touch /fixed/new"]);
}

fn projected_files_are_read_by_those_who_may(root: &Container, user: &Container) {
    root.sh("cat /token/roots /token/users /token/groups");
    assert_eq!(user.sh("cat /token/users /token/groups"), "text\ntext\n");
    refuses(
        user,
        &["cat /token/roots", "cat /hosts/roots", "cat /hosts/others"],
    );
    refuses(root, &["touch /token/new", "rm /token/..data"]);
}

fn files_belong_to_who_makes_them(volumes: &Volumes, root: &Container, user: &Container) {
    user.sh("umask 022; echo 1 >/data/of-user; mkdir /data/dir; echo 2 >/part/of-part");
    root.sh(
        "umask 027; echo 1 >/data/of-root; ln -s of-root /data/link; ln /data/of-root /data/hard",
    );
    let data = &volumes.data;
    // The directory's group is that of what is made in it.
    assert_eq!(owner_and_mode(&data.join("of-user")), (USER, GROUP, 0o644));
    assert_eq!(owner_and_mode(&data.join("dir")), (USER, GROUP, 0o2755));
    assert_eq!(owner_and_mode(&data.join("of-root")), (0, GROUP, 0o640));
    assert_eq!(owner_and_mode(&data.join("link")).0, 0);
    assert_eq!(owner_and_mode(&data.join("hard")), (0, GROUP, 0o640));
    let of_part = data.join("inner/of-part");
    assert_eq!(owner_and_mode(&of_part), (USER, GROUP, 0o644));
    refuses(user, &["touch /hosts/new", "echo x >/data/of-root"]);
    root.sh("echo >/hosts/new; truncate -s 1M /data/hard; mv /data/hard /data/moved");
    assert_eq!(owner_and_mode(&volumes.host.join("new")).0, 0);
}

fn root_changes_owners(volumes: &Volumes, root: &Container, user: &Container) {
    root.sh("cd /data; echo >given; busybox chown 70000:80000 given; \
         echo >large; busybox chown 2000000123:2147418111 large; \
         busybox chown -h 5:6 link; busybox chown 1000:1000 moved; busybox chmod 600 moved");
    let at = |name: &str| owner_and_mode(&volumes.data.join(name));
    assert_eq!(at("given"), (70_000, 80_000, 0o644));
    assert_eq!(at("large"), (2_000_000_123, 2_147_418_111, 0o644));
    let link = at("link");
    assert_eq!((link.0, link.1), (5, 6));
    assert_eq!(at("moved"), (USER, USER, 0o600));
    user.sh("echo mine >/data/moved && busybox chmod 640 /data/moved");
    refuses(
        user,
        &[
            "busybox chown 0 /data/moved",
            "busybox chown 2000 /data/moved",
            "busybox chmod 666 /data/given",
            "busybox rm /token/users",
        ],
    );
    // Of one's own groups.
    user.sh("busybox chgrp 2000 /data/moved");
    assert_eq!(at("moved"), (USER, GROUP, 0o640));
}

fn set_user_id_programs_work(volumes: &Volumes, root: &Container, user: &Container) {
    root.sh("cp /bin/busybox /data/suid && busybox chmod 4755 /data/suid");
    let program = volumes.data.join("suid");
    assert_eq!(owner_and_mode(&program), (0, GROUP, 0o4755));
    // busybox says so without.
    let told = user.sh("/data/suid su </dev/null 2>&1; true");
    assert!(!told.contains("must be suid"), "{told}");
    // A new owner, or a write, takes the bit away.
    root.sh("busybox chown 1000 /data/suid");
    assert_eq!(owner_and_mode(&program), (USER, GROUP, 0o755));
    root.sh("busybox chmod 6755 /data/suid");
    user.sh("echo >>/data/suid");
    assert_eq!(owner_and_mode(&program).2 & 0o4000, 0);
}

fn objects_are_shared(volumes: &Volumes, root: &Container, user: &Container) {
    root.sh("busybox mkfifo -m 666 /data/fifo; (cat /data/fifo >/data/got &) >/dev/null 2>&1");
    user.sh("echo sent >/data/fifo");
    root.sh("until grep -q sent /data/got; do :; done");
    let kind = |name: &str| fs::symlink_metadata(volumes.data.join(name)).unwrap();
    assert!(kind("fifo").file_type().is_fifo());
    root.sh(
        "ln -s /data/socket /dev/log; (busybox syslogd -n -O /data/messages &) >/dev/null 2>&1; \
         until test -S /data/socket; do :; done; busybox logger by the socket; \
         until grep -q 'by the socket' /data/messages; do :; done",
    );
    assert!(kind("socket").file_type().is_socket());
    assert_eq!(kind("socket").uid(), 0);
}

/// An attacker with more than the pod's process has: its users, every capability in its user
/// namespace, the host's mounts, and no filter.
fn reaches_nothing_of_the_host(pod: &Pod, volumes: &Volumes) {
    let pid = process_of(pod);
    let secret = file(RUNTIME.directory("secret").join("secret"), (0, 0), 0o600);
    let open = directory(RUNTIME.directory("open"), (0, 0), 0o755);
    let outside = |script: &str| {
        let mut attacker = Command::new("nsenter");
        attacker
            .args(["--user", "--target", &pid.to_string(), "--"])
            .args(["sh", "-c", script, "sh"])
            .args([&secret, &open, &volumes.data])
            .stdin(Stdio::null());
        attacker.output().unwrap()
    };
    let about = outside("id -u; id -g; grep CapEff /proc/self/status; cat /proc/self/uid_map");
    let about = String::from_utf8_lossy(&about.stdout).into_owned();
    let lines: Vec<&str> = about.lines().collect();
    assert_eq!(lines[..2], ["0", "0"], "{about}");
    assert!(!lines[2].ends_with("0000000000000000"), "{about}");
    for attempt in [
        "cat \"$1\"",
        "echo x >>\"$1\"",
        "chown 0 \"$1\"",
        "chmod 666 \"$1\"",
        "touch -d 2000-01-01 \"$1\"",
        "rm \"$1\"",
        "ln \"$1\" /tmp/linked-secret",
        "mv \"$1\" /tmp/moved-secret",
        "touch \"$2/new\"",
        "mknod \"$2/device\" c 1 3",
        "cat /etc/shadow",
        "echo x >>/etc/passwd",
        "touch /var/lib/kubelet/new",
        // The volume itself, without its mount in the jail.
        "chown 0 \"$3/of-user\"",
        "cat \"$3/of-root\"",
        "mount -t tmpfs none \"$2\"",
        "mount --bind \"$3\" \"$2\"",
        "chroot / true && nsenter --mount --target 1 true",
        "kill -0 1",
        "ls /proc/1/root/",
    ] {
        let output = outside(attempt);
        assert!(!output.status.success(), "{attempt}: {output:?}");
    }
    assert_eq!(fs::read_to_string(&secret).unwrap(), "text\n");
    assert_eq!(owner_and_mode(&secret), (0, 0, 0o600));
    assert_eq!(fs::read_dir(&open).unwrap().count(), 0);
    assert_eq!(owner_and_mode(&volumes.data.join("of-user")).0, USER);
}

/// As a kubelet does when it finds that a pod's sandbox is not ready: the same pod, once more.
fn make_anew(pod: Pod) -> Pod {
    until("the end of the pod's machine", || {
        pod.status().unwrap().state() == PodSandboxState::SandboxNotready
    });
    pod.stop();
    let mut config = pod.config.clone();
    config.metadata.as_mut().unwrap().attempt += 1;
    // It removes sandboxes after it has made the new one, or before.
    pod.remove();
    std::mem::forget(pod);
    let anew = Pod::of(config);
    let told = anew.status().unwrap();
    assert_eq!(told.metadata.unwrap().attempt, 1);
    assert_eq!(told.state, PodSandboxState::SandboxReady as i32);
    anew
}

#[test]
fn guest_a_pod_whose_machine_was_killed_is_made_anew_with_its_volumes() {
    if !RUNTIME.is_vm {
        return;
    }
    let pod = run_pod();
    let volumes = Volumes::of(&pod);
    let mounts = volumes.mounts();
    let container = start(&pod, &mounts, USER);
    container.sh("echo kept >/data/kept; echo kept >/part/kept");
    assert!(is_nobody(process_of(&pod)));
    let as_root = pods_as_root();
    kill(process_of(&pod));
    let ended = container.ended();
    assert_eq!(ended.reason, "SandboxGone", "{ended:?}");
    let pod = make_anew(pod);
    assert!(is_nobody(process_of(&pod)));
    assert_eq!(pods_as_root(), as_root);
    let again = start(&pod, &mounts, USER);
    assert_eq!(
        again.sh("cat /data/kept /part/kept /token/users"),
        "kept\nkept\ntext\n"
    );
    again.sh("echo more >>/data/kept && stat -c %u:%g /data/kept | grep -q 1000:2000");
    pod.stop();
    pod.remove();
}

/// An overlay in a new directory: no mounts of it have mapped users.
fn overlay(name: &str) -> Mounted {
    let dir = RUNTIME.directory(name);
    for name in ["lower", "upper", "work", "merged"] {
        directory(dir.join(name), (0, 0), 0o755);
    }
    let script = "mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work overlay merged";
    let mut make = Command::new("sh");
    assert!(
        make.args(["-c", script])
            .current_dir(&dir)
            .status()
            .unwrap()
            .success()
    );
    Mounted(dir.join("merged"))
}

#[test]
fn guest_a_pod_with_a_volume_without_mapped_users_is_made_anew_as_the_hosts_root() {
    if !RUNTIME.is_vm {
        return;
    }
    let pod = run_pod();
    let volumes = Volumes::of(&pod);
    let mut mounts = volumes.mounts();
    let first = start(&pod, &mounts, 0);
    let as_root = pods_as_root();
    let unmapped = overlay("unmapped");
    mounts.push(mount(&unmapped.0, "/unmapped"));
    let refused = pod.container_config("unmapped", |config| config.mounts = mounts.clone());
    let refused = pod.try_create(refused).err().unwrap();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    let message = refused.message();
    let path = unmapped.0.display().to_string();
    assert!(
        message.contains(&path) && message.contains("makes the pod anew"),
        "{message}"
    );
    assert_eq!(first.ended().reason, "SandboxGone");
    let pod = make_anew(pod);
    assert!(!is_nobody(process_of(&pod)));
    assert_eq!(pods_as_root(), as_root + 1);
    let root = start(&pod, &mounts, 0);
    root.sh("echo >/unmapped/made; busybox chown 70000 /unmapped/made; cat /token/roots");
    assert_eq!(fs::metadata(unmapped.0.join("made")).unwrap().uid(), 70_000);
    pod.stop();
    pod.remove();
    assert_eq!(pods_as_root(), as_root);
}

#[test]
fn guest_a_pod_of_another_client_is_served_any_volume_and_told_to_be_the_hosts_root() {
    if !RUNTIME.is_vm {
        return;
    }
    let pod = Pod::shared_of(Client::Other);
    assert!(!is_nobody(process_of(pod)));
    assert!(pods_as_root() > 0);
    // It says nothing of what the node can do.
    assert_eq!(told_of_jail()["noMappedUsers"], serde_json::Value::Null);
}
