//! Places of which one namespace cannot have all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Places that are taken and given back.
#[derive(Debug, Clone)]
pub(crate) struct Shares {
    most: usize,
    each: usize,
    taken: Arc<Mutex<HashMap<String, usize>>>,
}

impl Shares {
    /// `most` places, of which a namespace has at most `each`.
    pub(crate) fn new(most: usize, each: usize) -> Self {
        Self {
            most,
            each,
            taken: Arc::default(),
        }
    }

    /// Takes a place for a namespace, if it has not too many, and one is left.
    pub(crate) fn take(&self, namespace: &str) -> Option<Share> {
        let mut taken = lock(&self.taken);
        // Each has one at least: the sum is of a few.
        let all: usize = taken.values().sum();
        let own = taken.get(namespace).copied().unwrap_or_default();
        if all >= self.most || own >= self.each {
            return None;
        }
        taken.insert(namespace.to_owned(), own + 1);
        Some(Share {
            namespace: namespace.to_owned(),
            taken: Arc::clone(&self.taken),
        })
    }
}

/// A place, which is given back when this is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct Share {
    namespace: String,
    taken: Arc<Mutex<HashMap<String, usize>>>,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = lock(&self.taken);
        match taken.get_mut(&self.namespace) {
            Some(own) if *own > 1 => *own -= 1,
            _ => {
                taken.remove(&self.namespace);
            }
        }
    }
}

fn lock(taken: &Mutex<HashMap<String, usize>>) -> MutexGuard<'_, HashMap<String, usize>> {
    taken.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_namespace_does_not_have_all_places() {
        let shares = Shares::new(3, 2);
        let (one, two) = (shares.take("a"), shares.take("a"));
        assert!(one.is_some() && two.is_some());
        assert!(shares.take("a").is_none());
        let other = shares.take("b");
        assert!(other.is_some());
        assert!(shares.take("c").is_none(), "there are no more");
        drop(one);
        assert!(shares.clone().take("a").is_some());
        drop((two, other));
        assert!(lock(&shares.taken).is_empty(), "nothing is left of a name");
    }
}
