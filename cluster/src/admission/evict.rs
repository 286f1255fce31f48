//! The eviction of a VM's pod, which becomes the evacuation of the VM.
//!
//! Draining a node evicts its pods, which ends a VM. Where the VM is to move instead, the eviction
//! is answered as one that a disruption budget does not allow yet (429), and the VM is marked: the
//! controller moves it, and who drains asks again until the pod is gone.

use k8s_openapi::api::core::v1::Pod;

use super::{
    Request, Response,
    lookup::{Evicted, Lookup},
};

/// Label of every pod that is a VM, and of those that keep a volume for one; and its values.
const COMPONENT: &str = "kubevirt.io";
const LAUNCHER: &str = "virt-launcher";
const HOTPLUG: &str = "hotplug-disk";

/// What becomes of an eviction.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    /// The pod ends.
    Allowed,
    /// The VM leaves its node, and the pod stays until then.
    Evacuated,
    /// The pod stays.
    Refused(String),
}

/// Answers an eviction.
pub(super) async fn evict(request: &Request, lookup: &impl Lookup) -> Response {
    let (namespace, name) = (&request.namespace, &request.name);
    let found = async {
        let Some(pod) = lookup.pod(namespace, name).await? else {
            return Ok(None);
        };
        let Some((vmi, uid, is_vm)) = instance(&pod) else {
            return Ok(None);
        };
        let evicted = lookup.evicted(namespace, &vmi).await?;
        Ok(evicted
            .filter(|evicted| evicted.uid == uid)
            .map(|evicted| (pod, vmi, evicted, is_vm)))
    };
    let failed = |error: kube::Error, what: &str| {
        tracing::error!(%error, namespace, pod = name, what, "an eviction was not answered");
        refused(500, "InternalError", format!("failed to {what}: try again"))
    };
    let (pod, vmi, evicted, is_vm) = match found.await {
        Ok(Some(found)) => found,
        Ok(None) => return Response::allowed(),
        Err(error) => return failed(error, "look up the VM of the pod"),
    };
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    let node = node.unwrap_or_default();
    let outcome = match is_vm {
        true => outcome(&vmi, &evicted, node),
        false => of_keeper(&vmi, &evicted, node),
    };
    match outcome {
        Outcome::Allowed => Response::allowed(),
        Outcome::Refused(message) => refused(429, "TooManyRequests", message),
        Outcome::Evacuated => {
            let is_marked = evicted.status.evacuation_node_name.as_deref() == Some(node);
            if request.dry_run != Some(true) && !is_marked {
                let marked = lookup.evacuate(namespace, &vmi, &evicted.uid, node).await;
                if let Err(error) = marked {
                    return failed(error, "mark the VM to be evacuated");
                }
            }
            let message = format!("Eviction triggered evacuation of VMI \"{namespace}/{vmi}\"");
            refused(429, "TooManyRequests", message)
        }
    }
}

fn refused(code: u16, reason: &'static str, message: String) -> Response {
    Response::Refused {
        code,
        reason,
        message,
    }
}

/// The VMI that a pod was made for: its name and unique id, and whether the pod is the VM.
fn instance(pod: &Pod) -> Option<(String, String, bool)> {
    let labels = pod.metadata.labels.as_ref()?;
    let is_vm = match labels.get(COMPONENT)?.as_str() {
        LAUNCHER => true,
        HOTPLUG => false,
        _ => return None,
    };
    let owners = pod.metadata.owner_references.iter().flatten();
    let mut owners = owners.filter(|owner| owner.controller == Some(true));
    let owner = owners.find(|owner| owner.kind == "VirtualMachineInstance")?;
    Some((owner.name.clone(), owner.uid.clone(), is_vm))
}

