//! The devices under attack.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::net::UnixStream;

use super::{On, Rig};
use crate::balloon::BalloonDevice;
use crate::blk::{BlockDevice, FileDisk};
use crate::console::{ConsoleDevice, PortsDevice};
use crate::fs::FsDevice;
use crate::mem::{BLOCK_SIZE, MemDevice, MemRegion};
use crate::net::{MemoryNic, NetDevice, Nic};
use crate::pmem::PmemDevice;
use crate::rng::RngDevice;
use crate::virtio::VirtioDevice;
use crate::vsock::VsockDevice;

/// A chain that its device serves.
#[derive(Clone, Debug, Default)]
pub(super) struct Sound {
    pub(super) readable: Vec<u8>,
    /// Bytes of the device-writable part.
    pub(super) room: u32,
}

/// Makes data arrive for the driver.
pub(super) type Arrive = fn(&mut Rig);

/// A device and how it is used.
pub(super) struct Subject {
    pub(super) name: &'static str,
    pub(super) on: On,
    pub(super) device: Option<Box<dyn VirtioDevice>>,
    pub(super) sound: BTreeMap<u16, Sound>,
    /// Queues whose chains are taken only when data arrives.
    pub(super) arrivals: BTreeMap<u16, Arrive>,
    /// A queue whose buffer a driver makes available again as soon as it is used.
    pub(super) standing: Option<u16>,
    /// Makes the data arrive there.
    pub(super) feed: Box<dyn FnMut()>,
    /// Files that the device works on.
    _dir: Option<tempfile::TempDir>,
}

impl Subject {
    fn new(name: &'static str, device: impl VirtioDevice) -> Self {
        Self {
            name,
            on: On::Mmio,
            device: Some(Box::new(device)),
            sound: BTreeMap::new(),
            arrivals: BTreeMap::new(),
            standing: None,
            feed: Box::new(|| ()),
            _dir: None,
        }
    }

    fn sound(mut self, queue: u16, readable: &[u8], room: u32) -> Self {
        let readable = readable.to_vec();
        self.sound.insert(queue, Sound { readable, room });
        self
    }

    fn arrives(mut self, queue: u16, arrive: Arrive) -> Self {
        self.arrivals.insert(queue, arrive);
        self
    }

    fn stands(mut self, queue: u16) -> Self {
        self.standing = Some(queue);
        self
    }

    fn fed_by(mut self, feed: impl FnMut() + 'static) -> Self {
        self.feed = Box::new(feed);
        self
    }
}

/// One of each device, on either transport.
pub(super) fn subjects() -> Vec<Subject> {
    let on = |on| {
        let all = [
            balloon(),
            blk(),
            console(),
            fs(),
            mem(),
            net(),
            net_pairs(),
            pmem(),
            ports(),
            rng(),
            vsock(),
        ];
        all.map(|subject| Subject { on, ..subject })
    };
    [on(On::Mmio), on(On::Pci)].into_iter().flatten().collect()
}

fn fed(rig: &mut Rig) {
    (rig.subject.feed)();
}

/// Calls the device, as its owner does.
pub(super) fn call<D: VirtioDevice, R>(rig: &Rig, work: impl FnOnce(&mut D) -> R) -> R {
    rig.worker.with(|worker| {
        worker.with_device(|device| {
            let device: &mut dyn std::any::Any = device;
            work(device.downcast_mut().unwrap())
        })
    })
}

fn balloon() -> Subject {
    // A page that does not exist, a statistic, and reports of a page.
    Subject::new("balloon", BalloonDevice::new())
        .sound(0, &u32::MAX.to_le_bytes(), 0)
        .sound(1, &u32::MAX.to_le_bytes(), 0)
        .sound(2, &[4; 10], 0)
        .sound(3, &[], 4096)
        .sound(4, &[], 4096)
        // Statistics are kept until others are wanted.
        .arrives(2, |rig| {
            call(rig, |device: &mut BalloonDevice| {
                device.request_stats(|_| ()).unwrap()
            });
        })
}

fn blk() -> Subject {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let disk = FileDisk::new(file).unwrap();
    // A read of sector 0, and the status.
    Subject::new("blk", BlockDevice::new(Box::new(disk))).sound(0, &[0; 16], 513)
}

fn console() -> Subject {
    let (input, mut keyboard) = UnixStream::pair().unwrap();
    let device = ConsoleDevice::new(Box::new(std::io::sink()));
    Subject::new("console", device.input(input.into()).unwrap())
        .sound(0, &[], 64)
        .sound(1, b"text", 0)
        .arrives(0, fed)
        .fed_by(move || keyboard.write_all(b"x").unwrap())
}

