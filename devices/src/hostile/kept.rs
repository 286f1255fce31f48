//! Chains that a device has taken and not completed.

use std::io::{Read, Write};

use super::subjects::{call, packet};
use super::*;
use crate::vsock::VsockDevice;

/// Makes a device keep a chain after a turn; returns the head.
struct Keep {
    device: &'static str,
    queue: u16,
    /// Whether the device takes other chains of that queue meanwhile.
    takes_others: bool,
    keep: fn(&mut Rig) -> u16,
}

const KEEPS: [Keep; 6] = [
    Keep {
        device: "net",
        queue: 0,
        takes_others: true,
        keep: keep_receive_buffers,
    },
    Keep {
        device: "net with two pairs",
        queue: 0,
        takes_others: true,
        keep: keep_receive_buffers,
    },
    Keep {
        device: "balloon",
        queue: 2,
        takes_others: true,
        keep: |rig| {
            rig.add_sound(2);
            rig.notify(2);
            assert_eq!(rig.drivers[2].outstanding(), 1);
            0
        },
    },
    Keep {
        device: "balloon",
        queue: 3,
        takes_others: false,
        keep: |rig| begin_report(rig, 3),
    },
    Keep {
        device: "balloon",
        queue: 4,
        takes_others: false,
        keep: |rig| begin_report(rig, 4),
    },
    Keep {
        device: "mem",
        queue: 0,
        takes_others: false,
        keep: |rig| {
            // To unplug everything.
            let request = [2, 0, 0, 0];
            rig.mem.write_slice(&request, GuestAddress(DATA)).unwrap();
            let head = rig.drivers[0].add(&[(DATA, 24)], &[(ROOM, 10)]);
            begin(rig, 0);
            head
        },
    },
];

/// Frames are read into buffers for the longest one, of which each needs only the first.
fn keep_receive_buffers(rig: &mut Rig) -> u16 {
    (0..4).for_each(|_| rig.add_sound(0));
    rig.poke(0);
    let used = std::iter::from_fn(|| rig.drivers[0].take_used());
    let used = u16::try_from(used.count()).unwrap();
    assert!((1..4).contains(&used), "{} {used}", rig.subject.name);
    // Heads are numbered from 0.
    used
}

/// Reports more memory than a turn releases.
fn begin_report(rig: &mut Rig, queue: u16) -> u16 {
    let head = rig.drivers[usize::from(queue)].add(&[], &[(DATA, 4 << 20); 9]);
    begin(rig, queue);
    head
}

/// Lets the device work for one turn, which is not enough.
fn begin(rig: &mut Rig, queue: u16) {
    rig.write(reg::QUEUE_NOTIFY, queue.into());
    rig.kicks[usize::from(queue)].read().unwrap();
    let progress = rig.worker.with(|worker| worker.on_queue(queue).unwrap());
    assert_eq!(progress, Progress::More, "{}", rig.subject.name);
    assert_eq!(rig.drivers[usize::from(queue)].outstanding(), 1);
}

fn for_each_kept_chain(test: impl Fn(&mut Rig, &Keep, u16)) {
    for keep in &KEEPS {
        let subjects = subjects();
        let subjects: Vec<_> = subjects
            .into_iter()
            .filter(|subject| subject.name == keep.device)
            .collect();
        assert_eq!(subjects.len(), 2, "{} on either transport", keep.device);
        for subject in subjects {
            let mut rig = Rig::started(subject);
            let head = (keep.keep)(&mut rig);
            test(&mut rig, keep, head);
            rig.restart();
            rig.works();
        }
    }
}

#[test]
fn a_head_that_the_device_keeps_is_a_fault_or_waits_for_its_end() {
    for_each_kept_chain(|rig, keep, head| {
        let &Keep { device, queue, .. } = keep;
        rig.drivers[usize::from(queue)].make_available(head);
        rig.poke(queue);
        if keep.takes_others {
            assert_eq!(rig.status(), DRIVER_OK | NEEDS_RESET, "{device} {queue}");
        } else {
            let driver = &mut rig.drivers[usize::from(queue)];
            let ids: Vec<_> = std::iter::from_fn(|| driver.take_used())
                .map(|used| used.id)
                .collect();
            assert_eq!(ids, [u32::from(head); 2], "{device} {queue}");
            assert_eq!(rig.status(), DRIVER_OK, "{device} {queue}");
        }
    });
}

