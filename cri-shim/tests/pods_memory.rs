//! The memory of a pod whose machine process is a stand-in, with an amount that the test sets: this
//! needs no guest.

mod support;

use std::time::Duration;

use podvisor_cri_messages::{
    ContainerConfig, LinuxContainerConfig, LinuxContainerResources, StatusRequest,
};
use rustix::process::Signal;
use support::stand_in::{GROWTH, MEMORY, Node, until};
use tokio::time::timeout;
use tonic::Code;

const MIB: u64 = 1 << 20;

/// What a machine's process may use beyond its guest's memory.
const OVERHEAD: u64 = 96 * MIB;

/// The least that a guest gets per step under memory pressure.
const STEP: u64 = 256 * MIB;

#[tokio::test(flavor = "multi_thread")]
async fn the_limit_of_a_machines_group_follows_what_its_guest_gives_back() {
    let node = Node::in_a_group().await;
    node.limit(512 * MIB).await.unwrap();
    let limit = |grown| Some(MEMORY + grown + OVERHEAD);
    assert_eq!(node.in_group("memory.max"), limit(512 * MIB));
    // The guest still has it, and the group is full of cached files.
    node.set_grown(Some(512 * MIB));
    node.set_in_group("memory.current", MEMORY + 512 * MIB + OVERHEAD);
    let lowered = async {
        // As a kubelet retries.
        while let Err(refused) = node.limit(64 * MIB).await {
            assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
        }
    };
    let gives_back = async {
        until(async || node.asked_to_grow(64 * MIB) > 0).await;
        node.set_grown(None);
        let lower = limit(64 * MIB);
        until(async || node.in_group("memory.max") == lower).await;
        // The kernel keeps no more cached files than the limit allows.
        node.set_in_group("memory.current", lower.unwrap());
    };
    tokio::join!(lowered, gives_back);
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_outside_of_their_pods_groups_are_told_by_a_condition() {
    // The stand-in for the machine's process is where this test is.
    let node = Node::in_a_group().await;
    let mut runtime = node.runtime().await;
    let status = runtime.status(StatusRequest::default()).await.unwrap();
    let conditions = status.into_inner().status.unwrap().conditions;
    let mut conditions = conditions.iter();
    let groups = conditions
        .find(|one| one.r#type == "PodsInCgroups")
        .unwrap();
    let reason = (groups.status, groups.reason.as_str());
    assert_eq!(reason, (false, "OverheadTooSmall"), "{groups:?}");
    for part in ["1 pods", "overhead", "RuntimeClass"] {
        assert!(groups.message.contains(part), "{groups:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_below_that_at_boot_is_lowered_when_the_machine_has_room_below_it() {
    let node = Node::in_a_group_with(1024 * MIB).await;
    node.set_pod_limit(1024 * MIB);
    let id = node.create_within("a", 1024 * MIB).await;
    let takes = |limit| node.set_in_group("memory.current", MEMORY + limit + OVERHEAD);
    // The kubelet's group has room for the container's limit and the overhead, and no more.
    takes(512 * MIB);
    let lowered = node.limit_container(&id, 256 * MIB).await.unwrap_err();
    assert_eq!(lowered.code(), Code::ResourceExhausted, "{lowered}");
    assert!(lowered.message().contains("takes 864 MiB"), "{lowered}");
    takes(256 * MIB);
    node.limit_container(&id, 256 * MIB).await.unwrap();
    // A kubelet since 1.36 asks for the pod's next, and lowers its group's then.
    takes(512 * MIB);
    let lowered = node.limit(256 * MIB).await.unwrap_err();
    assert_eq!(lowered.code(), Code::ResourceExhausted, "{lowered}");
    takes(256 * MIB);
    node.limit(256 * MIB).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_of_a_pod_with_a_limit_of_its_own_is_lowered_alone() {
    let node = Node::in_a_group_with(1024 * MIB).await;
    node.set_pod_limit(1024 * MIB);
    let id = node.create_within("a", 512 * MIB).await;
    node.set_in_group("memory.current", MEMORY + 1024 * MIB + OVERHEAD);
    node.limit_container(&id, 256 * MIB).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pods_limit_is_raised_before_its_group_is() {
    let node = Node::in_a_group().await;
    node.set_pod_limit(64 * MIB);
    node.limit(512 * MIB).await.unwrap();
    assert!(node.asked_to_grow(512 * MIB) > 0);
    // The kubelet could not raise its group's, and takes back what it has asked for.
    node.limit(64 * MIB).await.unwrap();
    assert!(node.asked_to_grow(64 * MIB) > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_that_no_guest_can_have_is_refused() {
    let node = Node::new(2).await;
    let id = node.create_within("a", 64 * MIB).await;
    let too_much = GROWTH + MIB;
    for refused in [
        node.limit_container(&id, too_much).await.unwrap_err(),
        node.limit(too_much).await.unwrap_err(),
    ] {
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
        assert!(refused.message().contains("`growth`"), "{refused}");
    }
    let limit = async || {
        let resources = node.status(&id).await.resources.unwrap();
        resources.linux.unwrap().memory_limit_in_bytes
    };
    assert_eq!(limit().await, 64 << 20);
    node.limit_container(&id, GROWTH).await.unwrap();
    assert_eq!(limit().await, i64::try_from(GROWTH).unwrap());
    assert!(node.asked_to_grow(GROWTH) > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_is_resized_can_be_stopped() {
    let mut node = Node::new(2).await;
    node.hold("Grow");
    let stopped = async {
        until(async || node.asked_to_grow(512 * MIB) > 0).await;
        node.stop().await;
    };
    let both = async { tokio::join!(node.limit(512 * MIB), stopped) };
    let (limited, ()) = timeout(Duration::from_secs(60), both)
        .await
        .expect("the guest is waited for");
    assert_eq!(limited.unwrap_err().code(), Code::FailedPrecondition);
    assert!(node.process_ended().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_a_guest_does_not_take_is_not_given() {
    let node = Node::new(2).await;
    node.set_grown(Some(100 * MIB));
    for _ in 0..2 {
        let refused = node.limit(512 * MIB).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
        assert!(refused.message().contains("356 MiB"), "{refused}");
    }
    node.set_grown(None);
    node.limit(512 * MIB).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_keeps_more_than_is_wanted_is_not_waited_for() {
    let node = Node::new(2).await;
    node.set_grown(Some(512 * MIB));
    node.limit(64 * MIB).await.unwrap();
    node.limit(128 * MIB).await.unwrap();
    // If it has less, that has to be waited for.
    let refused = node.limit(1024 * MIB).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    for (wanted, is_waited_for) in [(64, false), (128, false), (1024, true)] {
        let asked = node.asked(&format!("Grow {} within 30000", wanted * MIB));
        assert_eq!(asked > 0, is_waited_for, "{wanted} MiB");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_removed_container_had_is_asked_back_by_a_new_daemon_too() {
    let mut node = Node::new(2).await;
    let id = node.create_within("a", 512 * MIB).await;
    assert!(node.asked_to_grow(512 * MIB) > 0);
    node.daemon.end(Signal::KILL);
    node.daemon.start();
    assert_eq!(node.asked_to_grow(0), 0);
    node.remove_container(&id).await;
    assert!(node.asked_to_grow(0) > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_does_not_take_memory_at_once_gets_more_later() {
    let node = Node::new(2).await;
    node.create("a", None).await;
    node.set_grown(Some(0));
    node.is_short().await;
    until(async || node.asked_to_grow(STEP) > 0).await;
    node.set_grown(None);
    for more in [512 * MIB, 896 * MIB] {
        node.is_short().await;
        until(async || node.asked_to_grow(more) > 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_is_short_of_memory_gets_more_though_the_disk_is_full() {
    let node = Node::on_a_small_disk().await;
    node.create("a", None).await;
    node.fill();
    for times in 1..3 {
        node.is_short().await;
        until(async || node.asked_to_grow(times * STEP) > 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_is_swapped_out_no_more_than_its_containers_may_be() {
    let node = Node::in_a_group().await;
    let may_swap = |limit: &str| ContainerConfig {
        linux: Some(LinuxContainerConfig {
            resources: Some(LinuxContainerResources {
                unified: [("memory.swap.max".to_owned(), limit.to_owned())].into(),
                ..LinuxContainerResources::default()
            }),
            security_context: None,
        }),
        ..ContainerConfig::default()
    };
    let limit = || node.in_group("memory.swap.max");
    // As it is before it has containers, also where an older daemon set no limit.
    until(async || limit() == Some(0)).await;
    let mut ids = Vec::new();
    for (name, swap, expected) in [("a", "0", 0), ("b", "4096", 4096), ("c", "8192", 12_288)] {
        ids.push(node.try_create(name, may_swap(swap)).await.unwrap());
        assert_eq!(limit(), Some(expected));
    }
    node.remove_container(&ids[1]).await;
    assert_eq!(limit(), Some(8192));
    node.create("d", None).await;
    assert_eq!(limit(), None);
}
