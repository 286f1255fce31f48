//! The last lists of the other runtime's pods, containers and images.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use podvisor_cri_messages::{
    ContainerFilter, ListContainersRequest, ListContainersResponse, ListImagesRequest,
    ListPodSandboxRequest, ListPodSandboxResponse, PodSandboxFilter,
};
use prost::Message;
use tonic::Status;

use super::message::decode;
use crate::cri::node::matches_labels;

/// What is listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Listed {
    Pods,
    Containers,
    Images,
}

/// A list, and how many changes there had been before it was asked for.
type Kept = Option<(u64, Bytes)>;

/// The last complete lists.
#[derive(Debug, Default)]
pub(super) struct KeptLists {
    changes: AtomicU64,
    pods: Mutex<Kept>,
    containers: Mutex<Kept>,
    images: Mutex<Kept>,
}

impl KeptLists {
    fn of(&self, listed: Listed) -> MutexGuard<'_, Kept> {
        let kept = match listed {
            Listed::Pods => &self.pods,
            Listed::Containers => &self.containers,
            Listed::Images => &self.images,
        };
        kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that something was made, or may have been: it is in no list that was asked for before.
    pub(super) fn change(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of changes, for [`Self::keep`].
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Keeps the answer to a request, if that asked for all. A kubelet does so each second.
    /// `changes` are those before the request was sent.
    pub(super) fn keep(
        &self,
        listed: Listed,
        request: &Bytes,
        answer: &Bytes,
        changes: u64,
    ) -> Result<(), Status> {
        let is_all = match listed {
            Listed::Pods => pod_filter(request)? == PodSandboxFilter::default(),
            Listed::Containers => container_filter(request)? == ContainerFilter::default(),
            Listed::Images => asks_for_all_images(request)?,
        };
        let mut kept = self.of(listed);
        if is_all && kept.as_ref().is_none_or(|(before, _)| *before <= changes) {
            *kept = Some((changes, answer.clone()));
        }
        Ok(())
    }

    /// Returns what the last complete list answers to a request; `None` if there is none, or if it
    /// may lack something.
    pub(super) fn answer(&self, listed: Listed, request: &Bytes) -> Result<Option<Bytes>, Status> {
        let changes = self.changes();
        let kept = self.of(listed).clone();
        let Some((_, kept)) = kept.filter(|(before, _)| *before == changes) else {
            return Ok(None);
        };
        let answer = match listed {
            Listed::Pods => pods(decode(&kept)?, &pod_filter(request)?).encode_to_vec(),
            Listed::Containers => {
                containers(decode(&kept)?, &container_filter(request)?).encode_to_vec()
            }
            Listed::Images if asks_for_all_images(request)? => return Ok(Some(kept)),
            // Names of images have several forms.
            Listed::Images => return Ok(None),
        };
        Ok(Some(answer.into()))
    }
}

fn asks_for_all_images(request: &Bytes) -> Result<bool, Status> {
    let filter = decode::<ListImagesRequest>(request)?.filter;
    let image = filter.and_then(|filter| filter.image);
    Ok(image.is_none_or(|image| image.image.is_empty()))
}

fn pod_filter(request: &Bytes) -> Result<PodSandboxFilter, Status> {
    let request: ListPodSandboxRequest = decode(request)?;
    Ok(request.filter.unwrap_or_default())
}

fn container_filter(request: &Bytes) -> Result<ContainerFilter, Status> {
    let request: ListContainersRequest = decode(request)?;
    Ok(request.filter.unwrap_or_default())
}

fn pods(mut list: ListPodSandboxResponse, filter: &PodSandboxFilter) -> ListPodSandboxResponse {
    let state = filter.state.as_ref().map(|state| state.state);
    list.items.retain(|pod| {
        pod.id.starts_with(&filter.id)
            && state.is_none_or(|state| state == pod.state)
            && matches_labels(&pod.labels, &filter.label_selector)
    });
    list
}

fn containers(
    mut list: ListContainersResponse,
    filter: &ContainerFilter,
) -> ListContainersResponse {
    let state = filter.state.as_ref().map(|state| state.state);
    list.containers.retain(|container| {
        container.id.starts_with(&filter.id)
            && container.pod_sandbox_id.starts_with(&filter.pod_sandbox_id)
            && state.is_none_or(|state| state == container.state)
            && matches_labels(&container.labels, &filter.label_selector)
    });
    list
}

#[cfg(test)]
mod tests {
    use podvisor_cri_messages::{Container, ContainerStateValue, PodSandbox, PodSandboxStateValue};