/// Checks that the device uses nothing of what it had before a reset.
fn has_forgotten(rig: &mut Rig) {
    let name = rig.subject.name;
    let before = vec![0xee; 0x2000];
    rig.mem.write_slice(&before, GuestAddress(ROOM)).unwrap();
    for queue in rig.queues() {
        rig.poke(queue);
        let used = rig.drivers[usize::from(queue)].take_used();
        assert_eq!(used, None, "{name} {queue}");
    }
    let mut after = vec![0; before.len()];
    rig.mem.read_slice(&mut after, GuestAddress(ROOM)).unwrap();
    assert!(after == before, "{name} wrote to a buffer that it had");
}

#[test]
fn a_reset_forgets_chains_that_the_device_keeps() {
    for_each_kept_chain(|rig, _, _| {
        rig.restart();
        has_forgotten(rig);
    });
}

/// Returns the process's end of a stream to the guest, which has accepted it.
fn stream(rig: &mut Rig) -> std::os::unix::net::UnixStream {
    let connected = call(rig, |device: &mut VsockDevice| device.connect(5));
    let stream = connected.unwrap();
    rig.add_sound(0);
    rig.work(|worker| worker.on_backend().unwrap());
    assert!(rig.drivers[0].take_used().is_some(), "a request");
    let mut request = [0; 44];
    rig.mem
        .read_slice(&mut request, GuestAddress(ROOM))
        .unwrap();
    let mut response = packet(2);
    // The ports the other way round, and room for 64 KiB.
    response[16..20].copy_from_slice(&request[20..24]);
    response[20..24].copy_from_slice(&request[16..20]);
    response[36..40].copy_from_slice(&0x1_0000u32.to_le_bytes());
    rig.mem.write_slice(&response, GuestAddress(DATA)).unwrap();
    rig.drivers[1].add(&[(DATA, 44)], &[]);
    rig.notify(1);
    assert!(rig.drivers[1].take_used().is_some());
    stream
}

fn for_each_stream(test: impl Fn(&mut Rig, std::os::unix::net::UnixStream)) {
    let subjects = subjects().into_iter();
    for subject in subjects.filter(|subject| subject.name == "vsock") {
        let mut rig = Rig::started(subject);
        let stream = stream(&mut rig);
        test(&mut rig, stream);
        rig.restart();
        rig.works();
    }
}

#[test]
fn a_head_that_is_taken_for_the_same_read_is_a_fault() {
    for_each_stream(|rig, mut stream| {
        // One after the other, which is valid, then two at once.
        let head = rig.drivers[0].add(&[], &[(ROOM, 48)]);
        (0..8).for_each(|_| rig.drivers[0].make_available(head));
        stream.write_all(&[7; 64]).unwrap();
        rig.work(|worker| worker.on_backend().unwrap());
        assert_eq!(rig.status(), DRIVER_OK | NEEDS_RESET);
    });
}

#[test]
fn a_reset_forgets_streams_and_the_buffers_for_them() {
    for_each_stream(|rig, mut stream| {
        (0..12).for_each(|_| {
            rig.drivers[0].add(&[], &[(ROOM, 48)]);
        });
        // Some buffers are taken and put back.
        stream.write_all(&[7; 4 * 5 + 1]).unwrap();
        rig.work(|worker| worker.on_backend().unwrap());
        let used = std::iter::from_fn(|| rig.drivers[0].take_used());
        assert_eq!(used.count(), 6);
        stream.write_all(&[7; 64]).unwrap();
        rig.restart();
        // It ended with data that were not read.
        let error = stream.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        has_forgotten(rig);
    });
}
