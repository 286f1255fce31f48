//! The names of pods' machines.

use std::collections::HashMap;

use podvisor_cluster_types::meta::Meta;
use podvisor_node_api::messages::VmName;

use crate::cri::node::Pod;
use crate::cri::state::PodRecord;
use crate::cri::vm_spec::Vmi;

/// Returns the metadata of the object that a pod with these annotations was made of.
pub(in crate::cri) fn instance_of(annotations: &HashMap<String, String>) -> Option<Meta> {
    let vmi = Vmi::of_annotations(annotations).ok().flatten();
    vmi.map(|vmi| vmi.metadata)
}

/// Names a pod's machine: as the object does that it was made of, else as the pod itself.
pub(in crate::cri) fn name_of(pod: &Pod) -> VmName {
    let name = |record: &PodRecord| {
        let metadata = record.config.metadata.clone().unwrap_or_default();
        match instance_of(&record.config.annotations) {
            Some(instance) => VmName::new(instance.namespace, instance.name, instance.uid),
            None => VmName::new(metadata.namespace, metadata.name, metadata.uid),
        }
    };
    pod.vm_name.get_or_init(|| pod.with_record(name)).clone()
}
