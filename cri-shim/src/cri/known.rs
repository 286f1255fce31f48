//! The index of the known pods and containers, by their ids and by their names.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::error::{CriError, Kind, Result};
use super::node::{Container, Pod};

/// Pods and containers. Names of pods are unique, and names of containers within a pod.
#[derive(Debug, Default)]
pub(super) struct PodIndex {
    pub(super) pods: BTreeMap<String, Arc<Pod>>,
    pub(super) containers: BTreeMap<String, Arc<Container>>,
    /// Ids of pods by their names.
    pod_names: BTreeMap<String, String>,
    /// Ids of containers by the ids of their pods and their names.
    container_names: BTreeMap<(String, String), String>,
}

impl PodIndex {
    /// Adds a pod under its name, which must be unused.
    pub(super) fn add_pod(&mut self, pod: &Arc<Pod>) -> Result<()> {
        if let Some(id) = self.pod_names.get(&pod.name) {
            return Err(CriError::NameTaken {
                kind: Kind::Pod,
                name: pod.name.clone(),
                id: id.clone(),
            });
        }
        self.pod_names.insert(pod.name.clone(), pod.id.clone());
        self.pods.insert(pod.id.clone(), Arc::clone(pod));
        Ok(())
    }

    /// Adds a container under its name, which must be unused in its pod.
    pub(super) fn add_container(&mut self, container: &Arc<Container>) -> Result<()> {
        let name = (container.pod.id.clone(), container.name.clone());
        if let Some(id) = self.container_names.get(&name) {
            return Err(CriError::NameTaken {
                kind: Kind::Container,
                name: name.1,
                id: id.clone(),
            });
        }
        let id = container.id.clone();
        self.container_names.insert(name, id.clone());
        self.containers.insert(id, Arc::clone(container));
        Ok(())
    }

    pub(super) fn pod_of_name(&self, name: &str) -> Option<&Arc<Pod>> {
        self.pods.get(self.pod_names.get(name)?)
    }

    pub(super) fn containers_of(&self, pod: &str) -> Vec<Arc<Container>> {
        let from = (pod.to_owned(), String::new());
        let names = self.container_names.range(from..);
        let names = names.take_while(|((of, _), _)| of == pod);
        let containers = names.filter_map(|(_, id)| self.containers.get(id));
        containers.cloned().collect()
    }

    pub(super) fn forget_pod(&mut self, pod: &Pod) {
        // A pod that was never added has no name here.
        if self.pods.remove(&pod.id).is_some() {
            self.pod_names.remove(&pod.name);
        }
    }

    pub(super) fn forget_container(&mut self, container: &Container) {
        if self.containers.remove(&container.id).is_some() {
            let name = (container.pod.id.clone(), container.name.clone());
            self.container_names.remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_cri::v1::{ContainerMetadata, PodSandboxMetadata};

    use super::*;
    use crate::cri::state::{container_record, pod_record};

    fn pod(id: &str, name: &str) -> Arc<Pod> {
        let mut record = pod_record(id);
        record.config.metadata = Some(PodSandboxMetadata {
            name: name.to_owned(),
            ..Default::default()
        });
        Pod::new(record)
    }

    fn container(id: &str, pod: &Arc<Pod>, name: &str) -> Arc<Container> {
        let mut record = container_record(id, &pod.id);
        record.config.metadata = Some(ContainerMetadata {
            name: name.to_owned(),
            attempt: 0,
        });
        Container::new(record, Arc::clone(pod))
    }

    fn holder(refused: Result<()>) -> String {
        match refused.unwrap_err() {
            CriError::NameTaken { id, .. } => id,
            error => panic!("{error:?}"),
        }
    }

    #[test]
    fn a_pods_name_is_its_own_until_it_is_forgotten() {
        let mut known = PodIndex::default();
        let (first, second) = (pod("1", "web"), pod("2", "web"));
        known.add_pod(&first).unwrap();
        known.add_pod(&pod("3", "db")).unwrap();
        assert_eq!(holder(known.add_pod(&second)), "1");
        // That one has no name to lose.
        known.forget_pod(&second);
        assert_eq!(holder(known.add_pod(&second)), "1");
        assert_eq!(known.pod_of_name(&second.name).unwrap().id, "1");
        known.forget_pod(&first);
        assert!(known.pod_of_name(&first.name).is_none());
        known.add_pod(&second).unwrap();
        assert_eq!(known.pod_of_name(&first.name).unwrap().id, "2");
    }

    #[test]
    fn a_containers_name_is_its_own_in_its_pod_until_it_is_forgotten() {
        let mut known = PodIndex::default();
        let (web, db) = (pod("1", "web"), pod("2", "db"));
        let (first, second) = (container("a", &web, "main"), container("b", &web, "main"));
        known.add_container(&first).unwrap();
        known.add_container(&container("c", &web, "side")).unwrap();
        known.add_container(&container("d", &db, "main")).unwrap();
        assert_eq!(holder(known.add_container(&second)), "a");
        known.forget_container(&second);
        assert_eq!(holder(known.add_container(&second)), "a");
        let of = |known: &PodIndex, pod: &str| -> Vec<String> {
            let all = known.containers_of(pod);
            all.iter().map(|container| container.id.clone()).collect()
        };
        assert_eq!(of(&known, "1"), ["a", "c"]);
        known.forget_container(&first);
        assert_eq!(of(&known, "1"), ["c"]);
        known.add_container(&second).unwrap();
        assert_eq!(of(&known, "1"), ["b", "c"]);
        assert_eq!(of(&known, "2"), ["d"]);
    }
}
