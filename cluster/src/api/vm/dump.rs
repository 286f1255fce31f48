//! Dumps of a VM's memory: what a request makes of the VM's status, or why it does not. The
//! controller does the rest.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use podvisor_cluster_types::{
    Quantity,
    cause::shown,
    memory_dump::{MemoryDumpPhase, MemoryDumpRequest},
    names::is_dns_label,
    vm::VmStatus,
    vmi::{VmiSpec, VmiStatus},
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::status::Failure;

/// What a dump takes besides the memory, at most.
const OVERHEAD: u64 = 100 << 20;

/// How much larger than its content a claim's file system has to be, in thousandths: what the
/// CDIConfig says, from which clients compute the claims that they make.
const FILE_SYSTEM: u64 = 1055;

/// What is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
    /// A dump to this claim; an empty one is that of the dump before.
    Dump(String),
    /// The claim is to leave the VM.
    Remove,
}

/// The instance of a VM.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Machine {
    pub(super) spec: VmiSpec,
    pub(super) status: VmiStatus,
}

impl Request {
    /// Reads the body of a request.
    pub(super) fn read(is_dump: bool, body: &[u8]) -> Result<Self, Failure> {
        #[derive(Default, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        struct Options {
            claim_name: String,
        }
        if !is_dump {
            // Its body says nothing.
            return Ok(Self::Remove);
        }
        if body.iter().all(u8::is_ascii_whitespace) {
            return Ok(Self::Dump(String::new()));
        }
        let options: Options = serde_json::from_slice(body)
            .map_err(|error| Failure::bad_request(format!("the options are invalid: {error}")))?;
        Ok(Self::Dump(options.claim_name))
    }
}

/// Returns the claim that a request is about, which has to be looked at.
pub(super) fn claim(request: &Request, status: &VmStatus) -> Result<Option<String>, Failure> {
    let Request::Dump(claim) = request else {
        return Ok(None);
    };
    let before = status.memory_dump_request.as_ref();
    let name = match before.map(|before| before.claim_name.as_str()) {
        None if claim.is_empty() => {
            return Err(Failure::bad_request(
                "a memory dump needs claimName: the VM has no dump before it",
            ));
        }
        Some(before) if !claim.is_empty() && claim != before => {
            return Err(Failure::conflict(format!(
                "the claim {} takes no memory dump while the claim {} is that of the VM's dumps: \
                 remove that one first",
                shown(claim),
                shown(before)
            )));
        }
        Some(before) => before,
        None => claim,
    };
    // It becomes the name of a volume.
    match is_dns_label(name) {
        true => Ok(Some(name.to_owned())),
        false => Err(Failure::bad_request(format!(
            "the claim {} cannot take memory dumps: its name must be a DNS label",
            shown(name)
        ))),
    }
}

/// Returns the merge patch of a VM; `claim` is that of [`claim`], if it exists.
pub(super) fn decide(
    request: &Request,
    vm: &str,
    status: &VmStatus,
    machine: Option<&Machine>,
    claim: Option<&PersistentVolumeClaim>,
) -> Result<Value, Failure> {
    let before = status.memory_dump_request.as_ref();
    let asked = match request {
        Request::Remove => remove(vm, before)?,
        Request::Dump(_) => {
            let name = self::claim(request, status)?.unwrap_or_default();
            let machine = machine
                .ok_or_else(|| Failure::not_found("virtualmachineinstance.kubevirt.io", vm))?;
            if machine.status.phase.as_deref() != Some("Running") {
                return Err(Failure::conflict("VMI is not running"));
            }
            let claim = claim.ok_or_else(|| Failure::not_found("persistentvolumeclaim", &name))?;
            must_take_dump(&name, claim, machine)?;
            dump(name, before)?
        }
    };
    // What was reported of the dump before goes.
    Ok(json!({ "status": { "memoryDumpRequest": {
        "claimName": asked.claim_name,
        "phase": asked.phase,
        "remove": asked.remove.then_some(true),
        "startTimestamp": null,
        "endTimestamp": null,
        "fileName": null,
        "message": null,
    } } }))
}