/// A pod that keeps a volume goes after the VM that has it.
fn of_keeper(name: &str, vmi: &Evicted, node: &str) -> Outcome {
    let status = &vmi.status;
    let has_ended = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    if has_ended || node.is_empty() || status.node_name.as_deref() != Some(node) {
        return Outcome::Allowed;
    }
    Outcome::Refused(format!(
        "the pod keeps a volume of the running VMI {name}: it goes after that, or by removevolume"
    ))
}

fn outcome(name: &str, vmi: &Evicted, node: &str) -> Outcome {
    let status = &vmi.status;
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return Outcome::Allowed;
    }
    // The VM is not in this pod: it has left, or is still to come.
    if node.is_empty() || status.node_name.as_deref() != Some(node) {
        return Outcome::Allowed;
    }
    let migratable = status
        .conditions
        .iter()
        .find(|condition| condition.kind == "LiveMigratable");
    let is_migratable = migratable.is_some_and(|found| found.status == "True");
    match (vmi.strategy.as_str(), is_migratable) {
        ("LiveMigrate" | "LiveMigrateIfPossible", true) | ("External", _) => Outcome::Evacuated,
        ("LiveMigrate", false) => {
            let why = migratable.and_then(|found| found.message.as_deref());
            Outcome::Refused(format!(
                "VMI {name} is configured with an eviction strategy but is not live-migratable: {}",
                why.unwrap_or("that is not known yet")
            ))
        }
        _ => Outcome::Allowed,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn vmi(strategy: &str, migratable: Option<bool>) -> Evicted {
        let conditions = migratable.map(|migratable| {
            let status = if migratable { "True" } else { "False" };
            json!({ "type": "LiveMigratable", "status": status, "message": "disk a" })
        });
        let conditions: Vec<Value> = conditions.into_iter().collect();
        let status = json!({ "phase": "Running", "nodeName": "n", "conditions": conditions });
        Evicted {
            uid: "u".to_owned(),
            strategy: strategy.to_owned(),
            status: serde_json::from_value(status).unwrap(),
        }
    }

    #[test]
    fn the_strategy_says_what_an_eviction_becomes() {
        for (strategy, migratable, expected) in [
            ("", Some(true), "allowed"),
            ("None", Some(true), "allowed"),
            ("LiveMigrate", Some(true), "evacuated"),
            ("LiveMigrate", Some(false), "refused"),
            ("LiveMigrate", None, "refused"),
            ("LiveMigrateIfPossible", Some(true), "evacuated"),
            ("LiveMigrateIfPossible", Some(false), "allowed"),
            ("External", Some(false), "evacuated"),
        ] {
            let found = match outcome("a", &vmi(strategy, migratable), "n") {
                Outcome::Allowed => "allowed",
                Outcome::Evacuated => "evacuated",
                Outcome::Refused(_) => "refused",
            };
            assert_eq!(found, expected, "{strategy} {migratable:?}");
        }
    }

    #[test]
    fn a_pod_that_the_vm_is_not_in_may_go() {
        let mut evicted = vmi("LiveMigrate", Some(true));
        assert_eq!(outcome("a", &evicted, "another"), Outcome::Allowed);
        evicted.status.phase = Some("Succeeded".to_owned());
        assert_eq!(outcome("a", &evicted, "n"), Outcome::Allowed);
    }

    #[test]
    fn a_pod_that_keeps_a_volume_goes_after_the_vm() {
        let mut evicted = vmi("None", Some(true));
        let refused = of_keeper("a", &evicted, "n");
        assert!(matches!(&refused, Outcome::Refused(why) if why.contains("volume")));
        assert_eq!(of_keeper("a", &evicted, "another"), Outcome::Allowed);
        evicted.status.phase = Some("Failed".to_owned());
        assert_eq!(of_keeper("a", &evicted, "n"), Outcome::Allowed);
    }

    #[test]
    fn what_keeps_a_vm_from_moving_is_told() {
        let Outcome::Refused(why) = outcome("a", &vmi("LiveMigrate", Some(false)), "n") else {
            panic!("it is refused");
        };
        assert!(why.contains("disk a"), "{why}");
    }
}
