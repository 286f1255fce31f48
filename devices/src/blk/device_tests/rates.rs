//! Disks with a rate.

use super::*;

fn rate(per_second: u64, burst: u64) -> Option<Rate> {
    Some(Rate { per_second, burst })
}

/// Runs the event loop until nothing wakes it up.
fn work(rig: &mut Rig) {
    while backend_readable(&rig.device) {
        assert_eq!(rig.device.on_backend().unwrap(), Progress::Idle);
    }
}

#[test]
fn a_rate_holds_requests_back_and_a_timer_brings_them() {
    // One request, and the next after 512 seconds; and all of them, after 10 ms each.
    for (bytes, operations, wanted) in [
        (rate(1, 1), None, 1),
        (rate(51_200, 1024), None, 5),
        (None, rate(100, 2), 5),
    ] {
        let device = disk_of_8_sectors().limit(bytes, operations);
        let mut rig = Rig::over(device.unwrap());
        rig.header(0, 3);
        for n in 0..5 {
            let data = (DATA + n * 512, 512);
            rig.driver.add(&[(HEADER, 16)], &[data, (STATUS, 1)]);
        }
        while rig.device.on_queue(0).unwrap() == Progress::More {}
        let mut done = 0;
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while done < wanted {
            assert!(std::time::Instant::now() < deadline);
            done += usize::from(rig.driver.take_used().is_some());
            work(&mut rig);
        }
        // A notification does not speed up anything.
        assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
        assert!(rig.driver.take_used().is_none());
        let counters = rig.device.info().counters.read();
        let counter = |name| counters.iter().find(|c| c.name == name).unwrap().value;
        assert_eq!(counter("reads"), done as u64);
        assert!(counter("limited") > 0 || wanted == 5);
        // The requests that were held back are still in the driver's ring.
        let mut queue = rig.device.stop_queue(0).unwrap();
        let left = std::iter::from_fn(|| queue.next().unwrap());
        assert_eq!(left.count(), 5 - done);
    }
}

#[test]
fn another_disk_keeps_to_the_rate_of_its_slot() {
    let device = disk_of_8_sectors().limit(rate(1, 1024), None).unwrap();
    let mut rig = Rig::over(device);
    assert_eq!(rig.read(0, 512), 0);
    rig.device.replace_disk(Box::new(EmptySlot), "other");
    rig.device.replace_disk(
        open_disk(tempfile_of(4096), IoEngine::Uring).unwrap(),
        "third",
    );
    rig.header(0, 0);
    rig.driver.add(&[(HEADER, 16)], &[(DATA, 512), (STATUS, 1)]);
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
    rig.driver.add(&[(HEADER, 16)], &[(DATA, 512), (STATUS, 1)]);
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
    rig.driver.take_used().unwrap();
    // Completions of the new disk are reported; the third request waits.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while rig.driver.take_used().is_none() {
        assert!(std::time::Instant::now() < deadline);
        work(&mut rig);
    }
    assert_eq!(rig.status(), 0);
    work(&mut rig);
    assert!(rig.driver.take_used().is_none());
}

#[test]
fn zeroes_that_the_host_may_have_to_write_count_as_bytes() {
    let mut rig = Rig::over(disk_of_8_sectors().limit(rate(1, 1), None).unwrap());
    for sector in 0..3_u64 {
        let at = HEADER + 0x100 * sector;
        let mut range = sector.to_le_bytes().to_vec();
        range.extend([1, 0, 0, 0, 0, 0, 0, 0]);
        rig.mem
            .write_slice(&WRITE_ZEROES.to_le_bytes(), GuestAddress(at))
            .unwrap();
        rig.mem.write_slice(&[0; 12], GuestAddress(at + 4)).unwrap();
        rig.mem.write_slice(&range, GuestAddress(at + 16)).unwrap();
        rig.driver.add(&[(at, 16), (at + 16, 16)], &[(STATUS, 1)]);
    }
    while rig.device.on_queue(0).unwrap() == Progress::More {}
    rig.driver.take_used().unwrap();
    assert_eq!(rig.status(), 0);
    assert!(
        rig.driver.take_used().is_none(),
        "the second one waits for 512 s"
    );
}

#[test]
fn a_request_that_starts_over_after_a_stop_is_not_charged_twice() {
    // Two of these requests, one after the other; the rest after years.
    let cost = 11 * 0x8_0000;
    let disk = Noting::default();
    let mut rig = long_request_of(
        BlockDevice::new(Box::new(disk))
            .limit(rate(1, 2 * cost), None)
            .unwrap(),
    );
    for _ in 0..3 {
        assert_eq!(rig.device.on_queue(0).unwrap(), Progress::More);
        let mut queues = stop(&mut rig.device);
        rig.device.start_queue(queues.remove(0)).unwrap();
    }
    while rig.device.on_queue(0).unwrap() == Progress::More {}
    assert!(rig.driver.take_used().is_some());
    assert_eq!(crate::testing::counter(&rig.device, "limited"), 0);
}