fn fs() -> Subject {
    let dir = tempfile::tempdir().unwrap();
    let message = |opcode: u32, body: &[u8]| {
        let len = u32::try_from(40 + body.len()).unwrap();
        let mut bytes = [len.to_le_bytes(), opcode.to_le_bytes()].concat();
        bytes.extend(7u64.to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
        bytes.resize(40, 0);
        bytes.extend(body);
        bytes
    };
    // FUSE_FORGET and FUSE_GETATTR of the root.
    let mut subject = Subject::new("fs", FsDevice::open("share", dir.path()).unwrap())
        .sound(0, &message(2, &1u64.to_le_bytes()), 0)
        .sound(1, &message(3, &[0; 16]), 120);
    subject._dir = Some(dir);
    subject
}

fn mem() -> Subject {
    let region = MemRegion {
        start: 1 << 32,
        // More blocks than a turn gives back.
        len: 40 * BLOCK_SIZE,
    };
    let device = MemDevice::new(region).unwrap();
    // The state of a block that does not exist.
    Subject::new("mem", device).sound(0, &[3; 24], 10)
}

fn net() -> Subject {
    let (nic, wire) = MemoryNic::pair();
    Subject::new("net", NetDevice::new(Box::new(nic)).unwrap())
        .sound(0, &[], 2048)
        .sound(1, &[0; 12 + 60], 0)
        // An unknown command.
        .sound(2, &[0xff, 0], 1)
        .arrives(0, fed)
        .fed_by(move || wire.send(&[0; 60]))
}

/// With two queue pairs; the driver enables the second one before a frame arrives on it.
fn net_pairs() -> Subject {
    let (nics, wires): (Vec<Box<dyn Nic>>, Vec<_>) = (0..2)
        .map(|_| {
            let (nic, wire) = MemoryNic::pair();
            (Box::new(nic) as Box<dyn Nic>, wire)
        })
        .unzip();
    Subject::new("net with two pairs", NetDevice::over(nics).unwrap())
        .sound(0, &[], 2048)
        .sound(1, &[0; 12 + 60], 0)
        .sound(2, &[], 2048)
        .sound(3, &[0; 12 + 60], 0)
        // Zero pairs.
        .sound(4, &[4, 0, 0, 0], 1)
        .arrives(0, fed)
        .arrives(2, |rig| {
            use vm_memory::{Bytes, GuestAddress};
            let at = super::DATA + 0x8000;
            let two_pairs = [4, 0, 2, 0];
            rig.mem.write_slice(&two_pairs, GuestAddress(at)).unwrap();
            rig.drivers[4].add(&[(at, 4)], &[(at + 8, 1)]);
            rig.notify(4);
            let _ = rig.drivers[4].take_used();
            fed(rig);
        })
        .fed_by(move || wires.iter().for_each(|wire| wire.send(&[0; 60])))
}

fn pmem() -> Subject {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(4096).unwrap();
    let mut device = PmemDevice::open(file.path()).unwrap();
    device.place(1 << 32);
    // A flush.
    Subject::new("pmem", device).sound(0, &[0; 4], 4)
}

/// A control message of a driver: its port, what it says, and that it is so.
fn say(rig: &mut Rig, port: u8, event: u8) {
    use vm_memory::{Bytes, GuestAddress};
    let at = super::DATA + 0x8000;
    let message = [port, 0, 0, 0, event, 0, 1, 0];
    rig.mem.write_slice(&message, GuestAddress(at)).unwrap();
    rig.drivers[3].add(&[(at, 8)], &[]);
    rig.notify(3);
    let _ = rig.drivers[3].take_used();
}

/// With one port. A driver that is ready is told of it, and opens it before bytes arrive.
fn ports() -> Subject {
    let (stream, mut host) = UnixStream::pair().unwrap();
    let mut device = PortsDevice::new(["port"]).unwrap();
    device.connect("port", stream).unwrap();
    host.set_nonblocking(true).unwrap();
    Subject::new("ports", device)
        .sound(1, b"text", 0)
        .sound(2, &[], 72)
        .sound(3, &[1, 0, 0, 0, 6, 0, 1, 0], 0)
        .sound(4, &[], 64)
        .sound(5, b"text", 0)
        .arrives(2, |rig| say(rig, 0, 0))
        .arrives(4, |rig| {
            say(rig, 1, 6);
            fed(rig);
        })
        .fed_by(move || {
            // What the driver sent makes room.
            while std::io::Read::read(&mut host, &mut [0; 4096]).is_ok_and(|len| len > 0) {}
            host.write_all(b"x").unwrap();
        })
}

fn rng() -> Subject {
    Subject::new("rng", RngDevice::new()).sound(0, &[], 64)
}

/// A packet of the guest (§5.10.6): from port 1 to port 2, where no program listens.
pub(super) fn packet(operation: u16) -> Vec<u8> {
    let mut bytes = [3u64.to_le_bytes(), 2u64.to_le_bytes()].concat();
    bytes.extend(1u32.to_le_bytes());
    bytes.extend(2u32.to_le_bytes());
    bytes.extend(0u32.to_le_bytes());
    bytes.extend(1u16.to_le_bytes());
    bytes.extend(operation.to_le_bytes());
    bytes.resize(44, 0);
    bytes
}

const REQUEST: u16 = 1;
const RESET: u16 = 3;

fn vsock() -> Subject {
    Subject::new("vsock", VsockDevice::in_process(3).unwrap())
        .sound(0, &[], 4096)
        .sound(1, &packet(RESET), 0)
        .arrives(0, |rig| {
            use vm_memory::{Bytes, GuestAddress};
            let at = super::DATA + 0x8000;
            let packet = packet(REQUEST);
            rig.mem.write_slice(&packet, GuestAddress(at)).unwrap();
            rig.drivers[1].add(&[(at, 44)], &[]);
            rig.notify(1);
            // Its own answer is taken, so that the next one belongs to the other queue.
            let _ = rig.drivers[1].take_used();
        })
        // Data flow only when the driver has made the event's buffer available again.
        .sound(2, &[], 4)
        .stands(2)
        .arrives(2, |rig| call(rig, VsockDevice::reset_transport))
}
