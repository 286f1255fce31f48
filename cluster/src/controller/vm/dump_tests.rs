use super::*;

const NOW: &str = "2026-11-30T12:00:00Z";

fn now() -> Time {
    Time(NOW.parse().unwrap())
}

fn volume() -> Value {
    json!({"name": "dumps", "memoryDump": {"claimName": "dumps", "hotpluggable": true}})
}

fn root() -> Value {
    json!({"name": "root", "containerDisk": {"image": "x"}})
}

fn vm(request: Value, volumes: &[Value]) -> VirtualMachine {
    serde_json::from_value(json!({
        "metadata": {"name": "vm", "namespace": "n", "uid": "u"},
        "spec": {"template": {"spec": {"volumes": volumes}}},
        "status": {"memoryDumpRequest": request},
    }))
    .unwrap()
}

fn vmi(phase: &str, volumes: &[Value], entry: Option<Value>) -> VirtualMachineInstance {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "vm", "namespace": "n", "uid": "i"},
        "spec": {"volumes": volumes},
        "status": {"phase": phase, "volumeStatus": entry.into_iter().collect::<Vec<_>>()},
    }))
    .unwrap()
}

fn entry(phase: &str) -> Option<Value> {
    Some(json!({
        "name": "dumps", "phase": phase, "message": "no room", "memoryDumpVolume": {
            "claimName": "dumps", "startTimestamp": "s", "endTimestamp": "e", "targetFileName": "f",
        },
    }))
}

fn asked(phase: &str) -> Value {
    json!({"claimName": "dumps", "phase": phase})
}

fn phase(decision: &Decision) -> MemoryDumpPhase {
    decision.request.as_ref().unwrap().phase
}

#[test]
fn nothing_is_done_that_was_not_asked_for() {
    let mut vm = vm(asked("Associating"), &[]);
    vm.status.rest.clear();
    assert_eq!(decide(&vm, None, &now()), None);
}

#[test]
fn a_claim_comes_is_written_and_leaves_the_instance() {
    let with = [root(), volume()];
    let running = |volumes: &[Value], entry| vmi("Running", volumes, entry);
    let first = vm(asked("Associating"), &[root()]);
    let instance = running(&[root()], None);
    let decision = decide(&first, Some(&instance), &now()).unwrap();
    assert_eq!(phase(&decision), MemoryDumpPhase::Associating);
    assert_eq!(decision.template, Some(json!(with)));
    assert_eq!(decision.instance, Some(json!(with)));

    // One of both was changed before the controller was killed.
    let decision = decide(&vm(asked("Associating"), &with), Some(&instance), &now()).unwrap();
    assert_eq!(
        (decision.template, decision.instance),
        (None, Some(json!(with)))
    );

    let next = vm(asked("Associating"), &with);
    let decision = decide(&next, Some(&running(&with, None)), &now()).unwrap();
    assert_eq!(phase(&decision), MemoryDumpPhase::InProgress);
    assert_eq!((decision.template, decision.instance), (None, None));

    let next = vm(asked("InProgress"), &with);
    let writes = running(&with, entry("MemoryDumpInProgress"));
    let decision = decide(&next, Some(&writes), &now()).unwrap();
    assert_eq!(phase(&decision), MemoryDumpPhase::InProgress);
    let request = decision.request.unwrap();
    assert_eq!(request.start_timestamp.as_deref(), Some("s"));
    assert_eq!(request.end_timestamp, None);

    let done = running(&with, entry("MemoryDumpCompleted"));
    let decision = decide(&next, Some(&done), &now()).unwrap();
    let request = decision.request.unwrap();
    assert_eq!(request.phase, MemoryDumpPhase::Unmounting);
    assert_eq!(request.file_name.as_deref(), Some("f"));
    assert_eq!(request.end_timestamp.as_deref(), Some("e"));

    let next = vm(json!(request), &with);
    let decision = decide(&next, Some(&done), &now()).unwrap();
    assert_eq!(phase(&decision), MemoryDumpPhase::Unmounting);
    assert_eq!(decision.instance, Some(json!([root()])));
    assert_eq!(decision.claim, Some(("dumps".to_owned(), "f".to_owned())));
    let leaves = running(&[root()], entry("UnMountedFromPod"));
    let decision = decide(&next, Some(&leaves), &now()).unwrap();
    assert_eq!(phase(&decision), MemoryDumpPhase::Unmounting);
    for gone in [Some(running(&[root()], None)), None] {
        let decision = decide(&next, gone.as_ref(), &now()).unwrap();
        assert_eq!(phase(&decision), MemoryDumpPhase::Completed);
        // The virtual machine keeps it.
        assert_eq!((decision.template, decision.instance), (None, None));
    }
}

