//! What containers may use, and what happens at its end.

use podvisor_cri_messages::*;

use crate::client::ask;
use crate::fixture::RUNTIME;
use crate::pod::{Container, Pod};

/// Returns the limits that a kubelet always sets: on a node with swap it allows no container any.
fn kubelets_own() -> LinuxContainerResources {
    // The node has pages of 1 GiB; a machine on it may not have them.
    let sizes = if RUNTIME.is_vm {
        &["2MB", "1GB"][..]
    } else {
        &["2MB"]
    };
    let none_of = |size: &&str| HugepageLimit {
        page_size: (*size).to_owned(),
        limit: 0,
    };
    LinuxContainerResources {
        unified: [("memory.swap.max".to_owned(), "0".to_owned())].into(),
        hugepage_limits: sizes.iter().map(none_of).collect(),
        ..Default::default()
    }
}

#[test]
fn guest_a_container_without_a_limit_gets_the_memory_that_it_needs() {
    let pod = Pod::run("hungry", |_| {});
    let container = pod.start("hungry", |_| {});
    // Programs that together use more than the memory of a small machine, all at the same time.
    let script = "all() { [ -e /tmp/1 -a -e /tmp/2 -a -e /tmp/3 -a -e /tmp/4 ]; }; \
                  hold() { (dd if=/dev/zero bs=120M count=1 2>/dev/null; echo $? > /tmp/code$1) | \
                  (head -c 1 >/dev/null; touch /tmp/$1; until all; do sleep 0.1; done; \
                  cat >/dev/null); }; \
                  for n in 1 2 3 4; do hold $n & done; wait; cat /tmp/code?";
    assert_eq!(container.sh(script), "0\n0\n0\n0\n");
    container.stop(0);
    container.remove();
    pod.stop();
    pod.remove();
}

#[test]
fn guest_a_container_without_a_limit_writes_more_than_its_machine_begins_with() {
    let pod = Pod::run("writer", |_| {});
    let container = pod.start("writer", |_| {});
    // A machine starts with 256 MiB.
    container.sh("dd if=/dev/zero of=/filled bs=1M count=250 2>&1 && echo end >>/filled");
    let read = container.sh("dd if=/filled bs=1M 2>/dev/null | tail -c 4; wc -c </filled");
    assert_eq!(read, "end\n262144004\n");
    pod.stop();
    pod.remove();
}

/// The agent's own files are on a tmpfs of half the memory that the machine begins with.
#[test]
fn guest_a_container_that_fills_its_etc_files_does_not_hold_up_its_pod() {
    let pod = Pod::run("etc-files", |_| {});
    let writer = pod.start("writer", |_| {});
    let device = |container: &Container| container.sh("busybox stat -c %d /etc/hostname");
    writer.sh("busybox dd if=/dev/zero of=/etc/hostname bs=1M count=160");
    writer.sh("true");
    let other = pod.start("other", |_| {});
    assert_ne!(device(&writer), device(&other));
    assert_eq!(other.sh("busybox wc -l </etc/hostname").trim(), "1");
}

#[test]
fn guest_limits_can_be_changed_while_a_container_runs() {
    let container = Pod::shared().start("limits", |config| {
        config.linux.as_mut().unwrap().resources = Some(LinuxContainerResources {
            memory_limit_in_bytes: 32 << 20,
            cpu_period: 100_000,
            cpu_quota: 20_000,
            ..kubelets_own()
        });
    });
    ask!(update_container_resources(
        UpdateContainerResourcesRequest {
            container_id: container.id.clone(),
            linux: Some(LinuxContainerResources {
                memory_limit_in_bytes: 512 << 20,
                cpu_period: 100_000,
                cpu_quota: 40_000,
                ..kubelets_own()
            }),
            ..Default::default()
        }
    ))
    .unwrap();
    let resources = container.status().resources;
    if let Some(linux) = resources.and_then(|resources| resources.linux) {
        assert_eq!(linux.memory_limit_in_bytes, 512 << 20);
    }
    assert_eq!(container.sh("cat /sys/fs/cgroup/memory.swap.max"), "0\n");
    // More than the total memory of a small machine.
    let words = ["dd", "if=/dev/zero", "of=/dev/null", "bs=300M", "count=1"];
    let used = container.try_exec(&words, 0).unwrap();
    assert_eq!(used.code, 0, "{}", used.stderr);
    if RUNTIME.is_vm {
        // A limit below the current usage would kill it, as with other runtimes.
        container.sh("dd if=/dev/zero of=/dev/shm/used bs=1M count=48");
        let less = UpdateContainerResourcesRequest {
            container_id: container.id.clone(),
            linux: Some(LinuxContainerResources {
                memory_limit_in_bytes: 32 << 20,
                ..kubelets_own()
            }),
            ..Default::default()
        };
        let refused = ask!(update_container_resources(less)).unwrap_err();
        assert!(
            refused.message().contains("below current usage"),
            "{refused}"
        );
        let limit = container.sh("cat /sys/fs/cgroup/memory.max");
        assert_eq!(limit, format!("{}\n", 512 << 20));
    }
    container.stop(0);
    container.remove();
}
