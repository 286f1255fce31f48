//! Events that a guest can make the host log.

use std::io;
use std::sync::atomic::AtomicUsize;

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use super::*;

/// Counts log events.
struct Lines(Arc<AtomicUsize>);

impl Subscriber for Lines {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, SeqCst);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// For example, an overlay on a file system that is full.
#[derive(Debug)]
struct Full;

impl Disk for Full {
    fn len(&self) -> u64 {
        4096
    }
    fn submit(&mut self, _: &GuestRam, _: u16, _: Operation<'_, '_>) -> Submitted {
        Submitted::Done(Err(io::ErrorKind::StorageFull.into()))
    }
    fn settle(&mut self) -> io::Result<()> {
        Err(io::ErrorKind::StorageFull.into())
    }
}

#[test]
fn a_driver_that_resets_a_disk_again_and_again_does_not_fill_the_log() {
    let lines = Arc::new(AtomicUsize::new(0));
    tracing::subscriber::with_default(Lines(lines.clone()), || {
        let mut rig = Rig::over(BlockDevice::new(Box::new(Full)));
        for _ in 0..100 {
            stop(&mut rig.device);
            rig.device.reset();
            start(&mut rig.device, &[&rig.driver], &rig.irq, FLUSH);
        }
    });
    assert_eq!(lines.load(SeqCst), 1);
}
