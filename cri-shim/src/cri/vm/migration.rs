//! Pods whose machine does not boot: it comes from another node.

use std::collections::HashMap;

use podvisor_sandbox::{MigrationDirection, MigrationState, SendMachine};

use super::name::name_of;
use crate::cri::error::{CriError, Result};
use crate::cri::node::{Container, Node};
use crate::cri::state::ContainerPhase;
use crate::cri::vm_spec::VMI;

/// The annotation with the unique id of the migration by which a pod's machine comes.
const ANNOTATION: &str = "podvisor.io/migration";

/// Returns the migration by which the machine of a pod with these annotations comes, if it does.
///
/// # Errors
/// It is no unique id, or there is no object that says what machine comes.
pub(super) fn incoming(annotations: &HashMap<String, String>) -> Result<Option<String>> {
    let Some(migration) = annotations.get(ANNOTATION) else {
        return Ok(None);
    };
    let invalid = |reason: String| CriError::invalid("config.annotations", reason);
    if !SendMachine::is_id(migration) {
        return Err(invalid(format!(
            "{ANNOTATION} must be the unique id of a migration, with at most {} characters",
            SendMachine::MAX_ID
        )));
    }
    if !annotations.contains_key(VMI) {
        return Err(invalid(format!(
            "{ANNOTATION} needs the annotation {VMI} of the machine that comes"
        )));
    }
    Ok(Some(migration.clone()))
}

impl Node {
    /// Refuses a machine that would come from this very node.
    pub(super) fn must_come_from_elsewhere(&self, container: &Container) -> Result<()> {
        let own = name_of(&container.pod);
        let is_here = |other: &std::sync::Arc<Container>| {
            matches!(other.phase(), ContainerPhase::Running { .. })
                && other.pod.id != container.pod.id
        };
        let pods = self.pods().into_iter();
        let of_same = pods.filter(|pod| pod.is_vm() && name_of(pod) == own);
        let mut there = of_same.flat_map(|pod| self.containers_of(&pod.id));
        match there.any(|other| is_here(&other)) {
            true => Err(CriError::CannotStart {
                id: container.id.clone(),
                message: format!(
                    "the virtual machine {}/{} runs on this node: it moves to another one only",
                    own.namespace, own.name
                ),
            }),
            false => Ok(()),
        }
    }

    /// Whether a container's machine has left this node for another one.
    pub(in crate::cri) async fn has_moved(
        client: &podvisor_sandbox::SandboxClient,
        container: &Container,
    ) -> bool {
        let left = client.migration(&container.id).await.ok().flatten();
        left.is_some_and(|left| {
            left.direction == MigrationDirection::Out && left.state == MigrationState::Done
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_waits_for_a_machine_only_if_it_is_told_which() {
        let with = |migration: &str, is_instance: bool| {
            let mut annotations = HashMap::from([(ANNOTATION.to_owned(), migration.to_owned())]);
            if is_instance {
                annotations.insert(VMI.to_owned(), "{}".to_owned());
            }
            incoming(&annotations)
        };
        assert_eq!(incoming(&HashMap::new()).unwrap(), None);
        assert_eq!(with("m-1", true).unwrap().as_deref(), Some("m-1"));
        let error = with("m-1", false).unwrap_err().to_string();
        assert!(error.contains(VMI), "{error}");
        assert!(with("", true).is_err() && with("a b", true).is_err());
    }
}
