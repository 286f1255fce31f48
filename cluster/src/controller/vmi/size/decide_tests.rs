use k8s_openapi::jiff::Timestamp;

use super::*;

fn spec(sockets: i64, guest: &str) -> VmiSpec {
    serde_json::from_value(json!({"domain": {
        "cpu": {"cores": 2, "sockets": sockets, "threads": 1},
        "memory": {"guest": guest},
    }}))
    .unwrap()
}

fn status(sockets: i64, guest: &str) -> VmiStatus {
    serde_json::from_value(json!({
        "currentCPUTopology": {"cores": 2, "sockets": sockets, "threads": 1},
        "memory": {"guestAtBoot": "1Gi", "guestCurrent": guest, "guestRequested": guest},
    }))
    .unwrap()
}

fn now() -> Time {
    Time(Timestamp::UNIX_EPOCH)
}

/// A pod whose container has the resources of a specification, and what its kubelet says.
fn pod(of: &VmiSpec, status: Value) -> Pod {
    let resources = pod::resources_of(of).unwrap();
    serde_json::from_value(json!({
        "metadata": {"name": "pod"},
        "spec": {"containers": [{"name": "compute", "resources": resources}]},
        "status": status,
    }))
    .unwrap()
}

fn allocated(of: &VmiSpec) -> Value {
    let resources = pod::resources_of(of).unwrap();
    json!({"containerStatuses": [{
        "name": "compute", "image": "", "imageID": "", "ready": true, "restartCount": 0,
        "allocatedResources": resources["requests"], "resources": resources,
    }]})
}

#[test]
fn only_more_than_there_is_is_a_change() {
    let change = |spec: VmiSpec, status: VmiStatus| {
        Change::of(&spec, &status).map(|change| change.request())
    };
    let asks = |vcpus, memory| Some(ResizeRequest { vcpus, memory });
    assert_eq!(change(spec(2, "1Gi"), status(2, "1Gi")), None);
    assert_eq!(change(spec(2, "1024Mi"), status(2, "1Gi")), None);
    assert_eq!(change(spec(1, "512Mi"), status(2, "1Gi")), None);
    assert_eq!(change(spec(3, "1Gi"), status(2, "1Gi")), asks(6, 0));
    assert_eq!(change(spec(2, "2Gi"), status(2, "1Gi")), asks(0, 2 << 30));
    assert_eq!(change(spec(4, "2Gi"), status(2, "1Gi")), asks(8, 2 << 30));
    // Before anything is known of it.
    assert_eq!(change(spec(4, "2Gi"), VmiStatus::default()), None);
}

#[test]
fn the_pod_is_resized_and_the_kubelet_waited_for_before_the_node_is_asked() {
    let (before, wanted) = (spec(1, "1Gi"), spec(2, "2Gi"));
    let Step::ResizePod(resources) = decide(&wanted, &pod(&before, json!({}))).unwrap() else {
        panic!("the pod is too small");
    };
    assert_eq!(resources, pod::resources_of(&wanted).unwrap());
    let waits = |status: Value| match decide(&wanted, &pod(&wanted, status)).unwrap() {
        Step::Wait(State::Waits { reason, .. }) => (reason, true),
        Step::Wait(State::Failed { reason, .. }) => (reason, false),
        step => panic!("{step:?}"),
    };
    assert_eq!(waits(json!({})), ("PodResizeInProgress", true));
    assert_eq!(waits(allocated(&before)), ("PodResizeInProgress", true));
    for (reason, expected) in [
        ("Deferred", ("PodResizeDeferred", true)),
        ("Infeasible", ("PodResizeInfeasible", false)),
    ] {
        let mut status = allocated(&before);
        status["conditions"] = json!([
            {"type": "PodResizePending", "status": "True", "reason": reason, "message": "full"},
        ]);
        assert_eq!(waits(status), expected);
    }
    let asks = decide(&wanted, &pod(&wanted, allocated(&wanted))).unwrap();
    assert_eq!(asks, Step::Ask);
}

#[test]
fn a_pod_that_was_made_as_large_needs_no_kubelet_that_resizes() {
    let wanted = spec(2, "2Gi");
    let mut pod = pod(&wanted, json!({}));
    let made = |spec: &VmiSpec| json!({"metadata": {}, "spec": spec}).to_string();
    let mut decided = |of: &VmiSpec| {
        pod.metadata.annotations = Some([(VMI_ANNOTATION.to_owned(), made(of))].into());
        decide(&wanted, &pod).unwrap()
    };
    assert_eq!(decided(&wanted), Step::Ask);
    assert!(matches!(decided(&spec(1, "2Gi")), Step::Wait(_)));
    assert!(matches!(decided(&spec(2, "1Gi")), Step::Wait(_)));
}

#[test]
fn requests_of_a_users_own_are_not_made_larger() {
    let mut own = spec(4, "1Gi");
    own.domain.resources.requests = [
        ("cpu".to_owned(), Quantity::new("3")),
        ("memory".to_owned(), Quantity::new("1Gi")),
    ]
    .into();
    let mut less = own.clone();
    less.domain.cpu = spec(1, "1Gi").domain.cpu;
    let step = decide(&own, &pod(&less, allocated(&less))).unwrap();
    assert_eq!(step, Step::Ask);
}

#[test]
fn what_is_done_is_written_and_conditions_go() {
    let change = Change::of(&spec(3, "2Gi"), &status(1, "1Gi")).unwrap();
    let mut reported = status(1, "1Gi");
    let state = State::Failed {
        reason: "HotplugFailed",
        message: "why".to_owned(),
    };
    change.report(&mut reported, &state, &now());
    for kind in [CPUS, MEMORY] {
        let found = condition(&reported.conditions, kind).unwrap();
        assert_eq!((&*found.status, &*found.reason), ("False", "HotplugFailed"));
    }
    assert_eq!(reported.rest["memory"]["guestRequested"], "2Gi");
    assert_eq!(reported.rest["memory"]["guestCurrent"], "1Gi");
    assert!(change.done(&mut reported, 2 << 30, &now()));
    assert_eq!(reported.rest["currentCPUTopology"]["sockets"], 3);
    assert_eq!(reported.rest["memory"]["guestCurrent"], "2Gi");
    assert!(!forget(&mut reported));
    assert_eq!(Change::of(&spec(3, "2Gi"), &reported), None);
}

#[test]
fn a_guest_that_does_not_use_its_memory_is_asked_again() {
    let change = Change::of(&spec(1, "2Gi"), &status(1, "1Gi")).unwrap();
    let mut reported = status(1, "1Gi");
    assert!(!change.done(&mut reported, 3 << 29, &now()));
    let waits = condition(&reported.conditions, MEMORY).unwrap();
    assert_eq!(
        (&*waits.status, &*waits.reason),
        ("True", "GuestNotUsingMemory")
    );
    assert_eq!(reported.rest["memory"]["guestCurrent"], "1610612736");
    assert!(Change::of(&spec(1, "2Gi"), &reported).is_some());
    assert!(forget(&mut reported));
}
