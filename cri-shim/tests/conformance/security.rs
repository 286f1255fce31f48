//! Security contexts: users, groups, capabilities, privileges, namespaces, system settings.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use podvisor_cri_messages::*;
use tonic::Code;

use crate::fixture::RUNTIME;
use crate::pod::{Pod, image, labels, security, stdout, strings};
use crate::support::until;

fn value(value: i64) -> Option<Int64Value> {
    Some(Int64Value { value })
}

/// Returns the first line that a script prints under a security context.
fn first_line(script: &str, change: impl FnOnce(&mut ContainerConfig)) -> String {
    let (status, lines) = Pod::shared().script(script, change);
    assert_eq!(status.exit_code, 0, "{script}: {lines:?}");
    stdout(&lines)
        .first()
        .copied()
        .unwrap_or_default()
        .to_owned()
}

#[test]
fn guest_users_come_from_the_request_or_else_from_the_image() {
    let ids = "echo $(id -u):$(id -g)";
    assert_eq!(first_line(ids, |_| {}), "0:0");
    assert_eq!(
        first_line(ids, |config| config.image = Some(image("user"))),
        "1000:50"
    );
    assert_eq!(
        first_line(ids, |config| security(config).run_as_user = value(1234)),
        "1234:0"
    );
    assert_eq!(
        first_line(ids, |config| {
            security(config).run_as_username = "app".to_owned();
        }),
        "1000:1000"
    );
    assert_eq!(
        first_line(ids, |config| {
            let context = security(config);
            context.run_as_user = value(1000);
            context.run_as_group = value(4321);
        }),
        "1000:4321"
    );
    assert_eq!(
        first_line("id -G", |config| {
            let context = security(config);
            context.run_as_user = value(1000);
            context.supplemental_groups = vec![1234, 5678];
        }),
        "1000 50 1234 5678"
    );
}

#[test]
fn guest_the_status_tells_who_a_container_runs_as() {
    let with = |policy: SupplementalGroupsPolicy| {
        let (status, lines) = Pod::shared().script("id -G", |config| {
            let context = security(config);
            context.run_as_user = value(1000);
            context.run_as_group = value(2000);
            context.supplemental_groups = vec![1234];
            context.supplemental_groups_policy = policy.into();
        });
        let mut ids: Vec<i64> = stdout(&lines)[0]
            .split(' ')
            .map(|id| id.parse().unwrap())
            .collect();
        ids.sort_unstable();
        (status.user.and_then(|user| user.linux), ids)
    };
    let (user, merged) = with(SupplementalGroupsPolicy::Merge);
    assert_eq!(merged, [50, 1234, 2000]);
    // Runtimes before Kubernetes 1.31 report no user, and have no policy.
    let Some(mut user) = user else {
        assert!(!RUNTIME.is_vm);
        return;
    };
    user.supplemental_groups.sort_unstable();
    assert_eq!((user.uid, user.gid), (1000, 2000));
    assert_eq!(user.supplemental_groups, merged);
    let (user, strict) = with(SupplementalGroupsPolicy::Strict);
    assert_eq!(strict, [1234, 2000]);
    assert_eq!(user.map(|user| user.supplemental_groups), Some(strict));
}

#[test]
fn guest_a_container_does_not_choose_the_ids_of_its_execs() {
    let container = Pod::shared().start("passwd", |_| {});
    container.sh("echo root:x:0:1000::/srv:/bin/sh >/etc/passwd");
    container.sh("echo staff:x:50:root >/etc/group");
    assert_eq!(container.sh("id -u; id -G"), "0\n0\n");
    if RUNTIME.is_vm {
        container.sh("/bin/busybox rm /etc/passwd && mkdir /etc/passwd");
        assert_eq!(container.sh("id -u"), "0\n");
    }
    container.stop(0);
    container.remove();
}

