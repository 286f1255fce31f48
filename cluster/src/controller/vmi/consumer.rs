//! The pod by which claims of an instance are bound before they are filled.
//!
//! A class that waits for a consumer puts a volume where the scheduler puts the first pod that uses
//! it. An importer's place would not suit the instance, so this pod asks for what the instance's
//! own pod will ask for, and ends at once.

use k8s_openapi::api::core::v1::{Container, Pod, PodSecurityContext, PodSpec, Volume};
use serde_json::json;

use super::pod;
use crate::objects::{COMPONENT_LABEL, LAUNCHER, VirtualMachineInstance};

/// The value of [`COMPONENT_LABEL`] of these pods, and the beginning of their names.
const CONSUMER: &str = "virt-consumer";

/// The user that the pod runs as.
const USER: i64 = 107;

/// Returns the name of an instance's consumer: one per unique id.
pub(super) fn name(vmi: &VirtualMachineInstance) -> String {
    pod::name(vmi).replacen(LAUNCHER, CONSUMER, 1)
}

/// Returns the consumer of an instance whose own pod would be `own`; `image` has this program.
pub(super) fn consumer(vmi: &VirtualMachineInstance, own: Pod, image: &str) -> Pod {
    let mut metadata = own.metadata;
    metadata.name = Some(name(vmi));
    metadata.labels = Some([(COMPONENT_LABEL.to_owned(), CONSUMER.to_owned())].into());
    metadata.annotations = None;
    let own = own.spec.unwrap_or_default();
    let claims: Vec<Volume> = own
        .volumes
        .into_iter()
        .flatten()
        .filter(|volume| volume.persistent_volume_claim.is_some())
        .collect();
    let is_claim = |name: &str| claims.iter().any(|volume| volume.name == name);
    let containers = own
        .containers
        .into_iter()
        .map(|container| Container {
            name: container.name,
            image: Some(image.to_owned()),
            // Whatever ends at once, and well.
            args: Some(vec!["--version".to_owned()]),
            resources: container.resources,
            volume_mounts: container
                .volume_mounts
                .map(|list| list.into_iter().filter(|of| is_claim(&of.name)).collect()),
            volume_devices: container
                .volume_devices
                .map(|list| list.into_iter().filter(|of| is_claim(&of.name)).collect()),
            security_context: container.security_context,
            ..Container::default()
        })
        .collect();
    let spec = PodSpec {
        containers,
        volumes: Some(claims),
        restart_policy: Some("Never".to_owned()),
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        termination_grace_period_seconds: Some(1),
        node_selector: own.node_selector,
        tolerations: own.tolerations,
        topology_spread_constraints: own.topology_spread_constraints,
        affinity: own.affinity,
        scheduler_name: own.scheduler_name,
        priority_class_name: own.priority_class_name,
        security_context: Some(PodSecurityContext {
            run_as_non_root: Some(true),
            run_as_user: Some(USER),
            fs_group: Some(USER),
            seccomp_profile: serde_json::from_value(json!({"type": "RuntimeDefault"})).ok(),
            ..PodSecurityContext::default()
        }),
        ..PodSpec::default()
    };
    Pod {
        metadata,
        spec: Some(spec),
        status: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::claims::VolumeMode;
    use crate::controller::vmi::pod;

    #[test]
    fn a_consumer_asks_for_the_instances_place_and_for_nothing_else() {
        let vmi: VirtualMachineInstance = serde_json::from_value(json!({
            "metadata": {"name": "a", "namespace": "n", "uid": "u"},
            "spec": {
                "domain": {"memory": {"guest": "1Gi"}},
                "nodeSelector": {"disk": "ssd"},
                "volumes": [
                    {"name": "root", "dataVolume": {"name": "d"}},
                    {"name": "raw", "persistentVolumeClaim": {"claimName": "b"}},
                    {"name": "seed", "cloudInitNoCloud": {"userData": "secret"}},
                    {"name": "files", "secret": {"secretName": "s"}},
                ],
            },
        }))
        .unwrap();
        let own = pod(&vmi, &|name| {
            Some(match name {
                "b" => VolumeMode::Block,
                _ => VolumeMode::Filesystem,
            })
        });
        let own = own.unwrap();
        let made = consumer(&vmi, own.clone(), "image");
        let (spec, of_vm) = (made.spec.as_ref().unwrap(), own.spec.as_ref().unwrap());
        let (container, vm) = (&spec.containers[0], &of_vm.containers[0]);
        assert_eq!(container.resources, vm.resources);
        assert_eq!(spec.node_selector, of_vm.node_selector);
        assert_eq!(spec.runtime_class_name, None);
        let names = |list: &[Volume]| -> Vec<String> {
            list.iter().map(|volume| volume.name.clone()).collect()
        };
        assert_eq!(names(spec.volumes.as_ref().unwrap()), ["root", "raw"]);
        assert_eq!(container.volume_mounts.as_ref().unwrap().len(), 1);
        assert_eq!(container.volume_devices.as_ref().unwrap().len(), 1);
        let text = serde_json::to_string(&made).unwrap();
        assert!(
            !text.contains("secret") && !text.contains("podvisor.io/vmi"),
            "{text}"
        );
        assert_ne!(made.metadata.name, own.metadata.name);
        assert_eq!(
            made.metadata.owner_references,
            own.metadata.owner_references
        );
    }
}
