//! A driver that does arbitrary things to the rings of a disk and of a socket device, through KVM,
//! while the VM's owner pauses it, reads counters and checks for faults.

use std::sync::atomic::AtomicBool;
use std::thread;

use podvisor_devices::blk::{BlockDevice, IoEngine};
use podvisor_devices::vsock::VsockDevice;

use super::devices::{BUFFER, RINGS, bytes, fill, request};
use super::*;
use crate::vm::State;

/// Attacks in total.
const ATTACKS: u32 = 200;
/// The number of attacks after which the driver resets the device.
const BETWEEN_RESETS: u32 = 8;

/// How much more memory the process may use at one time during the attacks, in KiB. Each asks for
/// up to 4 GiB.
const MAX_GROWTH: u64 = 128 << 10;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Returns where the rings of a queue of any device are.
fn rings(device: u64, queue: u64) -> u64 {
    RINGS + device * 0x8_0000 + queue * 0x1_0000
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn half(&mut self) -> u16 {
        self.next() as u16
    }

    /// Returns an address in memory, in rings, or nowhere.
    fn place(&mut self) -> u64 {
        match self.below(4) {
            0 => self.next() << 20,
            1 => rings(self.below(2), self.below(3)) + self.below(0x1_0000),
            _ => BUFFER + self.below(0x4_0000),
        }
    }
}

/// One attack on a queue's rings, which lie at `base`.
fn attack(random: &mut Random, guest: &Guest, queue: &mut DriverQueue, base: u64) {
    match random.below(11) {
        0 => queue.make_available(16 + random.half() % 0x7000),
        1 => queue.set_avail_idx(random.half()),
        2 => {
            // A chain with a loop.
            for (one, other) in [(0, 1), (1, 0)] {
                queue.descriptor(one, BUFFER, 16, NEXT, other);
            }
            queue.make_available(0);
        }
        3 => {
            queue.descriptor(3, random.place(), random.next() as u32, NEXT | WRITE, 4);
            queue.descriptor(4, random.place(), 16, random.half() & 7, 5);
            queue.make_available(3);
        }
        4 => {
            // A table in itself, or of an odd length.
            let len = [16, 32, 33, 0, 0xffff_fff0][random.below(5) as usize];
            let table = BUFFER + 0x2_0000;
            let entry = [table, 32 | u64::from(INDIRECT | NEXT) << 32 | 1 << 48];
            guest.mem.write_obj(entry, GuestAddress(table)).unwrap();
            queue.descriptor(5, table, len, INDIRECT, 0);
            queue.make_available(5);
        }
        5 => {
            for head in 0..15 {
                queue.descriptor(head, BUFFER, 0, NEXT | random.half() & WRITE, head + 1);
            }
            queue.make_available(0);
        }
        6 => {
            // The same head repeatedly.
            queue.descriptor(7, BUFFER, 64, WRITE, 0);
            for _ in 0..random.below(40) {
                queue.make_available(7);
            }
        }
        7 => {
            // Whole descriptors: parts of valid ones might point at the guest's code.
            let at = GuestAddress(base + 16 * random.below(0xc00));
            let noise: Vec<u8> = (0..64).map(|_| random.next() as u8).collect();
            guest.mem.write_slice(&noise, at).unwrap();
            queue.make_available(random.half() % 16);
        }
        _ => {
            // What some driver may send, of any kind and to any address.
            let header: Vec<u8> = (0..44).map(|_| random.next() as u8 % 14).collect();
            let at = BUFFER + 0x1_0000 + 64 * random.below(16);
            guest.mem.write_slice(&header, GuestAddress(at)).unwrap();
            let len = 1 + random.below(0x2_0000) as u32;
            let readable = [(at, 16 + random.below(29) as u32), (random.place(), 512)];
            let writable = [(random.place(), len), (BUFFER, 1)];
            let count = random.below(3) as usize;
            queue.add(
                &readable[..count.min(2)],
                &writable[..random.below(3) as usize],
            );
        }
    }
}

/// Writes registers that a driver should not touch.
fn meddle(random: &mut Random, device: TestDevice<'_>) {
    match random.below(8) {
        0 => device.write(0x70, random.next() as u32),
        1 => device.write(0x70, 15 | 128),
        2 => {
            device.write(0x30, random.below(4) as u32);
            device.write(0x44, 0);
        }
        3 => {
            device.write(0x30, 0);
            device.write(0x80, random.next() as u32);
            device.write(0x38, random.next() as u32);
        }
        4 => device.write(4 * random.below(0x100), random.next() as u32),
        5 => device.write(0x64, random.next() as u32 % 4),
        _ => {
            device.read(4 * random.below(0x100));
        }
    }
}

/// Returns the queues of a device that a driver has just started.
fn start(device: TestDevice<'_>, number: u64) -> Vec<DriverQueue> {
    let features = if number == 0 { 1 << 12 } else { 0 };
    let places = [0, 1, 2].map(|queue| (queue, rings(number, queue.into())));
    let queues = device.start_queues(features, &places);
    assert_eq!(device.status(), 15);
    queues
}

