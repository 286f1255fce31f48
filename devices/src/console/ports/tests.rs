use std::io::{Read as _, Write as _};
use std::sync::atomic::Ordering::SeqCst;

use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::GuestRam;
use crate::console::MAX_TRANSMIT;
use crate::testing::{CountingInterrupt, DriverQueue, backend_readable, memory, start, stop};

const AGENT: &str = "org.qemu.guest_agent.0";
const OTHER: &str = "com.example.0";
const TO_GUEST: u64 = 0x30_0000;
const FROM_GUEST: u64 = 0x20_0000;

/// A device with two ports, and its driver.
struct Rig {
    mem: GuestRam,
    queues: Vec<DriverQueue>,
    device: PortsDevice,
    irq: Arc<CountingInterrupt>,
}

impl Rig {
    fn new() -> Self {
        let mem = memory(4 << 20);
        let device = PortsDevice::new([AGENT, OTHER]).unwrap();
        let count = device.info().queue_sizes.len() as u64;
        let queues = (1..=count).map(|n| DriverQueue::new(&mem, n << 16, 16));
        let mut rig = Self {
            queues: queues.collect(),
            mem,
            device,
            irq: Arc::default(),
        };
        let queues: Vec<_> = rig.queues.iter().collect();
        start(&mut rig.device, &queues, &rig.irq, F_MULTIPORT);
        rig
    }

    /// A rig whose driver has set up the ports, and read all that it was told.
    fn ready() -> Self {
        let mut rig = Self::new();
        rig.say(0, 0, 1);
        rig.say(1, 3, 1);
        rig.say(2, 3, 1);
        while rig.told().is_some() {}
        rig
    }

    fn send(&mut self, queue: u16, bytes: &[u8]) -> Result<Progress, Fault> {
        let at = GuestAddress(FROM_GUEST);
        self.mem.write_slice(bytes, at).unwrap();
        let len = u32::try_from(bytes.len()).unwrap();
        self.queues[usize::from(queue)].add(&[(FROM_GUEST, len)], &[]);
        self.device.on_queue(queue)
    }

    /// Sends a control message.
    fn say(&mut self, port: u32, event: u16, value: u16) {
        let message = [
            &port.to_le_bytes()[..],
            &event.to_le_bytes(),
            &value.to_le_bytes(),
        ];
        let _ = self.send(CONTROL_TX, &message.concat()).unwrap();
        self.queues[3].take_used().unwrap();
    }

    /// Gives a buffer, and returns what the device put into it.
    fn got(&mut self, queue: u16) -> Option<Vec<u8>> {
        let driver = &mut self.queues[usize::from(queue)];
        if driver.outstanding() == 0 {
            driver.add(&[], &[(TO_GUEST, 100)]);
        }
        let _ = self.device.on_queue(queue).unwrap();
        let used = self.queues[usize::from(queue)].take_used()?;
        let mut bytes = vec![0; used.len as usize];
        let at = GuestAddress(TO_GUEST);
        self.mem.read_slice(&mut bytes, at).unwrap();
        Some(bytes)
    }

    /// Returns the next control message: port, event, value and what follows.
    fn told(&mut self) -> Option<(u8, u8, u8, String)> {
        let bytes = self.got(CONTROL_RX)?;
        let name = String::from_utf8(bytes[8..].to_vec()).unwrap();
        Some((bytes[0], bytes[4], bytes[6], name))
    }

    fn connect(&mut self, name: &str) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.device.connect(name, theirs).unwrap();
        ours.set_nonblocking(true).unwrap();
        ours
    }

    fn counter(&self, name: &str) -> u64 {
        crate::testing::counter(&self.device, name)
    }
}

fn told(port: u8, event: u8, value: u8, name: &str) -> Option<(u8, u8, u8, String)> {
    Some((port, event, value, name.to_owned()))
}

