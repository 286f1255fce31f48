//! Events that a guest can make the host log.

use std::io;

use super::*;
use crate::logged::events;

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
    let events = events(|| {
        let mut rig = Rig::over(BlockDevice::new(Box::new(Full)));
        for _ in 0..100 {
            stop(&mut rig.device);
            rig.device.reset();
            start(&mut rig.device, &[&rig.driver], &rig.irq, FLUSH);
        }
    });
    assert_eq!(events, 1);
}

#[test]
fn requests_that_fail_again_and_again_do_not_fill_the_log() {
    let events = events(|| {
        let mut rig = Rig::over(BlockDevice::new(Box::new(Full)));
        for _ in 0..100 {
            assert_eq!(rig.write(0, 512), 1);
            rig.driver.take_used().unwrap();
        }
    });
    assert_eq!(events, 1);
}