/// Checks that a well-behaved driver is served correctly.
fn works(guest: &Guest, number: u64, queues: &mut [DriverQueue]) {
    let device = guest.device(number);
    if number == 0 {
        assert_eq!(request(device, &mut queues[0], 0, 512), 0);
        assert_eq!(bytes(guest, BUFFER, 4), [7; 4]);
        return;
    }
    queues[0].add(&[], &[(BUFFER + 0x1000, 256)]);
    // A request for a port without a listener is refused.
    let words = [3u32, 0, 2, 0, 1, 77, 0, 1 | 1 << 16, 0, 0x1_0000, 0];
    guest.mem.write_obj(words, GuestAddress(BUFFER)).unwrap();
    queues[1].add(&[(BUFFER, 44)], &[]);
    device.write(0x50, 1);
    wait_for("the refusal", || queues[0].take_used().is_some());
    assert_eq!(bytes(guest, BUFFER + 0x1000 + 30, 2), [3, 0]);
}

fn disk(engine: IoEngine) -> BlockDevice {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[7; 64 * 512]).unwrap();
    let disk = BlockDevice::from_file_with(file, engine).unwrap();
    // Its content stays.
    disk.read_only().queues(3)
}

/// Pauses, counts and resumes until the driver has ended; returns how often.
fn own(vm: &Vm, driver_ended: &AtomicBool) -> u32 {
    let mut rounds = 0;
    while !driver_ended.load(Ordering::SeqCst) {
        pause(vm);
        assert_eq!(vm.state(), State::Paused);
        let counted = vm.counters();
        vm.resume().unwrap();
        assert!(counted.iter().any(|device| device.device == "vsock0"));
        assert!(vm.faults().is_empty(), "a guest made the host fail");
        rounds += 1;
    }
    rounds
}

/// Forgets the peak of this process's memory use, and returns its memory use, in KiB.
fn begin_peak() -> u64 {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    peak()
}

/// Returns the peak memory use of this process, in KiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap()
}

fn attacked(engine: IoEngine, seed: u64) {
    let device = VsockDevice::in_process(3).unwrap();
    let guest = Guest::start(|vm| vm.block(disk(engine)).vsock(device).rng());
    let neighbour = Guest::start(VmBuilder::rng);
    let mut random_bytes = guest.device(2).start(rings(3, 0));
    let mut of_neighbour = neighbour.device(0).start(RINGS);
    let before = begin_peak();
    let ended = AtomicBool::new(false);
    let pauses = thread::scope(|scope| {
        let owner = scope.spawn(|| own(&guest.vm, &ended));
        let mut random = Random(seed);
        for round in 0..ATTACKS / BETWEEN_RESETS {
            let number = u64::from(round % 2);
            let device = guest.device(number);
            let mut queues = start(device, number);
            works(&guest, number, &mut queues);
            for _ in 0..BETWEEN_RESETS {
                let which = random.below(3);
                let queue = &mut queues[which as usize];
                attack(&mut random, &guest, queue, rings(number, which));
                device.write(0x50, which as u32);
                if random.below(3) == 0 {
                    meddle(&mut random, device);
                }
            }
            // Work in progress may still write its buffers, which others use next.
            device.write(0x70, 0);
            wait_for("the end of a reset", || device.status() == 0);
            fill(guest.device(2), &mut random_bytes, 8);
            fill(neighbour.device(0), &mut of_neighbour, 8);
        }
        for number in 0..2 {
            let mut queues = start(guest.device(number), number);
            works(&guest, number, &mut queues);
        }
        ended.store(true, Ordering::SeqCst);
        owner.join().unwrap()
    });
    let faults = ["blk0", "vsock0"].map(|name| guest.counter(name, "faults"));
    let after = peak();
    println!(
        "{engine:?}: {ATTACKS} attacks, {pauses} pauses, faults of disk and socket {faults:?}, \
         resident at most {before} KiB before and {after} KiB after"
    );
    assert!(
        after.saturating_sub(before) <= MAX_GROWTH,
        "{before} KiB became {after} KiB"
    );
    assert!(pauses > 0 && faults.iter().all(|faults| *faults > 0));
    assert!(neighbour.vm.faults().is_empty());
    let vm = guest.vm.clone();
    in_time("stop", move || vm.stop()).unwrap();
}

/// In a separate process, whose memory is measured.
#[test]
fn attacks_on_rings_hold_up_neither_owner_nor_neighbours_and_a_reset_mends_all() {
    crate::vm::testing::in_own_process(
        "vm::tests::attacks::\
         attacks_on_rings_hold_up_neither_owner_nor_neighbours_and_a_reset_mends_all",
        || attacked(IoEngine::Sync, 0x9e37_79b9_7f4a_7c15),
    );
}

/// In a separate process, whose memory is measured.
#[test]
fn attacks_on_rings_whose_requests_the_kernel_carries_out() {
    crate::vm::testing::in_own_process(
        "vm::tests::attacks::attacks_on_rings_whose_requests_the_kernel_carries_out",
        || attacked(IoEngine::Uring, 0xd1b5_4a32_d192_ed03),
    );
}