fn dump(
    claim_name: String,
    before: Option<&MemoryDumpRequest>,
) -> Result<MemoryDumpRequest, Failure> {
    match before.map(|before| (before.phase, before.remove)) {
        Some((MemoryDumpPhase::Dissociating, _) | (_, true)) => Err(Failure::conflict(format!(
            "the claim {} takes no memory dump: it is being removed from the VM",
            shown(&claim_name)
        ))),
        Some((phase, false)) if !phase.is_over() => Err(Failure::conflict(format!(
            "a memory dump to the claim {} is in progress",
            shown(&claim_name)
        ))),
        _ => Ok(MemoryDumpRequest {
            claim_name,
            ..MemoryDumpRequest::default()
        }),
    }
}

fn remove(vm: &str, before: Option<&MemoryDumpRequest>) -> Result<MemoryDumpRequest, Failure> {
    let Some(before) = before else {
        return Err(Failure::conflict(format!(
            "VM {} has no claim for memory dumps",
            shown(vm)
        )));
    };
    let claim = &before.claim_name;
    if before.remove || before.phase == MemoryDumpPhase::Dissociating {
        return Err(Failure::conflict(format!(
            "the claim {} is being removed from the VM already",
            shown(claim)
        )));
    }
    Ok(MemoryDumpRequest {
        claim_name: claim.clone(),
        phase: MemoryDumpPhase::Dissociating,
        remove: true,
        ..MemoryDumpRequest::default()
    })
}

/// Refuses a claim that cannot take a dump of an instance's memory.
fn must_take_dump(
    name: &str,
    claim: &PersistentVolumeClaim,
    machine: &Machine,
) -> Result<(), Failure> {
    let refused = |why: String| Failure::conflict(format!("the claim {} {why}", shown(name)));
    let spec = claim.spec.clone().unwrap_or_default();
    if spec.volume_mode.as_deref() == Some("Block") {
        let why = "is a block device: memory dumps need volumeMode Filesystem";
        return Err(refused(why.to_owned()));
    }
    let modes = spec.access_modes.unwrap_or_default();
    if !modes.is_empty() && modes.iter().all(|mode| mode == "ReadOnlyMany") {
        return Err(refused("can only be read".to_owned()));
    }
    let requests = spec.resources.and_then(|resources| resources.requests);
    let size = requests.and_then(|requests| {
        let text = &requests.get("storage")?.0;
        Quantity::new(text.clone()).bytes()
    });
    let size = size.unwrap_or_default();
    let needed = needed(&machine.spec);
    match size < needed {
        true => Err(refused(format!(
            "is too small: it has {size} bytes, and a dump of the memory may take {needed}"
        ))),
        false => Ok(()),
    }
}