#[test]
fn a_driver_learns_which_ports_there_are_what_they_are_called_and_who_has_them_open() {
    let mut rig = Rig::new();
    assert_eq!(rig.told(), None, "before the driver is ready");
    let _host = rig.connect(AGENT);
    rig.say(0, 0, 1);
    assert_eq!(rig.told(), told(1, 1, 1, ""));
    assert_eq!(rig.told(), told(2, 1, 1, ""));
    assert_eq!(rig.told(), None);
    rig.say(1, 3, 1);
    assert_eq!(rig.told(), told(1, 7, 1, AGENT));
    assert_eq!(rig.told(), told(1, 6, 1, ""));
    rig.say(2, 3, 1);
    assert_eq!(rig.told(), told(2, 7, 1, OTHER));
    assert_eq!(rig.told(), None, "nobody has it open");
    let mut config = [9; 8];
    rig.device.info().config.read(0, &mut config);
    assert_eq!(
        config,
        [0, 0, 0, 0, 3, 0, 0, 0],
        "three ports with the console's"
    );
    // The host's ends come and go.
    let _other = rig.connect(OTHER);
    assert_eq!(rig.told(), told(2, 6, 1, ""));
    rig.device.disconnect(OTHER).unwrap();
    assert_eq!(rig.told(), told(2, 6, 0, ""));
    assert!(rig.irq.queue.load(SeqCst) > 0);
}

#[test]
fn bytes_flow_both_ways_while_both_sides_have_the_port_open() {
    let mut rig = Rig::ready();
    let mut host = rig.connect(AGENT);
    assert!(!rig.device.is_open(AGENT).unwrap());
    host.write_all(b"early").unwrap();
    assert!(!backend_readable(&rig.device), "nobody takes it");
    assert_eq!(rig.got(4), None);
    rig.say(1, 6, 1);
    assert!(rig.device.is_open(AGENT).unwrap());
    assert_eq!(rig.got(4).unwrap(), b"early");
    assert_eq!(rig.send(5, b"answer").unwrap(), Progress::Idle);
    let mut bytes = [0; 16];
    assert_eq!(host.read(&mut bytes).unwrap(), 6);
    assert_eq!(&bytes[..6], b"answer");
    assert_eq!(rig.counter("tx_bytes"), 6);
    assert_eq!(rig.counter("rx_bytes"), 5);
    // The other port is another stream.
    assert_eq!(rig.got(6), None);
    // Closed in the guest: bytes wait.
    rig.say(1, 6, 0);
    host.write_all(b"late").unwrap();
    assert_eq!(rig.got(4), None);
    assert!(!backend_readable(&rig.device));
    rig.say(1, 6, 1);
    assert!(backend_readable(&rig.device));
    let _ = rig.device.on_backend().unwrap();
    assert_eq!(rig.got(4).unwrap(), b"late");
}

#[test]
fn what_nobody_reads_is_lost_and_what_is_not_read_yet_waits() {
    let mut rig = Rig::ready();
    assert_eq!(rig.send(5, b"nobody").unwrap(), Progress::Idle);
    assert!(rig.queues[5].take_used().is_some());
    assert_eq!(rig.counter("lost_bytes"), 6);

    let mut host = rig.connect(AGENT);
    let mut sent = Vec::new();
    let mut round = 0u8;
    // Until the socket is full, and then one more, which stays in the ring.
    loop {
        round = round.wrapping_add(1);
        let bytes = vec![round; 100_000];
        while rig.send(5, &bytes).unwrap() == Progress::More {
            if rig.device.on_queue(5).unwrap() == Progress::Idle {
                break;
            }
        }
        sent.extend(bytes);
        if rig.queues[5].take_used().is_none() {
            break;
        }
    }
    assert!(!backend_readable(&rig.device), "the host reads nothing");
    let mut read = Vec::<u8>::new();
    let mut bytes = vec![0; 65536];
    while read.len() < sent.len() {
        match host.read(&mut bytes) {
            Ok(len) => read.extend(&bytes[..len]),
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                assert!(backend_readable(&rig.device), "there is room again");
                let _ = rig.device.on_backend().unwrap();
            }
        }
    }
    assert!(read == sent);
    assert!(!backend_readable(&rig.device));
    assert_eq!(rig.counter("lost_bytes"), 6);
}