#[test]
fn a_dump_that_is_not_there_has_failed_with_the_reason() {
    let with = [root(), volume()];
    let message = |phase: &str, instance: Option<VirtualMachineInstance>| {
        let decision = decide(&vm(asked(phase), &with), instance.as_ref(), &now()).unwrap();
        let request = decision.request.unwrap();
        assert_eq!(request.phase, MemoryDumpPhase::Failed);
        (request.message, request.end_timestamp.unwrap())
    };
    let ended = (
        "the virtual machine does not run".to_owned(),
        NOW.to_owned(),
    );
    for phase in ["Associating", "InProgress"] {
        assert_eq!(message(phase, None), ended);
        let over = vmi("Succeeded", &with, entry("MemoryDumpInProgress"));
        assert_eq!(message(phase, Some(over)), ended);
    }
    let failed = vmi("Running", &with, entry("MemoryDumpFailed"));
    let told = ("no room".to_owned(), "e".to_owned());
    assert_eq!(message("InProgress", Some(failed.clone())), told);
    let taken = vmi("Running", &[root()], None);
    assert!(message("InProgress", Some(taken)).0.contains("taken"));

    let decision = decide(&vm(asked("Failed"), &with), Some(&failed), &now()).unwrap();
    assert_eq!(decision.instance, Some(json!([root()])));
    let claim = decision.claim.unwrap();
    assert_eq!((&*claim.0, &*claim.1), ("dumps", "Memory dump failed"));
}

#[test]
fn a_dump_that_was_written_before_its_guest_ended_is_one() {
    let with = [root(), volume()];
    let over = vmi("Succeeded", &with, entry("MemoryDumpCompleted"));
    let decision = decide(&vm(asked("InProgress"), &with), Some(&over), &now()).unwrap();
    assert_eq!(phase(&decision), MemoryDumpPhase::Unmounting);
}

#[test]
fn another_dump_to_the_claim_waits_until_the_one_before_is_away() {
    let with = [root(), volume()];
    let again = vm(asked("Associating"), &with);
    let before = vmi("Running", &with, entry("MemoryDumpFailed"));
    let decision = decide(&again, Some(&before), &now()).unwrap();
    assert_eq!(decision.instance, Some(json!([root()])));
    let leaves = vmi("Running", &[root()], entry("UnMountedFromPod"));
    let decision = decide(&again, Some(&leaves), &now()).unwrap();
    assert_eq!(
        (phase(&decision), decision.instance),
        (MemoryDumpPhase::Associating, None)
    );
    let away = vmi("Running", &[root()], None);
    let decision = decide(&again, Some(&away), &now()).unwrap();
    assert_eq!(decision.instance, Some(json!(with)));
}

#[test]
fn a_claim_leaves_the_virtual_machine_when_nobody_writes_it() {
    let with = [root(), volume()];
    let mut request = asked("Completed");
    request["remove"] = json!(true);
    let remove = vm(request.clone(), &with);
    let writes = vmi("Running", &with, entry("MemoryDumpInProgress"));
    let decision = decide(&remove, Some(&writes), &now()).unwrap();
    assert_eq!(phase(&decision), MemoryDumpPhase::Dissociating);
    assert_eq!((decision.template, decision.instance), (None, None));

    let done = vmi("Running", &with, entry("MemoryDumpCompleted"));
    let decision = decide(&remove, Some(&done), &now()).unwrap();
    assert_eq!(decision.template, Some(json!([root()])));
    assert_eq!(decision.instance, Some(json!([root()])));
    assert_eq!(phase(&decision), MemoryDumpPhase::Dissociating);
    let leaves = vmi("Running", &[root()], entry("UnMountedFromPod"));
    let removed = vm(request, &[root()]);
    let decision = decide(&removed, Some(&leaves), &now()).unwrap();
    assert_eq!(phase(&decision), MemoryDumpPhase::Dissociating);
    for gone in [Some(vmi("Running", &[root()], None)), None] {
        let decision = decide(&removed, gone.as_ref(), &now()).unwrap();
        assert_eq!(decision.request, None);
        let mut status = removed.status.clone();
        decision.write(&mut status);
        assert!(status.rest.is_empty());
    }
}
