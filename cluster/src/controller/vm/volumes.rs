//! The DataVolumes of a virtual machine: those that it makes, and those that it waits for.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use podvisor_cluster_types::datavolume::{GROUP, VERSION};
use podvisor_cluster_types::vm::DataVolumeTemplate;
use serde_json::Value;

use super::owner_reference;
use crate::controller::machines::used;
use crate::copy::{ACCOUNT, DEFAULT_ACCOUNT};
use crate::objects::{CREATED_BY_LABEL, DataVolume, VirtualMachine, VolumeState};

/// The DataVolumes of a virtual machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Volumes {
    /// Those of its templates that are to be made.
    pub missing: Vec<DataVolume>,
    /// The state of the one that is the least far.
    pub state: VolumeState,
}

impl Default for Volumes {
    fn default() -> Self {
        Self {
            missing: Vec::new(),
            state: VolumeState::Ready,
        }
    }
}

impl Volumes {
    /// Whether an instance would only wait.
    #[must_use]
    pub fn block_start(&self) -> bool {
        !matches!(
            self.state,
            VolumeState::Ready | VolumeState::WaitsForConsumer
        )
    }
}

/// The service account of a machine: that of a volume, or the account of pods that name none.
fn account(vm: &VirtualMachine) -> &str {
    let template = vm.spec.template.as_ref();
    let volumes = template.and_then(|template| template.spec.get("volumes"));
    let mut volumes = volumes.and_then(Value::as_array).into_iter().flatten();
    let account = volumes.find_map(|volume| {
        volume
            .pointer("/serviceAccount/serviceAccountName")?
            .as_str()
    });
    account
        .filter(|name| !name.is_empty())
        .unwrap_or(DEFAULT_ACCOUNT)
}

/// Returns what a machine's DataVolumes are like. `find` returns the one of a name; `is_filled`
/// says whether the claim of a name is filled, whose DataVolume may be gone.
pub(super) fn of(
    vm: &VirtualMachine,
    find: &dyn Fn(&str) -> Option<Arc<DataVolume>>,
    is_filled: &dyn Fn(&str) -> bool,
) -> Volumes {
    let templates = vm.spec.rest.get("dataVolumeTemplates").cloned();
    let templates: Vec<DataVolumeTemplate> = templates
        .and_then(|templates| serde_json::from_value(templates).ok())
        .unwrap_or_default();
    let missing: Vec<DataVolume> = templates
        .into_iter()
        .filter_map(|template| volume(vm, template))
        .filter(|volume| {
            let name = volume.metadata.name.as_deref().unwrap_or_default();
            find(name).is_none() && !is_filled(name)
        })
        .collect();
    let names: BTreeSet<&str> = used(vm).collect();
    let states = names
        .into_iter()
        .filter_map(|name| Some(find(name)?.state()));
    let of_missing = (!missing.is_empty()).then_some(VolumeState::Filling);
    let state = states.chain(of_missing).max();
    Volumes {
        missing,
        state: state.unwrap_or(VolumeState::Ready),
    }
}

