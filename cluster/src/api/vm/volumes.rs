//! Adding volumes to a VM or to an instance, and removing them: what a request makes of its
//! specification, or why it does not. Into a running guest they come by the controller.

use podvisor_cluster_types::vm::{AddVolumeOptions, RemoveVolumeOptions, VmStatus};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::status::Failure;

/// The bus that `virtctl` writes where nobody chose one.
const CLIENTS_BUS: &str = "scsi";

/// What is asked of a VM's volumes.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::api) enum Request {
    /// One more.
    Add(Box<AddVolumeOptions>),
    /// One less.
    Remove(RemoveVolumeOptions),
}

impl Request {
    /// Reads the body of a request.
    pub(in crate::api) fn read(is_added: bool, body: &[u8]) -> Result<Self, Failure> {
        fn options<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
            let invalid = |error| Failure::bad_request(format!("the options are invalid: {error}"));
            serde_json::from_slice(body).map_err(invalid)
        }
        let request = match is_added {
            true => Self::Add(options(body)?),
            false => Self::Remove(options(body)?),
        };
        let (verb, name, dry_run) = match &request {
            Self::Add(add) => ("addvolume", &add.name, &add.dry_run),
            Self::Remove(remove) => ("removevolume", &remove.name, &remove.dry_run),
        };
        if name.is_empty() {
            let message = format!("{verb} requires name to be set");
            return Err(Failure::bad_request(message));
        }
        if dry_run.iter().any(|word| word != "All") {
            return Err(Failure::bad_request("dryRun must be All or missing"));
        }
        if let Self::Add(add) = &request {
            let source = add.volume_source.as_ref();
            let claim = source.and_then(|source| source.persistent_volume_claim.as_ref());
            let data = source.and_then(|source| source.data_volume.as_ref());
            if add.disk.is_none() || claim.is_some() == data.is_some() {
                return Err(Failure::bad_request(
                    "addvolume requires disk and volumeSource to be set: one of \
                     persistentVolumeClaim and dataVolume",
                ));
            }
        }
        Ok(request)
    }

    /// Whether nothing is stored.
    pub(in crate::api) fn is_dry_run(&self) -> bool {
        match self {
            Self::Add(add) => !add.dry_run.is_empty(),
            Self::Remove(remove) => !remove.dry_run.is_empty(),
        }
    }
}

/// Returns the merge patch of a VM, `spec` its specification as it is.
pub(super) fn decide(request: &Request, spec: &Value, status: &VmStatus) -> Result<Value, Failure> {
    let holders = [
        ("snapshot", &status.snapshot_in_progress),
        ("restore", &status.restore_in_progress),
    ];
    for (what, holder) in holders {
        if let Some(name) = holder.as_ref().filter(|name| !name.is_empty()) {
            let message = format!("volumes cannot change until the {what} {name} completes");
            return Err(Failure::conflict(message));
        }
    }
    let template = spec.pointer("/template/spec").unwrap_or(&Value::Null);
    let of_template = changed(request, template)?;
    Ok(json!({ "spec": { "template": { "spec": of_template } } }))
}

/// Returns the merge patch of an instance, `spec` its specification as it is.
pub(in crate::api) fn of_instance(request: &Request, spec: &Value) -> Result<Value, Failure> {
    Ok(json!({ "spec": changed(request, spec)? }))
}

/// Whether an instance is as a request to its VM asks already: somebody has asked it before.
pub(super) fn is_done(request: &Request, spec: &Value) -> bool {
    let volumes = spec.get("volumes").and_then(Value::as_array);
    let named = |name: &str| volumes?.iter().find(|of| is_named(of, name));
    match request {
        Request::Add(add) => named(&add.name).is_some_and(|volume| {
            let asked = serde_json::to_value(&add.volume_source).unwrap_or_default();
            is_hotpluggable(volume) && claim_of(volume) == claim_of(&asked)
        }),
        Request::Remove(remove) => named(&remove.name).is_none(),
    }
}