    use super::*;

    fn encoded(message: &impl Message) -> Bytes {
        message.encode_to_vec().into()
    }

    #[test]
    fn a_complete_list_of_pods_answers_each_question() {
        let pod = |id: &str, state: i32, label: &str| PodSandbox {
            id: id.to_owned(),
            state,
            labels: [("uid".to_owned(), label.to_owned())].into(),
            ..PodSandbox::default()
        };
        let all = ListPodSandboxResponse {
            items: vec![pod("aa", 0, "1"), pod("ab", 1, "2"), pod("bb", 0, "3")],
        };
        let lists = KeptLists::default();
        let request = |filter| encoded(&ListPodSandboxRequest { filter });
        assert_eq!(lists.answer(Listed::Pods, &request(None)).unwrap(), None);
        let of_one = Some(PodSandboxFilter {
            id: "aa".to_owned(),
            ..PodSandboxFilter::default()
        });
        let part = encoded(&ListPodSandboxResponse::default());
        lists
            .keep(Listed::Pods, &request(of_one), &part, 0)
            .unwrap();
        assert_eq!(lists.answer(Listed::Pods, &request(None)).unwrap(), None);
        let keep = |changes| lists.keep(Listed::Pods, &request(None), &encoded(&all), changes);
        keep(0).unwrap();
        let found = |filter| {
            let answer = lists.answer(Listed::Pods, &request(Some(filter)));
            let answer: ListPodSandboxResponse = decode(&answer.unwrap().unwrap()).unwrap();
            let ids = answer.items.into_iter().map(|pod| pod.id);
            ids.collect::<Vec<_>>()
        };
        assert_eq!(found(PodSandboxFilter::default()), ["aa", "ab", "bb"]);
        let of_id = PodSandboxFilter {
            id: "a".to_owned(),
            ..PodSandboxFilter::default()
        };
        assert_eq!(found(of_id), ["aa", "ab"]);
        let of_state = PodSandboxFilter {
            state: Some(PodSandboxStateValue { state: 1 }),
            ..PodSandboxFilter::default()
        };
        assert_eq!(found(of_state), ["ab"]);
        let of_label = PodSandboxFilter {
            label_selector: [("uid".to_owned(), "3".to_owned())].into(),
            ..PodSandboxFilter::default()
        };
        assert_eq!(found(of_label), ["bb"]);

        // One was made: no list that was asked for before has it.
        lists.change();
        keep(0).unwrap();
        assert_eq!(lists.answer(Listed::Pods, &request(None)).unwrap(), None);
        keep(lists.changes()).unwrap();
        assert_eq!(found(PodSandboxFilter::default()).len(), 3);
    }

    #[test]
    fn a_complete_list_of_containers_answers_each_question() {
        let container = |id: &str, pod: &str, state: i32| Container {
            id: id.to_owned(),
            pod_sandbox_id: pod.to_owned(),
            state,
            labels: [("name".to_owned(), id.to_owned())].into(),
            ..Container::default()
        };
        let all = ListContainersResponse {
            containers: vec![container("a", "p", 0), container("b", "q", 1)],
        };
        let lists = KeptLists::default();
        let request = |filter| encoded(&ListContainersRequest { filter });
        let keep = lists.keep(Listed::Containers, &request(None), &encoded(&all), 0);
        keep.unwrap();
        let found = |filter| {
            let answer = lists.answer(Listed::Containers, &request(Some(filter)));
            let answer: ListContainersResponse = decode(&answer.unwrap().unwrap()).unwrap();
            let ids = answer.containers.into_iter().map(|container| container.id);
            ids.collect::<Vec<_>>()
        };
        assert_eq!(found(ContainerFilter::default()), ["a", "b"]);
        for filter in [
            ContainerFilter {
                id: "b".to_owned(),
                ..ContainerFilter::default()
            },
            ContainerFilter {
                pod_sandbox_id: "q".to_owned(),
                ..ContainerFilter::default()
            },
            ContainerFilter {
                state: Some(ContainerStateValue { state: 1 }),
                ..ContainerFilter::default()
            },
            ContainerFilter {
                label_selector: [("name".to_owned(), "b".to_owned())].into(),
                ..ContainerFilter::default()
            },
        ] {
            assert_eq!(found(filter), ["b"]);
        }
    }
}
