//! Copies of one disk, for several engines.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use super::disk::{Disk, Operation, Submitted, Topology};
use crate::GuestRam;

/// A disk for a device with several queues, cloned by [`Disk::try_clone`] for each queue. Created
/// on the thread of the device's owner, which is allowed to create descriptors and rings.
#[derive(Debug)]
pub struct DiskClones {
    first: Box<dyn Disk>,
    others: Vec<Box<dyn Disk>>,
}

impl DiskClones {
    /// Clones the disk for this number of queues.
    #[must_use]
    pub fn new(disk: Box<dyn Disk>, queues: usize) -> Self {
        let mut others = Vec::new();
        while others.len() < queues.saturating_sub(1) {
            match disk.try_clone() {
                Ok(Some(copy)) => others.push(copy),
                Ok(None) => break,
                Err(error) => {
                    tracing::warn!(
                        %error,
                        "disk: failed to clone the disk; queues share one engine"
                    );
                    break;
                }
            }
        }
        Self {
            first: disk,
            others,
        }
    }

    /// Returns a disk for each of this number of engines. If there are too few copies, the engines
    /// take turns: requests are carried out one after the other.
    pub(super) fn into_disks(mut self, engines: usize) -> Vec<Box<dyn Disk>> {
        let needed = engines.saturating_sub(1);
        if self.others.len() >= needed {
            self.others.truncate(needed);
            self.others.insert(0, self.first);
            return self.others;
        }
        let disk = Arc::new(Mutex::new(self.first));
        let share = || -> Box<dyn Disk> { Box::new(SharedDisk(disk.clone())) };
        (0..engines).map(|_| share()).collect()
    }
}

/// A disk that cannot be cloned, shared by several engines: each request is complete when
/// [`Disk::submit`] returns.
#[derive(Debug)]
struct SharedDisk(Arc<Mutex<Box<dyn Disk>>>);

impl SharedDisk {
    fn with<R>(&self, work: impl FnOnce(&mut dyn Disk) -> R) -> R {
        work(&mut **self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Disk for SharedDisk {
    fn len(&self) -> u64 {
        self.with(|disk| disk.len())
    }

    fn topology(&self) -> Topology {
        self.with(|disk| disk.topology())
    }

    fn refresh(&mut self) -> io::Result<()> {
        self.with(|disk| disk.refresh())
    }

    fn submit(&mut self, mem: &GuestRam, token: u16, operation: Operation<'_, '_>) -> Submitted {
        Submitted::Done(self.with(|disk| {
            if let Submitted::Done(result) = disk.submit(mem, token, operation) {
                return result;
            }
            disk.commit()?;
            loop {
                // Nothing else is in flight.
                if let Some(completion) = disk.completed() {
                    return completion.result;
                }
                disk.wait()?;
            }
        }))
    }

    fn settle(&mut self) -> io::Result<()> {
        self.with(|disk| disk.settle())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk that cannot be cloned, and becomes a sector longer each time it is looked at.
    #[derive(Debug)]
    struct Grows(u64);

    impl Disk for Grows {
        fn len(&self) -> u64 {
            self.0
        }
        fn refresh(&mut self) -> io::Result<()> {
            self.0 += 512;
            Ok(())
        }
        fn submit(&mut self, _: &GuestRam, _: u16, _: Operation<'_, '_>) -> Submitted {
            Submitted::Done(Ok(()))
        }
    }

    #[test]
    fn engines_that_share_a_disk_see_that_it_has_grown() {
        let clones = DiskClones::new(Box::new(Grows(512)), 3);
        let mut disks = clones.into_disks(3);
        assert_eq!(disks.len(), 3);
        disks[1].refresh().unwrap();
        assert!(disks.iter().all(|disk| disk.len() == 1024));
    }
}