#[test]
fn guest_a_container_joins_the_processes_of_another_one() {
    let pod = Pod::shared();
    let target = pod.start("target", |config| {
        config.command = strings(&["sleep", "424242"]);
    });
    let debugger = pod.start("debugger", |config| {
        security(config).namespace_options = Some(NamespaceOption {
            pid: NamespaceMode::Target as i32,
            target_id: target.id.clone(),
            ..Default::default()
        });
    });
    let first = "tr '\\0' ' ' </proc/1/cmdline";
    assert_eq!(debugger.sh(first), "sleep 424242 ");
    debugger.stop(0);
    debugger.remove();
    assert_eq!(target.sh(first), "sleep 424242 ");
    target.stop(0);
    let gone = pod.container_config("too-late", |config| {
        security(config).namespace_options = Some(NamespaceOption {
            pid: NamespaceMode::Target as i32,
            target_id: target.id.clone(),
            ..Default::default()
        });
    });
    let refused = pod.try_create(gone).err().expect("its target has ended");
    if RUNTIME.is_vm {
        assert_eq!(refused.code(), Code::FailedPrecondition);
    }
    target.remove();
}

#[test]
fn guest_a_group_without_a_user_and_unknown_names_are_refused() {
    let pod = Pod::shared();
    let config = pod.container_config("group-only", |config| {
        security(config).run_as_group = value(1000);
    });
    pod.try_create(config)
        .err()
        .expect("a group without a user");
    let config = pod.container_config("nobody-known", |config| {
        security(config).run_as_username = "nobody-known".to_owned();
    });
    pod.try_create(config)
        .err()
        .expect("a user that the image does not know");
}

/// Returns whether a capability is in the effective set.
fn has_capability(number: u32, change: impl FnOnce(&mut ContainerConfig)) -> bool {
    let line = first_line("grep CapEff /proc/self/status", change);
    let set = u64::from_str_radix(line.split_whitespace().last().unwrap(), 16).unwrap();
    set >> number & 1 == 1
}

#[test]
fn guest_capabilities_are_added_and_dropped() {
    const CHOWN: u32 = 0;
    const NET_ADMIN: u32 = 12;
    let capabilities = |add: &[&str], drop: &[&str]| Capability {
        add_capabilities: strings(add),
        drop_capabilities: strings(drop),
        ..Default::default()
    };
    let with = |wanted: Capability| {
        move |config: &mut ContainerConfig| security(config).capabilities = Some(wanted)
    };
    assert!(has_capability(CHOWN, |_| {}));
    assert!(!has_capability(NET_ADMIN, |_| {}));
    assert!(has_capability(
        NET_ADMIN,
        with(capabilities(&["NET_ADMIN"], &[]))
    ));
    assert!(has_capability(NET_ADMIN, with(capabilities(&["ALL"], &[]))));
    assert!(!has_capability(CHOWN, with(capabilities(&[], &["CHOWN"]))));
    assert!(!has_capability(CHOWN, with(capabilities(&[], &["ALL"]))));
    assert!(has_capability(
        CHOWN,
        with(capabilities(&["CHOWN"], &["ALL"]))
    ));
    // busybox' ping only uses raw sockets, even if pings are allowed without.
    let ping = |wanted| {
        let (status, _) = Pod::shared().script("busybox ping -c 1 127.0.0.1", with(wanted));
        status.exit_code
    };
    assert_eq!(ping(Capability::default()), 0);
    assert_eq!(ping(capabilities(&[], &["NET_RAW"])), 1);
}

#[test]
fn guest_privileges_are_given_and_withheld() {
    let no_new = "grep NoNewPrivs /proc/self/status";
    assert!(first_line(no_new, |config| security(config).no_new_privs = true).ends_with('1'));
    assert!(first_line(no_new, |_| {}).ends_with('0'));
    let mount = "busybox mount -t tmpfs none /tmp 2>/dev/null && echo yes || echo no";
    assert_eq!(first_line(mount, |_| {}), "no");
    let privileged = |pod: &Pod| {
        let (_, lines) = pod.script(mount, |config| security(config).privileged = true);
        assert_eq!(stdout(&lines), ["yes"]);
    };
    if RUNTIME.is_vm {
        return privileged(Pod::shared());
    }
    // Containerd requires a privileged pod, too.
    let pod = Pod::run("privileged", |config| {
        let linux = config.linux.get_or_insert_default();
        linux.security_context.get_or_insert_default().privileged = true;
    });
    privileged(&pod);
    pod.stop();
    pod.remove();
}

