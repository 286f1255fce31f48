//! The pods whose process needs the rights of the node's root.

use std::collections::VecDeque;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Most pods that are remembered to need the node's root.
const REMEMBERED: usize = 4096;

/// What is known of the node and its pods.
#[derive(Debug, Default)]
pub(in crate::cri) struct HostUsers {
    /// Why the node maps no users; found out once.
    pub(in crate::cri) tried: OnceLock<Option<String>>,
    /// The pods that have a volume without mapped users, by the ids that Kubernetes gave them.
    pods: Mutex<VecDeque<String>>,
}

impl HostUsers {
    pub(in crate::cri) fn has(&self, uid: &str) -> bool {
        let pods = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
        pods.iter().any(|known| known == uid)
    }

    pub(in crate::cri) fn add(&self, uid: &str) {
        let mut pods = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
        if pods.iter().all(|known| known != uid) {
            pods.push_back(uid.to_owned());
            if pods.len() > REMEMBERED {
                pods.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_that_need_the_hosts_root_are_remembered_within_bounds() {
        let known = HostUsers::default();
        for number in 0..REMEMBERED + 2 {
            known.add(&number.to_string());
            known.add(&number.to_string());
        }
        assert_eq!(known.pods.lock().unwrap().len(), REMEMBERED);
        assert!(known.has("2") && !known.has("1"));
    }
}