/// Returns the DataVolume of a template; `None` if it has no name.
fn volume(vm: &VirtualMachine, template: DataVolumeTemplate) -> Option<DataVolume> {
    let metadata = template.metadata?;
    let name = metadata.name.filter(|name| !name.is_empty())?;
    let mut labels = metadata.labels;
    // Whose right to a source of another namespace counts, whatever the template says.
    let mut annotations = metadata.annotations;
    annotations.insert(ACCOUNT.into(), account(vm).to_owned());
    let uid = vm.metadata.uid.clone().unwrap_or_default();
    labels.insert(CREATED_BY_LABEL.into(), uid);
    Some(DataVolume {
        api_version: format!("{GROUP}/{VERSION}"),
        kind: "DataVolume".to_owned(),
        metadata: ObjectMeta {
            name: Some(name),
            namespace: vm.metadata.namespace.clone(),
            labels: Some(labels),
            annotations: Some(annotations),
            owner_references: Some(vec![owner_reference(vm)]),
            ..ObjectMeta::default()
        },
        spec: serde_json::from_value(template.spec?).ok()?,
        ..DataVolume::default()
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::controller::machines::uses;

    fn vm() -> VirtualMachine {
        let blank = |size: &str| {
            let request = json!({"requests": {"storage": size}});
            json!({"source": {"blank": {}}, "storage": {"resources": request}})
        };
        serde_json::from_value(json!({
            "metadata": {"name": "vm", "namespace": "n", "uid": "u"},
            "spec": {
                "dataVolumeTemplates": [
                    {"metadata": {"name": "root", "annotations": {"x": "1"}}, "spec": blank("1Gi")},
                    {"metadata": {"name": "data"}, "spec": blank("2Gi")},
                    {"metadata": {}, "spec": blank("3Gi")},
                ],
                "template": {"spec": {"volumes": [
                    {"name": "a", "dataVolume": {"name": "root"}},
                    {"name": "b", "persistentVolumeClaim": {"claimName": "data"}},
                    {"name": "c", "dataVolume": {"name": "other"}},
                    {"name": "d", "containerDisk": {"image": "x"}},
                ]}},
            },
        }))
        .unwrap()
    }

    fn in_phase(phase: &str) -> Option<Arc<DataVolume>> {
        let volume = json!({"status": {"phase": phase}});
        Some(Arc::new(serde_json::from_value(volume).unwrap()))
    }

    #[test]
    fn what_is_missing_is_made_for_the_machine() {
        let volumes = of(&vm(), &|_| None, &|_| false);
        let [root, data] = &volumes.missing[..] else {
            panic!("{volumes:?}");
        };
        assert_eq!(root.metadata.name.as_deref(), Some("root"));
        assert_eq!(data.spec.disk_size(), Some(2 << 30));
        let owner = &root.metadata.owner_references.as_ref().unwrap()[0];
        assert_eq!((owner.uid.as_str(), owner.controller), ("u", Some(true)));
        assert_eq!(root.metadata.annotations.as_ref().unwrap()["x"], "1");
        assert_eq!(volumes.state, VolumeState::Filling);
        assert!(volumes.block_start());
    }

    #[test]
    fn a_volume_is_made_on_behalf_of_the_machines_account() {
        let account_of = |vm: &VirtualMachine| {
            let volumes = of(vm, &|_| None, &|_| false).missing;
            volumes[0].metadata.annotations.clone().unwrap()[ACCOUNT].clone()
        };
        let mut vm = vm();
        // A template does not choose it.
        vm.spec.rest["dataVolumeTemplates"][0]["metadata"]["annotations"] =
            json!({ACCOUNT: "strong"});
        assert_eq!(account_of(&vm), "default");
        let volume = json!({"name": "e", "serviceAccount": {"serviceAccountName": "disks"}});
        let template = vm.spec.template.as_mut().unwrap();
        template.spec["volumes"]
            .as_array_mut()
            .unwrap()
            .push(volume);
        assert_eq!(account_of(&vm), "disks");
    }

    #[test]
    fn a_filled_claim_needs_no_volume_any_longer() {
        let volumes = of(&vm(), &|_| None, &|name| name == "root");
        assert_eq!(volumes.missing.len(), 1);
    }

    #[test]
    fn the_volume_that_is_the_least_far_decides() {
        let state = |root: &str, data: &str, other: &str| {
            let find = |name: &str| match name {
                "root" => in_phase(root),
                "data" => in_phase(data),
                _ => in_phase(other),
            };
            of(&vm(), &find, &|_| false)
        };
        let done = "Succeeded";
        assert_eq!(state(done, done, done), Volumes::default());
        assert!(state(done, done, "ImportInProgress").block_start());
        assert_eq!(state("Failed", done, "Pending").state, VolumeState::Failed);
        let waits = state(done, "WaitForFirstConsumer", done);
        assert_eq!(waits.state, VolumeState::WaitsForConsumer);
        assert!(!waits.block_start());
    }

    #[test]
    fn a_machine_without_volumes_waits_for_none() {
        let plain = VirtualMachine::default();
        assert_eq!(of(&plain, &|_| None, &|_| false), Volumes::default());
        assert!(uses(&vm(), "data") && uses(&vm(), "other") && !uses(&vm(), "x"));
    }
}
