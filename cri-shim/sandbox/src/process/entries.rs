//! The containers of a sandbox by id, including those that the guest is creating or deleting.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::super::error::SandboxError as Error;
use super::super::types::RefusalKind;
use super::container::Container;

#[derive(Debug, Clone)]
pub(super) enum Entry {
    /// Its id is taken; the guest creates it.
    Making,
    /// The guest deletes it, or undoes a partial creation.
    Unmaking,
    Made(Arc<Container>),
}

#[derive(Debug, Default)]
pub(super) struct Entries {
    by_id: Mutex<BTreeMap<String, Entry>>,
    changed: Notify,
}

impl Entries {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.by_id.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves the id for a container that is to be created.
    pub(super) fn take(&self, id: &str) -> Result<(), Error> {
        let mut by_id = self.lock();
        if by_id.contains_key(id) {
            return Err(Error::refused(
                RefusalKind::AlreadyExists,
                format!("container {id} exists already"),
            ));
        }
        by_id.insert(id.to_owned(), Entry::Making);
        Ok(())
    }

    pub(super) fn set(&self, id: &str, entry: Option<Entry>) {
        let mut by_id = self.lock();
        match entry {
            Some(entry) => by_id.insert(id.to_owned(), entry),
            None => by_id.remove(id),
        };
        drop(by_id);
        self.changed.notify_waiters();
    }

    pub(super) fn get(&self, id: &str) -> Result<Arc<Container>, Error> {
        match self.lock().get(id) {
            Some(Entry::Made(container)) => Ok(Arc::clone(container)),
            Some(Entry::Making | Entry::Unmaking) => Err(Error::refused(
                RefusalKind::WrongState,
                format!("container {id} is being made or deleted"),
            )),
            None => Err(not_found(id)),
        }
    }

    /// As [`Self::get`], but waits until it is no longer being created.
    pub(super) async fn made(&self, id: &str) -> Result<Arc<Container>, Error> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Registered before the check, so that no notification is missed.
            changed.as_mut().enable();
            if !matches!(self.lock().get(id), Some(Entry::Making)) {
                return self.get(id);
            }
            changed.await;
        }
    }

    /// Returns all containers that exist.
    pub(super) fn all(&self) -> Vec<Arc<Container>> {
        let by_id = self.lock();
        let made = by_id.values().filter_map(|entry| match entry {
            Entry::Made(container) => Some(Arc::clone(container)),
            Entry::Making | Entry::Unmaking => None,
        });
        made.collect()
    }
}

pub(super) fn not_found(id: &str) -> Error {
    Error::refused(RefusalKind::NotFound, format!("no container {id}"))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn one_that_is_being_made_is_waited_for_and_one_that_is_undone_is_not() {
        let entries = Entries::default();
        entries.take("c").unwrap();
        let taken = entries.take("c").unwrap_err();
        assert_eq!(taken.kind(), Some(RefusalKind::AlreadyExists));
        let kind = |found: Result<Arc<Container>, Error>| found.unwrap_err().kind();
        assert_eq!(kind(entries.get("c")), Some(RefusalKind::WrongState));

        let mut made = Box::pin(entries.made("c"));
        assert!((&mut made).now_or_never().is_none());
        let (container, _guest) = Container::sample("c");
        entries.set("c", Some(Entry::Made(Arc::clone(&container))));
        assert!(Arc::ptr_eq(&made.await.unwrap(), &container));

        entries.set("c", Some(Entry::Unmaking));
        let undone = entries.made("c").now_or_never().unwrap();
        assert_eq!(kind(undone), Some(RefusalKind::WrongState));
        entries.set("c", Some(Entry::Making));
        let mut made = Box::pin(entries.made("c"));
        assert!((&mut made).now_or_never().is_none());
        entries.set("c", None);
        assert_eq!(kind(made.await), Some(RefusalKind::NotFound));
    }
}