/// Returns what of the specification of an instance changes.
fn changed(request: &Request, spec: &Value) -> Result<Value, Failure> {
    let list = |pointer: &str| {
        let list = spec.pointer(pointer).and_then(Value::as_array);
        list.cloned().unwrap_or_default()
    };
    let mut volumes = list("/volumes");
    let mut disks = list("/domain/devices/disks");
    match request {
        Request::Add(add) => plug(add, &mut volumes, &mut disks)?,
        Request::Remove(remove) => unplug(&remove.name, &mut volumes, &mut disks)?,
    }
    let devices = json!({ "disks": disks });
    Ok(json!({ "volumes": volumes, "domain": { "devices": devices } }))
}

fn is_hotpluggable(volume: &Value) -> bool {
    let mut sources = ["persistentVolumeClaim", "dataVolume"].into_iter();
    let mark = |source| volume.pointer(&format!("/{source}/hotpluggable"));
    sources.any(|source| mark(source) == Some(&json!(true)))
}

fn is_named(value: &Value, name: &str) -> bool {
    value.get("name").and_then(Value::as_str) == Some(name)
}

/// The claim of a volume, which has its DataVolume's name.
fn claim_of(volume: &Value) -> Option<&Value> {
    let data = volume.pointer("/dataVolume/name");
    data.or_else(|| volume.pointer("/persistentVolumeClaim/claimName"))
}

fn plug(
    add: &AddVolumeOptions,
    volumes: &mut Vec<Value>,
    disks: &mut Vec<Value>,
) -> Result<(), Failure> {
    let name = &add.name;
    let refused = |why: &str| {
        let message = format!("Unable to add volume [{name}] because {why}");
        Err(Failure::conflict(message))
    };
    if volumes
        .iter()
        .chain(disks.iter())
        .any(|of| is_named(of, name))
    {
        return refused("volume with that name already exists");
    }
    let written = |error: serde_json::Error| Failure::internal(error.to_string());
    let mut volume = serde_json::to_value(&add.volume_source).map_err(written)?;
    for source in ["persistentVolumeClaim", "dataVolume"] {
        if let Some(source) = volume.get_mut(source) {
            source["hotpluggable"] = json!(true);
        }
    }
    volume["name"] = json!(name);
    let claim = claim_of(&volume);
    if volumes
        .iter()
        .any(|of| claim.is_some() && claim_of(of) == claim)
    {
        return refused("its claim is used by another volume");
    }
    let mut disk = serde_json::to_value(&add.disk).map_err(written)?;
    disk["name"] = json!(name);
    // Nobody chose it, and disks are virtio here. An instance has its defaults already.
    let bus = disk.pointer("/disk/bus").and_then(Value::as_str);
    if disk["disk"].is_object() && matches!(bus, None | Some("" | CLIENTS_BUS)) {
        disk["disk"]["bus"] = json!("virtio");
    }
    volumes.push(volume);
    disks.push(disk);
    Ok(())
}

