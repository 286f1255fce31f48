//! The queues of a device, each present while it runs.

use super::{Queue, StartError};

/// A slot for each queue that a device type has.
#[derive(Debug)]
pub(crate) struct Queues(Box<[Option<Queue>]>);

impl Queues {
    /// Creates slots for `count` queues, all of them empty.
    pub(crate) fn new(count: usize) -> Self {
        Self((0..count).map(|_| None).collect())
    }

    /// The number of slots.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Adds a queue that runs: [`super::VirtioDevice::start_queue`].
    pub(crate) fn start(&mut self, queue: Queue) -> Result<(), StartError> {
        let index = queue.index();
        match self.0.get_mut(usize::from(index)) {
            Some(place @ None) => *place = Some(queue),
            Some(Some(_)) => return Err(StartError::Running { index }),
            None => return Err(StartError::NoSuchQueue { index }),
        }
        Ok(())
    }

    /// Removes a queue that no longer runs: [`super::VirtioDevice::stop_queue`].
    pub(crate) fn stop(&mut self, index: u16) -> Option<Queue> {
        self.0.get_mut(usize::from(index))?.take()
    }

    /// Returns a queue that runs.
    pub(crate) fn get(&mut self, index: u16) -> Option<&mut Queue> {
        self.0.get_mut(usize::from(index))?.as_mut()
    }

    /// Returns all slots, for callers that need several queues at the same time.
    pub(crate) fn places(&mut self) -> &mut [Option<Queue>] {
        &mut self.0
    }

    /// The queues that run.
    pub(crate) fn running(&mut self) -> impl Iterator<Item = &mut Queue> {
        self.0.iter_mut().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{CountingInterrupt, DriverQueue, memory};
    use std::sync::Arc;

    #[test]
    fn a_queue_is_started_once_in_its_own_place() {
        let driver = DriverQueue::new(&memory(1 << 18), 0x10000, 4);
        let queue = |index| driver.device_queue(index, Arc::new(CountingInterrupt::default()));
        let mut queues = Queues::new(2);
        assert_eq!((queues.len(), queues.running().count()), (2, 0));
        queues.start(queue(1)).unwrap();
        assert!(queues.get(0).is_none() && queues.places()[0].is_none());
        assert_eq!(queues.get(1).unwrap().index(), 1);
        let twice = queues.start(queue(1));
        assert!(matches!(twice, Err(StartError::Running { index: 1 })));
        let unknown = queues.start(queue(2));
        assert!(matches!(unknown, Err(StartError::NoSuchQueue { index: 2 })));
        assert_eq!(queues.running().count(), 1);
        assert!(queues.stop(0).is_none() && queues.stop(2).is_none());
        assert_eq!(queues.stop(1).unwrap().index(), 1);
        assert!(queues.get(1).is_none() && queues.stop(1).is_none());
    }
}