#[test]
fn more_than_a_turn_that_waited_for_a_full_socket_is_sent_to_its_end() {
    let mut rig = Rig::ready();
    let mut host = rig.connect(AGENT);
    // The most that the driver of Linux puts into a buffer, until the ring is full of them.
    let bytes: Vec<u8> = (0..32 << 10).map(|n: u32| n.to_le_bytes()[0]).collect();
    rig.mem
        .write_slice(&bytes, GuestAddress(FROM_GUEST))
        .unwrap();
    let (count, len) = (16, u32::try_from(bytes.len()).unwrap());
    for _ in 0..count {
        rig.queues[5].add(&[(FROM_GUEST, len)], &[]);
    }
    while rig.device.on_queue(5).unwrap() == Progress::More {}
    let (mut read, mut piece) = (0, vec![0; 65536]);
    while read < count * bytes.len() {
        match host.read(&mut piece) {
            Ok(len) => read += len,
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                assert!(backend_readable(&rig.device), "{read} bytes came");
                while rig.device.on_backend().unwrap() == Progress::More {}
            }
        }
    }
    assert!(!backend_readable(&rig.device));
}

#[test]
fn an_end_that_goes_away_is_told_once_and_does_not_spin() {
    let mut rig = Rig::ready();
    let host = rig.connect(AGENT);
    assert_eq!(rig.told(), told(1, 6, 1, ""));
    rig.say(1, 6, 1);
    drop(host);
    assert!(!backend_readable(&rig.device) || rig.device.on_backend().is_ok());
    assert_eq!(rig.got(4), None);
    assert_eq!(rig.told(), told(1, 6, 0, ""));
    assert_eq!(rig.told(), None);
    assert!(!backend_readable(&rig.device));
    // One that is found out by a transmission.
    drop(rig.connect(AGENT));
    assert_eq!(rig.told(), told(1, 6, 1, ""));
    let _ = rig.send(5, b"x").unwrap();
    assert_eq!(rig.told(), told(1, 6, 0, ""));
    // And one that nobody in the guest has open: it is not waited for.
    let mut rig = Rig::ready();
    drop(rig.connect(OTHER));
    assert!(!backend_readable(&rig.device));
}

#[test]
fn input_without_buffers_is_not_waited_for() {
    let mut rig = Rig::ready();
    let mut host = rig.connect(AGENT);
    rig.say(1, 6, 1);
    host.write_all(b"hello").unwrap();
    assert!(backend_readable(&rig.device));
    assert_eq!(rig.device.on_backend().unwrap(), Progress::Idle);
    assert!(!backend_readable(&rig.device), "no buffers, no interest");
    assert_eq!(rig.got(4).unwrap(), b"hello");
}

#[test]
fn drivers_that_break_the_rules_are_faults() {
    for bytes in [0usize, 7] {
        let mut rig = Rig::ready();
        assert!(rig.send(CONTROL_TX, &vec![0; bytes]).is_err(), "{bytes}");
    }
    let mut rig = Rig::new();
    rig.queues[2].add(&[], &[(TO_GUEST, 7)]);
    let message = [0, 0, 0, 0, 0, 0, 1, 0];
    let at = GuestAddress(FROM_GUEST);
    rig.mem.write_slice(&message, at).unwrap();
    rig.queues[3].add(&[(FROM_GUEST, 8)], &[]);
    assert!(rig.device.on_queue(CONTROL_TX).is_err(), "no room");
    let mut rig = Rig::ready();
    let _host = rig.connect(AGENT);
    let half = u32::try_from(MAX_TRANSMIT / 2).unwrap();
    rig.queues[5].add(
        &[(FROM_GUEST, half), (FROM_GUEST, half), (FROM_GUEST, 1)],
        &[],
    );
    assert!(rig.device.on_queue(5).is_err(), "too long");
}