fn unplug(name: &str, volumes: &mut Vec<Value>, disks: &mut Vec<Value>) -> Result<(), Failure> {
    let refused = |why: &str| {
        let message = format!("Unable to remove volume [{name}] because {why}");
        Err(Failure::conflict(message))
    };
    let Some(volume) = volumes.iter().find(|of| is_named(of, name)) else {
        return refused("it does not exist");
    };
    if !is_hotpluggable(volume) {
        return refused("it is not hotpluggable: change the VM's template");
    }
    volumes.retain(|of| !is_named(of, name));
    disks.retain(|of| !is_named(of, name));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> Value {
        json!({ "template": { "spec": {
            "domain": { "devices": { "disks": [{ "name": "root", "disk": {}, "unknown": 1 }] } },
            "volumes": [
                { "name": "root", "persistentVolumeClaim": { "claimName": "c" } },
            ],
        } } })
    }

    fn add(name: &str, claim: &str) -> Request {
        let body = json!({
            "name": name,
            "disk": { "disk": { "bus": "scsi" }, "serial": name },
            "volumeSource": { "persistentVolumeClaim": { "claimName": claim } },
        });
        Request::read(true, body.to_string().as_bytes()).unwrap()
    }

    fn remove(name: &str) -> Request {
        let body = json!({ "name": name }).to_string();
        Request::read(false, body.as_bytes()).unwrap()
    }

    fn decided(request: &Request, spec: &Value) -> Result<Value, u16> {
        let decided = decide(request, spec, &VmStatus::default());
        let of_template = |patch: Value| patch["spec"]["template"]["spec"].clone();
        decided.map(of_template).map_err(|failure| failure.code())
    }

    #[test]
    fn a_volume_is_added_to_the_template_and_can_be_removed_again() {
        let with = decided(&add("data", "d"), &spec()).unwrap();
        let disks = &with["domain"]["devices"]["disks"];
        assert_eq!(disks[0]["unknown"], 1, "what is not known is kept");
        assert_eq!(disks[1]["name"], "data");
        assert_eq!(
            (&disks[1]["disk"]["bus"], &disks[1]["serial"]),
            (&json!("virtio"), &json!("data"))
        );
        let claim = &with["volumes"][1]["persistentVolumeClaim"];
        assert_eq!(*claim, json!({ "claimName": "d", "hotpluggable": true }));
        let spec = json!({ "template": { "spec": with } });
        let without = decided(&remove("data"), &spec).unwrap();
        assert_eq!(without["volumes"].as_array().unwrap().len(), 1);
        assert_eq!(
            without["domain"]["devices"]["disks"]
                .as_array()
                .unwrap()
                .len(),
            1
        );
    }

    #[test]
    fn what_is_there_already_and_what_is_not_are_conflicts() {
        assert_eq!(decided(&add("root", "d"), &spec()), Err(409));
        assert_eq!(
            decided(&add("data", "c"), &spec()),
            Err(409),
            "the claim is in use"
        );
        assert_eq!(decided(&remove("data"), &spec()), Err(409));
        assert_eq!(
            decided(&remove("root"), &spec()),
            Err(409),
            "it is of the template"
        );
    }

    #[test]
    fn a_vm_that_is_locked_keeps_its_volumes() {
        let code = |status: Value| {
            let status = serde_json::from_value(status).unwrap();
            let decided = decide(&add("data", "d"), &spec(), &status);
            decided.map(drop).map_err(|failure| failure.code())
        };
        assert_eq!(code(json!({})), Ok(()));
        assert_eq!(code(json!({ "snapshotInProgress": "s" })), Err(409));
        assert_eq!(code(json!({ "restoreInProgress": "r" })), Err(409));
    }

    #[test]
    fn an_instance_changes_as_its_vm_does_and_once() {
        let of_vm = spec();
        let instance = of_vm.pointer("/template/spec").unwrap();
        let request = add("data", "d");
        assert!(!is_done(&request, instance) && is_done(&remove("data"), instance));
        let with = of_instance(&request, instance).unwrap();
        let with = &with["spec"];
        assert_eq!(with["volumes"][1]["name"], "data");
        assert_eq!(
            with["domain"]["devices"]["disks"][1]["disk"]["bus"],
            "virtio"
        );
        assert!(is_done(&request, with) && !is_done(&remove("data"), with));
        assert!(!is_done(&add("data", "other"), with), "it is another claim");
        assert_eq!(of_instance(&request, with).unwrap_err().code(), 409);
        let without = of_instance(&remove("data"), with).unwrap();
        assert_eq!(without["spec"]["volumes"].as_array().unwrap().len(), 1);
    }

    #[test]
    fn requests_without_their_parts_are_refused() {
        let source = json!({ "dataVolume": { "name": "d" } });
        for (is_added, body) in [
            (true, json!({})),
            (true, json!({ "name": "a", "disk": {} })),
            (true, json!({ "name": "a", "volumeSource": source })),
            (true, json!({ "name": "a", "disk": {}, "volumeSource": {} })),
            (false, json!({})),
            (false, json!({ "name": "a", "dryRun": ["Some"] })),
            (true, json!([])),
        ] {
            let refused = Request::read(is_added, body.to_string().as_bytes());
            assert_eq!(
                refused.map_err(|failure| failure.code()),
                Err(400),
                "{body}"
            );
        }
        assert!(
            Request::read(false, br#"{"name": "a", "dryRun": ["All"]}"#)
                .unwrap()
                .is_dry_run()
        );
    }
}
