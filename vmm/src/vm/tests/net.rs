//! Network cards through their transport.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use podvisor_devices::net::{HEADER_LEN, MemoryNic, MemoryWire, NetDevice, Nic};
use podvisor_devices::net::{Offloads, ReceiveFilter};
use vm_memory::VolatileSlice;

use super::devices::{BUFFER, RINGS, bytes};
use super::*;

/// `VIRTIO_NET_F_CTRL_RX`.
const CTRL_RX: u32 = 1 << 18;
/// `VIRTIO_NET_F_MQ`.
const MQ: u32 = 1 << 22;

/// A network card with two queue pairs, and the host's ends of them.
fn card() -> (NetDevice, Vec<MemoryWire>) {
    let (nics, wires) = (0..2)
        .map(|_| {
            let (nic, wire) = MemoryNic::pair();
            (Box::new(nic) as Box<dyn Nic>, wire)
        })
        .unzip();
    (NetDevice::over(nics).unwrap(), wires)
}

/// The driver's buffer for a frame of a pair.
fn buffer(pair: usize) -> u64 {
    BUFFER + 0x1_0000 * (pair as u64 + 1)
}

/// Sends a frame by each wire; both arrive, each at its own pair.
fn both_receive(guest: &Guest, queues: &mut [DriverQueue], wires: &[MemoryWire], seed: u8) {
    for (pair, wire) in wires.iter().enumerate() {
        let (number, frame) = (2 * pair, [seed + u8::try_from(pair).unwrap(); 60]);
        queues[number].add(&[], &[(buffer(pair), 2048)]);
        guest.device(0).write(0x50, u32::try_from(number).unwrap());
        wire.send(&frame);
        wait_for("the frame", || queues[number].take_used().is_some());
        assert_eq!(bytes(guest, buffer(pair) + 12, 60), frame);
    }
}

fn set_pairs(guest: &Guest, control: &mut DriverQueue, count: u8) -> u8 {
    let command = [4, 0, count, 0];
    guest
        .mem
        .write_slice(&command, GuestAddress(BUFFER))
        .unwrap();
    control.add(&[(BUFFER, 4)], &[(BUFFER + 8, 1)]);
    guest.device(0).write(0x50, 4);
    wait_for("the acknowledgement", || control.take_used().is_some());
    bytes(guest, BUFFER + 8, 1)[0]
}

#[test]
fn queue_pairs_are_notified_one_by_one_and_go_on_in_a_clone() {
    let (device, wires) = card();
    let guest = Guest::start(|vm| vm.net(device));
    let net = guest.device(0);
    assert_eq!(net.read(0x108) & 0xffff, 2, "pairs, behind the status");
    let places: Vec<_> = (0..5)
        .map(|index| (index, RINGS + 0x1_0000 * u64::from(index)))
        .collect();
    let mut queues = net.start_queues(MQ, &places);
    assert_eq!(net.status(), 15);
    assert_eq!(set_pairs(&guest, &mut queues[4], 3), 1);
    assert_eq!(set_pairs(&guest, &mut queues[4], 0), 1);
    assert_eq!(set_pairs(&guest, &mut queues[4], 2), 0);
    both_receive(&guest, &mut queues, &wires, 1);
    for (pair, wire) in wires.iter().enumerate() {
        guest
            .mem
            .write_slice(&[0; 12 + 60], GuestAddress(BUFFER))
            .unwrap();
        queues[2 * pair + 1].add(&[(BUFFER, 72)], &[]);
        net.write(0x50, u32::try_from(2 * pair + 1).unwrap());
        wait_for("the frame", || wire.receive().is_some());
    }

    guest.pause();
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("snapshot");
    guest.vm.snapshot(&place).unwrap();
    let (device, wires) = card();
    let clone = Guest::restore(&Snapshot::open(&place).unwrap(), |vm| vm.net(device));
    let mut queues: Vec<_> = queues
        .iter()
        .map(|queue| queue.clone_in(&clone.mem))
        .collect();
    both_receive(&clone, &mut queues, &wires, 5);

    // A reset in between leaves one pair, for a driver that does not know more.
    for wire in &wires {
        wire.send(&[9; 60]);
    }
    let mut one = clone.device(0).start_queues(0, &places[..3]);
    for _ in 0..2 {
        one[0].add(&[], &[(buffer(0), 2048)]);
    }
    clone.device(0).write(0x50, 0);
    for _ in 0..2 {
        wait_for("the frame", || one[0].take_used().is_some());
    }
    assert!(clone.vm.faults().is_empty());
}

/// A card that makes the requests of a tap on a file that knows none of them.
#[derive(Debug)]
struct NoTap {
    nic: MemoryNic,
    file: File,
    /// The kernel's answers to requests for a filter.
    answers: mpsc::Sender<Option<i32>>,
}

impl Nic for NoTap {
    fn send(&mut self, header: &[u8; HEADER_LEN], frame: &[VolatileSlice<'_>]) -> io::Result<()> {
        self.nic.send(header, frame)
    }

    fn receive(
        &mut self,
        header: &mut [u8; HEADER_LEN],
        frame: &[VolatileSlice<'_>],
    ) -> io::Result<usize> {
        self.nic.receive(header, frame)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.nic.fd()
    }

    fn set_offloads(&mut self, offloads: Offloads) -> io::Result<()> {
        self.nic.set_offloads(offloads)
    }

    fn set_filter(&mut self, _: &ReceiveFilter) -> io::Result<()> {
        let filter = [0u8; 4];
        // SAFETY: TUNSETTXFILTER reads a `struct tun_filter` without addresses, if the file knows
        // it.
        #[allow(unsafe_code)]
        unsafe {
            libc::ioctl(self.file.as_raw_fd(), libc::TUNSETTXFILTER, filter.as_ptr())
        };
        let error = io::Error::last_os_error();
        self.answers.send(error.raw_os_error()).unwrap();
        Err(error)
    }
}

#[test]
fn the_thread_of_a_card_may_ask_for_the_filter_of_a_tap() {
    let (answers, answer) = mpsc::channel();
    let nic = NoTap {
        nic: MemoryNic::pair().0,
        file: File::open("/dev/null").unwrap(),
        answers,
    };
    let guest = Guest::start(|vm| vm.net(NetDevice::new(Box::new(nic)).unwrap()));
    let places = [0, 1, 2].map(|index| (index, RINGS + 0x1_0000 * u64::from(index)));
    let mut queues = guest.device(0).start_queues(CTRL_RX, &places);
    // No longer promiscuous.
    guest
        .mem
        .write_slice(&[0; 3], GuestAddress(BUFFER))
        .unwrap();
    queues[2].add(&[(BUFFER, 3)], &[(BUFFER + 8, 1)]);
    guest.device(0).write(0x50, 2);
    let answer = answer.recv_timeout(PATIENCE).unwrap();
    assert_eq!(answer, Some(libc::ENOTTY), "not EPERM");
    wait_for("the acknowledgement", || queues[2].take_used().is_some());
    assert_eq!(bytes(&guest, BUFFER + 8, 1), [0]);
}