#[test]
fn guest_a_container_that_nests_control_groups_is_entered_where_its_program_is() {
    if !RUNTIME.is_vm {
        // Its groups are the test host's.
        return;
    }
    // As docker, k3s and systemd do in a container.
    let script = "cd /sys/fs/cgroup && mkdir init && echo 0 >init/cgroup.procs && \
                  echo +memory >cgroup.subtree_control && echo nested && sleep 1000";
    let container = Pod::shared().start("nests", |config| {
        security(config).privileged = true;
        config.command = strings(&["sh", "-c", script]);
    });
    until("nested groups", || stdout(&container.lines()) == ["nested"]);
    assert_eq!(container.sh("cat /proc/self/cgroup"), "0::/init\n");
    container.stop(0);
    container.remove();
}

#[test]
fn guest_a_container_that_stops_what_enters_it_holds_up_no_other_one() {
    if !RUNTIME.is_vm {
        // Containerd's execs have no turns.
        return;
    }
    // Before they have executed their commands.
    let script = "while :; do for p in /proc/[0-9]*; do
                      case $seen in *$p/*) continue ;; esac
                      read -r name <$p/comm && case $name in
                          youki*) kill -STOP ${p#/proc/} && seen=$seen$p/ && echo stopped ;;
                      esac
                  done; done 2>&-";
    let hostile = Pod::shared().start("hostile", |config| {
        config.command = strings(&["sh", "-c", script]);
    });
    let other = Pod::shared().start("other", |_| {});
    let ended = AtomicUsize::new(0);
    thread::scope(|scope| {
        // More than the guest's number of turns.
        for _ in 0..6 {
            scope.spawn(|| {
                while hostile.try_exec(&["true"], 0).is_ok() {}
                ended.fetch_add(1, Ordering::Relaxed);
            });
        }
        until("processes that are stopped", || {
            stdout(&hostile.lines()).len() >= 2
        });
        for _ in 0..4 {
            assert_eq!(other.sh("echo made"), "made\n");
        }
        assert_eq!(ended.load(Ordering::Relaxed), 0);
        hostile.stop(0);
    });
    for container in [hostile, other] {
        container.stop(0);
        container.remove();
    }
}

#[test]
fn guest_seccomp_filters_as_the_profile_says() {
    let mode = "grep -w Seccomp: /proc/self/status";
    let profile = |kind: SecurityProfileType, path: String| SecurityProfile {
        profile_type: kind as i32,
        localhost_ref: path,
    };
    use SecurityProfileType as P;
    let with = |wanted: SecurityProfile| {
        move |config: &mut ContainerConfig| security(config).seccomp = Some(wanted)
    };
    let default = with(profile(P::RuntimeDefault, String::new()));
    assert!(first_line(mode, default).ends_with('2'));
    let none = with(profile(P::Unconfined, String::new()));
    assert!(first_line(mode, none).ends_with('0'));

    let file = RUNTIME.directory("seccomp").join("profile.json");
    let deny = r#"{ "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{ "names": ["chmod", "fchmod", "fchmodat"], "action": "SCMP_ACT_ERRNO" }] }"#;
    fs::write(&file, deny).unwrap();
    let own = with(profile(P::Localhost, file.display().to_string()));
    let script = "chmod 700 /tmp 2>/dev/null && echo changed || echo refused";
    assert_eq!(first_line(script, own), "refused");

    // Only the program's own calls, as in Kubernetes' tutorial: not those that start it. runc 1.1.5
    // itself checks /proc after it has set the filter, and fails.
    if !RUNTIME.is_vm {
        return;
    }
    fs::write(&file, STRICT).unwrap();
    let own = with(profile(P::Localhost, file.display().to_string()));
    let strict = |config: &mut ContainerConfig| {
        own(config);
        security(config).no_new_privs = true;
    };
    assert_eq!(first_line("echo started", strict), "started");
}

const STRICT: &str = r#"{ "defaultAction": "SCMP_ACT_ERRNO",
    "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32", "SCMP_ARCH_AARCH64"],
    "syscalls": [{ "action": "SCMP_ACT_ALLOW", "names": [
        "accept4", "epoll_wait", "pselect6", "futex", "madvise", "epoll_ctl", "getsockname",
        "setsockopt", "vfork", "mmap", "read", "write", "close", "arch_prctl", "sched_getaffinity",
        "munmap", "brk", "rt_sigaction", "rt_sigprocmask", "sigaltstack", "gettid", "clone", "bind",
        "socket", "openat", "readlinkat", "exit_group", "epoll_create1", "listen", "rt_sigreturn",
        "sched_yield", "clock_gettime", "connect", "dup2", "epoll_pwait", "execve", "exit", "fcntl",
        "getpid", "getuid", "ioctl", "mprotect", "nanosleep", "open", "poll", "recvfrom", "sendto",
        "set_tid_address", "setitimer", "writev" ] }] }"#;

#[test]
fn guest_paths_are_masked_and_made_read_only() {
    let masked = first_line(
        "cat /proc/kcore /proc/keys 2>/dev/null | busybox wc -c",
        |config| {
            security(config).masked_paths = strings(&["/proc/kcore", "/proc/keys"]);
        },
    );
    assert_eq!(masked.trim(), "0");
    let script = "echo 1 >/proc/sys/net/ipv4/ip_forward 2>/dev/null && echo yes || echo no";
    let written = first_line(script, |config| {
        security(config).readonly_paths = strings(&["/proc/sys"]);
    });
    assert_eq!(written, "no");
}

#[test]
fn guest_namespaces_are_the_pods_or_the_containers_own() {
    let pod = Pod::run("namespaces", |config| {
        let linux = config.linux.as_mut().unwrap();
        linux.sysctls = labels(&[("kernel.shm_rmid_forced", "1")]);
        linux.security_context = Some(LinuxSandboxSecurityContext {
            namespace_options: Some(NamespaceOption {
                pid: NamespaceMode::Pod as i32,
                ..Default::default()
            }),
            ..Default::default()
        });
    });
    let with_pid = |mode: NamespaceMode| {
        move |config: &mut ContainerConfig| {
            security(config).namespace_options = Some(NamespaceOption {
                pid: mode as i32,
                ..Default::default()
            });
        }
    };
    let one = pod.start("one", |config| {
        with_pid(NamespaceMode::Pod)(config);
        config.command = strings(&["sleep", "123456"]);
    });
    let two = pod.start("two", with_pid(NamespaceMode::Pod));
    let alone = pod.start("alone", with_pid(NamespaceMode::Container));
    assert!(
        two.sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
            .contains("sleep 123456")
    );
    assert!(
        !alone
            .sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
            .contains("123456")
    );
    assert!(
        alone
            .sh("tr '\\0' ' ' </proc/1/cmdline")
            .starts_with("sleep")
    );
    for kind in ["ipc", "net", "uts"] {
        let read = format!("busybox readlink /proc/self/ns/{kind}");
        assert_eq!(one.sh(&read), alone.sh(&read), "{kind}");
    }
    assert_eq!(one.sh("cat /proc/sys/kernel/shm_rmid_forced"), "1\n");
}

#[test]
fn guest_a_user_may_open_the_streams_of_its_program_anew() {
    let script = "echo one > /dev/stdout && echo two > /dev/stderr && echo as $(id -u)";
    for (name, terminal) in [("user-pipes", false), ("user-terminal", true)] {
        let container = Pod::shared().start(name, |config| {
            config.tty = terminal;
            config.command = strings(&["sh", "-c", script]);
            security(config).run_as_user = value(1234);
        });
        assert_eq!(container.ended().exit_code, 0, "{:?}", container.lines());
        container.remove();
    }
    let container = Pod::shared().start("user-exec", |config| {
        security(config).run_as_user = value(1234);
    });
    assert_eq!(container.sh(script), "one\nas 1234\n");
    container.remove();
}
