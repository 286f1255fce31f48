//! The index of the known pods and containers, by their ids and by their names.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::container::Container;
use super::pod::Pod;
use crate::cri::error::{CriError, ObjectKind, Result};
use crate::cri::state::ContainerRecord;

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
                kind: ObjectKind::Pod,
                name: pod.name.clone(),
                id: id.clone(),
            });
        }
        self.pod_names.insert(pod.name.clone(), pod.id.clone());
        self.pods.insert(pod.id.clone(), Arc::clone(pod));
        Ok(())
    }

    /// Adds a new pod like [`Self::add_pod`]. A kubelet takes the last created sandbox of a pod for
    /// its current one, also if the node's clock was set back in between.
    pub(super) fn add_new_pod(&mut self, pod: &Arc<Pod>) -> Result<()> {
        let metadata = pod.with_record(|record| record.config.metadata.clone());
        let metadata = metadata.unwrap_or_default();
        let others = self.pods.values().filter(|other| other.is_of(&metadata));
        let newest = others
            .map(|other| other.with_record(|record| record.created_at))
            .max();
        self.add_pod(pod)?;
        if let Some(newest) = newest {
            pod.create_after(newest);
        }
        Ok(())
    }

    /// Adds a container under its name, which must be unused in its pod.
    pub(super) fn add_container(&mut self, container: &Arc<Container>) -> Result<()> {
        let name = (container.pod.id.clone(), container.name.clone());
        if let Some(id) = self.container_names.get(&name) {
            return Err(CriError::NameTaken {
                kind: ObjectKind::Container,
                name: name.1,
                id: id.clone(),
            });
        }
        let id = container.id.clone();
        self.container_names.insert(name, id.clone());
        self.containers.insert(id, Arc::clone(container));
        Ok(())
    }

    /// Adds a new container like [`Self::add_container`]. A kubelet takes the last created one of a
    /// name for the current one, in all sandboxes of a pod.
    pub(super) fn add_new_container(&mut self, container: &Arc<Container>) -> Result<()> {
        let of_pod = container.pod.with_record(|pod| pod.config.metadata.clone());
        let of_pod = of_pod.unwrap_or_default();
        let name = container.with_record(name_of);
        let newest = self
            .containers
            .values()
            .filter(|other| other.pod.is_of(&of_pod))
            .filter_map(|other| {
                other.with_record(|other| (name_of(other) == name).then_some(other.created_at))
            })
            .max();
        self.add_container(container)?;
        if let Some(newest) = newest {
            container.create_after(newest);
        }
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

/// Returns a container's name in its pod, which all attempts to run it have.
fn name_of(record: &ContainerRecord) -> String {
    let metadata = record.config.metadata.as_ref();
    metadata.map_or_else(String::new, |metadata| metadata.name.clone())
}

#[cfg(test)]
mod tests {
    use podvisor_cri_messages::{ContainerMetadata, PodSandboxMetadata};

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

    /// A sandbox of the pod `name`.
    fn sandbox(id: &str, name: &str, attempt: u32, created_at: i64) -> Arc<Pod> {
        let mut record = pod_record(id);
        record.created_at = created_at;
        record.config.metadata = Some(PodSandboxMetadata {
            name: name.to_owned(),
            uid: "u".to_owned(),
            namespace: "default".to_owned(),
            attempt,
        });
        Pod::new(record)
    }

    /// An attempt to run the container `name`.
    fn attempt(
        id: &str,
        pod: &Arc<Pod>,
        name: &str,
        attempt: u32,
        created_at: i64,
    ) -> Arc<Container> {
        let mut record = container_record(id, &pod.id);
        record.created_at = created_at;
        record.config.metadata = Some(ContainerMetadata {
            name: name.to_owned(),
            attempt,
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

    #[test]
    fn a_new_sandbox_is_created_after_those_of_its_pod_though_the_clock_was_set_back() {
        let mut known = PodIndex::default();
        let mut add = |id, name, attempt, created_at| {
            let pod = sandbox(id, name, attempt, created_at);
            known.add_new_pod(&pod).unwrap();
            pod.record().created_at
        };
        assert_eq!(add("1", "web", 0, 100), 100);
        assert_eq!(add("2", "web", 1, 50), 101);
        assert_eq!(add("3", "web", 2, 50), 102);
        // The clock is right again.
        assert_eq!(add("4", "web", 3, 200), 200);
        assert_eq!(add("5", "db", 0, 50), 50);
        // One that is refused changes nothing, and one from the database stays as it is.
        let taken = sandbox("6", "web", 3, 50);
        assert_eq!(holder(known.add_new_pod(&taken)), "4");
        assert_eq!(taken.record().created_at, 50);
        let found = sandbox("7", "web", 4, 50);
        known.add_pod(&found).unwrap();
        assert_eq!(found.record().created_at, 50);
    }

    #[test]
    fn a_new_container_is_created_after_those_of_its_name_though_the_clock_was_set_back() {
        let mut known = PodIndex::default();
        let (first, second) = (sandbox("1", "web", 0, 0), sandbox("2", "web", 1, 0));
        let other = sandbox("3", "db", 0, 0);
        let mut add = |id, pod, name, number, created_at| {
            let container = attempt(id, pod, name, number, created_at);
            known.add_new_container(&container).unwrap();
            container.record().created_at
        };
        assert_eq!(add("a", &first, "main", 0, 100), 100);
        assert_eq!(add("b", &first, "main", 1, 50), 101);
        assert_eq!(add("c", &first, "side", 0, 50), 50);
        assert_eq!(add("d", &other, "main", 0, 50), 50);
        // The kubelet looks for the newest of a name in all sandboxes of a pod.
        assert_eq!(add("e", &second, "main", 2, 50), 102);
        assert_eq!(add("f", &second, "main", 3, 200), 200);
        let found = attempt("g", &second, "main", 4, 50);
        known.add_container(&found).unwrap();
        assert_eq!(found.record().created_at, 50);
    }
}