#[test]
fn messages_for_ports_that_are_not_there_change_nothing() {
    let mut rig = Rig::ready();
    for (port, event, value) in [
        (0, 3, 1),
        (3, 3, 1),
        (u32::MAX, 6, 1),
        (1, 0, 0),
        (1, 1, 1),
        (1, 2, 1),
        (1, 7, 1),
        (1, 0xffff, 1),
    ] {
        rig.say(port, event, value);
        assert_eq!(rig.told(), None, "{port} {event} {value}");
    }
    // Any number of greetings is one, after the first, for which a buffer is there.
    (0..50).for_each(|_| rig.say(0, 0, 1));
    assert_eq!(rig.told(), told(1, 1, 1, ""));
    assert_eq!(rig.told(), told(1, 1, 1, ""));
    assert_eq!(rig.told(), told(2, 1, 1, ""));
    assert_eq!(rig.told(), None);
    // A driver that knows one port is heard, and nothing comes of it.
    assert_eq!(rig.send(CONSOLE_TX, b"text").unwrap(), Progress::Idle);
    assert!(rig.queues[1].take_used().is_some());
    assert_eq!(rig.counter("lost_bytes"), 4);
}

#[test]
fn a_reset_forgets_the_driver_and_a_pause_does_not() {
    let mut rig = Rig::ready();
    let _host = rig.connect(AGENT);
    rig.say(1, 6, 1);
    let running = stop(&mut rig.device);
    assert_eq!(running.len(), 8);
    assert!(rig.device.is_open(AGENT).unwrap());
    for queue in running {
        rig.device.start_queue(queue).unwrap();
    }
    assert_eq!(rig.told(), told(1, 6, 1, ""));
    stop(&mut rig.device);
    rig.device.reset();
    assert!(!rig.device.is_open(AGENT).unwrap());
}

#[test]
fn a_restored_device_goes_on_and_tells_who_is_there_now() {
    let mut rig = Rig::ready();
    let _host = rig.connect(AGENT);
    rig.say(1, 6, 1);
    let _ = rig.told();
    let saved = rig.device.save();
    let mut other = Rig::new();
    other.device.restore(&saved).unwrap();
    assert!(other.device.is_open(AGENT).unwrap());
    assert_eq!(other.told(), told(1, 6, 0, ""), "the clone has no host yet");
    assert_eq!(other.told(), told(2, 6, 0, ""));
    let mut host = other.connect(AGENT);
    assert_eq!(other.told(), told(1, 6, 1, ""));
    host.write_all(b"x").unwrap();
    assert_eq!(other.got(4).unwrap(), b"x");
    for (version, bytes) in [
        (2, vec![0, 0]),
        (1, vec![0]),
        (1, vec![0, 32]),
        (1, vec![0; 3]),
    ] {
        let saved = SavedDevice { version, bytes };
        assert!(other.device.restore(&saved).is_err(), "{saved:?}");
    }
}

#[test]
fn names_that_no_port_can_have_are_refused() {
    let long = "x".repeat(65);
    for names in [
        &[""][..],
        &["a/b"],
        &["a\n"],
        &[&long],
        &["a", "a"],
        &[],
        &["a"; 9],
    ] {
        assert!(
            PortsDevice::new(names.iter().copied()).is_err(),
            "{names:?}"
        );
    }
    let eight: Vec<String> = (0..8).map(|n| n.to_string()).collect();
    let mut device = PortsDevice::new(eight).unwrap();
    assert_eq!(device.info().queue_sizes.len(), 20);
    let (stream, _ours) = UnixStream::pair().unwrap();
    let error = device.connect("8", stream).unwrap_err();
    assert!(
        error.to_string().contains("there is no port \"8\""),
        "{error}"
    );
}