/// The size of a claim that has room for a dump. Zeroes take none, but nobody knows how many there
/// are.
fn needed(spec: &VmiSpec) -> u64 {
    let domain = &spec.domain;
    let memory = domain.memory.as_ref();
    let guest = memory
        .and_then(|memory| memory.guest.as_ref())
        .or_else(|| domain.resources.requests.get("memory"));
    let guest = guest.and_then(Quantity::bytes).unwrap_or_default();
    let dump = u128::from(guest.saturating_add(OVERHEAD));
    u64::try_from(dump * u128::from(FILE_SYSTEM) / 1000).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(request: Value) -> VmStatus {
        serde_json::from_value(json!({ "memoryDumpRequest": request })).unwrap()
    }

    fn machine(phase: &str) -> Machine {
        Machine {
            spec: serde_json::from_value(json!({
                "domain": { "memory": { "guest": "924Mi" } },
            }))
            .unwrap(),
            status: serde_json::from_value(json!({ "phase": phase })).unwrap(),
        }
    }

    fn claim_of(change: Value) -> PersistentVolumeClaim {
        let mut spec = json!({
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": "1081Mi" } },
        });
        for (name, value) in change.as_object().unwrap() {
            spec[name] = value.clone();
        }
        serde_json::from_value(json!({ "spec": spec })).unwrap()
    }

    /// What a request to a VM whose status is like this leads to.
    fn asked(claim: &str, status: &VmStatus) -> Result<Value, u16> {
        let request = Request::Dump(claim.to_owned());
        let (machine, pvc) = (machine("Running"), claim_of(json!({})));
        let decided = decide(&request, "vm", status, Some(&machine), Some(&pvc));
        let of_status = |patch: Value| patch["status"]["memoryDumpRequest"].clone();
        decided.map(of_status).map_err(|failure| failure.code())
    }

    #[test]
    fn a_dump_is_asked_for_once_at_a_time_and_to_one_claim() {
        let none = VmStatus::default();
        let new = asked("dumps", &none).unwrap();
        assert_eq!(
            (&new["claimName"], &new["phase"]),
            (&json!("dumps"), &json!("Associating"))
        );
        assert!(new["fileName"].is_null() && new["remove"].is_null());
        assert_eq!(asked("", &none), Err(400));
        assert_eq!(asked("not.a.label", &none), Err(400));
        for phase in ["Completed", "Failed"] {
            let before = status(json!({ "claimName": "dumps", "phase": phase, "fileName": "f" }));
            assert_eq!(asked("", &before).unwrap(), new);
            assert_eq!(asked("dumps", &before).unwrap(), new);
            assert_eq!(asked("other", &before), Err(409));
        }
        for phase in [
            "Associating",
            "InProgress",
            "Unmounting",
            "Dissociating",
            "Later",
        ] {
            let before = status(json!({ "claimName": "dumps", "phase": phase }));
            assert_eq!(asked("dumps", &before), Err(409), "{phase}");
        }
        let leaves = json!({ "claimName": "dumps", "phase": "Completed", "remove": true });
        assert_eq!(asked("dumps", &status(leaves)), Err(409));
    }

    #[test]
    fn a_claim_that_cannot_take_the_dump_is_refused_and_so_is_a_vm_that_does_not_run() {
        let request = Request::Dump("dumps".to_owned());
        let refused = |machine: Option<&Machine>, claim: Option<&PersistentVolumeClaim>| {
            let decided = decide(&request, "vm", &VmStatus::default(), machine, claim);
            decided.map(drop)
        };
        let code = |machine: Option<&Machine>, claim: Option<&PersistentVolumeClaim>| {
            refused(machine, claim).map_err(|failure| failure.code())
        };
        let (runs, fits) = (machine("Running"), claim_of(json!({})));
        assert_eq!(code(Some(&runs), Some(&fits)), Ok(()));
        assert_eq!(code(Some(&runs), None), Err(404));
        let others = ["Scheduling", "Succeeded", "Failed"].map(machine);
        assert_eq!(code(None, Some(&fits)), Err(404));
        for machine in &others {
            let failure = refused(Some(machine), Some(&fits)).unwrap_err();
            assert_eq!(failure.code(), 409);
            assert!(failure.message().contains("VMI is not running"));
        }
        for change in [
            json!({ "volumeMode": "Block" }),
            json!({ "accessModes": ["ReadOnlyMany"] }),
            json!({ "resources": { "requests": { "storage": "1080Mi" } } }),
            json!({ "resources": {} }),
        ] {
            let refused = code(Some(&runs), Some(&claim_of(change.clone())));
            assert_eq!(refused, Err(409), "{change}");
        }
    }

    #[test]
    fn a_claim_is_removed_once() {
        let asked = |status: &VmStatus| {
            let decided = decide(&Request::Remove, "vm", status, None, None);
            let of_status = |patch: Value| patch["status"]["memoryDumpRequest"].clone();
            decided.map(of_status).map_err(|failure| failure.code())
        };
        assert_eq!(asked(&VmStatus::default()), Err(409));
        let before = status(json!({ "claimName": "dumps", "phase": "InProgress" }));
        let removed = asked(&before).unwrap();
        assert_eq!(
            (&removed["phase"], &removed["remove"]),
            (&json!("Dissociating"), &json!(true))
        );
        assert_eq!(removed["claimName"], "dumps");
        let leaves = json!({ "claimName": "dumps", "phase": "Dissociating", "remove": true });
        assert_eq!(asked(&status(leaves)), Err(409));
    }

    #[test]
    fn requests_are_read() {
        let read = |body: &[u8]| Request::read(true, body).map_err(|failure| failure.code());
        let dump = |claim: &str| Ok(Request::Dump(claim.to_owned()));
        assert_eq!(read(b""), dump(""));
        assert_eq!(read(br#"{"claimName": "c", "phase": ""}"#), dump("c"));
        for invalid in [&b"5"[..], br#"{"claimName": 1}"#, b"{"] {
            assert_eq!(read(invalid), Err(400));
        }
        assert_eq!(Request::read(false, b"").unwrap(), Request::Remove);
    }
}
